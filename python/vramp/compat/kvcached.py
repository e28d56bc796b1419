"""The module `kvcached.vmm_ops` of kvcached, implemented by vramp's arenas for caches.

    import vramp.compat.kvcached
    vramp.compat.kvcached.install()      # before kvcached is imported; then vLLM or SGLang with kvcached as always

1. `install` makes `import kvcached.vmm_ops` find this module, whether the compiled one is there or not. kvcached's own
   Python, its patches of vLLM and SGLang, and its programs (kvctl, kvtop) run on it unchanged. Each process of an
   engine needs the line, or `python -m vramp run`, under which they have it.
2. `create_kv_tensors` makes an arena (`vramp.kv`) for each group: addresses for the whole tensors, and memory for page
   0 alone, because engines let unused entries of block tables name it, also before they allocate it.
3. `map_to_kv_tensors` commits pages over all layers at once, or none. `unmap_from_kv_tensors` gives them to the card.
4. `PageAllocator` hands out pages by number, and maps some ahead on a thread.

What differs: a failed driver call is an exception, which kvcached answers by an allocation that finds nothing, and
ends no process. After a failure on one rank of several the others keep what they mapped, and a page that is mapped is
not mapped again. A tensor that outlives `shutdown_kvcached` keeps its addresses, without memory. Pages without memory
have none at all: kvcached maps one page at all their addresses, and a kernel that touches them here ends with a fault.

Deliberately absent: devices other than CUDA's, and what kvcached has in C++ alone.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import vramp
import vramp.kv

from .._errors import InUseError, RangeError, UnsupportedError
from . import _alias
from ._kvcached_pages import Broadcast, InternalPage, Pages, Refiller, UsageFile

if TYPE_CHECKING:
    import torch

__all__ = [
    "InternalPage",
    "PageAllocator",
    "create_kv_tensors",
    "init_kvcached",
    "install",
    "kv_tensors_created",
    "map_to_kv_tensors",
    "shutdown_kvcached",
    "unmap_from_kv_tensors",
]

NAME = "kvcached.vmm_ops"
_PAGE = 2 << 20
_DTYPES = {1: "int8", 2: "int16", 4: "int32", 8: "int64"}

_log = logging.getLogger("vramp.kvcached")


def install() -> None:
    """Makes `import kvcached.vmm_ops` find this module. Call it before kvcached is imported.

    Raises InUseError if the program has imported another `kvcached.vmm_ops`.
    """
    found = sys.modules.get(NAME)
    if found is not None and getattr(found, "PageAllocator", None) is not PageAllocator:
        raise InUseError(f"the program has imported {NAME} already: call install before it imports kvcached")
    _alias.install(NAME)


class _Group:
    """The tensors of one group of layers."""

    def __init__(self, arena: vramp.kv.Arena, layers: int, stride: int) -> None:
        self.arena = arena
        self.layers = layers
        self.stride = stride
        self.lock = threading.Lock()
        self.mapped = {0}
        self.tensors: list[torch.Tensor] = []

    def numbers(self, offsets: Sequence[int]) -> list[int]:
        """Returns the pages at these offsets, each once."""
        pages = self.arena.pages
        for offset in offsets:
            if offset % self.stride or not 0 <= offset < pages * self.stride:
                raise RangeError(
                    f"{offset} is not the offset of a page: use a multiple of {self.stride} below "
                    f"{pages * self.stride}"
                )
        return list(dict.fromkeys(offset // self.stride for offset in offsets))


class _Device:
    """The device that `init_kvcached` named, and its groups."""

    def __init__(self, pool: vramp.Pool, page: int, is_contiguous: bool) -> None:
        self.pool = pool
        self.page = page
        self.is_contiguous = is_contiguous
        self.groups: dict[int, _Group] = {}


_lock = threading.Lock()
_device: _Device | None = None


def _forget_parent() -> None:
    """Runs in a forked child, which calls `init_kvcached` itself."""
    global _lock, _device
    _lock, _device = threading.Lock(), None


os.register_at_fork(after_in_child=_forget_parent)


def _pool_of(device: str) -> vramp.Pool:
    named = re.fullmatch(r"(?:cuda|hip)(?::([0-9]+))?", str(device).strip().lower())
    if named is None:
        raise UnsupportedError(f"the device {device!r} is no card: use cuda:N")
    return vramp.pool(int(named[1]) if named[1] else _current_device())


def _current_device() -> int:
    import torch

    return torch.cuda.current_device() if torch.cuda.is_available() else 0


def _synchronize() -> None:
    """Waits for the work of streams that the pool may not know."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.synchronize()


