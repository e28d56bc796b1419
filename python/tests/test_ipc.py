"""Memory that processes share, on simulated cards whose memory is the host's, with real processes."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from length import LONG

import vramp

MIB = 1 << 20


def run_python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a program in a fresh interpreter, which must end within a minute. It is not that of `conftest`: the
    other processes here import this file, and find another one.
    """
    environment = {**os.environ, **variables}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )


SECONDS = 60
"""How long a step of another process may take."""

CYCLES = 10_000 if LONG else 1000

KILLS = 200 if LONG else 20


@pytest.fixture
def fresh() -> SpawnContext:
    """Starts processes as new interpreters."""
    return multiprocessing.get_context("spawn")


@pytest.fixture(scope="module")
def quick() -> ForkServerContext:
    """Starts processes in milliseconds: forked from one that has imported vramp and never used it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["numpy", "vramp"])
    return context


@pytest.fixture
def block(pool: vramp.Pool) -> Iterator[vramp.Allocation]:
    """4 MiB with the bytes 0 to 250 repeated."""
    with pool.malloc(4 * MIB) as block:
        np.asarray(block)[:] = _pattern(4 * MIB)
        yield block


def _pattern(size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return (np.arange(size) % 251).astype(np.uint8)


def _counts() -> tuple[int, int]:
    """Open descriptors and mappings of this process."""
    maps = Path("/proc/self/maps").read_text().count("\n")
    return len(os.listdir("/proc/self/fd")), maps


def _until(reached: Any) -> None:
    deadline = time.monotonic() + SECONDS
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def _nothing_is_left(pool: vramp.Pool) -> None:
    """Checks that all memory of the pool returns to the card."""
    _until(lambda: pool.sharing.exported == 0)
    pool.trim()
    assert (pool.stats().reserved, pool.sharing.pinned) == (0, 0)
    pool.audit()


# --- what another process does ---


def _double(tickets: Any, answers: Any) -> None:
    with vramp.open("sim:h200") as pool:
        while (ticket := tickets.get(timeout=SECONDS)) is not None:
            with vramp.ipc.open(ticket, pool) as memory:
                array = np.asarray(memory.array(dtype="uint8"))
                total = int(array.sum())
                array *= 2
                del array
            answers.put((type(ticket).__name__, memory.size, total))


def _hold(ticket: bytes, opened: Any, go_on: Any) -> None:
    pool = vramp.open("sim:h200")
    memory = vramp.ipc.open(ticket, pool)
    opened.set()
    assert go_on.wait(SECONDS)
    array = np.asarray(memory)
    assert (array == _pattern(len(array))).all()
    # Ends without a close: the end of the process closes it.


def _export_until_killed(tickets: Any) -> None:
    with vramp.open("sim:h200") as pool, pool.malloc(4 * MIB) as block:
        np.asarray(block)[:] = _pattern(4 * MIB)
        exported = vramp.ipc.export(block)
        tickets.put(exported.ticket())
        tickets.put(exported.ticket(keep_until_opened=False))
        time.sleep(SECONDS)


def _open_again_and_again(ticket: bytes, opened: Any) -> None:
    with vramp.open("sim:h200") as pool:
        opened.set()
        while True:
            first = vramp.ipc.open(ticket, pool)
            with vramp.ipc.open(ticket, pool) as second:
                np.asarray(second)[0] = 1
            first.close()


# --- two processes ---


def test_bytes_are_visible_both_ways(block: vramp.Allocation, fresh: SpawnContext) -> None:
    tickets, answers = fresh.Queue(), fresh.Queue()
    other = fresh.Process(target=_double, args=(tickets, answers))
    other.start()
    array = np.asarray(block)
    with vramp.ipc.export(block) as exported:
        for factor in (1, 2, 4):
            total = int(array.sum())
            tickets.put(exported.ticket())
            assert answers.get(timeout=SECONDS) == ("Ticket", block.usable_size, total)
            assert exported.wait_released(SECONDS)
            assert (array == (_pattern(len(array)).astype(int) * 2 * factor % 256)).all()
    tickets.put(None)
    other.join(SECONDS)
    assert other.exitcode == 0


def test_the_importer_goes_on_reading_after_the_exporters_end(fresh: SpawnContext) -> None:
    opened, go_on = fresh.Event(), fresh.Event()
    with vramp.open("sim:h200") as pool:
        block = pool.malloc(4 * MIB)
        np.asarray(block)[:] = _pattern(4 * MIB)
        exported = vramp.ipc.export(block)
        other = fresh.Process(target=_hold, args=(exported.ticket(), opened, go_on))
        other.start()
        assert opened.wait(SECONDS)
        exported.close()
        block.free()
        assert pool.sharing.exported == 1, "the other process has it open"
    # The pool is closed, and its memory is no longer this process's.
    go_on.set()
    other.join(SECONDS)
    assert other.exitcode == 0


def test_the_end_of_the_importer_releases_the_memory(
    pool: vramp.Pool, fresh: SpawnContext
) -> None:
    block = pool.malloc(4 * MIB)
    np.asarray(block)[:] = _pattern(4 * MIB)
    opened, go_on = fresh.Event(), fresh.Event()
    with vramp.ipc.export(block) as exported:
        other = fresh.Process(target=_hold, args=(exported.ticket(), opened, go_on))
        other.start()
        assert opened.wait(SECONDS)
        assert (exported.opens, exported.is_held) == (1, True)
        assert not exported.wait_released(0.001)
        block.free()
        pool.trim()
        assert pool.stats().reserved >= 4 * MIB, "the other process has it open"
        go_on.set()
        other.join(SECONDS)
        assert other.exitcode == 0
        assert exported.wait_released(SECONDS)
    _nothing_is_left(pool)


def test_memory_returns_when_importers_are_killed_at_any_moment(
    pool: vramp.Pool, quick: ForkServerContext
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)

    def round(number: int) -> None:
        block = pool.malloc(rng.choice([1, 4096, MIB, 3 * MIB, 64 * MIB]))
        exported = vramp.ipc.export(block)
        ticket = exported.ticket(keep_until_opened=number % 2 == 0)
        started = quick.Event()
        other = quick.Process(target=_open_again_and_again, args=(ticket, started))
        other.start()
        if number % 5:
            assert started.wait(SECONDS)
        time.sleep(rng.random() / 50)
        other.kill()
        other.join(SECONDS)
        assert other.exitcode == -signal.SIGKILL
        other.close()
        block.free()
        exported.revoke(ticket)
        assert exported.wait_released(SECONDS)
        exported.close()

    for number in range(10):
        round(number)
    _nothing_is_left(pool)
    gc.collect()
    descriptors, maps = _counts()
    for number in range(KILLS):
        round(number)
    _nothing_is_left(pool)
    gc.collect()
    after = _counts()
    # The server closes a connection when it sees its end.
    _until(lambda: _counts()[0] <= descriptors + 2)
    assert after[1] <= maps + 20, (maps, after)


def test_a_killed_exporter_leaves_what_is_open_and_later_opens_fail(
    pool: vramp.Pool, fresh: SpawnContext
) -> None:
    tickets = fresh.Queue()
    other = fresh.Process(target=_export_until_killed, args=(tickets,))
    other.start()
    first, second = tickets.get(timeout=SECONDS), tickets.get(timeout=SECONDS)
    memory = vramp.ipc.open(first, pool)
    array = np.asarray(memory)
    other.kill()
    other.join(SECONDS)
    assert (array == _pattern(len(array))).all()
    array[:] = 7
    for ticket in (first, second):
        with pytest.raises(vramp.ExportEndedError, match=f"process {other.pid}.*ended"):
            vramp.ipc.open(ticket, pool)
    assert array.sum() == 7 * len(array)
    del array
    memory.close()


def test_many_processes_open_one_block(block: vramp.Allocation, quick: ForkServerContext) -> None:
    go_on = quick.Event()
    with vramp.ipc.export(block) as exported:
        ticket = exported.ticket(keep_until_opened=False)
        opened = [quick.Event() for _ in range(8)]
        others = [quick.Process(target=_hold, args=(ticket, one, go_on)) for one in opened]
        for other in others:
            other.start()
        assert all(one.wait(SECONDS) for one in opened)
        assert exported.opens == 8
        go_on.set()
        for other in others:
            other.join(SECONDS)
            assert other.exitcode == 0
        assert exported.wait_released(SECONDS)


def test_a_socket_in_a_directory_reaches_the_same(tmp_path: Path) -> None:
    code = """
