"""torch.compile(mode="reduce-overhead"): graph trees with their pools, checkpoints and live outputs."""

import torch
from report import digest, finish, mlp, seed

seed()
model = mlp()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
compiled = torch.compile(model, mode="reduce-overhead")
losses = []
for _ in range(15):
    torch.compiler.cudagraph_mark_step_begin()
    data, target = torch.randn(64, 256, device="cuda"), torch.randint(0, 10, (64,), device="cuda")
    loss = torch.nn.functional.cross_entropy(compiled(data), target)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    losses.append(loss.detach().clone())

# Two compiled functions, called in changing order, make a tree with branches.
first = torch.compile(lambda x: (x @ x.t()).relu() + 1, mode="reduce-overhead")
second = torch.compile(lambda x: (x * 2).sin().sum(0), mode="reduce-overhead")
kept = []
with torch.no_grad():
    for number in range(24):
        torch.compiler.cudagraph_mark_step_begin()
        data = torch.randn(64, 64, device="cuda")
        middle = first(data)
        last = second(middle) if number % 3 else second(data) + middle.sum()
        kept.append(last.clone())
        del middle, last
torch._dynamo.reset()
finish(losses + [tensor.mean() for tensor in kept], contents=digest(*kept))
