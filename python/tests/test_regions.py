"""Regions: memory that leaves the card by tag and comes back at its addresses."""

from __future__ import annotations

import ctypes
import pickle
import resource
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import GIB, MIB

import vramp


@pytest.fixture
def pool() -> Iterator[vramp.Pool]:
    """A pool of 1 GiB."""
    with vramp.open("sim:h200", limit="1GiB") as opened:
        yield opened
        if not opened.is_closed:
            opened.audit()


def fill(block: vramp.Allocation, byte: int) -> None:
    ctypes.memset(block.ptr, byte, block.size)


def holds(block: vramp.Allocation, byte: int) -> bool:
    return ctypes.string_at(block.ptr, block.size) == bytes([byte]) * block.size


def state(pool: vramp.Pool, tag: str) -> vramp.RegionStatus:
    return next(found for found in vramp.status(pool) if found.tag == tag)


def test_contents_come_back_at_their_addresses_and_the_rest_stays(pool: vramp.Pool) -> None:
    outside = pool.malloc(8 * MIB)
    with vramp.region("weights", device=pool):
        inside = [pool.malloc(size) for size in (100, 3 * MIB, 40 * MIB)]
    fill(outside, 9)
    for byte, block in enumerate(inside):
        fill(block, byte)
    places = [block.ptr for block in inside]
    reserved = pool.stats().reserved
    before = state(pool, "weights")
    assert before.phase == "awake" and before.on_card >= 43 * MIB

    vramp.pause("weights", device=pool)
    asleep = state(pool, "weights")
    assert (asleep.phase, asleep.on_card) == ("asleep", 0) and asleep.asleep >= 43 * MIB
    assert asleep.on_host >= 43 * MIB and asleep.copied == asleep.to_copy
    assert pool.stats().reserved == reserved - before.on_card
    assert holds(outside, 9)
    vramp.pause("weights", device=pool)

    vramp.resume("weights", device=pool)
    vramp.resume("weights", device=pool)
    assert state(pool, "weights").phase == "awake"
    assert [block.ptr for block in inside] == places
    assert all(holds(block, byte) for byte, block in enumerate(inside))
    for block in inside:
        block.free()


def test_the_innermost_region_counts_and_one_of_a_thread_is_its_own(pool: vramp.Pool) -> None:
    def live() -> dict[str, bool]:
        return {found.tag: found.on_card > 0 for found in vramp.status(pool)}

    with vramp.region("outer", device=pool):
        with vramp.region("inner", device=pool):
            first = pool.malloc(30 * MIB)
        assert live() == {"inner": True, "outer": False}
        with vramp.disable_region(pool):
            second = pool.malloc(30 * MIB)
        thread = threading.Thread(target=lambda: blocks.append(pool.malloc(30 * MIB)))
        blocks: list[vramp.Allocation] = []
        thread.start()
        thread.join()
        assert live() == {"inner": True, "outer": False}
        third = pool.malloc(30 * MIB)
        assert live() == {"inner": True, "outer": True}
    vramp.pause(device=pool)
    assert live() == {"inner": False, "outer": False}
    fill(second, 1)
    fill(blocks[0], 2)
    assert holds(second, 1) and holds(blocks[0], 2)
    vramp.resume(["outer", "inner"], device=pool)
    for block in (first, second, third, *blocks):
        block.free()
    assert pool.stats().live == 0


def test_a_sleeping_region_refuses_requests_and_serves_frees(pool: vramp.Pool) -> None:
    with vramp.region("kv", backup="none", device=pool):
        block, other = pool.malloc(20 * MIB), pool.malloc(20 * MIB)
        vramp.pause("kv", device=pool)
        with pytest.raises(vramp.RegionError, match="sleeps: resume it") as raised:
            pool.malloc(1 << 20)
        assert raised.value.tag == "kv" and isinstance(raised.value, vramp.VrampError)
    pool.malloc(1 << 20).free()
    thread = threading.Thread(target=block.free)
    thread.start()
    thread.join()
    assert state(pool, "kv").on_host == 0
    vramp.resume("kv", device=pool)
    other.free()
    assert pool.stats().live == 0


