"""Serializers of vramp's own objects in Dask's families `cuda` and `dask`, and their sizes.

| object | `cuda`, between cards | `dask`, through host memory | arrives as |
|---|---|---|---|
| `vramp.Buffer` | an array over a lease | its contents | a buffer |
| `LeasedArray` | itself | the buffer's contents | an array over a leased buffer |

A buffer is one of the tiers of the receiver's mapping, or of the process where it has none.
"""

from __future__ import annotations

from typing import Any

from dask.sizeof import sizeof
from distributed.protocol import dask_deserialize, dask_serialize
from distributed.protocol.cuda import cuda_deserialize, cuda_serialize

from .. import Buffer
from ._store import LeasedArray, tiers_of_process


@cuda_serialize.register(Buffer)
def _buffer_to_card(buffer: Buffer) -> tuple[dict[str, Any], list[Any]]:
    return {}, [LeasedArray(buffer)]


@dask_serialize.register(Buffer)
def _buffer_to_host(buffer: Buffer) -> tuple[dict[str, Any], list[Any]]:
    return {}, [buffer.read()]


@cuda_serialize.register(LeasedArray)
def _array_to_card(array: LeasedArray) -> tuple[dict[str, Any], list[Any]]:
    return {}, [array]


@dask_serialize.register(LeasedArray)
def _array_to_host(array: LeasedArray) -> tuple[dict[str, Any], list[Any]]:
    return {}, [array.buffer.read()]


@cuda_deserialize.register(Buffer)
@dask_deserialize.register(Buffer)
def _buffer(header: dict[str, Any], frames: list[Any]) -> Buffer:
    (frame,) = frames
    # Frames of this process are the memory itself, as for other arrays of the card.
    return frame.buffer if isinstance(frame, LeasedArray) else tiers_of_process().adopt(frame)


@cuda_deserialize.register(LeasedArray)
@dask_deserialize.register(LeasedArray)
def _array(header: dict[str, Any], frames: list[Any]) -> LeasedArray:
    return LeasedArray(_buffer(header, frames))


@sizeof.register(Buffer)
@sizeof.register(LeasedArray)
def _size(memory: Buffer | LeasedArray) -> int:
    return memory.nbytes
