"""Which values have memory on the card, and their contents once it has left.

1. `is_device_value` returns whether a value has memory on the card.
2. `Contents.evicted` copies a value's device frames to buffers of a store, and `Contents.on_host` all of it
   to host memory. The headers and host frames of the value are kept as they are.
3. `restore` builds the value again: around the addresses of its leased buffers, or by a copy from the host.

Deliberately absent: when to do which, in `_mapping`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import islice
from pickle import PickleBuffer
from typing import Any, Protocol, TypeAlias

import numpy as np
from dask.sizeof import sizeof
from distributed.protocol import dask_deserialize, dask_serialize, deserialize, serialize
from distributed.protocol.cuda import cuda_serialize
from distributed.sizeof import safe_sizeof
from distributed.utils import nbytes

Header: TypeAlias = dict[str, Any]

logger = logging.getLogger("distributed.worker.memory.vramp")

_HOST_FRAMES = (bytes, bytearray, memoryview, np.ndarray, PickleBuffer)
_COLLECTIONS = (list, tuple, set, frozenset)
_END = object()


class Frame(Protocol):
    """The contents of one device frame, in a buffer that may leave the card and comes back."""

    @property
    def nbytes(self) -> int:
        """Bytes of the contents."""

    @property
    def number(self) -> int:
        """Number of the frame, unique in the process."""

    @property
    def is_leased(self) -> bool:
        """Whether an array over the contents lives."""

    @property
    def is_resident(self) -> bool:
        """Whether the contents are on the card."""

    def lease(self, timeout: float) -> Any:
        """Returns a device array over the contents. They stay on the card until its last reference ends.

        Waits for the leases of others for `timeout` seconds. Raises TimeoutError or MemoryError.
        """

    def spill(self) -> int:
        """Gives the memory on the card back, if no lease holds it. Returns its bytes."""

    def push(self) -> int:
        """Moves the contents to the disk, if no lease holds them. Returns the bytes that moved."""

    def read(self) -> bytes:
        """Returns the contents."""


class Store(Protocol):
    """Makes buffers for frames."""

    def keep(self, frames: Sequence[Any]) -> list[Frame]:
        """Copies frames to buffers of their own: arrays on the card, or contents in host memory.

        All or none: after an exception no memory is taken.
        """


LOOKED_AT = 1000
"""Elements of one collection that `is_device_value` looks at."""

LOOKED_AT_IN_ALL = 100_000
"""Objects that one call of `is_device_value` looks at."""


def is_device_value(value: object) -> bool:
    """Returns whether a value, or one inside a collection, has memory on the card.

    That is an object with `__cuda_array_interface__`, or of a type with a serializer in Dask's family
    `cuda`. A collection may contain itself. Of one with more than `LOOKED_AT` elements so many are looked at, of a
    sequence evenly from its first to its last, and at most `LOOKED_AT_IN_ALL` objects in all. O(those).
    """
    seen: set[int] = set()
    left = [iter((value,))]
    for _ in range(LOOKED_AT_IN_ALL):
        each = next(left[-1], _END)
        while each is _END:
            left.pop()
            if not left:
                return False
            each = next(left[-1], _END)
        if not isinstance(each, (*_COLLECTIONS, dict)):
            if _has_serializer(each) or _has_interface(each):
                return True
        elif id(each) not in seen:
            # The value keeps it alive, so no other object has its number.
            seen.add(id(each))
            left.append(iter(_sample(each)))
    return False


def _sample(collection: Any) -> list[object]:
    """Returns at most `LOOKED_AT` elements of a collection, or values of a dictionary."""
    elements = collection.values() if isinstance(collection, dict) else collection
    if len(collection) <= LOOKED_AT or not isinstance(collection, (list, tuple)):
        return list(islice(elements, LOOKED_AT))
    last = len(collection) - 1
    return [collection[last * nth // (LOOKED_AT - 1)] for nth in range(LOOKED_AT)]


def _has_interface(value: object) -> bool:
    try:
        return hasattr(value, "__cuda_array_interface__")
    except Exception:  # a property of the value's own may raise anything
        return False


def _has_serializer(value: object) -> bool:
    try:
        cuda_serialize.dispatch(type(value))
    except TypeError:
        return False
    return True


class Contents:
    """A value that is not on the card, or need not be: a header, host frames, and frames in buffers.

    What arrives from another process or a file has the contents of buffers as host frames, until `restore`
    copies them to buffers of its own.
    """

    __slots__ = ("_arrived", "_frames", "_header", "size")

    def __init__(self, header: Header, frames: list[Any], size: int, arrived: dict[int, bool] | None = None) -> None:
        self._header = header
        self._frames = frames
        self._arrived = arrived or {}
        self.size = size
        """`sizeof` of the value."""

    @property
    def buffers(self) -> list[_Buffered]:
        """The frames in buffers."""
        return [frame for frame in self._frames if isinstance(frame, _Buffered)]

    @classmethod
    def evicted(cls, value: object, store: Store) -> Contents:
        """Copies the device frames of a value to buffers.

        Raises TypeError if the value cannot be serialized, and what the store raises. The value stays
        as it is.
        """
        families = ("cuda", "dask", "pickle")
        header, frames = serialize(value, serializers=families, on_error="raise", iterate_collection=True)
        where = {at: _refuses_foreign_memory(frame) for at, frame in enumerate(frames) if not _is_host(frame)}
        return cls(header, _keep([_copied(frame) for frame in frames], where, store), safe_sizeof(value))

    @classmethod
    def on_host(cls, value: object) -> Contents:
        """Copies a value to host memory, by Dask's serializers. Raises TypeError if it has none."""
        families = ("dask", "pickle")
        header, frames = serialize(value, serializers=families, on_error="raise", iterate_collection=True)
        return cls(header, [_copied(frame) for frame in frames], safe_sizeof(value))

    def restore(self, store: Store, timeout: float = 10.0) -> Any:
        """Returns the value. Its buffers stay on the card for as long as it lives.

        Their contents are not copied, unless the type takes no foreign memory. An exception of a lease
        leaves none behind.
        """
        if self._arrived:
            self._frames = _keep(self._frames, self._arrived, store)
            self._arrived = {}
        frames = [frame.lease(timeout) if isinstance(frame, _Buffered) else frame for frame in self._frames]
        return deserialize(self._header, frames)

    def spill(self) -> int:
        """Gives memory on the card back that no value uses. Returns its bytes."""
        return sum(frame.spill() for frame in self.buffers)

    def push(self) -> int:
        """Moves buffers to the disk. Returns the bytes that moved."""
        return sum(frame.push() for frame in self.buffers)

    @property
    def is_resident(self) -> bool:
        """Whether all buffers are on the card."""
        return all(frame.is_resident for frame in self.buffers)

    @property
    def is_leased(self) -> bool:
        """Whether a value lives that uses the buffers."""
        return any(frame.is_leased for frame in self.buffers)

    @property
    def bytes(self) -> int:
        """Bytes of all frames."""
        return sum(nbytes(frame) for frame in self._frames)

    def to_frames(self) -> tuple[Header, list[Any]]:
        """Returns a header and host frames, for a file or another process."""
        buffered = {at: frame.copies for at, frame in enumerate(self._frames) if isinstance(frame, _Buffered)}
        header = {"header": self._header, "buffered": list((buffered or self._arrived).items()), "size": self.size}
        return header, [frame.read() if isinstance(frame, _Buffered) else frame for frame in self._frames]

    @classmethod
    def from_frames(cls, header: Header, frames: Sequence[Any]) -> Contents:
        """Returns the contents of `to_frames`."""
        return cls(header["header"], list(frames), header["size"], dict(header["buffered"]))


