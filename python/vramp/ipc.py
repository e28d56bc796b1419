"""Memory that processes of one user on one machine share, without a copy.

    # in one process
    with vramp.ipc.export(block) as exported:
        queue.put(exported.ticket())             # bytes for a queue, a pipe, a socket
        exported.wait_released()                 # until the other process has closed it

    # in the other process
    with vramp.ipc.open(queue.get()) as memory:
        array = memory.array((1024, 1024), "float32")
"""

from __future__ import annotations

from typing import Any

from . import _native
from ._native import Exported, Imported

__all__ = ["Exported", "Imported", "Ticket", "export", "open"]


class Ticket(bytes):
    """Lets another process open an export: bytes that can be sent in any way, also pickled in a queue.

    It has a secret: a process of the same user that reads it can open the export.
    """

    __slots__ = ()

    def open(self, pool: _native.Pool | None = None, *, stream: Any = None) -> Imported:
        """Opens the memory here, as `vramp.ipc.open` does."""
        return open(self, pool, stream=stream)

    def __repr__(self) -> str:
        return f"<vramp.ipc.Ticket of {len(self)} bytes>"


def export(allocation: _native.Allocation) -> Exported:
    """Exports an allocation to other processes. The first export in a physical handle takes 185 us on an H200.

    Its free takes effect once the export is closed and no importer has it open, killed ones included. An
    importer can access all physical memory that the allocation lies in, also of other allocations beside it.

    Raises UnsupportedError if the memory was created for one process (sharing="none", and some presets).
    """
    return allocation.pool.export(allocation)


def open(ticket: bytes, pool: _native.Pool | None = None, *, stream: Any = None) -> Imported:
    """Opens the memory of a ticket for work of a pool's device, by default of `vramp.pool()`.

    `stream` is where this process uses the memory: consumers of its arrays wait for it. Waits for the
    exporting process, 30 s for each of its answers at most. The memory stays readable after that process
    has ended.

    Raises ExportEndedError, TicketError, ExchangeError or DriverError.
    """
    return (_native.pool() if pool is None else pool).open_ticket(ticket, stream)
