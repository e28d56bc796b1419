"""What tests of the mapping share: a store that keeps contents in host memory and counts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vramp.dask._values import Frame


class CountingFrame:
    """Contents in a store of tests."""

    def __init__(self, store: CountingStore, contents: bytes) -> None:
        self.store, self.contents, self.nbytes = store, contents, len(contents)
        self.leases = 0
        self.number = id(self)
        self.is_resident = False

    @property
    def is_leased(self) -> bool:
        return self.leases > 0

    def lease(self, timeout: float) -> Any:
        self.store.call("lease")
        self.is_resident = True
        return Lease(self)

    def spill(self) -> int:
        self.store.call("spill")
        self.is_resident = self.is_resident and self.is_leased
        return 0 if self.leases else self.nbytes

    def push(self) -> int:
        self.store.call("push")
        return self.nbytes

    def read(self) -> bytes:
        self.store.call("read")
        return self.contents


class Lease:
    """Memory of a frame while it is leased."""

    def __init__(self, frame: CountingFrame) -> None:
        self._frame = frame
        self.nbytes = frame.nbytes
        frame.leases += 1

    @property
    def __array_interface__(self) -> Any:
        return np.frombuffer(self._frame.contents, "u1").__array_interface__

    def __del__(self) -> None:
        self._frame.leases -= 1


class CountingStore:
    """A store whose calls are counted, and can fail or wait: `hooks[call]()` runs first."""

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}
        self.hooks: dict[str, Callable[[], None]] = {}
        self.copied = 0
        self._lock = threading.Lock()

    def call(self, name: str) -> None:
        with self._lock:
            self.calls[name] = self.calls.get(name, 0) + 1
        self.hooks.get(name, lambda: None)()

    def keep(self, frames: Sequence[Any]) -> list[Frame]:
        self.call("keep")
        contents = [np.asarray(frame).tobytes() for frame in frames]
        with self._lock:
            self.copied += sum(map(len, contents))
        return [CountingFrame(self, each) for each in contents]
