"""Workers that another tool starts: `dask worker --preload vramp.dask`, or `preload=` of a `Nanny`.

Dask imports the module when it makes a worker, and calls `dask_setup` before the worker has a task. The options
follow those of Dask on the command line, or are in `preload_argv=`.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from typing import Any

import click
import dask
from distributed.spill import SpillBuffer

from ._mapping import TieredMapping
from ._plugin import Plugin


@click.command()
@click.option("--device-memory-limit", help="Most bytes of values on the card, such as 30GiB, or 0.8 of it.")
@click.option("--pool-limit", help="Most bytes of the worker's pool, such as 70GiB or 90%.")
@click.option("--allocators", help="Libraries that vramp allocates for, such as cupy,rmm. All by default.")
def dask_setup(worker: Any, device_memory_limit: str | None, pool_limit: str | None, allocators: str | None) -> None:
    """Keeps a worker's data on the card, the host and the disk, and makes vramp the allocator of its libraries."""
    keep_in_tiers(worker, device_memory_limit)
    names = None if allocators is None else [name.strip() for name in allocators.split(",") if name.strip()]
    Plugin(allocators=names, limit=pool_limit).setup(worker)


def keep_in_tiers(worker: Any, device_memory_limit: str | None) -> None:
    """Makes a worker's data a `TieredMapping` with the worker's limits, if it is what Dask makes by itself."""
    manager = worker.memory_manager
    if not _is_dasks_own(worker.data):
        return
    if worker.data:
        raise RuntimeError(f"the worker has {len(worker.data)} keys already: set it up before its first task")
    manager.data = worker.state.data = TieredMapping(
        os.fspath(worker.local_directory),
        device_memory_limit=device_memory_limit,
        memory_limit=host_limit(manager.memory_limit),
        max_spill=manager.max_spill or None,
    )


def _is_dasks_own(data: MutableMapping[Any, Any]) -> bool:
    return type(data) is dict or isinstance(data, SpillBuffer)


def host_limit(memory: int | None) -> int | None:
    """Returns the bytes on the host of which a mapping moves contents to the disk: Dask's target."""
    target = dask.config.get("distributed.worker.memory.target")
    return None if memory is None else int(memory * (target or 1.0))
