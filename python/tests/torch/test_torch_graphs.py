"""CUDA graphs in PyTorch: memory of captures, pools that graphs share, and checkpoints of pools."""

import gc
import random
import threading

import pytest
import torch
from support import (
    EXPANDABLE,
    KIB,
    MIB,
    ON_CARD,
    VRAMP,
    address,
    allocated,
    block,
    capture,
    live_blocks,
    private_segments,
    segments,
    settings,
    stat,
    tidy,
)

SMALL, LARGE = MIB, 20 * MIB


@pytest.fixture(autouse=True)
def no_pool_is_left():
    """Every graph's memory is returned when graph and tensors are gone."""
    tidy()
    before = len(private_segments())
    yield
    tidy()
    assert len(private_segments()) == before


def test_a_captured_tensors_memory_is_in_the_graphs_pool():
    graph, kept = capture(lambda: block(4 * MIB))
    assert live_blocks(graph.pool()) == 1
    assert tuple(graph.pool()) != (0, 0)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert live_blocks(graph.pool()) == 1
    outside = block(4 * MIB)
    assert live_blocks(graph.pool()) == 1
    del graph, kept, outside


def test_memory_of_a_capture_is_reused_within_it():
    addresses = []

    def work():
        addresses.clear()
        for _ in range(50):
            made = block(30 * MIB)
            addresses.append(address(made))
            del made
        return block(MIB)

    graph, kept = capture(work)
    assert len(set(addresses)) == 1
    assert sum(segment["total_size"] for segment in segments(graph.pool())) < 100 * MIB
    del graph, kept


def test_memory_freed_in_a_capture_is_not_given_to_others():
    at = []

    def work():
        made = block(30 * MIB)
        at[:] = [address(made)]
        del made
        return block(MIB)

    graph, kept = capture(work)
    outside = [block(30 * MIB) for _ in range(5)]
    assert at[0] not in [address(tensor) for tensor in outside]
    torch.cuda.empty_cache()
    more = block(30 * MIB)
    assert address(more) != at[0]
    outside.clear()
    del graph, kept, more


def test_two_graphs_of_one_pool_share_memory():
    pool = torch.cuda.graph_pool_handle()
    first, a = capture(lambda: block(30 * MIB), pool)
    at = address(a)
    del a
    second, b = capture(lambda: block(30 * MIB), pool)
    assert tuple(first.pool()) == tuple(second.pool()) == tuple(pool)
    assert address(b) == at
    third, c = capture(lambda: block(30 * MIB), first.pool())
    assert address(c) != at
    assert live_blocks(pool) == 2
    del first
    gc.collect()
    assert live_blocks(pool) == 2
    del second, third, b, c


def test_graphs_without_a_shared_pool_share_nothing():
    first, a = capture(lambda: block(30 * MIB))
    at = address(a)
    del a
    second, b = capture(lambda: block(30 * MIB))
    assert address(b) != at
    assert tuple(first.pool()) != tuple(second.pool())
    del first, second, b


def test_a_result_may_outlive_its_graph_and_the_statistics_stay_exact():
    torch.cuda.synchronize()
    tidy()
    base, reserved = allocated(), torch.cuda.memory_reserved()
    for size in (512, MIB, LARGE):
        graph, result = capture(lambda: [block(size) for _ in range(3)])
        assert allocated() >= base + 3 * size
        graph.reset()
        del graph
        tidy()
        assert allocated() >= base + 3 * size
        kept = result[0]
        del result
        tidy()
        assert base + size <= allocated() < base + 3 * size + 512
        outside = block(size)
        assert address(outside) != address(kept)
        del kept, outside
        tidy()
        assert allocated() == base
        assert torch.cuda.memory_reserved() == reserved


def test_a_graph_in_a_mempool_uses_it():
    pool = torch.cuda.MemPool()
    graph, kept = capture(lambda: block(4 * MIB), pool.id)
    assert live_blocks(pool.id) == 1
    with torch.cuda.use_mem_pool(pool):
        more = block(4 * MIB)
    assert live_blocks(pool.id) == 2
    del graph, kept, more, pool


