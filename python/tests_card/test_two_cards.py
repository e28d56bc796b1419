"""Free memory of another card, and reads in place, on two cards: `python -m pytest python/tests_card/test_two_cards.py`."""

from __future__ import annotations

import time
from typing import Any

import pytest

import vramp

cupy = pytest.importorskip("cupy")

MIB = 1 << 20
GIB = 1 << 30
LEN = 512 * MIB


def _fill(buffer: vramp.Buffer, value: int) -> None:
    with buffer.lease("overwrite", dtype="int32") as view:
        array = cupy.asarray(view)
        array[:] = value
        cupy.cuda.Device(0).synchronize()


def _check(buffer: vramp.Buffer, value: int, **lease: Any) -> None:
    with buffer.lease("r", dtype="int32", **lease) as view:
        assert int((cupy.asarray(view) != value).sum()) == 0


def test_contents_go_to_the_other_card_and_move_on_when_it_needs_its_memory() -> None:
    assert cupy.cuda.runtime.getDeviceCount() >= 2, "this test needs two cards"
    cupy.cuda.Device(0).use()
    cupy.zeros(1)
    with (
        vramp.open("cuda:0", limit=4 * LEN) as pool,
        vramp.open("cuda:1") as other,
        vramp.Tiers(pool, host="16GiB", peers={1: 8 * LEN}) as tiers,
    ):
        begun = time.perf_counter()
        buffers = [tiers.buffer(LEN) for _ in range(12)]
        for value, buffer in enumerate(buffers):
            _fill(buffer, value)
        seconds = time.perf_counter() - begun
        stats = tiers.stats()
        print(f"{stats.to_device / GIB:.1f} GiB to card 1 and {stats.to_host / GIB:.1f} to the host in {seconds:.2f} s")
        assert stats.to_device >= 7 * LEN
        for value, buffer in enumerate(buffers):
            _check(buffer, value)
        # Card 1 takes what it has: contents there move on to the host.
        blocks = []
        try:
            while True:
                blocks.append(other.malloc(LEN))
        except vramp.OutOfMemoryError:
            pass
        stats = tiers.stats()
        print(f"card 1 filled by {len(blocks)} blocks; {stats.device_copies / GIB:.1f} GiB of contents left there")
        assert stats.device_copies == 0
        del blocks
        for value, buffer in enumerate(buffers):
            _check(buffer, value)
        tiers.audit()


def test_a_spilled_column_is_read_where_it_lies() -> None:
    cupy.cuda.Device(0).use()
    cupy.zeros(1)
    with vramp.open("cuda:0", limit=4 * LEN) as pool, vramp.Tiers(pool, host="8GiB") as tiers:
        column = tiers.buffer(LEN, readable=True)
        _fill(column, 7)
        assert tiers.evict(LEN) == LEN
        for in_place in (True, True, True, False):
            lease = column.lease("r", dtype="int32", in_place=True)
            with lease as view:
                assert lease.is_in_place is in_place
                begun = time.perf_counter()
                total = int(cupy.asarray(view).sum())
                seconds = time.perf_counter() - begun
                print(f"in place {in_place}: {LEN / seconds / 1e9:.1f} GB/s")
                assert total == 7 * (LEN // 4)
        tiers.audit()
