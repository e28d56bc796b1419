"""Values that another library spills, and what dask-cuda knows of values of vramp.

dask-cuda has two registries. `is_spillable_object` says which values its own mapping leaves alone, and
`get_device_memory_objects` which objects own the memory on the card under a value. `register` adds vramp's
buffers and arrays to both, where dask-cuda is installed.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from typing import Any

_lock = threading.Lock()
_registered = False


def is_managed_elsewhere(value: object) -> bool:
    """Returns whether another library spills a value: cuDF's with its option `spill`, and what dask-cuda's
    `is_spillable_object` names."""
    dispatch = sys.modules.get("dask_cuda.is_spillable_object")
    if dispatch is not None:
        return bool(dispatch.is_spillable_object(value))
    cudf = sys.modules.get("cudf")
    if cudf is None or not isinstance(value, (cudf.DataFrame, cudf.Series, cudf.Index)):
        return False
    return bool(cudf.get_option("spill"))


def register() -> bool:
    """Registers vramp's objects with dask-cuda. Returns False where it is not installed.

    Calling it again changes nothing. Raises what dask-cuda's import raises.
    """
    global _registered
    with _lock:
        if _registered:
            return True
        if importlib.util.find_spec("dask_cuda") is None:
            return False
        from dask_cuda.get_device_memory_objects import dispatch
        from dask_cuda.is_spillable_object import is_spillable_object

        register_with(is_spillable_object, dispatch)
        _registered = True
        return True


def register_with(is_spillable_object: Any, get_device_memory_objects: Any) -> None:
    """Registers vramp's objects with two of Dask's dispatches, as dask-cuda has them."""
    from .. import Allocation, Array, Buffer
    from ._store import LeasedArray

    is_spillable_object.register(Buffer, lambda _buffer: True)
    is_spillable_object.register(LeasedArray, lambda _array: True)
    get_device_memory_objects.register(Buffer, lambda buffer: [buffer])
    get_device_memory_objects.register(LeasedArray, lambda array: [array.buffer])
    get_device_memory_objects.register(Array, lambda array: [array.allocation])
    get_device_memory_objects.register(Allocation, lambda allocation: [allocation])
