"""Turns of processes at a card, with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import vramp
from vramp import turns

SECONDS = 60
"""How long a step of another process may take."""

HOLDER = """
import sys, time
from vramp import turns

line = turns.open("card", directory=sys.argv[1], program="engine")
{handler}
turn = line.acquire()
print("holds", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def line(tmp_path: Path) -> Iterator[turns.Turns]:
    """The line of a card. What processes that ended left is gone after the next look."""
    opened = turns.open("card", directory=tmp_path / "turns", program="trainer")
    yield opened
    assert opened.status() == turns.TurnStatus(None, None, ())
    assert list(Path(opened.directory).iterdir()) == []


def _start(line: turns.Turns, handler: str = "") -> subprocess.Popen[str]:
    """Starts a process that holds the turn until its input ends."""
    directory = Path(line.directory).parent
    command = [sys.executable, "-c", HOLDER.format(handler=handler), str(directory)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "holds\n"
    return process


def _end(process: subprocess.Popen[str]) -> None:
    process.communicate(timeout=SECONDS)


def test_a_with_block_holds_the_turn_of_a_card(line: turns.Turns) -> None:
    with line.acquire(timeout=0, bytes=5) as turn:
        assert turn.is_held and turn.request() is None
        status = line.status()
        assert status.holder is not None and status.waiting == ()
        assert (status.holder.program, status.holder.pid) == ("trainer", os.getpid())
        assert status.holder.bytes == 5 and status.holder.is_pid_valid
        assert status.since is not None and abs(status.since - time.time()) < SECONDS
    assert not turn.is_held
    turn.release()
    assert line.status() == turns.TurnStatus(None, None, ())


def test_the_holder_in_another_process_is_named_when_the_time_is_over(line: turns.Turns) -> None:
    process = _start(line)
    for timeout in (0, 0.25):
        with pytest.raises(vramp.TurnTimeoutError, match=f"process {process.pid} \\(engine\\)"):
            line.acquire(timeout)
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(TimeoutError, match=f"kill -CONT {process.pid}"):
        line.acquire(0.25)
    process.kill()
    line.acquire(SECONDS).release()
    _end(process)


def test_a_handler_in_another_process_releases_the_turn(line: turns.Turns) -> None:
    process = _start(line, "line.on_request(lambda request: request.waiting[0].bytes == 7)")
    with pytest.raises(vramp.TurnTimeoutError):
        line.acquire(0.25, bytes=6)
    with line.acquire(SECONDS, bytes=7):
        pass
    _end(process)
    assert process.returncode == 0


def test_a_handler_refuses_with_a_reason(line: turns.Turns) -> None:
    process = _start(line, "line.on_request(lambda request: request.refuse('a batch runs'))")
    with pytest.raises(vramp.TurnRefusedError, match="engine.*a batch runs"):
        line.acquire(SECONDS)
    _end(process)


def test_a_program_asks_at_safe_points(line: turns.Turns) -> None:
    with line.acquire() as turn:
        assert turn.wait_for_request(0.15) is None
        waits = threading.Thread(target=lambda: line.acquire(SECONDS).release())
        waits.start()
        request = turn.wait_for_request(SECONDS)
        assert request is not None and [found.bytes for found in request.waiting] == [None]
    waits.join(SECONDS)
    assert not waits.is_alive()


def test_an_exception_of_a_handler_is_reported_and_keeps_the_turn(
    line: turns.Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[object] = []
    called = threading.Event()

    def hook(args: sys.UnraisableHookArgs) -> None:
        reported.append(args.exc_value)
        called.set()

    monkeypatch.setattr(sys, "unraisablehook", hook)
    line.on_request(lambda request: 1 // 0 > 0)
    with line.acquire() as turn:
        with pytest.raises(vramp.InUseError):
            turn.request()
        with pytest.raises(vramp.TurnTimeoutError):
            line.acquire(0.25)
        assert called.wait(SECONDS) and isinstance(reported[0], ZeroDivisionError)
        assert turn.is_held
        line.remove_handler()
        assert turn.request() is None
    with pytest.raises(TypeError):
        line.on_request(5)  # type: ignore[arg-type]


def test_a_handler_runs_while_the_main_thread_waits_for_the_interpreter(line: turns.Turns) -> None:
    released: list[bool] = []

    def handler(request: turns.TurnRequest) -> bool:
        released.append(True)
        return True

    line.on_request(handler)
    turn = line.acquire()
    with line.acquire(SECONDS):
        assert released == [True] and not turn.is_held


def test_control_c_ends_the_wait_and_leaves_the_line(line: turns.Turns) -> None:
    with line.acquire():
        timer = threading.Timer(0.2, signal.raise_signal, [signal.SIGINT])
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            line.acquire()
        timer.join()
        assert line.status().waiting == ()


def test_a_forked_child_has_no_turn_and_does_not_keep_that_of_its_parent(line: turns.Turns) -> None:
    code = """
import os, sys, time
import vramp
from vramp import turns

line = turns.open("card", directory=sys.argv[1])
line.on_request(lambda request: False)
turn = line.acquire()
child = os.fork()
if child == 0:
    refused = 0
    for call in (line.acquire, line.status, turn.release, turn.request, line.remove_handler):
        try:
            call()
        except vramp.ForkedError:
            refused += 1
    own = turns.open("card", directory=sys.argv[1], program="child")
    try:
        own.acquire(0)
    except vramp.TurnTimeoutError:
        refused += 1
    del turn, line, own
    print(refused, os.getpid(), flush=True)
    time.sleep(1000)
sys.stdin.read()
"""
    directory = Path(line.directory).parent
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    refused, child = map(int, process.stdout.readline().split())
    try:
        assert refused == 6
        with pytest.raises(vramp.TurnTimeoutError, match=f"process {process.pid}"):
            line.acquire(0)
        process.kill()
        process.wait(SECONDS)
        # The child lives.
        line.acquire(SECONDS).release()
    finally:
        os.kill(child, signal.SIGKILL)
    process.communicate()


def test_functions_of_the_module_share_one_line_for_each_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert turns.default_directory() == tmp_path / "vramp"
    card = f"GPU-{os.getpid()}"
    turns.on_request(lambda request: True, card)
    turn = turns.acquire(card, timeout=0)
    holder = turns.status(card).holder
    assert holder is not None and holder.program == os.path.basename(sys.argv[0])
    with turns.acquire(card, SECONDS):
        assert not turn.is_held
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert turns.default_directory() == Path(f"/tmp/vramp-{os.geteuid()}")


def test_a_simulated_card_has_a_name(tmp_path: Path) -> None:
    assert turns.open("cuda:0", directory=tmp_path / "a").card == "sim:0"
    assert turns.open(0, directory=tmp_path / "a").card == "sim:0"


def test_wrong_arguments_are_errors(tmp_path: Path) -> None:
    with pytest.raises(vramp.OptionError):
        turns.open("a/b", directory=tmp_path / "a")
    with pytest.raises(vramp.FileError):
        turns.open("card", directory=tmp_path / "missing" / "a")
    (tmp_path / "public").mkdir(mode=0o755)
    with pytest.raises(vramp.FileError, match="chmod 700"):
        turns.open("card", directory=tmp_path / "public")
    line = turns.open("card", directory=tmp_path / "a")
    for timeout in (-1, float("nan")):
        with pytest.raises(vramp.RangeError):
            line.acquire(timeout)


def test_the_interpreter_ends_while_a_handler_is_registered_and_called() -> None:
    code = """
import os, tempfile, threading, time
from vramp import turns

folder = tempfile.TemporaryDirectory()
line = turns.open("card", directory=folder.name)
line.on_request(lambda request: time.sleep(0.3))
turn = line.acquire()
threading.Thread(target=line.acquire, daemon=True).start()
time.sleep(0.1)
"""
    subprocess.run([sys.executable, "-c", code], timeout=SECONDS, check=True)


def test_the_interpreter_ends_while_the_handler_of_turns_that_end_is_called(
    line: turns.Turns,
) -> None:
    code = """
import sys, threading
from vramp import turns

inside = threading.Event()
def stay(request):
    inside.set()
    threading.Event().wait()
# The handler refers to the names of this program, but not to the turns.
sys.modules["turns"] = turns.open("card", directory=sys.argv[1])
sys.modules["turns"].on_request(stay)
turn = sys.modules["turns"].acquire()
print("holds", flush=True)
inside.wait()
"""
    command = [sys.executable, "-c", code, str(Path(line.directory).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "holds\n"
        try:
            line.acquire(timeout=SECONDS).release()
            assert process.wait(SECONDS) == 0
        finally:
            process.kill()
