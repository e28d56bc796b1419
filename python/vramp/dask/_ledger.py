"""Where the contents of each key are, in order of last use, and how many bytes that is. Pure: no lock, no
library.

| list | has |
|---|---|
| DEVICE | values on the card, and buffers that were restored |
| HOST | host values, and contents on the host of values that left the card |
| DISK | contents that are on the disk, and nowhere above |
| AWAY | what has to be restored before it is used: device values that left the card, host values on the disk |

A value that came back to the card is in DEVICE and, while a copy of it stays in host memory of this process,
in HOST too.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from ._values import Contents


class Place(enum.Enum):
    """A list of a ledger."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    AWAY = "away"


class _Absent(enum.Enum):
    ABSENT = "absent"


ABSENT = _Absent.ABSENT
"""The value of an entry that keeps none alive."""


class Entry:
    """What a mapping knows of a key."""

    __slots__ = (
        "contents", "file", "is_device", "is_elsewhere", "is_moving", "is_stuck", "key", "name", "ref", "removed", "size", "used", "value"
    )  # fmt: skip

    def __init__(self, key: Any, value: Any, size: int, is_device: bool, name: str) -> None:
        self.key = key
        self.name = name
        """Name of its file."""
        self.value: Any = value
        """The value, or `ABSENT` while only its contents are kept."""
        self.ref: Callable[[], Any] | None = None
        """A weak reference to a host value that went to the disk."""
        self.size = size
        """`sizeof` of the value."""
        self.is_device = is_device
        """Whether the value has memory on the card."""
        self.contents: Contents | None = None
        """The contents of a device value that left the card once."""
        self.file = 0
        """Bytes of the file with the contents, or 0."""
        self.is_elsewhere = False
        """Another library moves the value."""
        self.is_moving = False
        """A thread moves the contents. No other one starts to."""
        self.is_stuck = False
        """The value cannot be serialized, and stays where it is."""
        self.used = False
        """The value was read while it was being moved."""
        self.removed = False
        """The key was deleted or got another value."""

    @property
    def is_buffered(self) -> bool:
        """Whether the contents are in deferrable buffers."""
        return self.contents is not None and bool(self.contents.buffers)

    @property
    def stored(self) -> int:
        """Bytes of the contents below the value's own tier."""
        if self.contents is not None:
            return self.contents.bytes
        return self.file


class Ledger:
    """The lists. Each operation is O(1), except for `oldest` and `entries`."""

    def __init__(self) -> None:
        self._lists: dict[Place, OrderedDict[Entry, tuple[int, int]]] = {place: OrderedDict() for place in Place}
        self._bytes = dict.fromkeys(Place, 0)
        self._stored = 0
        self.scanned = 0
        """Entries that `oldest` looked at so far."""

    def put(self, entry: Entry, *places: Place) -> None:
        """Moves an entry to lists, as the most recently used one, and out of the others."""
        self.forget(entry)
        for place in places:
            self._lists[place][entry] = (entry.size, entry.stored)
            self._bytes[place] += entry.size
        if Place.AWAY in places:
            self._stored += entry.stored

    def forget(self, entry: Entry) -> None:
        """Removes an entry from all lists."""
        for place, entries in self._lists.items():
            size, stored = entries.pop(entry, (0, 0))
            self._bytes[place] -= size
            if place is Place.AWAY:
                self._stored -= stored

    def touch(self, entry: Entry) -> None:
        """Makes an entry the most recently used one of its lists."""
        for entries in self._lists.values():
            if entry in entries:
                entries.move_to_end(entry)

    def has(self, entry: Entry, place: Place) -> bool:
        """Returns whether an entry is in a list."""
        return entry in self._lists[place]

    def bytes(self, place: Place) -> int:
        """Returns the bytes of the values of a list."""
        return self._bytes[place]

    @property
    def stored(self) -> int:
        """Bytes that the entries of AWAY take below their own tiers."""
        return self._stored

    def count(self, place: Place) -> int:
        """Returns the entries of a list."""
        return len(self._lists[place])

    def entries(self, place: Place) -> list[Entry]:
        """Returns the entries of a list, the least recently used one first. O(n)."""
        return list(self._lists[place])

    def oldest(self, place: Place, may_leave: Callable[[Entry], bool]) -> Entry | None:
        """Returns the least recently used entry that may leave a list. O(1), and one for each that may not."""
        for entry in self._lists[place]:
            self.scanned += 1
            if may_leave(entry):
                return entry
        return None
