"""Streams of other libraries, which end with their last reference: the pool forgets each of them first."""

from __future__ import annotations

import gc
import resource
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
from conftest import MIB, fill
from length import CYCLES

import vramp
from vramp import _adaptors
from vramp._adaptors import streams_of


class OwnedStream:
    """A stream that is destroyed with this object, as one of CuPy."""

    alive: ClassVar[set[int]] = set()
    destroyed: ClassVar[list[int]] = []

    def __init__(self, raw: int) -> None:
        self.raw = raw
        OwnedStream.alive.add(raw)

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.raw)

    def __del__(self) -> None:
        OwnedStream.alive.discard(self.raw)
        OwnedStream.destroyed.append(self.raw)


@pytest.fixture(autouse=True)
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The streams that were forgotten. Each was alive then."""
    OwnedStream.alive.clear()
    OwnedStream.destroyed.clear()
    forgotten: list[int] = []
    forget = _adaptors.forget_stream

    def watched(pool: vramp.Pool, raw: int) -> None:
        assert raw in OwnedStream.alive
        forget(pool, raw)
        forgotten.append(raw)

    monkeypatch.setattr(_adaptors, "forget_stream", watched)
    yield forgotten


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


class Foreign:
    """An array of another library."""

    def __init__(self, block: vramp.Allocation, stream: int) -> None:
        self.block = block
        self.stream = stream

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        data = (self.block.ptr, False)
        return {
            "shape": (self.block.size,),
            "typestr": "|u1",
            "data": data,
            "version": 3,
            "stream": self.stream,
        }


def _uses(tiers: vramp.Tiers) -> dict[str, Callable[[Any], object]]:
    """Each way in which a stream is passed, ended before it returns."""
    pool, buffer = tiers.pool, tiers.buffer(4096)
    fill(buffer, 1)
    block = pool.malloc(4096)

    def allocate(stream: Any) -> None:
        pool.deallocate(pool.allocate(4096, stream), stream)

    def lease(stream: Any) -> None:
        with buffer.lease("rw", stream):
            pass

    def lease_set(stream: Any) -> None:
        with tiers.lease([(buffer, "r")], stream):
            pass

    def capsule(stream: Any) -> None:
        with buffer.lease("r", stream) as view:
            view.__dlpack__()

    def free(stream: Any) -> None:
        pool.malloc(4096).free(stream)

    return {
        "malloc": lambda stream: pool.malloc(4096, stream).free(),
        "dropped malloc": lambda stream: pool.malloc(4096, stream),
        "allocate": allocate,
        "free": free,
        "use": block.record_use,
        "use of an address": lambda stream: pool.record_use(block.ptr, stream),
        "lease": lease,
        "set": lease_set,
        "capsule": capsule,
        "adopt": lambda stream: tiers.adopt(pool.malloc(4096), stream=stream),
        "synchronize": tiers.synchronize,
    }


KINDS = [
    "malloc", "dropped malloc", "allocate", "free", "use", "use of an address", "lease", "set", "capsule",
    "adopt", "synchronize",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_is_forgotten_before_it_is_destroyed(
    tiers: vramp.Tiers, kind: str, log: list[int]
) -> None:
    uses = _uses(tiers)
    assert list(uses) == KINDS
    for turn in range(20):
        uses[kind](OwnedStream(0x1000 + 16 * turn))
    gc.collect()
    assert len(OwnedStream.alive) <= 9
    streams_of(tiers.pool).sweep()
    expected = [0x1000 + 16 * turn for turn in range(20)]
    assert sorted(log) == expected and sorted(OwnedStream.destroyed) == expected
    tiers.pool.audit()


@pytest.mark.parametrize("kind", ["lease", "dropped malloc"])
def test_many_streams_leave_nothing(tiers: vramp.Tiers, kind: str) -> None:
    use = _uses(tiers)[kind]
    for turn in range(1000):
        use(OwnedStream(0x1000 + 16 * turn))
    gc.collect()
    objects = len(gc.get_objects())
    for turn in range(CYCLES):
        use(OwnedStream(0x1000 + 16 * turn))
        if turn % 1000 == 0:
            assert len(OwnedStream.alive) <= 9
    gc.collect()
    assert len(OwnedStream.alive) <= 9
    assert len(streams_of(tiers.pool)) <= 9
    assert len(gc.get_objects()) <= objects + 50


def test_what_is_held_keeps_its_stream(tiers: vramp.Tiers) -> None:
    table = streams_of(tiers.pool)
    buffer = tiers.buffer(MIB)
    holders: list[Callable[[int], object]] = [
        lambda raw: buffer.lease("r", OwnedStream(raw)),
        lambda raw: buffer.lease("r", OwnedStream(raw)).acquire(),
        lambda raw: tiers.pool.malloc(4096, OwnedStream(raw)),
    ]
    held = [make(0x1000 + 16 * index) for index, make in enumerate(holders)]
    assert table.sweep() == 0 and len(OwnedStream.alive) == 3
    held.clear()
    assert table.sweep() == 3 and not OwnedStream.alive


def test_two_objects_of_one_stream(tiers: vramp.Tiers, log: list[int]) -> None:
    class Wrapper:
        def __cuda_stream__(self) -> tuple[int, int]:
            return (0, 0x1000)

    table, pool = streams_of(tiers.pool), tiers.pool
    owner = OwnedStream(0x1000)
    pool.malloc(4096, owner).free()
    for _ in range(100):
        pool.malloc(4096, Wrapper()).free()
    assert len(table) == 1 and 0x1000 in OwnedStream.alive
    wrapper = Wrapper()
    pool.malloc(4096, wrapper).free()
    before = len(log)
    del owner
    assert table.sweep() == 0, "the program has the wrapper"
    assert len(log) == before + 1 and OwnedStream.destroyed == [0x1000]
    tiers.pool.audit()


def test_the_stream_of_an_adopted_object_is_forgotten_at_once(tiers: vramp.Tiers) -> None:
    """It is a number, and the object need not keep the stream alive."""

    def adopt(first: int, count: int) -> None:
        for turn in range(first, first + count):
            tiers.adopt(Foreign(block, 0x1000 + 16 * turn))

    block = tiers.pool.malloc(4096)
    adopt(0, 1000)
    resident = _resident()
    adopt(1000, 20_000)
    # A stream that stays registered takes more than 2 KiB.
    assert _resident() - resident < 20 * MIB


def test_numbers_and_default_streams_are_not_kept(tiers: vramp.Tiers) -> None:
    for stream in (None, 0, 1, 0x7000, OwnedStream(0), OwnedStream(1)):
        tiers.pool.malloc(4096, stream).free()
    assert len(streams_of(tiers.pool)) == 0
