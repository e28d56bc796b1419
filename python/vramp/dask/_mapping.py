"""The keys of a worker, and which of them leave the card and the host.

Life of a key:

1. `mapping[key] = value` keeps the value. Values on the card and on the host each have a list by last use.
2. Past `device_memory_limit`, or when the card's pool runs short, the least recently used values leave the
   card: their contents go to deferrable buffers, and the value is dropped.
3. Past `memory_limit`, or when the worker's monitor calls `evict`, the least recently used contents on the
   host go to the disk.
4. `mapping[key]` restores the value. The copy below the card stays, so it leaves again without a copy; a pool
   that runs short takes the memory of such values first, without a call of the mapping.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterator, MutableMapping
from typing import Any

from dask.utils import format_bytes
from distributed.sizeof import safe_sizeof
from distributed.spill import SpilledSize
from distributed.utils import RateLimiterFilter

from .. import pool
from ._files import Files, FilesFullError
from ._ledger import ABSENT, Entry, Place
from ._limits import Limit, parse_card_limit, parse_limit
from ._moves import WAIT_S, Moves
from ._reading import current
from ._sending import Sent
from ._spillable import is_managed_elsewhere
from ._store import TierStore
from ._values import Contents, Store, is_device_value
from ._victims import can_free, is_only_here
from ._views import PlaceView

logger = logging.getLogger("distributed.worker.memory.vramp")
logger.addFilter(RateLimiterFilter("No memory of the card can be freed"))


class TieredMapping(MutableMapping[Any, Any]):
    """The data of a worker, over the card, the host and the disk.

    Pass it to a worker as `data=(TieredMapping, {"device_memory_limit": "30GiB"})`, or use
    `vramp.dask.LocalCluster`. Limits are bytes, texts such as "30GiB", or None for none; others raise OptionError:

    - `device_memory_limit`: most bytes of values on the card, by `dask.sizeof`, or a float above 0 and up to 1: a
      part of the card's memory, as in dask-cuda. With or without one, values leave when the card's pool runs short
      of memory. 0 keeps no idle value there; dask-cuda's 0 is None.
    - `memory_limit`: most bytes of values and contents on the host, before they go to the disk. Pinned memory has
      the same limit of its own, but at least 8 MiB.
    - `max_spill`: most bytes of files of host values.
    - `store`: where contents go that leave the card. By default deferrable buffers of `vramp.pool()`,
      opened with the first value on the card.

    A value that was restored reads its buffers, which all readers share. Dask's tasks do not change their
    inputs; a change would be lost when the contents leave the card again.

    Each call is O(1), and O(1) for each entry that it moves or that cannot be moved now. Threads may share it.
    """

    def __init__(
        self,
        worker_local_directory: str | os.PathLike[str],
        *,
        device_memory_limit: Limit = None,
        memory_limit: Limit = None,
        max_spill: Limit = None,
        store: Store | None = None,
    ) -> None:
        files = Files(os.path.join(worker_local_directory, "storage"), parse_limit("max_spill", max_spill))
        on_card = parse_card_limit("device_memory_limit", device_memory_limit)
        self._fraction = on_card if isinstance(on_card, float) else None
        limits = {
            Place.DEVICE: None if isinstance(on_card, float) else on_card,
            Place.HOST: parse_limit("memory_limit", memory_limit),
        }
        self._moves = Moves(files, limits)
        self._ledger = self._moves.ledger
        self._changed = self._moves.changed
        self._directory = os.path.join(worker_local_directory, "vramp")
        self._entries: dict[Any, Entry] = {}
        self._names = map(str, itertools.count())
        self._opening = threading.Lock()
        self._store = store

    @property
    def cumulative_metrics(self) -> defaultdict[tuple[str, str], float]:
        """What was read, written and how long it took, by (activity, unit). Dask's Prometheus page has it."""
        return self._moves.metrics

    # The mapping.

    def __setitem__(self, key: Any, value: Any) -> None:
        """Keeps a value. Other values leave their tier if it is past its limit.

        A value that is alone larger than the limit leaves at once. If it cannot be serialized then, the key
        is forgotten and the exception is raised. No other failure raises: what cannot leave stays.
        """
        entry = self._entry_of(key, value)
        place = Place.DEVICE if entry.is_device and entry.value is not ABSENT else Place.HOST
        if entry.is_device:
            self.store  # noqa: B018  opens it, and with it the pool's shortage handler
            if self._fraction is not None:
                # The card is known from its first value on.
                self._moves.limits[Place.DEVICE] = int(self._fraction * pool().device_info.memory)
                self._fraction = None
        with self._changed:
            replaced = self._entries.pop(key, None)
            self._entries[key] = entry
            if not entry.is_elsewhere:
                away = (Place.AWAY,) if entry.value is ABSENT else ()
                self._ledger.put(entry, place, *away)
        if replaced is not None:
            self._moves.dispose(replaced)
        limit = self._moves.limits[place]
        if limit is not None and entry.size > limit and not entry.is_elsewhere:
            self._leave_or_forget(entry, place)
        self._settle()

    def __getitem__(self, key: Any) -> Any:
        """Returns a value, and restores it if it is elsewhere.

        Raises KeyError, MemoryError if there is no room on the card, and OSError if the disk cannot be read;
        the contents stay.
        """
        reading = current()
        if reading.has(key):
            return reading.take(key)
        over = reading.transport
        with self._changed:
            entry = self._entries[key]
            while True:
                value = self._moves.at_hand(entry)
                if value is not ABSENT:
                    return Sent(value, self.make_room) if over == "host" and entry.is_device else value
                if over is not None and entry.contents is not None:
                    return Sent(entry.contents, self.make_room)
                if not entry.is_moving:
                    entry.is_moving = True
                    break
                if not self._changed.wait(WAIT_S):
                    raise TimeoutError(f"{key!r} is being moved by another thread since {WAIT_S:.0f} s")
        try:
            if over is not None and entry.is_device:
                return Sent(self._moves.read(entry), self.make_room)
            value = self._moves.restore(entry, self._store, self.make_room)
        finally:
            self._moves.end(entry)
        self._settle()
        return value

    def is_at_hand(self, key: Any) -> bool:
        """Returns whether a read of a key restores and copies nothing. A key that is absent is."""
        with self._changed:
            entry = self._entries.get(key)
            if entry is None:
                return True
            is_copied = entry.is_device and current().transport == "host"
            return entry.value is not ABSENT and not is_copied

    def __delitem__(self, key: Any) -> None:
        with self._changed:
            removed = self._entries.pop(key)
        self._moves.dispose(removed)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Any]:
        with self._changed:
            return iter(list(self._entries))

    def clear(self) -> None:
        """Removes all keys, without a restore."""
        for key in self:
            del self[key]

    # What a worker, its dashboard and its Prometheus page read.

    @property
    def device(self) -> PlaceView:
        """Keys of values on the card."""
        return self._view(Place.DEVICE)

    @property
    def host(self) -> PlaceView:
        """Keys whose contents are on the host, and not on the card."""
        return self._view(Place.HOST, without=Place.DEVICE)

    @property
    def disk(self) -> PlaceView:
        """Keys whose contents are on the disk only."""
        return self._view(Place.DISK)

    @property
    def others(self) -> list[Any]:
        """Keys of values that another library spills, such as cuDF's own."""
        with self._changed:
            return [key for key, entry in self._entries.items() if entry.is_elsewhere]

    @property
    def fast(self) -> PlaceView:
        """Keys with contents that `evict` moves out of host memory. A worker tests whether it is empty."""
        return self._view(Place.HOST)

    @property
    def slow(self) -> PlaceView:
        """Keys that have to be restored before they are used. Prometheus counts them as on the disk."""
        return self._view(Place.AWAY)

    @property
    def spilled_total(self) -> SpilledSize:
        """Bytes of the values in `slow`, by `dask.sizeof`, and bytes of their contents on host and disk."""
        with self._changed:
            return SpilledSize(self._ledger.bytes(Place.AWAY), self._ledger.stored)

    def evict(self) -> int:
        """Moves the least recently used contents on the host to the disk. Returns their bytes.

        A worker calls it when its process takes too much host memory. Returns -1 if nothing can leave, after
        a failure was logged; then it stays where it is. Never raises.
        """
        try:
            entry = self._moves.take(Place.HOST, lambda entry: True)
            return -1 if entry is None else self._moves.leave(entry, Place.HOST, self._store)
        except Exception:
            logger.exception("The eviction of a key failed")
            return -1

    # Room on the card.

    @property
    def store(self) -> Store:
        """Where contents go that leave the card."""
        if self._store is None:
            with self._opening:
                if self._store is None:
                    deferred = weakref.WeakMethod(self._moves.deferred)
                    store = TierStore.open(
                        self._directory, self._moves.limits[Place.HOST], lambda number: _call(deferred, number)
                    )
                    make_room = weakref.WeakMethod(self.make_room)
                    registration = store.pool.on_shortage(
                        lambda nbytes: bool(_call(make_room, store.shortfall(nbytes)))
                    )
                    weakref.finalize(self, registration.close)
                    self._store = store
        return self._store

    def make_room(self, nbytes: int) -> bool:
        """Evicts values from the card until `nbytes` are free. Returns whether a request may be tried again.

        The pool calls it when it runs short. Values that a task uses stay, since their memory would too.
        """
        if nbytes == 0:
            return True
        freed = 0
        failed = False
        while freed < nbytes and not failed:
            entry = self._moves.take(Place.DEVICE, is_only_here)
            if entry is None:
                break
            moved = self._moves.leave(entry, Place.DEVICE, self._store)
            failed = moved < 0
            freed += max(0, moved)
        if freed == 0 and not self._moves.is_leaving:
            freed = self._wait_for_others()
        if freed == 0:
            logger.warning("No memory of the card can be freed for %s. %s", format_bytes(nbytes), self.report())
        return freed > 0

    def report(self) -> str:
        """Returns what the mapping holds on the card, the host and the disk, and what cannot leave."""
        with self._changed:
            amounts = ", ".join(
                f"{place.value}: {self._ledger.count(place)} keys, {format_bytes(self._ledger.bytes(place))}"
                for place in (Place.DEVICE, Place.HOST, Place.DISK)
            )
            stay = [entry for entry in self._ledger.entries(Place.DEVICE) if not can_free(entry)]
        used = format_bytes(sum(entry.size for entry in stay))
        return f"{amounts}; of those on the card {len(stay)} keys, {used}, are in use or cannot be serialized"

    def _wait_for_others(self) -> int:
        """Waits for a thread that is evicting from the card. Returns the bytes that left, or 0 if none is."""
        leaving = self._moves.leaving
        with self._changed:
            before = leaving[Place.DEVICE]
            if before == 0:
                return 0
            self._changed.wait_for(lambda: leaving[Place.DEVICE] < before, WAIT_S)
            return max(0, before - leaving[Place.DEVICE])

    def _settle(self) -> None:
        """Moves entries until each tier is within its limit, or none can leave."""
        self._moves.lower(Place.DEVICE, self._store)
        self._moves.lower(Place.HOST, self._store)

    def _leave_or_forget(self, entry: Entry, place: Place) -> None:
        """Moves an entry out that is larger than its tier, or forgets the key if it cannot be serialized."""
        with self._changed:
            if entry.is_moving or entry.removed:
                return
            self._moves.mark(entry, place)
        try:
            self._moves.leave_raising(entry, place, self._store)
        except (OSError, FilesFullError, MemoryError):
            logger.error("%r does not fit, and cannot leave %s", entry.key, place.value, exc_info=True)
        except Exception:
            with self._changed:
                if self._entries.get(entry.key) is entry:
                    del self._entries[entry.key]
            self._moves.dispose(entry)
            raise

    def _entry_of(self, key: Any, value: Any) -> Entry:
        name = next(self._names)
        if isinstance(value, Contents):  # received from another worker
            entry = Entry(key, ABSENT, value.size, True, name)
            entry.contents = value
            return entry
        elsewhere = is_managed_elsewhere(value)
        entry = Entry(key, value, safe_sizeof(value), not elsewhere and is_device_value(value), name)
        entry.is_elsewhere = elsewhere
        return entry

    def _view(self, place: Place, without: Place | None = None) -> PlaceView:
        def keys() -> list[Any]:
            with self._changed:
                entries = self._ledger.entries(place)
                return [entry.key for entry in entries if without is None or not self._ledger.has(entry, without)]

        def count() -> int:
            return self._ledger.count(place) if without is None else len(keys())

        return PlaceView(keys, count, self.__getitem__)


def _call(method: weakref.WeakMethod[Any], number: int) -> Any:
    """Calls a method with a number, if its object lives. Returns None otherwise."""
    bound = method()
    return None if bound is None else bound(number)
