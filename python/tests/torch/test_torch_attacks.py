"""Programs that run on PyTorch's own allocator, found by trying to break vramp."""

import pytest
import torch
from support import GIB, MIB, ON_CARD, VRAMP, allocated, block, busy, run_script, stat, tidy

# Ends a program that hangs, with the stacks of its threads.
WATCH = "import faulthandler; faulthandler.dump_traceback_later({}, exit=True)\n"

# A card's driver reads freed memory where the fake runtime returns error 400.
ENDED_STREAM = """
import ctypes, os
name = next(path for path in os.environ["LD_PRELOAD"].split(":") if "libcudart" in path)
runtime = ctypes.CDLL(name)
torch.cuda.init()
handle = ctypes.c_void_p()
assert runtime.cudaStreamCreateWithPriority(ctypes.byref(handle), 1, 0) == 0
stream = torch.cuda.ExternalStream(handle.value)
with torch.cuda.stream(stream):
    kept = torch.empty(100 << 20, dtype=torch.uint8, device="cuda")
del kept
stream.synchronize()
assert runtime.cudaStreamDestroy(handle) == 0
"""


@pytest.mark.skipif(ON_CARD, reason="a failure would end the process")
def test_the_cache_is_emptied_after_a_stream_was_destroyed():
    done = run_script(ENDED_STREAM + "torch.cuda.empty_cache(); print(torch.cuda.memory_reserved())", check=False)
    assert done.stdout == "0\n", done.stderr


@pytest.mark.skipif(ON_CARD, reason="a failure would end the process")
def test_running_out_after_a_stream_was_destroyed_is_pytorchs_error():
    text = """
try:
    torch.empty(1 << 37, dtype=torch.uint8, device="cuda")
    torch.empty(1 << 37, dtype=torch.uint8, device="cuda")
    kept = [torch.empty(1 << 36, dtype=torch.uint8, device="cuda") for _ in range(3)]
except torch.OutOfMemoryError:
    print("out of memory")
"""
    done = run_script(ENDED_STREAM + text, check=False)
    assert done.stdout == "out of memory\n", done.stderr


@pytest.mark.skipif(ON_CARD, reason="a failure would end the process")
def test_a_fraction_is_set_after_a_stream_was_destroyed():
    text = "torch.cuda.set_per_process_memory_fraction(0.0005); print('set')"
    done = run_script(ENDED_STREAM + text, check=False)
    assert done.stdout == "set\n", done.stderr


def test_statistics_are_read_while_another_thread_adds_a_segment_to_a_pool_under_history():
    # The thread that grows the pool holds the lock of PyTorch's allocator and waits for Python's; this
    # thread holds Python's and waits for the other.
    text = """
import threading, time
torch.cuda.init()
torch.cuda.memory._record_memory_history(max_entries=100, stacks="python")
end = time.monotonic() + 4

def grow():
    while time.monotonic() < end:
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            kept = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
        del kept, pool
        torch.cuda.empty_cache()

thread = threading.Thread(target=grow)
thread.start()
while time.monotonic() < end:
    torch.cuda.memory_stats()
thread.join()
print("ended")
"""
    done = run_script(WATCH.format(30) + text, check=False)
    assert done.stdout == "ended\n", done.stderr


def test_history_is_stopped_while_another_thread_trims():
    # The observer of growth waits for Python's lock, which the thread that removes the observer holds.
    text = """
import sys, threading, time
torch.cuda.init()
sys.setswitchinterval(0.05)
end = False

def trim():
    while not end:
        kept = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
        del kept
        torch.cuda.empty_cache()

thread = threading.Thread(target=trim)
thread.start()
for _ in range(40):
    torch.cuda.memory._record_memory_history(max_entries=100, stacks="python")
    time.sleep(0.001)
    # Long enough for the other thread to wait for Python's lock, and too short for it to get the lock.
    until = time.perf_counter() + 0.02
    while time.perf_counter() < until:
        pass
    torch.cuda.memory._record_memory_history(None)
end = True
thread.join()
print("ended")
"""
    done = run_script(WATCH.format(60) + text, check=False)
    assert done.stdout == "ended\n", done.stderr


