"""Streams in PyTorch: memory that another stream uses, streams that end, and copies."""

import gc
import random
import threading

import pytest
import torch
from support import MIB, ON_CARD, address, allocated, block, busy, has_address, runtime, segments, stat, tidy


def test_a_block_used_by_another_stream_is_free_when_that_use_is_over():
    stream = torch.cuda.Stream()
    start = allocated()
    with busy(stream):
        kept = block(4 * MIB)
        at = address(kept)
        kept.record_stream(stream)
        del kept
        assert allocated() == start
        others = [block(4 * MIB) for _ in range(3)]
        assert at not in [address(other) for other in others]
    others.clear()
    stream.synchronize()
    torch.cuda.synchronize()
    again = [block(4 * MIB) for _ in range(4)]
    assert at in [address(other) for other in again]
    again.clear()


def test_a_block_in_use_elsewhere_is_active_and_pending_and_not_allocated():
    stream = torch.cuda.Stream()
    with busy(stream):
        kept = block(4 * MIB)
        holder = torch.empty(0, device="cuda", dtype=torch.uint8)
        at = address(kept)
        kept.record_stream(stream)
        active = stat("active_bytes.all.current")
        count = stat("active.all.current")
        low = allocated()
        del kept
        assert allocated() == low - 4 * MIB
        assert stat("active_bytes.all.current") == active
        assert stat("active.all.current") == count
        states = [
            part["state"]
            for segment in segments()
            for part in segment["blocks"]
            if part["address"] == at
        ]
        assert states == ["active_pending_free"]
    stream.synchronize()
    block(512)
    assert stat("active_bytes.all.current") <= active - 4 * MIB
    assert has_address(holder) in ([], ["inactive"])


def test_emptying_the_cache_waits_for_other_streams():
    stream = torch.cuda.Stream()
    reserved = torch.cuda.memory_reserved()
    with busy(stream):
        kept = block(64 * MIB)
        kept.record_stream(stream)
        del kept
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() == reserved
    assert stat("active_bytes.all.current") == allocated()


def test_a_use_by_its_own_stream_defers_nothing():
    stream = torch.cuda.Stream()
    with busy(stream):
        kept = block(4 * MIB, stream)
        at = address(kept)
        kept.record_stream(stream)
        del kept
        again = block(4 * MIB, stream)
        assert address(again) == at
        del again


def test_a_use_of_a_view_counts_for_the_whole_block():
    stream = torch.cuda.Stream()
    with busy(stream):
        kept = block(4 * MIB)
        view = kept[MIB:]
        at = address(kept)
        view.record_stream(stream)
        del kept, view
        other = block(4 * MIB)
        assert address(other) != at
        del other


def test_every_stream_that_used_a_block_has_to_finish():
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    with busy(second):
        with busy(first):
            kept = block(4 * MIB)
            at = address(kept)
            for stream in (first, second, first):
                kept.record_stream(stream)
            del kept
        first.synchronize()
        other = block(4 * MIB)
        assert address(other) != at
        del other
    second.synchronize()
    # Which malloc notices the end of the work is the allocator's choice; emptying the cache does.
    tidy()
    assert stat("active_bytes.all.current") == allocated()


def test_uses_by_many_streams_are_over_with_them():
    streams = [torch.cuda.Stream() for _ in range(32)]
    draw = random.Random(5)
    for _ in range(500):
        kept = block(draw.randrange(1, 2 * MIB))
        for stream in draw.sample(streams, 8):
            kept.record_stream(stream)
        del kept
    torch.cuda.synchronize()
    tidy()
    assert stat("active_bytes.all.current") == allocated() == 0
    if not ON_CARD:
        assert runtime().fake_cuda_events() < 500 * 8


def test_events_of_deferred_frees_are_used_again():
    if ON_CARD:
        pytest.skip("the number of events is known to the fake runtime only")
    stream = torch.cuda.Stream()

    def work(rounds):
        for _ in range(rounds):
            kept = block(MIB)
            kept.record_stream(stream)
            del kept
        torch.cuda.synchronize()
        tidy()
        return runtime().fake_cuda_events()

    few = work(50)
    assert work(2000) <= few + 64


def test_memory_of_one_stream_is_not_given_to_another_before_it_is_over():
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    with busy(first):
        kept = block(30 * MIB, first)
        at = address(kept)
        del kept
        other = block(30 * MIB, second)
        assert address(other) != at
        same = block(30 * MIB, first)
        del other, same


def test_a_stream_that_ended_leaves_no_memory_behind():
    start = torch.cuda.memory_reserved()
    for _ in range(200):
        stream = torch.cuda.Stream()
        kept = block(MIB, stream)
        kept.record_stream(torch.cuda.current_stream())
        del kept, stream
    gc.collect()
    tidy()
    assert torch.cuda.memory_reserved() == start
    assert allocated() == 0


