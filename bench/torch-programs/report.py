"""The result of a program: one line of JSON, for check-programs.py to compare."""

import contextlib
import hashlib
import json
import time

import torch

_start = time.perf_counter()


def seed():
    """Makes the run repeatable."""
    torch.manual_seed(1234)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def digest(*tensors):
    """A hash of the contents of tensors."""
    hashed = hashlib.sha256()
    for tensor in tensors:
        hashed.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
    return hashed.hexdigest()[:16]


def skip(reason):
    """Ends the program: it cannot run on this machine, for this reason."""
    print(json.dumps({"skipped": reason}), flush=True)
    raise SystemExit(0)


@contextlib.contextmanager
def needs(module):
    """Skips the program if the body cannot import a module that is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != module:
            raise
        skip(f"{module} is not installed")


def finish(numbers=(), facts=None, contents=""):
    """Prints numbers, to be equal but for rounding; facts, to be equal; and a digest, which may differ."""
    torch.cuda.synchronize()
    line = {
        "numbers": [float(number) for number in numbers],
        "facts": facts or {},
        "digest": contents,
        "seconds": round(time.perf_counter() - _start, 3),
        "peak_allocated": torch.cuda.max_memory_allocated(),
        "peak_reserved": torch.cuda.max_memory_reserved(),
    }
    print(json.dumps(line), flush=True)


def mlp(width=256, depth=3, device="cuda"):
    """A small model."""
    layers = [layer for _ in range(depth) for layer in (torch.nn.Linear(width, width), torch.nn.ReLU())]
    return torch.nn.Sequential(*layers, torch.nn.Linear(width, 10)).to(device)
