"""An engine is killed, and others serve on with its weights, which a keeper holds.

    python examples/engine/restart.py                         # on a card or simulated: small weights
    python examples/engine/restart.py --layers 64 --width 4096

1. A first engine reads the weights from a file, and moves them into kept memory.
2. A second one stands by: it has the weights open, without a copy, and waits for the end of the first.
3. The first is killed (SIGKILL). The second makes a token at once.
4. It is killed too, with none standing by: a third is started, maps the weights and makes a token.

Prints one line of JSON: how long each took, and whether all made the same tokens.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BEGAN = time.monotonic()
TOKENS = 8
LIMIT = 300.0
"""Seconds that a process may take for a step."""


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def run(directory: str, file: str, shape: dict[str, int], memory: int, stands_by: bool) -> None:
    """One engine."""
    import torch
    from engine import Cache, Engine, Model, Request, Shape, arena_for, device_of

    import vramp
    import vramp.keep

    imported = time.monotonic()
    pool = vramp.pool()
    device = device_of(pool)
    torch.backends.cuda.enable_cudnn_sdp(False)
    if device == "cuda":
        torch.zeros(1, device=device)
    keeper = vramp.keep.connect(directory)
    ready = time.monotonic()
    with torch.no_grad():
        model = Model(Shape(**shape), "meta")
    loaded = False

    def build() -> None:
        nonlocal loaded
        loaded = True
        with torch.no_grad():
            filled = Model(Shape(**shape), device)
            filled.load_state_dict(torch.load(file, map_location=device, weights_only=True))
            # As loaders do, into the module that is to be published.
            for name, tensor in filled.state_dict(keep_vars=True).items():
                owner, _, key = name.rpartition(".")
                model.get_submodule(owner)._parameters[key] = tensor
            model._buffers.update(filled._buffers)

    keeper.load("engine/weights", model, build, digest=json.dumps(shape), pool=pool)
    opened = time.monotonic()
    cache = Cache(model.shape, memory, device, arena_for(pool, model.shape, memory))
    engine = Engine(model, cache, 1, device)
    if stands_by:
        # Kernels are loaded by the first step, which needs no other process.
        engine.submit(Request([1, 2, 3], 1))
        while not engine.is_idle:
            engine.step()
        engine.ended.clear()
    say(ready=True, loaded=loaded)
    # The memory of this name says who serves: who writes it. Its contents mean nothing.
    serving = lead(keeper, pool)
    took_over = time.monotonic()
    engine.submit(Request([5, 6, 7, 8], TOKENS))
    first = 0.0
    while not engine.is_idle:
        engine.step()
        if not first:
            first = time.monotonic()
    say(
        first=first,
        tokens=engine.ended[0].made,
        loaded=loaded,
        began=BEGAN,
        import_s=imported - BEGAN,
        context_s=ready - imported,
        weights_s=opened - ready,
        step_s=first - took_over,
        kept=serving.name,
    )
    sys.stdin.read()


def lead(keeper: Any, pool: Any) -> Any:
    """Waits until no other process serves."""
    import vramp

    try:
        return keeper.open("engine/leader", readonly=False, lock="write", pool=pool, timeout=LIMIT)
    except vramp.NotKeptError:
        draft = keeper.draft("engine/leader", "2MiB", pool=pool)
        draft.place(1)
        draft.commit_draft(readonly=False)
        return draft


class Other:
    """An engine in a process of its own."""

    def __init__(self, *arguments: object) -> None:
        command = [sys.executable, __file__, "--role", *map(str, arguments)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def line(self) -> Any:
        assert self.process.stdout is not None
        text = self.process.stdout.readline()
        if not text:
            raise SystemExit(f"an engine ended with {self.process.wait()}")
        return json.loads(text)

    def kill(self) -> float:
        now = time.monotonic()
        self.process.send_signal(signal.SIGKILL)
        return now


def main() -> None:
    if sys.argv[1:2] == ["--role"]:
        directory, file, shape, memory, stands_by = sys.argv[2:]
        return run(directory, file, json.loads(shape), int(memory), stands_by == "True")
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--layers", type=int, default=4)
    options.add_argument("--width", type=int, default=1024)
    options.add_argument("--memory", type=int, default=256 << 20, help="bytes of the cache")
    given = options.parse_args()

    import torch
    from engine import Model

    import vramp.keep

    shape = dict(layers=given.layers, width=given.width, heads=8, kv_heads=8, vocabulary=1000, context=1536)
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "weights.pt")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        from engine import Shape

        with torch.no_grad():
            weights = Model(Shape(**shape), device)
        size = sum(tensor.nbytes for tensor in weights.state_dict().values())
        torch.save(weights.state_dict(), file)
        del weights
        if device == "cuda":
            torch.cuda.empty_cache()
        directory = str(Path(folder) / "keep")
        keeper = vramp.keep.connect(directory)
        try:
            common = (directory, file, json.dumps(shape), given.memory)
            first = Other(*common, False)
            first.line()
            made = [first.line()]
            standby = Other(*common, True)
            standby.line()
            killed = first.kill()
            made.append(standby.line())
            taken_over = made[-1]["first"] - killed
            killed = standby.kill()
            third = Other(*common, False)
            third.line()
            made.append(third.line())
            restarted = made[-1]["first"] - killed
            third.kill()
        finally:
            keeper.stop()
    phases = ("import_s", "context_s", "weights_s", "step_s")
    say(
        weights_gib=round(size / 2**30, 2),
        first_start={phase: round(made[0][phase], 3) for phase in phases},
        take_over_s=round(taken_over, 3),
        restart_s=round(restarted, 3),
        restart={phase: round(made[2][phase], 3) for phase in phases},
        loaded=[one["loaded"] for one in made],
        same_tokens=all(one["tokens"] == made[0]["tokens"] for one in made),
    )
    if [one["loaded"] for one in made] != [True, False, False] or len({tuple(one["tokens"]) for one in made}) != 1:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
