"""`python -m vramp doctor` checks this machine; `python -m vramp run` runs a program on vramp."""

from __future__ import annotations

import importlib
import sys

_USAGE = """usage: python -m vramp COMMAND

commands:
  doctor   what works on this machine, and why not
  run      run a Python program with PyTorch on vramp; `python -m vramp run --help`
"""


def main(arguments: list[str]) -> int:
    """Runs a command and returns the exit code."""
    command, rest = (arguments or ["--help"])[0], arguments[1:]
    if command in ("-h", "--help"):
        print(_USAGE, end="")
        return 0
    if command == "doctor":
        from ._doctor import main as doctor

        return doctor(rest)
    if command == "run":
        code: int = importlib.import_module("vramp._run").main(rest)
        return code
    print(f"unknown command '{command}'\n\n{_USAGE}", end="", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
