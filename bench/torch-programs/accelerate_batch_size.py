"""accelerate's search for a batch size that fits: it runs out of memory on purpose, and tries less."""

import torch
from report import finish, mlp, needs, seed

with needs("accelerate"):
    from accelerate.utils import find_executable_batch_size

seed()
total = torch.cuda.get_device_properties(0).total_memory
torch.cuda.set_per_process_memory_fraction(1.5 * (1 << 30) / total)
tried = []


@find_executable_batch_size(starting_batch_size=1 << 20)
def train(batch_size):
    tried.append(batch_size)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(3):
        # 8 KiB a row: 131,072 rows take 1 GiB, and more than 196,608 do not fit.
        rows = torch.zeros(batch_size, 2048, device="cuda")
        loss = model(rows[:64, :256]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        del rows
    return losses


losses = train()
# The last step is near the limit, where another allocator may need one step more.
finish(losses, {"tried": tried[:10], "found": 131_072 <= tried[-1] <= 196_608})
