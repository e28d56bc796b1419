#!/usr/bin/env python3
"""Real PyTorch jobs on PyTorch's own allocator, its expandable segments, cudaMallocAsync and vramp, side by side.

    torch-workloads.py WORKLOADS.py [NAME...] [--runs 3] [--steps N] [--limit 20GiB]
                       [--limit-over-peak 1.1] [--limit-runs 1] [--allocators native,expandable,async,vramp]

WORKLOADS.py is any Python file that assigns a dict `W` from names to functions. Each function takes
the number of steps, or no argument for its own number, and is a generator that yields after each
step. The file is run until it has assigned `W`, with a workload's name as its only argument.

Every run is a process of its own, and the allocators alternate. Prints one JSON line for each run and
one with the medians for each workload and allocator; with a limit the same again under the limit,
where out of memory is a result and not a failure. Needs the package vramp, whose statistics of its own are
in the lines of its runs.
"""

import argparse
import ast
import inspect
import json
import os
import statistics
import subprocess
import sys
import time

SETTINGS = {"expandable": "expandable_segments:True", "async": "backend:cudaMallocAsync"}
ALLOCATORS = ("native", *SETTINGS, "vramp")
UNITS = {"": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
GIB = 2**30


def size(text):
    """Returns the bytes of a text such as 4096, 512MiB or 20GiB."""
    digits = text.rstrip("KMGiBkmgb ")
    unit = text[len(digits) :].strip().upper()
    if unit not in UNITS:
        raise argparse.ArgumentTypeError(f"'{text}' is no size: write it like 512MiB or 20GiB")
    return int(float(digits) * UNITS[unit])


# --- one run, in a process of its own ---


def load(path, name):
    """Returns the dict `W` of a workloads file."""
    with open(path, encoding="utf-8") as file:
        tree = ast.parse(file.read(), path)
    assigned = [
        index
        for index, node in enumerate(tree.body)
        if isinstance(node, ast.Assign)
        and any(isinstance(target, ast.Name) and target.id == "W" for target in node.targets)
    ]
    if not assigned:
        sys.exit(f"{path} assigns no dict W of workloads")
    tree.body = tree.body[: assigned[0] + 1]
    # Workloads parse the command line themselves.
    sys.argv = [path, name]
    names = {"__name__": "workloads", "__file__": path}
    exec(compile(tree, path, "exec"), names)
    return names["W"]


class LastLoss:
    """The tensor that `backward` was last called on: the loss of any training step."""

    def __init__(self, torch):
        self.value = None
        backward = torch.Tensor.backward

        def watched(tensor, *args, **kwargs):
            self.value = tensor.detach()
            return backward(tensor, *args, **kwargs)

        torch.Tensor.backward = watched

    def take(self):
        value, self.value = self.value, None
        return None if value is None else float(value)


def used_by_card(torch):
    free, total = torch.cuda.mem_get_info()
    return total - free


def run_one(args):
    """Runs one workload on one allocator and prints a JSON line."""
    import torch

    vramp = None
    if args.allocator == "vramp":
        import vramp.torch as vramp

        vramp.enable()
    workload = load(args.workloads, args.names[0])[args.names[0]]
    losses = LastLoss(torch)
    torch.cuda.init()
    bare = used_by_card(torch)
    if args.limit and vramp is None:
        total = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, args.limit / total))
    times, loss, tokens, most_used, error = [], None, None, bare, None
    try:
        steps = workload(args.steps) if args.steps else workload()
        last = time.perf_counter()
        for _ in steps:
            torch.cuda.synchronize()
            now = time.perf_counter()
            times.append(now - last)
            loss = losses.take() if losses.value is not None else loss
            most_used = max(most_used, used_by_card(torch))
            # A generating job has no loss, but its output must be the same.
            generated = inspect.getgeneratorlocals(steps).get("cur")
            tokens = int(generated.sum()) if torch.is_tensor(generated) else tokens
            # The comparison is not part of the next step.
            last = time.perf_counter()
    except RuntimeError as failure:
        if "out of memory" not in str(failure):
            raise
        error = f"{type(failure).__name__}: {str(failure)[:400]}"
    most_used = max(most_used, used_by_card(torch))
    line = {
        "workload": args.names[0],
        "allocator": args.allocator,
        "limit": args.limit,
        "steps": len(times),
        "loss": loss,
        "tokens": tokens,
        "total_s": round(sum(times), 4),
        "steady_s": round(sum(times[len(times) // 2 :]), 4),
        "median_step_s": round(statistics.median(times), 5) if times else None,
        "bare": bare,
        "device_used": most_used,
        "error": error,
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }
    # The same statistics for every allocator. With vramp they include what graphs and memory pools hold.
    stats = torch.cuda.memory_stats()
    line |= {
        # cudaMallocAsync's backend counts what it was asked for as allocated.
        "peak_live": stats.get("requested_bytes.all.peak") or stats.get("allocated_bytes.all.peak", 0),
        "peak_reserved": stats.get("reserved_bytes.all.peak", 0),
        "allocations": stats.get("allocation.all.allocated", 0),
        "retries": stats.get("num_alloc_retries", 0),
    }
    if vramp is not None:
        vramp.audit()
        line |= {"route": vramp.route(), "vramp": vramp.report()}
    # The CUDA context and the code of the loaded libraries.
    line["device_used_beside"] = most_used - line["peak_reserved"]
    print(json.dumps(line), flush=True)


# --- all runs, each in a child ---


def environment(allocator, limit):
    """Returns the environment of a child process."""
    own = {k: v for k, v in os.environ.items() if k not in ("PYTORCH_ALLOC_CONF", "VRAMP_DEVICE")}
    own.pop("PYTORCH_CUDA_ALLOC_CONF", None)
    if allocator in SETTINGS:
        own["PYTORCH_CUDA_ALLOC_CONF"] = SETTINGS[allocator]
    if allocator == "vramp" and limit:
        options = [part for part in own.get("VRAMP_CONF", "").split(",") if part.strip()]
        options = [part for part in options if not part.strip().startswith("limit")]
        own["VRAMP_CONF"] = ",".join([*options, f"limit={limit}"])
    return own


def child(args, name, allocator, limit):
    """Does one run and returns its result, also if the process failed."""
    command = [sys.executable, os.path.abspath(__file__), args.workloads, name]
    command += ["--one", "--allocators", allocator]
    command += ["--steps", str(args.steps)] if args.steps else []
    command += ["--limit", str(limit)] if limit else []
    ran = subprocess.run(
        command, env=environment(allocator, limit), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    lines = [line for line in ran.stdout.splitlines() if line.startswith("{")]
    if ran.returncode == 0 and lines:
        return json.loads(lines[-1])
    sys.stderr.write(ran.stderr[-4000:])
    died = f"ended with {ran.returncode}: {ran.stderr.strip()[-400:]}"
    return {"workload": name, "allocator": allocator, "limit": limit, "error": died, "died": True}


def median(runs, key):
    values = [run[key] for run in runs if run.get(key) is not None]
    return statistics.median(values) if values else None


def summary(name, limit, runs):
    """The medians of one allocator's runs, and how they compare with the native allocator's.

    `used_over_live` counts the libraries' code as the allocator's; `held_over_live` subtracts what
    the card holds beside the native allocator, so that an allocator's own overhead on the card counts.
    """
    native = [run for run in runs if run["allocator"] == "native" and not run["error"]]
    for allocator in dict.fromkeys(run["allocator"] for run in runs):
        own = [run for run in runs if run["allocator"] == allocator]
        good = [run for run in own if not run["error"]]
        line = {"summary": name, "allocator": allocator, "limit": limit}
        line |= {"runs": len(own), "completed": len(good)}
        for key in ("loss", "tokens", "steady_s", "median_step_s", "device_used", "device_used_beside", "bare"):
            line[key] = median(good, key)
        for key in ("peak_live", "peak_reserved"):
            line[key] = median(good, key)
        for key in ("loss", "tokens"):
            values = [run[key] for run in good if run[key] is not None]
            line[f"{key}_range"] = [min(values), max(values)] if values else None
        if good and line["peak_live"]:
            line["used_over_live"] = round(
                (line["device_used"] - line["bare"]) / line["peak_live"], 4
            )
        if good and native:
            if not limit:
                # Under a limit the native allocator releases memory within steps, so other memory is unknown.
                # Each run beside its own peak: jobs with several threads have another one in each.
                beside = median(native, "device_used_beside")
                held = [(run["device_used"] - beside) / run["peak_live"] for run in good if run["peak_live"]]
                line["held_over_live"] = round(statistics.median(held), 4) if held else None
            line["steady_over_native"] = round(line["steady_s"] / median(native, "steady_s"), 4)
            if line["loss"] is not None:
                line["loss_minus_native"] = line["loss"] - median(native, "loss")
        yield line


def compare(args, name, limit, turns):
    runs = []
    for _ in range(turns):
        for allocator in args.allocators:
            runs.append(child(args, name, allocator, limit))
            print(json.dumps(runs[-1]), flush=True)
    for line in summary(name, limit, runs):
        print(json.dumps(line), flush=True)
    return runs


def names_in(path):
    """Returns the keys of `W` without running the file: every w_NAME or every key of a literal dict."""
    with open(path, encoding="utf-8") as file:
        tree = ast.parse(file.read(), path)
    literal = [
        [key.value for key in node.value.keys if isinstance(key, ast.Constant)]
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Dict)
        and any(isinstance(target, ast.Name) and target.id == "W" for target in node.targets)
    ]
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    return (literal and literal[0]) or [name[2:] for name in functions if name.startswith("w_")]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workloads", help="file with the workloads")
    parser.add_argument("names", nargs="*", help="workloads; all by default")
    parser.add_argument("--runs", type=int, default=3, help="runs of each allocator")
    parser.add_argument("--steps", type=int, default=0, help="steps of each run; the workload's own by default")
    parser.add_argument("--allocators", default=",".join(ALLOCATORS))
    parser.add_argument("--limit", type=size, default=0, help="memory limit of the allocator, such as 20GiB")
    parser.add_argument("--limit-over-peak", type=float, default=0, help="limit of a second pass, as a multiple of the native peak")
    parser.add_argument("--limit-runs", type=int, default=0, help="runs of each allocator in that pass; --runs by default")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.workloads = os.path.abspath(args.workloads)
    args.allocators = args.allocators.split(",")
    unknown = [name for name in args.allocators if name not in ALLOCATORS]
    if unknown:
        parser.error(f"there is no allocator {unknown[0]}: use {', '.join(ALLOCATORS)}")
    if args.one:
        args.allocator = args.allocators[0]
        return run_one(args)
    if args.limit_over_peak and "native" not in args.allocators:
        parser.error("--limit-over-peak needs the native allocator's peak: add native to --allocators")
    known = names_in(args.workloads)
    wrong = [name for name in args.names if known and name not in known]
    if wrong:
        parser.error(f"there is no workload {wrong[0]}: use {', '.join(known)}")
    died = False
    for name in args.names or known:
        runs = compare(args, name, args.limit, args.runs)
        died |= any(run.get("died") or (run["error"] and not args.limit) for run in runs)
        peak = median([run for run in runs if run["allocator"] == "native"], "peak_live")
        if args.limit_over_peak and peak:
            runs = compare(args, name, int(peak * args.limit_over_peak), args.limit_runs or args.runs)
            died |= any(run.get("died") for run in runs)
    sys.exit(1 if died else 0)


if __name__ == "__main__":
    main()