import sys, vramp
with vramp.open("sim:h200") as pool, pool.malloc(1 << 20) as block:
    with vramp.ipc.export(block) as exported:
        sys.stdout.buffer.write(exported.ticket())
        sys.stdout.flush()
        sys.stdin.read()
"""
    environment = {**os.environ, "VRAMP_IPC_DIRECTORY": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as exporter:
        assert exporter.stdin is not None and exporter.stdout is not None
        ticket = os.read(exporter.stdout.fileno(), 1 << 10)
        assert [path.name[:6] for path in tmp_path.iterdir()] == ["vramp-"]
        with vramp.open("sim:h200") as pool, vramp.ipc.open(ticket, pool) as memory:
            assert memory.size >= MIB
        exporter.stdin.close()
        assert exporter.wait(SECONDS) == 0
    wrong = run_python(
        "import vramp; vramp.ipc.export(vramp.pool().malloc(1 << 20))",
        VRAMP_IPC_DIRECTORY="relative",
        VRAMP_DEVICE="sim",
    )
    assert "use an absolute directory" in wrong.stderr


# --- growth, limits and forks ---


def test_cycles_leave_nothing(pool: vramp.Pool) -> None:
    def cycle() -> None:
        with pool.malloc(4 * MIB) as block, vramp.ipc.export(block) as exported:
            with vramp.ipc.open(exported.ticket(), pool) as memory:
                np.asarray(memory)[0] = 1
            with vramp.ipc.open(exported.ticket(False, synchronize=False), pool):
                pass

    for _ in range(20):
        cycle()
    _nothing_is_left(pool)
    gc.collect()
    objects, before = len(gc.get_objects()), _counts()
    for _ in range(CYCLES):
        cycle()
    _nothing_is_left(pool)
    gc.collect()
    after = _counts()
    assert after[0] <= before[0] and after[1] <= before[1] + 20, (before, after)
    assert len(gc.get_objects()) <= objects + 50


def test_what_is_dropped_is_closed(pool: vramp.Pool) -> None:
    exported = vramp.ipc.export(pool.malloc(4 * MIB))
    memory = vramp.ipc.open(exported.ticket(), pool)
    array = memory.array()
    del exported, memory
    assert pool.sharing.exported == 1, "the array keeps the import"
    del array
    gc.collect()
    _nothing_is_left(pool)


def test_a_forked_child_is_refused_and_ends() -> None:
    code = """
