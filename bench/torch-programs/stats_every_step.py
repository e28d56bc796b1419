"""A training loop that reads every statistic and prints the summary, as loggers do."""

import torch
from report import finish, mlp, seed

seed()
model = mlp()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
losses, names, wrong = [], set(), []
for number in range(50):
    torch.cuda.reset_peak_memory_stats()
    data, target = torch.randn(64 + number, 256, device="cuda"), torch.randint(0, 10, (64 + number,), device="cuda")
    loss = torch.nn.functional.cross_entropy(model(data), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
    stats = torch.cuda.memory_stats()
    names |= set(stats)
    for pool in ("all", "small_pool", "large_pool"):
        current, peak = (stats[f"allocated_bytes.{pool}.{kind}"] for kind in ("current", "peak"))
        active, reserved = (stats[f"{name}_bytes.{pool}.current"] for name in ("active", "reserved"))
        if not 0 <= current <= peak or not current <= active <= reserved:
            wrong.append((number, pool, current, peak, active, reserved))
    blocks = [part for segment in torch.cuda.memory_snapshot() for part in segment["blocks"]]
    held = sum(part["size"] for part in blocks if part["state"] == "active_allocated")
    if held != torch.cuda.memory_allocated():
        wrong.append((number, "snapshot", held, torch.cuda.memory_allocated()))
    if number % 10 == 0:
        assert "Allocated memory" in torch.cuda.memory_summary()
assert not wrong, wrong[:5]
finish(losses, {"names": sorted(names), "allocated": torch.cuda.memory_allocated()})
