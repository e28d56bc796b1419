"""The bytes that an ideal mapping would copy out for a worker's accesses.

An access is ("set" | "get" | "del", key, bytes). The card holds `capacity` bytes of values. A value that has to
leave is copied out once, and never again; nothing else takes memory.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

Access = tuple[str, Any, int]


def by_lru(trace: Iterable[Access], capacity: int) -> int:
    """Returns the bytes if the least recently used value leaves."""
    held: OrderedDict[Any, int] = OrderedDict()
    return _run(trace, capacity, held, lambda: next(iter(held)))


def by_belady(trace: Sequence[Access], capacity: int) -> int:
    """Returns the bytes if the value leaves that is used again last: with knowledge of the future."""
    uses: defaultdict[Any, deque[int]] = defaultdict(deque)
    for at, (_operation, key, _size) in enumerate(trace):
        uses[key].append(at)
    held: OrderedDict[Any, int] = OrderedDict()

    def passed() -> Iterable[Access]:
        for access in trace:
            uses[access[1]].popleft()
            yield access

    return _run(passed(), capacity, held, lambda: max(held, key=lambda key: uses[key][0] if uses[key] else len(trace)))


def _run(trace: Iterable[Access], capacity: int, held: OrderedDict[Any, int], victim: Callable[[], Any]) -> int:
    copied: set[Any] = set()
    written = used = 0
    for operation, key, size in trace:
        used -= held.pop(key, 0)
        if operation != "get":
            copied.discard(key)
        if operation == "del":
            continue
        while held and used + size > capacity:
            leaves = victim()
            gone = held.pop(leaves)
            used -= gone
            if leaves not in copied:
                copied.add(leaves)
                written += gone
        held[key] = size
        used += size
    return written