def test_errors_name_the_tag_and_change_nothing(pool: vramp.Pool) -> None:
    for call in (vramp.pause, vramp.resume, vramp.clean, vramp.on_pressure):
        with pytest.raises(vramp.RegionError) as raised:
            call("none such", device=pool)
        assert raised.value.tag == "none such"
    vramp.pause(device=pool)
    with vramp.region("a", device=pool):
        block = pool.malloc(4 * MIB)
    with pytest.raises(ValueError, match="other options"), vramp.region("a", readonly=True, device=pool):
        pass
    with pytest.raises(ValueError, match="backup"), vramp.region("a", backup="x", device=pool):  # type: ignore[arg-type]
        pass
    fill(block, 5)
    with pool.pin(block):
        with pytest.raises(vramp.RegionError, match="pinned") as raised:
            vramp.pause("a", device=pool)
        assert raised.value.tag == "a" and state(pool, "a").phase == "awake"
    vramp.pause("a", device=pool)
    vramp.resume("a", device=pool)
    assert holds(block, 5)
    block.free()


def test_a_backup_is_read_only_where_there_is_one_and_allocates_nothing_before(pool: vramp.Pool) -> None:
    with vramp.region("weights", device=pool):
        block = pool.malloc(4 * MIB)
    fill(block, 7)
    vramp.pause("weights", device=pool)
    assert vramp.read_backup(block.ptr, 3, device=pool) == bytes([7]) * 3
    tracemalloc.start()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for size in (5 * MIB, 4 * GIB, 1 << 60, 1 << 63, (1 << 64) - 1):
        for address in (block.ptr, 0, (1 << 64) - 1):
            with pytest.raises(vramp.RegionError, match="not in the contents"):
                vramp.read_backup(address, size, device=pool)
    for address, size in ((block.ptr, 1 << 64), (block.ptr, -1), (1 << 64, 1), (-1, 1), (1 << 200, 1)):
        with pytest.raises(vramp.RangeError, match="64 bits"):
            vramp.read_backup(address, size, device=pool)
    assert tracemalloc.get_traced_memory()[1] < MIB
    tracemalloc.stop()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10
    vramp.resume("weights", device=pool)
    with pytest.raises(vramp.RegionError, match="awake"):
        vramp.read_backup(block.ptr, 1, device=pool)


def test_a_move_in_the_background_has_a_handle(pool: vramp.Pool) -> None:
    with vramp.region("w", device=pool):
        block = pool.malloc(64 * MIB)
    fill(block, 3)
    handle = vramp.pause("w", wait=False, device=pool)
    assert handle is not None
    handle.wait(60)
    assert handle.done and handle.progress == (64 * MIB, 64 * MIB)
    resumed = vramp.resume("w", wait=False, device=pool)
    assert resumed is not None
    resumed.wait()
    assert holds(block, 3)
    with pool.pin(block):
        refused = vramp.pause("w", wait=False, device=pool)
        assert refused is not None
        with pytest.raises(vramp.RegionError):
            refused.wait(60)
    block.free()


def test_part_of_a_region_may_stay_and_a_cleaned_one_copies_nothing(pool: vramp.Pool) -> None:
    with vramp.region("w", device=pool):
        blocks = [pool.malloc(32 * MIB) for _ in range(4)]
    for byte, block in enumerate(blocks):
        fill(block, byte)
    vramp.clean("w", device=pool)
    vramp.pause("w", keep="64MiB", device=pool)
    assert state(pool, "w").on_card == 64 * MIB and state(pool, "w").to_copy == 0
    vramp.pause("w", device=pool)
    assert state(pool, "w").on_card == 0
    vramp.resume(device=pool)
    assert all(holds(block, byte) for byte, block in enumerate(blocks))
    for block in blocks:
        block.free()


def test_regions_sleep_when_memory_runs_short(pool: vramp.Pool) -> None:
    with vramp.region("w", device=pool):
        block = pool.malloc(600 * MIB)
    fill(block, 7)
    with pytest.raises(vramp.OutOfMemoryError):
        pool.malloc(600 * MIB)
    with vramp.on_pressure(["w"], device=pool):
        large = pool.malloc(600 * MIB)
        assert state(pool, "w").phase == "asleep"
        large.free()
    pool.trim()
    vramp.resume("w", device=pool)
    assert holds(block, 7)
    with pytest.raises(vramp.OutOfMemoryError):
        pool.malloc(600 * MIB)
    block.free()


