"""torch.compile: a training loop, and an inference with changing sizes."""

import torch
from report import digest, finish, mlp, seed

seed()
model = mlp()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)


@torch.compile
def step(data, target):
    return torch.nn.functional.cross_entropy(model(data), target)


losses = []
for _ in range(20):
    loss = step(torch.randn(64, 256, device="cuda"), torch.randint(0, 10, (64,), device="cuda"))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
inference = torch.compile(model, dynamic=True)
with torch.no_grad():
    outputs = [inference(torch.randn(rows, 256, device="cuda")) for rows in (1, 7, 64, 100, 33)]
finish(losses + [output.mean() for output in outputs], contents=digest(*outputs))
