"""Kept memory, with a keeper and real processes on the simulated card."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy
import pytest

import vramp
from vramp import keep

SECONDS = 60
"""How long a step of another process may take."""

MIB = 1 << 20

OTHER = """
import os, signal, sys
import numpy, vramp
keeper = vramp.keep.connect(sys.argv[1], start=False)
pool = vramp.open("sim:h200")
{body}
print("there", flush=True)
sys.stdin.read()
"""

PUBLISHES = """
draft = keeper.draft("model/0", "40MiB", pool=pool, part="16MiB")
at = draft.place("33MiB")
numpy.asarray(draft.array((33 << 20,), "uint8", offset=at))[:] = 7
draft.commit_draft(b"layout", bytes([5] * 32))
"""


class Other:
    """Another process, which ends with the test."""

    def __init__(self, directory: str, body: str) -> None:
        command = [sys.executable, "-c", OTHER.format(body=body), directory]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "there\n"

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=SECONDS)


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[keep.Keeper]:
    found = keep.connect(tmp_path / "keep")
    yield found
    if found.pid is not None:
        found.stop()


def test_memory_of_a_killed_process_is_opened_by_others(keeper: keep.Keeper, pool: vramp.Pool) -> None:
    Other(keeper.directory, PUBLISHES).end()
    with keeper.open("model/0", pool=pool) as kept:
        assert (kept.layout, kept.digest, kept.epoch) == (b"layout", bytes([5] * 32), 1)
        assert kept.readonly and not kept.is_torn and not kept.is_adrift
        array = numpy.asarray(kept)
        assert array.size == 33 * MIB and (array == 7).all()
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
        with pytest.raises(vramp.InUseError, match="model/0"):
            kept.close()
        entry = keeper.entries()[0]
        assert (entry.name, entry.bytes, entry.epoch, entry.state) == ("model/0", 40 * MIB, 1, "whole")
        assert entry.holders == (keep.KeptHolder(os.getpid(), "read"),)
        del array
    keeper.remove("model/0")
    assert keeper.entries() == []


def test_epochs_are_handed_over_between_processes(keeper: keep.Keeper, pool: vramp.Pool) -> None:
    Other(keeper.directory, PUBLISHES).end()
    trainer = Other(
        keeper.directory,
        """
kept = keeper.open("model/0", readonly=False, lock="none", pool=pool)
array = numpy.asarray(kept)
def train():
    for epoch in range(2, 30):
        kept.write()
        array[:] = epoch
        assert kept.commit() == epoch
