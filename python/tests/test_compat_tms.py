"""Programs for torch_memory_saver on the simulator: which memory sleeps, wakes and keeps its contents."""

from __future__ import annotations

import inspect
import math
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import pytest
from compat_memory import Memory, fill, holds, phases, reserved, status
from conftest import MIB, run_python

import vramp
import vramp.compat.torch_memory_saver as tms

@pytest.fixture
def saver(monkeypatch: pytest.MonkeyPatch) -> Iterator[tms.TorchMemorySaver]:
    """A saver that knows no region yet, in a process without PyTorch."""
    monkeypatch.setattr(tms, "find_spec", lambda name: None)
    monkeypatch.setattr(tms, "_names", {})
    yield tms.TorchMemorySaver()


def test_paused_memory_is_the_cards_and_comes_back_at_its_address(
    saver: tms.TorchMemorySaver, memory: Memory
) -> None:
    outside = memory.block(8 * MIB, 1)
    before = reserved()
    with saver.region("simple", enable_cpu_backup=True):
        inside = memory.block(64 * MIB, 2)
    at = inside.ptr
    saver.pause()
    assert reserved() == before and holds(outside, 1)
    saver.resume()
    assert reserved() >= before + 64 * MIB
    assert inside.ptr == at and holds(inside, 2)


def test_tags_sleep_alone_and_together(saver: tms.TorchMemorySaver, memory: Memory) -> None:
    with saver.region("two weights", enable_cpu_backup=True):
        weights = memory.block(32 * MIB, 3)
        with saver.region("two cache"):
            memory.block(32 * MIB, 4)
    tags = ("two weights", "two cache")
    saver.pause("two cache")
    saver.pause("two cache")
    assert phases(*tags) == ["awake", "asleep"] and holds(weights, 3)
    saver.pause()
    assert phases(*tags) == ["asleep", "asleep"]
    saver.resume("two weights")
    assert phases(*tags) == ["awake", "asleep"] and holds(weights, 3)
    saver.resume()
    saver.resume()
    assert phases(*tags) == ["awake", "awake"]


def test_only_what_has_a_backup_is_copied(saver: tms.TorchMemorySaver, memory: Memory) -> None:
    with saver.region("backed up", enable_cpu_backup=True, cpu_backup_backend="pinned"):
        kept = memory.block(20 * MIB, 5)
    with saver.region("not backed up"):
        memory.block(20 * MIB, 6)
    saver.pause()
    assert status("backed up").copied == 20 * MIB
    assert (status("not backed up").copied, status("not backed up").on_host) == (0, 0)
    saver.resume()
    assert holds(kept, 5)


def test_a_nested_region_has_its_own_backup(saver: tms.TorchMemorySaver, memory: Memory) -> None:
    with saver.region("nested", enable_cpu_backup=True):
        first = memory.block(16 * MIB, 7)
        with saver.region("nested gradients"):
            memory.block(48 * MIB, 8)
        second = memory.block(16 * MIB, 9)
    saver.pause()
    assert status("nested").copied == 32 * MIB and status("nested gradients").copied == 0
    saver.resume()
    assert holds(first, 7) and holds(second, 9)


def test_a_tag_may_have_several_backups(saver: tms.TorchMemorySaver, memory: Memory) -> None:
    with saver.region("mixed", enable_cpu_backup=True):
        kept = memory.block(16 * MIB, 1)
    with saver.region("mixed"):
        memory.block(16 * MIB, 2)
    with saver.region("mixed", enable_cpu_backup=True):
        also = memory.block(16 * MIB, 3)
    saver.pause("mixed")
    assert phases("mixed", "mixed (none)") == ["asleep", "asleep"]
    assert status("mixed").copied == 32 * MIB
    saver.resume("mixed")
    assert holds(kept, 1) and holds(also, 3)


def test_a_region_is_paused_by_any_saver(saver: tms.TorchMemorySaver, memory: Memory) -> None:
    with saver.region("shared by savers"):
        memory.block(4 * MIB, 1)
    other = tms.TorchMemorySaver()
    other.pause()
    assert phases("shared by savers") == ["asleep"]
    other.resume("shared by savers")
    assert phases("shared by savers") == ["awake"]


