"""A cluster of two processes, each with a simulated card that is too small for its data."""

from __future__ import annotations

import os
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pytest
from clusters import LIMIT, MIB, cluster, random_block, to_host
from distributed import Client, wait
from sim_array import SimArray, on_card

import vramp

SIDE = 512
"""Of a chunk: 2 MiB of float64."""


@pytest.fixture(scope="module")
def shared() -> Iterator[Client]:
    with cluster() as client:
        yield client


@pytest.fixture
def client(shared: Client) -> Iterator[Client]:
    yield shared
    shared.cancel(list(shared.futures.values()))
    shared.run(clear_metrics)


def clear_metrics(dask_worker: Any) -> None:
    dask_worker.data.cumulative_metrics.clear()


def array(seed: int, chunks: tuple[tuple[int, ...], ...]) -> da.Array:
    """Returns an array of the card with a chunk for each number from `seed` on."""
    name = f"random-{seed}-{len(chunks[0])}"
    layer = {}
    for number, at in enumerate(np.ndindex(*map(len, chunks))):
        shape = tuple(sizes[index] for sizes, index in zip(chunks, at, strict=True))
        layer[(name, *at)] = (random_block, seed + number, shape)
    meta = on_card(np.zeros((0,) * len(chunks)))
    return da.Array(layer, name, chunks, meta=meta)


def on_host(seed: int, rows: int, columns: int) -> np.ndarray[Any, Any]:
    """Returns what `array` has, for so many chunks."""
    numbers = range(seed, seed + rows * columns)
    blocks = [np.random.default_rng(number).random((SIDE, SIDE)) for number in numbers]
    return np.block([blocks[row * columns : (row + 1) * columns] for row in range(rows)])


def chunks_on_host(client: Client, result: da.Array) -> np.ndarray[Any, Any]:
    """Returns an array whose chunks are copied to the host one at a time."""
    meta = np.zeros((0,) * result.ndim)
    gathered = client.compute(result.map_blocks(to_host, dtype=result.dtype, meta=meta)).result()
    return np.asarray(gathered)


def totals(client: Client) -> dict[tuple[str, str], float]:
    """Returns the metrics of all workers, added."""
    added: dict[tuple[str, str], float] = {}
    for metrics in client.run(lambda dask_worker: dict(dask_worker.data.cumulative_metrics)).values():
        for name, value in metrics.items():
            added[name] = added.get(name, 0) + value
    return added


def reserved_peak(dask_worker: Any) -> int:
    return vramp.pool().stats().reserved_peak


def test_a_matrix_product_of_three_times_the_limit_is_right(client: Client) -> None:
    long, short = (SIDE,) * 8, (SIDE,) * 2
    a, b = client.persist([array(1000, (long, short)), array(2000, (short, long))])
    product = client.persist(a @ b)
    wait(product)
    size = a.nbytes + b.nbytes + product.nbytes
    assert size == 3 * (2 * LIMIT)
    vector = np.random.default_rng(3).random(8 * SIDE)
    expected = on_host(1000, 8, 2) @ (on_host(2000, 2, 8) @ vector)
    np.testing.assert_allclose(chunks_on_host(client, product) @ vector, expected)
    assert totals(client)["host-write", "bytes"] >= size - 2 * LIMIT
    assert all(peak <= LIMIT for peak in client.run(reserved_peak).values())


