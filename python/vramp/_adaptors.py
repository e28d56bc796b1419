"""What the adaptors for other libraries share.

1. `load` imports a library when an adaptor is used, and not before.
2. `device_pool` returns the pool that a library uses, and refuses a simulated one.
3. `StreamTable` keeps streams of a library alive until vramp has forgotten them.

Deliberately absent: anything about one library.
"""

from __future__ import annotations

import importlib
import sys
import threading
import weakref
from typing import Any, TypeAlias

from . import VrampError, pool
from ._errors import ClosedError, UnsupportedError
from ._native import Pool

Check: TypeAlias = tuple[str, "bool | None", str]
"""A line of a doctor: what was checked, whether it works (None: it is no failure), and why."""

PER_THREAD_STREAM = 2
"""Address of cudaStreamPerThread, which means another stream in each thread and ends with the thread."""


def load(module: str, distribution: str) -> Any:
    """Returns an imported module. Raises ImportError that names what to install."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and module.startswith(error.name):
            raise ImportError(
                f"{module} is not installed: pip install {distribution}", name=module
            ) from error
        raise


def device_pool(device: int) -> Pool:
    """Returns the shared pool of a device. Raises UnsupportedError if it is simulated.

    A library that computes on a card cannot use addresses of a simulated one.
    """
    shared = pool(device)
    if shared.is_simulated:
        raise UnsupportedError(
            f"device {device} is simulated, and its addresses cannot be used by a library that "
            "runs kernels: use a machine with a GPU, and no device=sim in VRAMP_CONF"
        )
    return shared


def handle_of(stream: Any) -> int:
    """Returns the address of a stream that has __cuda_stream__, or of an int."""
    if isinstance(stream, int):
        return stream
    protocol = stream.__cuda_stream__
    _version, address = protocol() if callable(protocol) else protocol
    return int(address)


def forget_stream(pool: Pool, raw: int) -> None:
    """Makes a pool forget a stream that another library is about to destroy. Never waits.

    Work queued on it still runs, and memory that it uses is not reused before. The default stream
    is never forgotten. Raises VrampError, also while the stream captures a graph.
    """
    if raw in (0, 1, PER_THREAD_STREAM):
        return
    pool.forget_stream(raw)


def _references(objects: tuple[Any, ...], index: int) -> int:
    return sys.getrefcount(objects[index])


# What `_references` returns for a stream that only the table refers to. It differs by version.
_ONLY_THE_TABLE = _references((object(),), 0)


def _in_use(objects: tuple[Any, ...]) -> list[Any]:
    """Returns the objects that the program has too, and has not closed."""
    indices = range(len(objects))
    used = [index for index in indices if _references(objects, index) > _ONLY_THE_TABLE]
    return [objects[index] for index in used if not getattr(objects[index], "is_closed", False)]


class StreamTable:
    """Streams of a library that destroys a stream with its last reference, as a pool uses them.

    vramp records events on a stream for as long as memory of it is in the pool, so the table holds a
    reference. When a stream is added, those that only the table refers to are forgotten by vramp, and
    the library destroys them. The table is swept when it has doubled since the last sweep, so a
    program that creates 100,000 streams keeps few, and adding one takes O(1) amortized.

    Several objects may stand for one stream, and any of them may be what destroys it. So vramp forgets
    the stream before the table drops one of them. The next use registers it again.

    A library whose streams can be closed passes an anchor: an object that keeps the stream itself, also when
    the program has closed its object of it.
    """

    __slots__ = ("_anchors", "_entries", "_lock", "_pool", "_sweep_at")

    def __init__(self, pool: Pool) -> None:
        self._pool = weakref.ref(pool)
        self._entries: dict[int, tuple[Any, ...]] = {}
        self._anchors: dict[int, Any] = {}
        # A finalizer that runs in here, by the garbage collector, may allocate.
        self._lock = threading.RLock()
        self._sweep_at = 8

    def __len__(self) -> int:
        return len(self._entries)

    def is_anchored(self, raw: int) -> bool:
        """Returns whether the stream of an address is kept by an anchor: no other one has the address."""
        return raw in self._anchors

    def add(self, raw: int, stream: Any, anchor: Any = None) -> None:
        """Keeps a stream alive. Call it before memory is allocated or used on the stream."""
        is_known = any(known is stream for known in self._entries.get(raw, ()))
        if is_known and anchor is None:
            return
        with self._lock:
            if len(self._entries) >= self._sweep_at:
                self.sweep()
            self._drop_unused(raw)
            known = self._entries.get(raw, ())
            if not any(other is stream for other in known):
                self._entries[raw] = (*known, stream)
            if anchor is not None:
                self._anchors[raw] = anchor

    def sweep(self) -> int:
        """Ends the streams that are no longer used. Returns how many. O(n)."""
        with self._lock:
            before = len(self._entries)
            for raw in list(self._entries):
                self._drop_unused(raw)
            self._sweep_at = max(8, 2 * len(self._entries))
            return before - len(self._entries)

    def _drop_unused(self, raw: int) -> None:
        """Drops the objects of a stream that only the table refers to, once vramp has forgotten it."""
        if raw not in self._entries:
            return
        used = _in_use(self._entries[raw])
        if len(used) == len(self._entries[raw]):
            return
        pool = self._pool()
        try:
            if pool is not None:
                forget_stream(pool, raw)
        except ClosedError:
            pass  # a closed pool knows no stream
        except VrampError:
            return  # it captures a graph, or the driver refused: the next sweep retries
        if used:
            self._entries[raw] = tuple(used)
        else:
            del self._entries[raw]
            self._anchors.pop(raw, None)


_tables: weakref.WeakKeyDictionary[Pool, StreamTable] = weakref.WeakKeyDictionary()
_tables_lock = threading.Lock()


def streams_of(pool: Pool) -> StreamTable:
    """Returns the table of a pool."""
    with _tables_lock:
        table = _tables.get(pool)
        if table is None:
            table = _tables[pool] = StreamTable(pool)
        return table


def keep_stream(pool: Pool, raw: int, stream: Any) -> None:
    """Keeps the object of a stream alive until the pool has forgotten the stream."""
    if raw not in (0, 1, PER_THREAD_STREAM):
        streams_of(pool).add(raw, stream)


def check_library(module: str, distribution: str) -> tuple[Any, Check]:
    """Returns a library, or None, and the line of a doctor about it. A missing one is no failure."""
    try:
        library = load(module, distribution)
    except ImportError as error:
        missing = isinstance(error.__cause__, ModuleNotFoundError)
        return None, (module, None if missing else False, str(error))
    except Exception as error:  # a library may fail to import in any way
        return None, (module, False, f"{type(error).__name__}: {error}")
    version = getattr(library, "__version__", "of unknown version")
    return library, (module, True, f"{version}")


def check_pool(device: int) -> Check:
    """Returns the line of a doctor about the pool of a device."""
    try:
        shared = device_pool(device)
    except VrampError as error:
        return ("pool", False, str(error))
    return ("pool", True, f"{shared!r}")
