"""Dask workers whose data may be larger than the card.

    from distributed import Client
    import vramp.dask

    with vramp.dask.LocalCluster() as cluster, Client(cluster) as client:
        ...

`LocalCluster` starts a worker for each card. Its data is a `TieredMapping`: least recently used values leave
the card for pinned host memory and the disk when the card runs short, and are restored for the tasks that
read them. `Plugin` makes vramp the allocator of the libraries in a worker. `dask worker --preload vramp.dask` does
both. Each can be used alone, with workers that another tool starts:

    Worker(scheduler, data=(vramp.dask.TieredMapping, {"memory_limit": "64GiB"}))
    client.register_plugin(vramp.dask.Plugin())

Needs Dask with `distributed`: pip install distributed.
"""

from __future__ import annotations

import logging

from .._adaptors import load as _load

_load("distributed", "distributed")

from . import _serializers  # noqa: E402, F401  registers them
from ._cluster import LocalCluster  # noqa: E402
from ._mapping import TieredMapping  # noqa: E402
from ._plugin import Plugin, spill_for_rmm  # noqa: E402
from ._preload import dask_setup  # noqa: E402
from ._spillable import register as register_with_dask_cuda  # noqa: E402

__all__ = ["LocalCluster", "Plugin", "TieredMapping", "dask_setup", "register_with_dask_cuda", "spill_for_rmm"]


try:
    register_with_dask_cuda()
except Exception as error:  # a dask-cuda without its own needs
    logging.getLogger("distributed.vramp").warning("dask-cuda does not know vramp's buffers: %s", error)
