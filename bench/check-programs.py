#!/usr/bin/env python3
"""Runs the programs of torch-programs natively and with `python -m vramp run`, and compares what they print.

    check-programs.py [NAME...] [--list] [--timeout 600] [--repeat 1] [--only native|vramp]

NAME is a part of a program's name; without one, all run. Needs a card and the package vramp. Each run is a
process of its own. A program passes if both runs succeed with equal facts and with numbers that are equal
but for rounding. Prints for each PASS, FAIL or SKIP, whether contents were identical, and the ratios of time
and of the peaks of memory, vramp to native. Exits with 1 if any failed.

A skipped program is one that says why it cannot run on this machine, as when a package is missing.
"""

import argparse
import json
import math
import os
import pathlib
import subprocess
import sys

PROGRAMS = pathlib.Path(__file__).resolve().parent / "torch-programs"
# Numbers of two runs of one program differ by the order of additions alone.
TOLERANCE = 1e-4
COMMANDS = {"native": [sys.executable], "vramp": [sys.executable, "-m", "vramp", "run"]}


class Failed(Exception):
    """Raised when a run or a comparison fails; its text is printed."""


def run(program, allocator, timeout):
    """Returns the last line that a program printed, as an object."""
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONUNBUFFERED": "1"}
    environment.setdefault("TOKENIZERS_PARALLELISM", "false")
    environment.update(HF_HUB_OFFLINE="1", WANDB_DISABLED="true", HF_DATASETS_OFFLINE="1")
    command = [*COMMANDS[allocator], str(program)]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired as error:
        raise Failed(f"{allocator}: no end after {timeout} s\n{tail(error.stderr)}") from None
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise Failed(f"{allocator}: exit status {done.returncode}\n{tail(done.stdout)}\n{tail(done.stderr)}")
    return json.loads(lines[-1])


def tail(text):
    if isinstance(text, bytes):
        text = text.decode(errors="replace")
    return "\n".join((text or "").splitlines()[-15:])


def compare(native, vramp):
    """Raises Failed with the first difference."""
    for key in sorted(native["facts"].keys() | vramp["facts"].keys()):
        ours, theirs = vramp["facts"].get(key), native["facts"].get(key)
        if ours != theirs:
            raise Failed(f"{key}: {difference(theirs, ours)}")
    if len(native["numbers"]) != len(vramp["numbers"]):
        raise Failed(f"{len(native['numbers'])} numbers natively, {len(vramp['numbers'])} with vramp")
    for place, (theirs, ours) in enumerate(zip(native["numbers"], vramp["numbers"])):
        if not math.isclose(theirs, ours, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
            raise Failed(f"number {place}: {theirs} natively, {ours} with vramp")


def difference(theirs, ours):
    if isinstance(theirs, list) and isinstance(ours, list):
        missing = [item for item in theirs if item not in ours][:5]
        added = [item for item in ours if item not in theirs][:5]
        if missing or added:
            return f"missing with vramp: {missing}; only with vramp: {added}"
    return f"{theirs} natively, {ours} with vramp"


def ratio(ours, theirs):
    return f"{ours / theirs:.2f}" if theirs else "-"


def check(program, options):
    """Returns the word to print, and what follows."""
    best = {}
    for allocator in COMMANDS if options.only is None else [options.only]:
        for _ in range(options.repeat):
            result = run(program, allocator, options.timeout)
            if "skipped" in result:
                return "SKIP", result["skipped"]
            if allocator not in best or result["seconds"] < best[allocator]["seconds"]:
                best[allocator] = result
    if options.only is not None:
        result = best[options.only]
        return "PASS", f"{result['seconds']:.1f} s, peak {result['peak_allocated'] >> 20} MiB"
    native, vramp = best["native"], best["vramp"]
    compare(native, vramp)
    same = native["digest"] == vramp["digest"] and native["numbers"] == vramp["numbers"]
    return "PASS", (
        f"{'identical' if same else 'equal'}; time {ratio(vramp['seconds'], native['seconds'])}, "
        f"allocated {ratio(vramp['peak_allocated'], native['peak_allocated'])}, "
        f"reserved {ratio(vramp['peak_reserved'], native['peak_reserved'])}"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--timeout", type=float, default=600)
    parser.add_argument("--repeat", type=int, default=1, help="runs of each, of which the fastest counts")
    parser.add_argument("--only", choices=list(COMMANDS))
    options = parser.parse_args()
    programs = sorted(path for path in PROGRAMS.glob("*.py") if path.name != "report.py")
    if options.names:
        programs = [path for path in programs if any(name in path.stem for name in options.names)]
    if not programs:
        parser.error("no program has such a name: see --list")
    failures = 0
    for program in programs:
        if options.list:
            print(f"{program.stem}: {program.read_text().splitlines()[0].strip(chr(34))}")
            continue
        try:
            word, text = check(program, options)
        except Failed as failure:
            word, text = "FAIL", str(failure)
            failures += 1
        print(f"{word} {program.stem}: {text}", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
