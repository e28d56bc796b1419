"""Puts programs that know nothing of vramp to sleep on a card, and wakes them up, while they work.

    python bench/exec/sleep.py --vramp vramp --gib 16 --pauses 100
    python bench/exec/sleep.py --vramp vramp --turns           # two programs that need 60 % of the card each

Builds program.cu with nvcc. Prints JSON; the exit code is 1 if a byte was wrong or a program failed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent


def start(vramp: str, program: list[str], env: dict[str, str]) -> subprocess.Popen[str]:
    command = [vramp, "exec", "--pool", "--sleepable", "--", *program]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)


def child(parent: int) -> int:
    """The process that a command runs: its only child."""
    for _ in range(500):
        found = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        if found:
            return int(found[0])
        time.sleep(0.01)
    raise SystemExit("the program did not start")


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--vramp", default="vramp")
    options.add_argument("--gib", type=float, default=16)
    options.add_argument("--pauses", type=int, default=100)
    options.add_argument("--seconds", type=float, default=20)
    options.add_argument("--turns", action="store_true")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--jax", action="store_true", help="a JAX program in place of the C++ one")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "XDG_RUNTIME_DIR": folder}
        program = str(Path(folder) / "program")
        build = ["nvcc", "-std=c++17", "-O2", "-arch=native", str(HERE / "program.cu"), "-o", program, "-lcuda"]
        subprocess.run(build, check=True)
        if given.turns:
            total = json.loads(subprocess.run([program, "info"], capture_output=True, text=True, check=True).stdout)["total"]
            gib = str(0.6 * total / 2**30)
            began = time.perf_counter()
            both = [start(given.vramp, [program, "work", str(given.seconds), gib], env) for _ in range(2)]
            ended = [one.communicate()[0] for one in both]
            print(json.dumps({"turns": [one.returncode for one in both], "seconds": time.perf_counter() - began, "said": ended}))
            return int(any(one.returncode for one in both))
        words = [sys.executable, str(HERE / "frameworks.py"), "hold", str(given.gib), str(given.seconds)] if given.jax else [
            program, "work", str(given.seconds), str(given.gib)]
        job = start(given.vramp, words, env)
        assert job.stdout is not None
        assert job.stdout.readline() == "ready\n", "the program did not start"
        pid = child(job.pid)
        randoms = random.Random(given.seed)
        times: dict[str, list[float]] = {"pause": [], "resume": []}
        failed = 0
        for _ in range(given.pauses):
            for action, took in times.items():
                began = time.perf_counter()
                done = subprocess.run([given.vramp, "ctl", action, str(pid)], capture_output=True, text=True, env=env)
                took.append(time.perf_counter() - began)
                failed += done.returncode != 0
                if done.returncode and failed < 3:
                    print(done.stdout, done.stderr, file=sys.stderr)
                time.sleep(randoms.random() * 0.05)
            if job.poll() is not None:
                break
        out = job.communicate()[0]
        row = {
            action: {"median s": sorted(took)[len(took) // 2], "GiB/s": given.gib / sorted(took)[len(took) // 2], "times": len(took)}
            for action, took in times.items()
        }
        print(json.dumps({"gib": given.gib, **row, "failed": failed, "code": job.returncode, "said": out}))
        return int(failed or job.returncode != 0)


if __name__ == "__main__":
    sys.exit(main())
