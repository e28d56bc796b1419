"""Deferrable buffers: growth, threads, garbage, forks, and how a process ends."""

from __future__ import annotations

import gc
import itertools
import os
import resource
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy
import pytest
from conftest import MIB, check, fill, run_python
from length import CYCLES, LEFT_BYTES, LONG

import vramp


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _cycles(tiers: vramp.Tiers, controller: vramp.Controller) -> dict[str, Callable[[], object]]:
    """One life of each kind of object."""
    held = tiers.buffer(MIB)
    fill(held, 1)

    def lease() -> None:
        with tiers.buffer(4096).lease("overwrite"):
            pass

    def resident_lease() -> None:
        with held.lease("r", shape=(1024,), dtype="float32") as view:
            view.array((4,), "int8")

    def capsule() -> None:
        with held.lease("rw") as view:
            view.__dlpack__()

    def tensor() -> None:
        with held.lease("r") as view:
            numpy.from_dlpack(view)

    def failure() -> None:
        try:
            held.lease("r", shape=(MIB, 2)).acquire()
        except vramp.VrampError:
            pass

    def abandoned_lease() -> None:
        held.lease("rw").acquire()

    lives_in_cycles = itertools.count(1)

    def cycle_of_objects() -> None:
        buffer = tiers.buffer(4096)
        loop: list[object] = [buffer, buffer.lease("r")]
        loop.append(loop)
        # By itself Python looks at all objects after more garbage the longer it runs, which is resident.
        if next(lives_in_cycles) % 250 == 0:
            gc.collect()

    def registered() -> None:
        buffer = controller.register(tiers.buffer(4096))
        with buffer.lease("rw"):
            pass

    def launch() -> None:
        controller.lock_and_launch_async(lambda view: view, held)

    return {
        "buffer and lease": lease,
        "resident lease": resident_lease,
        "set": lambda: tiers.lease([(held, "r"), (held, "r")]).acquire(),
        "request": lambda: held.lease("r"),
        "capsule": capsule,
        "tensor": tensor,
        "failure": failure,
        "abandoned lease": abandoned_lease,
        "cycle": cycle_of_objects,
        "registered buffer": registered,
        "launch": launch,
        "pin": lambda: held.pin(),
        "reservation": lambda: tiers.reserve(MIB),
        "statistics": tiers.stats,
    }


