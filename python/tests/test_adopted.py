"""Memory of other objects that becomes a buffer, and single buffers that are evicted."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy
import pytest
from conftest import MIB, check, fill

import vramp


class Foreign:
    """An array of another library in the memory of the simulated card."""

    def __init__(self, block: vramp.Allocation, **entries: object) -> None:
        self.block = block
        self.entries = entries

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.block.size // 4,),
            "typestr": "<f4",
            "data": (self.block.ptr, False),
            "version": 3,
            "stream": 1,
        } | self.entries


def test_memory_of_the_pool_becomes_spillable_without_a_copy(tiers: vramp.Tiers) -> None:
    block = tiers.pool.malloc(16 * MIB)
    address = block.ptr
    numpy.asarray(block.array())[:] = 7
    buffer = tiers.adopt(block)
    assert buffer.is_adopted and buffer.is_resident and buffer.nbytes == 16 * MIB
    with buffer.lease("r") as view:
        assert view.ptr == address and (numpy.asarray(view) == 7).all()
    with pytest.raises(vramp.InUseError):
        block.free()
    alive = weakref.ref(block)
    del block
    assert alive() is not None and tiers.pool.stats().live == 16 * MIB
    assert buffer.spill() > 0
    assert alive() is None and tiers.pool.stats().live == 0, "its memory was freed"
    assert not buffer.is_adopted and buffer.is_deferred
    with buffer.lease("rw") as view:
        assert view.ptr == buffer.ptr and (numpy.asarray(view) == 7).all()


def test_memory_of_a_region_is_not_adopted(tiers: vramp.Tiers) -> None:
    with vramp.region("weights", device=tiers.pool):
        block = tiers.pool.malloc(4 * MIB)
    numpy.asarray(block.array())[:] = 7
    for memory in (block, block.array(), Foreign(block)):
        with pytest.raises(vramp.UnsupportedError, match='region "weights"'):
            tiers.adopt(memory)
    assert tiers.stats().buffers == 0
    vramp.pause("weights", device=tiers.pool)
    vramp.resume("weights", device=tiers.pool)
    assert (numpy.asarray(block.array()) == 7).all()
    block.free()


def test_arrays_of_other_libraries_are_kept_until_they_are_evicted(tiers: vramp.Tiers) -> None:
    foreign = Foreign(tiers.pool.malloc(4 * MIB), shape=(1024, 1024))
    numpy.asarray(foreign.block.array())[:] = 3
    alive = weakref.ref(foreign)
    buffer = tiers.adopt(foreign)
    del foreign
    gc.collect()
    assert alive() is not None and buffer.nbytes == 4 * MIB
    # The memory that a request lacks is that of the object.
    tiers.pool.malloc(62 * MIB).free()
    assert alive() is None and buffer.is_deferred
    check(buffer, 3)


def test_an_adopted_buffer_that_is_dropped_frees_its_object(tiers: vramp.Tiers) -> None:
    foreign = Foreign(tiers.pool.malloc(MIB))
    alive = weakref.ref(foreign)
    buffer = tiers.adopt(foreign)
    del foreign
    del buffer
    assert alive() is None and tiers.pool.stats().live == 0


def test_an_array_of_the_package(tiers: vramp.Tiers) -> None:
    array = tiers.pool.malloc(MIB).array((64, 64), "int32", offset=4096)
    numpy.asarray(array)[:] = 5
    buffer = tiers.adopt(array)
    assert buffer.nbytes == 4 * 64 * 64
    with buffer.lease("r", shape=(64, 64), dtype="int32") as view:
        assert view.ptr == array.ptr and (numpy.asarray(view) == 5).all()


def test_memory_of_the_host_is_copied(tiers: vramp.Tiers) -> None:
    data = numpy.arange(1000, dtype="int64")
    buffer = tiers.adopt(data[::2])
    assert not buffer.is_adopted and buffer.nbytes == 4000
    data[:] = 0
    with buffer.lease("r", dtype="int64") as view:
        assert (numpy.asarray(view) == numpy.arange(0, 1000, 2)).all()
    assert tiers.adopt(b"abc").read() == b"abc"


def test_what_cannot_be_adopted_is_refused(tiers: vramp.Tiers) -> None:
    block = tiers.pool.malloc(MIB)
    for entries in ({"strides": (8,)}, {"mask": object()}):
        with pytest.raises(vramp.OptionError):
            tiers.adopt(Foreign(block, **entries))
    for wrong in (7, None, "text"):
        with pytest.raises(TypeError):
            tiers.adopt(wrong)
    with pytest.raises(vramp.RangeError):
        tiers.adopt(b"")
    with pytest.raises(vramp.RangeError):
        tiers.adopt(Foreign(block, shape=(0,)))
    block.free()
    with pytest.raises(vramp.UnknownPointerError):
        tiers.adopt(block)


def test_a_controller_registers_memory(tiers: vramp.Tiers) -> None:
    with vramp.Controller(tiers) as controller:
        deferred: list[int] = []

        class Client:
            def deferred(self, buffer: vramp.Buffer) -> None:
                deferred.append(buffer.id)

        client: Any = Client()
        controller.add_client(client)
        buffer = controller.register(Foreign(tiers.pool.malloc(MIB)))
        assert buffer.is_adopted
        buffer.spill()
        controller.flush()
        assert deferred == [buffer.id]


def test_one_buffer_is_evicted_by_its_name(tiers: vramp.Tiers) -> None:
    first, second = tiers.buffer(16 * MIB), tiers.buffer(16 * MIB)
    assert first.spill() == 0, "it has no memory"
    fill(first, 1)
    fill(second, 2)
    assert first.spill() == 16 * MIB
    assert (first.is_deferred, second.is_deferred) == (True, False)
    with second.lease("r"), pytest.raises(vramp.InUseError):
        second.spill()
    with pytest.raises(vramp.TierFullError):
        second.spill_to("disk")
    wrong: Any
    for wrong in ("device", "peer"):
        with pytest.raises(TypeError):
            second.spill_to(wrong)
    check(first, 1)
    check(second, 2)


def test_one_buffer_moves_down_to_the_disk(tmp_path: Path) -> None:
    with vramp.open("sim:h200", limit="64MiB") as pool:
        with vramp.Tiers(pool, host="128MiB", disk=tmp_path) as tiers:
            buffer = tiers.buffer(16 * MIB)
            fill(buffer, 6)
            assert buffer.spill_to("host") == 16 * MIB
            assert (tiers.stats().host, tiers.stats().disk) == (16 * MIB, 0)
            buffer.spill_to("disk")
            assert (tiers.stats().host, tiers.stats().disk) == (0, 16 * MIB)
            check(buffer, 6)


def test_the_last_stream(tiers: vramp.Tiers) -> None:
    buffer = tiers.buffer(MIB)
    assert buffer.last_stream is None
    with buffer.lease("rw", 0x7000):
        pass
    assert buffer.last_stream == 0x7000
    stream = tiers.pool.create_stream()
    with buffer.lease("rw", stream):
        assert buffer.last_stream not in (None, 0, 0x7000)
    with buffer.lease("rw"):
        assert buffer.last_stream == 0
