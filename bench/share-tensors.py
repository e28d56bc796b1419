#!/usr/bin/env python3
"""Measures tensors that are sent to another process, on one card.

    share-tensors.py [--cycles 10000] [--size 1073741824] [--opens 12] [--native]

Prints one line of JSON: times to open a tensor of `size` bytes in another process, to send and free `cycles` small
ones, and what both processes hold before and after; then a producer and a consumer are killed. Tensors are opened in
three ways: the first of the process, those in memory that was not sent before (`new`), and those in memory that was
(`again`). Exits with 1 if anything is left behind, if opening takes 0.5 ms or more, or a cycle 0.7 ms or more.
"""

import argparse
import json
import os
import signal
import statistics
import sys
import time

import torch
import torch.multiprocessing as multiprocessing

SECONDS = 120
OPEN_LIMIT = 0.0005
CYCLE_LIMIT = 0.0007


def enable():
    if not os.environ.get("SHARE_TENSORS_NATIVE"):
        import vramp.torch

        vramp.torch.enable()


def held():
    """Descriptors and memory of this process."""
    torch.cuda.ipc_collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    # The other process closes its side of connections a moment later.
    time.sleep(0.3)
    return len(os.listdir("/proc/self/fd")), torch.cuda.memory_allocated()


def serve(requests, answers):
    """The other process."""
    enable()
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    kept = []
    for what, arguments in iter(requests.get, None):
        if what == "open":
            rebuild, parts = arguments
            begin = time.perf_counter()
            tensor = rebuild(*parts)
            seconds = time.perf_counter() - begin
            answers.put((seconds, float(tensor[-1])))
            del tensor, parts
        elif what == "sum":
            answers.put(float(arguments.sum()))
        elif what == "held":
            answers.put(held())
        elif what == "keep":
            kept.append(arguments)
            answers.put(True)
        elif what == "make":
            kept.append(torch.full((1000,), 3.0, device="cuda"))
            answers.put(kept[-1])
        del arguments


class Other:
    def __init__(self):
        context = multiprocessing.get_context("spawn")
        self.requests, self.answers = context.Queue(), context.Queue()
        self.process = context.Process(target=serve, args=(self.requests, self.answers), daemon=True)
        self.process.start()

    def call(self, what, arguments=None):
        self.requests.put((what, arguments))
        del arguments
        return self.answers.get(timeout=SECONDS)

    def kill(self):
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cycles", type=int, default=10_000)
    parser.add_argument("--size", type=int, default=1 << 30)
    parser.add_argument("--opens", type=int, default=12, help="of each way; as many tensors are live at once")
    parser.add_argument("--native", action="store_true")
    options = parser.parse_args()
    if options.native:
        os.environ["SHARE_TENSORS_NATIVE"] = "1"
    enable()
    other = Other()

    def opened(number, kept=None):
        large = torch.full((options.size,), number, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        seconds, last = other.call("open", multiprocessing.reductions.reduce_tensor(large))
        assert last == number
        if kept is not None:
            kept.append(large)
        return seconds

    kept = []
    first = opened(0, kept)
    new = [opened(number, kept) for number in range(1, options.opens + 1)]
    kept.clear()
    # Each is freed before the next is made.
    again = [opened(number) for number in range(options.opens)]
    for _ in range(50):
        other.call("sum", torch.ones(1000, device="cuda"))
    before = held(), other.call("held")
    begin = time.perf_counter()
    for number in range(options.cycles):
        small = torch.full((1000,), float(number), device="cuda")
        assert other.call("sum", small) == number * 1000.0
        del small
    cycle = (time.perf_counter() - begin) / options.cycles
    after = held(), other.call("held")

    received = Other()
    mine = received.call("make")
    received.kill()
    survives = options.native or float(mine.sum()) == 3000.0
    del mine
    kept = torch.full((1000,), 5.0, device="cuda")
    other.call("keep", kept)
    other.kill()
    usable = float(kept.sum()) == 5000.0
    result = {
        "open_first_ms": round(first * 1e3, 3),
        "open_new_ms": round(statistics.median(new) * 1e3, 3),
        "open_new_max_ms": round(max(new) * 1e3, 3),
        "open_again_ms": round(statistics.median(again) * 1e3, 3),
        "open_again_max_ms": round(max(again) * 1e3, 3),
        "cycle_us": round(cycle * 1e6, 1),
        "before": before,
        "after": after,
        "tensor_of_killed_producer_is_usable": survives,
        "tensor_of_killed_consumer_is_usable": usable,
    }
    print(json.dumps(result))
    slowest = max(statistics.median(new), statistics.median(again))
    fast = options.native or (slowest < OPEN_LIMIT and cycle < CYCLE_LIMIT)
    sys.exit(0 if before == after and survives and usable and fast else 1)


if __name__ == "__main__":
    main()
