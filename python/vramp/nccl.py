"""NCCL around the sleep of regions.

    group = torch.distributed.group.WORLD
    with vramp.region("weights", graph_pins=False):
        buffer = torch.empty(1 << 28, device="cuda")
    window = vramp.nccl.register_window(group, buffer)       # ends before a pause, and is made again after the resume
    vramp.nccl.suspend_in_sleep(group, tags="weights")       # the communicator's own buffers leave as well
    vramp.pause("weights")                                   # in all processes of the communicator
    vramp.resume("weights")

1. `register`, `register_window` and `suspend_in_sleep` find the process's NCCL and register callbacks of
   `vramp.around_sleep`.
2. Before memory of the region leaves they wait for the work of the device, and end the registrations. Then the
   communicators are suspended.
3. After the resume it goes the other way. A registration has another handle then: read `handle` again.

The calls wait for all processes of the communicator: all pause and resume the same regions, in the same order. So
regions with such callbacks are not paused by `vramp.on_pressure`.

A communicator is a process group of torch.distributed, an object with the attribute `comm` (vLLM's PyNcclCommunicator,
CuPy's NcclCommunicator), or the number of a `ncclComm_t`.

Deliberately absent: buffers that NCCL registers by itself when a graph is captured. Run with NCCL_GRAPH_REGISTER=0 where
a graph that is kept has collectives on memory that sleeps.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, TypeAlias

from . import _native
from ._errors import InUseError, OptionError, RangeError, UnknownPointerError, UnsupportedError, VrampError
from ._native import Allocation, Pool
from ._regions import Device, SleepCallbacks, Tags, _pools, around_sleep

__all__ = ["NcclError", "Registered", "Suspension", "register", "register_window", "suspend_in_sleep"]

_log = logging.getLogger("vramp.nccl")

COLL_SYMMETRIC = 1
"""NCCL_WIN_COLL_SYMMETRIC: the window is for NCCL's symmetric collectives."""

_SUCCESS, _IN_PROGRESS = 0, 7
_SUSPEND_MEM = 1
# Statistics of ncclCommMemStats.
_CAN_SUSPEND, _IS_SUSPENDED = 0, 1

_Library: TypeAlias = "ctypes.CDLL | str | os.PathLike[str] | None"


class NcclError(VrampError):
    """A call of NCCL failed. The text has its message."""


class _Nccl:
    """A loaded library of NCCL."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.ncclGetErrorString.restype = ctypes.c_char_p
        number = ctypes.c_int()
        library.ncclGetVersion(ctypes.byref(number))
        self.version = number.value

    def __str__(self) -> str:
        return f"NCCL {self.version // 10000}.{self.version // 100 % 100}.{self.version % 100}"

    def has(self, *names: str) -> bool:
        return all(hasattr(self._library, name) for name in names)

    def call(self, comm: int, name: str, *arguments: Any) -> None:
        """Calls a function of a communicator, and waits until one that does not block is done."""
        first = ctypes.c_void_p(comm)
        code: int = getattr(self._library, name)(first, *arguments)
        state = ctypes.c_int(code)
        while state.value == _IN_PROGRESS:
            time.sleep(0.0005)
            if code := self._library.ncclCommGetAsyncError(first, ctypes.byref(state)):
                break
        if code == _IN_PROGRESS:
            code = state.value
        if code != _SUCCESS:
            text = self._library.ncclGetErrorString(code)
            raise NcclError(f"{name} of {self} failed: {text.decode(errors='replace') if text else code}")

    def statistic(self, comm: int, number: int) -> int:
        value = ctypes.c_uint64()
        self.call(comm, "ncclCommMemStats", ctypes.c_int(number), ctypes.byref(value))
        return value.value

    def device(self, comm: int) -> int:
        number = ctypes.c_int()
        self.call(comm, "ncclCommCuDevice", ctypes.byref(number))
        return number.value


def _loaded(library: _Library, of: Any) -> _Nccl:
    """Returns the library that was named, that of a communicator's object, or the one that the process has loaded."""
    own = getattr(getattr(of, "nccl", None), "lib", None)
    if library is None and isinstance(own, ctypes.CDLL):
        library = own
    if isinstance(library, ctypes.CDLL):
        return _Nccl(library)
    if library is not None:
        return _Nccl(ctypes.CDLL(os.fspath(library)))
    with open("/proc/self/maps") as maps:
        mapped = re.findall(r"(/\S*libnccl\.so\S*)$", maps.read(), re.MULTILINE)
    paths = sorted(set(mapped))
    if len(paths) > 1:
        raise OptionError(f"the process has loaded {' and '.join(paths)}: pass the one of the communicator as library=")
    # Without a file of its own it is part of another library, such as PyTorch's.
    found = ctypes.CDLL(paths[0] if paths else None)
    if not hasattr(found, "ncclGetVersion"):
        raise UnsupportedError("the process has loaded no NCCL: make the communicator first, or pass library=")
    return _Nccl(found)


