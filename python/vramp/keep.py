"""Memory of a card that outlives its process: a keeper holds it under a name.

    keeper = vramp.keep.connect()                        # starts `vramp keep` if none runs

    # the first process loads, those after it open what it has loaded: no copy, read-only
    kept = keeper.load("llama-8b/0", model, build=lambda: model.load_state_dict(read()), digest="weights.safetensors 3f")

    # a trainer updates weights in place, and an engine takes them between two steps
    with trained.writing():                              # trained = keeper.open("policy", readonly=False, lock="none")
        copy_weights_into(trained.tensors())
    epoch = kept.yield_to_writer()

The memory is on the card once, however many processes have it open. When one ends, by SIGKILL too, its map and its lock
are gone and the memory stays. The keeper is a small process without a CUDA context. See the guide on kept memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from . import _native
from ._errors import InUseError, KeepError, KeepTimeoutError, NotKeptError, OptionError, OutOfMemoryError, TornError
from ._native import Kept
from ._types import KeptEntry, KeptHolder
from .turns import default_directory

__all__ = [
    "KeepError",
    "KeepTimeoutError",
    "Keeper",
    "Kept",
    "KeptEntry",
    "KeptHolder",
    "KeptTensors",
    "NotKeptError",
    "TornError",
    "connect",
]

_START = 10.0
"""Seconds that a keeper may take to start."""


def connect(
    directory: str | os.PathLike[str] | None = None,
    *,
    start: bool = True,
    timeout: float = 5.0,
    idle_exit: float | None = None,
) -> Keeper:
    """Returns the keeper of a directory that only the user may use, by default the one that turns and budgets use.

    If none runs, `vramp keep` is started, detached from this process and its terminal, unless `start` is False. One that
    is started so ends after `idle_exit` seconds without memory and processes; None lets it run on. The keeper has
    `timeout` seconds for each answer; waits for other processes have timeouts of their own.

    Raises KeepError if there is none and it is not to be started, or does not start.
    """
    keeper = Keeper(directory, timeout=timeout)
    if keeper.pid is None:
        if not start:
            raise KeepError(f"no keeper runs in {keeper.directory}: start one with `vramp keep`, or pass start=True")
        keeper._start(idle_exit)
    return keeper


class Keeper:
    """The keeper of a directory. It has no connection of its own, and may be pickled."""

    def __init__(self, directory: str | os.PathLike[str] | None = None, *, timeout: float = 5.0) -> None:
        self.directory = os.fspath(default_directory() if directory is None else directory)
        self.timeout = timeout

    def __repr__(self) -> str:
        return f"<vramp.keep.Keeper in {self.directory}>"

    @property
    def pid(self) -> int | None:
        """The keeper's process; None if none runs."""
        return _native.keeper_pid(self.directory, self.timeout)

    def _start(self, idle_exit: float | None) -> None:
        command = [sys.executable, "-m", "vramp", "keep", "--directory", self.directory]
        if idle_exit is not None:
            command += ["--idle-exit", str(idle_exit)]
        # It must not hold a pipe of this process open, nor end with its terminal.
        null = subprocess.DEVNULL
        started = subprocess.Popen(
            command, stdin=null, stdout=null, stderr=subprocess.PIPE, start_new_session=True, text=True
        )
        assert started.stderr is not None
        end = time.monotonic() + _START
        while self.pid is None:
            if started.poll() is not None:
                # Another process may have started one meanwhile.
                text = started.stderr.read().strip()
                if self.pid is not None:
                    break
                raise KeepError(f"the keeper did not start: {text or f'exit code {started.returncode}'}")
            if time.monotonic() > end:
                raise KeepError(f"the keeper did not start within {_START:.0f} s: run `vramp keep` to see why")
            time.sleep(0.002)
        started.stderr.close()
        # It is no child to wait for, and its end no warning.
        started.returncode = 0

    def draft(
        self,
        name: str,
        size: int | str,
        *,
        pool: _native.Pool | None = None,
        priority: int = 0,
        kept_for: float | None = None,
        part: int | str | None = None,
        timeout: float = 30.0,
    ) -> Kept:
        """Begins memory of a name: at most `size` bytes, which `Kept.place` creates as they are needed.

        It becomes the memory of the name with `Kept.commit_draft`, as a whole. A second draft of the name waits for the
        first, up to `timeout` seconds; `Kept.current` says what there is then. The keeper drops memory without holders
        by `priority`, the lowest first, when it passes its limit, and after `kept_for` seconds.

        Raises KeepTimeoutError, KeepError, OutOfMemoryError or DriverError.
        """
        return _pool(pool).kept_draft(
            self.directory,
            self.timeout,
            name,
            size,
            part=part,
            priority=priority,
            kept_for=kept_for,
            timeout=timeout,
        )

    def open(
        self,
        name: str,
        *,
        readonly: bool = True,
        lock: Literal["none", "read", "write"] | None = None,
        same_addresses: bool = True,
        pool: _native.Pool | None = None,
        timeout: float = 30.0,
    ) -> Kept:
        """Opens the memory of a name without a copy, at its publisher's addresses if they are free and wanted.

        `readonly` memory cannot be written by work of the card: a write ends the CUDA context, and arrays say that they
        are read-only. The lock is "read" by default. Waits for it up to `timeout` seconds.

        Raises NotKeptError, KeepTimeoutError, TornError, KeepError or DriverError.
        """
        return _pool(pool).kept_open(
            self.directory,
            self.timeout,
            name,
            readonly=readonly,
            lock="read" if lock is None else lock,
            same_addresses=same_addresses,
            timeout=timeout,
        )

    def entries(self) -> list[KeptEntry]:
        """Returns what is kept, with the processes that have it open."""
        return _native.keeper_entries(self.directory, self.timeout)

    def remove(self, name: str) -> None:
        """Removes a name. Processes that have its memory open keep it; otherwise it is freed."""
        _native.keeper_remove(self.directory, self.timeout, name)

    def evict(self, nbytes: int | str, *, pool: _native.Pool | None = None) -> int:
        """Frees memory of the pool's card that no process has open, the lowest priority and the longest idle first, until
        so many bytes were freed. Returns how many."""
        info = _pool(pool).device_info
        return _native.keeper_evict(self.directory, self.timeout, info.uuid or info.id, nbytes)

    def stop(self) -> None:
        """Ends the keeper. What no process has open is freed."""
        _native.keeper_stop(self.directory, self.timeout)

    def publish(
        self,
        name: str,
        tensors: Any,
        *,
        digest: str | bytes | None = None,
        readonly: bool = True,
        pool: _native.Pool | None = None,
        priority: int = 0,
        kept_for: float | None = None,
        timeout: float = 30.0,
    ) -> KeptTensors:
        """Moves PyTorch tensors into memory of a name: those of a module, or of a dictionary by name.

        A module's parameters and buffers lie there afterwards, and what they took before is freed one by one, so that at
        most one tensor is there twice. Tensors of the host become tensors of the card. Tensors that share memory go on
        sharing it. With `readonly` this process too may only read them, and has the lock for that; otherwise it has no lock:
        see `KeptTensors.writing`.
        """
        with _Draft(self, name, tensors, pool, priority, kept_for, timeout) as draft:
            return draft.publish(digest, readonly)

    def tensors(
        self,
        name: str,
        *,
        readonly: bool = True,
        lock: Literal["none", "read", "write"] | None = None,
        pool: _native.Pool | None = None,
        timeout: float = 30.0,
    ) -> KeptTensors:
        """Opens tensors that `publish` moved, without a copy."""
        kept = self.open(name, readonly=readonly, lock=lock, pool=pool, timeout=timeout)
        return KeptTensors(kept)

    def load(
        self,
        name: str,
        module: Any,
        build: Callable[[], Any],
        *,
        digest: str | bytes | None = None,
        pool: _native.Pool | None = None,
        priority: int = 0,
        kept_for: float | None = None,
        timeout: float = 600.0,
    ) -> KeptTensors:
        """Fills a module with kept weights, and loads and publishes them if there are none with this digest.

        The first process calls `build()`, which fills the module (a module on the meta device: `module.to_empty()` and
        load), and moves the weights into kept memory. Those that come meanwhile wait, up to `timeout` seconds, and those
        that come later map them. If the process that loads ends before it has published, the next that waits loads.
        """
        want = None if digest is None else _digest(digest)
        found = self._matching(name, want, pool, timeout)
        if found is None:
            try:
                draft = _Draft(self, name, module, pool, priority, kept_for, timeout)
            except OutOfMemoryError:
                # The keeper may have no room beside what another process loaded while this one waited.
                found = self._matching(name, want, pool, timeout)
                if found is None:
                    raise
            else:
                with draft:
                    # Another process may have loaded it while this one waited for the right to do so.
                    if draft.kept.current is not None:
                        found = self._matching(name, want, pool, timeout)
                    if found is None:
                        build()
                        return draft.publish(digest, True)
        found.fill(module)
        return found

    def _matching(
        self, name: str, digest: bytes | None, pool: _native.Pool | None, timeout: float
    ) -> KeptTensors | None:
        try:
            found = self.tensors(name, pool=pool, timeout=timeout)
        except (NotKeptError, TornError):
            return None
        if digest is None or found.kept.digest == digest:
            return found
        found.kept.close()
        return None


