"""Two cards in one process: copies both ways, contiguous and not, before and after access, and streams of both."""

import torch
from report import digest, finish, seed, skip


def main():
    if torch.cuda.device_count() < 2:
        skip("it needs two cards")
    seed()
    first = torch.randn(4096, 4096, device="cuda:0")
    results = []
    for tensor in (first, first.t(), first[::3, ::5], first.half()):
        there = tensor.to("cuda:1")
        back = torch.empty_like(tensor)
        back.copy_(there, non_blocking=True)
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        assert torch.equal(back, tensor)
        results += [there, back]
    strided = torch.zeros(4096, 4096, device="cuda:1")
    strided.t().copy_(first)
    results.append(strided)
    # The other card's stream uses memory that is freed at once.
    stream = torch.cuda.Stream(device="cuda:1")
    total = torch.zeros((), device="cuda:1", dtype=torch.float64)
    for _ in range(200):
        used = torch.ones(1 << 20, device="cuda:0")
        with torch.cuda.stream(stream):
            stream.wait_stream(torch.cuda.current_stream(0))
            total += used.to("cuda:1", non_blocking=True).sum(dtype=torch.float64)
        used.record_stream(stream)
        del used
    torch.cuda.synchronize(1)
    if torch.cuda.can_device_access_peer(0, 1):
        model = torch.nn.Linear(64, 64).to("cuda:0")
        replicas = torch.nn.DataParallel(model, device_ids=[0, 1])
        results.append(replicas(torch.randn(32, 64, device="cuda:0")))
    finish(numbers=[total], contents=digest(*results))


if __name__ == "__main__":
    main()
