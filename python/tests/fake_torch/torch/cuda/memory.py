"""PyTorch's class of pluggable allocators. It calls the library by the names and addresses that it got."""

import ctypes

POINTER, INT, SIZE, NUMBER = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_uint64
TYPES = {
    "set_record_stream_fn": (None, POINTER, POINTER),
    "set_init_fn": (None, INT),
    "set_reset_fn": (None,),
    "set_memory_fraction_fn": (None, ctypes.c_double, INT),
    "set_base_alloc_fn": (POINTER, POINTER, ctypes.POINTER(SIZE)),
    "set_begin_allocate_to_pool": (None, INT, NUMBER, NUMBER, POINTER),
    "set_end_allocate_to_pool_fn": (None, INT, NUMBER, NUMBER),
    "set_release_pool": (None, INT, NUMBER, NUMBER),
}
current = None


class _Hooks:
    """Keeps every hook as a function, by the name of its setter."""

    def __getattr__(self, name):
        def keep(address):
            setattr(self, name.removeprefix("set_"), ctypes.CFUNCTYPE(*TYPES[name])(address))

        return keep


class CUDAPluggableAllocator:
    def __init__(self, path, malloc, free):
        library = ctypes.CDLL(path)
        self.malloc = ctypes.CFUNCTYPE(POINTER, ctypes.c_ssize_t, INT, POINTER)((malloc, library))
        self.free = ctypes.CFUNCTYPE(None, POINTER, SIZE, INT, POINTER)((free, library))
        self.names = malloc, free
        self._allocator = _Hooks()

    def allocator(self):
        return self._allocator


def change_current_allocator(allocator):
    global current
    from . import is_initialized

    if current is not None or is_initialized():
        raise RuntimeError("Can't swap an already initialized allocator")
    current = allocator


def _cuda_beginAllocateCurrentThreadToPool(device, pool):
    """No pool is opened here."""


def _cuda_releasePool(device, pool):
    """No pool is opened here."""


def memory_stats(device=0):
    """The statistics by names with dots."""
    from .. import _C

    flat = {}

    def add(prefix, values):
        for name, value in values.items():
            if isinstance(value, dict):
                add(f"{prefix}{name}.", value)
            else:
                flat[prefix + name] = value

    add("", _C._cuda_memoryStats(device))
    return flat
