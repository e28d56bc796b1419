"""torch.multiprocessing: a CUDA tensor sent to another process. It arrives or is refused; it never hangs."""

import queue
import sys

import torch
import torch.multiprocessing as multiprocessing
from report import finish

SECONDS = 60


def receive(tensors, answers):
    """The other process."""
    try:
        tensor = tensors.get(timeout=SECONDS)
        answers.put(("received", float(tensor.sum())))
        del tensor
    except queue.Empty:
        answers.put(("nothing came", 0.0))
    except Exception as error:
        answers.put(("error of the receiver", f"{type(error).__name__}: {error}"))


def main():
    context = multiprocessing.get_context("spawn")
    tensors, answers = context.Queue(), context.Queue()
    sent = torch.arange(1000, device="cuda", dtype=torch.float32)
    try:
        # The queue's own thread would only print the error.
        multiprocessing.reductions.reduce_tensor(sent)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        print(f"refused by the sender: {text}", file=sys.stderr)
        finish(facts={"clear": len(text) > 30})
        return
    process = context.Process(target=receive, args=(tensors, answers))
    process.start()
    tensors.put(sent)
    try:
        what, value = answers.get(timeout=2 * SECONDS)
    except queue.Empty:
        what, value = "no answer", 0.0
    process.join(SECONDS)
    if process.is_alive():
        process.kill()
        what = "the other process hangs"
    print(f"{what}: {value}", file=sys.stderr)
    # Both an exact sum and an error with a reason are right.
    finish(facts={"clear": (what == "received" and value == 499_500.0) or what.startswith("error")})


if __name__ == "__main__":
    main()