def test_a_pool_is_deleted_while_another_thread_runs_out_of_memory():
    text = """
import threading, time
torch.cuda.init()
spare = torch.cuda.MemPool(use_on_oom=True)
with torch.cuda.use_mem_pool(spare):
    kept = torch.empty(4 << 20, dtype=torch.uint8, device="cuda")
del kept
end = time.monotonic() + 5

def run_out():
    while time.monotonic() < end:
        try:
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError:
            pass

threads = [threading.Thread(target=run_out) for _ in range(2)]
for thread in threads:
    thread.start()
while time.monotonic() < end:
    pool = torch.cuda.MemPool()
    del pool
for thread in threads:
    thread.join()
print("ended")
"""
    done = run_script(WATCH.format(60) + text, check=False)
    assert done.stdout == "ended\n", (done.returncode, done.stderr[:600])


def test_threads_that_run_out_of_memory_are_all_served_by_one_spare_pool():
    # Each thread has one block at a time, and the pool has one for each.
    text = """
import threading
torch.cuda.init()
THREADS, ROUNDS = 6, 150
spare = torch.cuda.MemPool(use_on_oom=True)
block = lambda: torch.empty(4 << 20, dtype=torch.uint8, device="cuda")
with torch.cuda.use_mem_pool(spare):
    kept = [block() for _ in range(THREADS)]
del kept
torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / torch.cuda.mem_get_info()[1])
start, served, failures = threading.Barrier(THREADS), [], []

def run_out():
    start.wait()
    for _ in range(ROUNDS):
        try:
            kept = block()
            served.append(kept.untyped_storage().data_ptr())
            del kept
        except Exception as error:
            failures.append(f"{type(error).__name__}: {error}"[:300])

threads = [threading.Thread(target=run_out) for _ in range(THREADS)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
segments = spare.snapshot()
inside = lambda a: any(s["address"] <= a < s["address"] + s["total_size"] for s in segments)
print(len(served), all(map(inside, served)), sorted(set(failures)), spare.use_count())
del spare
torch.cuda.empty_cache()
print(torch.cuda.memory_reserved())
"""
    done = run_script(WATCH.format(60) + text, check=False)
    assert done.stdout == "900 True [] 1\n0\n", (done.stdout, done.stderr[:600])


@pytest.mark.skipif(not VRAMP, reason="PyTorch's own allocator fails with another error")
def test_a_spare_pool_that_another_thread_has_open_is_left_to_it():
    text = """
import threading
torch.cuda.init()
spare = torch.cuda.MemPool(use_on_oom=True)
block = lambda size: torch.empty(size << 20, dtype=torch.uint8, device="cuda")
opened, ended = threading.Event(), threading.Event()

def use():
    with torch.cuda.use_mem_pool(spare):
        kept = block(4)
        del kept
        opened.set()
        ended.wait()

thread = threading.Thread(target=use)
thread.start()
opened.wait()
uses = spare.use_count()
for _ in range(3):
    try:
        block(1 << 30)
    except RuntimeError as error:
        print(type(error).__name__)
print(spare.use_count() - uses)
ended.set()
thread.join()
"""
    done = run_script(WATCH.format(60) + text, check=False)
    assert done.stdout == "OutOfMemoryError\n" * 3 + "0\n", (done.stdout, done.stderr[:600])


def test_a_block_of_a_pool_is_free_once_the_other_stream_is_done_and_anything_is_allocated():
    pool, stream = torch.cuda.MemPool(), torch.cuda.Stream()
    active = stat("active_bytes.all.current")
    with torch.cuda.use_mem_pool(pool):
        kept = block(64 * MIB)
    with busy(stream):
        kept.record_stream(stream)
        del kept
        assert stat("active_bytes.all.current") == active + 64 * MIB
    torch.cuda.synchronize()
    # Any request processes the events of frees; on vramp one of 16 does.
    for _ in range(16 if VRAMP else 1):
        other = block(512)
    assert stat("active_bytes.all.current") == active + 512
    del other


def test_a_forked_child_records_the_use_of_a_tensor():
    text = """
import os
kept = torch.empty(1000, device="cuda")
stream = torch.cuda.Stream()
child = os.fork()
if child == 0:
    try:
        kept.record_stream(stream)
    except BaseException:
        os._exit(1)
    os._exit(0)
print(os.waitpid(child, 0)[1])
"""
    assert run_script(text).stdout == "0\n"


def test_a_lower_fraction_leaves_cached_memory_in_use():
    tidy()
    kept = block(1 * GIB)
    del kept
    torch.cuda.set_per_process_memory_fraction(0.0)
    again = block(1 * GIB)
    del again
    assert allocated() == 0
