"""What vramp.torch uses of PyTorch, for tests on machines without it.

    FAKE_TORCH_VERSION      its version; default 2.11.0+cu130
    FAKE_TORCH_CUDA         version of CUDA; empty for a build without it
    FAKE_TORCH_DEVICES      number of devices; default 1
    FAKE_TORCH_INITIALIZED  set if CUDA is in use from the start
    FAKE_TORCH_BROKEN       the error that importing it raises: ImportError or OSError
"""

import builtins
import os
import types

if broken := os.environ.get("FAKE_TORCH_BROKEN"):
    raise getattr(builtins, broken)("libcudart.so.13: cannot open shared object file")

__version__ = os.environ.get("FAKE_TORCH_VERSION", "2.11.0+cu130")
version = types.SimpleNamespace(cuda=os.environ.get("FAKE_TORCH_CUDA", "13.0") or None, git_version="0")


class Tensor:
    """A tensor, of which only the device matters."""

    def __init__(self, device="cpu"):
        self.device = types.SimpleNamespace(type=device)

    def backward(self):
        pass

    def detach(self):
        return self

    def __float__(self):
        return 0.25


class Parameter(Tensor):
    pass


class UntypedStorage(Tensor):
    pass


class OutOfMemoryError(RuntimeError):
    pass


_tensor_classes = set()


def is_tensor(value):
    return isinstance(value, Tensor)


nn = types.SimpleNamespace(parameter=types.SimpleNamespace(Parameter=Parameter))

from . import _C, cuda, multiprocessing  # noqa: E402, F401