def test_unknown_and_empty_tags_do_nothing(saver: tms.TorchMemorySaver) -> None:
    before = {found.tag: found.phase for found in vramp.status()}
    saver.pause("no such tag")
    saver.resume("no such tag")
    saver.pause()
    with saver.region("empty"):
        pass
    saver.pause("empty")
    saver.resume("empty")
    after = {found.tag: found.phase for found in vramp.status()}
    assert before.items() <= after.items() and set(after) <= {*before, "empty"}


def test_memory_outside_of_regions_serves_training_while_they_sleep(
    saver: tms.TorchMemorySaver, memory: Memory
) -> None:
    with saver.region("training", enable_cpu_backup=True):
        weights = memory.block(32 * MIB, 1)
        saver.pause()
        with pytest.raises(vramp.RegionError, match="resume it"):
            vramp.pool().malloc(MIB)
        with saver.disable():
            temporary = memory.block(32 * MIB, 2)
            assert holds(temporary, 2)
            temporary.free()
        saver.resume()
        later = memory.block(32 * MIB, 3)
    with saver.disable():
        outside = memory.block(8 * MIB, 4)
    saver.pause()
    assert status("training").asleep == 64 * MIB and holds(outside, 4)
    saver.resume()
    assert holds(weights, 1) and holds(later, 3)


def test_what_was_free_at_the_end_of_disable_is_the_cards(saver: tms.TorchMemorySaver, memory: Memory) -> None:
    vramp.pool().trim()
    with saver.region("beside", enable_cpu_backup=True):
        memory.block(32 * MIB, 9)
    saver.pause()
    before = reserved()
    with saver.disable():
        block = vramp.pool().malloc(64 * MIB)
        assert reserved() >= before + 64 * MIB
        block.free()
    assert reserved() == before


def test_trainer_and_engine_take_turns_by_two_tags(saver: tms.TorchMemorySaver, memory: Memory) -> None:
    with saver.region("engine weights", enable_cpu_backup=True):
        weights = memory.block(24 * MIB, 0)
    with saver.region("engine cache"):
        cache = memory.block(96 * MIB, 0)
    places = (weights.ptr, cache.ptr)
    with_engine = reserved()
    for step in range(1, 6):
        saver.pause("engine cache")
        saver.pause("engine weights")
        assert reserved() < with_engine
        gradients = memory.block(100 * MIB, step)
        assert holds(gradients, step)
        gradients.free()
        vramp.pool().trim()
        saver.resume("engine weights")
        assert holds(weights, step - 1)
        fill(weights, step)
        saver.resume("engine cache")
        fill(cache, step)
        assert holds(cache, step) and (weights.ptr, cache.ptr) == places




def test_a_region_is_of_its_thread(saver: tms.TorchMemorySaver, memory: Memory) -> None:
    with saver.region("thread"):
        memory.block(4 * MIB, 1)
        thread = threading.Thread(target=lambda: memory.block(20 * MIB, 2))
        thread.start()
        thread.join()
    saver.pause("thread")
    assert status("thread").asleep == 4 * MIB and holds(memory.blocks[1], 2)


def test_failures_are_exceptions_and_change_nothing(saver: tms.TorchMemorySaver, memory: Memory) -> None:
    with saver.region("failing", enable_cpu_backup=True):
        block = memory.block(4 * MIB, 1)
    with vramp.pool().pin(block):
        with pytest.raises(vramp.RegionError, match="pinned") as raised:
            saver.pause()
        assert raised.value.tag == "failing" and phases("failing") == ["awake"]
    saver.pause()
    saver.resume()
    assert holds(block, 1)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"enable_cpu_backup": True, "enable_disk_backup": True}, ValueError, "exclude each other"),
        ({"cpu_backup_backend": "pinned"}, ValueError, "needs enable_cpu_backup"),
        ({"enable_cpu_backup": True, "cpu_backup_backend": "paged"}, ValueError, "use pinned or mmap"),
    ],
)
def test_refused_backups_leave_no_region(
    saver: tms.TorchMemorySaver, arguments: dict[str, object], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text), saver.region("refused", **arguments):  # type: ignore[arg-type]
        pass
    saver.pause("refused")
    assert "refused" not in [found.tag for found in vramp.status()]


