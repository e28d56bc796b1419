"""The interface of torch_memory_saver 0.0.10, implemented by vramp's regions.

    from vramp.compat.torch_memory_saver import torch_memory_saver

    with torch_memory_saver.region("weights", enable_cpu_backup=True):
        weights = torch.empty(1 << 30, device="cuda")
    torch_memory_saver.pause("weights")
    torch_memory_saver.resume("weights")

1. The first use calls `vramp.torch.enable()` where PyTorch is installed. PyTorch must not have used CUDA before.
2. `region` opens a region of vramp. A tag may have regions with different backups: `pause` and `resume` of the tag
   move all of them.
3. `pause` of a paused tag and `resume` of an awake one do nothing, and so does a tag that has no region. What fails
   is an exception; no call ends the process.

TMS_INIT_ENABLE and TMS_INIT_ENABLE_CPU_BACKUP or TMS_INIT_ENABLE_DISK_BACKUP are read when the module is imported:
the importing thread then allocates in the region `default`. Allocations of other threads are outside. At import too,
TMS_INIT_CPU_BACKUP_BACKEND names the kind of host memory of regions that name none, and TMS_RETAIN_CPU_BACKUP sets
`retain_cpu_backup`.
TMS_DISK_BACKUP_DIR names the directory of disk backups where `set_disk_backup_dir` does not; with neither, it is the
one of `vramp.set_region_disk`.

Regions belong to the process: every TorchMemorySaver pauses and resumes the regions of all of them.

Under `python -m vramp run` a program imports this module as `torch_memory_saver`, whatever is installed.

Backups are in vramp's pinned host pool. With `cpu_backup_backend="mmap"` a resume unpins what is then idle of it, and
the process no longer has that memory.

Deliberately absent: TMS_DISK_BACKUP_CHUNK_MB, and what is private or in C there (`tms_pause`).
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any, Literal

import vramp

from .._errors import InUseError, OptionError

__all__ = ["TorchMemorySaver", "configure_subprocess", "torch_memory_saver"]

_Backup = Literal["host", "disk", "none"]
_HookMode = Literal["preload", "torch"]

_DEFAULT = "default"
_BACKENDS = (None, "pinned", "mmap")


def _is_set(name: str) -> bool:
    return os.environ.get(name, "").lower() in ("1", "true", "yes", "on")


_DEFAULT_BACKEND = os.environ.get("TMS_INIT_CPU_BACKUP_BACKEND") or None
if _DEFAULT_BACKEND not in _BACKENDS:
    raise OptionError(f"TMS_INIT_CPU_BACKUP_BACKEND={_DEFAULT_BACKEND}: use pinned or mmap")

_lock = threading.Lock()
# Names of vramp's regions: the first of a tag has the tag's name.
_names: dict[str, dict[_Backup, str]] = {}
# Those whose host memory the process does not keep after a resume.
_transient: set[str] = set()
# Whether the program or TMS_DISK_BACKUP_DIR named the directory of disk backups.
_has_directory = False


class TooLateError(InUseError, AttributeError):
    """A setting was changed after the first use. torch_memory_saver raises AttributeError."""


def _current_device() -> int:
    torch = sys.modules.get("torch")
    return torch.cuda.current_device() if torch is not None and torch.version.cuda else 0


class TorchMemorySaver:
    """Pauses and resumes regions by tag. One object serves all threads."""

    def __init__(self) -> None:
        self._ready = False
        self._retains = _is_set("TMS_RETAIN_CPU_BACKUP")

    @contextmanager
    def region(
        self,
        tag: str = _DEFAULT,
        enable_cpu_backup: bool = False,
        enable_disk_backup: bool = False,
        cpu_backup_backend: str | None = None,
    ) -> Iterator[None]:
        """Within it, allocations of this thread can be paused by the tag. The innermost region counts.

        Raises OptionError for backups that exclude each other. `cpu_backup_backend` is "pinned", "mmap", or None
        for TMS_INIT_CPU_BACKUP_BACKEND; all are in vramp's host pool, and "mmap" leaves it at a resume.
        """
        backup = _backup(enable_cpu_backup, enable_disk_backup, cpu_backup_backend)
        if backup == "disk":
            _read_environment()
        self._enable()
        with _region(tag, backup, cpu_backup_backend):
            yield

    @contextmanager
    def cuda_graph(
        self,
        cuda_graph: Any,
        pool: Any = None,
        stream: Any = None,
        capture_error_mode: str = "global",
        tag: str = _DEFAULT,
        enable_cpu_backup: bool = False,
        cpu_backup_backend: str | None = None,
    ) -> Iterator[None]:
        """As `torch.cuda.graph`; memory that is allocated in the capture can be paused by the tag."""
        backup = _backup(enable_cpu_backup, False, cpu_backup_backend)
        self._enable()
        import torch

        capture = torch.cuda.graph(
            cuda_graph, pool=pool, stream=stream, capture_error_mode=capture_error_mode
        )
        # The region is the outer one: a graph's memory is of the region in which its capture begins.
        with _region(tag, backup, cpu_backup_backend), capture:
            yield

    @contextmanager
    def disable(self) -> Iterator[None]:
        """Within it, allocations are outside of all regions, as they are anyway outside of a region.

        What the pool has idle at the end, beyond what it reserved at the beginning, is the card's again, and idle
        pinned memory is the host's.
        """
        self._enable()
        shared = vramp.pool(_current_device())
        before = shared.stats().reserved
        try:
            with vramp.disable_region():
                yield
        finally:
            shared.trim(keep=before)

    def pause(self, tag: str | None = None) -> None:
        """Gives the memory of a tag, or of all tags, to the card. Waits for the copies.

        Raises RegionError; what was awake is awake again.
        """
        names = _names_of(tag)
        if names:
            vramp.pause(names)

    def resume(self, tag: str | None = None) -> None:
        """Brings the memory of a tag, or of all tags, back to its addresses. Contents without a backup are undefined.

        Raises RegionError or OutOfMemoryError; a later call goes on where this one failed.
        """
        names = _names_of(tag)
        if not names:
            return
        vramp.resume(names)
        with _lock:
            leaves = not _transient.isdisjoint(names)
        if leaves:
            # The host's pool belongs to the process: any pool of a card gives its idle memory back.
            vramp.pool(_current_device()).trim(keep=sys.maxsize)

    @property
    def enabled(self) -> bool:
        """True."""
        return True

    @property
    def hook_mode(self) -> str:
        """Cannot be read. Either value that can be set means the same: both allocate from vramp."""
        raise AttributeError("hook_mode can only be set")

    @hook_mode.setter
    def hook_mode(self, hook_mode: _HookMode) -> None:
        if hook_mode not in ("preload", "torch"):
            raise OptionError(f"hook_mode={hook_mode!r}: use preload or torch")
        if self._ready:
            raise TooLateError("hook_mode cannot be set after the first use: set it before any region")

    @property
    def memory_margin_bytes(self) -> int:
        """Bytes of the card that vramp leaves free. Can only be set."""
        raise NotImplementedError("memory_margin_bytes can only be set")

    @memory_margin_bytes.setter
    def memory_margin_bytes(self, value: int) -> None:
        """Limits the pool of the current device to what it has and what is free now, less the margin. 0 removes the
        limit. Other programs that take memory later are not seen.
        """
        if value < 0:
            raise OptionError(f"memory_margin_bytes={value}: use 0 or more")
        self._enable()
        shared = vramp.pool(_current_device())
        if value == 0:
            shared.limit = None
            return
        stats = shared.stats()
        shared.limit = stats.reserved + max(stats.device_free - value, 0)

    @property
    def retain_cpu_backup(self) -> bool:
        """Whether the program wants the pinned memory of backups kept for the next pause. vramp's pool keeps it as
        long as it is of use either way.
        """
        return self._retains

    @retain_cpu_backup.setter
    def retain_cpu_backup(self, value: bool) -> None:
        self._retains = bool(value)

    def get_cpu_backup(self, x: Any, zero_copy: bool = False) -> Any:
        """Returns a CPU tensor with the contents of a contiguous CUDA tensor whose region is paused.

        None if the region is awake. A backup on the disk is read too. The result is always a copy, also with
        `zero_copy`: it stays as it is after a resume, and writes to it do not change the backup. Raises RegionError
        if the region has no backup, or the tensor is in no region.
        """
        if not x.is_cuda:
            raise OptionError(f"{x.device} has no backup: pass a CUDA tensor")
        if not x.is_contiguous():
            raise OptionError(f"a tensor of strides {x.stride()} has no backup of its own: pass a contiguous one")
        self._enable()
        import torch

        if x.nbytes == 0:
            return torch.empty(x.shape, dtype=x.dtype)
        try:
            contents = vramp.read_backup(x.data_ptr(), x.nbytes)
        except vramp.RegionError as error:
            if any(found.tag == error.tag and found.phase == "awake" for found in vramp.status()):
                return None
            raise
        return torch.frombuffer(contents, dtype=x.dtype).reshape(x.shape)

    def set_disk_backup_dir(self, path: str) -> None:
        """Names the directory of disk backups from now on, and creates it if needed. Raises OSError."""
        global _has_directory
        os.makedirs(path, exist_ok=True)
        vramp.set_region_disk(path)
        with _lock:
            _has_directory = True

    def _enable(self) -> None:
        """Makes vramp PyTorch's allocator, if PyTorch with CUDA is installed."""
        with _lock:
            if self._ready:
                return
            if find_spec("torch") is not None:
                import torch

                if torch.version.cuda is not None:
                    import vramp.torch

                    vramp.torch.enable()
            self._ready = True


