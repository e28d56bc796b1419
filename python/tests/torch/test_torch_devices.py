"""Several devices and processes: what is opened, and where vramp is enabled."""

import os
import subprocess
import sys

import pytest
from support import ON_CARD, VRAMP, run_script

pytestmark = pytest.mark.skipif(ON_CARD, reason="contexts are counted by the fake runtime")

# A context takes some hundred MB of a card. The fake runtime counts how often each one was retained.
START = """
import ctypes, os
name = next(path for path in os.environ["LD_PRELOAD"].split(":") if "libcudart" in path)
runtime = ctypes.CDLL(name)
runtime.fake_cuda_retained.restype = ctypes.c_size_t
torch.cuda.init()
devices = range(torch.cuda.device_count())
opened = lambda: [device for device in devices if runtime.fake_cuda_retained(device)]
block = lambda size, device: torch.empty(size << 20, dtype=torch.uint8, device=f"cuda:{device}")
"""


@pytest.mark.skipif(not VRAMP, reason="PyTorch's own allocator retains no context itself")
def test_statistics_history_and_snapshots_open_no_device():
    text = """
def read():
    for device in devices:
        torch.cuda.memory_stats(device)
        torch.cuda.memory_summary(device)
        torch.cuda.reset_peak_memory_stats(device)
        torch.cuda.reset_accumulated_memory_stats(device)
        torch.cuda.set_per_process_memory_fraction(0.5, device)
    torch.cuda.memory._record_memory_history(max_entries=100)
    torch.cuda.memory_snapshot()
    torch.cuda.memory._snapshot()
    torch.cuda.empty_cache()
    torch.cuda.memory._record_memory_history(None)

read()
print(opened())
kept = block(64, 2)
read()
print(opened())
kept = block(64, 1)
print(opened())
"""
    done = run_script(START + text, FAKE_CUDA_DEVICES="4")
    assert done.stdout == "[]\n[2]\n[1, 2]\n", done.stderr


def test_a_device_that_was_not_used_has_no_memory():
    text = """
kept = block(64, 1)
for device in devices:
    stats = torch.cuda.memory_stats(device)
    print(stats["allocated_bytes.all.current"] >> 20, stats["reserved_bytes.all.peak"] >= 64 << 20,
          torch.cuda.max_memory_reserved(device) >= 64 << 20, stats["num_alloc_retries"])
print(sorted({segment["device"] for segment in torch.cuda.memory_snapshot()}))
"""
    done = run_script(START + text, FAKE_CUDA_DEVICES="3")
    assert done.stdout == "0 False False 0\n64 True True 0\n0 False False 0\n[1]\n", done.stderr


def test_history_has_the_first_growth_of_a_device_that_is_used_after_its_start():
    text = """
torch.cuda.memory._record_memory_history(max_entries=100)
kept = block(64, 1)
traces = torch.cuda.memory._snapshot()["device_traces"]
grown = [event for event in traces[1] if event["action"] in ("segment_alloc", "segment_map")]
print(len(traces[0]), sum(event["size"] for event in grown) == torch.cuda.memory_reserved(1))
torch.cuda.memory._record_memory_history(None)
more = block(512, 1)
print(sum(map(len, torch.cuda.memory._snapshot()["device_traces"])))
"""
    done = run_script(START + text, FAKE_CUDA_DEVICES="2")
    assert done.stdout == "0 True\n0\n", (done.stdout, done.stderr)


@pytest.mark.skipif(not VRAMP, reason="it is about vramp")
def test_processes_of_torchrun_and_of_spawn_use_vramp(tmp_path):
    worker = tmp_path / "worker.py"
    worker.write_text("""
import os
import torch
import torch.multiprocessing
import vramp.torch

def use(rank):
    kept = torch.empty(30 << 20, dtype=torch.uint8, device=f"cuda:{rank}")
    print(rank, vramp.torch.route(), torch.cuda.memory_reserved(rank) >= 30 << 20, flush=True)

if __name__ == "__main__":
    if "LOCAL_RANK" in os.environ:
        use(int(os.environ["LOCAL_RANK"]))
    else:
        torch.multiprocessing.spawn(use, nprocs=2)
""")
    for arguments in ([str(worker)], ["-m", "torch.distributed.run", "--nproc-per-node=2", str(worker)]):
        done = subprocess.run(
            [sys.executable, "-m", "vramp", "run", "--quiet", *arguments],
            env={**os.environ, "FAKE_CUDA_DEVICES": "2"},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert sorted(done.stdout.splitlines()) == ["0 compiled True", "1 compiled True"], done.stderr