@pytest.mark.parametrize("backend", ["pinned", "mmap", None])
def test_each_kind_of_host_memory_keeps_the_contents(
    saver: tms.TorchMemorySaver, memory: Memory, backend: str | None
) -> None:
    with saver.region(f"on {backend}", enable_cpu_backup=True, cpu_backup_backend=backend):
        block = memory.block(4 * MIB, 5)
    saver.pause(f"on {backend}")
    saver.resume(f"on {backend}")
    assert holds(block, 5)


def test_a_margin_stays_free(saver: tms.TorchMemorySaver) -> None:
    pool = vramp.pool()
    pool.trim()
    before = pool.stats()
    margin = before.device_free - 100 * MIB
    saver.memory_margin_bytes = margin
    try:
        assert pool.limit == before.reserved + 100 * MIB
        with pytest.raises(vramp.OutOfMemoryError):
            pool.malloc(200 * MIB)
        pool.malloc(64 * MIB).free()
        assert pool.stats().device_free >= margin
    finally:
        saver.memory_margin_bytes = 0
    assert pool.limit is None
    pool.malloc(200 * MIB).free()
    with pytest.raises(ValueError):
        saver.memory_margin_bytes = -1


def test_settings_are_theirs(saver: tms.TorchMemorySaver) -> None:
    assert saver.enabled and saver.retain_cpu_backup is False
    saver.hook_mode = "torch"
    saver.retain_cpu_backup = True
    assert saver.retain_cpu_backup is True
    with pytest.raises(vramp.OptionError, match="preload or torch"):
        saver.hook_mode = "other"  # type: ignore[assignment]
    with pytest.raises(AttributeError):
        assert saver.hook_mode
    with pytest.raises(NotImplementedError):
        assert saver.memory_margin_bytes
    with saver.region("first use"):
        pass
    with pytest.raises(vramp.InUseError, match="before any region") as raised:
        saver.hook_mode = "preload"
    assert isinstance(raised.value, AttributeError), "torch_memory_saver raises that"


class Tensor:
    """A contiguous CUDA tensor of bytes or numbers in a block, as far as a backup asks."""

    is_cuda = True
    device = "cuda:0"

    def __init__(self, block: vramp.Allocation, shape: tuple[int, ...], dtype: str = "uint8") -> None:
        self.shape, self.dtype = shape, numpy.dtype(dtype)
        self.nbytes = self.dtype.itemsize * math.prod(shape)
        self._ptr = block.ptr
        self.contiguous = True

    def is_contiguous(self) -> bool:
        return self.contiguous

    def stride(self) -> tuple[int, ...]:
        return tuple(1 for _ in self.shape)

    def data_ptr(self) -> int:
        return self._ptr


@pytest.mark.parametrize("on_disk", [False, True])
def test_backups_of_paused_tensors_are_read(
    saver: tms.TorchMemorySaver, memory: Memory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, on_disk: bool
) -> None:
    torch: Any = ModuleType("torch")
    torch.frombuffer, torch.empty = numpy.frombuffer, numpy.empty
    monkeypatch.setitem(sys.modules, "torch", torch)
    saver.set_disk_backup_dir(str(tmp_path / "made"))
    tag = "read from the disk" if on_disk else "read from the host"
    with saver.region(tag, enable_cpu_backup=not on_disk, enable_disk_backup=on_disk):
        first, second = memory.block(20 * MIB, 7), memory.block(4096, 8)
    with saver.region("read from nowhere"):
        lost = memory.block(4 * MIB, 9)
    outside = memory.block(4 * MIB, 1)
    bytes_of, numbers = Tensor(first, (20, 1024, 1024)), Tensor(second, (2, 256), "int64")
    assert saver.get_cpu_backup(bytes_of) is None, "it is awake"
    saver.pause()
    assert (status(tag).on_host, status(tag).on_disk)[on_disk] >= 20 * MIB
    for zero_copy in (False, True):
        copy = saver.get_cpu_backup(bytes_of, zero_copy=zero_copy)
        assert copy.shape == bytes_of.shape and (copy == 7).all()
        copy = saver.get_cpu_backup(numbers, zero_copy)
        assert copy.dtype == numpy.int64 and copy.shape == (2, 256) and (copy == 0x0808080808080808).all()
        copy[0, 0] = 1
    assert saver.get_cpu_backup(Tensor(second, (3, 0))).shape == (3, 0)
    for block, text in ((lost, "no copy"), (outside, "not in the contents")):
        with pytest.raises(vramp.RegionError, match=text):
            saver.get_cpu_backup(Tensor(block, (4,)))
    numbers.contiguous = False
    with pytest.raises(vramp.OptionError, match="contiguous"):
        saver.get_cpu_backup(numbers)
    saver.resume()
    assert holds(first, 7) and holds(second, 8)


