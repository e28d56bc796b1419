"""Several processes of one user share the memory of a card at the same time.

    # one engine
    chat = vramp.budget.join("serving", capacity="76GiB", guaranteed="20GiB")
    chat.attach(vramp.pool())                            # its requests claim what they lack
    chat.on_reclaim(lambda nbytes: drop_prefixes(nbytes))
    chat.on_sleep(vramp.budget.sleep_regions)            # vramp ctl pause, vramp ctl resume

    # another one
    search = vramp.budget.join("serving", capacity="76GiB", guaranteed="10GiB")
    search.room().obtainable                             # what it can really have, instead of mem_get_info
    search.claim("4GiB", timeout=5)                      # the first gives back what is idle

There is no server. What a process had claimed is free when it ends, by SIGKILL too, and one that is stopped keeps no
other waiting. A card is "cuda:N" or N, or a text that is the same in all processes, as for `vramp.turns`. `vramp top`
shows who has what.
"""

from __future__ import annotations

import os
import sys
from typing import Literal

from . import _native
from ._errors import BudgetError, BudgetTimeoutError
from ._native import Budget
from ._regions import pause, resume
from ._types import BudgetMember, BudgetRoom, BudgetStatus
from .turns import _card, default_directory

__all__ = [
    "Budget",
    "BudgetError",
    "BudgetMember",
    "BudgetRoom",
    "BudgetStatus",
    "BudgetTimeoutError",
    "groups",
    "join",
    "sleep_regions",
    "status",
]


def join(
    group: str,
    *,
    capacity: int | str,
    guaranteed: int | str = 0,
    limit: int | str | None = None,
    priority: int = 0,
    timeout: float | None = 5.0,
    card: str | int = "cuda:0",
    directory: str | os.PathLike[str] | None = None,
    program: str | None = None,
) -> Budget:
    """Joins a group of processes that share a card. It is made if there is none.

    `capacity` is what the group shares: the card's memory less about 0.5 GiB for the context of each process and what
    other programs need. It is the same in all processes. `guaranteed` can be claimed at any time; the others give it
    back within `timeout` seconds. `limit` is the most that can be claimed. The larger `priority`, from 0 to 255, is
    served first and gives back last. `program` is the name for messages, by default that of the script.

    Raises BudgetError if the others are guaranteed too much or pass another capacity, BudgetTimeoutError, OptionError
    or FileError.
    """
    name = os.path.basename(sys.argv[0]) if sys.argv and program is None else program
    place = default_directory() if directory is None else directory
    return Budget(
        place, _card(card), group, name or "python", capacity, guaranteed, limit, priority, timeout
    )


def groups(directory: str | os.PathLike[str] | None = None) -> list[tuple[str, str]]:
    """Returns card and name of each group in the directory, with members or without."""
    return _native.budget_groups(default_directory() if directory is None else directory)


def status(
    group: str,
    card: str | int = "cuda:0",
    *,
    directory: str | os.PathLike[str] | None = None,
) -> BudgetStatus:
    """Returns the members of a group, of which this process need not be one. They publish what their memory is used
    for before; that takes 20 ms.
    """
    place = default_directory() if directory is None else directory
    return _native.budget_status(place, _card(card), group)


def sleep_regions(action: Literal["pause", "resume"]) -> None:
    """Pauses or resumes all regions of this process: a handler for `Budget.on_sleep`."""
    if action == "pause":
        pause()
    else:
        resume()
