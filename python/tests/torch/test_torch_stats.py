"""torch.cuda's statistics: what they count and that they agree with the snapshot."""

import json
import pathlib
import random
import subprocess
import sys
import threading

import pytest
import torch
from support import GIB, KIB, MIB, TOO_MUCH, allocated, block, run_script, segments, stat, tidy

ARRAYS = (
    "allocation segment active inactive_split allocated_bytes reserved_bytes active_bytes inactive_split_bytes "
    "requested_bytes"
).split()
SCALARS = ("num_alloc_retries num_ooms num_sync_all_streams num_device_alloc num_device_free max_split_size").split()
OVERSIZE = ("oversize_allocations", "oversize_segments")
KINDS = ("current", "peak", "allocated", "freed")


def expected_stats():
    """Current values of the statistics, from the snapshot's blocks."""
    sums = {(name, pool): 0 for name in ARRAYS for pool in ("all", "small_pool", "large_pool")}

    def add(name, segment, value):
        sums[name, "all"] += value
        sums[name, f"{segment['segment_type']}_pool"] += value

    for segment in segments():
        add("reserved_bytes", segment, segment["total_size"])
        # PyTorch does not count an expandable segment as a segment, nor its unused blocks as split ones.
        if not segment["is_expandable"]:
            add("segment", segment, 1)
        for part in segment["blocks"]:
            if part["state"] == "active_allocated":
                add("allocation", segment, 1)
                add("allocated_bytes", segment, part["size"])
            if part["state"].startswith("active"):
                add("active", segment, 1)
                add("active_bytes", segment, part["size"])
                add("requested_bytes", segment, part["requested_size"])
            elif len(segment["blocks"]) > 1 and not segment["is_expandable"]:
                add("inactive_split", segment, 1)
                add("inactive_split_bytes", segment, part["size"])
    return {f"{name}.{pool}.current": value for (name, pool), value in sums.items()}


def check_agreement(base=None):
    """Current values are those of the snapshot; since `base` they changed by what came and went."""
    # Before the statistics: a snapshot takes back what caches of small blocks keep, which is of the large pool then.
    expected = expected_stats()
    stats = torch.cuda.memory_stats()
    differing = {key: (stats[key], value) for key, value in expected.items() if stats[key] != value}
    assert not differing, f"statistic, and its value by the snapshot: {differing}"
    for name in ARRAYS:
        for pool in ("all", "small_pool", "large_pool"):
            keys = [f"{name}.{pool}.{kind}" for kind in KINDS]
            assert 0 <= stats[keys[0]] <= stats[keys[1]], (name, pool)
            if base:
                current, _, came, went = (stats[key] - base[key] for key in keys)
                assert current == came - went, (name, pool)
        for kind in ("current", "allocated", "freed"):
            parts = stats[f"{name}.small_pool.{kind}"] + stats[f"{name}.large_pool.{kind}"]
            assert stats[f"{name}.all.{kind}"] == parts, (name, kind)


def check_segments():
    """Blocks tile their segments, and each segment's sums are those of its blocks."""
    for segment in segments():
        at = segment["address"]
        for part in segment["blocks"]:
            assert part["address"] == at
            at += part["size"]
            assert part["state"] in ("active_allocated", "active_pending_free", "inactive")
        assert at == segment["address"] + segment["total_size"]
        active = [part for part in segment["blocks"] if part["state"].startswith("active")]
        assert segment["active_size"] == sum(part["size"] for part in active)
        assert segment["requested_size"] == sum(part["requested_size"] for part in active)
        assert segment["allocated_size"] == sum(
            part["size"] for part in active if part["state"] == "active_allocated"
        )


def test_every_statistic_of_pytorch_has_its_name():
    block(MIB)
    stats = torch.cuda.memory_stats()
    names = {f"{name}.{pool}.{kind}" for name in ARRAYS for pool in ("all", "small_pool", "large_pool") for kind in KINDS}
    names |= {f"{name}.{kind}" for name in OVERSIZE for kind in KINDS} | set(SCALARS)
    assert set(stats) == names
    assert all(type(value) is int for value in stats.values())
    nested = torch.cuda.memory_stats_as_nested_dict()
    assert nested["allocated_bytes"]["all"]["current"] == stats["allocated_bytes.all.current"]


