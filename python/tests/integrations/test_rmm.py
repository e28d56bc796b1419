"""RMM: the real library of the installed version (25.12 to 26.10), with simulated addresses.

`allocate` and `deallocate` of a resource only pass addresses on, so RMM's C++ runs as it does on a card.
The current device is replaced, because the runtime refuses to name one without a driver.
"""

from __future__ import annotations

import threading

import pytest
from array_support import pool

import vramp
import vramp.rmm as adaptor

rmm = pytest.importorskip("rmm", reason="RMM is not installed: pip install rmm-cu13")


def test_memory_goes_through_rmms_resource(pool: vramp.Pool) -> None:
    resource = adaptor.resource(pool)
    assert isinstance(resource, rmm.mr.CallbackMemoryResource)
    address = resource.allocate(1000)
    assert address % 256 == 0 and pool.stats().live == 1000
    resource.deallocate(address, 1000)
    assert pool.stats().live == 0


def test_the_stream_of_rmm_reaches_the_pool(pool: vramp.Pool) -> None:
    class Stream:
        def __cuda_stream__(self) -> tuple[int, int]:
            return (0, 0x5000)

    resource = adaptor.resource(pool)
    stream = rmm.pylibrmm.stream.Stream(Stream())
    address = resource.allocate(4 << 20, stream)
    resource.deallocate(address, 4 << 20, stream)
    with pool.malloc(4 << 20, 0x5000) as block:
        assert block.ptr == address, "that stream reuses it at once"
    adaptor.forget_stream(stream, pool)


def test_zero_bytes_can_be_allocated_and_freed(pool: vramp.Pool) -> None:
    resource = adaptor.resource(pool)
    resource.deallocate(resource.allocate(0), 0)
    assert pool.stats().allocated == pool.stats().freed


def test_out_of_memory_is_a_memory_error_with_the_report(pool: vramp.Pool) -> None:
    resource = adaptor.resource(pool)
    with pytest.raises(MemoryError) as caught:
        resource.allocate(4 << 30)
    assert "4.00 GiB" in str(caught.value) and "limit of 1.00 GiB" in str(caught.value)
    resource.deallocate(resource.allocate(512 << 20), 512 << 20)


def test_a_handler_spills_until_the_allocation_succeeds(pool: vramp.Pool) -> None:
    resource = adaptor.resource(pool)
    kept = [(resource.allocate(250 << 20), 250 << 20) for _ in range(4)]
    asked: list[int] = []

    def spill(nbytes: int) -> bool:
        asked.append(nbytes)
        resource.deallocate(*kept.pop())
        return True

    spilling = adaptor.spill_on_failure(spill, resource)
    address = spilling.allocate(600 << 20)
    assert 2 <= len(asked) <= 3 and set(asked) == {600 << 20}
    spilling.deallocate(address, 600 << 20)
    for block in kept:
        resource.deallocate(*block)


def test_a_handler_that_gives_up_fails_the_allocation(pool: vramp.Pool) -> None:
    asked: list[int] = []

    def give_up(nbytes: int) -> bool:
        asked.append(nbytes)
        return False

    spilling = adaptor.spill_on_failure(give_up, adaptor.resource(pool))
    with pytest.raises(MemoryError):
        spilling.allocate(4 << 30)
    assert asked == [4 << 30]


def test_an_exception_of_a_handler_fails_the_allocation_with_its_text(pool: vramp.Pool) -> None:
    def spill(nbytes: int) -> bool:
        raise ValueError("the disk is full")

    spilling = adaptor.spill_on_failure(spill, adaptor.resource(pool))
    with pytest.raises(RuntimeError, match="the disk is full"):
        spilling.allocate(4 << 30)
    with pytest.raises(TypeError, match="handler"):
        adaptor.spill_on_failure(None, adaptor.resource(pool))  # type: ignore[arg-type]


def test_other_failures_are_runtime_errors() -> None:
    closed = vramp.open("sim:h200")
    resource = adaptor.resource(closed)
    closed.close()
    with pytest.raises(RuntimeError, match="clos"):
        resource.allocate(100)


def test_the_per_thread_default_stream_is_served(pool: vramp.Pool) -> None:
    resource, own = adaptor.resource(pool), rmm.pylibrmm.stream.PER_THREAD_DEFAULT_STREAM
    address = resource.allocate(4 << 20, own)
    thread = threading.Thread(target=lambda: resource.deallocate(address, 4 << 20, own))
    thread.start()
    thread.join()
    assert pool.stats().live == 0
    resource.deallocate(resource.allocate(4 << 20, own), 4 << 20, own)
    assert pool.stats().live == 0


def test_a_failed_free_is_a_warning_and_does_not_end_the_process(pool: vramp.Pool) -> None:
    resource = adaptor.resource(pool)
    with pytest.warns(RuntimeWarning, match="0x1234"):
        resource.deallocate(0x1234, 10)


def test_install_and_uninstall_are_per_device(
    pool: vramp.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adaptor, "device_pool", lambda device: pool)
    monkeypatch.setattr(adaptor, "_current_device", lambda: 0)
    before = rmm.mr.get_per_device_resource(0)
    made = adaptor.install()
    assert adaptor.install(0) is made is rmm.mr.get_per_device_resource(0)
    assert rmm.mr.get_per_device_resource(1) is not made
    adaptor.uninstall()
    adaptor.uninstall()
    assert rmm.mr.get_per_device_resource(0) is before


def test_a_pool_has_one_resource_which_is_never_freed(pool: vramp.Pool) -> None:
    made = adaptor.resource(pool)
    assert adaptor.resource(pool) is made
    # C++ copies the addresses of its functions, and may call them when Python holds no resource.
    assert adaptor._made[id(pool)] == (pool, made)
    with vramp.open("sim") as other:
        assert adaptor.resource(other) is not made


def test_a_simulated_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaptor, "_current_device", lambda: 0)
    with pytest.raises(vramp.UnsupportedError, match="simulated"):
        adaptor.install()


def test_ten_thousand_cycles_in_four_threads_leave_nothing(pool: vramp.Pool) -> None:
    resource = adaptor.resource(pool)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for index in range(2500):
                size = 1 + 37 * index % 100_000
                resource.deallocate(resource.allocate(size), size)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    stats = pool.stats()
    assert (stats.live, stats.allocated, stats.freed) == (0, 10_000, 10_000)


def test_the_doctor_names_what_is_missing() -> None:
    checks = adaptor.doctor()
    assert checks[0][:2] == ("rmm", True)
    assert all(len(check) == 3 and check[2] for check in checks)