def _read_environment() -> None:
    """Names the directory of TMS_DISK_BACKUP_DIR, unless one was named."""
    path = os.environ.get("TMS_DISK_BACKUP_DIR")
    if path and not _has_directory:
        torch_memory_saver.set_disk_backup_dir(path)


def _name(tag: str, backup: _Backup) -> str:
    """Returns the name of the region of a tag with a backup."""
    with _lock:
        names = _names.setdefault(tag, {})
        return names.setdefault(backup, f"{tag} ({backup})" if names else tag)


def _region(tag: str, backup: _Backup, backend: str | None) -> AbstractContextManager[None]:
    name = _name(tag, backup)
    if backup == "host" and (backend or _DEFAULT_BACKEND) == "mmap":
        with _lock:
            _transient.add(name)
    # torch_memory_saver pauses while graphs exist, and leaves it to the program what they use.
    return vramp.region(name, backup=backup, graph_pins=False)


def _names_of(tag: str | None) -> list[str]:
    """Returns the names of the regions of a tag, or of all tags, in which memory was allocated."""
    with _lock:
        tags = [_names.get(tag, {})] if tag else list(_names.values())
        names = [name for of_tag in tags for name in of_tag.values()]
    there = {status.tag for status in vramp.status()}
    return [name for name in names if name in there]