def _number_of(comm: Any) -> int:
    """Returns the number of a ncclComm_t. 0 for a process group that has made none yet."""
    if isinstance(comm, int):
        return comm
    if isinstance(comm, ctypes.c_void_p):
        return comm.value or 0
    if hasattr(comm, "_get_backend"):
        import torch

        backend = comm._get_backend(torch.device("cuda"))
        if not hasattr(backend, "_comm_ptr"):
            raise UnsupportedError(f"{type(backend).__name__} of this PyTorch does not tell its communicator")
        return int(backend._comm_ptr())
    if hasattr(comm, "comm"):
        return _number_of(comm.comm)
    raise TypeError(f"a communicator is a process group, has the attribute comm, or is a number: {type(comm)} is not")


def _made(comm: Any) -> int:
    if number := _number_of(comm):
        return number
    raise OptionError("the process group has no communicator yet: run a collective first, or pass device_id to init")


def _address_of(memory: Any) -> tuple[int, int]:
    """Returns address and bytes of an allocation, a tensor or an array."""
    if isinstance(memory, Allocation):
        return memory.ptr, memory.size
    if hasattr(memory, "data_ptr"):
        if not memory.is_contiguous():
            raise OptionError("a tensor that is not contiguous has no memory of its own: pass a contiguous one")
        return memory.data_ptr(), memory.nbytes
    interface = getattr(memory, "__cuda_array_interface__", None)
    if interface is None:
        raise TypeError(f"memory is an allocation, a tensor or an array of the device, and not {type(memory)}")
    return interface["data"][0], memory.nbytes