def test_disk_backups_go_to_the_directory_and_come_back(
    saver: tms.TorchMemorySaver, memory: Memory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tms, "_has_directory", False)
    monkeypatch.setattr(tms, "torch_memory_saver", saver)
    monkeypatch.setenv("TMS_DISK_BACKUP_DIR", str(tmp_path / "of the environment"))
    with saver.region("spilled", enable_disk_backup=True):
        block = memory.block(24 * MIB, 5)
    assert (tmp_path / "of the environment").is_dir()
    place = block.ptr
    for _ in range(2):
        saver.pause("spilled")
        assert phases("spilled") == ["asleep"] and status("spilled").on_disk >= 24 * MIB
        assert status("spilled").on_host == 0
        saver.resume("spilled")
        assert (block.ptr, status("spilled").on_disk) == (place, 0) and holds(block, 5)
    with pytest.raises(OSError):
        saver.set_disk_backup_dir("/proc/nowhere")


# Names and arguments of torch_memory_saver 0.0.10, in their order.
PARAMETERS = {
    "region": ["tag", "enable_cpu_backup", "enable_disk_backup", "cpu_backup_backend"],
    "cuda_graph": [
        "cuda_graph",
        "pool",
        "stream",
        "capture_error_mode",
        "tag",
        "enable_cpu_backup",
        "cpu_backup_backend",
    ],
    "disable": [],
    "pause": ["tag"],
    "resume": ["tag"],
    "get_cpu_backup": ["x", "zero_copy"],
    "set_disk_backup_dir": ["path"],
}
PROPERTIES = {"enabled", "hook_mode", "memory_margin_bytes", "retain_cpu_backup"}


def test_names_and_arguments_are_theirs() -> None:
    assert isinstance(tms.torch_memory_saver, tms.TorchMemorySaver)
    for name, expected in PARAMETERS.items():
        assert list(inspect.signature(getattr(tms.torch_memory_saver, name)).parameters) == expected, name
    for name in PROPERTIES:
        assert isinstance(vars(tms.TorchMemorySaver)[name], property), name
    public = {name for name in vars(tms.TorchMemorySaver) if not name.startswith("_")}
    assert public == {*PARAMETERS, *PROPERTIES}
    assert callable(tms.configure_subprocess)


def test_sent_memory_stays_until_it_is_closed(saver: tms.TorchMemorySaver, memory: Memory) -> None:
    with saver.region("sent", enable_cpu_backup=True):
        block = memory.block(4 * MIB, 1)
    with vramp.pool().export(block), pytest.raises(vramp.RegionError) as raised:
        saver.pause("sent")
    assert raised.value.tag == "sent" and phases("sent") == ["awake"]
    saver.pause("sent")
    assert phases("sent") == ["asleep"]


