"""torch.cuda.make_graphed_callables: forward and backward of two modules as graphs of one pool."""

import torch
from report import digest, finish, mlp, seed

seed()
first, second = mlp(), torch.nn.Linear(10, 10).cuda()
sample = torch.randn(64, 256, device="cuda"), torch.randn(64, 10, device="cuda", requires_grad=True)
first, second = torch.cuda.make_graphed_callables((first, second), ((sample[0],), (sample[1],)))
optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=1e-2)
losses = []
for _ in range(20):
    data, target = torch.randn(64, 256, device="cuda"), torch.randint(0, 10, (64,), device="cuda")
    loss = torch.nn.functional.cross_entropy(second(first(data)), target)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
finish(losses, contents=digest(*first.parameters()))
