"""A DataLoader whose batches are copied to the card ahead, on a stream of their own, with record_stream."""

import torch
from report import digest, finish, mlp, seed


class Prefetcher:
    """Iterates over a loader, one batch ahead."""

    def __init__(self, loader):
        self.loader, self.stream = iter(loader), torch.cuda.Stream()
        self.load()

    def load(self):
        self.upcoming = next(self.loader, None)
        if self.upcoming is not None:
            with torch.cuda.stream(self.stream):
                self.upcoming = [tensor.cuda(non_blocking=True) for tensor in self.upcoming]

    def __iter__(self):
        while self.upcoming is not None:
            torch.cuda.current_stream().wait_stream(self.stream)
            batch = self.upcoming
            for tensor in batch:
                tensor.record_stream(torch.cuda.current_stream())
            self.load()
            yield batch


def main():
    seed()
    dataset = torch.utils.data.TensorDataset(torch.randn(4096, 256), torch.randint(0, 10, (4096,)))
    loader = torch.utils.data.DataLoader(dataset, batch_size=128, num_workers=2, pin_memory=True)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    losses, sums = [], []
    for _ in range(3):
        for data, target in Prefetcher(loader):
            loss = torch.nn.functional.cross_entropy(model(data), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            sums.append(data.double().sum())
    finish(losses, {"batches": len(losses)}, digest(torch.stack(sums)))


if __name__ == "__main__":
    main()
