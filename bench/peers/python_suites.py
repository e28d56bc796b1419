"""Runs a library's own tests natively and on vramp, on a card, and prints the tests that differ.

    python python_suites.py cupy TESTS [--out FILE] [-- arguments for pytest]

TESTS is a folder of the library's repository: `tests` of CuPy, `python/rmm/rmm/tests` of RMM. The
version has to be that of the installed library. Each run is a process. One that a test ends (a crash) is
started again behind that test, which counts as crashed.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

LIBRARIES = ("cupy", "rmm")
CRASHES_MAX = 20
_OUTCOMES = "VRAMP_SUITE_OUTCOMES"
_LIBRARY = "VRAMP_SUITE_LIBRARY"


# What follows is the plug-in of pytest.


def _install_cupy() -> None:
    import vramp.cupy

    vramp.cupy.install()


def _install_rmm() -> None:
    import rmm

    import vramp.rmm

    # The tests make upstreams with the class, and `reinitialize` makes the device's resource.
    rmm.mr.CudaMemoryResource = lambda: vramp.rmm.resource()
    reinitialize = rmm.reinitialize

    def on_vramp(
        pool_allocator: bool = False,
        managed_memory: bool = False,
        logging: bool = False,
        log_file_name: Any = None,
        **more: Any,
    ) -> None:
        reinitialize(pool_allocator=pool_allocator, managed_memory=managed_memory, **more)
        if not pool_allocator and not managed_memory:
            vramp.rmm.install()
        if logging:
            # Above the resource that is the device's now.
            rmm.enable_logging(log_file_name)

    rmm.reinitialize = on_vramp
    vramp.rmm.install()


def pytest_configure(config: Any) -> None:
    if library := os.environ.get(_LIBRARY):
        {"cupy": _install_cupy, "rmm": _install_rmm}[library]()


def _note(test: str, outcome: str, text: str = "") -> None:
    if path := os.environ.get(_OUTCOMES):
        with open(path, "a") as file:
            file.write(json.dumps([test, outcome, text]) + "\n")


def pytest_runtest_logstart(nodeid: str) -> None:
    _note(nodeid, "started")


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "call" or report.outcome != "passed":
        text = "" if report.outcome == "passed" else str(report.longrepr)[-2000:]
        _note(report.nodeid, report.outcome, text)


# What follows is the program.


def outcomes(library: str, tests: pathlib.Path, on_vramp: bool, more: list[str]) -> dict[str, Any]:
    """Returns the outcome of each test with its text."""
    found: dict[str, Any] = {}
    here = pathlib.Path(__file__).resolve()
    for _ in range(CRASHES_MAX):
        with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as notes:
            environment = dict(os.environ, **{_OUTCOMES: notes.name})
            environment["PYTHONPATH"] = f"{here.parent}:{environment.get('PYTHONPATH', '')}"
            if on_vramp:
                environment[_LIBRARY] = library
            command = [sys.executable, "-m", "pytest", "-q", "-p", here.stem, "-p", "no:cacheprovider"]
            for test in found:
                command += ["--deselect", test]
            run = subprocess.run(
                [*command, *more, "."], cwd=tests, env=environment, capture_output=True, text=True
            )
            last = None
            for line in notes:
                test, outcome, text = json.loads(line)
                last = test if outcome == "started" else None
                if outcome != "started":
                    found[test] = (outcome, text)
        if last is None:
            if not found:
                print(run.stdout[-3000:], run.stderr[-3000:], file=sys.stderr)
            return found
        found[last] = ("crashed", (run.stdout + run.stderr)[-3000:])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library", choices=LIBRARIES)
    parser.add_argument("tests", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, help="a JSON file with all outcomes")
    arguments = sys.argv[1:]
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options, more = parser.parse_args(arguments[:end]), arguments[end + 1 :]
    native, vramp = (
        outcomes(options.library, options.tests, on_vramp, more)
        for on_vramp in (False, True)
    )
    for name, found in (("native", native), ("vramp", vramp)):
        counts = collections.Counter(outcome for outcome, _ in found.values())
        print(name, dict(sorted(counts.items())))
    worse = 0
    for test, (outcome, _) in native.items():
        there, text = vramp.get(test, ("not run", ""))
        if outcome != there:
            worse += outcome == "passed"
            print(f"{test}: {outcome}, on vramp {there}\n    " + "\n    ".join(text.splitlines()[-6:]))
    print(f"{worse} tests that pass natively do not pass on vramp")
    if options.out:
        options.out.write_text(json.dumps({"native": native, "vramp": vramp}, indent=1))
    sys.exit(worse != 0)


if __name__ == "__main__":
    main()
