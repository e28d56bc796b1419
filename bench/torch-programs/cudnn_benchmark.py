"""cuDNN's search for the fastest convolution: it asks for the largest free block and takes large workspaces."""

import torch
from report import finish, seed

seed()
torch.backends.cudnn.benchmark = True
layers = []
for before, after, size in ((3, 32, 3), (32, 64, 5), (64, 64, 3)):
    layers += [torch.nn.Conv2d(before, after, size, padding=size // 2), torch.nn.BatchNorm2d(after), torch.nn.ReLU()]
model = torch.nn.Sequential(*layers, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(64, 10)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
losses = []
for number in range(12):
    size = (64, 96, 128)[number % 3]
    data, target = torch.randn(8, 3, size, size, device="cuda"), torch.randint(0, 10, (8,), device="cuda")
    loss = torch.nn.functional.cross_entropy(model(data), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
# The search may choose another algorithm in each run, so only few digits are compared.
finish([round(float(loss), 2) for loss in losses], {"steps": len(losses)})