import threading
threading.Thread(target=train, daemon=True).start()
""",
    )
    with keeper.open("model/0", pool=pool) as kept:
        array = numpy.asarray(kept)
        seen = set()
        while (epoch := kept.yield_to_writer()) < 29:
            assert array[0] in (epoch, 7) and (array[::4096] == array[0]).all()
            seen.add(epoch)
        assert (array == 29).all()
        assert kept.wait_newer(28) == 29
        assert kept.wait_newer(29, timeout=0.01) is None
        del array
    trainer.end()


def test_a_stopped_or_killed_writer_is_named_and_leaves_torn_memory(
    keeper: keep.Keeper, pool: vramp.Pool
) -> None:
    Other(keeper.directory, PUBLISHES).end()
    writer = Other(
        keeper.directory, 'kept = keeper.open("model/0", readonly=False, lock="write", pool=pool)'
    )
    writer.signal(signal.SIGSTOP)
    with pytest.raises(vramp.KeepTimeoutError, match=str(writer.process.pid)):
        keeper.open("model/0", pool=pool, timeout=0.05)
    writer.end()
    with pytest.raises(vramp.TornError, match="model/0"):
        keeper.open("model/0", pool=pool)
    with keeper.open("model/0", readonly=False, lock="write", pool=pool) as kept:
        kept.commit()
    with keeper.open("model/0", pool=pool) as kept:
        assert kept.epoch == 2


def test_one_process_builds_and_those_that_wait_find_it(keeper: keep.Keeper, pool: vramp.Pool) -> None:
    first = keeper.draft("model/1", "2MiB", pool=pool)
    assert first.current is None and first.is_draft
    found: list[tuple[int, bytes] | None] = []

    def second() -> None:
        with keeper.draft("model/1", "2MiB", pool=pool) as draft:
            found.append(draft.current)

    thread = threading.Thread(target=second)
    thread.start()
    first.place(100)
    first.commit_draft(b"", bytes(32))
    thread.join(SECONDS)
    assert found == [(1, bytes(32))]
    first.close()


def test_a_builder_that_is_killed_leaves_nothing(keeper: keep.Keeper, pool: vramp.Pool) -> None:
    builder = Other(keeper.directory, 'draft = keeper.draft("model/2", "64MiB", pool=pool); draft.place("64MiB")')
    assert keeper.entries()[0].draft_pid == builder.process.pid
    builder.end()
    with keeper.draft("model/2", "2MiB", pool=pool) as draft:
        assert draft.current is None
    assert keeper.entries() == []


def test_wrong_uses_say_what_to_do(keeper: keep.Keeper, pool: vramp.Pool, tmp_path: Path) -> None:
    with pytest.raises(vramp.KeepError, match="vramp keep"):
        keep.connect(tmp_path / "nowhere", start=False)
    with pytest.raises(KeyError, match="no entry"):
        keeper.open("missing", pool=pool)
    with pytest.raises(vramp.OptionError, match="name"):
        keeper.open("a b", pool=pool)
    with pytest.raises(vramp.OptionError, match="at least one byte"):
        keeper.draft("model/3", 0, pool=pool)
    with pytest.raises(vramp.OptionError, match='"none", "read" or "write"'):
        keeper.open("missing", lock="both", pool=pool)  # type: ignore[arg-type]
    draft = keeper.draft("model/3", "1MiB", pool=pool)
    with pytest.raises(vramp.RangeError, match="do not fit"):
        draft.place("3MiB")
    with pytest.raises(vramp.RangeError, match="place something"):
        draft.commit_draft()
    with pytest.raises(vramp.KeepError, match="commit of `model/3` failed"):
        draft.read()
    draft.close()
    with pytest.raises(vramp.ClosedError, match="model/3"):
        draft.read()
    with keeper.draft("model/3", "1MiB", pool=pool) as draft:
        with pytest.raises(vramp.KeepError, match="is a draft"):
            draft.read()
        draft.place(1)
        draft.commit_draft()
        with pytest.raises(vramp.KeepError, match="no draft"):
            draft.place(1)
        with pytest.raises(vramp.UnsupportedError, match="reading only"):
            draft.write()
    assert "model/3" in repr(keeper.entries()[0]) and "closed" in repr(draft)


def test_a_hundred_lives_leave_nothing(keeper: keep.Keeper, pool: vramp.Pool) -> None:
    def descriptors(pid: int) -> int:
        return len(os.listdir(f"/proc/{pid}/fd"))

    serving = keeper.pid
    assert serving is not None
    idle = descriptors(serving)  # with a connection that it may not have closed yet

    def live() -> None:
        with keeper.draft("model/4", "2MiB", pool=pool) as draft:
            draft.place(4096)
            draft.commit_draft()
            with keeper.open("model/4", pool=pool) as kept:
                assert kept.ptr != draft.ptr
        keeper.remove("model/4")

    def restoring() -> int:
        threads = Path("/proc/self/task").glob("*/comm")
        return sum(name.read_text().startswith("vramp-restore") for name in threads)

    deadline = time.monotonic() + SECONDS

    def settle() -> None:
        # The thread that restores holds ends a moment after the last one.
        while restoring() > 0:
            assert time.monotonic() < deadline, "a thread restores holds that are closed"
            time.sleep(0.001)

    live()
    settle()
    own = descriptors(os.getpid())
    for _ in range(100):
        live()
    assert keeper.entries() == []
    settle()
    # Its descriptors are closed a moment after it.
    while descriptors(os.getpid()) > own:
        assert time.monotonic() < deadline, "this process has more descriptors than before"
        time.sleep(0.001)
    # The keeper sees the end of a connection a moment later.
    while descriptors(serving) > idle:
        assert time.monotonic() < deadline, "the keeper has more descriptors than before"
        time.sleep(0.001)


def test_all_names_of_a_keeper_have_one_thread(keeper: keep.Keeper, pool: vramp.Pool) -> None:
    Other(keeper.directory, PUBLISHES).end()
    before = len(os.listdir("/proc/self/task"))
    kept = [keeper.open("model/0", pool=pool) for _ in range(20)]
    assert len(os.listdir("/proc/self/task")) <= before + 1
    for each in kept:
        each.close()


def test_a_signal_ends_every_wait(keeper: keep.Keeper, pool: vramp.Pool) -> None:
    Other(keeper.directory, PUBLISHES).end()
    kept = keeper.open("model/0", readonly=False, lock="none", pool=pool)
    writer = keeper.open("model/0", readonly=False, lock="write", pool=pool)
    draft = keeper.draft("model/5", "2MiB", pool=pool)

    class Interrupt(Exception):
        pass

    def interrupt(number: int, _frame: object) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    waits: list[Callable[[], object]] = [
        lambda: kept.read(SECONDS),
        lambda: kept.write(SECONDS),
        lambda: kept.yield_to_writer(SECONDS),
        lambda: kept.wait_newer(1, SECONDS),
        lambda: keeper.open("model/0", pool=pool, timeout=SECONDS),
        lambda: keeper.draft("model/5", "2MiB", pool=pool, timeout=SECONDS),
    ]
    try:
        for wait in waits:
            start = time.monotonic()
            timer = threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGUSR1))
            timer.start()
            with pytest.raises(Interrupt):
                wait()
            timer.join()
            assert time.monotonic() - start < SECONDS / 2
    finally:
        signal.signal(signal.SIGUSR1, before)
    # Nothing that was waited for came afterwards.
    writer.commit()
    assert kept.write(SECONDS) == 2
    draft.close()
    keeper.draft("model/5", "2MiB", pool=pool, timeout=SECONDS).close()


def test_a_handled_signal_does_not_end_a_wait(keeper: keep.Keeper, pool: vramp.Pool) -> None:
    Other(keeper.directory, PUBLISHES).end()
    writer = keeper.open("model/0", readonly=False, lock="write", pool=pool)
    handled: list[int] = []

    def handle(number: int, _frame: object) -> None:
        handled.append(number)
        writer.commit()

    before = signal.signal(signal.SIGUSR1, handle)
    timer = threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGUSR1))
    try:
        timer.start()
        with keeper.open("model/0", pool=pool, timeout=SECONDS) as kept:
            assert kept.epoch == 2 and handled == [signal.SIGUSR1]
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)


def test_an_abandoned_draft_leaves_its_name_to_others_and_its_memory_to_arrays(
    keeper: keep.Keeper, pool: vramp.Pool
) -> None:
    draft = keeper.draft("model/6", "2MiB", pool=pool)
    array = numpy.asarray(draft.array((64,), "uint8", offset=draft.place(64)))
    array[:] = 9
    draft.abandon()
    assert keeper.entries() == [] and (array == 9).all() and not draft.is_draft
    with pytest.raises(vramp.KeepError, match="no draft"):
        draft.abandon()
    with pytest.raises(vramp.KeepError, match="failed"):
        draft.read()
    keeper.draft("model/6", "2MiB", pool=pool, timeout=0).close()
    del array
    draft.close()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_waits_for_no_thread_of_its_parent(keeper: keep.Keeper, pool: vramp.Pool) -> None:
    Other(keeper.directory, PUBLISHES).end()
    kept = keeper.open("model/0", readonly=False, lock="none", pool=pool)
    writer = keeper.open("model/0", readonly=False, lock="write", pool=pool)
    thread = threading.Thread(target=lambda: kept.read(SECONDS))
    thread.start()
    while keeper.entries()[0].waiting == 0:
        time.sleep(0.001)
    child = os.fork()
    if child == 0:
        signal.alarm(SECONDS)
        try:
            assert "forked" in repr(kept) and not kept.is_draft
            calls: list[Callable[[], object]] = [lambda: kept.epoch, lambda: kept.read(0), kept.abandon]
            for call in calls:
                with pytest.raises(vramp.ForkedError):
                    call()
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    writer.commit()
    thread.join(SECONDS)
    assert kept.read() == 2


def test_an_object_serves_other_threads_while_one_waits(keeper: keep.Keeper, pool: vramp.Pool) -> None:
    Other(keeper.directory, PUBLISHES).end()
    reader = Other(keeper.directory, 'kept = keeper.open("model/0", pool=pool)')
    kept = keeper.open("model/0", readonly=False, lock="none", pool=pool)
    written: list[int] = []
    waits = threading.Thread(target=lambda: written.append(kept.write(timeout=SECONDS)))
    waits.start()
    while not keeper.entries()[0].waiting:
        time.sleep(0.001)
    # Another process reads, so the call waits. None of these does.
    assert kept.epoch == 1 and kept.size == 33 * MIB and "epoch 1" in repr(kept)
    assert numpy.asarray(kept.array((16,), "uint8")).tolist() == [7] * 16
    assert not written
    reader.end()
    waits.join(SECONDS)
    assert written == [1]
    kept.commit()
    kept.close()


def test_a_handler_of_a_shortage_may_use_the_draft(keeper: keep.Keeper) -> None:
    with vramp.open("sim:h200", limit="64MiB") as pool:
        seen: list[tuple[int, str]] = []
        with keeper.draft("model/5", "200GiB", pool=pool, part="130GiB") as draft:

            def look(shortage: object) -> bool:
                seen.append((draft.size, repr(draft)))
                return False

            draft.place("130GiB")
            with pool.on_shortage(look), pytest.raises(vramp.OutOfMemoryError):
                draft.place("70GiB")
            assert seen == [(130 * 1024 * MIB, "<vramp.keep.Kept model/5, draft>")]