class KeptTensors:
    """PyTorch tensors in kept memory. Closing `kept` needs them deleted."""

    def __init__(self, kept: Kept) -> None:
        self.kept = kept
        layout = json.loads(kept.layout or b"{}")
        if layout.get("format") != _FORMAT:
            raise KeepError(f"`{kept.name}` has no tensors: `Keeper.publish` did not make it")
        self._described: dict[str, dict[str, Any]] = layout["tensors"]

    def __repr__(self) -> str:
        return f"<vramp.keep.KeptTensors of {self.kept!r}>"

    def names(self) -> list[str]:
        """Returns the names of the tensors."""
        return list(self._described)

    def tensors(self) -> dict[str, Any]:
        """Returns the tensors by name, each a view of the kept memory."""
        return {name: _view(self.kept, described) for name, described in self._described.items()}

    def fill(self, module: Any, *, strict: bool = True) -> None:
        """Makes parameters and buffers of a module views of the kept memory. What they had is freed.

        The module may be on the meta device. Raises OptionError, before anything is changed, if one is missing here, or has
        another shape or type; with `strict=False` those are left as they are.
        """
        places = list(_places(module))
        wrong = []
        for name, _, _, old in places:
            described = self._described.get(name)
            if described is None:
                wrong.append(f"{name} is missing")
            elif [*old.shape] != described["shape"] or _dtype(old) != described["dtype"]:
                wrong.append(
                    f"{name} is {_dtype(old)} {[*old.shape]}, and {described['dtype']} {described['shape']} is kept"
                )
        if wrong and strict:
            shown = "; ".join(wrong[:5]) + ("; ..." if len(wrong) > 5 else "")
            raise OptionError(
                f"`{self.kept.name}` does not fit the module in {len(wrong)} tensors: {shown}. Publish it under another name"
            )
        replaced: dict[int, Any] = {}
        for name, owner, key, old in places:
            described = self._described.get(name)
            if described is None or [*old.shape] != described["shape"] or _dtype(old) != described["dtype"]:
                continue
            new = replaced.get(id(old))
            if new is None:
                new = replaced[id(old)] = _replaced(old, _view(self.kept, described))
            _set(owner, key, new)

    @contextlib.contextmanager
    def writing(self, timeout: float = 30.0) -> Iterator[dict[str, Any]]:
        """Takes the lock for writing, and commits the next epoch at the end of the block. Work of the card is waited for
        before. After an exception in the block nothing is committed, as some of it may be written, and this process keeps the
        lock: write all of it in another block, or close the memory, which leaves it torn."""
        self.kept.write(timeout)
        yield self.tensors()
        _synchronize()
        self.kept.commit(lock="none")

    def close(self) -> None:
        """Closes the memory; its tensors have been deleted."""
        self.kept.close()


