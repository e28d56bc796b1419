"""A memory history recorded, dumped, loaded and drawn, whose blocks are the statistics' bytes."""

import os
import pickle
import tempfile

import torch
from report import finish, mlp, seed
from torch.cuda import _memory_viz

seed()
torch.cuda.memory._record_memory_history(max_entries=100_000)
model = mlp()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
losses = []
for _ in range(5):
    data, target = torch.randn(64, 256, device="cuda"), torch.randint(0, 10, (64,), device="cuda")
    loss = torch.nn.functional.cross_entropy(model(data), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "snapshot.pickle")
    torch.cuda.memory._dump_snapshot(path)
    with open(path, "rb") as file:
        snapshot = pickle.load(file)
allocated = torch.cuda.memory_allocated()
blocks = [part for segment in snapshot["segments"] for part in segment["blocks"]]
held = sum(part["size"] for part in blocks if part["state"] == "active_allocated")
trace = snapshot["device_traces"][0]
live = {}
for event in trace:
    if event["action"] == "alloc":
        live[event["addr"]] = event["size"]
    elif event["action"] == "free_completed":
        live.pop(event["addr"])
actions = {action: sum(event["action"] == action for event in trace) for action in ("alloc", "free_requested", "free_completed")}
for text in (_memory_viz.trace_plot(snapshot), _memory_viz.segment_plot(snapshot), _memory_viz.segsum(snapshot), _memory_viz.trace(snapshot)):
    assert text
named = any("snapshot_file.py" in frame["filename"] for event in trace for frame in event["frames"])
finish(losses, {"held": held == allocated, "live": len(live), "actions": actions, "named": named})
