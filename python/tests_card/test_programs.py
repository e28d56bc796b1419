"""Programs of PyTorch and CuPy that meet vramp on a card, each in a process of its own.

`python -m pytest python/tests_card/test_programs.py`, with PyTorch, CuPy and the package installed.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import vramp


def run(
    folder: Path, code: str, *arguments: str, under_run: tuple[str, ...] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a program, under `python -m vramp run` with these options if there are some."""
    (folder / "program.py").write_text(code)
    start = [] if under_run is None else ["-m", "vramp", "run", *under_run]
    command = [sys.executable, *start, "program.py", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=180)


SPAWN = """
import sys, torch, torch.multiprocessing as mp

def child(received, sent, is_late):
    if is_late:
        torch.zeros(1, device="cuda")
    try:
        tensor = received.get()
        tensor.add_(1)
        torch.cuda.synchronize()
        sent.put(float(tensor.sum()))
        del tensor
    except Exception as error:
        sent.put(f"{type(error).__name__}: {error}")

if __name__ == "__main__":
    import vramp.torch
    vramp.torch.enable()
    context = mp.get_context("spawn")
    for is_late in (False, True):
        to, back = context.Queue(), context.Queue()
        process = context.Process(target=child, args=(to, back, is_late))
        process.start()
        tensor = torch.ones(1000, device="cuda")
        to.put(tensor)
        print(back.get(timeout=120))
        process.join(60)
        print(process.exitcode, float(tensor.sum()))
"""


def test_a_spawned_child_that_receives_a_tensor_enables_vramp_or_is_told_to(tmp_path: Path) -> None:
    done = run(tmp_path, SPAWN)
    assert done.returncode == 0, done.stderr
    received, ended, refused, late = done.stdout.splitlines()
    assert (received, ended) == ("2000.0", "0 2000.0")
    assert "InUseError" in refused and "vramp.torch.enable()" in refused
    assert late == "0 1000.0"


OUT_OF_MEMORY = """
import sys, torch
kept = [torch.empty(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(4)]
for _ in range(3):
    try:
        torch.empty(1 << 42, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        print("caught")
if sys.argv[1] == "ends":
    torch.empty(1 << 42, dtype=torch.uint8, device="cuda")
"""


@pytest.mark.parametrize(
    ("wanted", "how", "status", "written"),
    [
        ("at.pickle", "ends", 1, ["at.pickle"]),
        ("at.pickle", "goes on", 0, []),
        ("all:at.pickle", "goes on", 0, ["at.2.pickle", "at.3.pickle", "at.pickle"]),
    ],
)
def test_an_out_of_memory_error_leaves_a_snapshot_that_explain_reads(
    tmp_path: Path, wanted: str, how: str, status: int, written: list[str]
) -> None:
    done = run(tmp_path, OUT_OF_MEMORY, how, under_run=("--quiet", "--snapshot-on-oom", wanted))
    assert done.returncode == status and done.stdout.count("caught") == 3, done.stderr
    assert sorted(path.name for path in tmp_path.glob("*.pickle")) == written
    for name in written:
        (explained,) = vramp.explain(tmp_path / name)
        assert explained.failure is not None
        assert (explained.failure.live_bytes, explained.failure.size_bytes) == (4 << 30, 1 << 42)


SAVER = """
import torch
from torch_memory_saver import torch_memory_saver as saver
saver.memory_margin_bytes = 4 << 30
with saver.region("weights", enable_cpu_backup=True, cpu_backup_backend="mmap"):
    weights = torch.arange(1 << 28, device="cuda")
before = torch.cuda.mem_get_info()[0]
saver.pause("weights")
print((torch.cuda.mem_get_info()[0] - before) >> 30)
saver.resume("weights")
print(bool((weights == torch.arange(1 << 28, device="cuda")).all()))
try:
    torch.empty(torch.cuda.mem_get_info()[0] - (1 << 30), dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError:
    print("the margin holds")
print(type(saver).__module__)
"""


def test_a_program_of_torch_memory_saver_runs_as_it_is(tmp_path: Path) -> None:
    done = run(tmp_path, SAVER, under_run=("--quiet",))
    assert done.returncode == 0, done.stderr
    gave_back, is_same, margin, module = done.stdout.splitlines()
    # 2 GiB, less what pinning them takes on the card.
    assert (gave_back, is_same, margin) == ("1", "True", "the margin holds")
    assert module == "vramp.compat.torch_memory_saver"


CUPY = """
import gc, random, threading, cupy, vramp.cupy
vramp.cupy.install()

def block():
    return cupy.cuda.alloc(random.randint(1, 50_000))

def cycle(length):
    first = [None, block()]
    last = first
    for _ in range(length):
        last = [last, block()]
    first[0] = last

def work():
    for turn in range(300):
        kept = [block() for _ in range(random.randint(1, 50))]
        cycle(50)
        if turn % 10 == 0:
            gc.collect()
        del kept

threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
gc.collect()
print("live:", vramp.pool().stats().live)
vramp.pool().audit()
"""


@pytest.mark.parametrize("turn", range(3))
def test_threads_that_allocate_into_cycles_beside_collections_corrupt_nothing(tmp_path: Path, turn: int) -> None:
    done = run(tmp_path, CUPY)
    assert (done.returncode, done.stdout) == (0, "live: 0\n"), done.stderr
