"""A snapshot of the memory of a process that runs out of it, for `vramp explain`.

`python -m vramp run --snapshot-on-oom PATH` calls `install`. Programs that the program starts inherit VARIABLE, and
`_inherit/sitecustomize.py` calls `install_inherited` in them.

1. An error for want of memory that nothing catches, on any thread, is followed by one snapshot. It is written while
   the traceback still holds what the program had allocated.
2. With `all:PATH` PyTorch reports each such error before it is raised, also those that the program catches: the first
   SNAPSHOTS_MAX of a process are followed by a snapshot each. This needs the compiled route.

A snapshot is written in time and memory proportional to its blocks and events. Without an error nothing is done.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

from ._errors import OutOfMemoryError, VrampError
from ._native import record_history, snapshot

VARIABLE = "VRAMP_SNAPSHOT_ON_OOM"
"""`PATH`, `all` or `all:PATH`, for the programs that are started."""
DEFAULT = "oom.pickle"
"""The path of `all` without one."""
SNAPSHOTS_MAX = 10
"""A program that probes for the largest size that fits runs out of memory often."""


class Writer:
    """Writes the snapshots of a process."""

    def __init__(self, wanted: str, is_child: bool) -> None:
        self.each = wanted == "all" or wanted.startswith("all:")
        path = wanted.removeprefix("all").removeprefix(":") if self.each else wanted
        root, end = os.path.splitext(os.path.abspath(path or DEFAULT))
        # Processes of one program write beside each other.
        self._root = f"{root}.{os.getpid()}" if is_child else root
        self._end = end
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._written = 0

    def write(self) -> None:
        """Writes a snapshot and says where it is. Raises nothing: the program's own error is what counts."""
        if os.getpid() != self._process:
            return
        with self._lock:
            if self._written >= (SNAPSHOTS_MAX if self.each else 1):
                return
            self._written += 1
            number = "" if self._written == 1 else f".{self._written}"
            path = f"{self._root}{number}{self._end}"
            try:
                snapshot(path)
            except VrampError as error:
                print(f"vramp: out of memory, and no snapshot was written: {error}", file=sys.stderr)
                return
        print(f"vramp: out of memory: `vramp explain {path}` says why", file=sys.stderr)

    def note(self, error: BaseException | None) -> None:
        """Writes a snapshot if an error that nothing caught is one for want of memory."""
        if error is not None and not self.each and is_out_of_memory(error):
            self.write()

    def watch(self) -> None:
        """Has uncaught errors noted, or with `all` each error that PyTorch reports."""
        if self.each:
            _observe(self)
            return
        _after(sys, "excepthook", lambda kind, value, trace: self.note(value))
        _after(threading, "excepthook", lambda arguments: self.note(arguments.exc_value))


def is_out_of_memory(error: BaseException) -> bool:
    """Returns True for errors for want of a card's memory, of any library."""
    if isinstance(error, OutOfMemoryError):
        return True
    if isinstance(error, MemoryError):
        # CuPy's and Numba's are kinds of it; itself it is of the host's memory.
        return type(error) is not MemoryError
    # torch.OutOfMemoryError; without a compiler PyTorch raises a plain RuntimeError.
    return isinstance(error, RuntimeError) and "out of memory" in str(error)


def install(wanted: str, events: int) -> Writer:
    """Writes snapshots in this process and, of their own, in those that it starts. Keeps the last `events`."""
    record_history(events)
    os.environ[VARIABLE] = wanted
    writer = Writer(wanted, is_child=False)
    writer.watch()
    return writer


def install_inherited() -> None:
    """Writes snapshots in a process that was started by one that does."""
    wanted = os.environ.get(VARIABLE)
    if wanted:
        from ._run import EVENTS

        record_history(EVENTS)
        Writer(wanted, is_child=True).watch()


def _after(module: Any, name: str, call: Any) -> None:
    """Lets a hook of a module be followed by a call."""
    before = getattr(module, name)

    def both(*arguments: Any) -> None:
        before(*arguments)
        call(*arguments)

    setattr(module, name, both)


def _observe(writer: Writer) -> None:
    import torch

    from .torch import route

    if route() != "compiled":
        text = "vramp: --snapshot-on-oom=all needs a C++ compiler: `python -m vramp doctor`; give a path alone"
        print(text, file=sys.stderr)
        return

    def observer(device: int, requested: int, total: int, free: int) -> None:
        writer.write()

    torch.cuda._lazy_call(lambda: torch._C._cuda_attach_out_of_memory_observer(observer))
