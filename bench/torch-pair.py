#!/usr/bin/env python3
"""Measures an allocation and free through PyTorch's allocator class, natively and on vramp.

    torch-pair.py [--sizes 512,65536,8388608] [--threads 1,4] [--rounds 5] [--pairs 200000]

Prints a line of JSON for each size and number of threads: nanoseconds for a pair that the allocator's cache
serves, the median of the rounds, for `native` and `vramp`, and vramp's share of native's time. A loop in C++
calls the class that PyTorch calls for each tensor, without Python and without PyTorch's tensors. The rounds of
both alternate, each in a process of its own. Needs the package vramp, a C++ compiler and a card; without a card it
runs on the fake runtime of the tests, whose times of the allocators' own code are the machine's:

    LD_PRELOAD=$(python python/tests/torch/fake_cuda/build.py) FAKE_CUDA_MEMORY=8589934592 bench/torch-pair.py
"""

import argparse
import ctypes
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

LOOP = """
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>
#include <c10/cuda/CUDACachingAllocator.h>

// Returns the nanoseconds of a pair in the thread that took longest.
extern "C" __attribute__((visibility("default"))) double pair_ns(size_t size, size_t pairs, int threads) {
  auto* allocator = c10::cuda::CUDACachingAllocator::get();
  std::vector<double> took(threads);
  std::vector<std::thread> running;
  std::atomic<int> waiting{threads};
  for (int thread = 0; thread < threads; ++thread) {
    running.emplace_back([&, thread] {
      auto loop = [&](size_t count) {
        for (size_t pair = 0; pair < count; ++pair) {
          auto block = allocator->allocate(size);
        }
      };
      loop(pairs / 10);
      --waiting;
      while (waiting > 0) {
      }
      auto start = std::chrono::steady_clock::now();
      loop(pairs);
      std::chrono::duration<double, std::nano> spent = std::chrono::steady_clock::now() - start;
      took[thread] = spent.count() / static_cast<double>(pairs);
    });
  }
  for (auto& thread : running) {
    thread.join();
  }
  return *std::max_element(took.begin(), took.end());
}
"""


def measure(allocator, library, cases, pairs):
    """Prints the nanoseconds of each case, in a process that uses one allocator."""
    import torch

    if allocator == "vramp":
        import vramp.torch

        vramp.torch.enable()
    torch.cuda.init()
    # As much as a program has besides: what is freed is cached, and the peak is above it.
    kept = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    pair_ns = ctypes.CDLL(library).pair_ns
    pair_ns.restype = ctypes.c_double
    pair_ns.argtypes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)
    print(json.dumps([pair_ns(size, pairs, threads) for size, threads in cases]))
    del kept


def compiled(folder):
    """Compiles the loop with the command that compiles vramp's class."""
    import torch
    from vramp.torch import _build

    source, library = Path(folder) / "pair.cpp", Path(folder) / "pair.so"
    source.write_text("#include <algorithm>\n" + LOOP)
    command = _build.command(torch, library)
    command[command.index(str(_build._SOURCES / "allocator.cpp"))] = str(source)
    subprocess.run(command, check=True)
    return library


def main():
    """Runs the rounds and prints the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="512,65536,8388608")
    parser.add_argument("--threads", default="1,4")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=200_000)
    parser.add_argument("--measure", nargs=2, metavar=("ALLOCATOR", "LIBRARY"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes, threads = ([int(one) for one in text.split(",")] for text in (options.sizes, options.threads))
    cases = [(size, count) for size in sizes for count in threads]
    if options.measure:
        measure(*options.measure, cases, options.pairs)
        return
    took = {"native": [], "vramp": []}
    with tempfile.TemporaryDirectory() as folder:
        library = compiled(folder)
        for _ in range(options.rounds):
            for allocator, rounds in took.items():
                command = [sys.executable, *sys.argv, "--measure", allocator, str(library)]
                output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
                rounds.append(json.loads(output.splitlines()[-1]))
    for index, (size, count) in enumerate(cases):
        found = {name: statistics.median(round[index] for round in rounds) for name, rounds in took.items()}
        line = {"size": size, "threads": count}
        line |= {f"{name}_ns": round(ns, 1) for name, ns in found.items()}
        print(json.dumps(line | {"vramp_to_native": round(found["vramp"] / found["native"], 3)}))


if __name__ == "__main__":
    main()
