#!/usr/bin/env python3
"""Checks `vramp explain --json` against an independent computation with Python alone.

    bench/check-explain.py [--vramp PROGRAM] SNAPSHOT...

For each device of each PyTorch snapshot: peak of the allocated bytes, the demand when a request
failed, and the bytes and blocks of every call stack and of the largest blocks, at the failure or
the peak. Snapshots may be plain or gzip. Only for recordings that begin before the first allocation.
"""
import argparse
import collections
import gzip
import json
import pickle
import subprocess
import sys

# A snapshot is plain data. Anything else in the pickle is refused.
class Plain(pickle.Unpickler):
    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"{module}.{name} is not plain data")


def load(path):
    with open(path, "rb") as file:
        is_gzip = file.read(2) == b"\x1f\x8b"
    with (gzip.open if is_gzip else open)(path, "rb") as file:
        return Plain(file).load()


def replayed(events):
    """Returns peak, demand, and the live blocks at the failure or, without one, at the peak."""
    live, total, peak, demand, at = {}, 0, 0, 0, None
    failed = False
    for event in events:
        action, size = event["action"], event.get("size", 0)
        if action == "alloc":
            live[event["addr"]] = event
            total += size
            if total > peak:
                peak = total
                at = at if failed else None
        elif action == "free_requested":
            block = live.pop(event["addr"])
            if at is None and total == peak and not failed:
                at = dict(live)
                at[event["addr"]] = block
            total -= block["size"]
        elif action == "oom":
            demand = max(demand, total + size)
            if not failed:
                failed, at = True, dict(live)
    return peak, max(peak, demand), live if at is None else at


def frames(event):
    return tuple((f["filename"], f["line"], f["name"]) for f in event.get("frames") or [])


def check(program, path):
    explained = subprocess.run(
        [program, "explain", "--json", "--top", "1000000", path], capture_output=True, text=True, check=True
    )
    rows = [json.loads(line) for line in explained.stdout.splitlines()]
    wrong = []

    def same(what, found, expected):
        if found != expected:
            wrong.append(f"{path}: {what}: vramp says {found}, expected {expected}")

    devices = [(d, events) for d, events in enumerate(load(path)["device_traces"]) if events]
    same("devices", [row["trace_device"] for row in rows], [device for device, _ in devices])
    for row, (_, events) in zip(rows, devices):
        peak, demand, live = replayed(events)
        same("peak", row["peak_live_bytes"], peak)
        same("demand", row["demand_bytes"], demand)
        moment = row["failure"]["moment"] if row["failure"] else row["peak"]
        stacks = collections.defaultdict(lambda: [0, 0])
        for block in live.values():
            stacks[frames(block)][0] += block["size"]
            stacks[frames(block)][1] += 1
        # Stacks with the same bytes may be in any order.
        same(
            "order of stacks",
            [stack["bytes"] for stack in moment["stacks"]],
            sorted((sums[0] for sums in stacks.values()), reverse=True),
        )
        same(
            "stacks",
            sorted((stack["bytes"], stack["blocks"]) for stack in moment["stacks"]),
            sorted(tuple(sums) for sums in stacks.values()),
        )
        # The innermost frame is never folded.
        for stack in moment["stacks"]:
            if stack["stack"] is not None:
                key = (stack["bytes"], stack["blocks"])
                inner = {k[0] for k, sums in stacks.items() if tuple(sums) == key and k}
                named = any(f":{line} {name}" in stack["frames"][-1] for _, line, name in inner)
                if not named:
                    wrong.append(f"{path}: {stack['frames'][-1]} is none of {inner}")
        same(
            "largest blocks",
            [block["bytes"] for block in moment["largest"]],
            sorted((block["size"] for block in live.values()), reverse=True),
        )
        for shares in ("sites", "categories", "streams"):
            total = sum(share["bytes"] for share in moment[shares])
            same(shares, total, sum(block["size"] for block in live.values()))
    return wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--vramp", default="target/release/vramp")
    parser.add_argument("snapshots", nargs="+")
    args = parser.parse_args()
    wrong = [line for path in args.snapshots for line in check(args.vramp, path)]
    for line in wrong[:20]:
        print(line, file=sys.stderr)
    print(f"{len(args.snapshots)} snapshots checked, {len(wrong)} differences")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
