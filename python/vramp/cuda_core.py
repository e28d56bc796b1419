"""cuda.core on vramp.

    from cuda.core import Device
    from vramp.cuda_core import MemoryResource

    device = Device(0)
    device.set_current()
    stream = device.create_stream()
    resource = MemoryResource()                       # vramp.pool(0)
    buffer = resource.allocate(1 << 20, stream=stream)
    device.memory_resource = resource                 # for Device.allocate as well

`MemoryResource` is a subclass of cuda.core.MemoryResource. A buffer is allocated for the stream that is
passed, and freed on the stream that cuda.core passes at its end: that of the allocation, or the one that
`Buffer.close` or `Buffer.set_deallocation_stream` names, which must be ordered after all work on the
buffer. `record_use(buffer, stream)` lifts that rule for a stream.

What it cannot do:

- A buffer cannot be sent to another process: it has no IPC descriptor.
- cuda.core says to no allocator that a stream is closed or dropped. The pool keeps a stream that it has
  memory of, so the driver destroys it later: when the pool meets more streams, or is closed. Before cuda.core
  1.2 it cannot keep one that is closed: call `resource.forget_stream(stream)` before `stream.close()`.
- Allocating on a stream that captures a graph raises vramp.CaptureError, unless an arena is attached to
  the capture through C (vramp_capture_attach).
- cuda.core before 0.5, where the module was cuda.core.experimental, is not supported.
"""

from __future__ import annotations

import inspect
import threading
from typing import TYPE_CHECKING, Any

from . import _adaptors
from ._adaptors import PER_THREAD_STREAM, Check, device_pool, handle_of, keep_stream, load, streams_of
from ._errors import VrampError
from ._native import Pool

__all__ = ["MemoryResource", "doctor"]

_DISTRIBUTION = "cuda-core"

_lock = threading.Lock()
_class: Any = None

if TYPE_CHECKING:

    class MemoryResource:
        """A cuda.core.MemoryResource on a pool of vramp.

        `pool` is one of the program's own on device `device_id`; None is the shared pool of
        the device. Raises ImportError, DeviceError, or UnsupportedError if the device is simulated.
        """

        def __init__(self, device_id: int = 0, *, pool: Pool | None = None) -> None: ...
        def allocate(self, size: int, stream: Any = None) -> Any: ...
        def deallocate(self, ptr: Any, size: int, stream: Any = None) -> None: ...
        def record_use(self, buffer: Any, stream: Any) -> None: ...
        def forget_stream(self, stream: Any) -> None: ...
        @property
        def pool(self) -> Pool: ...
        @property
        def is_device_accessible(self) -> bool: ...
        @property
        def is_host_accessible(self) -> bool: ...
        @property
        def is_managed(self) -> bool: ...
        @property
        def device_id(self) -> int: ...

else:

    def __getattr__(name: str) -> Any:
        global _class
        if name != "MemoryResource":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        with _lock:
            if _class is None:
                _class = _build(load("cuda.core", _DISTRIBUTION))
            return _class