def _torch() -> Any:
    """Returns PyTorch if it uses CUDA."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_initialized() else None


def _on(device: int) -> AbstractContextManager[object]:
    """Within it the device is the current one of the thread."""
    torch = _torch()
    return nullcontext() if torch is None else torch.cuda.device(device)


def _wait_for_work(device: int) -> None:
    if torch := _torch():
        torch.cuda.synchronize(device)


class Registered:
    """Memory that is registered with a communicator while it is on the card. It is a context manager."""

    def __init__(self, nccl: _Nccl, comm: int, memory: Any, flags: int | None) -> None:
        self._nccl, self._comm, self._flags = nccl, comm, flags
        self._device = nccl.device(comm)
        self.ptr, self.size = _address_of(memory)
        self._pool, tag = _owner(memory, self.ptr, self.size)
        self._handle: int | None = None
        self._pin: _native.Pin | None = None
        self._callbacks: SleepCallbacks | None = None
        if any(each.sleeps(comm) for each in _suspensions):
            raise InUseError("the communicator is suspended: resume the regions before memory is registered")
        self._begin()
        if tag is not None:
            name = f"NCCL registration of {self.size} bytes at {self.ptr:#x}"
            try:
                self._callbacks = around_sleep(
                    name, self._end, self._begin, tags=tag, device=self._pool, collective=True
                )
                # They end before the communicator is suspended.
                for each in list(_suspensions):
                    each.go_behind(comm)
            except BaseException:
                self.close()
                raise

    @property
    def handle(self) -> int | None:
        """The `ncclWindow_t`, or the handle of ncclCommRegister. None while the memory sleeps. 0 where NCCL registers
        nothing, because the processes have no use for it.
        """
        return self._handle

    def _begin(self) -> None:
        handle = ctypes.c_void_p()
        where = (ctypes.c_void_p(self.ptr), ctypes.c_size_t(self.size), ctypes.byref(handle))
        # What is registered neither moves nor leaves.
        pin = self._pool.pin(self.ptr, self.size)
        try:
            with _on(self._device):
                if self._flags is None:
                    self._nccl.call(self._comm, "ncclCommRegister", *where)
                else:
                    self._nccl.call(self._comm, "ncclCommWindowRegister", *where, ctypes.c_int(self._flags))
        except BaseException:
            pin.unpin()
            raise
        self._pin, self._handle = pin, handle.value or 0

    def _end(self) -> None:
        if self._handle is None:
            return
        name = "ncclCommDeregister" if self._flags is None else "ncclCommWindowDeregister"
        with _on(self._device):
            _wait_for_work(self._device)
            if self._handle:
                self._nccl.call(self._comm, name, ctypes.c_void_p(self._handle))
        self._handle = None
        if self._pin is not None:
            self._pin.unpin()

    def close(self) -> None:
        """Ends the registration. All processes of the communicator do. A second call does nothing."""
        if self._callbacks is not None:
            self._callbacks.close()
            self._callbacks = None
        self._end()

    def __enter__(self) -> Registered:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _owner(memory: Any, address: int, size: int) -> tuple[Pool, str | None]:
    """Returns the pool that has these addresses, and the tag of the region."""
    pools = [memory.pool] if isinstance(memory, Allocation) else [pool for _, pool in _pools(None)]
    for pool in pools:
        if (tag := _native.region_at(pool, address, size)) is not None:
            return pool, tag
        try:
            pool.pin(address, size).unpin()
        except UnknownPointerError:
            continue
        return pool, None
    raise UnknownPointerError(f"no pool of vramp has {size} bytes at {address:#x}")


def _register(comm: Any, memory: Any, library: _Library, flags: int | None) -> Registered:
    nccl = _loaded(library, comm)
    names = ("ncclCommRegister", "ncclCommDeregister") if flags is None else ("ncclCommWindowRegister",)
    if not nccl.has(*names):
        raise UnsupportedError(f"{nccl} has no {names[0]}: use 2.19 or newer, and 2.27 for windows")
    return Registered(nccl, _made(comm), memory, flags)


def register(comm: Any, memory: Any, *, library: _Library = None) -> Registered:
    """Registers memory with a communicator, as ncclCommRegister does, while it is on the card.

    `memory` is a tensor, an array or an allocation of a pool of vramp. In a region it is deregistered before a pause and
    registered again after the resume, when it has another `handle`. It neither moves nor is released until `close`.
    `library` is the NCCL of the communicator, where the process has loaded several. Raises NcclError, or UnsupportedError
    before NCCL 2.19.
    """
    return _register(comm, memory, library, None)


def register_window(
    comm: Any, memory: Any, *, flags: int = COLL_SYMMETRIC, library: _Library = None
) -> Registered:
    """Registers memory as a window, as ncclCommWindowRegister does, while it is on the card.

    All processes of the communicator call it, in the same order, and pause and resume together. Graphs that were captured
    with the window are captured again after a resume: the window is another one. Else it is as `register`. Raises
    NcclError, or UnsupportedError before NCCL 2.27.
    """
    if not 0 <= flags < 1 << 31:
        raise RangeError(f"flags is {flags}: use NCCL's, such as vramp.nccl.COLL_SYMMETRIC")
    return _register(comm, memory, library, flags)


class Suspension:
    """Communicators that are suspended while regions sleep. It is a context manager."""

    def __init__(self, nccl: _Nccl, comms: tuple[Any, ...], tags: Tags, device: Device, reason: str | None) -> None:
        self._nccl, self._comms = nccl, comms
        self._reason = reason
        self._asleep: list[int] = []
        self._callbacks: SleepCallbacks | None = None
        self._register: Callable[[], SleepCallbacks] = lambda: around_sleep(
            "NCCL communicators", self._suspend, self._resume, tags=tags, device=device, collective=True
        )
        if reason is None:
            self._callbacks = self._register()
            _suspensions.add(self)

    @property
    def is_active(self) -> bool:
        """False if this NCCL cannot suspend communicators, or after `close`."""
        return self._callbacks is not None

    @property
    def reason(self) -> str | None:
        """Why it does nothing. None where it is active, or was closed."""
        return self._reason

    @property
    def nbytes(self) -> int:
        """Bytes of the card that the communicators give up in a sleep, by NCCL's count. 0 where it does nothing."""
        if self._reason is not None:
            return 0
        return sum(self._nccl.statistic(comm, _CAN_SUSPEND) for comm in self._numbers())

    def _numbers(self) -> list[int]:
        """Returns the communicators that there are by now, each once."""
        return [comm for comm in dict.fromkeys(map(_number_of, self._comms)) if comm]

    def sleeps(self, comm: int) -> bool:
        return comm in self._asleep

    def go_behind(self, comm: int) -> None:
        """Lets it be called behind what was registered with one of its communicators until now."""
        if self._callbacks is not None and not self._asleep and comm in self._numbers():
            before, self._callbacks = self._callbacks, self._register()
            before.close()

    def _suspend(self) -> None:
        try:
            for comm in self._numbers():
                # The engine may have suspended it itself.
                if not self._nccl.statistic(comm, _IS_SUSPENDED):
                    self._nccl.call(comm, "ncclCommSuspend", ctypes.c_int(_SUSPEND_MEM))
                    self._asleep.append(comm)
        except BaseException:
            self._resume()
            raise

    def _resume(self) -> None:
        while self._asleep:
            self._nccl.call(self._asleep[-1], "ncclCommResume")
            self._asleep.pop()

    def close(self) -> None:
        """Ends it. What is suspended is resumed, in all processes. A second call does nothing."""
        if self._callbacks is not None:
            self._callbacks.close()
            self._callbacks = None
            _suspensions.discard(self)
        self._resume()

    def __enter__(self) -> Suspension:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