SMALLEST_BUFFER = 1 << 20
"""A buffer has whole pages of the card, 2 MiB on NVIDIA's. Smaller values go to the host by a copy."""


def copy_out(value: object, size: int, store: Store) -> Contents:
    """Returns the contents of a value, in buffers of a store, or in host memory if it is small.

    A value that the store refuses, and one of a type without a serializer of the family `cuda`, go through host
    memory too. Raises TypeError if the value cannot be serialized.
    """
    contents = None
    if size >= SMALLEST_BUFFER:
        try:
            contents = Contents.evicted(value, store)
        except Exception as error:
            logger.debug("A value of %d bytes goes to the host by a copy: %r", size, error)
    return Contents.on_host(value) if contents is None else contents


class _Buffered:
    """A device frame in a buffer."""

    __slots__ = ("_frame", "copies", "nbytes", "number", "push", "read", "spill")

    def __init__(self, frame: Frame, copies: bool) -> None:
        self._frame = frame
        self.copies = copies
        self.nbytes, self.number = frame.nbytes, frame.number
        self.spill, self.push, self.read = frame.spill, frame.push, frame.read

    @property
    def is_leased(self) -> bool:
        return self._frame.is_leased

    @property
    def is_resident(self) -> bool:
        return self._frame.is_resident

    def lease(self, timeout: float) -> Any:
        leased = self._frame.lease(timeout)
        return _rmm_copy(leased) if self.copies else leased


def _keep(frames: Sequence[Any], where: dict[int, bool], store: Store) -> list[Any]:
    """Returns frames with those at `where` in buffers. True is a frame whose type takes no foreign memory."""
    kept = dict(zip(where, store.keep([frames[at] for at in where]), strict=True))
    return [_Buffered(kept[at], where[at]) if at in where else frame for at, frame in enumerate(frames)]


def _is_host(frame: object) -> bool:
    return isinstance(frame, _HOST_FRAMES)


def _copied(frame: Any) -> Any:
    """Returns a host frame that later writes to the value's memory do not change, or a device frame."""
    return bytes(memoryview(frame).cast("B")) if _is_host(frame) and not isinstance(frame, bytes) else frame


def _refuses_foreign_memory(frame: object) -> bool:
    """Returns whether the frame is a buffer of RMM, whose deserializer takes no other memory."""
    return type(frame).__module__.partition(".")[0] == "rmm"


def _rmm_copy(leased: Any) -> Any:
    import rmm

    address, _readonly = leased.__cuda_array_interface__["data"]
    return rmm.DeviceBuffer(ptr=address, size=leased.nbytes)


@dask_serialize.register(Contents)
def _serialize_contents(contents: Contents) -> tuple[Header, list[Any]]:
    return contents.to_frames()


@dask_deserialize.register(Contents)
def _deserialize_contents(header: Header, frames: Sequence[Any]) -> Contents:
    return Contents.from_frames(header, frames)


@sizeof.register(Contents)
def _sizeof_contents(contents: Contents) -> int:
    return contents.size