def test_statistics_agree_with_the_snapshot_after_every_step():
    draw = random.Random(7)
    base = torch.cuda.memory_stats()
    kept = []
    for step in range(300):
        if kept and draw.random() < 0.45:
            kept.pop(draw.randrange(len(kept)))
        elif draw.random() < 0.03:
            torch.cuda.empty_cache()
        else:
            kept.append(block(draw.choice((1, 511, 512, 513, 3 * KIB, MIB - 1, MIB, MIB + 1, 5 * MIB, 30 * MIB))))
        if step % 10 == 0:
            check_agreement(base)
            check_segments()
    kept.clear()
    check_agreement(base)
    torch.cuda.empty_cache()
    check_agreement(base)
    assert stat("allocated_bytes.all.current") == 0


def test_what_is_requested_is_counted_without_rounding():
    requested, active = stat("requested_bytes.all.current"), stat("active_bytes.all.current")
    kept = block(1000)
    assert stat("requested_bytes.all.current") == requested + 1000
    assert stat("active_bytes.all.current") >= active + 1000
    assert stat("active_bytes.all.current") % 512 == 0
    del kept
    assert stat("requested_bytes.all.current") == requested


def test_a_kibibyte_is_a_kibibyte_and_its_free_is_counted_once():
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.reset_accumulated_memory_stats()
    start = torch.accelerator.memory_stats()["active_bytes.all.current"]
    kept = torch.empty(256, device="cuda")
    assert torch.accelerator.memory_stats()["active_bytes.all.current"] == start + 1024
    assert torch.accelerator.memory_stats()["active_bytes.all.freed"] == 0
    del kept
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_stats()["active_bytes.all.current"] == start
    assert torch.accelerator.memory_stats()["active_bytes.all.freed"] == 1024


def test_allocated_and_reserved_rise_fall_and_leave_their_peaks():
    torch.cuda.reset_peak_memory_stats()
    low, reserved = allocated(), torch.cuda.memory_reserved()
    assert torch.cuda.max_memory_allocated() == low
    first, second = block(8 * MIB), block(30 * MIB)
    assert allocated() == low + 38 * MIB
    assert torch.cuda.memory_reserved() >= reserved + 38 * MIB
    del second
    assert allocated() == low + 8 * MIB
    assert torch.cuda.max_memory_allocated() == low + 38 * MIB
    high = torch.cuda.max_memory_reserved()
    assert high >= reserved + 38 * MIB
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < high
    assert torch.cuda.max_memory_reserved() == high
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == low + 8 * MIB
    assert torch.cuda.max_memory_reserved() == torch.cuda.memory_reserved()
    del first


def test_resetting_what_has_accumulated_leaves_the_current_values():
    kept = block(4 * MIB)
    before = torch.cuda.memory_stats()
    torch.cuda.reset_accumulated_memory_stats()
    after = torch.cuda.memory_stats()
    for name in ARRAYS:
        assert after[f"{name}.all.allocated"] == after[f"{name}.all.freed"] == 0, name
        assert after[f"{name}.all.current"] == before[f"{name}.all.current"], name
        assert after[f"{name}.all.peak"] == before[f"{name}.all.peak"], name
    assert after["num_ooms"] == after["num_alloc_retries"] == 0
    more = block(6 * MIB)
    assert stat("allocated_bytes.all.allocated") == 6 * MIB
    del kept, more
    assert stat("allocated_bytes.all.freed") == 10 * MIB


def test_peaks_are_reset_to_what_is_there_by_the_old_names_too():
    kept = block(64 * MIB)
    del kept
    with pytest.warns(FutureWarning):
        torch.cuda.reset_max_memory_allocated()
    assert torch.cuda.max_memory_allocated() == allocated()


def test_emptying_the_cache_returns_what_is_unused_and_no_more():
    start = torch.cuda.memory_reserved()
    kept, gone = block(64 * MIB), block(64 * MIB)
    del gone
    torch.cuda.empty_cache()
    assert start + 64 * MIB <= torch.cuda.memory_reserved() < start + 128 * MIB
    del kept
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == start
    torch.cuda.empty_cache()


def test_the_card_is_given_back_what_the_cache_held():
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    assert 0 < free <= total
    kept = block(512 * MIB)
    assert torch.cuda.mem_get_info()[0] <= free - 512 * MIB
    del kept
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] == free


