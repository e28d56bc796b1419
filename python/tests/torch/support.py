"""What the tests of PyTorch's memory functions share."""

import contextlib
import ctypes
import functools
import gc
import os
import pathlib
import runpy
import subprocess
import sys

import torch

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
ON_CARD = os.environ.get("VRAMP_TEST_DEVICE", "fake") == "cuda"
VRAMP = os.environ.get("VRAMP_TEST_ALLOCATOR", "vramp") == "vramp"
EXPANDABLE = "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
FAKE_CUDA = pathlib.Path(__file__).resolve().parent / "fake_cuda"

# A request that no card can serve.
TOO_MUCH = 1 << 50


@functools.cache
def runtime():
    """The functions of the fake CUDA runtime that are for tests alone."""
    assert not ON_CARD
    name = next(path for path in os.environ["LD_PRELOAD"].split(":") if "libcudart" in path)
    library = ctypes.CDLL(name)
    for function in ("fake_cuda_used", "fake_cuda_mallocs", "fake_cuda_frees", "fake_cuda_events"):
        getattr(library, function).restype = ctypes.c_size_t
    return library


def block(size, stream=None):
    """A tensor of `size` bytes, whose contents are undefined."""
    with torch.cuda.stream(stream) if stream else contextlib.nullcontext():
        return torch.empty(size, dtype=torch.uint8, device="cuda")


def address(tensor):
    return tensor.untyped_storage().data_ptr()


def allocated():
    return torch.cuda.memory_allocated()


def stat(key):
    """A statistic by its name without the first and last word of the usual ones."""
    return torch.cuda.memory_stats()[key]


def tidy():
    """Frees what is not referenced, waits for all work and empties the caches."""
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def segments(pool_id=None):
    """Segments of one pool, or of all."""
    return [
        segment
        for segment in torch.cuda.memory_snapshot()
        if pool_id is None or tuple(segment["segment_pool_id"]) == tuple(pool_id)
    ]


def private_segments():
    return [segment for segment in segments() if tuple(segment["segment_pool_id"]) != (0, 0)]


def live_blocks(pool_id):
    return sum(part["state"] == "active_allocated" for segment in segments(pool_id) for part in segment["blocks"])


def has_address(tensor):
    """The states of the blocks of all segments that contain a tensor."""
    return [
        part["state"]
        for segment in segments()
        for part in segment["blocks"]
        if part["address"] <= address(tensor) < part["address"] + part["size"]
    ]


@contextlib.contextmanager
def busy(stream):
    """Work submitted to the stream in this block is unfinished until the block ends."""
    if ON_CARD:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1_500_000_000)
        yield
        stream.synchronize()
    else:
        handle = ctypes.c_void_p(stream.cuda_stream)
        assert runtime().fake_cuda_hold(handle) == 0
        try:
            yield
        finally:
            runtime().fake_cuda_release(handle)


@contextlib.contextmanager
def limit(size):
    """Allows `size` bytes more than are reserved now."""
    tidy()
    before = torch.cuda.get_per_process_memory_fraction(0)
    total = torch.cuda.get_device_properties(0).total_memory
    # One byte more, for the product with the total is rounded down.
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + size + 1) / total, 0)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, 0)


@contextlib.contextmanager
def settings(text):
    """Allocator settings for a block; after it those of the environment are in force again."""
    torch.cuda.memory._set_allocator_settings(text)
    try:
        yield
    finally:
        torch.cuda.memory._set_allocator_settings(os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))


@functools.cache
def capture_stream():
    return torch.cuda.Stream()


def capture(function, pool=None, stream=None):
    """Captures a function after one eager run; returns the graph and the function's result.

    All captures are on one stream unless another is given, for memory of a pool is reused by its stream.
    """
    stream = stream or capture_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, pool=pool):
        result = function()
    return graph, result


def run_script(text, check=True, **environment):
    """Runs a program in a process of its own on the same allocator and device."""
    start = "import torch\n"
    if VRAMP:
        start = "import vramp.torch\nvramp.torch.enable()\nimport torch\n"
    done = subprocess.run(
        [sys.executable, "-c", start + text],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if check:
        assert done.returncode == 0, done.stderr
    return done


PLUGGABLE = r"""
#include <cuda_runtime_api.h>
#include <atomic>
extern "C" {
std::atomic<int> mallocs{0}, frees{0};
void* counted_malloc(size_t size, int device, cudaStream_t) {
  void* pointer = nullptr;
  if (cudaMalloc(&pointer, size)) return nullptr;
  mallocs++;
  return pointer;
}
void counted_free(void* pointer, size_t, int, cudaStream_t) {
  frees++;
  cudaFree(pointer);
}
int malloc_count() { return mallocs; }
int free_count() { return frees; }
}
"""


class Pluggable:
    """An allocator of a user's own, which counts its calls."""

    def __init__(self, folder):
        build = runpy.run_path(str(FAKE_CUDA / "build.py"))
        site = build["site_packages"]()
        headers, soname = build["cuda_headers"](site)
        runtime = next(site.glob(f"nvidia/*/lib/{soname}"))
        source, self.path = folder / "pluggable.cpp", folder / "pluggable.so"
        source.write_text(PLUGGABLE)
        command = ["g++", "-std=c++17", "-shared", "-fPIC", str(source), "-o", str(self.path), str(runtime)]
        command += [word for header in headers for word in ("-isystem", str(header))]
        subprocess.run(command, check=True)
        self.library = ctypes.CDLL(str(self.path))
        self.python = torch.cuda.memory.CUDAPluggableAllocator(str(self.path), "counted_malloc", "counted_free")

    def allocator(self):
        return self.python.allocator()

    def mallocs(self):
        return self.library.malloc_count()

    def frees(self):
        return self.library.free_count()
