"""The exceptions. Each is a VrampError, and the built-in exception of its kind where there is one."""

from __future__ import annotations


class VrampError(RuntimeError):
    """A call failed. The text says what happened and what to do. Root of all exceptions here."""


class OutOfMemoryError(VrampError, MemoryError):
    """A request found no memory. The text is the report; amounts are in bytes."""

    requested: int = 0
    """Size of the request."""
    reserved: int = 0
    """Physical memory of the pool."""
    allocated: int = 0
    """Memory of live allocations, rounding included."""
    free: int = 0
    """Free memory of the pool, usable for the request or not."""
    largest: int = 0
    """The largest request that could be served."""
    waiting: int = 0
    """Freed memory that work on other streams may still use."""
    limit: int | None = None
    """Limit that the request would exceed. None if it is the device that is full."""
    device_free: int | None = None
    """Free memory of the device, if it could be queried."""
    device_total: int | None = None
    """Memory of the device, if it could be queried."""


class OptionError(VrampError, ValueError):
    """An option is unknown, or its value is invalid on this device."""


class DeviceError(VrampError):
    """The device is unknown or cannot be opened."""


class ClosedError(VrampError):
    """The pool, export or import is closed."""


class LeaseTimeoutError(VrampError, TimeoutError):
    """Other leases, work or reservations were in the way until the deadline."""


class DeadlockError(LeaseTimeoutError):
    """The wait would never end: owners of leases or reservations wait for each other."""


class CancelledError(VrampError):
    """The wait ended because the pool or its tiers are being closed."""


class ContentsError(VrampError):
    """The contents of a buffer cannot be read back: their copy was damaged. The text names where it was."""


class LeaseEndedError(VrampError):
    """A view was used after the end of its lease. Lease the buffer again."""


class TierFullError(VrampError, MemoryError):
    """A tier has no room: the card for the buffers of a lease, or the host and the disk for copies."""

    needed: int | None = None
    """Bytes that are needed at once, if they are known."""
    capacity: int | None = None
    """Bytes that the tier has for them, if they are known."""


class UnknownStreamError(VrampError, ValueError):
    """The stream belongs to another pool, or was forgotten."""


class UnknownPointerError(VrampError, ValueError):
    """No live allocation of the pool begins at the address: wrong, freed before, or of another pool."""


class RangeError(VrampError, ValueError):
    """A number is out of range."""


class InUseError(VrampError):
    """The object is in use: by an array, by PyTorch or by a call. The text says by what."""


class DriverError(VrampError):
    """A call of the CUDA driver failed. The text names it."""


class CaptureError(VrampError):
    """The capture of a graph forbids the call."""


class UnsupportedError(VrampError):
    """The preset or the device does not support the call."""


class ForkedError(VrampError):
    """The process was forked from one that used vramp. CUDA does not survive a fork."""


class FileError(VrampError, OSError):
    """A file cannot be read or written."""


class TraceError(VrampError, ValueError):
    """A file is no recording of memory, or is damaged."""


class TicketError(VrampError, ValueError):
    """Bytes are no ticket, or one of another version of vramp, or the secret in it is wrong."""


class ExportEndedError(VrampError):
    """The exporting process ended, or closed the export."""


class ExchangeError(VrampError, OSError):
    """Two processes cannot exchange memory: another user, no answer, no path between them, or a limit of
    the system. The text names the cause."""


class TurnTimeoutError(VrampError, TimeoutError):
    """The process that holds the turn of a card did not release it in time. The text names it."""


class TurnRefusedError(VrampError):
    """The process that holds the turn of a card refused to release it. The text has its reason."""


class BudgetError(VrampError):
    """A budget cannot have what was requested, now or ever. The text names the processes that have it."""


class BudgetTimeoutError(BudgetError, TimeoutError):
    """The processes that share a card did not give back enough memory in time. The text names them."""


class KeepError(VrampError):
    """There is no keeper, or it refuses. The text says what to do."""


class NotKeptError(KeepError, KeyError):
    """The keeper has no memory of the name."""

    # A KeyError shows its argument as a literal.
    __str__ = VrampError.__str__


class KeepTimeoutError(KeepError, TimeoutError):
    """Another process has the lock of kept memory, or makes it, and did not end that in time. The text names it."""


class TornError(KeepError):
    """A process ended while it wrote kept memory. Write all of it and commit, or publish it again."""


class RegionError(VrampError):
    """A region cannot be paused, resumed or used now, or there is none with the tag. The text says why."""

    tag: str | None = None
    """Tag of the region."""


class CallbackError(RegionError):
    """A callback around the sleep of regions failed, of `around_sleep`. The text says what holds now."""

    callback: str | None = None
    """Name of the callback, of several the first that failed. What it raised is the cause."""


class InternalError(VrampError):
    """The state of vramp is inconsistent: a defect of vramp. Please report it."""