def test_a_capture_takes_ordinary_memory_of_other_threads_from_the_ordinary_pool():
    ready, done, results = threading.Event(), threading.Event(), []

    def other():
        ready.wait(60)
        results.append(block(5 * MIB))
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        own = block(5 * MIB)
        ready.set()
        assert done.wait(60)
    thread.join()
    assert live_blocks(graph.pool()) == 1
    results.clear()
    del graph, own


def test_memory_that_was_cached_before_is_not_captured():
    block(64 * MIB)
    graph, kept = capture(lambda: block(64 * MIB))
    ordinary = [s for s in segments() if tuple(s["segment_pool_id"]) == (0, 0)]
    assert not any(s["address"] <= address(kept) < s["address"] + s["total_size"] for s in ordinary)
    del graph, kept


def test_a_use_by_a_forked_stream_keeps_a_block_within_its_capture():
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        graph.capture_begin()
        kept = block(4 * MIB)
        at = address(kept)
        second.wait_stream(first)
        with torch.cuda.stream(second):
            kept.record_stream(second)
        del kept
        other = block(4 * MIB)
        assert address(other) != at
        first.wait_stream(second)
        graph.capture_end()
    graph.replay()
    del graph, other


def test_a_free_during_a_capture_of_memory_from_before_it_waits():
    stream = torch.cuda.Stream()
    kept = block(4 * MIB)
    kept.record_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        own = block(MIB)
        del kept
        more = block(MIB)
    torch.cuda.synchronize()
    tidy()
    assert stat("active_bytes.all.current") == allocated()
    del graph, own, more


def test_a_block_of_a_capture_is_its_streams():
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=first):
        a = block(4 * MIB)
        at = address(a)
        del a
        second.wait_stream(first)
        with torch.cuda.stream(second):
            b = block(4 * MIB)
            assert address(b) != at
        first.wait_stream(second)
        c = block(4 * MIB)
        assert address(c) == at
    found = {segment["stream"] for segment in segments(graph.pool())}
    assert found == {first.cuda_stream, second.cuda_stream}
    del graph, b, c


def test_a_hundred_captures_of_one_shape_take_no_more_than_one():
    def once():
        graph, kept = capture(lambda: [block(size) for size in (KIB, MIB, LARGE)])
        graph.replay()
        torch.cuda.synchronize()
        del graph, kept
        tidy()
        return torch.cuda.memory_reserved()

    first = once()
    assert [once() for _ in range(99)] == [first] * 99


def test_a_hundred_graphs_of_one_pool_take_the_memory_of_one():
    pool = torch.cuda.graph_pool_handle()
    graphs, seen = [], []
    for _ in range(100):
        graph, kept = capture(lambda: block(LARGE), pool)
        graphs.append(graph)
        del kept
        seen.append(sum(segment["total_size"] for segment in segments(pool)))
    assert seen == [seen[0]] * 100
    graphs.clear()
    del graph


def test_a_capture_that_failed_leaves_no_memory_behind():
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(KeyError), torch.cuda.graph(graph):
        kept = block(LARGE)
        raise KeyError("stop")
    del graph, kept
    tidy()
    good, kept = capture(lambda: block(LARGE))
    del good, kept


def test_running_out_within_a_capture_is_out_of_memory():
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(torch.OutOfMemoryError), torch.cuda.graph(graph):
        block(1 << 50)
    del graph
    tidy()
    good, kept = capture(lambda: block(LARGE))
    good.replay()
    del good, kept


def test_the_cache_may_be_emptied_while_graphs_live():
    graph, kept = capture(lambda: [block(LARGE) for _ in range(3)])
    del kept[1:]
    before = {segment["address"] for segment in segments(graph.pool())}
    torch.cuda.empty_cache()
    assert {segment["address"] for segment in segments(graph.pool())} == before
    graph.replay()
    del graph, kept


