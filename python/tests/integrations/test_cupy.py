"""CuPy: the real memory classes and allocator hooks of the installed version (13.6 and 14.2 are known).

CuPy asks the driver for the current device and the current stream, so these two calls are replaced.
They return what 14.2 returns: a number, and an object with `ptr`.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from array_support import FakeStream, destroyed, pool

import vramp
import vramp.cupy as adaptor
from vramp._adaptors import streams_of

cupy = pytest.importorskip("cupy", reason="CuPy is not installed: pip install cupy-cuda13x")

NULL = SimpleNamespace(ptr=0, device_id=-1)


class Machine:
    """Two devices with simulated pools, and what is current on them."""

    def __init__(self) -> None:
        self.device = 0
        self.stream: object = NULL
        self.emptied = 0
        self.pools = [vramp.open("sim:h200", limit="1GiB") for _ in range(2)]

    def free_all_blocks(self) -> None:
        self.emptied += 1

    def live(self) -> list[int]:
        return [pool.stats().live for pool in self.pools]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    made = Machine()
    monkeypatch.setattr(cupy.cuda.device, "get_device_id", lambda: made.device)
    monkeypatch.setattr(cupy.cuda, "get_current_stream", lambda device=-1: made.stream)
    monkeypatch.setattr(cupy.cuda, "Stream", FakeStream)
    # CuPy's own pool asks the driver for the number of devices.
    monkeypatch.setattr(cupy, "get_default_memory_pool", lambda: made)
    monkeypatch.setattr(adaptor, "device_pool", lambda device: made.pools[device])
    before = cupy.cuda.get_allocator()
    yield made
    gc.collect()
    cupy.cuda.set_allocator(before)
    adaptor._installed = adaptor._malloc = adaptor._previous = None
    for pool in made.pools:
        pool.audit()
        assert pool.stats().live == 0
        pool.close()


def array_of(pointer: Any) -> SimpleNamespace:
    """An array as far as the adaptor sees it: `data` is its cupy.cuda.MemoryPointer."""
    return SimpleNamespace(data=pointer)


def test_an_allocation_is_vramps_and_is_freed_with_the_last_reference(machine: Machine) -> None:
    adaptor.install()
    pointer = cupy.cuda.alloc(1000)
    assert machine.live() == [1000, 0]
    assert pointer.ptr % 512 == 0 and pointer.mem.size == 1000 and pointer.device_id == 0
    view = pointer + 100
    del pointer
    assert machine.live() == [1000, 0], "the view keeps it"
    del view
    assert machine.live() == [0, 0]


def test_memory_comes_from_the_device_that_is_current(machine: Machine) -> None:
    adaptor.install()
    first = cupy.cuda.alloc(1000)
    machine.device = 1
    second = cupy.cuda.alloc(3000)
    assert machine.live() == [1000, 3000]
    assert (first.device_id, second.device_id) == (0, 1)
    machine.device = 0
    del second
    assert machine.live() == [1000, 0]


def test_memory_is_freed_on_the_stream_of_its_allocation(machine: Machine) -> None:
    adaptor.install()
    machine.stream = stream = FakeStream(0x1000)
    pointer = cupy.cuda.alloc(4 << 20)
    address = pointer.ptr
    machine.stream = NULL
    del pointer
    machine.stream = stream
    assert cupy.cuda.alloc(4 << 20).ptr == address, "the stream reuses it at once"


def test_a_stream_lives_as_long_as_memory_of_it(machine: Machine, destroyed: list[int]) -> None:
    adaptor.install()
    machine.stream = FakeStream(0x1000)
    pointer = cupy.cuda.alloc(4096)
    machine.stream = NULL
    table = streams_of(machine.pools[0])
    assert table.sweep() == 0 and destroyed == []
    del pointer
    assert table.sweep() == 1 and destroyed == [0x1000]


def test_a_thousand_streams_do_not_pile_up(machine: Machine, destroyed: list[int]) -> None:
    adaptor.install()
    for index in range(1000):
        machine.stream = FakeStream(0x1000 + 16 * index)
        cupy.cuda.alloc(4096)
    machine.stream = NULL
    assert len(streams_of(machine.pools[0])) <= 9
    assert len(destroyed) >= 990


def test_a_stream_of_another_library_is_not_kept(machine: Machine) -> None:
    adaptor.install()
    machine.stream = SimpleNamespace(ptr=0x7000, device_id=0)
    cupy.cuda.alloc(4096)
    assert len(streams_of(machine.pools[0])) == 0
    adaptor.forget_stream(machine.stream)


def test_zero_bytes_have_a_null_pointer_and_no_memory(machine: Machine) -> None:
    adaptor.install()
    pointer = cupy.cuda.alloc(0)
    assert (pointer.ptr, pointer.device_id) == (0, 0)
    assert machine.pools[0].stats().allocated == 0


def test_out_of_memory_is_cupys_exception_with_the_report(machine: Machine) -> None:
    adaptor.install()
    kept = cupy.cuda.alloc(1 << 20)
    with pytest.raises(cupy.cuda.memory.OutOfMemoryError) as caught:
        cupy.cuda.alloc(4 << 30)
    assert isinstance(caught.value, MemoryError)
    assert "4,294,967,296" in str(caught.value) and "1,073,741,824" in str(caught.value)
    assert isinstance(caught.value.__cause__, vramp.OutOfMemoryError)
    assert caught.value.__cause__.requested == 4 << 30
    assert machine.emptied == 1, "CuPy's own pool was emptied first"
    del kept
    assert cupy.cuda.alloc(512 << 20).ptr, "it recovers"


def test_garbage_is_collected_before_an_allocation_fails(machine: Machine) -> None:
    adaptor.install()
    gc.disable()
    try:
        cycle = [cupy.cuda.alloc(800 << 20)]
        cycle.append(cycle)
        del cycle
        assert machine.live()[0] == 800 << 20
        assert cupy.cuda.alloc(800 << 20).ptr
    finally:
        gc.enable()


def test_uninstall_restores_the_allocator_and_keeps_arrays(machine: Machine) -> None:
    before = cupy.cuda.get_allocator()
    adaptor.install()
    adaptor.install()
    pointer = cupy.cuda.alloc(1000)
    adaptor.uninstall()
    adaptor.uninstall()
    assert cupy.cuda.get_allocator() == before
    assert machine.live() == [1000, 0]
    del pointer


def test_uninstall_does_not_drop_an_allocator_that_was_set_since(machine: Machine) -> None:
    def other(nbytes: int) -> None:
        raise AssertionError

    adaptor.install()
    cupy.cuda.set_allocator(other)
    with pytest.raises(vramp.InUseError, match="set_allocator"):
        adaptor.uninstall()
    assert cupy.cuda.get_allocator() is other


def test_install_on_one_device_leaves_the_others_to_the_allocator_before(machine: Machine) -> None:
    asked: list[int] = []
    cupy.cuda.set_allocator(lambda nbytes: asked.append(nbytes))
    adaptor.install(device=1)
    cupy.cuda.alloc(10)
    machine.device = 1
    pointer = cupy.cuda.alloc(1000)
    assert asked == [10] and machine.live() == [0, 1000]
    del pointer


def test_using_serves_one_thread_and_one_block(machine: Machine, pool: vramp.Pool) -> None:
    adaptor.install()
    seen: list[int] = []

    def elsewhere() -> None:
        pointer = cupy.cuda.alloc(500)
        seen.append(machine.live()[0])
        del pointer

    with adaptor.using(pool) as given:
        assert given is pool
        kept = cupy.cuda.alloc(1000)
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        machine.device = 1
        other = cupy.cuda.alloc(7)
        machine.device = 0
    assert seen == [500]
    assert machine.live() == [0, 7] and pool.stats().live == 1000
    del kept, other


def test_use_on_another_stream_keeps_that_stream_alive(
    machine: Machine, destroyed: list[int]
) -> None:
    """That the memory waits for the work is checked on a card: simulated work is complete at once."""
    adaptor.install()
    pointer = cupy.cuda.alloc(1000)
    adaptor.record_use(array_of(pointer), FakeStream(0x3000))
    adaptor.record_use(array_of(pointer + 8))
    assert destroyed == [] and len(streams_of(machine.pools[0])) == 1
    del pointer
    machine.pools[0].audit()


def test_use_of_memory_that_is_not_vramps_is_refused(machine: Machine) -> None:
    memory = cupy.cuda.UnownedMemory(0x1000, 100, object(), 0)
    with pytest.raises(vramp.UnknownPointerError, match="install"):
        adaptor.record_use(array_of(cupy.cuda.MemoryPointer(memory, 0)), NULL)


def test_a_simulated_device_is_refused_for_real_arrays(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(cupy.cuda.device, "get_device_id", lambda: 0)
    with pytest.raises(vramp.UnsupportedError, match="simulated"):
        adaptor.install()


def test_the_per_thread_default_stream_is_another_one_in_each_thread(machine: Machine) -> None:
    adaptor.install()
    machine.stream = SimpleNamespace(ptr=2, device_id=0)
    addresses: list[int] = []

    def allocate() -> None:
        memory = cupy.cuda.alloc(4 << 20)
        addresses.append(memory.ptr)

    allocate()
    thread = threading.Thread(target=allocate)
    thread.start()
    thread.join()
    allocate()
    assert addresses[0] == addresses[2] != addresses[1], addresses


def test_ten_thousand_cycles_in_four_threads_leave_nothing(machine: Machine) -> None:
    adaptor.install()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            kept = []
            for index in range(2500):
                kept.append(cupy.cuda.alloc(1 + 37 * index % 100_000))
                if len(kept) > 8:
                    kept.pop(index % 8)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    stats = machine.pools[0].stats()
    assert (stats.live, stats.allocated, stats.freed) == (0, 10_000, 10_000)


def test_the_doctor_names_what_is_missing() -> None:
    """Without a driver, the device is."""
    checks = adaptor.doctor()
    assert checks[0][:2] == ("cupy", True)
    assert all(len(check) == 3 and check[2] for check in checks)