def test_the_summary_prints_the_current_values():
    kept = block(3 * MIB)
    for text in (torch.cuda.memory_summary(), torch.cuda.memory_summary(abbreviated=True)):
        row = next(line for line in text.splitlines() if "Allocated memory" in line)
        assert row.split("|")[2].strip() == f"{allocated() // KIB} KiB"
        for title in ("Active memory", "Requested memory", "GPU reserved memory", "Non-releasable", "GPU reserved segments"):
            assert title in text
    del kept


def test_raw_allocations_are_counted_and_freed():
    start = allocated()
    pointer = torch.cuda.caching_allocator_alloc(1)
    assert allocated() == start + 512
    torch.cuda.caching_allocator_delete(pointer)
    assert allocated() == start
    stream = torch.cuda.Stream()
    pointer = torch.cuda.caching_allocator_alloc(2 * MIB, 0, stream)
    assert [segment["stream"] for segment in segments() if segment["active_size"]] == [stream.cuda_stream]
    torch.cuda.caching_allocator_delete(pointer)
    assert allocated() == start


def test_a_raw_allocation_of_nothing_is_no_address():
    start = allocated()
    pointer = torch.cuda.caching_allocator_alloc(0)
    torch.cuda.caching_allocator_delete(pointer)
    assert torch.empty(0, device="cuda").data_ptr() == 0
    assert allocated() == start


def test_with_caching_off_an_allocation_is_not_counted_and_on_again_it_is():
    stream = torch._C._cuda_getCurrentRawStream(0)

    def requested(size):
        start = stat("requested_bytes.all.allocated")
        pointer = torch._C._cuda_cudaCachingAllocator_raw_alloc(size, stream)
        after = stat("requested_bytes.all.allocated")
        torch._C._cuda_cudaCachingAllocator_raw_delete(pointer)
        return after - start

    torch.cuda.caching_allocator_enable(False)
    try:
        assert requested(MIB) == 0
    finally:
        torch.cuda.caching_allocator_enable(True)
    assert requested(MIB) == MIB


def test_memory_freed_by_other_threads_is_counted_once():
    start = torch.cuda.memory_stats()
    lock, shared, errors = threading.Lock(), [], []

    def work(seed):
        draw = random.Random(seed)
        try:
            for _ in range(400):
                made = block(draw.randrange(1, 3 * MIB))
                with lock:
                    shared.append(made)
                    del made
                    gone = shared.pop(draw.randrange(len(shared))) if draw.random() < 0.9 else None
                del gone
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    check_agreement(start)
    check_segments()
    assert stat("allocation.all.current") == start["allocation.all.current"] + len(shared)
    shared.clear()
    check_agreement(start)
    assert stat("allocated_bytes.all.current") == start["allocated_bytes.all.current"]
    assert stat("allocation.all.allocated") - start["allocation.all.allocated"] == 8 * 400


def test_a_peak_is_one_of_tensors_and_memory_pools_together():
    torch.cuda.reset_peak_memory_stats()
    low = {name: stat(f"{name}.all.current") for name in ("allocated_bytes", "active_bytes", "requested_bytes", "allocation")}
    pool = torch.cuda.MemPool()

    def peaks():
        return {name: stat(f"{name}.all.peak") - low[name] for name in low}

    first = block(40 * MIB)
    with torch.cuda.use_mem_pool(pool):
        inside = block(20 * MIB)
    most = dict.fromkeys(("allocated_bytes", "active_bytes", "requested_bytes"), 60 * MIB)
    assert peaks() == most | {"allocation": 2}
    # What each of them has later is less, though the sum of their own peaks is more.
    del first
    with torch.cuda.use_mem_pool(pool):
        more = block(24 * MIB)
    assert peaks() == most | {"allocation": 2}
    second = block(18 * MIB)
    most = dict.fromkeys(most, 62 * MIB)
    assert peaks() == most | {"allocation": 3}
    del second, inside
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == allocated()
    third = block(3 * MIB)
    del third
    assert torch.cuda.max_memory_allocated() == allocated() + 3 * MIB
    del more, pool