import os, sys, time, vramp
pool = vramp.open("sim:h200")
block = pool.malloc(1 << 20)
exported = vramp.ipc.export(block)
ticket = exported.ticket()
memory = vramp.ipc.open(ticket, pool)
pin = pool.pin(block)
for how in ("exit", "drop", "_exit"):
    child = os.fork()
    if child == 0:
        calls = [
            lambda: vramp.ipc.open(ticket, pool), lambda: vramp.ipc.open(ticket),
            lambda: vramp.ipc.export(block), exported.ticket, lambda: exported.revoke(ticket),
            memory.record_stream, memory.close, lambda: pool.pin(block), pool.comm_pool,
            lambda: pool.grant_access(1), lambda: pool.sharing, lambda: vramp.open_all("sim"),
        ]
        for number, call in enumerate(calls):
            try:
                call()
                os._exit(10 + number)
            except vramp.ForkedError as error:
                if "spawn" not in str(error):
                    os._exit(90)
        if exported.is_held or not exported.wait_released(60):
            os._exit(91)
        if how == "drop":
            exported.close()
            pin.unpin()
            del exported, pin, memory
        if how == "_exit":
            os._exit(0)
        sys.exit(0)
    if os.waitpid(child, 0)[1] != 0:
        sys.exit(f"{how}: {child}")
assert exported.opens == 1 and exported.is_held
memory.close()
assert exported.wait_released(60)
exported.close()
pin.unpin()
block.free()
while pool.sharing.exported:  # the server's thread gives its reference up a moment later
    time.sleep(0.001)
pool.trim()
assert pool.stats().reserved == 0
print("passed")
"""
    done = run_python(code)
    assert (done.returncode, done.stdout) == (0, "passed\n"), done.stderr


def test_a_process_may_end_with_everything_open() -> None:
    code = """
import vramp
pool = vramp.open("sim:h200")
block = pool.malloc(1 << 20)
exported = vramp.ipc.export(block)
memory = vramp.ipc.open(exported.ticket(), pool)
array = memory.array()
pin, comm = pool.pin(block), pool.comm_pool()
cycle = [exported, memory]
cycle.append(cycle)
"""
    done = run_python(code)
    assert (done.returncode, done.stderr) == (0, "")


def test_few_descriptors_are_enough_and_too_few_are_named() -> None:
    code = """