def test_a_transposition_of_three_times_the_limit_is_right(client: Client) -> None:
    flat = client.persist(array(3000, ((SIDE // 2,) * 12, (2 * SIDE,) * 8)))
    assert flat.nbytes == 3 * (2 * LIMIT)
    turned = client.persist(flat.rechunk((2 * SIDE, SIDE // 2)).T)
    wait(turned)
    blocks = [np.random.default_rng(3000 + number).random((SIDE // 2, 2 * SIDE)) for number in range(96)]
    expected = np.block([blocks[row * 8 : row * 8 + 8] for row in range(12)]).T
    np.testing.assert_array_equal(chunks_on_host(client, turned), expected)


def split(first: SimArray, second: SimArray, bound: float) -> list[SimArray]:
    values = np.concatenate([first.view, second.view])
    return [on_card(values[values < bound]), on_card(values[values >= bound])]


def take(parts: list[SimArray], number: int) -> SimArray:
    return parts[number]


def in_order(block: SimArray) -> SimArray:
    return on_card(np.sort(block.view))


def test_a_sort_of_three_times_the_limit_is_right(client: Client) -> None:
    """Pairs of chunks exchange their lower and upper values, by one bit of their numbers after the other."""
    bits, length = 6, 3 * MIB // 8
    blocks = [client.submit(random_block, 4000 + number, (length,), key=f"b-{number}") for number in range(1 << bits)]
    assert (length * 8) << bits == 3 * (2 * LIMIT)
    wait(blocks)
    for bit in reversed(range(bits)):
        step = 1 << bit
        for low in (number for number in range(1 << bits) if not number & step):
            group = low >> (bit + 1) << (bit + 1)
            bound = (group + step) / (1 << bits)
            parts = client.submit(split, blocks[low], blocks[low + step], bound, key=f"split-{bit}-{low}")
            for side in (0, 1):
                blocks[low + side * step] = client.submit(take, parts, side, key=f"take-{bit}-{low}-{side}")
            del parts
    done = [client.submit(in_order, block, key=f"sorted-{at}") for at, block in enumerate(blocks)]
    del blocks
    ranges = client.gather([client.submit(to_host, each, key=f"host-{at}") for at, each in enumerate(done)])
    values = np.concatenate([np.random.default_rng(4000 + number).random(length) for number in range(1 << bits)])
    np.testing.assert_array_equal(np.concatenate(ranges), np.sort(values))


def test_spilled_bytes_are_in_the_scheduler_and_on_the_prometheus_page(client: Client) -> None:
    kept = client.persist(array(5000, ((2 * MIB // 8,) * 48,)))
    wait(kept)
    before = client.run(lambda dask_worker: tuple(dask_worker.data.spilled_total))
    assert sum(memory for memory, _disk in before.values()) >= kept.nbytes - 2 * LIMIT

    async def heartbeat(dask_worker: Any) -> None:
        await dask_worker.heartbeat()

    client.run(heartbeat)
    for address, info in client.scheduler_info(n_workers=-1)["workers"].items():
        memory, disk = before[address]
        assert info["metrics"]["spilled_bytes"] == {"memory": memory, "disk": disk}
        page = f"http://{info['host']}:{info['services']['dashboard']}/metrics"
        lines = urllib.request.urlopen(page, timeout=30).read().decode().splitlines()
        values = dict(line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        assert float(values['dask_worker_memory_bytes{type="spilled"}']) == disk > 0
        assert float(values['dask_worker_spill_bytes_total{activity="host-write"}']) >= disk


def test_what_left_the_card_is_sent_without_a_restore(client: Client) -> None:
    first, second = client.scheduler_info(n_workers=-1)["workers"]
    made = [
        client.submit(random_block, 6000 + number, (2 * MIB // 8,), workers=[first], key=f"made-{number}")
        for number in range(24)
    ]
    wait(made)

    def spilled(dask_worker: Any) -> list[str]:
        return [key for key in dask_worker.data.slow if key.startswith("made")]

    away = client.run(spilled, workers=[first])[first]
    assert len(away) >= 24 - LIMIT // (2 * MIB)
    client.run(clear_metrics)
    values = [client.submit(to_host, made[int(key[5:])], workers=[second], key=f"sent-{key}") for key in away]
    for key, value in zip(away, client.gather(values), strict=True):
        np.testing.assert_array_equal(value, np.random.default_rng(6000 + int(key[5:])).random(2 * MIB // 8))
    metrics = client.run(lambda dask_worker: dict(dask_worker.data.cumulative_metrics), workers=[first])[first]
    assert metrics.get(("host-read", "count"), 0) == 0
    assert set(client.run(spilled, workers=[first])[first]) >= set(away)


def test_a_client_gets_what_left_the_card(client: Client) -> None:
    made = [client.submit(random_block, 7000 + number, (2 * MIB // 8,), key=f"own-{number}") for number in range(48)]
    wait(made)
    for number in (0, 1, 47):
        value = made[number].result()
        assert isinstance(value, SimArray)
        np.testing.assert_array_equal(value.to_host(), np.random.default_rng(7000 + number).random(2 * MIB // 8))


def counted(block: SimArray, folder: str, number: int) -> SimArray:
    (Path(folder) / f"{number}-{os.getpid()}-{os.urandom(4).hex()}").touch()
    return block + number


def total(block: SimArray) -> float:
    return float(block.view.sum())


def contains_itself() -> dict[str, Any]:
    value: dict[str, Any] = {"x": 1}
    value["self"] = value
    return value


def test_a_result_that_contains_itself_ends_the_task(client: Client) -> None:
    result = client.submit(contains_itself)
    wait(result, timeout=30)
    assert result.status == "finished"
    assert client.submit(lambda value: value["self"]["self"]["x"], result).result(timeout=30) == 1


def test_a_worker_killed_in_the_middle_loses_what_dask_recomputes(tmp_path: Path) -> None:
    count = 40
    with cluster() as client:
        blocks = [client.submit(random_block, 8000 + at, (2 * MIB // 8,), key=f"block-{at}") for at in range(count)]
        done = [
            client.submit(counted, block, str(tmp_path), at, key=f"counted-{at}") for at, block in enumerate(blocks)
        ]
        wait(done)
        assert len(list(tmp_path.iterdir())) == count
        held = client.who_has(done)
        processes = client.run(os.getpid)
        victim = next(iter(processes))
        lost = sum(holders == (victim,) for holders in held.values())
        os.kill(processes[victim], signal.SIGKILL)
        sums = client.gather([client.submit(total, each) for each in done])
        for at, value in enumerate(sums):
            expected = np.random.default_rng(8000 + at).random(2 * MIB // 8).sum() + at * (2 * MIB // 8)
            assert value == pytest.approx(expected)
        assert 0 < lost < count
        assert len(list(tmp_path.iterdir())) <= count + lost
        client.run(lambda: vramp.pool().audit())


def test_a_limit_that_is_none_is_refused_before_a_worker_starts() -> None:
    with pytest.raises(vramp.OptionError, match="device_memory_limit"), cluster(device_memory_limit=-1):
        pass


def test_a_cluster_has_a_worker_for_each_card_and_no_more() -> None:
    with cluster(n_workers=1) as client:
        assert len(client.scheduler_info(n_workers=-1)["workers"]) == 1
        assert client.run(lambda: vramp.pool().device) == {
            next(iter(client.scheduler_info(n_workers=-1)["workers"])): "sim:h200"
        }
        client.cluster.scale(2)
        client.wait_for_workers(2, timeout=60)
        with pytest.raises(ValueError, match="each has a worker"):
            client.cluster.new_worker_spec()