def _backup(on_host: bool, on_disk: bool, backend: str | None) -> _Backup:
    if on_host and on_disk:
        raise OptionError("enable_cpu_backup and enable_disk_backup exclude each other: choose one")
    if backend is not None and not on_host:
        raise OptionError("cpu_backup_backend needs enable_cpu_backup=True")
    if backend not in _BACKENDS:
        raise OptionError(f"cpu_backup_backend={backend!r}: use pinned or mmap")
    return "host" if on_host else "disk" if on_disk else "none"


@contextmanager
def configure_subprocess() -> Iterator[None]:
    """Within it, Python programs that are started use vramp as PyTorch's allocator, without LD_PRELOAD."""
    folder = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "_inherit")
    before = {name: os.environ.get(name) for name in ("PYTHONPATH", "VRAMP_RUN_ROUTE")}
    path = (before["PYTHONPATH"] or "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([folder, *filter(None, path)]))
    os.environ["VRAMP_RUN_ROUTE"] = before["VRAMP_RUN_ROUTE"] or "auto"
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


torch_memory_saver = TorchMemorySaver()
"""The object that programs use."""

region = torch_memory_saver.region
cuda_graph = torch_memory_saver.cuda_graph
disable = torch_memory_saver.disable
pause = torch_memory_saver.pause
resume = torch_memory_saver.resume
get_cpu_backup = torch_memory_saver.get_cpu_backup

# The region that TMS_INIT_ENABLE opens, for as long as the process lives.
_initial = ExitStack()


if _is_set("TMS_INIT_ENABLE"):
    _initial.enter_context(
        torch_memory_saver.region(
            enable_cpu_backup=_is_set("TMS_INIT_ENABLE_CPU_BACKUP"),
            enable_disk_backup=_is_set("TMS_INIT_ENABLE_DISK_BACKUP"),
        )
    )
    # No use by the program: it may still choose a mode.
    torch_memory_saver._ready = False