_suspensions: set[Suspension] = set()


def suspend_in_sleep(
    *comms: Any, tags: Tags = None, device: Device = None, library: _Library = None
) -> Suspension:
    """Suspends communicators while regions sleep, so that their own memory of the card is free too: ncclCommSuspend
    before memory leaves, and ncclCommResume after it is back.

    `tags` are those of the regions, by default all: the communicators can be used while none of them sleeps. `device` is
    the one of the first communicator by default. A process group without a communicator yet is suspended once it has one.
    One that is suspended already stays as it is.

    NCCL 2.29.7 and newer can. With others it does nothing: `is_active` is False, `reason` says why, and a line is logged
    as a warning. NCCL refuses communicators that share resources (`split_share`): then the pause raises CallbackError.
    """
    if not comms:
        raise TypeError("pass the communicators that are to be suspended")
    nccl = _loaded(library, comms[0])
    reason = None
    if not nccl.has("ncclCommSuspend", "ncclCommResume", "ncclCommMemStats"):
        reason = f"{nccl} cannot suspend communicators: they keep their memory in a sleep, use NCCL 2.29.7 or newer"
        _log.warning("%s", reason)
    elif device is None and (first := _number_of(comms[0])):
        device = nccl.device(first)
    return Suspension(nccl, comms, tags, device, reason)
