"""Which entries may leave the card, and whether that frees memory."""

from __future__ import annotations

import sys

from ._ledger import ABSENT, Entry


def is_only_here(entry: Entry) -> bool:
    """Returns whether the mapping alone keeps a value alive, so that its memory is freed when it leaves."""
    return entry.value is not ABSENT and sys.getrefcount(entry.value) <= _ONLY_HERE


def is_unleased(entry: Entry) -> bool:
    """Returns whether the mapping keeps a value itself, or no other value uses its buffers."""
    return entry.value is not ABSENT or entry.contents is None or not entry.contents.is_leased


def can_free(entry: Entry) -> bool:
    """Returns whether memory of the card would be free after an entry left."""
    if entry.is_stuck:
        return False
    return is_unleased(entry) if entry.value is ABSENT else is_only_here(entry)


# What getrefcount returns above for a value that only the entry refers to. It differs by version.
_entry = Entry(None, object(), 0, True, "")
_ONLY_HERE = sys.getrefcount(_entry.value)
del _entry
