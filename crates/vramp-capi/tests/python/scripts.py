"""Tests record-captures.py and check-torch.py without a GPU: what they count, write and list, and that
a missing package is a failure with its name."""

import gzip
import importlib.util
import json
import os
import pickle
import subprocess
import sys
import tempfile

root = sys.argv[1]


def script(name):
    path = os.path.join(root, "bench", f"{name}.py")
    spec = importlib.util.spec_from_file_location(name.replace("-", "_"), path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return path, module


def run(path, *args, folder):
    command = [sys.executable, "-B", path, *args]
    environment = os.environ | {"PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return ran.returncode, ran.stdout.splitlines(), ran.stderr


def event(action, addr, size, stream=7):
    return {"action": action, "addr": addr, "size": size, "stream": stream, "frames": [], "time_us": 1}


recorder, captures = script("record-captures")
trace = [
    event("segment_alloc", 4096, 2 << 20),
    event("alloc", 4096, 512),
    event("free_requested", 99, 64),
    event("alloc", 8192, 1024, stream=8),
    event("free_requested", 4096, 512),
    event("free_completed", 4096, 512),
    event("alloc", 4096, 256),
]
segments = [
    {"total_size": 2 << 20, "segment_pool_id": (1, 0)},
    {"total_size": 9 << 20, "segment_pool_id": (0, 0)},
]
snapshot = {"segments": segments, "device_traces": [trace]}
assert captures.summary(snapshot, (1, 0)) == {
    "blocks": 3,
    "bytes": 1792,
    "peak_live": 1536,
    "live_at_end": 1280,
    "streams": 2,
    "older_blocks_freed": 1,
    "private_pool": 2 << 20,
}
checker, checks = script("check-torch")

with tempfile.TemporaryDirectory() as folder:
    # Equal snapshots are equal files, and read back as they were.
    paths = [os.path.join(folder, name) for name in ("one.pickle.gz", "two.pickle.gz")]
    weights = {captures.write(snapshot, path) for path in paths}
    assert len(weights) == 1
    first, second = (open(path, "rb").read() for path in paths)
    assert first == second
    unpacked = gzip.decompress(first)
    assert unpacked[:2] == b"\x80\x04" and pickle.loads(unpacked) == snapshot

    # In a Python without PyTorch nothing passes, and the missing package is named.
    with open(os.path.join(folder, "torch.py"), "w", encoding="ascii") as stub:
        stub.write("raise ModuleNotFoundError('there is none', name='torch')\n")
    status, lines, _ = run(recorder, folder, "unet", "gnn", folder=folder)
    reports = [json.loads(line) for line in lines]
    assert status == 1 and [line["name"] for line in reports] == ["unet", "gnn"], lines
    assert all(line["missing"] == "torch" for line in reports), lines
    status, lines, _ = run(recorder, folder, "--list", folder=folder)
    assert status == 0 and len(lines) >= 6, lines
    status, _, errors = run(recorder, folder, "alexnet", folder=folder)
    assert status == 2 and "there is no model alexnet: use llama, " in errors, errors

    status, lines, _ = run(checker, "pool-serves", folder=folder)
    assert status == 1 and len(lines) == 2, lines
    assert lines[0].startswith("FAIL pool-serves-what-is-made-inside"), lines
    assert lines[0].endswith("package torch is missing"), lines
    assert lines[1] == "0 of 1 checks passed", lines
    status, _, errors = run(checker, "no-such-check", folder=folder)
    assert status == 2 and "no check has no-such-check in its name" in errors, errors
    _, listed, _ = run(checker, "--list", folder=folder)
    assert "global-graph-replays-as-eager" in listed and listed == list(checks.CHECKS)
print("passed")
