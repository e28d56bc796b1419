"""Runs PyTorch on vramp. Loads libvramp.so from the directory of this file, or from VRAMP_LIBRARY.

    import vramp_torch
    vramp_torch.enable()                 # all CUDA tensors; before the first CUDA call

    pool = vramp_torch.mem_pool()        # or only tensors allocated in this block
    with torch.cuda.use_mem_pool(pool):
        cache = torch.empty(8 << 30, dtype=torch.uint8, device="cuda")

    print(vramp_torch.report())

VRAMP_CONF sets options such as "limit=80GiB,preset=vramp". It is read at the first allocation.

After enable(), out of memory is a RuntimeError that begins with "CUDA out of memory", and PyTorch's own
statistics, snapshots and MemPools raise. With mem_pool() all of them work, out of memory is a
torch.OutOfMemoryError, and PyTorch's caching allocator allocates its segments from vramp.

Both support CUDA graphs: after enable() with torch.cuda.graph(g), with or without a pool of
torch.cuda.graph_pool_handle(), and with make_graphed_callables; with mem_pool() by
torch.cuda.graph(g, pool=pool.id). After enable(), torch.compile(mode="reduce-overhead") raises, because
it needs graph trees. docs/c-interface.md has the rules.
"""

import ctypes
import os
import threading

__all__ = ["enable", "mem_pool", "report", "trim", "audit", "library_path", "VrampError"]


class VrampError(RuntimeError):
    """A call of vramp failed. Has vramp's error message."""


class _Allocator(ctypes.Structure):
    _fields_ = [("id", ctypes.c_uint64)]


class _Stats(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_uint64)
        for name in (
            "struct_size live live_peak reserved reserved_peak placed freed hits misses chunks_created "
            "chunks_moved chunks_reactivated chunks_released moved plans_undone card_free card_total "
            "callback_panics"
        ).split()
    ]


_lock = threading.Lock()
_loaded = None
# PyTorch stores only the address of an allocator, so it must live until the process ends.
_global_allocator = None
_pool_allocator = None


def library_path():
    """Returns the path of the shared library: VRAMP_LIBRARY, or libvramp.so beside this file."""
    beside = os.path.join(os.path.dirname(os.path.abspath(__file__)), "libvramp.so")
    return os.path.abspath(os.environ.get("VRAMP_LIBRARY") or beside)


def _library():
    global _loaded
    with _lock:
        if _loaded is None:
            library = ctypes.CDLL(library_path())
            library.vramp_last_error.restype = ctypes.c_char_p
            library.vramp_version.restype = ctypes.c_char_p
            library.vramp_torch_allocator.argtypes = [ctypes.c_int, ctypes.POINTER(_Allocator)]
            library.vramp_stats.argtypes = [_Allocator, ctypes.POINTER(_Stats)]
            library.vramp_audit.argtypes = [_Allocator]
            library.vramp_trim.argtypes = [_Allocator, ctypes.c_size_t]
            _loaded = library
        return _loaded


def _check(status):
    if status != 0:
        raise VrampError(_library().vramp_last_error().decode(errors="replace"))


def _address(name):
    return ctypes.cast(getattr(_library(), name), ctypes.c_void_p).value


def _pluggable(malloc):
    from torch.cuda.memory import CUDAPluggableAllocator

    _library()
    return CUDAPluggableAllocator(library_path(), malloc, "vramp_torch_free")


def enable():
    """Makes vramp the allocator of all CUDA tensors and returns the pluggable allocator. Call it before
    the first use of CUDA; PyTorch raises otherwise. Calling it again changes nothing.

    Memory of a captured graph comes from an arena of its pool. It is released when all graphs of the
    pool are destroyed and all tensors in it are freed. It is reused after all work queued by then on
    the default stream and on every stream that tensors were allocated or recorded on. If a graph was
    replayed on another stream, wait for that replay before you delete the graph.
    """
    global _global_allocator
    import torch

    if _global_allocator is not None:
        return _global_allocator
    allocator = _pluggable("vramp_torch_malloc")
    hooks = allocator._allocator
    # Without this hook memory could be reused while another stream still uses it.
    hooks.set_record_stream_fn(_address("vramp_torch_record_stream"))
    hooks.set_init_fn(_address("vramp_torch_init"))
    hooks.set_reset_fn(_address("vramp_torch_reset"))
    hooks.set_memory_fraction_fn(_address("vramp_torch_memory_fraction"))
    hooks.set_base_alloc_fn(_address("vramp_torch_base_alloc"))
    # Without these hooks a graph would overwrite memory that was reused after its capture.
    hooks.set_begin_allocate_to_pool(_address("vramp_torch_begin_pool"))
    hooks.set_end_allocate_to_pool_fn(_address("vramp_torch_end_pool"))
    hooks.set_release_pool(_address("vramp_torch_release_pool"))
    torch.cuda.memory.change_current_allocator(allocator)
    _global_allocator = allocator
    return allocator


def mem_pool():
    """Returns a torch.cuda.MemPool whose segments come from vramp, for torch.cuda.use_mem_pool and for
    torch.cuda.graph(g, pool=pool.id).

    PyTorch's expandable segments must be off, because they bypass pluggable allocators.
    """
    global _pool_allocator
    import torch

    conf = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") + os.environ.get("PYTORCH_ALLOC_CONF", "")
    if "expandable_segments:true" in conf.replace(" ", "").lower():
        raise VrampError(
            "expandable segments bypass memory pools: remove expandable_segments:True from "
            "PYTORCH_CUDA_ALLOC_CONF"
        )
    if _pool_allocator is None:
        _pool_allocator = _pluggable("vramp_torch_pool_malloc")
    return torch.cuda.MemPool(_pool_allocator.allocator())


def _allocator(device):
    allocator = _Allocator()
    _check(_library().vramp_torch_allocator(device, ctypes.byref(allocator)))
    return allocator


def report(device=0):
    """Returns the statistics of a device as a dict of counts and bytes (see vramp_stats_t)."""
    stats = _Stats(struct_size=ctypes.sizeof(_Stats))
    _check(_library().vramp_stats(_allocator(device), ctypes.byref(stats)))
    return {name: getattr(stats, name) for name, _ in _Stats._fields_[1:]}


def trim(keep=0, device=0):
    """Releases idle memory of a device until at most `keep` bytes are reserved."""
    _check(_library().vramp_trim(_allocator(device), keep))


def audit(device=0):
    """Checks the consistency of vramp's state. Raises VrampError if it is inconsistent."""
    _check(_library().vramp_audit(_allocator(device)))