def test_threads_that_take_turns_leave_the_exact_peak():
    torch.cuda.reset_peak_memory_stats()
    low = allocated()
    kept = [block(100 * MIB)]

    def in_a_thread(work):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    def peak():
        return torch.cuda.max_memory_allocated() - low

    in_a_thread(lambda: block(60 * MIB))
    assert peak() == 160 * MIB
    # A thread frees what another one allocated, before and after the other one has ended.
    in_a_thread(lambda: (kept.clear(), kept.append(block(130 * MIB))))
    assert peak() == 160 * MIB
    kept.append(block(31 * MIB))
    assert peak() == 161 * MIB
    torch.cuda.reset_peak_memory_stats()
    in_a_thread(kept.clear)
    assert (allocated(), peak()) == (low, 161 * MIB)


def test_the_peak_of_threads_is_at_least_what_each_of_them_saw():
    torch.cuda.reset_peak_memory_stats()
    start, barrier, seen = allocated(), threading.Barrier(4), []

    def work(seed):
        draw = random.Random(seed)
        kept = [block(64 * MIB)]
        barrier.wait()
        for _ in range(500):
            if draw.random() < 0.5 and len(kept) > 1:
                kept.pop()
            else:
                kept.append(block(draw.randrange(1, 4 * MIB)))
        barrier.wait()
        last = block(100 * MIB)
        barrier.wait()
        seen.append(allocated())
        barrier.wait()
        del last

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    peak = torch.cuda.max_memory_allocated()
    assert len(seen) == 4
    # All held their last block at once, and no more than that before.
    assert max(seen) <= peak <= max(seen) + (max(seen) - start) // 128
    check_agreement()


def test_a_thousand_threads_leave_nothing_behind():
    reserved = torch.cuda.memory_reserved()
    for _ in range(100):
        threads = [threading.Thread(target=lambda: block(100 * KIB)) for _ in range(10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    check_agreement()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == reserved


def test_memory_for_host_tensors_is_not_counted_as_the_cards():
    before = torch.cuda.memory_stats()
    host = torch.cuda.host_memory_stats()["num_host_alloc"]
    kept = torch.empty(3 * MIB, dtype=torch.uint8, pin_memory=True)
    assert kept.is_pinned()
    assert torch.cuda.memory_stats() == before
    assert torch.cuda.host_memory_stats()["num_host_alloc"] == host + 1
    assert torch.cuda.host_memory_stats()["allocated_bytes.current"] >= 3 * MIB
    made = torch.cuda.host_memory_stats()
    card = block(MIB)
    assert torch.cuda.host_memory_stats() == made
    del kept, card
    freed = torch.cuda.host_memory_stats()["num_host_free"]
    torch._C._host_emptyCache()
    assert torch.cuda.host_memory_stats()["num_host_free"] == freed + 1


def test_statistics_before_the_first_tensor_are_empty():
    assert run_script("print(len(torch.cuda.memory_stats()), torch.cuda.memory_allocated())").stdout == "0 0\n"
    text = "torch.cuda.init(); s = torch.cuda.memory_stats(); print(len(s) > 50, sum(s[k] for k in s if 'max' not in k))"
    assert run_script(text).stdout == "True 0\n"


def test_failed_requests_are_counted_and_change_nothing_else():
    before = torch.cuda.memory_stats()
    with pytest.raises(torch.cuda.OutOfMemoryError):
        block(TOO_MUCH)
    after = torch.cuda.memory_stats()
    assert after["num_ooms"] == before["num_ooms"] + 1
    for name in ARRAYS:
        assert after[f"{name}.all.current"] == before[f"{name}.all.current"], name


def test_the_largest_request_of_a_card_leaves_nothing_behind():
    reserved = torch.cuda.memory_reserved()
    kept = block(torch.cuda.mem_get_info()[0] // GIB // 2 * GIB)
    del kept
    tidy()
    assert torch.cuda.memory_reserved() == reserved


def test_the_script_of_pairs_prints_both_times_and_their_ratio():
    script = pathlib.Path(__file__).resolve().parents[3] / "bench" / "torch-pair.py"
    command = [sys.executable, str(script), "--rounds", "1", "--pairs", "100", "--sizes", "512,4194304", "--threads", "1,2"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    found = [json.loads(line) for line in lines]
    assert [(line["size"], line["threads"]) for line in found] == [(512, 1), (512, 2), (4 * MIB, 1), (4 * MIB, 2)]
    assert all(line["native_ns"] > 0 < line["vramp_to_native"] for line in found)