import os, resource, vramp
pool = vramp.open("sim:h200")
block = pool.malloc(600 << 20)
exported = vramp.ipc.export(block)
assert pool.sharing.pinned >= 8, pool.sharing
vramp.ipc.open(exported.ticket(), pool).close()
# Nothing of this one is mapped yet: an open of what is needs no descriptor.
other = vramp.ipc.export(pool.malloc(600 << 20))
ticket = other.ticket(False)
used = max(int(name) for name in os.listdir("/proc/self/fd")) + 1
def limit(number):
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
# The simulated card needs some for each import, at a time; the block has more handles than that.
limit(used + 6)
pool.trim()  # what is mapped still would need no descriptor
vramp.ipc.open(exported.ticket(), pool).close()
held = []
try:
    while True:
        held.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
try:
    vramp.ipc.open(ticket, pool)
except vramp.ExchangeError as error:
    assert "ulimit -n" in str(error), error
else:
    raise SystemExit("it was opened without a descriptor")
for number in held:
    os.close(number)
for each in (exported, other):
    vramp.ipc.open(each.ticket(), pool).close()
    assert each.wait_released(60)
print("passed")
"""
    done = run_python(code)
    assert (done.returncode, done.stdout) == (0, "passed\n"), done.stderr


def test_descriptors_that_another_thread_takes_are_named() -> None:
    code = """
