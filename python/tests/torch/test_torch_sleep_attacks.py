"""Programs that pause regions of memory where it is hard to, found by trying to break vramp."""

import gc
import os
import random
import subprocess
import sys
import threading

import pytest
import torch
from support import MIB, ON_CARD, VRAMP, address, allocated, block, busy, capture, live_blocks, run_script, tidy

pytestmark = pytest.mark.skipif(not VRAMP, reason="PyTorch's own allocator has no regions")

if VRAMP:
    import vramp


def fill(tensor, byte):
    """Fills without a kernel."""
    tensor.copy_(torch.full((tensor.numel(),), byte, dtype=torch.uint8))


def holds(tensor, byte):
    return bool((tensor.cpu() == byte).all())


def filled(size, byte):
    made = block(size)
    fill(made, byte)
    return made


def phases(*tags):
    states = {status.tag: status.phase for status in vramp.status()}
    return [states[tag] for tag in tags]


@pytest.fixture(autouse=True)
def ends_awake():
    """Frees are served by regions that sleep too, but the next test begins with none."""
    yield
    vramp.resume()
    gc.collect()


# Captures. A program of its own has streams that nothing has used yet.

CAPTURING = """
import threading
import vramp
MIB = 1 << 20
# While there is a graph, the next one needs no state of the random generator, which is allocated on its stream.
first = torch.cuda.CUDAGraph()
with torch.cuda.graph(first, stream=torch.cuda.Stream()):
    pass
stream = torch.cuda.Stream()
with vramp.region("w"):
    weights = torch.empty(8 * MIB, dtype=torch.uint8, device="cuda")
weights.copy_(torch.full((8 * MIB,), 3, dtype=torch.uint8))
static = torch.zeros(MIB, dtype=torch.uint8, device="cuda")
graph, began, ended = torch.cuda.CUDAGraph(), threading.Event(), threading.Event()
def capture():
    # The work of this capture needs no memory.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode={mode!r}):
        static.copy_(weights[:MIB], non_blocking=True)
        began.set()
        assert ended.wait(60)
thread = threading.Thread(target=capture)
thread.start()
assert began.wait(60)
before = torch.cuda.mem_get_info()
for tags in ("w", None):
    try:
        vramp.pause(tags)
    except vramp.RegionError as error:
        print(error.tag, "captures a graph: end the capture" in str(error), str(error).split("stream")[0])
print([status.phase for status in vramp.status()], torch.cuda.mem_get_info() == before)
ended.set()
thread.join()
graph.replay()
torch.cuda.synchronize()
vramp.pause()
vramp.resume()
graph.replay()
torch.cuda.synchronize()
print(bool((weights.cpu() == 3).all()))
"""
CAPTURED = ["w True the region \"w\" cannot sleep: "] * 2 + ["['awake'] True", "True"]


