"""torch.profiler with profile_memory: events of the card's memory, by operator and as a timeline."""

import json
import os
import tempfile

import torch
from report import finish, mlp, seed
from torch.profiler import ProfilerActivity, profile

seed()
model = mlp()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
losses = []


def step():
    data, target = torch.randn(64, 256, device="cuda"), torch.randint(0, 10, (64,), device="cuda")
    loss = torch.nn.functional.cross_entropy(model(data), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())


step()
with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], profile_memory=True, record_shapes=True, with_stack=True) as prof:
    for _ in range(3):
        step()
used = {row.key: row.self_device_memory_usage for row in prof.key_averages() if row.self_device_memory_usage}
with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "trace.json")
    prof.export_chrome_trace(path)
    with open(path) as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("name") == "[memory]"]
on_card = [event["args"] for event in events if event["args"]["Device Type"] == 1]
assert all(event["Total Allocated"] <= event["Total Reserved"] for event in on_card), "more allocated than reserved"
finish(losses, {"events": len(on_card), "operators": sorted(used)})
