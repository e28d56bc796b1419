"""Serializers of vramp's own objects in Dask's families `cuda` and `dask`, and their sizes.

| object | `cuda`, between cards | `dask`, through host memory | arrives as |
|---|---|---|---|
| `vramp.Buffer` | an array over a lease | its contents | a buffer |
| `LeasedArray` | itself | its contents | an array over a leased buffer |
| `vramp.Array` | itself | its contents | an array over a leased buffer, of the same shape and type |
| `vramp.Allocation` | an array of its bytes | its contents | an array over a leased buffer, of bytes |

So an array of a pool that a task returns is counted, leaves the card and is sent as others are, and the tasks that read
it get a `LeasedArray` once it has left. A buffer is one of the tiers of the receiver's mapping, or of the process where it has none.
"""

from __future__ import annotations

from typing import Any

from dask.sizeof import sizeof
from distributed.protocol import dask_deserialize, dask_serialize
from distributed.protocol.cuda import cuda_deserialize, cuda_serialize
from distributed.utils import nbytes

from .. import Allocation, Array, Buffer, pool
from ._store import LeasedArray, tiers_of_process


@cuda_serialize.register(Buffer)
def _buffer_to_card(buffer: Buffer) -> tuple[dict[str, Any], list[Any]]:
    return {}, [LeasedArray(buffer)]


@dask_serialize.register(Buffer)
def _buffer_to_host(buffer: Buffer) -> tuple[dict[str, Any], list[Any]]:
    return {}, [buffer.read()]


@cuda_serialize.register(LeasedArray)
@cuda_serialize.register(Array)
def _array_to_card(array: LeasedArray | Array) -> tuple[dict[str, Any], list[Any]]:
    return {"shape": array.shape, "dtype": array.dtype}, [array]


@dask_serialize.register(LeasedArray)
@dask_serialize.register(Array)
def _array_to_host(array: LeasedArray | Array) -> tuple[dict[str, Any], list[Any]]:
    if isinstance(array, LeasedArray):
        contents = array.buffer.read()[: array.nbytes]
    else:
        contents = tiers_of_process().adopt(array).read() if array.nbytes else b""
    return {"shape": array.shape, "dtype": array.dtype}, [contents]


@cuda_serialize.register(Allocation)
def _allocation_to_card(allocation: Allocation) -> tuple[dict[str, Any], list[Any]]:
    return _array_to_card(allocation.array())


@dask_serialize.register(Allocation)
def _allocation_to_host(allocation: Allocation) -> tuple[dict[str, Any], list[Any]]:
    return _array_to_host(allocation.array())


@cuda_deserialize.register(Buffer)
@dask_deserialize.register(Buffer)
def _buffer(header: dict[str, Any], frames: list[Any]) -> Buffer:
    (frame,) = frames
    # Frames of this process are the memory itself, as for other arrays of the card.
    return frame.buffer if isinstance(frame, LeasedArray) else tiers_of_process().adopt(frame)


@cuda_deserialize.register(LeasedArray)
@cuda_deserialize.register(Array)
@cuda_deserialize.register(Allocation)
@dask_deserialize.register(LeasedArray)
@dask_deserialize.register(Array)
@dask_deserialize.register(Allocation)
def _array(header: dict[str, Any], frames: list[Any]) -> LeasedArray | Array:
    (frame,) = frames
    shape, dtype = header["shape"], header["dtype"]
    if isinstance(frame, Array):
        return frame.allocation.array(shape, dtype) if frame.shape != tuple(shape) else frame
    if not isinstance(frame, LeasedArray):
        if not nbytes(frame):
            return pool().malloc(1).array(shape, dtype)
        frame = LeasedArray(tiers_of_process().adopt(frame))
    return frame.shaped(shape, dtype)


@sizeof.register(Buffer)
@sizeof.register(LeasedArray)
@sizeof.register(Array)
def _size(memory: Buffer | LeasedArray | Array) -> int:
    return memory.nbytes


@sizeof.register(Allocation)
def _size_of_allocation(allocation: Allocation) -> int:
    return allocation.size
