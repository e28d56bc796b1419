"""Owners of leases: the task of asyncio that runs on a thread, or else the thread."""

from __future__ import annotations

import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any

from ._native import LeaseOwner

if TYPE_CHECKING:
    import asyncio

_tasks: weakref.WeakKeyDictionary[asyncio.Task[Any], LeaseOwner] = weakref.WeakKeyDictionary()


def caller() -> tuple[LeaseOwner | None, bool]:
    """Returns the owner of the running task, if there is one, and whether this is the main thread."""
    return _task_owner(), threading.current_thread() is threading.main_thread()


def _task_owner() -> LeaseOwner | None:
    # A program without asyncio does not import it here. It may be in the middle of its import.
    asyncio = sys.modules.get("asyncio")
    running = getattr(asyncio, "_get_running_loop", None)
    if asyncio is None or running is None or (loop := running()) is None:
        return None
    task = asyncio.current_task(loop)
    if task is None:
        return None
    owner = _tasks.get(task)
    if owner is None:
        owner = _tasks[task] = LeaseOwner()
    return owner