def test_external_streams_may_be_destroyed_before_their_memory():
    if ON_CARD:
        pytest.skip("streams are created through the fake runtime's own functions")
    import ctypes

    handle = ctypes.c_void_p()
    assert runtime().cudaStreamCreate(ctypes.byref(handle)) == 0
    stream = torch.cuda.ExternalStream(handle.value)
    kept, used = block(4 * MIB, stream), block(4 * MIB)
    used.record_stream(stream)
    stream.synchronize()
    del used
    block(512)
    del kept
    torch.cuda.synchronize()
    tidy()
    assert runtime().cudaStreamDestroy(handle) == 0
    assert allocated() == 0
    again = block(4 * MIB)
    del again


def test_a_stream_appears_in_its_segments():
    stream = torch.cuda.Stream()
    kept = block(30 * MIB, stream)
    found = [segment for segment in segments() if segment["active_size"]]
    assert [segment["stream"] for segment in found] == [stream.cuda_stream]
    del kept


def test_copies_arrive():
    host = torch.arange(100_000, dtype=torch.int32)
    card = host.cuda()
    back = card.cpu()
    assert torch.equal(back, host)
    pinned = host.pin_memory()
    again = torch.empty_like(card)
    again.copy_(pinned, non_blocking=True)
    other = torch.empty_like(card)
    other.copy_(again)
    torch.cuda.synchronize()
    assert torch.equal(other.cpu(), host)


def test_pinned_memory_in_use_by_a_copy_is_not_given_out():
    stream = torch.cuda.Stream()
    host = torch.empty(MIB, dtype=torch.uint8, pin_memory=True)
    at = host.data_ptr()
    card = block(MIB)
    with busy(stream):
        with torch.cuda.stream(stream):
            card.copy_(host, non_blocking=True)
        del host
        other = torch.empty(MIB, dtype=torch.uint8, pin_memory=True)
        assert other.data_ptr() != at
        del other
    stream.synchronize()
    again = torch.empty(MIB, dtype=torch.uint8, pin_memory=True)
    assert again.data_ptr() == at
    del card, again


def test_a_loader_that_prefetches_on_a_stream_of_its_own_stays_within_three_batches():
    stream, size = torch.cuda.Stream(), 8 * MIB
    torch.cuda.reset_peak_memory_stats()
    start = allocated()
    current = torch.cuda.current_stream()

    def load():
        with torch.cuda.stream(stream):
            return torch.empty(size, dtype=torch.uint8, pin_memory=True).to("cuda", non_blocking=True)

    upcoming = load()
    for _ in range(50):
        current.wait_stream(stream)
        batch, upcoming = upcoming, load()
        batch.record_stream(current)
        del batch
    del upcoming
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() <= start + 3 * size


def test_threads_with_streams_of_their_own_get_memory_of_their_own():
    held, lock, errors = {}, threading.Lock(), []

    def work(seed):
        stream, draw = torch.cuda.Stream(), random.Random(seed)
        try:
            with torch.cuda.stream(stream):
                for _ in range(200):
                    kept = block(draw.randrange(1, MIB))
                    with lock:
                        at = address(kept)
                        assert at not in held, "one address twice"
                        held[at] = seed
                    with lock:
                        del held[at]
                    del kept
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    torch.cuda.synchronize()


def test_live_blocks_never_overlap():
    draw, kept = random.Random(11), []
    streams = [torch.cuda.Stream() for _ in range(3)] + [torch.cuda.current_stream()]
    for _ in range(1500):
        if kept and draw.random() < 0.48:
            kept.pop(draw.randrange(len(kept)))
        else:
            kept.append(block(draw.choice((1, 700, 40_000, MIB, 3 * MIB, 11 * MIB)), draw.choice(streams)))
        if len(kept) > 150:
            del kept[:100]
    ends = sorted((address(tensor), address(tensor) + tensor.numel()) for tensor in kept)
    for (_, end), (start, _) in zip(ends, ends[1:]):
        assert end <= start
    assert all(start % 512 == 0 for start, _ in ends)
    kept.clear()


def made_elsewhere():
    """A stream that PyTorch did not make, as its address."""
    import ctypes

    handle = ctypes.c_void_p()
    library = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")
    assert library.cudaStreamCreateWithPriority(ctypes.byref(handle), 1, 0) == 0
    return handle.value


def test_a_stream_of_another_library_may_end_once_its_tensors_are_freed():
    runtime = torch.cuda.cudart()
    for is_used_elsewhere in (False, True):
        handle = made_elsewhere()
        stream = torch.cuda.ExternalStream(handle)
        if is_used_elsewhere:
            kept = block(4 * MIB)
            kept.record_stream(stream)
        else:
            with torch.cuda.stream(stream):
                kept = block(4 * MIB)
        del kept
        gc.collect()
        assert runtime.cudaStreamDestroy(handle) == runtime.cudaError.success
        torch.cuda.empty_cache()
        with pytest.raises(torch.OutOfMemoryError):
            block(1 << 50)
        assert torch.cuda.memory_allocated() == 0
