"""Files of values that left the host: one for each, in the worker's local directory.

Frames are written as Dask writes a spilled value, with `distributed.worker.memory.spill-compression`.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from typing import Any

from distributed.protocol import deserialize_bytes, serialize_bytelist
from distributed.protocol.compression import get_compression_settings
from distributed.utils import nbytes


class FilesFullError(Exception):
    """The files have their most bytes."""


class Files:
    """Values in files of a directory, which is made for the first one. Threads may share it."""

    def __init__(self, directory: str | os.PathLike[str], limit: int | None) -> None:
        self.directory = os.fspath(directory)
        """Where the files are."""
        self.bytes = 0
        """Bytes of all files."""
        self._limit = limit
        self._lock = threading.Lock()
        self._compression = get_compression_settings("distributed.worker.memory.spill-compression")

    def write(self, name: str, value: object) -> int:
        """Writes a file. Returns its bytes. Raises TypeError if the value cannot be serialized, FilesFullError
        or OSError; then there is no file."""
        frames = serialize_bytelist(value, compression=self._compression, on_error="raise")
        size = sum(map(nbytes, frames))
        with self._lock:
            if self._limit is not None and self.bytes + size > self._limit:
                raise FilesFullError(f"{self.bytes} + {size} bytes are more than {self._limit}")
            self.bytes += size
        try:
            os.makedirs(self.directory, exist_ok=True)
            with open(self._path(name), "wb") as file:
                file.writelines(frames)
        except BaseException:
            self.remove(name, size)
            raise
        return size

    def read(self, name: str) -> Any:
        """Returns the value of a file. It may be written to, as far as its type allows."""
        with open(self._path(name), "rb") as file:
            # NumPy's deserializer copies memory that is read-only.
            frames = bytearray(os.fstat(file.fileno()).st_size)
            if file.readinto(frames) != len(frames):
                raise OSError(f"{file.name} is shorter than it was")
        return deserialize_bytes(frames)

    def remove(self, name: str, size: int) -> None:
        """Removes a file of `size` bytes."""
        with self._lock:
            self.bytes -= size
        with suppress(FileNotFoundError):
            os.remove(self._path(name))

    def _path(self, name: str) -> str:
        return os.path.join(self.directory, name)