KINDS = [
    "buffer and lease", "resident lease", "set", "request", "capsule", "tensor", "failure",
    "abandoned lease", "cycle", "registered buffer", "launch", "pin", "reservation", "statistics",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_many_lives_leave_nothing(tiers: vramp.Tiers, kind: str) -> None:
    with vramp.Controller(tiers) as controller:
        lives = _cycles(tiers, controller)
        assert list(lives) == KINDS
        live = lives[kind]
        for _ in range(1000):
            live()
        controller.flush()
        gc.collect()
        objects, resident = len(gc.get_objects()), _resident()
        for step in range(CYCLES):
            live()
            if step % 10_000 == 0:
                controller.flush()
        controller.flush()
        gc.collect()
        assert len(gc.get_objects()) <= objects + 50
        stats = tiers.stats()
        assert (stats.buffers, stats.leases, stats.waiting) == (1, 0, 0)
        assert _resident() - resident < LEFT_BYTES
        del live, lives


def test_a_buffer_that_was_evicted_thousands_of_times(tiers: vramp.Tiers) -> None:
    buffer = tiers.buffer(2 * MIB)
    fill(buffer, 3)

    def move() -> None:
        assert tiers.evict(1) == 2 * MIB
        buffer.retrieve()

    for _ in range(500):
        move()
    gc.collect()
    resident = _resident()
    for _ in range(10_000 if LONG else 2000):
        move()
    assert _resident() - resident < 4 * MIB
    check(buffer, 3)


def test_threads_share_buffers(tiers: vramp.Tiers) -> None:
    """Writers increment all bytes of their buffers, more of which exist than fit."""
    buffers = [tiers.buffer(8 * MIB) for _ in range(16)]
    for buffer in buffers:
        fill(buffer, 0)
    failures: list[BaseException] = []
    rounds = 40

    def work(seed: int) -> None:
        try:
            stream = tiers.pool.create_stream()
            for step in range(rounds):
                first = buffers[(seed * 5 + step) % 16]
                second = buffers[(seed * 5 + step + 1 + step % 7) % 16]
                with tiers.lease([(first, "rw"), (second, "r")], stream, timeout=60.0) as (one, two):
                    data = numpy.asarray(one)
                    seen = numpy.asarray(two)
                    assert (seen == seen[0]).all()
                    data += 1
                if step % 10 == 0:
                    tiers.evict(8 * MIB)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a thread hangs"
    assert failures == []
    total = 0
    for buffer in buffers:
        with buffer.lease("r") as view:
            data = numpy.asarray(view)
            assert (data == data[0]).all()
            total += int(data[0])
    assert total == 6 * rounds


def test_a_handler_that_needs_the_interpreter_runs_while_threads_that_have_it_wait() -> None:
    """Requests and leases find no memory and call a shortage handler in Python, while others compute."""
    called: list[int] = []

    def handler(requested: int) -> bool:
        called.append(requested)
        return False

    stop = threading.Event()

    def compute() -> None:
        while not stop.is_set():
            sum(range(1000))

    failures: list[BaseException] = []

    with vramp.open("sim:h200", limit="64MiB") as pool, pool.on_shortage(handler):
        with vramp.Tiers(pool, host="256MiB") as tiers:

            def allocate() -> None:
                try:
                    while len(called) < 20:
                        pool.malloc(40 * MIB).free()
                except BaseException as error:
                    failures.append(error)

            buffers = [tiers.buffer(16 * MIB) for _ in range(4)]
            threads = [threading.Thread(target=compute) for _ in range(2)]
            threads.append(threading.Thread(target=allocate))
            for thread in threads:
                thread.start()
            deadline = time.monotonic() + 60
            while threads[2].is_alive():
                assert time.monotonic() < deadline, "a thread hangs"
                for buffer in buffers:
                    with buffer.lease("rw", timeout=60.0):
                        pass
            stop.set()
            for thread in threads:
                thread.join(60)
    assert failures == []


def test_destructors_may_use_buffers(tiers: vramp.Tiers) -> None:
    """Destructors run at any allocation of Python, in any thread, and lease."""

    class Leases:
        def __init__(self) -> None:
            self.buffer, self.loop = tiers.buffer(MIB), self

        def __del__(self) -> None:
            with self.buffer.lease("overwrite"):
                tiers.evict(MIB)
            tiers.stats()

    failures: list[object] = []

    def work() -> None:
        try:
            for _ in range(100):
                Leases()
                gc.collect(0)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a thread hangs"
    gc.collect()
    assert failures == []
    assert tiers.stats().buffers == 0


def test_one_of_several_threads_enters_a_lease(tiers: vramp.Tiers) -> None:
    buffer = tiers.buffer(MIB)
    for _ in range(100):
        lease = buffer.lease("rw")
        outcomes: list[str] = []
        barrier = threading.Barrier(4)

        def enter(lease: vramp.Lease = lease, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            try:
                lease.acquire()
                outcomes.append("entered")
            except vramp.InUseError:
                outcomes.append("refused")

        threads = [threading.Thread(target=enter) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sorted(outcomes) == ["entered", "refused", "refused", "refused"]
        lease.release()


FORKED = """
import os, sys, vramp
pool = vramp.open("sim")
tiers = vramp.Tiers(pool, host="256MiB")
controller = vramp.Controller(tiers)
buffer, second = controller.register(tiers.buffer(1 << 20)), tiers.buffer(1 << 20)
buffer.write(b"parent")
lease = second.lease("r")
view = lease.acquire()
capsule, pin, reserved = view.__dlpack__(), buffer.pin(), tiers.reserve(1 << 20)
other = buffer.lease("r")
calls = [lambda: vramp.Tiers(pool, host="256MiB"), lambda: tiers.buffer(1), lambda: tiers.evict(1),
         lambda: tiers.reserve(1), tiers.stats, tiers.audit, tiers.close, tiers.synchronize,
         lambda: tiers.retrieve(buffer), lambda: buffer.is_deferred, lambda: buffer.is_locked,
         buffer.read, lambda: buffer.write(b"child"), buffer.prefetch, buffer.retrieve, buffer.pin,
         buffer.discard, buffer.will_need, lambda: setattr(buffer, "priority", 1), other.acquire,
         controller.flush, lambda: controller.lock(buffer), lambda: vramp.Controller(tiers)]
child = os.fork()
if child == 0:
    for call in calls:
        try:
            call()
        except vramp.ForkedError as error:
            assert "fork" in str(error)
        else:
            os._exit(3)
    lease.release()
    pin.unpin()
    reserved.release()
    del buffer, second, lease, view, capsule, pin, reserved, other, controller, tiers, pool
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
assert buffer.read(0, 6) == b"parent"
assert controller.flush(20)
print("parent goes on")
"""


def test_every_call_in_a_forked_child_is_an_error_and_never_a_hang() -> None:
    done = run_python(FORKED)
    assert (done.returncode, done.stdout) == (0, "parent goes on\n"), done.stderr


START = """
import os, sys, threading, time, vramp
pool = vramp.open("sim", limit="64MiB")
tiers = vramp.Tiers(pool, host="256MiB")
class Client:
    def locked(self, buffer): pass
    def unlocked(self, buffer): pass
    def deferred(self, buffer): pass
    def retrieved(self, buffer): pass
    def freed(self, buffer): pass
"""

ENDS = {
    "globals": "b = tiers.buffer(1 << 20); b.write(b'1'); r = tiers.reserve(1 << 20); p = b.pin()",
    "held lease": "b = tiers.buffer(1 << 20); l = b.lease('rw'); v = l.acquire()",
    "tensor in a module": """
import numpy, types
sys.modules['kept'] = m = types.ModuleType('kept')
with tiers.buffer(1 << 20).lease('r') as view:
    m.tensor = numpy.from_dlpack(view)
""",
    "controller": """
c = vramp.Controller(tiers)
c.add_client(Client())
b = c.register(tiers.buffer(1 << 20))
for _ in range(1000):
    with b.lease('rw'): pass
c.lock(b)
""",
    "client that waits": """
entered = threading.Event()
class Slow:
    def locked(self, buffer):
        entered.set()
        time.sleep(3600)
c = vramp.Controller(tiers)
c.add_client(Slow())
b = c.register(tiers.buffer(1 << 20))
b.write(b'1')
entered.wait()
""",
    "daemon that waits for a lease": """
b = tiers.buffer(1 << 20)
held = b.lease('rw')
held.acquire()
def wait():
    with b.lease('rw', timeout=3600): pass
threading.Thread(target=wait, daemon=True).start()
while not tiers.stats().waiting: time.sleep(0.001)
""",
    "cycle": """
class Loop: pass
a, b = Loop(), Loop()
a.other, b.other = b, a
a.buffer = tiers.buffer(1 << 20)
a.lease = a.buffer.lease('rw')
a.view = a.lease.acquire()
b.controller = vramp.Controller(tiers)
""",
    "atexit": """
import atexit
c = vramp.Controller(tiers)
b = c.register(tiers.buffer(1 << 20))
atexit.register(lambda: (b.write(b'1'), tiers.evict(1), c.flush(), c.close(), pool.close()))
""",
    "destructor": """
class Late:
    def __del__(self):
        with self.buffer.lease('rw'): pass
late = Late()
late.buffer = tiers.buffer(1 << 20)
""",
    "module first": """
c = vramp.Controller(tiers)
b = c.register(tiers.buffer(1 << 20))
b.write(b'1')
for name in [n for n in sys.modules if n.startswith('vramp')]:
    del sys.modules[name]
del vramp
""",
    "pool first": "b = tiers.buffer(1 << 20); del pool; del tiers",
}


@pytest.mark.parametrize("kind", ENDS)
def test_a_process_ends_cleanly(kind: str) -> None:
    done = run_python(START + ENDS[kind])
    assert (done.returncode, done.stderr) == (0, "")


LOOPS = {
    "lease": "b = BUFFERS[i % 8]\n        with b.lease('rw'): pass",
    "set": "tiers.lease([(BUFFERS[i % 8], 'r'), (BUFFERS[(i + 3) % 8], 'rw')]).acquire()",
    "life": "tiers.buffer(1 << 20).write(b'1')",
    "evict": "tiers.evict(1 << 20)",
    "controller": "b = BUFFERS[i % 8]\n        controller.lock_and_launch(lambda view: view.shape, b)",
    "view": "BUFFERS[i % 8].lease('r', shape=(4,), dtype='float32').acquire().__dlpack__()",
}
DAEMONS = """
BUFFERS = [tiers.buffer(16 << 20) for _ in range(8)]
controller = vramp.Controller(tiers, policy=lambda buffer: 0)
controller.add_client(Client())
for b in BUFFERS:
    controller.register(b)
started = threading.Barrier(5)
def work():
    i = 0
    while True:
        WORK
        i += 1
        if i == 3:
            started.wait()
for _ in range(4):
    threading.Thread(target=work, daemon=True).start()
started.wait()
sys.exit()
"""


@pytest.mark.parametrize("loop", LOOPS)
def test_a_process_ends_while_daemon_threads_are_inside_calls(loop: str) -> None:
    program = START + DAEMONS.replace("WORK", LOOPS[loop])
    with ThreadPoolExecutor(2) as processes:
        ends = list(processes.map(lambda _: run_python(program), range(6)))
    assert [(end.returncode, end.stderr) for end in ends] == [(0, "")] * 6


def test_nothing_is_left_in_a_directory(tmp_path: os.PathLike[str]) -> None:
    code = f"""
import vramp
pool = vramp.open("sim", limit="64MiB")
tiers = vramp.Tiers(pool, host="32MiB", disk={str(tmp_path)!r}, disk_limit="1GiB")
buffers = [tiers.buffer(32 << 20) for _ in range(6)]
for buffer in buffers:
    buffer.write(b"1")
assert tiers.stats().disk > 0
"""
    done = run_python(code)
    assert (done.returncode, done.stderr) == (0, "")
    assert os.listdir(tmp_path) == []


def test_a_buffer_is_no_array_without_a_lease(tiers: vramp.Tiers) -> None:
    buffer = tiers.buffer("4MiB")
    with pytest.raises(TypeError, match="until it is leased"):
        numpy.asarray(buffer)
    with pytest.raises(TypeError, match="until it is leased"):
        buffer.array(dtype="u1")


def test_a_reservation_that_an_eviction_serves_says_so(tiers: vramp.Tiers) -> None:
    buffer = tiers.buffer("32MiB")
    with buffer.lease("w"):
        pass
    with pytest.raises(vramp.TierFullError, match="with timeout= idle buffers leave for it first"):
        tiers.reserve("48MiB", "device")
    with tiers.reserve("48MiB", "device", timeout=10):
        pass


def test_a_missing_directory_is_an_error_of_vramp(pool: vramp.Pool) -> None:
    with pytest.raises(vramp.FileError, match="make the directory first"):
        vramp.Tiers(pool, disk="/nope/x")
