"""GPU memory pools that avoid fragmentation by remapping physical pages.

    import vramp

    pool = vramp.pool()                      # simulated on a machine without a GPU
    with pool.malloc(64 << 20) as block:
        print(hex(block.ptr), block.usable_size)
    print(pool.stats().reserved)
"""

from __future__ import annotations

import os as _os
from collections.abc import Mapping as _Mapping
from importlib import import_module as _import_module
from typing import TYPE_CHECKING
from typing import Any as _Any

from . import _native
from ._errors import (
    BudgetError,
    BudgetTimeoutError,
    CallbackError,
    CancelledError,
    CaptureError,
    ClosedError,
    ContentsError,
    DeadlockError,
    DeviceError,
    DriverError,
    ExchangeError,
    ExportEndedError,
    FileError,
    ForkedError,
    InternalError,
    InUseError,
    KeepError,
    KeepTimeoutError,
    LeaseEndedError,
    LeaseTimeoutError,
    NotKeptError,
    OptionError,
    OutOfMemoryError,
    RangeError,
    RegionError,
    TicketError,
    TierFullError,
    TornError,
    TraceError,
    TurnRefusedError,
    TurnTimeoutError,
    UnknownPointerError,
    UnknownStreamError,
    UnsupportedError,
    VrampError,
)
from ._native import (
    Allocation,
    Array,
    Buffer,
    BufferPin,
    Exported,
    Imported,
    Lease,
    LeaseSet,
    Measure,
    Pin,
    Pool,
    Registration,
    Reservation,
    Stream,
    Tiers,
    View,
    pool,
    record_history,
    snapshot,
)
from ._regions import (
    PressureRegistration,
    RegionMove,
    SleepCallbacks,
    around_sleep,
    clean,
    disable_region,
    on_pressure,
    pause,
    read_backup,
    region,
    remove_region,
    resume,
    set_region_disk,
    status,
)
from ._types import (
    Access,
    AccessChange,
    DeviceInfo,
    RegionStatus,
    Sharing,
    Stats,
    Store,
    TierStats,
)

if TYPE_CHECKING:
    from ._analysis import (
        Advice,
        Diff,
        Explanation,
        Replay,
        ReplayTotal,
        Report,
        advise,
        diff,
        explain,
        replay,
        replay_totals,
        report,
    )
    from ._controller import Arg, Client, Controller, FreedBuffer

__all__ = [
    "Access",
    "AccessChange",
    "Advice",
    "Allocation",
    "Arg",
    "Array",
    "BudgetError",
    "BudgetTimeoutError",
    "Buffer",
    "BufferPin",
    "CallbackError",
    "CancelledError",
    "CaptureError",
    "Client",
    "ClosedError",
    "ContentsError",
    "Controller",
    "DeadlockError",
    "DeviceError",
    "DeviceInfo",
    "Diff",
    "DriverError",
    "ExchangeError",
    "Explanation",
    "ExportEndedError",
    "Exported",
    "FileError",
    "ForkedError",
    "FreedBuffer",
    "Imported",
    "InUseError",
    "InternalError",
    "Lease",
    "KeepError",
    "KeepTimeoutError",
    "LeaseEndedError",
    "LeaseSet",
    "LeaseTimeoutError",
    "Measure",
    "NotKeptError",
    "OptionError",
    "OutOfMemoryError",
    "Pin",
    "Pool",
    "PressureRegistration",
    "RangeError",
    "RegionError",
    "RegionMove",
    "RegionStatus",
    "Registration",
    "Replay",
    "Report",
    "Reservation",
    "Sharing",
    "SleepCallbacks",
    "Stats",
    "Store",
    "Stream",
    "TicketError",
    "TierFullError",
    "TierStats",
    "Tiers",
    "TornError",
    "TraceError",
    "TurnRefusedError",
    "TurnTimeoutError",
    "UnknownPointerError",
    "UnknownStreamError",
    "UnsupportedError",
    "View",
    "VrampError",
    "advise",
    "around_sleep",
    "budget",
    "clean",
    "diff",
    "disable_region",
    "explain",
    "ipc",
    "keep",
    "library_path",
    "on_pressure",
    "open",
    "open_all",
    "open_tiers",
    "pause",
    "pool",
    "read_backup",
    "record_history",
    "region",
    "remove_region",
    "replay",
    "replay_totals",
    "report",
    "resume",
    "set_region_disk",
    "snapshot",
    "status",
    "turns",
]

__version__: str = _native.library_version()
"""Version of the package and of its native library."""


# What not every program uses, and what takes longest to import.
_LAZY = {
    name: module
    for module, names in {
        "_analysis": "Advice Diff Explanation Replay ReplayTotal Report advise diff explain replay replay_totals report",
        "_controller": "Arg Client Controller FreedBuffer",
    }.items()
    for name in names.split()
}


def __getattr__(name: str) -> _Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(_import_module(f".{_LAZY[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})


def _check_versions() -> None:
    """Raises ImportError if the native library belongs to another version of the package."""
    beside = _os.path.dirname(_os.path.dirname(__file__))
    if _os.path.isdir(_os.path.join(beside, f"vramp-{__version__}.dist-info")):
        return
    # Not where it usually is. To ask takes as long as all the rest of this import.
    metadata = _import_module("importlib.metadata")
    try:
        installed = metadata.version("vramp")
    except metadata.PackageNotFoundError:
        return  # run from a folder, without being installed
    if installed != __version__:
        raise ImportError(
            f"vramp {installed} is installed, but its library {library_path()} is of version "
            f"{__version__}: reinstall it with `pip install --force-reinstall vramp`"
        )


def library_path() -> str:
    """Returns the path of the shared object that exports the C interface (vramp.h) too.

    A program that loads it with ctypes, dlopen or PyTorch uses the same pools.
    """
    path = _native.__file__
    assert path is not None
    return path


def open(device: str = "auto", **options: object) -> Pool:
    """Opens a pool of the program's own.

    `device` is "auto" (what VRAMP_DEVICE names; card 0 without it), "cuda", "cuda:N", "sim" or
    "sim:CARD", or "sim:CARDxCOUNT:N" for card N of a simulated machine of its own. Options are those of
    VRAMP_CONF: preset, limit, prefill, page, span, torch, sharing, rdma, peers, pinned_keep. A number is bytes. The pool
    is a context manager, which closes it.

    Raises OptionError or DeviceError.
    """
    return _native.open(device, _joined(options))


def open_tiers(
    pool: Pool,
    config: str | _os.PathLike[str] | _Mapping[str, object] | None = None,
    **options: _Any,
) -> Tiers:
    """Returns the tiers below a pool: `Tiers` with the same arguments."""
    return Tiers(pool, config, **options)


def open_all(device: str = "auto", **options: object) -> list[Pool]:
    """Opens a pool on each device of a machine, in the order of their numbers.

    That is every card for "cuda" and "auto", COUNT simulated cards of one machine for "sim:CARDxCOUNT", and the
    one device of any other name. Cards of one call can be granted access to each other's memory with
    `Pool.grant_access`. Options and exceptions are those of `open`. On an exception none stays open.
    """
    return _native.open_all(device, _joined(options))


def _joined(options: dict[str, object]) -> str:
    """Returns options as text."""
    for name, value in options.items():
        if isinstance(value, bool) or not isinstance(value, (int, str)):
            raise TypeError(f"the option {name} is a str or an int, and not {type(value).__name__}")
    return ",".join(f"{name}={value}" for name, value in options.items())


_check_versions()

from . import budget, ipc, keep, turns  # noqa: E402  they use the names above
