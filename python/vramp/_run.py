"""`python -m vramp run PROGRAM [ARGUMENTS]`: a PyTorch program on vramp, without a change to it.

At the end the memory of each device is printed to stderr, with what PyTorch's own allocator would have
reserved for the same requests. For that the last events are kept (40 bytes each), and replayed on
PyTorch's allocator as vramp models it.
"""

from __future__ import annotations

import argparse
import atexit
import importlib.util
import os
import runpy
import sys
import tempfile
from collections.abc import Sequence

from ._errors import VrampError
from ._native import opened, record_history
from .compat import _alias

EVENTS = 2_000_000
"""Events that are kept unless --events says otherwise."""


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the arguments before the program."""
    made = argparse.ArgumentParser(
        prog="python -m vramp run",
        description="Runs a PyTorch program on vramp. VRAMP_CONF sets options, such as limit=80GiB.",
        usage="python -m vramp run [--events N] [--quiet] [--route R] [--snapshot-on-oom PATH] (PROGRAM | -m MODULE) "
        "[ARGUMENTS]",
        allow_abbrev=False,
    )
    made.add_argument("-m", dest="module", action="store_true", help="PROGRAM is the name of a module")
    made.add_argument(
        "--events",
        type=int,
        default=EVENTS,
        metavar="N",
        help=f"keep the last N events for the comparison with PyTorch; 0 makes none (default {EVENTS})",
    )
    made.add_argument("--quiet", action="store_true", help="print nothing at the end")
    made.add_argument(
        "--route",
        choices=("auto", "compiled", "pluggable"),
        default="auto",
        help="how PyTorch uses vramp: see vramp.torch.enable (default auto)",
    )
    made.add_argument(
        "--snapshot-on-oom",
        metavar="PATH",
        help="write a snapshot for `vramp explain` when an out-of-memory error ends the program; all:PATH also at "
        "errors that the program catches, at most ten",
    )
    made.add_argument("program", help="a file, or a module with -m")
    made.add_argument("arguments", nargs=argparse.REMAINDER, help="of the program")
    return made


def main(arguments: Sequence[str]) -> int:
    """Runs the program. Its own exit status is that of the process."""
    options = parser().parse_args(arguments)
    if options.events < 0:
        print("vramp run: --events must not be negative", file=sys.stderr)
        return 2
    if not _is_there(options.program, options.module):
        kind = "module" if options.module else "file"
        print(f"vramp run: there is no {kind} {options.program}", file=sys.stderr)
        return 2
    from . import torch as drop_in

    try:
        drop_in.enable(options.route)
    except VrampError as error:
        print(f"vramp run: {error}", file=sys.stderr)
        return 1
    _enable_in_children(options.route)
    if _alias.is_wanted():
        _alias.install(*_alias.STAND_INS)
    recorder = _Recorder(0 if options.quiet else options.events)
    writer = None
    if not options.quiet:
        atexit.register(recorder.print)
    recorder.start()
    if options.snapshot_on_oom is not None:
        from . import _oom

        writer = _oom.install(options.snapshot_on_oom, options.events)
    sys.argv = [options.program, *options.arguments]
    try:
        if options.module:
            runpy.run_module(options.program, run_name="__main__", alter_sys=True)
        else:
            _begin_path(os.path.dirname(os.path.abspath(options.program)))
            runpy.run_path(options.program, run_name="__main__")
    except Exception as error:
        # A program may have replaced the hook that would note it.
        if writer is not None:
            writer.note(error)
        raise
    return 0


def _enable_in_children(route: str) -> None:
    """Makes the Python programs that this one starts call enable(): see `_inherit/sitecustomize.py`."""
    folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_inherit")
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, *(part for part in path if part != folder)]).rstrip(os.pathsep)
    os.environ["VRAMP_RUN_ROUTE"] = route


def _is_there(program: str, is_module: bool) -> bool:
    if not is_module:
        return os.path.isfile(program) or os.path.isdir(program)
    try:
        # Of a package alone: to look for what is inside would import it.
        return importlib.util.find_spec(program.split(".")[0]) is not None
    except ValueError:
        return False


def _begin_path(folder: str) -> None:
    """Makes the program's folder the first one of the path, in place of the current one.

    `python program.py` does the same. With `python -P` neither is in the path.
    """
    if getattr(sys.flags, "safe_path", False):
        return
    if sys.path and sys.path[0] in ("", os.getcwd()):
        sys.path[0] = folder
    else:
        sys.path.insert(0, folder)


class _Recorder:
    """Records the events of each device from its first use on, and opens none."""

    def __init__(self, events: int) -> None:
        self.events = events
        self.process = os.getpid()

    def start(self) -> None:
        """Starts the recording of all devices."""
        if self.events > 0:
            record_history(self.events)

    def print(self) -> None:
        """Prints what each device reserved, and what PyTorch's allocator would have."""
        import torch

        if os.getpid() != self.process or not torch.cuda.is_initialized():
            return
        for device in range(torch.cuda.device_count()):
            if opened(device) is None:
                continue
            try:
                for line in self._lines(device):
                    print(line, file=sys.stderr)
            except (RuntimeError, OSError) as error:
                print(f"vramp: device {device}: {error}", file=sys.stderr)

    def _lines(self, device: int) -> list[str]:
        import torch

        reserved = torch.cuda.max_memory_reserved(device)
        allocated = torch.cuda.max_memory_allocated(device)
        if allocated == 0:
            return []
        lines = [
            f"vramp: device {device}: peak {_size(reserved)} reserved for {_size(allocated)} allocated "
            f"(overhead {reserved / allocated:.3f})"
        ]
        if self.events:
            lines.append(f"vramp: device {device}: {self._comparison(device, reserved)}")
        return lines

    def _comparison(self, device: int, reserved: int) -> str:
        from . import pool, replay

        events = pool(device).stats()
        made = events.allocated + events.freed
        if made > self.events:
            return f"no comparison with PyTorch: {made} events, and --events kept {self.events}"
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "run.pickle")
            pool(device).snapshot(path)
            (result,) = replay(path, allocators=["torch"])
        native = result.peak_reserved_bytes
        saved = native - reserved
        if saved <= 0:
            return f"PyTorch's allocator would have reserved {_size(native)} (replayed)"
        return (
            f"PyTorch's allocator would have reserved {_size(native)} (replayed): "
            f"{_size(saved)} saved ({100 * saved / native:.0f} %)"
        )


def _size(amount: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.2f} {unit}"
        amount /= 1024
    return f"{amount:.2f} GiB"
