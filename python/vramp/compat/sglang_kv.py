"""SGLang's arena for KV caches whose size is known after the graphs are captured, implemented by `vramp.kv`.

    import vramp.compat.sglang_kv
    vramp.compat.sglang_kv.install()     # before SGLang makes its memory pools; in each of its processes

`KvVmmArena` has the interface of `sglang.srt.mem_cache.kv_vmm_backing.KvVmmArena`, so SGLang's own `KvVmmBufferOwner`
runs on it. Addresses are reserved for the maximum; `commit_range` grows the memory of a buffer from its beginning, and
`uncommit_beyond` gives its end to the card.

What differs: memory comes from vramp's pool, with its limit and its reports. A `commit_range` that fails changes
nothing, and no library is compiled. `uncommit_beyond` cuts at any page, where SGLang's keeps a mapping that lies
across the cut. Memory that work still uses goes to the card with a later call.

Deliberately absent: `VmmReservation` and what else SGLang has around the driver's calls.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import vramp
import vramp.kv

from .._errors import UnsupportedError

__all__ = ["KvVmmArena", "install"]

_RESERVE_BYTES = 256 << 30
_PAGE = 2 << 20

_called_by_torch: list[_Bump] = []


def install() -> None:
    """Puts vramp's arena into SGLang's module. Raises ImportError without SGLang, or if it has no such arena."""
    from sglang.srt.mem_cache import kv_vmm_backing

    if not hasattr(kv_vmm_backing, "KvVmmArena"):
        raise ImportError("this SGLang has no KvVmmArena: use a version with post-capture KV sizing")
    kv_vmm_backing.KvVmmArena = KvVmmArena


class KvVmmArena:
    """Addresses of one device, which a bump allocator hands out to torch, and the memory behind them."""

    def __init__(self, device_id: int, reserve_bytes: int = _RESERVE_BYTES, **unknown: Any) -> None:
        if unknown:
            raise UnsupportedError(f"vramp's arena has no {', '.join(unknown)}: leave it out")
        self.device_id = int(device_id)
        self._arena = vramp.kv.arena(
            vramp.pool(self.device_id), tensors=1, size=int(reserve_bytes), page=_PAGE
        )
        self.granularity = self._arena.page
        self.reserved = self._arena.size
        self.base = self._arena.ptr
        self.handle_type = 0
        self._lock = threading.Lock()
        self._committed_by_offset: dict[int, int] = {}
        self._bump = _Bump(self.base, self.reserved, self.granularity)
        self._pool: Any = None

    @property
    def pool(self) -> Any:
        """A `torch.cuda.MemPool` whose tensors lie one behind the other in the arena. They are never freed there."""
        if self._pool is None:
            import torch

            if not torch.cuda.is_available():
                raise UnsupportedError("the arena is simulated, so torch has no memory there: use a card")
            # torch may call the functions as long as the process lives.
            _called_by_torch.append(self._bump)
            allocator = torch._C._cuda_customAllocator(self._bump.malloc_address, self._bump.free_address)
            self._pool = torch.cuda.MemPool(allocator, no_split=True)
        return self._pool

    @property
    def backed_bytes(self) -> int:
        """Bytes that have memory."""
        return sum(self._committed_by_offset.values())

    @property
    def cursor_bytes(self) -> int:
        """Bytes that were handed out to torch."""
        return self._bump.cursor

    def _align(self, size: int) -> int:
        return -(-size // self.granularity) * self.granularity

    def _pages(self, first: int, end: int) -> range:
        return range(first // self.granularity, end // self.granularity)

    def commit_range(self, offset: int, want_bytes: int) -> None:
        """Gives the buffer at `offset` memory for its first `want_bytes`, rounded up. Never takes any away."""
        if self._arena.is_closed:
            raise RuntimeError("KvVmmArena.commit_range after close: make another arena")
        if offset % self.granularity:
            raise ValueError(f"the offset {offset} is not a multiple of {self.granularity}")
        want = self._align(int(want_bytes))
        if offset < 0 or offset + want > self.reserved:
            raise RuntimeError(
                f"commit_range [{offset}, {offset + want}) is beyond the {self.reserved} bytes of the arena: "
                "reserve more"
            )
        with self._lock:
            before = self._committed_by_offset.get(offset, 0)
            if want > before:
                self._arena.commit(self._pages(offset + before, offset + want))
                self._committed_by_offset[offset] = want

    def uncommit_beyond(self, offset: int, keep_bytes: int) -> int:
        """Gives the memory of the buffer at `offset` behind its first `keep_bytes` to the card. Returns the bytes."""
        with self._lock:
            before = self._committed_by_offset.get(offset, 0)
            keep = self._align(int(keep_bytes))
            if self._arena.is_closed or keep >= before:
                return 0
            self._arena.park(self._pages(offset + keep, offset + before))
            self._committed_by_offset[offset] = keep
            self._arena.release()
            return before - keep

    def close(self) -> None:
        """Waits for the work on the arena, and gives its memory and addresses back. The first call counts."""
        with self._lock:
            if not self._arena.is_closed:
                self._arena.close()


class _Bump:
    """Hands out addresses, never twice, by functions that torch calls."""

    def __init__(self, base: int, reserved: int, align: int) -> None:
        self.cursor = 0
        self._base, self._reserved, self._align = base, reserved, align
        self._lock = threading.Lock()
        self._malloc = ctypes.CFUNCTYPE(
            ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p
        )(self._take)
        self._free = ctypes.CFUNCTYPE(
            None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p
        )(lambda address, size, device, stream: None)
        self.malloc_address = ctypes.cast(self._malloc, ctypes.c_void_p).value
        self.free_address = ctypes.cast(self._free, ctypes.c_void_p).value

    def _take(self, size: int, device: int, stream: int | None) -> int | None:
        with self._lock:
            end = self.cursor + -(-size // self._align) * self._align
            if end > self._reserved:
                return None  # torch raises its out-of-memory error
            address, self.cursor = self._base + self.cursor, end
            return address