@pytest.mark.parametrize("streams", [2, 4])
def test_memory_of_forked_streams_is_reclaimed_behind_their_join(streams):
    if not ON_CARD:
        pytest.skip("the fake runtime's captures have no nodes, by which PyTorch sees the join")
    first, *others = [torch.cuda.Stream() for _ in range(streams)]
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with settings("graph_capture_record_stream_reuse:True"):
        torch.cuda.synchronize()
        with torch.cuda.stream(first):
            graph.capture_begin()
            sink, data = torch.empty(8, device="cuda"), torch.empty(8, device="cuda")
            at = address(data)
            for other in others:
                other.wait_stream(first)
                with torch.cuda.stream(other):
                    torch.add(data, 2.0, out=torch.empty_like(data))
                    data.record_stream(other)
            del data
            early = torch.empty(8, device="cuda")
            for other in others:
                first.wait_stream(other)
            sink.fill_(1.0)
            late = torch.empty(8, device="cuda")
            graph.capture_end()
    torch.cuda.synchronize()
    assert address(early) != at
    assert address(late) == at
    del graph, sink, early, late


# Checkpoints: what torch.compile(mode="reduce-overhead") saves and restores of a pool.


def shape(pool):
    """What a checkpoint keeps of each segment of a pool."""
    return {
        segment["address"]: (
            *(segment[key] for key in ("device", "total_size", "allocated_size", "active_size", "segment_type")),
            tuple((part["size"], part["state"]) for part in segment["blocks"]),
        )
        for segment in segments(pool)
    }


def set_state(state, stale=(), adopting=()):
    torch._C._cuda_setCheckpointPoolState(
        0,
        state,
        [tensor.untyped_storage()._cdata for tensor in stale],
        [tensor.untyped_storage()._cdata for tensor in adopting],
    )


def get_state(pool):
    return torch._C._cuda_getCheckpointState(0, pool)


def middle(count, *kept):
    """The blocks of these numbers out of `count` small ones; the others are freed."""

    def work():
        made = [block(512) for _ in range(count)]
        return [made[number] for number in kept]

    return work


def mixed():
    large = block(8 * SMALL)
    gone = [block(SMALL) for _ in range(3)]
    kept = [block(SMALL) for _ in range(2)]
    del gone
    return [large, *kept]


@pytest.mark.parametrize(
    "work", [mixed, middle(11, 5), middle(11, 5, 8), middle(11, 5, 6), lambda: [block(LARGE), block(3 * LARGE)]]
)
def test_a_checkpoint_restored_at_once_changes_nothing(work):
    graph, kept = capture(work)
    before = shape(graph.pool())
    state = get_state(graph.pool())
    set_state(state)
    after = shape(graph.pool())
    assert all(after[at] == before[at] for at in before)
    del graph, kept, state


def test_what_was_allocated_after_a_checkpoint_is_given_back_by_it():
    graph, first = capture(lambda: [block(512)])
    pool = graph.pool()
    before, state = shape(pool), get_state(pool)
    other, second = capture(lambda: [block(512)], pool)
    assert live_blocks(pool) == 2
    set_state(state, stale=second)
    del second
    after = shape(pool)
    assert all(after[at] == before[at] for at in before)
    assert live_blocks(pool) == 1
    del graph, other, first, state


def test_what_died_after_a_checkpoint_is_live_again_behind_it():
    graph, kept = capture(lambda: [block(512), block(512)])
    pool = graph.pool()
    state = get_state(pool)
    pointers = [address(tensor) for tensor in kept]
    del kept
    assert live_blocks(pool) == 0
    set_state(state)
    assert live_blocks(pool) == 2
    for number, pointer in enumerate(pointers):
        torch._C._cuda_cudaCachingAllocator_raw_delete(pointer)
        assert live_blocks(pool) == 1 - number
    del graph, state


def test_restored_memory_is_freed_by_the_storages_that_adopt_it():
    graph, kept = capture(lambda: [block(2 * MIB), block(2 * MIB), block(LARGE)])
    pool = graph.pool()
    state = get_state(pool)
    pointers, sizes = [address(tensor) for tensor in kept], [tensor.numel() for tensor in kept]
    del kept
    device = torch.device("cuda", 0)
    again = []
    for pointer, size in zip(pointers, sizes):
        storage = torch._C._construct_storage_from_data_pointer(pointer, device, size)
        again.append(torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (size,), (1,)))
    del storage
    assert live_blocks(pool) == 0
    set_state(state, adopting=again[:2])
    assert live_blocks(pool) == 3
    again[0] = None
    assert live_blocks(pool) == 2
    again[1] = None
    assert live_blocks(pool) == 1
    again[2] = None
    assert live_blocks(pool) == 1
    torch._C._cuda_cudaCachingAllocator_raw_delete(pointers[2])
    assert live_blocks(pool) == 0
    del graph, state


