"""What tests on a real cluster share: two worker processes, each with a small simulated card."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import dask
import numpy as np
from distributed import Client
from sim_array import SimArray, on_card

import vramp.dask

MIB = 1 << 20
LIMIT = 32 * MIB
"""Of each of the two cards: 16 chunks."""


@contextmanager
def cluster(**options: Any) -> Iterator[Client]:
    # A message holds the values that it sends, and the cards are small.
    settings = {
        "distributed.worker.transfer.message-bytes-limit": "4MiB",
        "distributed.scheduler.active-memory-manager.start": False,
    }
    with dask.config.set(settings), vramp.dask.LocalCluster(
        "sim:h200x2", memory_limit=None, pool_limit=LIMIT, dashboard_address=None, **options
    ) as started, Client(started) as client:
        yield client


def random_block(seed: int, shape: tuple[int, ...]) -> SimArray:
    return on_card(np.random.default_rng(seed).random(shape))


def to_host(block: SimArray) -> np.ndarray[Any, Any]:
    return block.to_host()
