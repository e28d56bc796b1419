"""Memory pools beside ordinary tensors: nested, freed, and used by a graph."""

import torch
from report import digest, finish, seed

seed()
pool, other = torch.cuda.MemPool(), torch.cuda.MemPool()
with torch.cuda.use_mem_pool(pool):
    first = torch.randn(1 << 20, device="cuda")
    with torch.cuda.use_mem_pool(other):
        second = torch.randn(1 << 20, device="cuda")
    third = first + 1
outside = second * 2


def live(pool):
    return sum(part["state"] == "active_allocated" for segment in pool.snapshot() for part in segment["blocks"])


counts = [live(pool), live(other)]
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, pool=pool.id):
    result = (first * 3).relu()
graph.replay()
counts.append(live(pool))
contents = digest(first, second, third, outside, result)
del first, third, result, graph
torch.cuda.empty_cache()
counts.append(live(pool))
del pool, other, second, outside
torch.cuda.empty_cache()
finish(facts={"counts": counts, "left": torch.cuda.memory_allocated()}, contents=contents)
