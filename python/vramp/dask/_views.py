"""The keys of a mapping by place, as mappings: what tests, dashboards and Prometheus look at."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any


class PlaceView(Mapping[Any, Any]):
    """The keys of a place, when it is asked. A value is read through the mapping, which restores it."""

    __slots__ = ("_count", "_keys", "_read")

    def __init__(self, keys: Callable[[], list[Any]], count: Callable[[], int], read: Callable[[Any], Any]) -> None:
        self._keys = keys
        self._count = count
        self._read = read

    def __getitem__(self, key: Any) -> Any:
        if key not in self:
            raise KeyError(key)
        return self._read(key)

    def __contains__(self, key: object) -> bool:
        return key in self._keys()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._keys())

    def __len__(self) -> int:
        return self._count()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._keys()!r})"