def test_a_closed_pool_ends_its_regions() -> None:
    pool = vramp.open("sim:h200")
    with vramp.region("w", device=pool):
        pool.malloc(GIB)
        pool.close()
    with pytest.raises(vramp.ClosedError):
        vramp.status(pool)


def test_the_shared_pools_of_all_devices_have_regions() -> None:
    shared = vramp.pool(0)
    with vramp.region("shared"):
        block = shared.malloc(2 * MIB)
    with vramp.open("sim:h200") as own, vramp.region("elsewhere"):
        own.malloc(2 * MIB).free()
        assert vramp.status(own) == []
    fill(block, 4)
    vramp.pause("shared")
    found = {status.tag: status for status in vramp.status()}
    assert found["shared"].phase == "asleep" and found["shared"].device == 0
    vramp.resume("shared", device=0)
    assert holds(block, 4)
    block.free()


def test_peaks_of_regions_are_reset_with_those_of_the_pool(pool: vramp.Pool) -> None:
    with vramp.region("peaks", device=pool):
        pool.malloc(64 * MIB).free()
    pool.trim()
    assert pool.stats().reserved_peak >= 64 * MIB
    pool.reset_peaks()
    stats = pool.stats()
    assert (stats.live_peak, stats.reserved_peak) == (0, 0)


def test_regions_use_the_host_memory_of_tiers_while_they_are_open(pool: vramp.Pool) -> None:
    with vramp.region("weights", device=pool):
        block = pool.malloc(64 * MIB)
    fill(block, 7)
    small = vramp.Tiers(pool, host="32MiB")
    with pytest.raises(vramp.RegionError, match="weights"):
        vramp.pause("weights", device=pool)
    assert state(pool, "weights").phase == "awake" and holds(block, 7)

    # The one that was opened last counts.
    large = vramp.Tiers(pool, host="128MiB")
    vramp.pause("weights", device=pool)
    with pytest.raises(vramp.VrampError):
        large.reserve(64 * MIB, "host")
    with large.reserve(50 * MIB, "host"), small.reserve(28 * MIB, "host"):
        pass
    # The copy outlives the tiers.
    large.close()
    vramp.resume("weights", device=pool)
    assert holds(block, 7)
    small.close()
    vramp.pause("weights", device=pool)
    vramp.resume("weights", device=pool)
    assert holds(block, 7)
    block.free()


def test_a_wrong_size_is_refused_where_there_is_no_region_too() -> None:
    with vramp.open("sim:h200") as pool:
        for keep in ("lots", "-1", -1, "1GiB extra", "1e40GiB", ""):
            with pytest.raises(vramp.OptionError, match="keep is a size"):
                vramp.pause(keep=keep, device=pool)
        assert vramp.pause(keep=1 << 20, device=pool) is None


def test_snapshots_and_histories_have_what_is_in_regions(pool: vramp.Pool, tmp_path: Path) -> None:
    def saved() -> tuple[list[int], list[int]]:
        pool.snapshot(tmp_path / "s.pickle")
        with (tmp_path / "s.pickle").open("rb") as file:
            found = pickle.load(file)
        blocks = [block for segment in found["segments"] for block in segment["blocks"]]
        live = sorted(block["requested_size"] // MIB for block in blocks if block["state"] == "active_allocated")
        events = [event for trace in found["device_traces"] for event in trace]
        return live, [event["size"] // MIB for event in events if event["action"] == "alloc"]

    with vramp.region("early", device=pool):
        early = pool.malloc(3 * MIB)
    pool.record_history(100)
    own = pool.malloc(4 * MIB)
    with vramp.region("late", device=pool):
        late = pool.malloc(5 * MIB)
    with vramp.region("early", device=pool):
        more = pool.malloc(6 * MIB)
    assert saved() == ([3, 4, 5, 6], [4, 5, 6])
    vramp.pause(device=pool)
    late.free()
    assert saved() == ([3, 4, 6], [4, 5, 6])
    vramp.resume(device=pool)
    pool.record_history(0)
    with vramp.region("late", device=pool):
        pool.malloc(7 * MIB).free()
    assert saved() == ([3, 4, 6], [])
    for block in (early, own, more):
        block.free()