import os, resource, threading, vramp
pool = vramp.open("sim:h200")
exported = vramp.ipc.export(pool.malloc(600 << 20))
vramp.ipc.open(exported.ticket(), pool).close()
used = max(int(name) for name in os.listdir("/proc/self/fd")) + 1
resource.setrlimit(resource.RLIMIT_NOFILE, (used + 8, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
over = threading.Event()
def churn():
    while not over.is_set():
        held = []
        try:
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            pass
        for number in held:
            os.close(number)
churning = threading.Thread(target=churn)
churning.start()
refused = 0
for _ in range(300):
    pool.trim()  # what is mapped still would need no descriptor
    try:
        vramp.ipc.open(exported.ticket(), pool).close()
    except (vramp.ExchangeError, vramp.DriverError) as error:
        # The driver's, if the other thread has closed its descriptors when the process asks for the reason.
        assert "ulimit -n" in str(error), error
        refused += 1
over.set()
churning.join()
vramp.ipc.open(exported.ticket(), pool).close()
assert exported.wait_released(60)
print("passed" if refused else "none was refused")
"""
    done = run_python(code)
    assert (done.returncode, done.stdout) == (0, "passed\n"), done.stderr


# --- objects ---


def test_a_ticket_is_bytes_without_a_visible_secret(block: vramp.Allocation) -> None:
    with vramp.ipc.export(block) as exported:
        ticket = exported.ticket()
        assert isinstance(ticket, vramp.ipc.Ticket) and isinstance(ticket, bytes)
        again = pickle.loads(pickle.dumps(ticket))
        assert type(again) is vramp.ipc.Ticket and again == ticket
        assert repr(ticket) == f"<vramp.ipc.Ticket of {len(ticket)} bytes>"
        with again.open(block.pool) as memory:
            assert memory.pool is block.pool and memory.size == block.usable_size
        for wrong in (b"", b"ticket", bytes(ticket)[:-1], bytes(ticket) + b"x"):
            with pytest.raises(vramp.TicketError, match="no ticket of this version"):
                vramp.ipc.open(wrong, block.pool)
            with pytest.raises(ValueError):
                exported.revoke(wrong)
        with pytest.raises(TypeError):
            vramp.ipc.open("text", block.pool)  # type: ignore[arg-type]


def test_only_tickets_are_sent_to_other_processes(block: vramp.Allocation) -> None:
    with vramp.ipc.export(block) as exported, exported.ticket().open(block.pool) as memory:
        for thing in (block, block.pool, block.array(), exported, memory):
            with pytest.raises(TypeError, match=r"vramp\.ipc\.export\(allocation\)\.ticket\(\)"):
                pickle.dumps(thing)


def test_arrays_of_imports_are_those_of_allocations(block: vramp.Allocation) -> None:
    with vramp.ipc.export(block) as exported:
        memory = vramp.ipc.open(exported.ticket(), block.pool)
        assert memory.ptr != block.ptr
        array = memory.array((2, 100), "float32", offset=MIB)
        view = np.asarray(array)
        view[:] = 1.5
        own = np.asarray(block.array((2, 100), "float32", offset=MIB))
        assert (own == 1.5).all() and array.allocation is memory
        through = np.from_dlpack(array)
        assert through.sum() == 300 and array.__dlpack_device__() == (1, 0)
        with pytest.raises(AttributeError, match="simulated"):
            _ = array.__cuda_array_interface__
        with pytest.raises(vramp.RangeError, match="does not fit"):
            memory.array(memory.size + 1)
        with pytest.raises(vramp.InUseError, match="2 arrays or DLPack tensors still use"):
            memory.close()
        del array, view, through
        memory.record_stream(block.pool.create_stream())
        memory.close()
        memory.close()
        assert memory.is_closed and repr(memory).endswith("closed>")
        for use in (memory.array, memory.record_stream, lambda: memory.ptr):
            with pytest.raises(vramp.ClosedError, match="the import is closed"):
                use()


def test_a_closed_export_refuses_calls_and_opens(block: vramp.Allocation) -> None:
    exported = vramp.ipc.export(block)
    ticket, lost = exported.ticket(), exported.ticket()
    assert exported.is_held and exported.opens == 0
    assert exported.revoke(lost) and not exported.revoke(lost)
    memory = vramp.ipc.open(ticket, block.pool)
    exported.close()
    exported.close()
    for use in (exported.ticket, lambda: exported.opens, exported.wait_released):
        with pytest.raises(vramp.ClosedError, match="the export is closed"):
            use()
    with pytest.raises(vramp.ExportEndedError, match="withdrew the export"):
        vramp.ipc.open(ticket, block.pool)
    assert np.asarray(memory)[5] == 5
    assert repr(exported) == "<vramp.Exported, closed>" and exported.ptr == block.ptr
    memory.close()


def test_what_is_not_a_block_is_not_exported(pool: vramp.Pool) -> None:
    freed = pool.malloc(4096)
    freed.free()
    with pytest.raises(vramp.UnknownPointerError):
        pool.export(freed)
    with pytest.raises(vramp.UnknownPointerError):
        pool.export(12345)
    with pytest.raises(TypeError, match="a vramp.Allocation or an address"):
        pool.export("memory")  # type: ignore[arg-type]
    address = pool.allocate(4096)
    with pool.export(address) as exported:
        assert exported.ptr == address
    pool.deallocate(address)
    for options in ({"sharing": "none"}, {"preset": "stream-ordered"}):
        with vramp.open("sim", **options) as private:
            with pytest.raises(vramp.UnsupportedError, match="cannot be exported"):
                vramp.ipc.export(private.malloc(MIB))
    with vramp.open("sim") as closed:
        kept = closed.malloc(MIB)
        exported = vramp.ipc.export(kept)
    with pytest.raises(vramp.ClosedError):
        exported.ticket()
    with pytest.raises(vramp.ClosedError):
        pool_of_kept = kept.pool
        pool_of_kept.export(kept)


def test_a_closed_pool_leaves_its_imports(block: vramp.Allocation) -> None:
    with vramp.ipc.export(block) as exported:
        with vramp.open("sim:h200") as other:
            memory = vramp.ipc.open(exported.ticket(), other, stream=other.create_stream())
            memory.record_stream()
        assert np.asarray(memory)[3] == 3
        assert exported.is_held
        memory.close()
        assert exported.wait_released(SECONDS)


def test_a_wait_sees_signals_and_other_threads_go_on(block: vramp.Allocation) -> None:
    with vramp.ipc.export(block) as exported:
        ticket = exported.ticket()
        ended: queue.Queue[bool] = queue.Queue()
        waiting = threading.Thread(target=lambda: ended.put(exported.wait_released()))
        waiting.start()
        timer = threading.Timer(0.2, signal.raise_signal, (signal.SIGINT,))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            exported.wait_released()
        assert ended.empty()
        vramp.ipc.open(ticket, block.pool).close()
        assert ended.get(timeout=SECONDS)
        waiting.join()
        kept = exported.ticket()

        def wait() -> None:
            try:
                ended.put(exported.wait_released())
            except vramp.ClosedError:
                ended.put(True)  # it began after the close

        waiting = threading.Thread(target=wait)
        waiting.start()
        exported.close()
        assert ended.get(timeout=SECONDS), "the close ended the ticket"
        waiting.join()
        with pytest.raises(vramp.ExportEndedError):
            vramp.ipc.open(kept, block.pool)
    with vramp.ipc.export(block) as exported:
        for wrong in (-1, float("nan")):
            with pytest.raises(vramp.RangeError, match="seconds from 0 on"):
                exported.wait_released(wrong)
        assert exported.wait_released(0) and exported.wait_released(float("inf"))
