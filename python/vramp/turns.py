"""Two or more processes of one user take turns at a card.

    # the inference engine
    vramp.turns.on_request(lambda request: sleep())      # sleeps, and returns True to release the turn
    with vramp.turns.acquire():
        wake(); serve()

    # the trainer
    with vramp.turns.acquire("cuda:0", timeout=60):
        train()

There is no server. The end of a process, by SIGKILL too, releases its turn. A card is "cuda:N" or N, which opens
the shared pool of the device to find its UUID; any other text is its name, such as the UUID itself, and is the same
in all processes.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from . import _native
from ._errors import TurnRefusedError, TurnTimeoutError
from ._native import Turn, TurnRequest, Turns
from ._types import TurnProcess, TurnStatus

__all__ = [
    "Turn",
    "TurnProcess",
    "TurnRefusedError",
    "TurnRequest",
    "TurnStatus",
    "TurnTimeoutError",
    "Turns",
    "acquire",
    "default_directory",
    "on_request",
    "open",
    "status",
]

_lock = threading.Lock()
# One for each card, so that a handler belongs to the turns of all calls.
_opened: dict[str, Turns] = {}


def _forget_parent() -> None:
    """Runs in a forked child, which opens its own."""
    global _lock
    _lock = threading.Lock()
    _opened.clear()


os.register_at_fork(after_in_child=_forget_parent)


def default_directory() -> Path:
    """Returns `$XDG_RUNTIME_DIR/vramp`, or `/tmp/vramp-UID` if the variable is not set."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    return Path(runtime, "vramp") if os.path.isabs(runtime) else Path(f"/tmp/vramp-{os.geteuid()}")


def open(
    card: str | int = "cuda:0",
    *,
    directory: str | os.PathLike[str] | None = None,
    program: str | None = None,
) -> Turns:
    """Opens the line of a card, in a directory that only the user may use, and that is made if it is missing.

    `program` is the name for messages, by default that of the script.

    Raises FileError, or OptionError if the card's name has other characters than letters, digits and `-_:.`.
    """
    name = os.path.basename(sys.argv[0]) if sys.argv and program is None else program
    return Turns(default_directory() if directory is None else directory, _card(card), name or "python")


def _card(card: str | int) -> str:
    """Returns the name of a card that is the same in all processes."""
    number = re.fullmatch(r"(?:cuda:)?([0-9]+)", "cuda:0" if card == "cuda" else str(card))
    if number is None:
        return str(card)
    pool = _native.pool(int(number[1]))
    return pool.device_info.uuid or f"sim:{number[1]}"


def _shared(card: str | int) -> Turns:
    """Returns the object that the functions of this module use for a card."""
    name = _card(card)
    with _lock:
        found = _opened.get(name)
        if found is None:
            found = _opened[name] = open(name)
        return found


def acquire(
    card: str | int = "cuda:0", timeout: float | None = None, *, bytes: int | None = None
) -> Turn:
    """Waits for the turn of a card and returns it, as `Turns.acquire` does."""
    return _shared(card).acquire(timeout, bytes=bytes)


def on_request(
    handler: Callable[[TurnRequest], bool | None], card: str | int = "cuda:0"
) -> None:
    """Registers a function for the turns that `acquire` returns, as `Turns.on_request` does."""
    _shared(card).on_request(handler)


def status(card: str | int = "cuda:0") -> TurnStatus:
    """Returns who holds the turn of a card and who waits."""
    return _shared(card).status()