def init_kvcached(dev_str: str, page_size: int = 0, contiguous_layout: bool = True) -> None:
    """Names the device, the size of a page (0 is 2 MiB), and whether the pages of all layers lie side by side."""
    global _device
    page = page_size or _PAGE
    if page < 0 or page % _PAGE:
        raise RangeError(f"page_size is {page_size}: use a multiple of {_PAGE} (KVCACHED_PAGE_SIZE_MB)")
    made = _Device(_pool_of(dev_str), page, bool(contiguous_layout))
    with _lock:
        before, _device = _device, made
    if before is not None:
        _log.warning("init_kvcached was called again: the tensors before it have no memory any more")
        _end(before)


def shutdown_kvcached() -> None:
    """Gives the memory of all groups to the card. Tensors that the program still has must not be used any more."""
    global _device
    with _lock:
        before, _device = _device, None
    if before is not None:
        _end(before)


def _end(device: _Device) -> None:
    for group in device.groups.values():
        with group.lock:
            if group.mapped:
                group.arena.park(sorted(group.mapped))
                group.mapped.clear()
            group.tensors.clear()
            group.arena.release()


def _opened() -> _Device:
    device = _device
    if device is None:
        raise RuntimeError("kvcached is not initialized: call init_kvcached before")
    return device


def _group(group_id: int) -> _Group | None:
    return _opened().groups.get(group_id)


def create_kv_tensors(
    size: int,
    dtype_size: int,
    dev_str: str,
    num_layers: int,
    num_kv_buffers: int = 2,
    group_id: int = 0,
    unified_pool: bool = False,
) -> list[torch.Tensor]:
    """Returns flat tensors with addresses and no memory: one of all layers, or one of `size` bytes for each.

    A group that exists returns the tensors that it has.
    """
    device = _opened()
    if dtype_size not in _DTYPES:
        raise RuntimeError(f"no integer type has {dtype_size} bytes: use 1, 2, 4 or 8")
    if num_layers < 1 or num_kv_buffers < 1:
        raise RangeError(f"num_layers={num_layers}, num_kv_buffers={num_kv_buffers}: use 1 at least")
    if _pool_of(dev_str) is not device.pool:
        raise InUseError(f"init_kvcached named another device than {dev_str}: use one device in a process")
    with _lock:
        group = device.groups.get(group_id)
        if group is None:
            group = _create(device, size, num_layers, num_kv_buffers, unified_pool)
            group.tensors = _tensors(device, group, size, _DTYPES[dtype_size])
            device.groups[group_id] = group
        elif group.layers != num_layers:
            raise InUseError(
                f"group {group_id} has {group.layers} layers, and not {num_layers}: use another group_id"
            )
        return list(group.tensors)


