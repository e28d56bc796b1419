"""torch.cuda.graph: a whole training step captured and replayed, and two graphs that share a pool."""

import torch
from report import digest, finish, mlp, seed

seed()
model = mlp()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
data, target = torch.randn(64, 256, device="cuda"), torch.randint(0, 10, (64,), device="cuda")


def step():
    optimizer.zero_grad(set_to_none=True)
    loss = torch.nn.functional.cross_entropy(model(data), target)
    loss.backward()
    optimizer.step()
    return loss


side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(3):
        step()
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    loss = step()
losses = []
for number in range(20):
    data.copy_(torch.randn(64, 256, device="cuda"))
    target.copy_(torch.randint(0, 10, (64,), device="cuda"))
    graph.replay()
    losses.append(loss.detach().clone())

pool = torch.cuda.graph_pool_handle()
source = torch.zeros(1 << 16, device="cuda")
graphs, outputs = [], []
for factor in (1, 2, 3):
    graphs.append(torch.cuda.CUDAGraph())
    with torch.cuda.graph(graphs[-1], pool=pool):
        middle = source * factor + 1
        outputs.append((middle * middle)[::1024].clone())
        del middle
results = []
for number in range(10):
    source.fill_(number)
    for replayed in graphs:
        replayed.replay()
    results += [output.clone() for output in outputs]
expected = [(n * f + 1.0) ** 2 for n in range(10) for f in (1, 2, 3)]
wrong = [number for number, wanted in enumerate(expected) if not (results[number] == wanted).all()]
finish(losses, {"results": len(results), "wrong": wrong}, digest(*results))
assert not wrong, f"replays {wrong} of {len(results)} have other results than the eager computation"
