"""CUDA's state, and the statistics as PyTorch reads them."""

import os

from .. import _C
from . import memory
from .memory import memory_stats  # noqa: F401

_initialized = bool(os.environ.get("FAKE_TORCH_INITIALIZED"))
_lazy = []


def is_initialized():
    return _initialized


def _lazy_call(call):
    if _initialized:
        call()
    else:
        _lazy.append(call)


def init():
    global _initialized
    if not _initialized:
        _initialized = True
        for call in _lazy:
            call()


def synchronize():
    init()


def device_count():
    return int(os.environ.get("FAKE_TORCH_DEVICES", "1"))


def get_device_name():
    return "a simulated GPU"


def mem_get_info():
    return 60 << 30, 80 << 30


def max_memory_allocated(device=0):
    return _C._cuda_memoryStats(device)["allocated_bytes"]["all"]["peak"]


def max_memory_reserved(device=0):
    return _C._cuda_memoryStats(device)["reserved_bytes"]["all"]["peak"]


class MemPool:
    def __init__(self, allocator=None):
        self.allocator = allocator
