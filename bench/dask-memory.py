"""Dask clusters whose data is larger than card and host, with Dask's default settings: only the sizes of the worker
are given. Each case has a cluster of its own on the simulated card, whose memory counts as the process's, and has to
end with the right results.

    python bench/dask-memory.py [CASE ...]

For each case it prints the seconds, the most memory of a worker's process that Dask's monitor saw, and how often a
worker was paused. It ends with 1 if a case fails or takes longer than 120 s. Needs distributed and NumPy.
"""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python" / "tests" / "workers"))

import dask
import numpy as np
from distributed import Client, LocalCluster, wait

MIB = 1 << 20
LIMIT_S = 120
CARD = "96MiB"
HOST = "500MiB"


# Tasks. Values are arrays of the simulated card, vramp's own, or NumPy's.


def make(seed: int, nbytes: int) -> Any:
    from sim_array import on_card

    return on_card(np.arange(nbytes // 8, dtype=np.int64) * 7 + seed)


def make_own(seed: int, nbytes: int) -> Any:
    import vramp

    array = vramp.pool().malloc(nbytes).array(dtype="int64")
    np.asarray(array)[:] = seed
    return array


def make_host(seed: int, nbytes: int) -> Any:
    return np.full(nbytes // 8, seed, np.int64)


def part(value: Any, number: int, count: int) -> Any:
    from sim_array import on_card

    return on_card(value.view[number::count])


def join(parts: list[Any]) -> Any:
    from sim_array import on_card

    return on_card(np.concatenate([part.view for part in parts]))


def total(value: Any) -> int:
    plain = value if isinstance(value, np.ndarray) else np.asarray(value) if hasattr(value, "ptr") else value.view
    return int(plain.sum())


def expected(seed: int, nbytes: int) -> int:
    count = nbytes // 8
    return 7 * count * (count - 1) // 2 + seed * count


# Clusters.


@contextmanager
def cluster(host: str = HOST, card: str = CARD, **options: Any) -> Iterator[Client]:
    import vramp.dask

    with vramp.dask.LocalCluster(
        options.pop("devices", "sim:h200"), pool_limit=card, memory_limit=host, dashboard_address=None, **options
    ) as started, Client(started) as client:
        yield client


@contextmanager
def without_nanny() -> Iterator[Client]:
    with LocalCluster(n_workers=0, dashboard_address=None) as started, Client(started) as client:
        command = ["dask", "worker", started.scheduler_address, "--no-nanny", "--nthreads", "1", "--memory-limit", HOST]
        command += ["--no-dashboard", "--preload", "vramp.dask", "--pool-limit", CARD]
        paths = [str(Path(__file__).parent), *sys.path]
        variables = {**os.environ, "VRAMP_DEVICE": "sim:h200", "PYTHONPATH": os.pathsep.join(paths)}
        worker = subprocess.Popen([sys.executable, "-m", *command], env=variables, stderr=subprocess.DEVNULL)
        try:
            client.wait_for_workers(1, timeout=60)
            yield client
        finally:
            worker.terminate()
            worker.wait(30)


class Watch:
    """Looks at the workers of a client while it waits."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.peak = 0
        self.pauses = 0
        self._paused: set[str] = set()

    def look(self) -> None:
        for address, worker in self.client.scheduler_info(n_workers=-1)["workers"].items():
            self.peak = max(self.peak, worker["metrics"].get("memory", 0))
            if worker["status"] != "paused":
                self._paused.discard(address)
            elif address not in self._paused:
                self._paused.add(address)
                self.pauses += 1

    def results(self, futures: list[Any]) -> list[Any]:
        while any(future.status == "pending" for future in futures):
            self.look()
            time.sleep(0.1)
        self.look()
        return self.client.gather(futures)


# Cases.


def stay(client: Client, watch: Watch, make: Callable[..., Any] = make, count: int = 30, size: int = 32 * MIB) -> None:
    """Values are made one after the other, and stay."""
    values = [client.submit(make, seed, size, key=f"value{seed}") for seed in range(count)]
    sums = watch.results([client.submit(total, value) for value in values])
    of = (lambda seed: expected(seed, size)) if make is globals()["make"] else (lambda seed: seed * (size // 8))
    assert sums == [of(seed) for seed in range(count)]


def own_arrays(client: Client, watch: Watch) -> None:
    """As `stay`, with arrays of vramp's own."""
    stay(client, watch, make_own)


def host_values(client: Client, watch: Watch) -> None:
    """As `stay`, with NumPy's arrays between those of the card."""
    seeds = range(12)
    values = [client.submit(maker, seed, 24 * MIB, pure=False) for seed in seeds for maker in (make, make_host)]
    sums = watch.results([client.submit(total, value) for value in values])
    right = [(expected(seed, 24 * MIB), seed * 3 * MIB) for seed in seeds]
    assert sums == [each for pair in right for each in pair]


def shuffle(client: Client, watch: Watch) -> None:
    """Each of 16 results has a part of each of 16 values: four times the card, and four times again."""
    count, size = 16, 24 * MIB
    values = [client.submit(make, seed, size) for seed in range(count)]
    columns = [[client.submit(part, value, at, count) for value in values] for at in range(count)]
    joined = [client.submit(join, column) for column in columns]
    sums = watch.results([client.submit(total, each) for each in joined])
    assert sum(sums) == sum(expected(seed, size) for seed in range(count))


def two_chunks(client: Client, watch: Watch) -> None:
    """The worker has twice the memory of a value, beside the card's."""
    stay(client, watch, make_own, count=6, size=384 * MIB)


def small_values(client: Client, watch: Watch) -> None:
    """Four thousand values of 200 KiB, which go to pageable memory."""
    stay(client, watch, count=4000, size=200 << 10)


def restart(client: Client, watch: Watch) -> None:
    """The worker is restarted with half of the values made."""
    stay(client, watch, count=15)
    client.restart()
    stay(client, watch)


def late(client: Client, watch: Watch) -> None:
    """Results are fetched after all were made, as the client asks for them."""
    size = 16 * MIB
    values = [client.submit(make, seed, size) for seed in range(40)]
    wait(values)
    for seed, value in enumerate(values):
        watch.look()
        assert total(value.result()) == expected(seed, size)


def sweeps(client: Client, watch: Watch) -> None:
    """All values are read three times in turn, so that each read restores one."""
    size = 32 * MIB
    values = [client.submit(make, seed, size) for seed in range(20)]
    for _ in range(3):
        sums = watch.results([client.submit(total, value, pure=False) for value in values])
        assert sums == [expected(seed, size) for seed in range(20)]


def waves(client: Client, watch: Watch) -> None:
    """Values are dropped before the next ones are made. The later half needs no more than the first one."""
    peaks = []
    for wave in range(12):
        values = [client.submit(make, seed, 32 * MIB, key=f"{wave}-{seed}") for seed in range(12)]
        watch.results([client.submit(total, value, pure=False) for value in values])
        peaks.append(watch.peak)
        del values
    assert peaks[-1] < peaks[5] + 64 * MIB, peaks


def threads(client: Client, watch: Watch) -> None:
    """Four threads make values of 8 MiB at a time."""
    stay(client, watch, count=100, size=8 * MIB)


CASES: dict[str, tuple[Callable[[Client, Watch], None], Callable[[], Any]]] = {
    "stay": (stay, cluster),
    "own-arrays": (own_arrays, cluster),
    "host-values": (host_values, cluster),
    "shuffle": (shuffle, cluster),
    "shuffle-two-workers": (shuffle, lambda: cluster(devices="sim:h200x2")),
    "two-chunks": (two_chunks, lambda: cluster(host="1228MiB", card="460MiB")),
    "small-values": (small_values, cluster),
    "restart": (restart, cluster),
    "late": (late, cluster),
    "sweeps": (sweeps, cluster),
    "waves": (waves, cluster),
    "threads": (threads, lambda: cluster(threads_per_worker=4)),
    "without-nanny": (stay, without_nanny),
}


def run(name: str) -> None:
    body, started = CASES[name]
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="vramp-dask-") as directory:
        dask.config.set({"temporary-directory": directory})
        with started() as client:
            watch = Watch(client)
            body(client, watch)
            took, peak = time.monotonic() - begin, watch.peak / MIB
            print(f"{name:<20} {took:6.1f} s  {peak:5.0f} MiB  paused {watch.pauses} times", flush=True)


def main(names: list[str]) -> int:
    if len(names) == 1:
        run(names[0])
        return 0
    failed = 0
    for name in names or CASES:
        # A process of its own, with the output of the workers in a file unless it fails.
        with tempfile.TemporaryFile("w+") as log:
            code = subprocess.run([sys.executable, __file__, name], stderr=log).returncode
            if code != 0:
                failed += 1
                log.seek(0)
                print(f"{name:<20} FAILED\n{log.read()[-4000:]}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