def pluggable(text):
    text = 'import vramp.torch\nvramp.torch.enable("pluggable")\nimport torch\n' + text
    done = subprocess.run([sys.executable, "-c", text], env=dict(os.environ), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_a_pause_while_another_thread_captures_is_an_error_and_changes_nothing(mode):
    assert run_script(CAPTURING.format(mode=mode)).stdout.splitlines() == CAPTURED


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_so_it_is_on_the_pluggable_route(mode):
    assert pluggable(CAPTURING.format(mode=mode)) == CAPTURED


def test_a_pause_within_a_capture_is_an_error_and_the_graph_is_good():
    with vramp.region("attacked"):
        weights = filled(8 * MIB, 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = block(4 * MIB)
        first.copy_(weights[: 4 * MIB], non_blocking=True)
        with pytest.raises(vramp.RegionError, match="stream.* captures a graph"):
            vramp.pause("attacked")
        second = block(4 * MIB)
    assert phases("attacked") == ["awake"]
    vramp.pause("attacked")
    vramp.resume("attacked")
    graph.replay()
    torch.cuda.synchronize()
    assert holds(weights, 1)
    del graph, first, second


EXTERNAL = """
import ctypes, os
import vramp
name = next(path for path in os.environ["LD_PRELOAD"].split(":") if "libcudart" in path)
runtime = ctypes.CDLL(name)
torch.cuda.init()
with vramp.region("w"):
    weights = torch.empty(8 << 20, dtype=torch.uint8, device="cuda")
for _ in range(3):
    handle = ctypes.c_void_p()
    assert runtime.cudaStreamCreateWithPriority(ctypes.byref(handle), 1, 0) == 0
    stream = torch.cuda.ExternalStream(handle.value)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        try:
            vramp.pause()
        except vramp.RegionError as error:
            print("captures a graph" in str(error))
    del graph
    stream.synchronize()
    assert runtime.cudaStreamDestroy(handle) == 0
    vramp.pause()
    vramp.resume()
"""


@pytest.mark.skipif(ON_CARD, reason="a failure would end the process")
def test_a_stream_of_another_library_captures_and_may_be_destroyed_afterwards():
    assert run_script(EXTERNAL).stdout.splitlines() == ["True"] * 3


FAILED = """
import vramp
with vramp.region("w"):
    weights = torch.empty(8 << 20, dtype=torch.uint8, device="cuda")
graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
try:
    with torch.cuda.graph(graph, stream=stream):
        torch.cuda.synchronize()
except Exception as error:
    print("failed")
torch.cuda.set_stream(torch.cuda.default_stream())
vramp.pause()
vramp.resume()
print([status.phase for status in vramp.status()])
"""


def test_a_capture_that_failed_does_not_keep_regions_awake():
    expected = ["failed", "['awake']"]
    assert run_script(FAILED).stdout.splitlines() == expected
    assert pluggable(FAILED) == expected


KEPT = """
import threading
import vramp
MIB = 1 << 20
def block(): return torch.empty(4 * MIB, dtype=torch.uint8, device="cuda")
stream = torch.cuda.Stream()
outside = block()
with vramp.region("a"): a = block()
with vramp.region("b"): b = block()
before = torch.cuda.memory_allocated()
places = [tensor.data_ptr() for tensor in (outside, a, b)]
graph = torch.cuda.CUDAGraph()
with vramp.region("graph"), torch.cuda.graph(graph, stream=stream):
    result = block()
    for tensor in (outside, a): result.copy_(tensor, non_blocking=True)
    b.record_stream(torch.cuda.current_stream())
    tensor = None
    del outside, a
    other = [b]
    del b
    thread = threading.Thread(target=other.clear)
    thread.start()
    thread.join()
again = [block() for _ in range(4)]
for tag in ("a", "b"):
    with vramp.region(tag): again += [block(), block()]
print(any(tensor.data_ptr() in places for tensor in again))
vramp.pause(); vramp.resume()
graph.replay()
torch.cuda.synchronize()
del graph, result, again
torch.cuda.synchronize()
print(torch.cuda.memory_allocated())
"""


def test_tensors_of_regions_that_a_capture_frees_are_kept_for_its_graph_on_the_pluggable_route():
    assert pluggable(KEPT) == ["False", "0"]


COUNTED = """
import vramp
MIB = 1 << 20
def block(size): return torch.empty(size, dtype=torch.uint8, device="cuda")
with vramp.region("w"):
    kept, freed = block(4 * MIB), block(30 * MIB)
outside = block(4 * MIB)
print(torch.cuda.memory_allocated() // MIB)
vramp.pause()
kept.record_stream(torch.cuda.Stream())
del freed
torch.cuda.empty_cache()
print(torch.cuda.memory_allocated() // MIB, torch.cuda.memory_reserved() // MIB)
with vramp.region("w"):
    try:
        block(MIB)
    except torch.OutOfMemoryError:
        print("not out of memory")
    except RuntimeError as error:
        print('the region "w" sleeps: resume it' in str(error))
vramp.resume()
print(torch.cuda.memory_allocated() // MIB)
"""


def test_tensors_of_regions_are_counted_while_they_sleep_on_both_routes():
    expected = ["38", "8 4", "True", "8"]
    assert pluggable(COUNTED) == expected
    assert run_script(COUNTED).stdout.splitlines() == expected


# Memory pools.


def test_a_request_of_a_memory_pool_in_a_sleeping_region_is_no_out_of_memory_error():
    pool = torch.cuda.MemPool()
    with vramp.region("attacked pool"), torch.cuda.use_mem_pool(pool):
        inside = filled(40 * MIB, 5)
    vramp.pause("attacked pool")
    counted = torch.cuda.memory_stats()["num_ooms"]
    with vramp.region("attacked pool"):
        for scope in (torch.cuda.use_mem_pool(pool), torch.cuda.stream(torch.cuda.Stream())):
            with scope, pytest.raises(RuntimeError, match='region "attacked pool" sleeps: resume') as caught:
                block(400 * MIB)
            assert not isinstance(caught.value, torch.OutOfMemoryError)
    assert torch.cuda.memory_stats()["num_ooms"] == counted
    vramp.resume("attacked pool")
    assert holds(inside, 5)
    del inside, pool


def test_a_cached_block_of_a_sleeping_segment_is_given_to_no_one():
    pool = torch.cuda.MemPool()
    with vramp.region("attacked pool"), torch.cuda.use_mem_pool(pool):
        kept, freed = filled(40 * MIB, 5), block(40 * MIB)
    del freed
    before = allocated()
    vramp.pause("attacked pool")
    with torch.cuda.use_mem_pool(pool):
        with pytest.raises(RuntimeError, match='region "attacked pool".* sleeps') as caught:
            block(40 * MIB)
        assert not isinstance(caught.value, torch.OutOfMemoryError)
        assert allocated() == before
        # No cached block has room for it, and this thread is in no region.
        other = filled(60 * MIB, 6)
    vramp.resume("attacked pool")
    with torch.cuda.use_mem_pool(pool):
        again = filled(40 * MIB, 7)
    assert holds(kept, 5) and holds(other, 6) and holds(again, 7)
    del kept, other, again, pool


def test_checkpoints_of_a_pool_are_restored_after_its_region_slept():
    """What torch.compile(mode="reduce-overhead") does between replays."""
    pool = torch.cuda.graph_pool_handle()
    with vramp.region("tree"):
        root, kept = capture(lambda: [block(4 * MIB) for _ in range(3)], pool)
        state = torch._C._cuda_getCheckpointState(0, pool)
        branch, results = capture(lambda: [block(8 * MIB) for _ in range(2)], pool)
    for byte, tensor in enumerate(kept):
        fill(tensor, byte)
    places = [address(tensor) for tensor in kept]
    for asleep in (False, True, False):
        vramp.pause("tree")
        if not asleep:
            vramp.resume("tree")
        stale = [tensor.untyped_storage()._cdata for tensor in results]
        torch._C._cuda_setCheckpointPoolState(0, state, stale, [])
        results = []
        vramp.resume("tree")
        assert [address(tensor) for tensor in kept] == places and live_blocks(pool) == 3
        assert all(holds(tensor, byte) for byte, tensor in enumerate(kept))
        root.replay()
        branch.replay()
        torch.cuda.synchronize()
    del root, branch, kept, state, results


# Work in flight.


@pytest.mark.skipif(ON_CARD, reason="the fake runtime counts what is waited for")
def test_a_pause_waits_for_work_on_streams_that_only_use_memory():
    with vramp.region("attacked"):
        weights = block(8 * MIB)
    graph, made = capture(lambda: block(MIB))
    copies, replays = torch.cuda.Stream(), torch.cuda.Stream()
    source = torch.full((8 * MIB,), 4, dtype=torch.uint8)
    with busy(copies), busy(replays):
        with torch.cuda.stream(copies):
            weights.copy_(source, non_blocking=True)
        with torch.cuda.stream(replays):
            graph.replay()
        assert not copies.query() and not replays.query()
        vramp.pause("attacked")
        assert copies.query() and replays.query()
    vramp.resume("attacked")
    assert holds(weights, 4)
    del graph, made


def test_memory_that_side_streams_used_sleeps_and_is_reused_afterwards():
    with vramp.region("attacked"):
        kept, freed = filled(8 * MIB, 1), block(8 * MIB)
    side = torch.cuda.Stream()
    with busy(side):
        freed.record_stream(side)
        del freed
        vramp.pause("attacked")
        kept.record_stream(side)
    vramp.resume("attacked")
    with vramp.region("attacked"):
        again = filled(8 * MIB, 2)
    assert holds(kept, 1) and holds(again, 2)


def test_what_is_freed_and_emptied_while_it_sleeps_is_gone_after_the_resume():
    pool = torch.cuda.MemPool()
    before = allocated()
    with vramp.region("asleep"):
        tensors = [filled(size, 1) for size in (512, MIB, 30 * MIB)]
        kept = filled(6 * MIB, 2)
        with torch.cuda.use_mem_pool(pool):
            pooled = filled(30 * MIB, 3)
        graph, result = capture(lambda: block(20 * MIB))
    vramp.pause("asleep")
    tensors.clear()
    del pooled, pool, graph, result
    for _ in range(3):
        tidy()
    assert allocated() == before + 6 * MIB
    vramp.resume("asleep")
    tidy()
    (status,) = [status for status in vramp.status() if status.tag == "asleep"]
    # The handle that it lies in, which other blocks shared.
    assert holds(kept, 2) and status.on_card <= 20 * MIB
    del kept


# Threads, exceptions, forks.


def test_threads_in_and_out_of_nested_regions_get_memory_of_the_innermost_one():
    tags = [f"nested {number}" for number in range(4)]
    # One object for all threads, as a program has in a global.
    scopes = {tag: vramp.region(tag) for tag in tags}
    errors, tensors, lock = [], {tag: [] for tag in tags}, threading.Lock()
    outside = []

    def work(seed):
        chosen = random.Random(seed)
        try:
            for _ in range(20):
                outer, inner = chosen.sample(tags, 2)
                with scopes[outer]:
                    with scopes[inner], scopes[inner]:
                        one = filled(chosen.randrange(1, 3 * MIB), seed)
                    two = filled(chosen.randrange(1, 3 * MIB), seed)
                    with vramp.disable_region():
                        three = filled(1000, seed)
                    with pytest.raises(KeyError), scopes[inner]:
                        raise KeyError
                    four = filled(2000, seed)
                if chosen.random() < 0.3:
                    with lock:
                        tensors[inner].append((one, seed))
                        tensors[outer] += [(two, seed), (four, seed)]
                        outside.append((three, seed))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]
    for tag in tags:
        vramp.pause(tag)
        vramp.resume(tag)
        assert all(holds(tensor, byte) for tensor, byte in tensors[tag])
    vramp.pause()
    # Of the memory that sleeps nothing can be read; what is in no region can.
    assert all(holds(tensor, byte) for tensor, byte in outside)
    vramp.resume()


def test_a_region_that_is_left_on_another_thread_is_an_error_that_says_so():
    scope = vramp.region("generated")

    def generator():
        with scope:
            yield block(MIB)

    running = generator()
    first = next(running)
    caught = []

    def leave():
        try:
            running.close()
        except vramp.RegionError as error:
            caught.append(error)

    thread = threading.Thread(target=leave)
    thread.start()
    thread.join()
    (error,) = caught
    assert error.tag == "generated" and "on the thread that began it" in str(error)
    # This thread is still there, and ends it by the object.
    second = block(3 * MIB)
    scope.__exit__(None, None, None)
    (status,) = [status for status in vramp.status() if status.tag == "generated"]
    assert status.on_card >= 4 * MIB
    with pytest.raises(vramp.RegionError, match="generated"):
        scope.__exit__(None, None, None)
    del first, second


FORKED = """
import os
import vramp
with vramp.region("w"):
    weights = torch.empty(8 << 20, dtype=torch.uint8, device="cuda")
    small = torch.empty(100, dtype=torch.uint8, device="cuda")
weights.copy_(torch.full((8 << 20,), 3, dtype=torch.uint8))
vramp.pause()
child = os.fork()
if child == 0:
    try:
        del weights, small
        for call in (vramp.pause, vramp.resume, vramp.status, lambda: vramp.on_pressure("w")):
            try:
                call()
                os._exit(1)
            except vramp.VrampError:
                pass
        os._exit(0)
    except BaseException:
        import traceback
        traceback.print_exc()
        os._exit(2)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
vramp.resume()
print(bool((weights.cpu() == 3).all()))
"""


@pytest.mark.skipif(ON_CARD, reason="a child of CUDA")
def test_a_child_of_a_fork_can_neither_pause_nor_resume_and_the_parent_can():
    assert run_script(FORKED).stdout.splitlines() == ["0", "True"]


# Memory that runs short.

PRESSURE = """
import vramp
def phases(): return [status.phase for status in vramp.status()]
def block(percent):
    return torch.empty(torch.cuda.mem_get_info()[1] // 100 * percent, dtype=torch.uint8, device="cuda")
kv_region, train_region = (vramp.region(tag, backup="none") for tag in ("kv", "train"))
with kv_region: kv = block(55)
with train_region: train = block(20)
with vramp.on_pressure(["train", "kv"]):
    with train_region:
        more = block(40)
    print(phases())
    vramp.resume("kv")
    print(phases())
    vramp.resume("train")
    print(phases())
    del more
    vramp.resume()
    # In a memory pool of a region.
    pool = torch.cuda.MemPool()
    with train_region, torch.cuda.use_mem_pool(pool):
        more = block(40)
    print(phases())
    del more, pool
    torch.cuda.empty_cache()
    vramp.resume()
with train_region:
    try:
        block(40)
    except torch.OutOfMemoryError:
        print(phases())
"""


@pytest.mark.skipif(ON_CARD, reason="it takes all memory of the card")
def test_a_request_or_a_resume_in_another_region_makes_regions_sleep():
    done = run_script(PRESSURE, FAKE_CUDA_MEMORY=str(1 << 30))
    asleep_kv, asleep_train = "['asleep', 'awake']", "['awake', 'asleep']"
    assert done.stdout.splitlines() == [asleep_kv, asleep_train, asleep_kv, asleep_kv, "['awake', 'awake']"]
