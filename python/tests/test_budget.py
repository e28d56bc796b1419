"""Budgets of processes that share a card, with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import vramp
from vramp import budget

SECONDS = 60
"""How long a step of another process may take."""

GIB = 1 << 30

OTHER = """
import sys, vramp
from vramp import budget

own = budget.join("serving", capacity="8GiB", card="card", directory=sys.argv[1], program="other", timeout=60)
{body}
print("there", flush=True)
sys.stdin.read()
"""


def _join(place: Path, guaranteed: int | str = 0, priority: int = 0) -> budget.Budget:
    return budget.join(
        "serving",
        capacity="8GiB",
        guaranteed=guaranteed,
        card="card",
        directory=place,
        program="test",
        priority=priority,
    )


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "budget"


@pytest.fixture
def own(place: Path) -> Iterator[budget.Budget]:
    with _join(place, "1GiB") as joined:
        yield joined


@pytest.fixture
def pool() -> Iterator[vramp.Pool]:
    with vramp.open("sim:h200") as opened:
        yield opened


def _start(place: Path, body: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", OTHER.format(body=body), str(place)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "there\n"
    return process


def test_claims_of_two_processes_share_the_capacity(place: Path, own: budget.Budget) -> None:
    process = _start(place, "own.claim('6GiB', 0)")
    assert own.room() == budget.BudgetRoom(2 * GIB, 2 * GIB, 8 * GIB)
    own.claim("2GiB", timeout=0)
    assert (own.claimed, own.guaranteed, own.limit, own.capacity) == (2 * GIB, GIB, None, 8 * GIB)
    with pytest.raises(vramp.BudgetTimeoutError, match=f"process {process.pid} \\(other\\) has 6.00 GiB"):
        own.claim(1, timeout=0.1)
    found = {member.program: member for member in own.status().members}
    assert found["other"].pid == process.pid and found["other"].claimed == 6 * GIB
    assert budget.groups(place) == [("card", "serving")]
    process.kill()
    own.claim("6GiB", timeout=SECONDS)
    assert own.give_back("8GiB") == 8 * GIB
    process.wait()
    assert budget.status("serving", "card", directory=place).free == 7 * GIB


def test_a_stopped_process_is_named(place: Path, own: budget.Budget) -> None:
    process = _start(place, "own.claim('7GiB')")
    os.kill(process.pid, signal.SIGSTOP)
    own.claim("1GiB")
    with pytest.raises(TimeoutError, match=f"is stopped \\(`kill -CONT {process.pid}`\\)"):
        own.claim("1GiB", timeout=0.2)
    process.kill()
    process.wait()


def test_a_pool_claims_what_it_reserves_and_gives_idle_memory_back(
    place: Path, pool: vramp.Pool
) -> None:
    own = _join(place)
    own.attach(pool)
    freed: list[int] = []
    cache = [pool.malloc(1 * GIB) for _ in range(4)]

    def reclaim(nbytes: int) -> None:
        freed.append(nbytes)
        cache.pop().free()

    own.on_reclaim(reclaim)
    pool.malloc(2 * GIB).free()
    assert own.claimed >= 6 * GIB
    process = _start(place, "own.claim('4GiB', 60)")
    assert pool.stats().reserved == 4 * GIB and freed == []
    assert budget.status("serving", "card", directory=place).members[0].live == 4 * GIB
    process.communicate(timeout=SECONDS)
    process = _start(place, "own.claim('4500MiB', 60)")
    # No more is returned to the card than the other lacks.
    assert len(freed) == 1 and 3 * GIB <= pool.stats().reserved <= 3692 << 20
    with pytest.raises(vramp.OutOfMemoryError, match="budget: .* cannot be had(.|\n)*\\(other\\) has 4.39 GiB"):
        pool.malloc(8 * GIB)
    process.communicate(timeout=SECONDS)
    with pytest.raises(vramp.InUseError, match="ends with the pool"):
        own.leave()
    with pytest.raises(vramp.InUseError, match="use on_reclaim"):
        own.on_request(lambda nbytes, may_lose: 0)
    with pytest.raises(vramp.InUseError, match="has a budget already"):
        _join(place).attach(pool)
    cache.clear()
    assert own.give_back_idle() > 0 and own.claimed == 0


def test_handlers_without_a_pool_and_commands_of_the_program(
    place: Path, own: budget.Budget, monkeypatch: pytest.MonkeyPatch
) -> None:
    own.claim("8GiB")
    asked: list[tuple[int, bool]] = []

    def give(nbytes: int, may_lose: bool) -> int:
        asked.append((nbytes, may_lose))
        return nbytes if may_lose else 0

    slept: list[str] = []
    own.on_request(give)
    own.on_sleep(lambda action: slept.append(action))
    own.publish(live=7 * GIB, parked=GIB)
    with _join(place) as other:
        other.claim("2GiB", timeout=SECONDS)
        assert own.claimed == 6 * GIB and asked[0][1] is False and asked[-1] == (2 * GIB, True)
        other.give_back("2GiB")

    def ctl(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "vramp", "ctl", *arguments, "--directory", str(place)]
        return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)

    assert "paused" in ctl("pause", "test").stdout and slept == ["pause"]
    assert "1.00 GiB given back" in ctl("give-back", str(os.getpid()), "1GiB").stdout
    assert ctl("limit", "test", "4GiB").returncode == 0 and own.limit == 4 * GIB
    with pytest.raises(vramp.BudgetError, match="limit of 4.00 GiB"):
        own.claim("1GiB")
    own.set_limit(None)

    reported = threading.Event()
    monkeypatch.setattr(sys, "unraisablehook", lambda args: reported.set())
    own.on_sleep(lambda action: 1 / 0 > 1)
    failed = ctl("resume", "test")
    assert failed.returncode == 1 and "could not" in failed.stderr and reported.wait(SECONDS)


def test_wrong_arguments_say_what_to_do(place: Path, own: budget.Budget, pool: vramp.Pool) -> None:
    with pytest.raises(vramp.OptionError, match="are guaranteed of a limit"):
        _join(place, "9GiB")
    with pytest.raises(vramp.BudgetError, match="it would be 7.00 GiB"):
        _join(place, "8GiB")
    with pytest.raises(vramp.OptionError, match="does not name a card or a group"):
        budget.join("a/b", capacity="8GiB", card="card", directory=place)
    with pytest.raises(vramp.BudgetError, match="with a capacity of 8.00 GiB"):
        budget.join("serving", capacity="7GiB", card="card", directory=place)
    with pytest.raises(vramp.RangeError, match="use a size such as"):
        own.claim("much")
    with pytest.raises(vramp.OptionError, match="attach one first"):
        own.on_reclaim(lambda nbytes: None)
    with pytest.raises(TypeError, match="a handler is a function"):
        own.on_sleep("pause")  # type: ignore[arg-type]
    with pytest.raises(OverflowError):
        _join(place, priority=256)
    left = _join(place)
    left.leave()
    left.leave()
    with pytest.raises(vramp.ClosedError, match="join again"):
        left.room()
    assert repr(left) == "<vramp.budget.Budget, left>" and "1.00 MiB" not in repr(own)
    full = pool.malloc("7500MiB")
    with pytest.raises(vramp.BudgetError, match="it would be 7.00 GiB"), _join(place) as small:
        small.attach(pool)
    full.free()


def test_a_wait_ends_with_ctrl_c(place: Path, own: budget.Budget) -> None:
    own.claim("8GiB")
    with _join(place) as other:
        timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            other.claim("1GiB", timeout=SECONDS)
        timer.join()
        assert other.claimed == 0


def test_a_forked_child_has_no_budget_and_keeps_none(place: Path) -> None:
    joined = _join(place)
    joined.claim("8GiB")
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            joined.room()
        except vramp.ForkedError:
            os.write(writing, b"forked")
        signal.pause()
        os._exit(0)
    try:
        assert os.read(reading, 6) == b"forked"
        # The child lives; what its parent had claimed ends with the parent's budget.
        joined.leave()
        with _join(place) as other:
            other.claim("8GiB", timeout=0)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
