"""The route without a compiler: PyTorch's pluggable allocator, and statistics in PyTorch's place.

PyTorch's class of pluggable allocators raises for statistics. The functions of torch._C that read them
are replaced, so torch.cuda.memory_stats, memory_allocated, memory_summary and the others work.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from typing import Any

from .. import library_path
from .._errors import InUseError
from .._native import opened, unused_stats

HOOKS = {
    # Without this hook memory could be reused while another stream still uses it.
    "set_record_stream_fn": "vramp_torch_record_stream",
    "set_init_fn": "vramp_torch_init",
    "set_reset_fn": "vramp_torch_reset",
    "set_memory_fraction_fn": "vramp_torch_memory_fraction",
    "set_base_alloc_fn": "vramp_torch_base_alloc",
    # Without these hooks, and that of `_begin_hook`, a graph would overwrite memory that was reused after its
    # capture.
    "set_end_allocate_to_pool_fn": "vramp_torch_end_pool",
    "set_release_pool": "vramp_torch_release_pool",
}
"""Functions that PyTorch calls, by the name of their setter."""


def install(torch: Any, library: Any) -> Any:
    """Installs the allocator and the statistics. The result has to live as long as the process."""
    allocator = torch.cuda.memory.CUDAPluggableAllocator(
        library_path(), "vramp_torch_malloc", "vramp_torch_free"
    )
    for setter, function in HOOKS.items():
        address = ctypes.cast(getattr(library, function), ctypes.c_void_p).value
        getattr(allocator._allocator, setter)(address)
    begin = _begin_hook(torch)
    address = ctypes.cast(begin, ctypes.c_void_p).value
    allocator._allocator.set_begin_allocate_to_pool(address)
    try:
        torch.cuda.memory.change_current_allocator(allocator)
    except RuntimeError as error:
        raise InUseError(f"PyTorch refuses another allocator: {error}") from error
    for name, function in _statistics().items():
        setattr(torch._C, name, function)
    return allocator, begin


def _begin_hook(torch: Any) -> Any:
    """Returns the hook that PyTorch calls before a capture, which begins on the current stream.

    The hooks do not get the stream. vramp has to know it before the capture begins, so that no region sleeps
    meanwhile.
    """
    # Without the interpreter's lock: another thread may hold a lock of vramp and wait for it.
    library = ctypes.CDLL(library_path())
    note, begin_pool = library.vramp_torch_capture_begins, library.vramp_torch_begin_pool
    note.argtypes = (ctypes.c_int, ctypes.c_void_p)
    begin_pool.argtypes = (ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_void_p)

    def begin(device: int, first: int, second: int, filter: int | None) -> None:
        try:
            note(device, torch._C._cuda_getCurrentRawStream(device))
        finally:
            begin_pool(device, first, second, filter)

    return ctypes.CFUNCTYPE(None, *begin_pool.argtypes)(begin)


def _statistics() -> dict[str, Any]:
    """Returns what replaces functions of torch._C. None of them opens a device."""
    base: dict[int, dict[str, int]] = {}

    def totals(device: int) -> dict[str, int]:
        pool = opened(device)
        return pool.memory_stats() if pool else unused_stats()

    def nested(device: int) -> dict[str, Any]:
        stats: dict[str, Any] = {}
        for name, value in totals(device).items():
            path = name.split(".")
            if path[-1] in ("allocated", "freed") or len(path) == 1:
                value -= base.get(device, {}).get(name, 0)
            at = stats
            for part in path[:-1]:
                at = at.setdefault(part, {})
            at[path[-1]] = value
        return stats

    def reset_accumulated(device: int) -> None:
        kept = ("allocated", "freed", "num_alloc_retries", "num_ooms", "num_sync_all_streams",
                "num_device_alloc", "num_device_free")
        base[device] = {name: value for name, value in totals(device).items() if name.split(".")[-1] in kept}

    def reset_peaks(device: int) -> None:
        if pool := opened(device):
            pool.reset_peaks()

    def snapshot(*_: Any) -> dict[str, Any]:
        import pickle

        import torch

        whole: dict[str, Any] = {"segments": [], "device_traces": [], "allocator_settings": {}}
        for device in range(torch.cuda.device_count()):
            pool = opened(device)
            if pool is None:
                whole["device_traces"].append([])
                continue
            with tempfile.TemporaryDirectory() as folder:
                path = os.path.join(folder, "snapshot.pickle")
                pool.snapshot(path)
                with open(path, "rb") as file:
                    one = pickle.load(file)
            for segment in one["segments"]:
                segment["device"] = device
            whole["segments"] += one["segments"]
            whole["device_traces"].append([event for trace in one["device_traces"] for event in trace])
        return whole

    return {
        "_cuda_memoryStats": nested,
        "_cuda_resetPeakMemoryStats": reset_peaks,
        "_cuda_resetAccumulatedMemoryStats": reset_accumulated,
        "_cuda_memorySnapshot": snapshot,
    }
