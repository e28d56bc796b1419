"""Two processes with a card each, over NCCL: DDP, FSDP2, tensor parallelism, a pipeline, symmetric memory, registered
memory, and 1,000 all-reduces in a captured graph whose inputs were allocated before and freed after the capture."""

import os
import socket
import sys

import torch
import torch.distributed as distributed
import torch.multiprocessing as multiprocessing
from report import digest, finish, mlp, seed, skip

CARDS = 2


def train(model, steps=10, batch=32):
    """Losses of a few steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        output = model(torch.randn(batch, 256, device="cuda"))
        loss = output.square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def data_parallel():
    return train(torch.nn.parallel.DistributedDataParallel(mlp()))


def fully_sharded():
    from torch.distributed.fsdp import fully_shard

    model = mlp()
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer)
    return train(fully_shard(model))


def tensor_parallel():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10)).cuda()
    mesh = init_device_mesh("cuda", (CARDS,))
    return train(parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}))


def pipeline(rank):
    sums = []
    for step in range(50):
        if rank == 0:
            distributed.send(torch.full((1 << 18,), float(step), device="cuda"), 1)
            back = torch.empty(1 << 18, device="cuda")
            distributed.recv(back, 1)
            sums.append(back[0].item())
        else:
            received = torch.empty(1 << 18, device="cuda")
            distributed.recv(received, 0)
            distributed.send(received * 2, 0)
    return sums


def symmetric(rank):
    import torch.distributed._symmetric_memory as memory

    buffer = memory.empty(1 << 20, dtype=torch.float32, device=f"cuda:{rank}")
    handle = memory.rendezvous(buffer, distributed.group.WORLD)
    buffer.fill_(rank + 1)
    handle.barrier()
    other = handle.get_buffer(1 - rank, (1 << 20,), torch.float32).clone()
    handle.barrier()
    return [other.mean().item()]


def graphed(rank):
    sums = []
    inputs = [torch.full((1 << (12 + index),), float(rank + 1), device="cuda") for index in range(8)]
    distributed.all_reduce(inputs[0].clone())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [tensor.clone() for tensor in inputs]
        for result in results:
            distributed.all_reduce(result)
        for tensor in inputs:
            distributed.all_reduce(tensor, op=distributed.ReduceOp.MAX)
    for cycle in range(1000):
        graph.replay()
        # Memory around the registered buffers comes and goes.
        kept = [torch.empty((cycle % 11 + 1) << 20, dtype=torch.uint8, device="cuda") for _ in range(3)]
        del kept
        if cycle % 100 == 0:
            torch.cuda.empty_cache()
            sums.append(sum(result[0].item() for result in results))
    del inputs
    torch.cuda.empty_cache()
    large = [torch.zeros(1 << 26, dtype=torch.uint8, device="cuda") for _ in range(8)]
    torch.cuda.synchronize()
    graph.reset()
    return sums + [float(sum(int(tensor.sum()) for tensor in large))]


def registered(rank):
    vramp = sys.modules.get("vramp.torch")
    pool = vramp.comm_pool() if vramp and vramp.is_enabled() else torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        buffer = torch.ones(1 << 22, device="cuda")
    backend = distributed.group.WORLD._get_backend(torch.device("cuda", rank))
    backend.register_mem_pool(pool)
    for _ in range(100):
        distributed.all_reduce(buffer, op=distributed.ReduceOp.AVG)
    backend.deregister_mem_pool(pool)
    return [buffer.mean().item()]


def member(rank, port, results):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(CARDS))
    torch.cuda.set_device(rank)
    distributed.init_process_group("nccl", device_id=torch.device("cuda", rank))
    numbers = []
    for part in (data_parallel, fully_sharded, tensor_parallel):
        seed()
        numbers += part()
    for part in (pipeline, symmetric, graphed, registered):
        numbers += part(rank)
    torch.cuda.synchronize()
    distributed.destroy_process_group()
    if rank == 0:
        results.put(numbers)


def main():
    if torch.cuda.device_count() < CARDS or not distributed.is_nccl_available():
        skip("it needs two cards and NCCL")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    multiprocessing.spawn(member, (port, results), nprocs=CARDS)
    numbers = results.get()
    finish(numbers=numbers, contents=digest(torch.tensor(numbers)))


if __name__ == "__main__":
    main()
