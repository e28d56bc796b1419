"""Fifteen streams that work beside one behind a long kernel, which uses a block in a thousand or in ten."""

import os
import random
import time
from collections import deque

# With the usual 8 queues to the card some of the streams wait behind the kernel by themselves.
os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"

import torch
from report import finish, seed

SIZES = [512, 40 << 10, 700 << 10, 2 << 20, 9 << 20, 33 << 20, 64 << 20]
SLOW_CYCLES = 8_000_000_000
"""Some seconds of any card: the work of the other streams takes less."""


def round_of(every):
    """Returns the seconds until the fast streams are done with 10,000 blocks."""
    fast = [torch.cuda.Stream() for _ in range(15)]
    slow = torch.cuda.Stream()
    chosen, live = random.Random(1), deque()
    torch.cuda.synchronize()
    with torch.cuda.stream(slow):
        torch.cuda._sleep(SLOW_CYCLES)
    start = time.perf_counter()
    for number in range(10_000):
        with torch.cuda.stream(fast[number % len(fast)]):
            block = torch.empty(chosen.choice(SIZES), dtype=torch.uint8, device="cuda")
            block.fill_(number % 251)
            if number and number % every == 0:
                block.record_stream(slow)
            live.append(block)
            if len(live) > 40:
                live.popleft()
    for stream in fast:
        stream.synchronize()
    seconds = time.perf_counter() - start
    # Otherwise the time says nothing of waits.
    assert not slow.query(), "the slow stream is done: use a longer kernel"
    torch.cuda.synchronize()
    return seconds


def main():
    seed()
    # The first launch of a kernel loads its code, which waits for all work.
    for size in SIZES:
        torch.empty(size, dtype=torch.uint8, device="cuda").fill_(1)
    torch.cuda._sleep(1)
    torch.cuda.empty_cache()
    for every in (10_000, 1000, 10):
        torch.cuda.reset_peak_memory_stats()
        seconds = round_of(every)
        reserved = torch.cuda.max_memory_reserved() / 2**20
        allocated = torch.cuda.max_memory_allocated() / 2**20
        print(
            f"1 of {every}: fast streams done in {seconds:.3f} s,"
            f" {reserved:.0f} MiB reserved, {allocated:.0f} allocated"
        )
        torch.cuda.empty_cache()
    finish(facts={"rounds": 3})


if __name__ == "__main__":
    main()
