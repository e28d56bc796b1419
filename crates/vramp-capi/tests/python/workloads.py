"""A workloads file for the benchmark driver."""

import sys

import torch

assert sys.argv[1:] == ["small"]


def w_small(steps=2):
    for step in range(steps):
        block = torch.take((step % 2 + 1) * 4 << 20)
        loss = torch.Tensor(1 / (step + 1))
        loss.backward()
        torch.give(block)
        yield


W = {name[2:]: value for name, value in globals().items() if name.startswith("w_")}
sys.exit("what follows W is not run")