_FORMAT = "vramp.tensors/1"

_GIVE_BACK = 1 << 30
"""Bytes that moved tensors may leave behind in PyTorch's cache."""


class _Draft:
    """Tensors on their way into kept memory."""

    def __init__(
        self,
        keeper: Keeper,
        name: str,
        tensors: Any,
        pool: _native.Pool | None,
        priority: int,
        kept_for: float | None,
        timeout: float,
    ) -> None:
        self.source = tensors
        self._moved = 0
        self._size = _size(tensors)
        self._begin: Callable[[], Kept] = lambda: keeper.draft(
            name, self._size, pool=pool, priority=priority, kept_for=kept_for, timeout=timeout
        )
        self.kept = self._begin()

    def __enter__(self) -> _Draft:
        return self

    def __exit__(self, *_: object) -> None:
        """Gives the name up for others, if it was not published. A module may have some of its tensors in the memory."""
        if self.kept.is_draft:
            self.kept.abandon()
            with contextlib.suppress(InUseError):
                self.kept.close()

    def publish(self, digest: str | bytes | None, readonly: bool) -> KeptTensors:
        size = _size(self.source)
        empty = [name for name, tensor in _tensors(self.source).items() if tensor.is_meta]
        if empty:
            raise OptionError(f"`{empty[0]}` is on the meta device: give the tensors memory and values before they are kept")
        if size > self._size:
            # They were loaded as a larger type.
            self.kept.close()
            self._size = size
            self.kept = self._begin()
        described: dict[str, Any] = {}
        shared = _shared(self.source)
        placed: dict[int, int] = {}
        replaced: dict[int, Any] = {}
        owners = {name: (owner, key) for name, owner, key, _ in _places(self.source)}
        seen: dict[int, dict[str, Any]] = {}
        for name, tensor in _tensors(self.source).items():
            # A tensor may have several names.
            if id(tensor) not in seen:
                address = _storage(tensor)
                if address in shared:
                    if address not in placed:
                        placed[address] = self._copy_storage(shared[address])
                    offset = placed[address] + tensor.storage_offset() * tensor.element_size()
                    stride = [*tensor.stride()]
                else:
                    offset, stride = self._copy(tensor)
                seen[id(tensor)] = {
                    "dtype": _dtype(tensor),
                    "shape": [*tensor.shape],
                    "stride": stride,
                    "offset": offset,
                }
            described[name] = seen[id(tensor)]
            if name in owners:
                new = replaced.get(id(tensor))
                if new is None:
                    new = replaced[id(tensor)] = _replaced(tensor, _view(self.kept, described[name]))
                _set(*owners[name], new)
                self._give_back(new.nbytes)
        if not described:
            self.kept.place(1)
        _synchronize()
        layout = json.dumps({"format": _FORMAT, "tensors": described}).encode()
        self.kept.commit_draft(layout, _digest(digest), readonly)
        if not readonly:
            # Others may read what is there before the first write.
            self.kept.release_unchanged()
        return KeptTensors(self.kept)

    def _give_back(self, size: int) -> None:
        """Has PyTorch give what tensors left to the card, for those after them."""
        import torch

        self._moved += size
        if self._moved >= _GIVE_BACK and torch.cuda.is_available():
            # PyTorch may refuse it within a pool of another allocator, which frees at its end.
            with contextlib.suppress(RuntimeError):
                torch.cuda.empty_cache()
            self._moved = 0

    def _copy(self, tensor: Any) -> tuple[int, list[int]]:
        import torch

        length = tensor.numel() * tensor.element_size()
        offset = self.kept.place(max(length, 1))
        stride = [*torch.empty_like(tensor, device="meta").stride()]
        if length:
            to = _bytes(self.kept, offset, length).view(tensor.dtype).as_strided([*tensor.shape], stride)
            to.copy_(tensor.detach())
        return offset, stride

    def _copy_storage(self, storage: Any) -> int:
        import torch

        offset = self.kept.place(max(storage.nbytes(), 1))
        if storage.nbytes():
            source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            _bytes(self.kept, offset, storage.nbytes()).copy_(source)
        return offset


