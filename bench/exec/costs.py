"""What `vramp exec` costs and saves on a card, with programs that know nothing of vramp.

    python bench/exec/costs.py --exec 'vramp exec' [--parts loops,jobs,fragments,steady,start]

Builds program.cu with nvcc. Prints a JSON line for each measurement; the exit code is 1 if a result differs from the
program's own without vramp.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
JOBS = {
    "cupy": {}, "numba": {}, "conv": {}, "graph": {}, "llama": {},
    "jax": {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
    "jax platform": {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"},
    "jax async": {"TF_GPU_ALLOCATOR": "cuda_malloc_async"},
    "torch": {},
    "torch expandable": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    "torch async": {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"},
    "torch uncached": {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
}


class Runner:
    """Runs programs natively and under `vramp exec`, in a folder for recordings."""

    def __init__(self, command: str, folder: Path) -> None:
        self.command = shlex.split(command)
        self.folder = folder
        self.wrong = 0

    def words(self, mode: str) -> list[str]:
        if mode == "native":
            return []
        words = list(self.command)
        for part in mode.split("+"):
            first, *rest = part.split()
            words += [f"--{first}", *([str(self.folder / "run.vtrace")] if first == "record" else []), *rest]
        return [*words, "--"]

    def run(self, mode: str, program: list[str], **env: str) -> subprocess.CompletedProcess[str]:
        command = [*self.words(mode), *program]
        return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env}, timeout=300)

    def number(self, mode: str, program: list[str], key: str, **env: str) -> float | str:
        ended = self.run(mode, program, **env)
        try:
            return json.loads(ended.stdout.strip().splitlines()[-1])[key]
        except (IndexError, ValueError, KeyError):
            self.wrong += 1
            return f"code {ended.returncode}: {(ended.stdout + ended.stderr)[-300:]}"

    def same(self, what: str, modes: list[str], program: list[str], **env: str) -> None:
        native = self.run("native", program, **env)
        row: dict[str, object] = {"job": what, "native": [native.returncode, native.stdout[-200:]]}
        for mode in modes:
            ended = self.run(mode, program, **env)
            same = (ended.returncode, ended.stdout) == (native.returncode, native.stdout)
            row[mode] = "same" if same else [ended.returncode, ended.stdout[-300:], ended.stderr[-600:]]
            self.wrong += not same
        print(json.dumps(row), flush=True)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--exec", default="vramp exec")
    options.add_argument("--parts", default="start,loops,jobs,many,fragments,steady")
    options.add_argument("--jobs", help="names of jobs, with commas; all without it")
    given = options.parse_args()
    chosen = given.jobs.split(",") if given.jobs else ["contexts", "churn", *JOBS]
    parts = given.parts.split(",")
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(given.exec, Path(folder))
        program = str(Path(folder) / "program")
        build = ["nvcc", "-std=c++17", "-O2", "-arch=native", str(HERE / "program.cu"), "-o", program, "-lcuda"]
        subprocess.run(build, check=True)
        python = [sys.executable, str(HERE / "frameworks.py")]
        if "start" in parts:
            times = {}
            for mode in ("native", "record", "pool"):
                start = time.perf_counter()
                for _ in range(20):
                    subprocess.run([*runner.words(mode), "/bin/true"], check=True, capture_output=True)
                times[mode] = round((time.perf_counter() - start) / 20 * 1000, 2)
            print(json.dumps({"start of /bin/true, ms": times}), flush=True)
        if "loops" in parts:
            for what, size, count in (("loop", 1 << 26, 300), ("loop", 1 << 20, 300), ("loop", 4096, 2000), ("async", 1 << 26, 20000), ("async", 4096, 20000)):
                row = {mode: runner.number(mode, [program, what, str(size), str(count)], "ns") for mode in ("native", "record", "record --stacks 0", "pool", "pool+record")}
                print(json.dumps({"ns of a pair": f"{what} {size}", **row}), flush=True)
        if "jobs" in parts:
            modes = ["record", "pool", "limit 20GiB"]
            for what in chosen:
                if what in JOBS:
                    runner.same(what, modes, [*python, what.split()[0]], **JOBS[what])
                else:
                    runner.same(what, [*modes, "pool+record"], [program, *{"contexts": ["contexts"], "churn": ["churn", "3", "1"]}[what]])
        if "many" in parts:
            with concurrent.futures.ThreadPoolExecutor(8) as threads:
                ended = list(threads.map(lambda seed: runner.run("pool", [program, "churn", "3", str(seed)]), range(8)))
            print(json.dumps({"8 processes at once": [one.returncode for one in ended], "stdout": sorted({one.stdout for one in ended})}), flush=True)
            runner.wrong += any(one.returncode for one in ended)
        if "fragments" in parts:
            native = runner.run("native", [program, "fragments", "85"])
            pool = runner.run("pool", [program, "fragments", "85"])
            print(json.dumps({"fragments": {"native": [native.returncode, native.stdout], "pool": [pool.returncode, pool.stdout, pool.stderr[-800:]]}}), flush=True)
            limit = runner.run("limit 20GiB", [program, "info"])
            print(json.dumps({"limit 20GiB": limit.stdout}), flush=True)
        if "steady" in parts:
            for what in ("cupy", "torch"):
                row = {mode: runner.number(mode, [*python, "steady", what], "seconds") for mode in ("native", "record", "pool")}
                print(json.dumps({"seconds of a steady loop": what, **row}), flush=True)
    return 1 if runner.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
