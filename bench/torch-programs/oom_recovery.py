"""Running out of memory and going on: the exception, its text, the retry with less, the observer."""

import gc

import torch
from report import finish, mlp, seed

seed()
total = torch.cuda.get_device_properties(0).total_memory
torch.cuda.set_per_process_memory_fraction(2 * (1 << 30) / total)
model = mlp()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
seen = []
torch._C._cuda_attach_out_of_memory_observer(lambda device, asked, total, free: seen.append(asked))


def attempt(mebibytes):
    ballast = torch.empty(mebibytes << 20, dtype=torch.uint8, device="cuda")
    data, target = torch.randn(64, 256, device="cuda"), torch.randint(0, 10, (64,), device="cuda")
    loss = torch.nn.functional.cross_entropy(model(data), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    del ballast
    return loss.detach()


losses, refused = [], []
for number in range(12):
    size = 8192
    while True:
        try:
            losses.append(attempt(size))
            break
        except torch.cuda.OutOfMemoryError as error:
            assert str(error).startswith("CUDA out of memory. Tried to allocate"), str(error)
            refused.append(size)
        gc.collect()
        torch.cuda.empty_cache()
        size //= 2
stats = torch.cuda.memory_stats()
finish(losses, {"refused": refused, "seen": len(seen), "num_ooms": stats["num_ooms"]})