def _size(tensors: Any) -> int:
    """Returns the bytes that they need at most. Raises OptionError for what cannot be kept."""
    import torch

    if not isinstance(tensors, Mapping | torch.nn.Module):
        raise OptionError(f"{type(tensors)} is kept as a module or a dictionary of tensors by name")
    size = 1
    for name, tensor in _tensors(tensors).items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise OptionError(f"{name!r} is {type(tensor)}: use tensors with names that are strings")
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
            raise OptionError(f"`{name}` is no dense tensor: keep the tensors of which it consists")
        size += max(int(tensor.numel()) * int(tensor.element_size()), 1) + 511
    # Storages that several share are moved whole, and may be larger than their tensors.
    return size + sum(int(storage.nbytes()) + 511 for storage in _shared(tensors).values())


def _pool(pool: _native.Pool | None) -> _native.Pool:
    return _native.pool() if pool is None else pool


def _digest(digest: str | bytes | None) -> bytes:
    """Returns 32 bytes that stand for what the caller says about the contents."""
    if digest is None:
        return bytes(32)
    if isinstance(digest, bytes) and len(digest) == 32:
        return digest
    return hashlib.sha256(digest.encode() if isinstance(digest, str) else digest).digest()


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _span(shape: list[int], stride: list[int]) -> int:
    """Elements from the first to behind the last."""
    if 0 in shape:
        return 0
    return 1 + sum((length - 1) * step for length, step in zip(shape, stride, strict=True))


