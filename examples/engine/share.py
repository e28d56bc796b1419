"""Two engines share a card, with bursts in turn: caches that grow and shrink against two fixed halves.

    python examples/engine/share.py                   # both, 60 seconds each, and the ratio
    python examples/engine/share.py --deadline inf    # users wait for ever: as many tokens in the end, and sooner
    python examples/engine/share.py --kill            # one engine is killed in a burst; the other serves on

Each engine is a process of `engine.py`. Once both have their weights, this program takes all memory of the card but
`--memory`, which is what caches may have: a half each, or as much as there is. Then bursts begin, by default three a
minute for each engine. A burst has more requests than the card can serve until the other engine's begins; then the rest
is late and given up, so that there are never bursts of both at once. The result is JSON: tokens in the time, made and of
whole answers, waits, commits, the memory that caches had at most, and what is left of it when all is idle.

Without a card each engine simulates one of its own, for a look at the program: figures mean nothing there.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import vramp

GIB = 2**30
SLACK = GIB // 2
"""What torch may take besides, and is left free."""


def start(number: int, kind: str, given: argparse.Namespace, part: float) -> subprocess.Popen[str]:
    """Starts an engine."""
    period = 60 / given.rate
    first = number * period / 2
    bursts = [f"{first + turn * period:.2f}" for turn in range(int(given.seconds // period))]
    command = [sys.executable, str(Path(__file__).with_name("engine.py")), "--serve", "--kind", kind]
    command += ["--memory", str(part), "--bursts", ",".join(bursts), "--seconds", str(given.seconds)]
    command += ["--requests", str(given.requests), "--deadline", str(given.deadline), "--seed", str(100 * number + 1)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ)


def run(kind: str, given: argparse.Namespace, pool: vramp.Pool) -> dict[str, object]:
    """Serves with both engines, and returns what they and the card say."""
    part = given.memory / 2 if kind == "fixed" else given.memory
    before = pool.stats().device_free
    engines = [start(number, kind, given, part) for number in range(2)]
    for number, engine in enumerate(engines):
        assert engine.stdout is not None
        if engine.stdout.readline() != "ready\n":
            raise SystemExit(f"engine {number} did not start")
    # Fixed caches have their halves by now.
    own = given.memory * GIB if kind == "arena" else 0
    free = pool.stats().device_free
    ballast = None
    if not pool.is_simulated:
        ballast = pool.malloc(int(free - own - SLACK))
    usable = pool.stats().device_free
    for engine in engines:
        assert engine.stdin is not None
        engine.stdin.write("go\n")
        engine.stdin.flush()
    watch = Watch(pool)
    if given.kill:
        # In the middle of its second burst.
        time.sleep(1.6 * 60 / given.rate)
        engines[1].kill()
    answers = []
    for engine in engines:
        out, _ = engine.communicate()
        lines = out.strip().splitlines()
        answers.append(json.loads(lines[-1]) if lines else None)
        if answers[-1] is None and not given.kill:
            raise SystemExit("an engine ended without an answer")
    least = watch.end()
    if ballast is not None:
        ballast.free()
        pool.trim()
    alive = [answer for answer in answers if answer is not None]
    return {
        "kind": kind,
        "tokens_per_s": sum(answer["tokens_per_s"] for answer in alive),
        "answered_per_s": sum(answer["answered_per_s"] for answer in alive),
        "failed": sum(answer["asked"] - answer["done"] - answer["late"] for answer in alive),
        "most_taken_gib": (usable - least) / GIB,
        "allowed_gib": usable / GIB,
        "left_on_card_gib": (before - pool.stats().device_free) / GIB,
        "engines": answers,
    }


class Watch:
    """Reads the card's free memory a hundred times a second."""

    def __init__(self, pool: vramp.Pool) -> None:
        self._least = pool.stats().device_free
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(pool,))
        self._thread.start()

    def _run(self, pool: vramp.Pool) -> None:
        while not self._ended.wait(0.01):
            self._least = min(self._least, pool.stats().device_free)

    def end(self) -> int:
        """Ends it and returns the least that was free."""
        self._ended.set()
        self._thread.join()
        return self._least


def main() -> None:
    """Reads the arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--memory", type=float, default=None, help="GiB of both caches together")
    parser.add_argument("--requests", type=int, default=None, help="requests of a burst")
    parser.add_argument("--rate", type=float, default=3, help="bursts of each engine a minute")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--deadline", type=float, default=None, help="seconds for an answer, by default half a period")
    parser.add_argument("--kinds", default="fixed,arena")
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--out", type=Path, help="a file for the result")
    given = parser.parse_args()
    pool = vramp.pool()
    given.memory = given.memory or (0.08 if pool.is_simulated else 2)
    given.deadline = given.deadline or 30 / given.rate
    given.requests = given.requests or (4 if pool.is_simulated else 192)
    results = {kind: run(kind, given, pool) for kind in (["arena"] if given.kill else given.kinds.split(","))}
    result: dict[str, object] = {"device": pool.device_info.name, "driver": pool.device_info.driver, **results}
    if len(results) == 2:
        for name in ("tokens_per_s", "answered_per_s"):
            tokens = {kind: float(str(found[name])) for kind, found in results.items()}
            result[f"ratio of {name}"] = tokens["arena"] / tokens["fixed"] if tokens["fixed"] else None
    text = json.dumps(result, indent=1)
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
