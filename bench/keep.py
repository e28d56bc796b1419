"""Measures kept memory: how long an open takes, how long a hand-over of an epoch takes, and what kills leave.

    python bench/keep.py open --gib 16 --readers 4        # opened by other processes; one copy on the card
    python bench/keep.py epochs --gib 8 --epochs 1000 --kills 20
    python bench/keep.py write                            # what a write to memory for reading only does

Prints one line of JSON; the exit code is 1 if a byte was wrong, or if something is left. On a card it needs PyTorch;
without one it runs on the simulated card, with NumPy: use small sizes there.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import vramp
import vramp.keep

GIB = 1 << 30
LIMIT = 60.0
"""Seconds that any step of another process may take."""


class Memory:
    """Kept memory as 64-bit numbers, by PyTorch on a card and NumPy on the simulator."""

    def __init__(self, kept: vramp.keep.Kept, count: int) -> None:
        array = kept.array((count,), "int64")
        self.torch: Any = None
        if array.__dlpack_device__()[0] == 2:
            import torch

            self.torch = torch
            self.numbers = torch.utils.dlpack.from_dlpack(array.__dlpack__(stream=1))
        else:
            import numpy

            self.numbers = numpy.asarray(array)

    def fill(self, value: int) -> None:
        self.numbers[:] = value
        self.synchronize()

    def is_all(self, value: int) -> bool:
        # In parts, which need little memory.
        step = 1 << 25
        return all(
            bool((self.numbers[at : at + step] == value).all()) for at in range(0, len(self.numbers), step)
        )

    def synchronize(self) -> None:
        if self.torch is not None:
            self.torch.cuda.synchronize()


def free_bytes() -> int:
    """Free memory of the card, by another process's count."""
    out = subprocess.run(
        ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(out.stdout.split()[0]) << 20


def pool() -> vramp.Pool:
    return vramp.pool()


class Other:
    """A process that runs one of this file's roles."""

    def __init__(self, directory: str, role: str, *arguments: object) -> None:
        command = [sys.executable, __file__, "role", directory, role, *map(str, arguments)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def line(self) -> Any:
        assert self.process.stdout is not None
        text = self.process.stdout.readline()
        if not text:
            raise SystemExit(f"{self.process.args} ended with {self.process.wait()}")
        return json.loads(text)

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate(timeout=LIMIT)


def say(value: object) -> None:
    print(json.dumps(value), flush=True)


def wait() -> None:
    sys.stdin.readline()


def publish(keeper: vramp.keep.Keeper, count: int) -> None:
    """Publishes numbers that are all 1, and waits to be killed."""
    draft = keeper.draft("bench", 8 * count, pool=pool())
    begin = time.perf_counter()
    draft.place(8 * count)
    placed = time.perf_counter()
    Memory(draft, count).fill(1)
    begin_commit = time.perf_counter()
    draft.commit_draft(b"", bytes(32))
    end = time.perf_counter()
    say({"place_ms": (placed - begin) * 1e3, "commit_ms": (end - begin_commit) * 1e3})
    wait()


def read(keeper: vramp.keep.Keeper, count: int, times: int) -> None:
    """Opens the memory several times, and keeps it open."""
    with vramp.open(pool().device_info.id) as warm, warm.malloc(1 << 20):
        pass
    opens, closes = [], []
    for _ in range(times):
        begin = time.perf_counter()
        kept = keeper.open("bench", pool=pool())
        opened = time.perf_counter()
        good = Memory(kept, count).is_all(1)
        begin_close = time.perf_counter()
        kept.close()
        closes.append(time.perf_counter() - begin_close)
        opens.append(opened - begin)
    kept = keeper.open("bench", pool=pool())
    memory = Memory(kept, count)
    good = good and memory.is_all(1)
    if memory.torch is not None:
        memory.torch.cuda.empty_cache()
    say({"good": good, "open_ms": [1e3 * each for each in opens], "close_ms": [1e3 * each for each in closes]})
    wait()


def write(keeper: vramp.keep.Keeper, count: int) -> None:
    """Writes to memory for reading only."""
    kept = keeper.open("bench", pool=pool())
    memory = Memory(kept, count)
    try:
        memory.fill(2)
        say({"error": None})
    except (RuntimeError, ValueError) as error:
        say({"error": str(error).splitlines()[0]})


def train(keeper: vramp.keep.Keeper, count: int, stamps: str) -> None:
    """Writes one epoch after the other."""
    with open(stamps, "r+b") as file:
        times = mmap.mmap(file.fileno(), 0)
    kept = keeper.open("bench", readonly=False, lock="none", pool=pool())
    memory = Memory(kept, count)
    say("ready")
    while True:
        epoch = kept.write(timeout=LIMIT) + 1
        if 8 * epoch + 8 > len(times):
            kept.release_unchanged()
            break
        memory.fill(epoch)
        times[8 * epoch : 8 * epoch + 8] = struct.pack("d", time.monotonic())
        kept.commit()
    say("done")


def engine(keeper: vramp.keep.Keeper, count: int, stamps: str) -> None:
    """Takes each epoch between two of its steps, and checks it."""
    with open(stamps, "r+b") as file:
        times = mmap.mmap(file.fileno(), 0)
    last = len(times) // 8 - 1
    while True:
        try:
            kept = keeper.open("bench", pool=pool(), timeout=LIMIT)
            break
        except vramp.TornError:
            time.sleep(0.001)
    memory = Memory(kept, count)
    memory.is_all(0)
    say("ready")
    epoch, wrong, torn, torn_at, handed, paused = kept.epoch, 0, 0, 0, [], []
    while epoch < last:
        begin = time.monotonic()
        try:
            now = kept.yield_to_writer(timeout=LIMIT)
        except vramp.TornError:
            torn += epoch != torn_at
            torn_at = epoch
            time.sleep(0.001)
            continue
        end = time.monotonic()
        if now == epoch:
            continue
        epoch = now
        (committed,) = struct.unpack("d", times[8 * epoch : 8 * epoch + 8])
        handed.append(1e3 * (end - committed))
        paused.append(1e3 * (end - begin))
        wrong += not memory.is_all(epoch)
    say({"wrong": wrong, "torn": torn, "handed_ms": handed, "paused_ms": paused})


def of(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "median": round(statistics.median(ordered), 3),
        "p99": round(ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))], 3),
        "max": round(ordered[-1], 3),
        "count": len(ordered),
    }


