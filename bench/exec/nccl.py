"""All-reduces on two cards, for runs without and under `vramp exec`: prints the sums.

    python nccl.py            # PyTorch and NCCL, a process for each card
    python nccl.py threads    # copies between two cards of one process
"""

import os
import sys


def rank(number: int, out: str) -> None:
    import torch
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ.get("PORT", "29511"))
    torch.cuda.set_device(number)
    dist.init_process_group("nccl", rank=number, world_size=2)
    total = 0.0
    for step in range(30):
        x = torch.full((1 << (10 + step % 15),), float(number + step), device="cuda")
        dist.all_reduce(x)
        total += float(x.double().sum())
        y = [torch.empty_like(x) for _ in range(2)]
        dist.all_gather(y, x)
        total += float(y[1 - number].double().sum())
    dist.barrier()
    dist.destroy_process_group()
    with open(f"{out}.{number}", "w") as file:
        file.write(f"{total:.0f}")


def main() -> None:
    import tempfile

    import torch
    import torch.multiprocessing as mp

    if sys.argv[1:] == ["threads"]:
        total = 0
        for step in range(50):
            a = torch.arange(1 << (8 + step % 14), device="cuda:0", dtype=torch.float64)
            b = a.to("cuda:1") * 2
            total += float((b.to("cuda:0") + a).sum())
        print(f"copies {total:.0f}")
        return
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank, (folder + "/sum",), nprocs=2)
        print("sums", *(open(f"{folder}/sum.{number}").read() for number in range(2)))


if __name__ == "__main__":
    main()