def _build(core: Any) -> Any:
    # Before 1.2 a buffer did not take its stream. It passes None at its end, or the default stream.
    takes_stream = "stream" in inspect.signature(core.Buffer.from_handle).parameters

    class Anchors(core.MemoryResource):  # type: ignore[misc]
        """Buffers without memory. Each keeps its stream, whatever the program closes."""

        is_device_accessible = True
        is_host_accessible = False
        is_managed = False
        device_id = 0

        def allocate(self, size: int, stream: Any = None) -> Any:
            # An address that is no memory: cuda.core only passes it back.
            return core.Buffer.from_handle(1, size, self, stream=stream)

        def deallocate(self, ptr: Any, size: int, stream: Any = None) -> None:
            pass

    anchors = Anchors()

    def keep(pool: Pool, stream: Any, raw: int) -> None:
        """Keeps a stream until the pool has forgotten it. O(1) amortized."""
        if raw in (0, PER_THREAD_STREAM):
            return
        if not (takes_stream and isinstance(stream, core.Stream)):
            keep_stream(pool, raw, stream)
        elif not (table := streams_of(pool)).is_anchored(raw):
            table.add(raw, stream, anchors.allocate(0, stream))

    class MemoryResource(core.MemoryResource):  # type: ignore[misc]
        """A cuda.core.MemoryResource on a pool of vramp.

        `pool` is one of the program's own on device `device_id`; None is the shared pool of
        the device. Raises ImportError, DeviceError, or UnsupportedError if the device is simulated.
        """

        def __init__(self, device_id: int = 0, *, pool: Pool | None = None) -> None:
            self._device_id = int(device_id)
            self._pool = device_pool(self._device_id) if pool is None else pool
            # Streams of live buffers by address, where cuda.core does not keep them.
            self._streams: dict[int, tuple[int, Any]] = {}

        @property
        def pool(self) -> Pool:
            """The pool."""
            return self._pool

        def allocate(self, size: int, stream: Any = None) -> Any:
            """Returns a cuda.core.Buffer of `size` bytes for work on `stream`.

            None is the legacy default stream. Raises OutOfMemoryError, which is a MemoryError.
            """
            stream, raw = _stream(stream)
            keep(self._pool, stream, raw)
            address = self._pool.allocate(size, raw)
            # From here on the buffer owns the memory: if this fails, it calls deallocate.
            if takes_stream and stream is not None:
                return core.Buffer.from_handle(address, size, self, stream=stream)
            self._streams[address] = (raw, stream)
            return core.Buffer.from_handle(address, size, self)

        def deallocate(self, ptr: Any, size: int, stream: Any = None) -> None:
            """Frees memory of `allocate` on `stream`. A buffer calls it at its end. Never waits."""
            address = int(ptr)
            kept = self._streams.pop(address, None)
            stream, raw = _stream(stream)
            keep(self._pool, stream, raw)
            if kept is None:
                self._pool.deallocate(address, raw)
                return
            # The stream that is passed may be the default one, for want of the right one.
            if stream is not None and raw != kept[0]:
                self._pool.record_use(address, raw)
            self._pool.deallocate(address, kept[0])

        def record_use(self, buffer: Any, stream: Any) -> None:
            """Records that work queued on `stream` so far uses a buffer. No driver call."""
            stream, raw = _stream(stream)
            keep(self._pool, stream, raw)
            self._pool.record_use(int(buffer.handle), raw)

        def forget_stream(self, stream: Any) -> None:
            """Forgets a stream now. Never waits; memory is reused after its work."""
            _adaptors.forget_stream(self._pool, _stream(stream)[1])

        @property
        def is_device_accessible(self) -> bool:
            return True

        @property
        def is_host_accessible(self) -> bool:
            return False

        @property
        def is_managed(self) -> bool:
            return False

        @property
        def device_id(self) -> int:
            """Number of the device."""
            return self._device_id

        def __repr__(self) -> str:
            return f"<vramp.cuda_core.MemoryResource of {self._pool!r}>"

    return MemoryResource


def _stream(stream: Any) -> tuple[Any, int]:
    """Returns a stream, or that of a graph's builder, and its address."""
    if stream is None:
        return None, 0
    if not hasattr(stream, "__cuda_stream__"):
        stream = getattr(stream, "stream", stream)
    if not hasattr(stream, "__cuda_stream__"):
        raise TypeError(f"a stream is a cuda.core.Stream, and not {type(stream).__name__}")
    raw = handle_of(stream)
    return stream, 0 if raw == 1 else raw


def doctor() -> list[Check]:
    """Returns what was checked: a name, whether it works (None: it is no failure), and a text."""
    core, line = _adaptors.check_library("cuda.core", _DISTRIBUTION)
    checks = [line]
    if core is None:
        return checks
    try:
        device = core.Device()
        number = int(device.device_id)
    except Exception as error:  # without a driver, an error of cuda.bindings or of the loader
        return [*checks, ("cuda.core device", None, f"{type(error).__name__}: {error}")]
    checks.append(("cuda.core device", True, f"device {number}"))
    checks.append(_adaptors.check_pool(number))
    try:
        current = device.memory_resource
    except (VrampError, RuntimeError) as error:
        text = f"Device.memory_resource is not set yet: {error}"
        return [*checks, ("cuda.core resource", None, text)]
    if _class is not None and isinstance(current, _class):
        checks.append(("cuda.core resource", True, "vramp"))
    else:
        text = f"{type(current).__name__}: set device.memory_resource = MemoryResource()"
        checks.append(("cuda.core resource", None, text))
    return checks