def measure_open(directory: str, gib: float, readers: int) -> int:
    count = int(gib * GIB) // 8
    on_card = not pool().device_info.is_simulated
    publisher = Other(directory, "publish", count)
    made = publisher.line()
    publisher.kill()
    used = []
    found = []
    others = []
    for _ in range(readers):
        others.append(Other(directory, "read", count, 5))
        found.append(others[-1].line())
        used.append(free_bytes() if on_card else 0)
    for other in others:
        other.kill()
    say(
        {
            "gib": gib,
            "readers": readers,
            **made,
            "open_ms": of([each for one in found for each in one["open_ms"]]),
            "first_open_ms": [round(one["open_ms"][0], 3) for one in found],
            "close_ms": of([each for one in found for each in one["close_ms"]]),
            "good": all(one["good"] for one in found),
            "used_on_card_gib": [round(each / GIB, 2) for each in used],
        }
    )
    return 0 if all(one["good"] for one in found) else 1


def measure_write(directory: str, gib: float) -> int:
    count = int(gib * GIB) // 8
    publisher = Other(directory, "publish", count)
    publisher.line()
    publisher.kill()
    refused = Other(directory, "write", count).line()
    reader = Other(directory, "read", count, 1)
    good = reader.line()["good"]
    reader.kill()
    say({**refused, "others_read_what_was_committed": good})
    return 0 if good and refused["error"] is not None else 1


def measure_epochs(directory: str, gib: float, epochs: int, kills: int) -> int:
    count = int(gib * GIB) // 8
    stamps = Path(directory) / "stamps"
    stamps.write_bytes(bytes(8 * (epochs + 1)))
    publisher = Other(directory, "publish", count)
    publisher.line()
    publisher.kill()
    choice = random.Random(1)
    keeper = vramp.keep.connect(directory, start=False)
    trainer = Other(directory, "train", count, stamps)
    reader = Other(directory, "engine", count, stamps)
    trainer.line(), reader.line()
    began = time.perf_counter()
    for index in range(kills):
        # In the middle of whatever it does.
        target = 1 + (index + 1) * epochs // (kills + 1)
        while keeper.entries()[0].epoch < target - 1:
            time.sleep(0.001)
        time.sleep(choice.random() * 0.01)
        trainer.kill()
        trainer = Other(directory, "train", count, stamps)
        trainer.line()
    report = reader.line()
    seconds = time.perf_counter() - began
    trainer.line()
    left = [entry for entry in keeper.entries() if entry.waiting or entry.draft_pid]
    say(
        {
            "gib": gib,
            "epochs": epochs,
            "kills": kills,
            "seconds": round(seconds, 1),
            "torn": report["torn"],
            "wrong": report["wrong"],
            "handed_over_ms": of(report["handed_ms"]),
            "engine_paused_ms": of(report["paused_ms"]),
            "left": len(left),
        }
    )
    return 1 if report["wrong"] or left else 0


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("what", choices=["open", "epochs", "write"])
    options.add_argument("--gib", type=float, default=1.0)
    options.add_argument("--readers", type=int, default=4)
    options.add_argument("--epochs", type=int, default=1000)
    options.add_argument("--kills", type=int, default=0)
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        directory = str(Path(folder) / "keep")
        keeper = vramp.keep.connect(directory)
        try:
            match given.what:
                case "open":
                    return measure_open(directory, given.gib, given.readers)
                case "write":
                    return measure_write(directory, given.gib)
                case _:
                    return measure_epochs(directory, given.gib, given.epochs, given.kills)
        finally:
            keeper.stop()


ROLES = {"publish": publish, "read": read, "write": write, "train": train, "engine": engine}

if __name__ == "__main__":
    if sys.argv[1:2] == ["role"]:
        ROLES[sys.argv[3]](
            vramp.keep.connect(sys.argv[2], start=False),
            *(int(each) if each.isdigit() else each for each in sys.argv[4:]),
        )
    else:
        sys.exit(main())
