"""Stores of the program in place of a directory."""

from __future__ import annotations

import gc
import threading

import pytest
from conftest import MIB, check, fill

import vramp


class _Failing:
    """Keeps objects, and fails on request."""

    def __init__(self) -> None:
        self.objects: dict[int, bytes] = {}
        self.fails = False
        self.guard = threading.Lock()

    def put(self, key: int, data: bytes) -> None:
        if self.fails:
            raise ConnectionError("the store is away")
        with self.guard:
            self.objects[key] = data

    def get(self, key: int) -> bytes:
        if self.fails:
            raise ConnectionError("the store is away")
        return self.objects[key]

    def delete(self, key: int) -> None:
        with self.guard:
            self.objects.pop(key, None)


def test_contents_go_to_a_mapping_and_come_back(pool: vramp.Pool) -> None:
    objects: dict[int, bytes] = {}
    with vramp.Tiers(pool, host="64MiB", store=objects, disk_limit="1GiB") as tiers:
        buffers = [tiers.buffer(4 * MIB) for _ in range(4)]
        for byte, buffer in enumerate(buffers):
            fill(buffer, byte)
            assert buffer.spill_to("disk") == 4 * MIB
        assert sum(map(len, objects.values())) >= 16 * MIB
        assert tiers.stats().disk == 16 * MIB
        for byte, buffer in enumerate(buffers):
            check(buffer, byte)
        del buffer
        buffers.clear()
        gc.collect()
        tiers.audit()
    assert objects == {}


def test_a_damaged_copy_is_an_error_of_contents(pool: vramp.Pool) -> None:
    """C says VRAMP_ERROR_CONTENTS: both tell a damaged copy from one that cannot be reached."""
    objects: dict[int, bytes] = {}
    with vramp.Tiers(pool, host="64MiB", store=objects, disk_limit="1GiB") as tiers:
        buffer = tiers.buffer(4 * MIB)
        fill(buffer, 1)
        buffer.spill_to("disk")
        for name, content in objects.items():
            objects[name] = bytes([content[0] ^ 1]) + content[1:]
        with pytest.raises(vramp.ContentsError), buffer.lease("r", timeout=1.0):
            pass


def test_an_exception_of_a_store_loses_nothing(pool: vramp.Pool) -> None:
    store = _Failing()
    with vramp.Tiers(pool, host="64MiB", store=store, disk_limit="1GiB") as tiers:
        first, second = tiers.buffer(4 * MIB), tiers.buffer(4 * MIB)
        fill(first, 1)
        fill(second, 2)
        first.spill_to("disk")
        store.fails = True
        with pytest.raises(vramp.VrampError):
            second.spill_to("disk")
        assert tiers.stats().failures > 0
        with pytest.raises(vramp.VrampError, match="the store is away"), first.lease("r", timeout=1.0):
            pass
        check(second, 2)
        store.fails = False
        check(first, 1)
        second.spill_to("disk")
        check(second, 2)
        tiers.audit()


def test_an_allocation_evicts_to_a_store_while_threads_run() -> None:
    """The store runs Python code while threads, which hold the interpreter in turn, allocate and lease."""
    objects: dict[int, bytes] = {}
    with (
        vramp.open("sim:h200", limit="128MiB") as pool,
        vramp.Tiers(pool, host="8MiB", store=objects, disk_limit="1GiB") as tiers,
    ):
        buffers = [tiers.buffer(8 * MIB) for _ in range(24)]
        failures: list[BaseException] = []

        def work(part: int) -> None:
            try:
                for byte in range(3):
                    for buffer in buffers[part::4]:
                        fill(buffer, 16 * part + byte)
                        pool.malloc(4 * MIB)
                        check(buffer, 16 * part + byte)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(part,)) for part in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert failures == [] and not any(thread.is_alive() for thread in threads)
        assert objects
        tiers.audit()


def test_what_is_no_store_is_refused(pool: vramp.Pool, tmp_path: object) -> None:
    with pytest.raises(vramp.OptionError, match="disk_limit"):
        vramp.Tiers(pool, host="64MiB", store={})
    with pytest.raises(TypeError, match="put"):
        vramp.Tiers(pool, host="64MiB", store=object(), disk_limit="1GiB")  # type: ignore[arg-type]
    with pytest.raises(vramp.OptionError):
        vramp.Tiers(pool, host="64MiB", disk=str(tmp_path), store={}, disk_limit="1GiB")
