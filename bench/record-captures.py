#!/usr/bin/env python3
"""Records the allocations of real models while PyTorch captures a forward and backward pass.

    record-captures.py OUT [NAME...] [--list] [--steps 3]

Needs a card. Every model is captured in a process of its own, on PyTorch's own allocator: warm-up on a
side stream, start of the recording, then forward and backward in the capture. OUT/NAME.pickle.gz is
PyTorch's snapshot, without stacks, in pickle protocol 4. Prints one JSON line for each model: the
blocks of the capture, their bytes, the peak of the live bytes, and the reserved bytes of PyTorch's
private pool. The line names a missing package.

Exits with 1 if a model was not recorded or the files are larger than 4 MiB together.
"""

import argparse
import contextlib
import gc
import gzip
import json
import os
import pickle
import subprocess
import sys

# Size limit of all recordings together.
WEIGHT = 4 << 20
# Far more events than any of these captures has: a full ring buffer drops the first ones.
EVENTS = 1_000_000


# --- the models: each creates its weights and inputs and returns a function for the loss ---


def llama(torch):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=5520,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=16384,
    )
    model = LlamaForCausalLM(config).to("cuda", torch.bfloat16)
    tokens = torch.randint(0, 32000, (4, 1024), device="cuda")
    return model, lambda: model(input_ids=tokens, labels=tokens, use_cache=False).loss


def images(torch, model, batch):
    """A classifier of images of 224 by 224, in bfloat16 where autocast allows."""
    pixels = torch.randn(batch, 3, 224, 224, device="cuda")
    labels = torch.randint(0, 1000, (batch,), device="cuda")
    pixels = pixels.contiguous(memory_format=torch.channels_last)

    def loss():
        with torch.autocast("cuda", torch.bfloat16):
            return torch.nn.functional.cross_entropy(model(pixels), labels)

    return model, loss


def resnet50(torch):
    import torchvision

    model = torchvision.models.resnet50().to("cuda", memory_format=torch.channels_last)
    return images(torch, model, 64)


def vit(torch):
    import torchvision

    return images(torch, torchvision.models.vit_b_16().to("cuda"), 32)


def gnn(torch):
    from torch_geometric.nn import SAGEConv

    nodes, edges = 100_000, 1_000_000
    layers = [SAGEConv(128, 256), SAGEConv(256, 256), SAGEConv(256, 64)]
    model = torch.nn.ModuleList(layers).to("cuda")
    features = torch.randn(nodes, 128, device="cuda")
    ends = torch.randint(0, nodes, (2, edges), device="cuda")

    def loss():
        hidden = features
        for layer in model:
            hidden = torch.relu(layer(hidden, ends))
        return hidden.float().pow(2).mean()

    return model, loss


def unet(torch):
    """Down to an eighth and up again, with skip connections."""
    nn = torch.nn

    def stage(inward, outward):
        layers = []
        for width in (inward, outward):
            layers += [nn.Conv2d(width, outward, 3, padding=1), nn.GroupNorm(8, outward), nn.SiLU()]
        return nn.Sequential(*layers)

    widths = [32, 64, 128, 256]
    model = nn.ModuleDict(
        {
            "down": nn.ModuleList([stage(a, b) for a, b in zip([3, *widths], widths)]),
            "up": nn.ModuleList([stage(a + b, b) for b, a in zip(widths[-2::-1], widths[:0:-1])]),
            "last": nn.Conv2d(widths[0], 3, 1),
        }
    ).to("cuda")
    pixels = torch.randn(16, 3, 192, 192, device="cuda")

    def loss():
        hidden, beside = pixels, []
        for number, down in enumerate(model["down"]):
            hidden = down(nn.functional.avg_pool2d(hidden, 2) if number else hidden)
            beside.append(hidden)
        beside.pop()
        for up in model["up"]:
            wide = nn.functional.interpolate(hidden, scale_factor=2.0, mode="nearest")
            hidden = up(torch.cat([wide, beside.pop()], 1))
        return (model["last"](hidden) - pixels).pow(2).mean()

    return model, loss


def two_streams(torch):
    """Two branches of one network, the second on a side stream that forks and joins in the capture."""
    nn = torch.nn

    def branch():
        return nn.Sequential(*[nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(6)])

    model = nn.ModuleDict({"first": nn.Linear(256, 1024), "here": branch(), "beside": branch()}).to("cuda")
    features = torch.randn(8192, 256, device="cuda")
    side = torch.cuda.Stream()

    def loss():
        here = torch.cuda.current_stream()
        hidden = model["first"](features)
        side.wait_stream(here)
        with torch.cuda.stream(side):
            other = model["beside"](hidden)
            hidden.record_stream(side)
        one = model["here"](hidden)
        here.wait_stream(side)
        other.record_stream(here)
        return (one - other).pow(2).mean()

    # The backward pass runs on the side stream too, and the capture must end joined.
    return model, loss, lambda: torch.cuda.current_stream().wait_stream(side)


MODELS = {model.__name__: model for model in (llama, resnet50, gnn, vit, unet, two_streams)}


