"""Arenas for caches: tensors at fixed addresses, whose pages get and give up memory together.

    import vramp.kv

    # keys and values of 32 layers, up to 2 GiB each; addresses only
    arena = vramp.kv.arena(vramp.pool(), tensors=64, size="2GiB")
    keys = arena.tensor(0, torch.float16, (-1, 16, 8, 128))     # of layer 0; graphs keep its address

    arena.commit(range(4))         # the first 4 pages of all tensors have memory now, or none has
    arena.park([1, 2])             # not needed: mapped still, and other requests of the process may have the memory
    arena.commit([2])              # no driver call
    arena.release()                # what is parked is the card's

An access to a page without memory is a fault of the card, which ends the process's work there. The guide is
docs/kv.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, SupportsIndex

from . import _native
from ._errors import RangeError, UnsupportedError
from ._native import Array, KvArena, Pool
from ._types import KvStats

if TYPE_CHECKING:
    import torch

__all__ = ["Arena", "KvStats", "arena"]

_Size = SupportsIndex | str


class Arena(KvArena):
    """Tensors whose pages are committed together. Threads may share it. `arena` makes one."""

    def array(
        self,
        tensor: int | None = None,
        shape: int | Sequence[int] | None = None,
        dtype: object = None,
    ) -> Array:
        """Returns an array of a tensor, counted from 0, or without a number of all addresses.

        Libraries read it by `__cuda_array_interface__`, DLPack or, on the simulator, NumPy's protocol. By default it
        has bytes, as many as there are. Tensors that lie interleaved have no arrays of their own.
        """
        offset, size = self._part(tensor)
        return self.view(shape, dtype, offset=offset, size=size)

    def flat(self, dtype: torch.dtype | str, offset: int = 0, size: int | None = None) -> torch.Tensor:
        """Returns a tensor of torch over addresses: all, or `size` bytes from `offset` on. It has one dimension.

        Tensors keep the addresses: `close` raises InUseError while there are some.
        """
        import torch

        kind = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        return torch.from_dlpack(self.view(offset=offset, size=size)).view(kind)

    def tensor(self, tensor: int, dtype: torch.dtype | str, shape: Sequence[int] | None = None) -> torch.Tensor:
        """Returns a tensor of the arena, counted from 0, as torch has it. One length of the shape may be -1.

        Of tensors that lie interleaved the result has a dimension of pages first, and `shape` is that of one page.
        """
        if self.layout == "separate":
            offset, size = self._part(tensor)
            flat = self.flat(dtype, offset, size)
            return flat if shape is None else flat.view(*_inferred(shape, flat.numel()))
        self._check(tensor)
        whole = self.flat(dtype)
        pages = whole.view(self.pages, self.tensors, -1)[:, tensor]
        return pages if shape is None else pages.unflatten(1, _inferred(shape, pages.shape[1]))

    def _part(self, tensor: int | None) -> tuple[int, int]:
        """Returns offset and length of a tensor."""
        if tensor is None:
            return 0, self.size
        self._check(tensor)
        if self.layout != "separate":
            raise UnsupportedError(
                "a tensor that lies interleaved is not contiguous: use arena.tensor, or array() for all of them"
            )
        each = self.size // self.tensors
        return tensor * each, each

    def _check(self, tensor: int) -> None:
        if not 0 <= tensor < self.tensors:
            raise RangeError(f"there are {self.tensors} tensors, counted from 0, and not {tensor}")


def _inferred(shape: Sequence[int], count: int) -> list[int]:
    """Returns a shape of at most `count` elements, with its -1 replaced."""
    lengths = [int(length) for length in shape]
    if -1 in lengths:
        rest = math.prod(length for length in lengths if length != -1)
        lengths[lengths.index(-1)] = count // rest if rest > 0 else 0
    if math.prod(lengths) != count:
        raise RangeError(f"the shape {tuple(shape)} has {math.prod(lengths)} elements, and the tensor {count}")
    return lengths


def arena(
    pool: Pool | None = None,
    *,
    tensors: int,
    size: _Size,
    page: _Size = "2MiB",
    superpage: _Size | None = None,
    layout: Literal["separate", "interleaved"] = "separate",
    limit: _Size | None = None,
    ahead: _Size = 0,
) -> Arena:
    """Reserves addresses for `tensors` of `size` bytes each. One driver call at most, and no memory.

    `pool` is by default that of device 0. `page` is what gets memory at once of each tensor, and `superpage` the
    longest handle, by default a page: neighbours that are committed at once share one, for fewer driver calls, and it
    goes back once none of them is in use. With "separate" each tensor is contiguous;
    with "interleaved" page p of all tensors lies side by side, and is one handle. `limit` is the most memory that the
    arena may have, and `ahead` the most that a thread makes ready before it is needed. Sizes are bytes, or texts such
    as "8GiB".

    Raises RangeError for sizes that no arena can have, and UnsupportedError for presets other than vramp.
    """
    return Arena(
        _native.pool() if pool is None else pool,
        tensors=tensors,
        size=size,
        page=page,
        superpage=0 if superpage is None else superpage,
        layout=layout,
        limit=limit,
        ahead=ahead,
    )
