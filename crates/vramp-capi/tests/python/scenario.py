"""Tests vramp_torch.py and torch-workloads.py with a mock of PyTorch, on a simulated GPU.

The mock calls the library as PyTorch does: by the addresses passed to the hooks. It has no C++
exceptions, so no test runs out of memory.
"""

import contextlib
import ctypes
import importlib.util
import io
import json
import os
import sys
import types

POINTER, INT, SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t


class Hooks:
    """Keeps the address of every hook by the name of its setter."""

    def __init__(self):
        self.addresses = {}

    def __getattr__(self, name):
        assert name.startswith("set_"), name
        return lambda address: self.addresses.__setitem__(name, address)


class CUDAPluggableAllocator:
    def __init__(self, path, malloc, free):
        library = ctypes.CDLL(path)
        self.malloc = ctypes.CFUNCTYPE(POINTER, ctypes.c_ssize_t, INT, POINTER)((malloc, library))
        self.free = ctypes.CFUNCTYPE(None, POINTER, SIZE, INT, POINTER)((free, library))
        self._allocator = Hooks()

    def allocator(self):
        return self._allocator


class Tensor:
    def __init__(self, value=0.0):
        self.value = value

    def backward(self):
        pass

    def detach(self):
        return self

    def __float__(self):
        return self.value


torch = types.ModuleType("torch")
torch.cuda = types.ModuleType("torch.cuda")
torch.cuda.memory = types.ModuleType("torch.cuda.memory")
torch.Tensor, torch.OutOfMemoryError, torch.__version__ = Tensor, RuntimeError, "stand-in"
torch.is_tensor = lambda value: isinstance(value, Tensor)
torch.cuda.memory.CUDAPluggableAllocator = CUDAPluggableAllocator
torch.cuda.memory.change_current_allocator = lambda allocator: setattr(torch, "current", allocator)
torch.cuda.MemPool = lambda allocator: ("pool", allocator)
torch.cuda.init = torch.cuda.synchronize = lambda: None
torch.cuda.mem_get_info = lambda: (60 << 30, 80 << 30)
torch.cuda.get_device_name = lambda: "a simulated GPU"
sys.modules |= {"torch": torch, "torch.cuda": torch.cuda, "torch.cuda.memory": torch.cuda.memory}

root = sys.argv[1]
sys.path.insert(0, os.path.join(root, "python"))
import vramp_torch  # noqa: E402

# The global route, with every hook that it needs.
allocator = vramp_torch.enable()
assert torch.current is allocator and vramp_torch.enable() is allocator
hooks = allocator._allocator.addresses
assert set(hooks) == {
    "set_record_stream_fn",
    "set_init_fn",
    "set_reset_fn",
    "set_memory_fraction_fn",
    "set_base_alloc_fn",
    "set_begin_allocate_to_pool",
    "set_end_allocate_to_pool_fn",
    "set_release_pool",
}
record_stream = ctypes.CFUNCTYPE(None, POINTER, POINTER)(hooks["set_record_stream_fn"])
reset = ctypes.CFUNCTYPE(None)(hooks["set_reset_fn"])
block = allocator.malloc(5 << 20, 0, None)
record_stream(block, 0x7F00)
report = vramp_torch.report()
assert report["live"] == 5 << 20 and report["placed"] == 1, report
assert report["card_total"] == 24 << 30 or report["card_total"] > report["reserved"] > 0, report
allocator.free(block, 5 << 20, 0, None)
reset()
vramp_torch.trim()
vramp_torch.audit()
assert vramp_torch.report()["live"] == 0

# The capture hooks of PyTorch: the id of a pool as two numbers, and a filter that is not called.
NUMBER = ctypes.c_uint64
begin = ctypes.CFUNCTYPE(None, INT, NUMBER, NUMBER, POINTER)(hooks["set_begin_allocate_to_pool"])
end = ctypes.CFUNCTYPE(None, INT, NUMBER, NUMBER)(hooks["set_end_allocate_to_pool_fn"])
release = ctypes.CFUNCTYPE(None, INT, NUMBER, NUMBER)(hooks["set_release_pool"])
for _ in range(2):
    begin(0, 3, 0, 0x10)
    allocator.free(allocator.malloc(5 << 20, 0, 0x7F00), 5 << 20, 0, 0x7F00)
    end(0, 3, 0)
release(0, 3, 0)
release(0, 3, 0)
vramp_torch.audit()
assert vramp_torch.report()["live"] == 0

try:
    vramp_torch.report(64)
    sys.exit("device 64 is no error")
except vramp_torch.VrampError as error:
    assert "no device number 64" in str(error)

# The MemPool route.
kind, _ = vramp_torch.mem_pool()
assert kind == "pool"
os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
try:
    vramp_torch.mem_pool()
    sys.exit("expandable segments are no error")
except vramp_torch.VrampError as error:
    assert "bypass" in str(error)

# One run of the bench's driver.
torch.take = lambda size: allocator.malloc(size, 0, None)
torch.give = lambda block: allocator.free(block, 0, 0, None)
path = os.path.join(root, "bench/torch-workloads.py")
spec = importlib.util.spec_from_file_location("driver", path)
driver = importlib.util.module_from_spec(spec)
spec.loader.exec_module(driver)
workloads = os.path.join(os.path.dirname(os.path.abspath(__file__)), "workloads.py")
assert driver.names_in(workloads) == ["small"]
args = types.SimpleNamespace(workloads=workloads, names=["small"], allocator="vramp", steps=4, limit=0)
printed = io.StringIO()
with contextlib.redirect_stdout(printed):
    driver.run_one(args)
line = json.loads(printed.getvalue())
assert (line["steps"], line["loss"], line["error"]) == (4, 0.25, None), line
assert line["peak_live"] == 8 << 20 and line["vramp"]["live"] == 0, line

runs = [line | {"allocator": name, "steady_s": s} for name, s in [("native", 2.0), ("vramp", 1.0)]]
medians = list(driver.summary("small", 0, runs))
assert [(m["allocator"], m["steady_over_native"], m["loss_minus_native"]) for m in medians] == [
    ("native", 1.0, 0.0),
    ("vramp", 0.5, 0.0),
], medians
assert driver.environment("vramp", 5 << 30)["VRAMP_CONF"].endswith(f"limit={5 << 30}")
assert "PYTORCH_CUDA_ALLOC_CONF" not in driver.environment("native", 0)
print("passed")
