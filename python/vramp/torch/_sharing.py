"""Sending CUDA tensors to other processes on the pluggable route, which has no functions for it: an error at
the receiver instead of a wait without end.

A queue of torch.multiprocessing converts tensors on a thread of its own. An exception there is printed,
and the receiver waits for ever. So what cannot be shared is sent as an object that raises when it is
received.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from .._errors import UnsupportedError

_TEXT = (
    "vramp shares CUDA memory with other processes on its compiled route alone: install a C++ compiler "
    "(`python -m vramp doctor`), or send a copy in host memory (tensor.cpu())"
)


def raise_not_shared(text: str) -> Any:
    """Raises in the receiving process."""
    raise UnsupportedError(text)


def prepared() -> Callable[[], None]:
    """Returns what replaces PyTorch's conversion of CUDA tensors and storages for other processes."""
    from multiprocessing.reduction import ForkingPickler

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
