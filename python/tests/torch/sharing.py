"""The other process of test_torch_sharing.py, and what it runs. A process that `spawn` starts imports this file."""

import ctypes
import functools
import gc
import os
import traceback

import support
import torch
import torch.multiprocessing as multiprocessing

SECONDS = 120

if support.VRAMP:
    import vramp.torch

    vramp.torch.enable()


class Shared(ctypes.Structure):
    """What vramp counts."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("published", "exported", "opened", "opened_bytes")]


@functools.cache
def library():
    return ctypes.CDLL(vramp.library_path())


def shared():
    """Published and exported blocks of this process, and what it has open of others."""
    if not support.VRAMP:
        return {name: 0 for name, _ in Shared._fields_}
    counts = Shared()
    assert library().vramp_torch_shared(ctypes.byref(counts)) == 0
    return {name: getattr(counts, name) for name, _ in Shared._fields_}


def counts():
    """What a process holds: returns to its start once all tensors are gone."""
    gc.collect()
    torch.cuda.ipc_collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    held = shared()
    held["allocated"] = torch.cuda.memory_allocated()
    held["descriptors"] = len(os.listdir("/proc/self/fd"))
    if not support.ON_CARD:
        held["mapped"] = support.runtime().fake_cuda_mapped()
        held["used"] = support.runtime().fake_cuda_used(0)
    return held


class Failed(Exception):
    """An exception of the other process."""


def serve(requests, answers):
    """The other process: calls what it is sent until that is None."""
    torch.cuda.init()
    while True:
        try:
            request = requests.get()
        except Exception:
            answers.put((False, traceback.format_exc()))
            continue
        if request is None:
            return
        function, arguments = request
        del request
        try:
            answer = (True, function(*arguments))
        except Exception:
            answer = (False, traceback.format_exc())
        del function, arguments
        answers.put(answer)
        del answer


class Other:
    """A process that calls functions."""

    def __init__(self):
        context = multiprocessing.get_context("spawn")
        self.requests, self.answers = context.Queue(), context.Queue()
        self.process = context.Process(target=serve, args=(self.requests, self.answers), daemon=True)
        self.process.start()

    def send(self, function, *arguments):
        self.requests.put((function, arguments))

    def answer(self):
        done, value = self.answers.get(timeout=SECONDS)
        if not done:
            raise Failed(value)
        return value

    def call(self, function, *arguments):
        self.send(function, *arguments)
        del arguments
        return self.answer()

    def end(self):
        self.requests.put(None)
        self.process.join(SECONDS)
        assert self.process.exitcode == 0


# What the other process runs.

kept = []


def values(tensor):
    """The numbers of a tensor."""
    return tensor.cpu().tolist()


def sums(tensors):
    return [int(tensor.cpu().to(torch.int64).sum()) for tensor in tensors]


def write(tensor, numbers):
    tensor.copy_(torch.tensor(numbers, dtype=tensor.dtype))
    torch.cuda.synchronize()


def keep(*tensors):
    kept.extend(tensors)


def values_of_kept():
    return [values(tensor) for tensor in kept]


def drop():
    kept.clear()
    gc.collect()


def make(numbers):
    return torch.tensor(numbers, dtype=torch.float32).cuda()


def addresses(*tensors):
    return [tensor.data_ptr() for tensor in tensors]


def kept_addresses():
    return addresses(*kept)


def reduced(numbers):
    """What is sent of a tensor, without sending it."""
    kept.append(make(numbers))
    return multiprocessing.reductions.reduce_tensor(kept[-1])


def describe(tensor):
    """What PyTorch keeps of a tensor that it sends."""
    return (
        type(tensor).__name__,
        tensor.dtype,
        tuple(tensor.shape),
        tensor.stride(),
        tensor.storage_offset(),
        tensor.requires_grad,
        tensor.is_leaf,
        tensor.untyped_storage().nbytes(),
        tensor.is_shared(),
    )


def resend(tensor):
    """Sends a tensor of another process on."""
    multiprocessing.reductions.reduce_tensor(tensor)


def add_to_parameters(model, number):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.cpu() + number)
    torch.cuda.synchronize()


def gradient(parameter):
    return parameter.requires_grad, None if parameter.grad is None else values(parameter.grad)


def wait(event):
    event.wait()
    event.synchronize()
    return event.query(), type(event).__name__


def make_event():
    event = torch.cuda.Event(enable_timing=False, interprocess=True)
    event.record()
    kept.append(event)
    return event.ipc_handle()


def open_event(device, handle):
    event = torch.cuda.Event.from_ipc_handle(device, handle)
    event.wait()
    event.synchronize()
    return event.query()


def drop_in_capture():
    """Frees what is kept while a graph is captured; returns what was open before, inside and after."""
    before = shared()["opened"]
    graph, beside = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, capture_error_mode="relaxed"):
        # PyTorch waits for the current stream when it frees a received tensor.
        with torch.cuda.stream(beside):
            drop()
        inside = shared()["opened"]
        captured = torch.empty(1000, device="cuda")
    after = shared()["opened"]
    del captured
    return before, inside, after