def _bytes(kept: Kept, offset: int, length: int) -> Any:
    """Returns bytes of kept memory as a PyTorch tensor.

    PyTorch takes no arrays that say that they are read-only, so the capsule does not say it.
    """
    import torch

    array = kept.array((length,), "uint8", offset=offset)
    on_card = array.__dlpack_device__()[0] == 2
    stream = torch.cuda.current_stream().cuda_stream or 1 if on_card else None
    return torch.utils.dlpack.from_dlpack(array.__dlpack__(stream=stream))


def _view(kept: Kept, described: dict[str, Any]) -> Any:
    import torch

    dtype = getattr(torch, described["dtype"])
    shape, stride = described["shape"], described["stride"]
    length = _span(shape, stride) * dtype.itemsize
    return _bytes(kept, described["offset"], length).view(dtype).as_strided(shape, stride)


def _places(tensors: Any) -> Iterator[tuple[str, Any, str, Any]]:
    """Yields name, owner, attribute and tensor of each parameter and buffer; nothing of a dictionary."""
    if isinstance(tensors, Mapping):
        return
    for prefix, module in tensors.named_modules(remove_duplicate=False):
        for kind in (module._parameters, module._buffers):
            for key, tensor in kind.items():
                if tensor is not None:
                    yield (f"{prefix}.{key}" if prefix else key), module, key, tensor


def _tensors(tensors: Any) -> dict[str, Any]:
    if isinstance(tensors, Mapping):
        return dict(tensors)
    return {name: tensor for name, _, _, tensor in _places(tensors)}


def _storage(tensor: Any) -> int:
    """Returns what tensors of one storage have in common; 0 if there is no memory."""
    return 0 if tensor.is_meta else int(tensor.untyped_storage()._cdata)


def _shared(tensors: Any) -> dict[int, Any]:
    """Returns the storages in which several different tensors lie."""
    found: dict[int, Any] = {}
    first: dict[int, Any] = {}
    for tensor in _tensors(tensors).values():
        address = _storage(tensor)
        if address and first.setdefault(address, tensor) is not tensor:
            found[address] = tensor.untyped_storage()
    return found


def _replaced(old: Any, data: Any) -> Any:
    """Returns a parameter or buffer with other memory: the same object where PyTorch can do that."""
    import torch

    if not old.is_meta and old.device == data.device:
        old.data = data
        return old
    if not isinstance(old, torch.nn.Parameter):
        return data
    # Loaders keep functions and shards in classes and attributes of parameters.
    new = torch.Tensor._make_subclass(type(old), data, old.requires_grad)
    new.__dict__.update(old.__dict__)
    return new


def _set(owner: Any, key: str, tensor: Any) -> None:
    kind = owner._parameters if key in owner._parameters else owner._buffers
    kind[key] = tensor


def _synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