def _create(device: _Device, size: int, layers: int, buffers: int, is_unified: bool) -> _Group:
    # K and V of a layer are the halves of its tensor, if it has both.
    halves = 1 if is_unified and not device.is_contiguous else buffers
    each = -(-size // (device.page * halves)) * device.page
    arena = vramp.kv.arena(
        device.pool,
        tensors=layers * halves,
        size=each,
        page=device.page,
        superpage=device.page,
        layout="interleaved" if device.is_contiguous else "separate",
    )
    arena.commit(0)
    return _Group(arena, layers, device.page * (layers * halves if device.is_contiguous else 1))


def _tensors(device: _Device, group: _Group, size: int, dtype: str) -> list[torch.Tensor]:
    arena = group.arena
    if device.is_contiguous:
        return [arena.flat(dtype)]
    each = arena.size // group.layers
    return [arena.flat(dtype, offset=layer * each, size=each) for layer in range(group.layers)]


def kv_tensors_created(group_id: int = 0) -> bool:
    """Returns True once the group has tensors."""
    return _group(group_id) is not None


def map_to_kv_tensors(offsets: Sequence[int], group_id: int = 0) -> bool:
    """Commits pages over all layers: all of them, or none. Pages that have memory keep it.

    Returns False if the group has no tensors. Raises OutOfMemoryError or DriverError.
    """
    group = _group(group_id)
    if group is None:
        _log.error("group %d has no tensors to map pages to: call create_kv_tensors before", group_id)
        return False
    with group.lock:
        pages = [page for page in group.numbers(offsets) if page not in group.mapped]
        if pages:
            group.arena.commit(pages)
            group.mapped.update(pages)
    return True


def unmap_from_kv_tensors(offsets: Sequence[int], group_id: int = 0) -> bool:
    """Gives the memory of pages to the card, after the work that was queued so far. Returns False as `map` does."""
    group = _group(group_id)
    if group is None:
        _log.error("group %d has no tensors to unmap pages from: call create_kv_tensors before", group_id)
        return False
    with group.lock:
        pages = [page for page in group.numbers(offsets) if page in group.mapped]
        if pages:
            group.arena.park(pages)
            group.mapped.difference_update(pages)
            group.arena.release()
    return True


def _bound(name: str, default: int) -> int:
    return max(0, int(os.environ.get(name, default)))


class PageAllocator:
    """Pages of one group by number, as kvcached's KVCacheManager uses them. Threads may share it."""

    def __init__(
        self,
        num_layers: int,
        mem_size_per_layer: int,
        page_size: int,
        world_size: int = 1,
        pp_rank: int = 0,
        async_sched: bool = False,
        contiguous_layout: bool = True,
        enable_page_prealloc: bool = True,
        num_kv_buffers: int = 2,
        group_id: int = 0,
        ipc_name: str = "",
    ) -> None:
        self._bundle = page_size * num_layers * num_kv_buffers
        self._stride = self._bundle if contiguous_layout else page_size
        self._page_size = page_size
        self._size_per_layer = mem_size_per_layer
        self._buffers = num_layers * num_kv_buffers
        self._world_size = world_size
        self._group_id = group_id
        self._prealloc = enable_page_prealloc
        self._is_async = async_sched
        self._is_remote = False
        self._map_remote: Broadcast | None = None
        self._unmap_remote: Broadcast | None = None
        self._resize_target = -1
        self._refiller: Refiller | None = None
        self._starting = threading.Lock()
        self._file = UsageFile(ipc_name, group_id, mem_size_per_layer * self._buffers)
        bounds = _bound("KVCACHED_MIN_RESERVED_PAGES", 5), _bound("KVCACHED_MAX_RESERVED_PAGES", 10)
        self._pages = Pages(
            mem_size_per_layer // page_size,
            bounds,
            lambda pages: self._move(pages, self._map_remote, map_to_kv_tensors),
            lambda pages: self._move(pages, self._unmap_remote, unmap_from_kv_tensors),
            lambda used, ahead: self._file.write_usage(used * self._bundle, ahead * self._bundle),
        )

    def alloc_page(self) -> InternalPage:
        """Returns a page with memory. Waits for pages that another thread moves. Raises RuntimeError without one."""
        return InternalPage(self._pages.take(refills=self._prealloc), self._page_size)

    def free_page(self, page_id: int) -> None:
        """Takes a page back."""
        self._pages.give([page_id])

    def free_pages(self, page_ids: Sequence[int]) -> None:
        """Takes pages back. Up to KVCACHED_MAX_RESERVED_PAGES keep their memory."""
        self._pages.give(page_ids)

    def resize(self, new_mem_size: int) -> bool:
        """Sets the bytes of a layer's K or V. Returns False if more are in use."""
        return self._pages.resize(new_mem_size // self._page_size)

    def trim(self) -> None:
        """Gives the memory of reserved pages to the card."""
        self._pages.trim()

    def reset_free_page_order(self) -> None:
        """Hands out free pages in the order of their numbers."""
        self._pages.sort()

    def get_num_free_pages(self) -> int:
        """Returns the number of pages that are not in use, reserved ones included."""
        return self._pages.vacant

    def get_num_inuse_pages(self) -> int:
        """Returns the number of pages in use."""
        return self._pages.state()["inuse_pages"]

    def get_num_total_pages(self) -> int:
        """Returns the number of pages."""
        return self._pages.total

    def get_num_reserved_pages(self) -> int:
        """Returns the number of pages that have memory and are not in use."""
        return self._pages.state()["reserved_pages"]

    def get_page_state(self) -> dict[str, int]:
        """Returns all four counts, of one moment."""
        return self._pages.state()

    def get_avail_physical_pages(self) -> int:
        """Returns for how many pages the card has memory, less what KVCACHED_GPU_UTILIZATION (0.95) leaves free."""
        device = _device
        pool = device.pool if device is not None else vramp.pool(_current_device())
        stats = pool.stats()
        used = float(os.environ.get("KVCACHED_GPU_UTILIZATION", "0.95"))
        usable = stats.device_free - int(stats.device_total * (1.0 - used))
        return max(0, usable) // self._page_size // self._buffers

    def check_and_get_resize_target(self, current_mem_size: int) -> int:
        """Returns the bytes of a layer's K or V that the limit in the file allows, or -1 if they are current."""
        limit = self._file.limit()
        target = -1 if limit is None else limit // self._buffers
        return target if target != current_mem_size else -1

    def get_resize_target(self) -> int:
        """Returns what `check_and_get_resize_target` last found on the thread, against the size at the start."""
        return self._resize_target

    def get_page_id(self, block_id: int, block_mem_size: int) -> int:
        """Returns the page of a block."""
        return block_id * block_mem_size // self._page_size

    def group_indices_by_page(self, indices: Sequence[int], block_mem_size: int) -> dict[int, list[int]]:
        """Returns blocks by page."""
        by_page: dict[int, list[int]] = {}
        for block in indices:
            by_page.setdefault(block * block_mem_size // self._page_size, []).append(block)
        return by_page

    def set_broadcast_map_callback(self, callback: Broadcast) -> None:
        """Sets what maps pages in the processes of all ranks."""
        self._map_remote = callback

    def set_broadcast_unmap_callback(self, callback: Broadcast) -> None:
        """Sets what unmaps pages in the processes of all ranks."""
        self._unmap_remote = callback

    def set_use_worker_ipc(self, use_worker_ipc: bool) -> None:
        """Says whether the tensors are in another process, also with one rank."""
        self._is_remote = use_worker_ipc

    def start_prealloc_thread(self) -> None:
        """Starts the thread that maps pages ahead and reads the limit in the file."""
        with self._starting:
            if self._prealloc and self._refiller is None:
                self._refiller = Refiller(self._pages.wanted, self._work)

    def stop_prealloc_thread(self) -> None:
        """Ends it and waits for it."""
        with self._starting:
            refiller, self._refiller = self._refiller, None
            if refiller is not None:
                refiller.stop()

    def _work(self, is_short: bool) -> None:
        try:
            if is_short:
                self._pages.refill(self.get_avail_physical_pages())
            self._resize_target = self.check_and_get_resize_target(self._size_per_layer)
        except Exception as error:
            # The next request maps its page itself, and its caller receives the error.
            _log.error("pages were not mapped ahead: %s", error)

    def _move(
        self, pages: Sequence[int], remote: Broadcast | None, move: Callable[[Sequence[int], int], bool]
    ) -> None:
        offsets = [page * self._stride for page in pages]
        if remote is not None and (self._world_size > 1 or self._is_remote):
            remote(self._world_size, offsets)
            return
        if self._is_async and move is unmap_from_kv_tensors:
            _synchronize()
        if not move(offsets, self._group_id):
            raise RuntimeError(f"group {self._group_id} has no tensors: call create_kv_tensors before")
