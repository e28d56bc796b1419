"""What a worker process needs besides its data: vramp as the allocator of the libraries, and a limit.

The order matters: Numba keeps the allocator of its first context, and PyTorch that of its first use of CUDA.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Sequence
from typing import Any

from distributed import WorkerPlugin

from .. import pool
from .. import rmm as _rmm_adaptor
from ._mapping import TieredMapping
from ._reading import read_in_threads
from ._sending import receive_contents

logger = logging.getLogger("distributed.worker.vramp")

# Library, adaptor, and the adaptor's function.
_ALLOCATORS = {
    "numba": ("numba.cuda", "vramp.numba", "install"),
    "torch": ("torch", "vramp.torch", "enable"),
    "cupy": ("cupy", "vramp.cupy", "install"),
    "rmm": ("rmm", "vramp.rmm", "install"),
}


class Plugin(WorkerPlugin):
    """Makes vramp the allocator of the libraries in a worker, and sets the limit of its pool.

    - `allocators`: names out of "cupy", "rmm", "numba" and "torch". None is those that are installed; one
      that fails is then a warning in the worker's log. A name that is given must work.
    - `limit`: most bytes that the pool may reserve, or a text such as "80GiB" or "90%" of the card.

    On a simulated card no library can compute, and only the limit is set.
    """

    name = "vramp"

    def __init__(self, *, allocators: Sequence[str] | None = None, limit: int | str | None = None) -> None:
        for name in allocators or ():
            if name not in _ALLOCATORS:
                raise ValueError(f"allocators={name!r}: use {', '.join(sorted(_ALLOCATORS))}")
        self.allocators = None if allocators is None else tuple(allocators)
        self.limit = limit

    def setup(self, worker: Any) -> None:
        """Runs in each worker, before its first task."""
        shared = pool()
        if self.limit is not None:
            shared.limit = self.limit
        data = worker.data
        if isinstance(data, TieredMapping) and not hasattr(worker, "_vramp"):
            worker._vramp = True
            read_in_threads(worker, data)
            receive_contents(worker)
        if not shared.is_simulated:
            for name in _ALLOCATORS:
                if self.allocators is None or name in self.allocators:
                    self._install(name)
            if isinstance(data, TieredMapping) and self._uses("rmm"):
                spill_for_rmm(data)

    def _uses(self, name: str) -> bool:
        return name in self.allocators if self.allocators is not None else _is_installed(name)

    def _install(self, name: str) -> None:
        _library, adaptor, function = _ALLOCATORS[name]
        if not self._uses(name):
            return
        try:
            getattr(importlib.import_module(adaptor), function)()
        except Exception as error:
            if self.allocators is not None:
                raise
            logger.warning("vramp is not the allocator of %s in this worker: %s", name, error)


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(_ALLOCATORS[name][0]) is not None
    except ModuleNotFoundError:
        return False


def spill_for_rmm(mapping: TieredMapping) -> Any:
    """Makes room among a mapping's values when an allocation of RMM fails, for cuDF's temporaries too.

    It wraps RMM's current resource, of vramp or not, and returns the new one. `vramp.rmm.install()` alone does
    the same for memory of vramp's pool; other resources need this call.
    """
    rmm = _rmm_adaptor._rmm()
    current = rmm.mr.get_current_device_resource()
    made = _rmm_adaptor.spill_on_failure(mapping.make_room, current)
    rmm.mr.set_current_device_resource(made)
    return made
