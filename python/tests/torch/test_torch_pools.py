"""torch.cuda.MemPool: isolation, allocators of the user's own, nesting, threads, and their ends."""

import gc
import random
import threading

import pytest
import torch
from support import (
    EXPANDABLE,
    MIB,
    VRAMP,
    Pluggable,
    address,
    allocated,
    block,
    busy,
    limit,
    live_blocks,
    private_segments,
    run_script,
    segments,
    stat,
    tidy,
)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return Pluggable(tmp_path_factory.mktemp("pluggable"))


@pytest.fixture
def counted(built):
    """An allocator of the user's own and its counts since the test began."""
    start = built.mallocs(), built.frees()

    class Counted:
        allocator = staticmethod(built.allocator)

        @staticmethod
        def counts():
            return built.mallocs() - start[0], built.frees() - start[1]

    yield Counted
    tidy()
    mallocs, frees = Counted.counts()
    assert mallocs == frees, "the pool kept memory of the user's allocator"


def used(pool, size):
    with torch.cuda.use_mem_pool(pool):
        return block(size)


def test_every_pool_has_an_id_of_its_own():
    ids = [torch.cuda.graph_pool_handle(), torch.cuda.MemPool().id, torch.cuda.graph_pool_handle()]
    assert len(set(ids)) == 3
    assert [first == 0 for first, _ in ids] == [True] * 3
    assert ids[0][1] < ids[1][1] < ids[2][1]
    found, threads = [], []
    for _ in range(16):
        threads.append(threading.Thread(target=lambda: found.append(torch.cuda.MemPool().id)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 16


def test_a_pools_memory_is_its_own():
    pool = torch.cuda.MemPool()
    outside = block(30 * MIB)
    inside = used(pool, 30 * MIB)
    assert address(inside) != address(outside)
    own = [address(inside)]
    del inside
    again = block(30 * MIB)
    assert address(again) not in own
    third = used(pool, 30 * MIB)
    assert address(third) in own
    assert {tuple(segment["segment_pool_id"]) for segment in pool.snapshot()} == {pool.id}
    del outside, again, third, pool


def test_a_pools_snapshot_shows_its_segments_and_no_other():
    pool = torch.cuda.MemPool()
    assert pool.snapshot() == []
    kept = [used(pool, MIB), block(MIB), used(pool, MIB)]
    addresses = [segment["address"] for segment in pool.snapshot()]
    assert addresses
    assert sorted(addresses) == sorted(segment["address"] for segment in segments(pool.id))
    everywhere = {segment["address"] for segment in segments()}
    assert set(addresses) < everywhere
    assert len(torch.cuda.memory.memory_snapshot(pool.id)) == len(addresses)
    assert live_blocks(pool.id) == 2
    del kept, pool


def test_a_pools_memory_is_counted_in_the_statistics():
    pool = torch.cuda.MemPool()
    start, reserved = allocated(), torch.cuda.memory_reserved()
    kept = used(pool, 30 * MIB)
    assert allocated() == start + 30 * MIB
    assert torch.cuda.memory_reserved() >= reserved + 30 * MIB
    del kept
    assert allocated() == start
    assert torch.cuda.memory_reserved() >= reserved + 30 * MIB
    del pool
    tidy()
    assert torch.cuda.memory_reserved() == reserved


def test_an_allocator_of_the_users_own_gives_a_pool_its_memory(counted):
    pool = torch.cuda.MemPool(counted.allocator())
    assert pool.use_count() == 1
    assert counted.counts() == (0, 0)
    with torch.cuda.use_mem_pool(pool):
        first = block(MIB)
        assert pool.use_count() == 2
    assert pool.use_count() == 1
    assert counted.counts() == (1, 0)
    outside = block(MIB)
    assert counted.counts() == (1, 0)
    with torch.cuda.use_mem_pool(pool):
        assert len(pool.snapshot()) == 1
        second = block(MIB)
        assert len(pool.snapshot()) == 1
        third = block(MIB)
        assert len(pool.snapshot()) == 2
    assert counted.counts() == (2, 0)
    del first, second, third, outside
    del pool
    torch.cuda.empty_cache()
    assert counted.counts() == (2, 2)


def test_a_tensor_may_outlive_its_pool_and_the_pools_allocator(counted):
    pool = torch.cuda.MemPool(counted.allocator())
    kept = used(pool, 2 * MIB)
    pool_id = pool.id
    del pool
    gc.collect()
    torch.cuda.empty_cache()
    assert counted.counts() == (1, 0)
    assert live_blocks(pool_id) == 1
    del kept
    torch.cuda.empty_cache()
    assert counted.counts() == (1, 1)
    assert segments(pool_id) == []


def test_a_pool_that_ends_in_its_own_context_serves_until_the_context_ends():
    def body():
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            kept = block(5 * MIB)
            pool_id = pool.id
            del pool
            gc.collect()
            more = block(5 * MIB)
            assert live_blocks(pool_id) == 2
        outside = block(5 * MIB)
        assert live_blocks(pool_id) == 2
        return pool_id, [kept, more, outside]

    pool_id, kept = body()
    assert live_blocks(pool_id) == 2
    kept.clear()
    tidy()
    assert segments(pool_id) == []


def test_the_cache_of_a_live_pool_is_kept_and_a_dead_ones_returned():
    tidy()
    start = torch.cuda.memory_reserved()
    pool = torch.cuda.MemPool()
    kept = used(pool, 30 * MIB)
    del kept
    torch.cuda.empty_cache()
    del pool
    tidy()
    assert torch.cuda.memory_reserved() == start
    assert private_segments() == []


def test_emptying_the_cache_in_a_pools_context_leaves_other_pools():
    pools = [torch.cuda.MemPool() for _ in range(4)]

    def work(pool):
        with torch.cuda.use_mem_pool(pool):
            kept = block(16)
            del kept
            torch.cuda.empty_cache()

    threads = [threading.Thread(target=work, args=(pool,)) for pool in pools]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(pool.snapshot()) for pool in pools] == [1] * 4
    pools.clear()


def test_pools_nest():
    first, second, third = (torch.cuda.MemPool() for _ in range(3))
    kept = []
    with torch.cuda.use_mem_pool(first):
        kept.append(block(80 * MIB))
        with torch.cuda.use_mem_pool(second):
            kept.append(block(80 * MIB))
            with torch.cuda.use_mem_pool(third):
                kept.append(block(80 * MIB))
            kept.append(block(80 * MIB))
        kept.append(block(80 * MIB))
    outside = block(80 * MIB)
    assert [live_blocks(pool.id) for pool in (first, second, third)] == [2, 2, 1]
    if not EXPANDABLE:
        assert [len(torch.cuda.memory.memory_snapshot(pool.id)) for pool in (first, second, third)] == [2, 2, 1]
    own = [s for s in segments() if s["address"] <= address(outside) < s["address"] + s["total_size"]]
    assert [tuple(segment["segment_pool_id"]) for segment in own] == [(0, 0)]
    kept.clear()
    del outside, first, second, third


def test_entering_a_pool_in_its_own_context_is_served_or_refused_and_the_outer_context_goes_on():
    text = """
pool = torch.cuda.MemPool()
block = lambda: torch.empty(5 << 20, dtype=torch.uint8, device="cuda")
count = lambda: sum(b["state"] == "active_allocated" for s in pool.snapshot() for b in s["blocks"])
with torch.cuda.use_mem_pool(pool):
    kept = [block()]
    try:
        with torch.cuda.use_mem_pool(pool):
            kept.append(block())
    except RuntimeError as error:
        assert "already recording to mempool_id" in str(error), error
    inside = len(kept)
    kept.append(block())
kept.append(block())
print(count() - inside)
"""
    # PyTorch 2.11 refuses it; whether the rest of the outer context then allocates from the pool is its choice.
    assert run_script(text).stdout in ("0\n", "1\n")


def test_a_context_ends_with_an_exception():
    pool = torch.cuda.MemPool()
    with pytest.raises(KeyError), torch.cuda.use_mem_pool(pool):
        raise KeyError("stop")
    kept = block(5 * MIB)
    assert live_blocks(pool.id) == 0
    assert pool.use_count() == 1
    del kept, pool


def test_a_context_is_of_its_thread():
    pool = torch.cuda.MemPool()
    results = []
    with torch.cuda.use_mem_pool(pool):
        thread = threading.Thread(target=lambda: results.append(block(5 * MIB)))
        thread.start()
        thread.join()
        own = block(5 * MIB)
    assert live_blocks(pool.id) == 1
    results.clear()
    del own, pool


def test_threads_use_pools_of_their_own_at_once():
    pools = [torch.cuda.MemPool() for _ in range(8)]
    results, errors = {}, []

    def work(number):
        draw, kept = random.Random(number), []
        try:
            with torch.cuda.use_mem_pool(pools[number]):
                for _ in range(200):
                    kept.append(block(draw.randrange(1, MIB)))
                    if len(kept) > 10:
                        kept.pop(draw.randrange(len(kept)))
            results[number] = kept
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for number, pool in enumerate(pools):
        parts = [(s["address"], s["address"] + s["total_size"]) for s in pool.snapshot()]
        assert live_blocks(pool.id) == len(results[number])
        for tensor in results[number]:
            assert any(start <= address(tensor) < end for start, end in parts)
    results.clear()
    pools.clear()


def test_what_one_thread_takes_from_a_pool_another_may_free():
    pool = torch.cuda.MemPool()
    kept = [used(pool, MIB) for _ in range(20)]
    thread = threading.Thread(target=kept.clear)
    thread.start()
    thread.join()
    assert live_blocks(pool.id) == 0
    del pool


def test_a_pool_lends_its_idle_memory_when_memory_runs_out(counted):
    other = torch.cuda.MemPool(counted.allocator())
    lender = torch.cuda.MemPool(counted.allocator(), use_on_oom=True)
    with limit(80 * MIB):
        kept_by_other, kept_by_lender = used(other, 40 * MIB), used(lender, 40 * MIB)
        lent = address(kept_by_lender)
        with pytest.raises(torch.OutOfMemoryError):
            block(40 * MIB)
        del kept_by_other, kept_by_lender
        borrowed = block(30 * MIB)
        assert address(borrowed) == lent
        with pytest.raises(torch.OutOfMemoryError):
            block(30 * MIB)
        del borrowed
        again = used(lender, 20 * MIB)
        assert address(again) == lent
        del again
    del other, lender


def test_a_pool_that_is_gone_lends_nothing(counted):
    with limit(40 * MIB):
        for _ in range(10):
            gone = torch.cuda.MemPool(counted.allocator(), use_on_oom=True)
            kept = used(gone, 40 * MIB)
            del kept, gone
        lender = torch.cuda.MemPool(counted.allocator(), use_on_oom=True)
        kept = used(lender, 40 * MIB)
        del kept
        first, second = block(20 * MIB), block(20 * MIB)
        del first, second, lender


def test_a_pool_that_does_not_split_gives_each_block_a_segment():
    splitting, whole = torch.cuda.MemPool(), torch.cuda.MemPool(no_split=True)
    kept = [used(pool, 4 * MIB) for pool in (splitting, whole) for _ in range(2)]
    assert len(whole.snapshot()) > len(splitting.snapshot())
    assert all(len(segment["blocks"]) == 1 for segment in whole.snapshot())
    kept.clear()
    del splitting, whole


def test_a_limit_holds_for_pools_too():
    pool = torch.cuda.MemPool()
    with limit(64 * MIB):
        with pytest.raises(torch.OutOfMemoryError):
            used(pool, 100 * MIB)
        kept = used(pool, 40 * MIB)
        with pytest.raises(torch.OutOfMemoryError):
            block(60 * MIB)
        del kept
    del pool


def test_use_by_another_stream_defers_a_free_in_a_pool():
    pool, stream = torch.cuda.MemPool(), torch.cuda.Stream()
    with busy(stream):
        kept = used(pool, 4 * MIB)
        at = address(kept)
        kept.record_stream(stream)
        del kept
        other = used(pool, 4 * MIB)
        assert address(other) != at
        del other
    stream.synchronize()
    del pool
    tidy()
    assert stat("active_bytes.all.current") == allocated()


def test_a_failing_allocator_of_the_users_own_is_out_of_memory(counted):
    pool = torch.cuda.MemPool(counted.allocator())
    with pytest.raises(torch.OutOfMemoryError):
        used(pool, torch.cuda.get_device_properties(0).total_memory * 4)
    kept = used(pool, 2 * MIB)
    del kept, pool


def test_a_thousand_pools_come_and_go():
    tidy()
    start = torch.cuda.memory_reserved()
    for _ in range(1000):
        pool = torch.cuda.MemPool()
        kept = used(pool, 1000)
        del kept, pool
    tidy()
    assert torch.cuda.memory_reserved() == start
    assert private_segments() == []


def test_pools_live_at_once_and_end_in_any_order():
    draw = random.Random(9)
    pools = [torch.cuda.MemPool() for _ in range(64)]
    kept = [used(pool, MIB) for pool in pools]
    assert len({address(tensor) for tensor in kept}) == 64
    draw.shuffle(pools)
    while pools:
        pools.pop()
        if draw.random() < 0.5 and kept:
            kept.pop(draw.randrange(len(kept)))
    gc.collect()
    kept.clear()
    tidy()
    assert private_segments() == []


def test_the_current_allocator_cannot_be_changed_once_memory_was_used(built):
    kept = block(MIB)
    with pytest.raises(RuntimeError, match="initialized"):
        torch.cuda.memory.change_current_allocator(built.python)
    more = block(MIB)
    del kept, more


def test_a_pool_deleted_while_another_is_open_is_freed_when_that_is_closed():
    if not VRAMP:
        pytest.skip("PyTorch's own allocator ends the process here")
    outer, inner = torch.cuda.MemPool(), torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(outer):
        made = used(inner, 8 * MIB)
        kept = segments(inner.id)
        assert len(kept) == 1
        del made, inner
        gc.collect()
        assert kept[0]["address"] in {segment["address"] for segment in segments()}
    assert kept[0]["address"] not in {segment["address"] for segment in private_segments()}
    del outer
