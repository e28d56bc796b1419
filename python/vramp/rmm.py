"""RMM (and with it cuDF, cuML, cuGraph, RAFT) on vramp.

    import vramp.rmm
    vramp.rmm.install()                       # the current device's resource

    resource = vramp.rmm.resource(pool)       # or a resource to pass on

`resource` returns an `rmm.mr.CallbackMemoryResource`: RMM calls Python for every allocation and every
free. Each call takes the interpreter's lock and about a microsecond, also from C++ threads, which wait
for the lock. A program that allocates many small buffers from several threads notices it. RMM needs
memory aligned to 256 bytes; vramp aligns to 512, and to 256 inside a captured arena.

What it cannot do:

- It is no C++ class: a C++ program cannot construct it without Python.
- RMM before 25.12 is refused, because its streams do not show their address to Python.
- RMM does not say when a stream ends: call `forget_stream(stream)` before you destroy a stream that
  memory was allocated or freed on. Streams of an rmm.pylibrmm.cuda_stream_pool need no call while
  the pool of streams lives.
- After a failed free, RMM has no way to raise: it is a RuntimeWarning, and the memory stays
  allocated.
- Buffers from before `install` keep the resource that they came from.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

from . import _adaptors
from ._adaptors import Check, device_pool, handle_of, load
from ._errors import UnsupportedError
from ._native import Pool

__all__ = ["doctor", "forget_stream", "install", "resource", "spill_on_failure", "uninstall"]

_DISTRIBUTION = "rmm-cu13"

_lock = threading.Lock()
_previous: dict[int, tuple[Any, Any]] = {}
# By id, the pools with their resources. C++ holds bare pointers to a resource: a memory pool above it
# drops its reference before it frees its blocks, and a buffer of C++ has none. So none is ever freed.
_made: dict[int, tuple[Pool, Any]] = {}


def _rmm() -> Any:
    rmm = load("rmm", _DISTRIBUTION)
    stream = load("rmm.pylibrmm.stream", _DISTRIBUTION).Stream
    if not hasattr(stream, "__cuda_stream__"):
        raise UnsupportedError(
            f"RMM {rmm.__version__} does not show the address of a stream to Python: install "
            f"{_DISTRIBUTION}>=25.12"
        )
    return rmm


def _current_device() -> int:
    runtime = load("cuda.bindings.runtime", "cuda-bindings")
    status, device = runtime.cudaGetDevice()
    if int(status) != 0:
        raise UnsupportedError(f"there is no current device: {status.name}")
    return int(device)


class _Deallocate:
    """Frees for RMM, which cannot take an exception here."""

    __slots__ = ("_deallocate",)

    def __init__(self, pool: Pool) -> None:
        self._deallocate = pool.deallocate

    def __call__(self, ptr: int, nbytes: int, stream: Any) -> None:
        try:
            self._deallocate(ptr, handle_of(stream))
        except BaseException as error:
            text = f"vramp could not free {nbytes} bytes at {ptr:#x} for RMM: {error}"
            try:
                warnings.warn(text, RuntimeWarning, stacklevel=2)
            except Warning:  # warnings are errors here
                print(text, file=sys.stderr)


def resource(pool: Pool | None = None) -> Any:
    """Returns an rmm.mr.CallbackMemoryResource on a pool, or on the current device's shared pool.

    Out of memory is rmm::out_of_memory in C++, and a MemoryError with vramp's report in Python. A pool
    has one resource, which lives as long as the process, because C++ may use it at any time; the pool
    returns its memory when it is closed. Raises ImportError, DeviceError or UnsupportedError.
    """
    rmm = _rmm()
    pool = device_pool(_current_device()) if pool is None else pool
    with _lock:
        if id(pool) not in _made:
            made = rmm.mr.CallbackMemoryResource(pool.allocate, _Deallocate(pool))
            _made[id(pool)] = (pool, made)
        return _made[id(pool)][1]


def install(device: int | None = None) -> Any:
    """Makes vramp's shared pool the resource of a device, or of the current one, and returns it.

    Calling it again changes nothing. Raises as `resource` does.
    """
    rmm = _rmm()
    device = _current_device() if device is None else device
    made = resource(device_pool(device))
    with _lock:
        current = rmm.mr.get_per_device_resource(device)
        if device in _previous and _previous[device][0] is current:
            return current
        rmm.mr.set_per_device_resource(device, made)
        _previous[device] = (made, current)
        return made


def uninstall(device: int | None = None) -> None:
    """Restores the resource from before `install`. Live buffers keep theirs.

    Changes nothing if `install` was not called for the device, or another resource was set since.
    """
    rmm = load("rmm", _DISTRIBUTION)
    device = _current_device() if device is None else device
    with _lock:
        made, before = _previous.pop(device, (None, None))
        if made is not None and rmm.mr.get_per_device_resource(device) is made:
            rmm.mr.set_per_device_resource(device, before)


def spill_on_failure(handler: Callable[[int], bool], upstream: Any = None) -> Any:
    """Returns a resource that calls `handler(nbytes)` when an allocation finds no memory.

    The handler frees memory, by spilling buffers to the host for example, and returns True to try the
    allocation again, or False to let it fail with MemoryError. It is called again until one or the
    other happens, so a handler that returns True and frees nothing never ends. An exception of it fails
    the allocation with its text. It runs on the thread that allocates, with no lock of vramp held, and
    may allocate and free. `upstream` is a resource of `resource`; None is that of the current device.
    """
    rmm = _rmm()
    if not callable(handler):
        raise TypeError(f"a handler is called with a number of bytes, and {handler!r} cannot be")
    upstream = resource() if upstream is None else upstream
    return rmm.mr.FailureCallbackResourceAdaptor(upstream, handler)


def forget_stream(stream: Any, pool: Pool | None = None) -> None:
    """Makes a pool forget a stream. Call it before the stream is destroyed. Never waits.

    None is the current device's shared pool.
    """
    pool = device_pool(_current_device()) if pool is None else pool
    _adaptors.forget_stream(pool, handle_of(stream))


def doctor() -> list[Check]:
    """Returns what was checked: a name, whether it works (None: it is no failure), and a text."""
    rmm, line = _adaptors.check_library("rmm", _DISTRIBUTION)
    checks = [line]
    if rmm is None:
        return checks
    try:
        _rmm()
        device = _current_device()
    except Exception as error:  # without a driver, each library raises an error of its own
        return [*checks, ("rmm device", None, f"{type(error).__name__}: {error}")]
    checks.append(_adaptors.check_pool(device))
    made = _previous.get(device, (None, None))[0]
    if made is not None and rmm.mr.get_per_device_resource(device) is made:
        checks.append(("rmm resource", True, "vramp, through a Python callback"))
    else:
        checks.append(("rmm resource", None, "not vramp's: vramp.rmm.install() changes it"))
    return checks
