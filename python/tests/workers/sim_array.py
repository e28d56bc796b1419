"""An array library for the simulated card: NumPy computes on memory of vramp's pool.

It has what Dask asks of a library for the card: its types are not NumPy's, results take memory of the pool,
and its serializers are of the families `cuda` (frames on the card) and `dask` (frames on the host).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from dask.array.dispatch import concatenate_lookup, tensordot_lookup
from dask.sizeof import sizeof
from distributed.protocol import dask_deserialize, dask_serialize
from distributed.protocol.cuda import cuda_deserialize, cuda_serialize

import vramp


class SimArray(np.lib.mixins.NDArrayOperatorsMixin):
    """A dense array in memory of the shared pool, or over memory that something else owns."""

    __array_priority__ = 100.0

    def __init__(self, view: np.ndarray[Any, Any], memory: Any) -> None:
        self.view = view
        self.memory = memory
        """The bytes that the view is all of: a vramp.Array, or an array over a leased buffer."""
        self.shape, self.dtype, self.ndim = view.shape, view.dtype, view.ndim
        self.nbytes, self.size = view.nbytes, view.size

    def __len__(self) -> int:
        return len(self.view)

    def __getitem__(self, at: Any) -> Any:
        return wrap(self.view[_plain(at)])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        raise TypeError("an array of the card is not copied to the host by accident: use to_host()")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **kwargs: Any) -> Any:
        return wrap(getattr(ufunc, method)(*_plain(inputs), **_plain(kwargs)))

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return wrap(func(*_plain(args), **_plain(kwargs)))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "view":
            raise AttributeError(name)
        attribute = getattr(self.view, name)
        if not callable(attribute):
            return wrap(attribute)

        def call(*args: Any, **kwargs: Any) -> Any:
            return wrap(attribute(*_plain(args), **_plain(kwargs)))

        return call

    def to_host(self) -> np.ndarray[Any, Any]:
        return self.view.copy()


def _plain(value: Any) -> Any:
    """Returns arguments with NumPy's arrays in the place of those of the card."""
    if isinstance(value, SimArray):
        return value.view
    if isinstance(value, (list, tuple)):
        return type(value)(map(_plain, value))
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return value


def wrap(value: Any) -> Any:
    """Returns a result in memory of the card."""
    if isinstance(value, tuple):
        return tuple(map(wrap, value))
    return on_card(value) if isinstance(value, (np.ndarray, np.generic)) else value


def on_card(value: Any) -> SimArray:
    """Copies an array to the card."""
    value = np.asarray(value)
    memory = vramp.pool().malloc(max(1, value.nbytes)).array(value.nbytes)
    view = _view(memory, value.shape, value.dtype)
    view[...] = value
    return SimArray(view, memory)


def _view(memory: Any, shape: Any, dtype: Any) -> np.ndarray[Any, Any]:
    return np.asarray(memory).view(dtype).reshape(shape)


def full(shape: Any, value: float) -> SimArray:
    """Returns an array of one value, of float64."""
    return on_card(np.full(shape, value))


@sizeof.register(SimArray)
def _sizeof(array: SimArray) -> int:
    return array.nbytes


@cuda_serialize.register(SimArray)
def _to_card_frames(array: SimArray) -> tuple[dict[str, Any], list[Any]]:
    return {"shape": array.shape, "dtype": array.dtype.str}, [array.memory]


@cuda_deserialize.register(SimArray)
def _from_card_frames(header: dict[str, Any], frames: list[Any]) -> SimArray:
    (memory,) = frames
    return SimArray(_view(memory, header["shape"], header["dtype"]), memory)


@dask_serialize.register(SimArray)
def _to_host_frames(array: SimArray) -> tuple[dict[str, Any], list[Any]]:
    return {"shape": array.shape, "dtype": array.dtype.str}, [array.to_host().tobytes()]


@dask_deserialize.register(SimArray)
def _from_host_frames(header: dict[str, Any], frames: list[Any]) -> SimArray:
    return on_card(np.frombuffer(frames[0], header["dtype"]).reshape(header["shape"]))


@concatenate_lookup.register(SimArray)
def _concatenate(arrays: Any, axis: int = 0, **kwargs: Any) -> SimArray:
    return wrap(np.concatenate(_plain(arrays), axis=axis))


@tensordot_lookup.register(SimArray)
def _tensordot(a: Any, b: Any, axes: Any = 2) -> SimArray:
    return wrap(np.tensordot(_plain(a), _plain(b), axes=axes))
