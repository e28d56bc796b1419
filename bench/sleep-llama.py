"""A Llama that is trained and serves in turns on one card, with the same program on every memory saver.

    python bench/sleep-llama.py                             # plain, vramp and torch_memory_saver
    python bench/sleep-llama.py --savers vramp --processes 2

Needs a card and PyTorch. With one process a trainer and an engine share it: after each round of training the
engine wakes up, takes the weights, the trainer sleeps, and the engine makes tokens by replays of a CUDA graph
that was captured before the first sleep. With two, the trainer and the engine are processes that take turns,
and the engine keeps its own weights. `plain` has no memory saver and never sleeps; `vramp-awake` is the same
with vramp as the allocator, without regions, and `vramp-regions` with regions that are never paused. Prints a
line of JSON for each saver: losses, tokens, seconds of each switch, time of a training step. Exits with 1 if
losses or tokens differ from those of `plain`.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import subprocess
import sys
import time
from typing import Any

ROUNDS, STEPS, TOKENS = 4, 20, 24
SAVERS = ("plain", "vramp-awake", "vramp-regions", "vramp", "torch_memory_saver")


class Plain:
    """The interface of torch_memory_saver, for memory that stays where it is."""

    @contextlib.contextmanager
    def region(self, tag: str, enable_cpu_backup: bool = False) -> Any:
        yield

    def cuda_graph(self, graph: Any, tag: str, enable_cpu_backup: bool = False) -> Any:
        import torch

        return torch.cuda.graph(graph)

    def pause(self, tag: str) -> None: ...

    def resume(self, tag: str) -> None: ...


class NeverPaused(Plain):
    """Regions of a memory saver that stay awake."""

    def __init__(self, saver: Any) -> None:
        self.region, self.cuda_graph = saver.region, saver.cuda_graph  # type: ignore[method-assign]


def saver_of(name: str) -> Any:
    if name == "vramp-awake":
        import vramp.torch

        vramp.torch.enable()
        return Plain()
    if name in ("vramp", "vramp-regions"):
        from vramp.compat.torch_memory_saver import torch_memory_saver

        return torch_memory_saver if name == "vramp" else NeverPaused(torch_memory_saver)
    if name == "torch_memory_saver":
        from torch_memory_saver import torch_memory_saver

        torch_memory_saver.hook_mode = "preload"
        return torch_memory_saver
    return Plain()


def llama(layers: int, width: int, heads: int, vocabulary: int) -> Any:
    """Returns a Llama in bfloat16 on the card: RMSNorm, rotary embedding, causal attention, SwiGLU."""
    import torch
    from torch import nn
    from torch.nn import functional

    def linear(a: int, b: int) -> Any:
        return nn.Linear(a, b, bias=False, device="cuda", dtype=torch.bfloat16)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.RMSNorm(width, device="cuda", dtype=torch.bfloat16)
            self.second = nn.RMSNorm(width, device="cuda", dtype=torch.bfloat16)
            self.qkv, self.out = linear(width, 3 * width), linear(width, width)
            self.up, self.gate, self.down = linear(width, 3 * width), linear(width, 3 * width), linear(3 * width, width)

        def forward(self, x: Any, cos: Any, sin: Any) -> Any:
            batch, length, _ = x.shape
            q, k, v = self.qkv(self.first(x)).view(batch, length, 3, heads, -1).permute(2, 0, 3, 1, 4)
            q, k = turned(q, cos, sin), turned(k, cos, sin)
            attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
            y = self.second(x)
            return x + self.down(functional.silu(self.gate(y)) * self.up(y))

    def turned(x: Any, cos: Any, sin: Any) -> Any:
        low, high = x.chunk(2, dim=-1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)

    class Llama(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(vocabulary, width, device="cuda", dtype=torch.bfloat16)
            self.layers = nn.ModuleList(Layer() for _ in range(layers))
            self.norm = nn.RMSNorm(width, device="cuda", dtype=torch.bfloat16)
            self.head = linear(width, vocabulary)
            half = width // heads // 2
            angles = torch.outer(torch.arange(512.0, device="cuda"), 1e4 ** (-torch.arange(half, device="cuda") / half))
            self.register_buffer("cos", angles.cos().bfloat16())
            self.register_buffer("sin", angles.sin().bfloat16())

        def forward(self, tokens: Any) -> Any:
            x, length = self.embedding(tokens), tokens.shape[1]
            for layer in self.layers:
                x = layer(x, self.cos[:length], self.sin[:length])
            return self.head(self.norm(x))

    torch.manual_seed(7)
    return Llama()


class Trainer:
    def __init__(self, saver: Any, shape: Any) -> None:
        import torch

        self.saver = saver
        with saver.region("train", enable_cpu_backup=True):
            self.model = llama(*shape)
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
            self.generator = torch.Generator("cuda").manual_seed(3)
            self.vocabulary = shape[-1]

    def train(self) -> tuple[list[float], float]:
        """Returns the loss of each step, and the seconds of one."""
        import torch

        losses = []
        torch.cuda.synchronize()
        began = time.perf_counter()
        with self.saver.region("train", enable_cpu_backup=True):
            for _ in range(STEPS):
                tokens = torch.randint(self.vocabulary, (8, 256), device="cuda", generator=self.generator)
                logits = self.model(tokens[:, :-1]).float()
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)
                losses.append(loss.item())
        return losses, (time.perf_counter() - began) / STEPS


class Engine:
    """Makes tokens by replays of a graph: each takes the tokens so far, and adds the likeliest next one."""

    def __init__(self, saver: Any, shape: Any) -> None:
        import torch

        with saver.region("serve", enable_cpu_backup=True):
            self.model = llama(*shape).requires_grad_(False)
            self.tokens = torch.zeros(16, 128, dtype=torch.long, device="cuda")
            self.at = torch.zeros(1, dtype=torch.long, device="cuda")
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):
                    self.step()
            torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with saver.cuda_graph(self.graph, tag="serve", enable_cpu_backup=True):
            self.step()

    def step(self) -> None:
        logits = self.model(self.tokens).index_select(1, self.at)[:, 0]
        self.at += 1
        self.tokens.index_copy_(1, self.at, logits.argmax(-1, keepdim=True))

    def serve(self, round: int) -> str:
        """Returns a digest of the tokens."""
        self.tokens.zero_()
        self.tokens[:, 0] = round + 1
        self.at.zero_()
        for _ in range(TOKENS):
            self.graph.replay()
        return hashlib.sha256(self.tokens.cpu().numpy().tobytes()).hexdigest()[:12]


def timed(call: Any, *arguments: Any) -> float:
    import torch

    torch.cuda.synchronize()
    began = time.perf_counter()
    call(*arguments)
    torch.cuda.synchronize()
    return time.perf_counter() - began


def in_one_process(saver: Any, shape: Any) -> dict[str, Any]:
    trainer, engine = Trainer(saver, shape), Engine(saver, shape)
    losses, tokens, steps, switches = [], [], [], []
    saver.pause("serve")
    for round in range(ROUNDS):
        some, step = trainer.train()
        losses += some
        steps.append(step)
        to_engine = timed(saver.resume, "serve")
        for mine, theirs in zip(engine.model.parameters(), trainer.model.parameters(), strict=True):
            mine.copy_(theirs.detach())
        to_engine += timed(saver.pause, "train")
        tokens.append(engine.serve(round))
        to_trainer = timed(saver.pause, "serve") + timed(saver.resume, "train")
        switches.append([to_engine, to_trainer])
    return {"losses": losses, "tokens": tokens, "step_s": steps, "switch_s": switches, "bytes": bytes_of(trainer, engine)}


def bytes_of(trainer: Trainer | None, engine: Engine | None) -> dict[str, int]:
    sizes = {}
    if trainer:
        states = [value for state in trainer.optimizer.state.values() for value in state.values()]
        tensors = [*trainer.model.parameters(), *states]
        sizes["train"] = sum(tensor.nbytes for tensor in tensors if tensor.is_cuda)
    if engine:
        sizes["serve"] = sum(tensor.nbytes for tensor in engine.model.parameters())
    return sizes


def part(saver: Any, shape: Any, role: str) -> None:
    """One of two processes: works when it reads a line, and prints one."""
    trainer = Trainer(saver, shape) if role == "train" else None
    engine = Engine(saver, shape) if role == "serve" else None
    saver.pause(role)
    print(json.dumps({"ready": role}), flush=True)
    for round, _ in enumerate(sys.stdin):
        woke = timed(saver.resume, role)
        result: dict[str, Any] = {}
        if trainer:
            losses, step = trainer.train()
            result |= {"losses": losses, "step_s": step}
        if engine:
            result["tokens"] = engine.serve(round)
        slept = timed(saver.pause, role)
        print(json.dumps(result | {"switch_s": woke + slept, "bytes": bytes_of(trainer, engine)}), flush=True)


def in_two_processes(command: list[str], env: dict[str, str]) -> dict[str, Any]:
    def begin(role: str) -> Any:
        return subprocess.Popen([*command, "--role", role], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def answer(process: Any) -> Any:
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"a process ended with {process.wait()}")
        return json.loads(line)

    processes = []
    for role in ("train", "serve"):
        processes.append(begin(role))
        answer(processes[-1])
    result: dict[str, Any] = {"losses": [], "tokens": [], "step_s": [], "switch_s": [], "bytes": {}}
    for _ in range(ROUNDS):
        for process in processes:
            process.stdin.write("\n")
            process.stdin.flush()
            said = answer(process)
            result["losses"] += said.get("losses", [])
            result["tokens"] += [said["tokens"]] if "tokens" in said else []
            result["step_s"] += [said["step_s"]] if "step_s" in said else []
            result["switch_s"].append(said["switch_s"])
            result["bytes"] |= said["bytes"]
    for process in processes:
        process.stdin.close()
        process.wait()
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--savers", default=",".join(SAVERS), help="of " + ", ".join(SAVERS))
    parser.add_argument("--processes", default="1,2", help="1, 2 or both")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--role", choices=("train", "serve"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    savers = options.savers.split(",")
    if unknown := set(savers) - set(SAVERS):
        parser.error(f"there is no saver {sorted(unknown)}: there are {list(SAVERS)}")
    shape = (options.layers, options.width, 16, 32000)
    if options.child:
        import torch

        saver = saver_of(savers[0])
        torch.use_deterministic_algorithms(True)
        if options.role:
            part(saver, shape, options.role)
        else:
            print(json.dumps(in_one_process(saver, shape)), flush=True)
        return 0
    right = True
    for processes in options.processes.split(","):
        plain: dict[str, Any] | None = None
        for saver in savers:
            command = [sys.executable, __file__, "--child", "--savers", saver]
            command += ["--layers", str(options.layers), "--width", str(options.width)]
            env = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
            if saver == "torch_memory_saver":
                from torch_memory_saver.utils import get_binary_path_from_package

                env["LD_PRELOAD"] = str(get_binary_path_from_package("torch_memory_saver_hook_mode_preload"))
            try:
                if processes == "1":
                    output = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout
                    result = json.loads(output.splitlines()[-1])
                else:
                    result = in_two_processes(command, env)
            except (RuntimeError, subprocess.CalledProcessError) as error:
                print(f"{saver} with {processes} processes: {error}", file=sys.stderr)
                right = False
                continue
            plain = plain or (result if saver == "plain" else None)
            same = plain and (result["losses"], result["tokens"]) == (plain["losses"], plain["tokens"])
            right &= same is not False
            print(json.dumps({"saver": saver, "processes": int(processes), "same": same} | result), flush=True)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
