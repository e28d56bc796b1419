"""The program `vramp`, which is `python -m vramp` too.

`doctor` and `run` are about Python programs and written in Python. The others are those of the native program.
`exec` loads libraries of this package into the program that it runs.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from pathlib import Path

_OWN = """commands for Python programs:
  doctor       Check what works on this machine, and why not
  run          Run a Python program with PyTorch on vramp, and print what was saved

"""


def main(arguments: list[str]) -> int:
    """Runs a command and returns the exit code."""
    command = arguments[0] if arguments else "--help"
    if command in ("doctor", "run"):
        module = importlib.import_module(f"vramp._{command}")
        code: int = module.main(arguments[1:])
        return code
    if command in ("-h", "--help"):
        print(_OWN, end="", flush=True)
    from ._native import program

    if command == "exec":
        _prepare_exec()
    if command == "keep" and arguments[1:2] == ["service"] and "--program" not in arguments:
        # The native program would name the interpreter behind a virtual environment, which has no vramp.
        arguments = [*arguments, "--program", f'"{sys.executable}" -m vramp']
    # Python's handler runs between instructions of Python, of which there are none until the end.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return program(["vramp", command, *arguments[1:]])


def _prepare_exec() -> None:
    """Says where the libraries are, and takes back what Python has set for itself and programs would inherit."""
    from . import library_path

    os.environ.setdefault("VRAMP_PRELOAD_LIBRARY", str(Path(__file__).with_name("libvramp_preload.so")))
    os.environ.setdefault("VRAMP_LIBRARY", library_path())
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)


def script() -> None:
    """Runs the installed program."""
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    script()
