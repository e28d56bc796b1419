"""Moves of entries between the card, the host and the disk.

1. `take` marks the least recently used entry of a tier that may leave, under the lock.
2. `leave` copies its contents down without the lock, and then changes the lists and drops the value.
3. `restore` builds the value of a marked entry again.

Rules for threads: the lock protects the lists, and is not held while something is copied, serialized,
allocated or freed. An entry that is being moved is marked, and a reader waits for it. So the shortage handler,
which runs in the thread that allocates, waits for no thread that allocates.

Deliberately absent: which tier has to give up how much, in `_mapping`.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from distributed.metrics import context_meter

from ._files import Files, FilesFullError
from ._ledger import ABSENT, Entry, Ledger, Place
from ._values import Contents, Store, copy_out
from ._victims import is_unleased

logger = logging.getLogger("distributed.worker.memory.vramp")

WAIT_S = 60.0
"""Most seconds to wait for another thread that moves an entry."""


LEASE_WAIT_S = 1.0
"""Seconds that a restore waits for the leases of other values once no other one can leave."""


class Moves:
    """The lists of a mapping, and the moves between them. Threads may share it."""

    def __init__(self, files: Files, limits: dict[Place, int | None]) -> None:
        self.changed = threading.Condition(threading.RLock())
        """The lock, notified at the end of each move."""
        self.ledger = Ledger()
        self.limits = limits
        """Most bytes of DEVICE and HOST."""
        self.leaving = {Place.DEVICE: 0, Place.HOST: 0}
        """Bytes of the entries that leave a tier now."""
        self.metrics: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._files = files
        self._buffered: dict[int, Entry] = {}
        self._local = threading.local()

    @property
    def is_leaving(self) -> bool:
        """Whether this thread moves an entry out of a tier."""
        return getattr(self._local, "leaving", 0) > 0

    # Out of a tier.

    def lower(self, place: Place, store: Store | None, extra: int = 0) -> None:
        """Moves entries out until a tier has room for `extra` bytes within its limit, or none can leave."""
        limit = self.limits[place]
        while limit is not None:
            with self.changed:
                held = self.ledger.bytes(place) - self.leaving[place]
                entry = self.take(place, is_unleased) if held + extra > limit else None
            if entry is None or self.leave(entry, place, store) < 0:
                return

    def take(self, place: Place, may_leave: Callable[[Entry], bool]) -> Entry | None:
        """Marks the least recently used entry that may leave, and returns it."""
        with self.changed:
            entry = self.ledger.oldest(place, lambda each: not each.is_moving and not each.is_stuck and may_leave(each))
            if entry is not None:
                self.mark(entry, place)
            return entry

    def mark(self, entry: Entry, place: Place) -> None:
        """Marks an entry that leaves a tier. The caller holds the lock."""
        entry.is_moving = True
        entry.used = False
        self.leaving[place] += entry.size

    def leave(self, entry: Entry, place: Place, store: Store | None) -> int:
        """Moves a marked entry out of a tier. Returns its bytes, or -1 after a failure, which is logged."""
        try:
            self.leave_raising(entry, place, store)
        except FilesFullError:
            logger.warning("The files reached max_spill; keeping data in memory")
            return -1
        except OSError:
            logger.error("Writing %r to the disk failed; keeping data in memory", entry.key, exc_info=True)
            return -1
        except Exception:
            entry.is_stuck = True  # logged once
            logger.error("%r cannot leave %s", entry.key, place.value, exc_info=True)
            return -1
        return entry.size

    def leave_raising(self, entry: Entry, place: Place, store: Store | None) -> None:
        """Moves a marked entry out of a tier. After an exception it is where it was."""
        self._local.leaving = getattr(self._local, "leaving", 0) + 1
        try:
            with self.metered():
                if place is Place.DEVICE:
                    assert store is not None, "the first value of the card opens it"
                    self._leave_device(entry, store)
                else:
                    self._leave_host(entry)
        finally:
            self._local.leaving -= 1
            with self.changed:
                self.leaving[place] -= entry.size
            self.end(entry)

    def _leave_device(self, entry: Entry, store: Store) -> None:
        contents = entry.contents
        if contents is None and not entry.file:
            with context_meter.meter("host-write", "seconds"):
                contents = copy_out(entry.value, entry.size, store)
            context_meter.digest_metric("host-write", 1, "count")
            context_meter.digest_metric("host-write", contents.bytes, "bytes")
        with self.changed:
            self._keep_contents(entry, contents)
            if entry.used:  # a task reads it again: the copy stays, for the next time
                if not entry.is_buffered and not entry.removed:
                    self.ledger.put(entry, Place.DEVICE, Place.HOST)
                return
            dropped, entry.value = entry.value, ABSENT
            if not entry.removed:
                self.ledger.put(entry, Place.DISK if contents is None else Place.HOST, Place.AWAY)
        del dropped
        if contents is not None:
            contents.spill()

    def _leave_host(self, entry: Entry) -> None:
        if entry.is_buffered:
            assert entry.contents is not None
            with context_meter.meter("disk-write", "seconds"):
                pushed = entry.contents.push()
            context_meter.digest_metric("disk-write", pushed, "bytes")
        elif not entry.file:
            with context_meter.meter("disk-write", "seconds"):
                entry.file = self._files.write(entry.name, entry.contents if entry.is_device else entry.value)
            context_meter.digest_metric("disk-write", entry.file, "bytes")
        context_meter.digest_metric("disk-write", 1, "count")
        with self.changed:
            if entry.removed or (entry.used and not entry.is_device):
                return
            dropped: Any = None
            if not entry.is_device:
                dropped, entry.value = entry.value, ABSENT
                entry.ref = _weak(dropped)
            elif not entry.is_buffered:
                dropped, entry.contents = entry.contents, None
            on_card = self.ledger.has(entry, Place.DEVICE)
            self.ledger.put(entry, *((Place.DEVICE,) if on_card else (Place.DISK, Place.AWAY)))
        del dropped

    def deferred(self, number: int) -> None:
        """Records that a buffer left the card for an allocation, without a move of this class."""
        with self.changed:
            entry = self._buffered.get(number)
            if entry is None or entry.is_moving or entry.contents is None or entry.value is not ABSENT:
                return
            if self.ledger.has(entry, Place.DEVICE) and not entry.contents.is_resident:
                self.ledger.put(entry, Place.HOST, Place.AWAY)

    # Back.

    def at_hand(self, entry: Entry) -> Any:
        """Returns a value that needs no restore, or `ABSENT`, and makes it the most recently used one.

        The caller holds the lock.
        """
        value = entry.value
        if value is ABSENT and entry.ref is not None and not entry.is_moving:
            # Something else keeps it alive: it takes host memory anyway.
            value = entry.ref()
            if value is None:
                return ABSENT
            entry.value, entry.ref = value, None
            self.ledger.put(entry, Place.HOST)
        if value is not ABSENT:
            entry.used = True
            self.ledger.touch(entry)
            with self.metered():
                context_meter.digest_metric("memory-read", 1, "count")
                context_meter.digest_metric("memory-read", entry.size, "bytes")
        return value

    def restore(self, entry: Entry, store: Store | None, make_room: Callable[[int], bool]) -> Any:
        """Returns the value of a marked entry. What `make_room` evicts makes a failed lease be tried again."""
        with self.metered():
            if not entry.is_device:
                return self._restore_host(entry)
            assert store is not None, "the first value of the card opens it"
            return self._restore_device(entry, store, make_room)

    def _restore_device(self, entry: Entry, store: Store, make_room: Callable[[int], bool]) -> Any:
        contents = entry.contents or self.read(entry)
        on_card = self.ledger.has(entry, Place.DEVICE)
        limit = self.limits[Place.DEVICE]
        if limit is not None and entry.size <= limit and not on_card:
            self.lower(Place.DEVICE, store, entry.size)
        activity = "memory-read" if on_card else "host-read"
        with context_meter.meter(activity, "seconds"):
            value = _restored(contents, store, lambda: make_room(entry.size))
        context_meter.digest_metric(activity, 1, "count")
        context_meter.digest_metric(activity, entry.size, "bytes")
        file = 0
        with self.changed:
            if entry.removed:
                return value
            if contents.buffers:
                self._keep_contents(entry, contents)
                file, entry.file = entry.file, 0
            else:
                entry.value = value
            on_host = entry.contents is not None and not entry.is_buffered
            self.ledger.put(entry, Place.DEVICE, *((Place.HOST,) if on_host else ()))
        if file:
            self._files.remove(entry.name, file)
        return value

    def _restore_host(self, entry: Entry) -> Any:
        value = self.read(entry)
        with self.changed:
            entry.value = value
            if not entry.removed:
                self.ledger.put(entry, Place.HOST)
        return value

    def read(self, entry: Entry) -> Any:
        """Returns what the file of an entry has: a host value, or the contents of a device value."""
        with context_meter.meter("disk-read", "seconds"):
            value = self._files.read(entry.name)
        context_meter.digest_metric("disk-read", 1, "count")
        context_meter.digest_metric("disk-read", entry.file, "bytes")
        return value

    def _keep_contents(self, entry: Entry, contents: Contents | None) -> None:
        entry.contents = contents
        if contents is not None and not entry.removed:
            for frame in contents.buffers:
                self._buffered[frame.number] = entry

    # The ends.

    def end(self, entry: Entry) -> None:
        """Ends the mark of an entry."""
        with self.changed:
            entry.is_moving = False
            self.changed.notify_all()
        if entry.removed:
            self.dispose(entry)

    def dispose(self, entry: Entry) -> None:
        """Frees what a removed entry has, unless a thread moves it and does so at the end."""
        with self.changed:
            entry.removed = True
            self.ledger.forget(entry)
            if entry.is_moving:
                return
            for frame in entry.contents.buffers if entry.contents is not None else ():
                self._buffered.pop(frame.number, None)
            dropped = (entry.value, entry.contents)
            entry.value, entry.contents = ABSENT, None
            size, entry.file = entry.file, 0
        del dropped
        if size:
            self._files.remove(entry.name, size)

    @contextmanager
    def metered(self) -> Iterator[None]:
        """Adds what is measured inside to `metrics`, once for nested calls."""

        def add(label: Any, value: float, unit: str) -> None:
            with self.changed:
                self.metrics[label, unit] += value

        if getattr(self._local, "is_metered", False):
            yield
            return
        self._local.is_metered = True
        try:
            with context_meter.add_callback(add):
                yield
        finally:
            self._local.is_metered = False


def _restored(contents: Contents, store: Store, make_room: Callable[[], bool]) -> Any:
    """Restores a value, and evicts others until there is room. At last it waits for leases of others: not long,
    since a worker without the plugin reads on its event loop, which also ends the leases of tasks that are done."""
    while True:
        try:
            return contents.restore(store, 0.0)
        except (MemoryError, TimeoutError):
            if not make_room():
                return contents.restore(store, LEASE_WAIT_S)


def _weak(value: Any) -> Callable[[], Any] | None:
    try:
        return weakref.ref(value)
    except TypeError:
        return None
