"""Sending CUDA tensors to other processes.

On the compiled route the tensor is vramp's memory, and PyTorch's own allocator cannot open that. So the receiver
calls `enable()` before it opens the tensor, unless it did before.

The pluggable route has no functions for it. A queue of torch.multiprocessing converts tensors on a thread of its
own: an exception there is printed, and the receiver waits for ever. So what cannot be shared is sent as an object
that raises when it is received.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

from .._errors import InUseError, UnsupportedError

_RECEIVER = (
    "this process received a CUDA tensor of vramp, and PyTorch's own allocator is in use here: call "
    "vramp.torch.enable() before the process uses CUDA, or run the program with `python -m vramp run`"
)
_TEXT = (
    "vramp shares CUDA memory with other processes on its compiled route alone: install a C++ compiler "
    "(`python -m vramp doctor`), or send a copy in host memory (tensor.cpu())"
)


def raise_not_shared(text: str) -> Any:
    """Raises in the receiving process."""
    raise UnsupportedError(text)


def rebuild_cuda_tensor(*arguments: Any) -> Any:
    """Enables vramp in the receiving process, and opens the tensor with PyTorch's function of that name.

    The arguments are that function's: programs change some of them on the way.
    """
    from torch.multiprocessing import reductions

    from . import enable

    try:
        enable()
    except InUseError as error:
        # A queue's own thread may print it and go on: the text says what to do.
        raise InUseError(_RECEIVER) from error
    return reductions.rebuild_cuda_tensor(*arguments)


def install_enabling() -> None:
    """Has the processes that receive CUDA tensors enable vramp."""
    import torch
    from torch.multiprocessing import reductions

    convert = reductions.reduce_tensor

    def converted(tensor: Any) -> Any:
        rebuild, arguments = convert(tensor)
        is_cuda = rebuild is reductions.rebuild_cuda_tensor
        return rebuild_cuda_tensor if is_cuda else rebuild, arguments

    # Nested tensors are converted by PyTorch's other functions, which call this one.
    reductions.reduce_tensor = converted
    for kind in {torch.Tensor, torch.nn.parameter.Parameter, *torch._tensor_classes}:
        ForkingPickler.register(kind, converted)


def prepared() -> Callable[[], None]:
    """Returns what replaces PyTorch's conversion of CUDA tensors and storages for other processes."""
    import torch
    from torch.multiprocessing import reductions

    def guarded(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def converted(value: Any) -> Any:
            if value.device.type != "cuda":
                return convert(value)
            print(f"vramp: a CUDA tensor was not sent to another process. {_TEXT}", file=sys.stderr)
            return raise_not_shared, (_TEXT,)

        return converted

    converters = {
        torch.Tensor: guarded(reductions.reduce_tensor),
        torch.nn.parameter.Parameter: guarded(reductions.reduce_tensor),
        torch.UntypedStorage: guarded(reductions.reduce_storage),
    }

    def install() -> None:
        for kind, convert in converters.items():
            ForkingPickler.register(kind, convert)

    return install
