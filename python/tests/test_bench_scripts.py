"""The scripts of bench for machines with a card: what they count, write and list, and what they say of a
missing package. The workloads run on the simulator, with the package that takes PyTorch's place."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
FAKE = Path(__file__).resolve().parent / "fake_torch"


def script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name.replace("-", "_"), BENCH / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(name: str, *arguments: str, path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-B", str(BENCH / f"{name}.py"), *arguments],
        env={**os.environ, "PYTHONPATH": str(path), **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )


def event(action: str, addr: int, size: int, stream: int = 7) -> dict[str, Any]:
    return {"action": action, "addr": addr, "size": size, "stream": stream, "frames": [], "time_us": 1}


TRACE = [
    event("segment_alloc", 4096, 2 << 20),
    event("alloc", 4096, 512),
    event("free_requested", 99, 64),
    event("alloc", 8192, 1024, stream=8),
    event("free_requested", 4096, 512),
    event("free_completed", 4096, 512),
    event("alloc", 4096, 256),
]
SEGMENTS = [
    {"total_size": 2 << 20, "segment_pool_id": (1, 0)},
    {"total_size": 9 << 20, "segment_pool_id": (0, 0)},
]
SNAPSHOT = {"segments": SEGMENTS, "device_traces": [TRACE]}


@pytest.fixture
def without_torch(tmp_path: Path) -> Path:
    """A folder whose module torch cannot be imported."""
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('there is none', name='torch')\n")
    return tmp_path


def test_a_capture_is_summed_up_by_its_events() -> None:
    assert script("record-captures").summary(SNAPSHOT, (1, 0)) == {
        "blocks": 3,
        "bytes": 1792,
        "peak_live": 1536,
        "live_at_end": 1280,
        "streams": 2,
        "older_blocks_freed": 1,
        "private_pool": 2 << 20,
    }


def test_equal_snapshots_are_equal_files(tmp_path: Path) -> None:
    captures = script("record-captures")
    paths = [tmp_path / name for name in ("one.pickle.gz", "two.pickle.gz")]
    assert len({captures.write(SNAPSHOT, path) for path in paths}) == 1
    first, second = (path.read_bytes() for path in paths)
    assert first == second
    unpacked = gzip.decompress(first)
    assert unpacked[:2] == b"\x80\x04" and pickle.loads(unpacked) == SNAPSHOT


def test_captures_need_pytorch(without_torch: Path) -> None:
    done = run("record-captures", str(without_torch / "out"), "unet", "gnn", path=without_torch)
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 1 and [line["name"] for line in reports] == ["unet", "gnn"]
    assert all(line["missing"] == "torch" for line in reports)
    listed = run("record-captures", "--list", path=without_torch)
    assert listed.returncode == 0 and len(listed.stdout.splitlines()) >= 6
    unknown = run("record-captures", str(without_torch), "alexnet", path=without_torch)
    assert unknown.returncode == 2 and "there is no model alexnet: use llama, " in unknown.stderr


def test_checks_fail_without_pytorch(without_torch: Path) -> None:
    done = run("check-torch", "pool-serves", path=without_torch)
    first, last = done.stdout.splitlines()
    assert done.returncode == 1 and first.startswith("FAIL pool-serves-what-is-made-inside")
    assert first.endswith("package torch is missing") and last == "0 of 1 checks passed"
    unknown = run("check-torch", "no-such-check", path=without_torch)
    assert unknown.returncode == 2 and "no check has no-such-check in its name" in unknown.stderr


def test_checks_are_listed_by_route(without_torch: Path) -> None:
    listed = run("check-torch", "--list", path=without_torch).stdout.splitlines()
    assert listed == list(script("check-torch").CHECKS)
    for route in ("compiled", "pluggable"):
        assert f"{route}-graph-replays-as-eager" in listed
    assert {name.split("-")[0] for name in listed} == {"compiled", "pluggable", "pool"}


WORKLOADS = """
import sys
import torch

assert sys.argv[1:] == ["small"]


def w_small(steps=2):
    for step in range(steps):
        block = torch.cuda.memory.current.malloc((step % 2 + 1) * 4 << 20, 0, None)
        loss = torch.Tensor()
        loss.backward()
        torch.cuda.memory.current.free(block, 0, 0, None)
        yield


W = {name[2:]: value for name, value in globals().items() if name.startswith("w_")}
sys.exit("what follows W is not run")
"""


@pytest.fixture
def workloads(tmp_path: Path) -> Path:
    path = tmp_path / "workloads.py"
    path.write_text(WORKLOADS)
    return path


def test_a_workload_runs_on_vramp(workloads: Path) -> None:
    driver = script("torch-workloads")
    assert driver.names_in(str(workloads)) == ["small"]
    # Without a compiler: statistics then come from the library, by the pluggable route.
    variables = {"PATH": str(workloads.parent), "VRAMP_DEVICE": "sim:h200", "CXX": ""}
    arguments = ["small", "--one", "--allocators", "vramp", "--steps", "4"]
    done = run("torch-workloads", str(workloads), *arguments, path=FAKE, **variables)
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout)
    assert (line["steps"], line["loss"], line["error"], line["route"]) == (4, 0.25, None, "pluggable")
    assert line["peak_live"] == 8 << 20 and line["allocations"] == 4 and line["retries"] == 0
    assert line["vramp"]["live"] == 0 and line["vramp"]["allocated"] == 4
    assert line["device_used_beside"] == line["device_used"] - line["peak_reserved"]

    runs = [line | {"allocator": name, "steady_s": s} for name, s in [("native", 2.0), ("vramp", 1.0)]]
    medians = list(driver.summary("small", 0, runs))
    assert [(m["allocator"], m["steady_over_native"], m["loss_minus_native"]) for m in medians] == [
        ("native", 1.0, 0.0),
        ("vramp", 0.5, 0.0),
    ]


def test_each_allocator_has_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = script("torch-workloads")
    monkeypatch.setenv("VRAMP_CONF", "limit=1GiB, preset=vramp")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    monkeypatch.setenv("VRAMP_DEVICE", "sim")
    assert driver.ALLOCATORS == ("native", "expandable", "async", "vramp")
    native, expandable, ordered, ours = (driver.environment(name, 5 << 30) for name in driver.ALLOCATORS)
    assert "PYTORCH_CUDA_ALLOC_CONF" not in native and "VRAMP_DEVICE" not in native
    assert expandable["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert ordered["PYTORCH_CUDA_ALLOC_CONF"] == "backend:cudaMallocAsync"
    assert ours["VRAMP_CONF"] == f" preset=vramp,limit={5 << 30}"
    assert driver.environment("vramp", 0)["VRAMP_CONF"] == "limit=1GiB, preset=vramp"