# --- one capture, in a process of its own ---


def capture(torch, name, steps):
    """Captures one model. Returns the snapshot, the graph's pool, the pool's bytes, and the loss."""
    torch.manual_seed(0)
    model, loss, *rest = MODELS[name](torch)
    join = rest[0] if rest else lambda: None
    warm = torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        for _ in range(steps):
            model.zero_grad(set_to_none=True)
            loss().backward()
            join()
    torch.cuda.current_stream().wait_stream(warm)
    # The capture allocates its own gradients.
    model.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.memory._record_memory_history("all", context=None, max_entries=EVENTS, clear_history=True)
    with torch.cuda.graph(graph):
        result = loss()
        result.backward()
        join()
    snapshot = torch.cuda.memory._snapshot()
    grown = torch.cuda.memory_reserved() - before
    torch.cuda.memory._record_memory_history(None)
    # A capture that cannot be replayed is worthless.
    graph.replay()
    torch.cuda.synchronize()
    return snapshot, tuple(graph.pool()), grown, float(result)


def summary(snapshot, pool, device=0):
    """Returns the blocks and bytes that a capture allocated, by the events of its trace."""
    live, streams = {}, set()
    blocks = total = held = peak = older = 0
    for event in snapshot["device_traces"][device]:
        if event["action"] == "alloc":
            blocks += 1
            total += event["size"]
            held += event["size"]
            peak = max(peak, held)
            live[event["addr"]] = event["size"]
            streams.add(event["stream"])
        elif event["action"] == "free_requested":
            # A block from before the capture may be freed inside it.
            older += event["addr"] not in live
            held -= live.pop(event["addr"], 0)
    return {
        "blocks": blocks,
        "bytes": total,
        "peak_live": peak,
        "live_at_end": held,
        "streams": len(streams),
        "older_blocks_freed": older,
        "private_pool": sum(
            segment["total_size"]
            for segment in snapshot["segments"]
            if tuple(segment["segment_pool_id"]) == pool
        ),
    }


def write(snapshot, path):
    """Writes the snapshot, the same bytes for the same snapshot. Returns their number."""
    with open(path, "wb") as file:
        # The file's header has neither name nor time.
        with gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as packed:
            pickle.dump(snapshot, packed, protocol=4)
    return os.path.getsize(path)


def run_one(args, name):
    """Captures one model and prints its JSON line."""
    line = {"name": name}
    try:
        import torch

        snapshot, pool, grown, loss = capture(torch, name, args.steps)
    except ModuleNotFoundError as missing:
        print(json.dumps(line | {"error": f"package {missing.name} is missing", "missing": missing.name}))
        return 1
    path = os.path.join(args.out, f"{name}.pickle.gz")
    line |= summary(snapshot, pool)
    line |= {"reserved_grown": grown, "loss": loss, "file": os.path.basename(path)}
    line |= {"file_bytes": write(snapshot, path), "error": None}
    line |= {"card": torch.cuda.get_device_name(), "torch": torch.__version__}
    print(json.dumps(line), flush=True)
    if not line["blocks"] or loss != loss:
        print(f"{name}: no blocks captured, or the loss is not a number", file=sys.stderr)
        return 1
    return 0


# --- all captures, each in a child ---


def child(args, name):
    """Returns the line of one model, also if its process failed, and whether it was recorded."""
    command = [sys.executable, os.path.abspath(__file__), args.out, name]
    command += ["--one", "--steps", str(args.steps)]
    # The native allocator with its defaults, independent of the caller's environment.
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    own = {key: value for key, value in os.environ.items() if key not in names}
    ran = subprocess.run(command, env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    lines = [line for line in ran.stdout.splitlines() if line.startswith("{")]
    if ran.returncode:
        sys.stderr.write(ran.stderr[-4000:])
    if lines:
        return json.loads(lines[-1]), ran.returncode == 0
    return {"name": name, "error": f"ended with {ran.returncode}: {ran.stderr.strip()[-400:]}"}, False


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", nargs="?", help="folder for the recordings")
    parser.add_argument("names", nargs="*", help="models; all by default")
    parser.add_argument("--list", action="store_true", help="print the names and exit")
    parser.add_argument("--steps", type=int, default=3, help="warm-up steps")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.list:
        print("\n".join(MODELS))
        return 0
    if args.out is None:
        parser.error("name a folder for the recordings")
    wrong = [name for name in args.names if name not in MODELS]
    if wrong:
        parser.error(f"there is no model {wrong[0]}: use {', '.join(MODELS)}")
    with contextlib.suppress(FileExistsError):
        os.makedirs(args.out)
    if args.one:
        return run_one(args, args.names[0])
    weight, failed = 0, False
    for name in args.names or MODELS:
        line, recorded = child(args, name)
        print(json.dumps(line), flush=True)
        weight += line.get("file_bytes", 0)
        failed |= not recorded
    if weight > WEIGHT:
        print(f"the recordings have {weight} bytes, more than {WEIGHT}", file=sys.stderr)
        failed = True
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
