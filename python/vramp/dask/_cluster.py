"""A cluster of this machine with a worker for each card."""

from __future__ import annotations

import copy
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distributed import LocalCluster as _LocalCluster
from distributed.worker_memory import parse_memory_limit

from .._errors import DeviceError
from ._limits import Limit, parse_card_limit
from ._mapping import TieredMapping
from ._plugin import Plugin
from ._preload import host_limit

logger = logging.getLogger("distributed.deploy.vramp")


class LocalCluster(_LocalCluster):
    """A `distributed.LocalCluster` with a worker for each card, whose data is a `TieredMapping`.

    - `devices`: numbers or UUIDs of cards, as a list or a text such as "0,2"; or a simulated machine such as
      "sim:h200x2". None is `VRAMP_DEVICE` if it names a simulated machine, else `CUDA_VISIBLE_DEVICES`, else
      all cards.
    - `n_workers`: the first so many of them.
    - `device_memory_limit`, `memory_limit`: of each worker, as in `TieredMapping`. `memory_limit` is also what
      Dask's monitor compares the process with; "auto" is a worker's share of the machine.
    - `pool_limit`, `allocators`: as `limit` and `allocators` of `Plugin`.

    All else is as in `distributed.LocalCluster`.
    """

    def __init__(
        self,
        devices: str | Sequence[int | str] | None = None,
        *,
        n_workers: int | None = None,
        threads_per_worker: int = 1,
        device_memory_limit: Limit = None,
        memory_limit: int | float | str | None = "auto",
        pool_limit: int | str | None = None,
        allocators: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> None:
        self._environments = environments(devices)
        count = len(self._environments) if n_workers is None else n_workers
        if not 1 <= count <= len(self._environments):
            raise ValueError(f"n_workers={n_workers}: there are {len(self._environments)} cards, and each has one worker")
        if not kwargs.pop("processes", True):
            raise ValueError("processes=False: each card has a process of its own")
        parse_card_limit("device_memory_limit", device_memory_limit)  # raises here, and not in each worker
        memory = parse_memory_limit(memory_limit, nthreads=1, total_cores=count, logger=logger)
        limits = {"device_memory_limit": device_memory_limit, "memory_limit": host_limit(memory)}
        kwargs.setdefault("data", (TieredMapping, limits))
        plugins = (*kwargs.pop("plugins", ()), Plugin(allocators=allocators, limit=pool_limit))
        super().__init__(
            n_workers=0,
            threads_per_worker=threads_per_worker,
            memory_limit=memory or 0,
            processes=True,
            plugins=plugins,
            **kwargs,
        )
        self.scale(count)
        if not self.asynchronous:
            self.sync(self._correct_state)

    def new_worker_spec(self) -> dict[int, Any]:
        """Returns the worker of the first card that has none. Raises ValueError if all have one."""
        free = [number for number in range(len(self._environments)) if number not in self.worker_spec]
        if not free:
            raise ValueError(f"there are {len(self._environments)} cards, and each has a worker")
        spec = copy.copy(self.new_spec)
        given = self.new_spec["options"].get("env") or {}
        spec["options"] = {**spec["options"], "env": {**given, **self._environments[free[0]]}}
        return {free[0]: spec}


def environments(devices: str | Sequence[int | str] | None) -> list[dict[str, str]]:
    """Returns the variables of each worker: its card is the first one that it sees, the others follow.

    Raises DeviceError if there is no card.
    """
    simulated = devices if isinstance(devices, str) else os.environ.get("VRAMP_DEVICE", "") if devices is None else ""
    if simulated.startswith("sim"):
        return _simulated(simulated)
    if devices is None:
        devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    if devices is None:
        devices = _cards()
    if isinstance(devices, str):
        devices = devices.split(",")
    names = [str(device).strip() for device in devices if str(device).strip()]
    for name in names:
        if not re.fullmatch(r"\d+|(GPU|MIG)-\S+", name):
            raise ValueError(f"devices={name!r}: a card is a number, or a UUID that begins with GPU- or MIG-")
    if not names:
        raise DeviceError("there is no card: name a simulated one with devices='sim:h200x2'")
    return [{"CUDA_VISIBLE_DEVICES": ",".join(names[at:] + names[:at])} for at in range(len(names))]


def _simulated(name: str) -> list[dict[str, str]]:
    """Returns the workers of a simulated machine. Each process simulates its own card."""
    card, _x, count = name.partition("x") if re.search(r"x\d+$", name) else (name, "", "1")
    return [{"VRAMP_DEVICE": card} for _ in range(int(count))]


def _cards() -> list[int | str]:
    """Returns the numbers of the machine's cards, without a context of CUDA in this process."""
    found = (re.fullmatch(r"nvidia(\d+)", path.name) for path in Path("/dev").glob("nvidia*"))
    return list(range(sum(match is not None for match in found)))