def test_checkpoints_are_restored_many_times_over():
    pool = torch.cuda.graph_pool_handle()
    root, kept = capture(lambda: [block(MIB) for _ in range(3)], pool)
    before, state = shape(pool), get_state(pool)
    reserved = torch.cuda.memory_reserved()
    graphs, high = [], 0
    for number in range(30):
        branch, results = capture(lambda: [block((1 + number % 3) * MIB) for _ in range(2)], pool)
        graphs.append(branch)
        set_state(state, stale=results)
        del results
        assert all(shape(pool)[at] == before[at] for at in before)
        high = max(high, torch.cuda.memory_reserved())
    assert high <= reserved + 60 * MIB
    graphs.clear()
    del root, branch, kept, state


def test_live_blocks_of_a_pool_are_compared_with_what_is_expected():
    pool = torch.cuda.graph_pool_handle()
    graph, kept = capture(lambda: block(16), pool)

    def check(pointers):
        return torch._C._cuda_checkPoolLiveAllocations(0, pool, pointers)

    assert check({address(kept)})
    assert not check({address(kept), 0})
    assert not check(set())
    del kept
    assert check(set())
    del graph


def test_a_thread_takes_memory_from_a_graphs_pool():
    pool = torch.cuda.graph_pool_handle()
    graph, kept = capture(lambda: block(16), pool)
    del kept
    assert len(segments(pool)) == 1
    results = []

    def in_pool():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch._C._cuda_beginAllocateCurrentThreadToPool(0, pool)
            try:
                for _ in range(10):
                    results[:] = [block(LARGE) for _ in range(3)]
            finally:
                torch._C._cuda_endAllocateToPool(0, pool)
                torch._C._cuda_releasePool(0, pool)
        results.append(block(LARGE))

    def outside():
        for _ in range(10):
            made = block(LARGE), block(LARGE)
            del made

    threads = [threading.Thread(target=work) for work in (in_pool, outside)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert live_blocks(pool) == 3
    if not (EXPANDABLE or VRAMP):
        # Ten rounds of three, whose predecessors live until the next are there: six blocks.
        assert len(segments(pool)) == 1 + 6
    results.clear()
    del graph
    tidy()
    assert segments(pool) == []


def test_graphs_come_and_go_at_random():
    draw, graphs = random.Random(4), []
    pools = [torch.cuda.graph_pool_handle() for _ in range(3)] + [None]
    for _ in range(150):
        if graphs and draw.random() < 0.45:
            graphs.pop(draw.randrange(len(graphs)))
        else:
            sizes = [draw.randrange(1, 4 * MIB) for _ in range(draw.randrange(1, 5))]
            graphs.append(capture(lambda: [block(size) for size in sizes], draw.choice(pools)))
        if graphs and draw.random() < 0.3:
            draw.choice(graphs)[0].replay()
        if draw.random() < 0.1:
            torch.cuda.empty_cache()
    ends = sorted((address(t), address(t) + t.numel()) for _, kept in graphs for t in kept)
    for (_, end), (start, _) in zip(ends, ends[1:]):
        assert end <= start
    graphs.clear()


def test_callables_become_graphs():
    if not ON_CARD:
        pytest.skip("a model needs kernels: bench/torch-programs has it for a card")
    model = torch.nn.Linear(64, 64, device="cuda")
    graphed = torch.cuda.make_graphed_callables(torch.nn.Linear(64, 64, device="cuda"), (torch.randn(8, 64, device="cuda"),))
    graphed.load_state_dict(model.state_dict())
    for _ in range(3):
        data = torch.randn(8, 64, device="cuda")
        assert torch.allclose(graphed(data), model(data), atol=1e-5)
    del graphed, model, data