INITIAL = """
import threading
import vramp
from vramp.compat.torch_memory_saver import torch_memory_saver
blocks = [vramp.pool().malloc(32 << 20)]
thread = threading.Thread(target=lambda: blocks.append(vramp.pool().malloc(8 << 20)))
thread.start()
thread.join()
torch_memory_saver.pause()
print([(found.tag, found.backup, found.phase, found.asleep >> 20) for found in vramp.status()])
with torch_memory_saver.disable():
    vramp.pool().malloc(32 << 20).free()
torch_memory_saver.resume()
print([found.phase for found in vramp.status()])
"""


@pytest.mark.parametrize(("backup", "expected"), [("", "none"), ("TMS_INIT_ENABLE_CPU_BACKUP", "host")])
def test_the_environment_opens_a_region_at_import(backup: str, expected: str) -> None:
    """Only for the thread of the import. Other variables change nothing where no backup is on the disk."""
    ignored = {"TMS_RETAIN_CPU_BACKUP": "0", "TMS_DISK_BACKUP_DIR": "/nowhere", "TMS_DISK_BACKUP_CHUNK_MB": "1"}
    variables = {"TMS_INIT_ENABLE": "1", **({backup: "true"} if backup else {}), **ignored}
    done = run_python(INITIAL, **variables)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str([("default", expected, "asleep", 32)]), "['awake']"]


def test_without_the_variable_there_is_no_region() -> None:
    done = run_python(INITIAL, TMS_INIT_ENABLE="0", TMS_INIT_ENABLE_CPU_BACKUP="1")
    assert done.stdout.splitlines() == ["[]", "[]"], done.stderr


def test_a_wrong_environment_is_refused_at_import() -> None:
    done = run_python(INITIAL, TMS_INIT_ENABLE="1", TMS_INIT_CPU_BACKUP_BACKEND="paged")
    assert done.returncode == 1 and "TMS_INIT_CPU_BACKUP_BACKEND=paged: use pinned or mmap" in done.stderr


CHOSEN = """
import vramp
from vramp.compat.torch_memory_saver import torch_memory_saver
torch_memory_saver.hook_mode = "preload"
print(torch_memory_saver.retain_cpu_backup)
with torch_memory_saver.region("own", enable_cpu_backup=True):
    block = vramp.pool().malloc(32 << 20)
try:
    torch_memory_saver.hook_mode = "torch"
except AttributeError:
    print("too late")
for _ in range(2):
    torch_memory_saver.pause()
    on_host = vramp.pool().stats().host_pinned
    torch_memory_saver.resume()
    print(on_host >= 32 << 20, vramp.pool().stats().host_pinned < 32 << 20)
"""


def test_settings_of_the_environment_are_theirs_and_a_mode_may_still_be_chosen() -> None:
    variables = {"TMS_INIT_ENABLE": "1", "TMS_INIT_CPU_BACKUP_BACKEND": "mmap", "TMS_RETAIN_CPU_BACKUP": "1"}
    done = run_python(CHOSEN, **variables)
    assert done.stdout.splitlines() == ["True", "too late", "True True", "True True"], done.stderr


def test_host_memory_of_mmap_leaves_the_process_at_a_resume(
    saver: tms.TorchMemorySaver, memory: Memory
) -> None:
    vramp.pool().trim()
    before = vramp.pool().stats().host_pinned
    with saver.region("leaves", enable_cpu_backup=True, cpu_backup_backend="mmap"):
        block = memory.block(32 * MIB, 6)
    for _ in range(2):
        saver.pause("leaves")
        assert vramp.pool().stats().host_pinned >= before + 32 * MIB
        saver.resume("leaves")
        assert vramp.pool().stats().host_pinned == before
        assert holds(block, 6)


def test_subprocesses_inherit_only_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "first")
    monkeypatch.delenv("VRAMP_RUN_ROUTE", raising=False)
    with tms.configure_subprocess():
        folder, rest = os.environ["PYTHONPATH"].split(os.pathsep)
        assert os.path.isfile(os.path.join(folder, "sitecustomize.py")) and rest == "first"
        code = "import os, sitecustomize; print(sitecustomize.__file__, os.environ['VRAMP_RUN_ROUTE'])"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip().endswith("auto")
    assert os.environ["PYTHONPATH"] == "first" and "VRAMP_RUN_ROUTE" not in os.environ
