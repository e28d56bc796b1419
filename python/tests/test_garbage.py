"""Objects in reference cycles, which a collection ends on whichever thread it runs, at any allocation.

`cargo xtask sanitize` runs these programs at length, where a wrong access to memory ends them.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator

import numpy
import pytest
from conftest import MIB, run_python

import vramp

ROUNDS = 60 * int(os.environ.get("VRAMP_TEST_LENGTH", "1"))
"""How often each thread makes its garbage."""


class Loop:
    """A cycle with what it keeps. Its end runs in a collection and calls the pool, which releases the
    interpreter's lock: then other threads run, and drop and make objects of their own."""

    def __init__(self, pool: vramp.Pool, kept: object, stream: vramp.Stream | None = None) -> None:
        self.pool, self.kept, self.stream, self.own = pool, kept, stream, self

    def __del__(self) -> None:
        self.pool.malloc(4096, self.stream).free()
        self.pool.stats()
        Loop.ended += 1

    ended = 0


@pytest.fixture
def often() -> Iterator[None]:
    """Collections at nearly every allocation, on every thread."""
    before, switch = gc.get_threshold(), sys.getswitchinterval()
    gc.set_threshold(3, 2, 2)
    sys.setswitchinterval(1e-5)
    yield
    gc.set_threshold(*before)
    sys.setswitchinterval(switch)


def on_threads(work: Callable[[int], None]) -> None:
    """Runs it on four threads, while a fifth one collects."""
    failures: list[BaseException] = []
    over = threading.Event()

    def run(seed: int) -> None:
        try:
            work(seed)
        except BaseException as error:
            failures.append(error)

    def collect() -> None:
        while not over.is_set():
            gc.collect()

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    collector = threading.Thread(target=collect)
    for thread in (*threads, collector):
        thread.start()
    for thread in threads:
        thread.join()
    over.set()
    collector.join()
    assert failures == []


def test_any_thread_may_collect_blocks_of_any_other(pool: vramp.Pool, often: None) -> None:
    ended = Loop.ended
    passed: list[object] = []

    def work(seed: int) -> None:
        stream = pool.create_stream()
        for step in range(ROUNDS):
            small = pool.malloc(512 << (seed + step) % 12, stream)
            Loop(pool, small, stream)
            Loop(pool, numpy.asarray(pool.malloc(400).array(100, "float32")))
            Loop(pool, pool.malloc(800, stream).array(200, "float32").__dlpack__(), stream)
            Loop(pool, [pool.measure().__enter__(), pool.pin(pool.malloc(3 * MIB))])
            # Ended by whichever thread takes it out.
            passed.append(Loop(pool, pool.malloc(70_000, stream)))
            if len(passed) > 8:
                del passed[: step % 8]

    on_threads(work)
    passed.clear()
    gc.collect()
    assert Loop.ended - ended == 4 * ROUNDS * 5
    stats = pool.stats()
    assert (stats.live, stats.allocated) == (0, stats.freed)


def test_any_thread_may_collect_buffers_and_leases(tiers: vramp.Tiers, often: None) -> None:
    ended = Loop.ended
    held = tiers.buffer(MIB)
    with held.lease("overwrite") as view:
        numpy.asarray(view)[:] = 7

    def work(seed: int) -> None:
        for step in range(ROUNDS // 2):
            Loop(tiers.pool, tiers.buffer(4096 << step % 4))
            Loop(tiers.pool, held.lease("r").acquire())
            with held.lease("r") as view:
                array = numpy.from_dlpack(view)
                assert array[step] == 7
                Loop(tiers.pool, array[step:])
                del array
            Loop(tiers.pool, [tiers.reserve(4096), held.pin()])

    on_threads(work)
    gc.collect()
    assert Loop.ended - ended == 4 * (ROUNDS // 2) * 4
    stats = tiers.stats()
    assert (stats.buffers, stats.leases, stats.waiting) == (1, 0, 0)


ENDS = """
import gc, sys, threading, vramp
gc.set_threshold(3, 2, 2)
sys.setswitchinterval(1e-5)
pool = vramp.open("sim", limit="256MiB")
tiers = vramp.Tiers(pool, host="256MiB")
class Loop:
    def __init__(self, kept):
        self.kept, self.own = kept, self
    def __del__(self):
        pool.malloc(4096).free()
started = threading.Barrier(5)
local = threading.local()
kept = []
def work():
    local.kept = [Loop(pool.malloc(4096)), tiers.buffer(4096), pool.create_stream()]
    kept.append(Loop(pool.malloc(800).array(200, "float32").__dlpack__()))
    started.wait()
    while True:
        Loop(pool.malloc(70_000))
        Loop(tiers.buffer(4096).lease("overwrite").acquire())
for _ in range(4):
    threading.Thread(target=work, daemon=True).start()
started.wait()
"""


def test_a_process_ends_while_its_threads_have_objects_and_make_garbage() -> None:
    for _ in range(max(3, ROUNDS // 20)):
        ended = run_python(ENDS)
        # A destructor that runs late may find the names of its module gone.
        assert ended.returncode == 0, ended.stderr


FORKS = """
import gc, os, sys, threading, vramp
gc.set_threshold(3, 2, 2)
pool = vramp.open("sim", limit="256MiB")
tiers = vramp.Tiers(pool, host="256MiB")
class Loop:
    def __init__(self, kept):
        self.kept, self.own = kept, self
over = threading.Event()
def work():
    held = []
    stream = pool.create_stream()
    while not over.is_set():
        held.append(pool.malloc(4096, stream))
        Loop(pool.malloc(3 << 20))
        Loop(tiers.buffer(4096).lease("overwrite").acquire())
        if len(held) > 20:
            held.clear()
threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads:
    thread.start()
for _ in range(ROUNDS):
    # Its objects end in the child too, which may release nothing of the parent's.
    mine = [pool.malloc(4096), Loop(pool.malloc(512)), tiers.buffer(4096), pool.create_stream()]
    child = os.fork()
    if child == 0:
        try:
            pool.malloc(1)
        except vramp.ForkedError:
            del mine
            gc.collect()
            os._exit(0)
        os._exit(1)
    if os.waitpid(child, 0)[1] != 0:
        os._exit(1)
over.set()
for thread in threads:
    thread.join()
gc.collect()
pool.audit()
print("parent goes on")
"""


def test_a_fork_while_threads_allocate_leaves_both_processes_usable() -> None:
    forked = run_python(FORKS.replace("ROUNDS", str(max(10, ROUNDS // 6))))
    assert (forked.returncode, forked.stdout) == (0, "parent goes on\n"), forked.stderr


SECOND = """
import sys, vramp
block = vramp.open("sim").malloc(4096)
if sys.version_info >= (3, 13):
    import _interpreters as interpreters
else:
    import _xxsubinterpreters as interpreters
other = interpreters.create()
code = '''
try:
    import vramp
except ImportError as error:
    assert "works only in the first interpreter" in str(error), error
else:
    raise AssertionError("a second interpreter has the module")
'''
for _ in range(3):
    failure = interpreters.run_string(other, code)
    assert failure is None, failure
interpreters.destroy(other)
block.free()
print("the first goes on")
"""


def test_a_second_interpreter_of_a_process_is_refused() -> None:
    done = run_python(SECOND)
    assert (done.returncode, done.stdout) == (0, "the first goes on\n"), done.stderr
