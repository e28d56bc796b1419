"""Regions: memory that leaves the card by tag, and comes back at the same addresses."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterable
from functools import cache
from operator import index
from types import TracebackType
from typing import Literal, SupportsIndex, TypeAlias

from . import _native
from ._errors import ClosedError, RangeError, RegionError
from ._native import Pool
from ._types import RegionStatus

Tags: TypeAlias = "str | Iterable[str] | None"
Device: TypeAlias = "int | Pool | None"
"""The number of a device, a pool of the program's own, or None for the shared pools of all devices."""


class _Begun(threading.local):
    """The scopes of one object that the calling thread has begun, the innermost one last."""

    def __init__(self) -> None:
        self.numbers: list[int] = []


class _Scope:
    """A part of the calling thread's program whose allocations go to a region, or to the pool.

    Several threads may be within one object.
    """

    __slots__ = ("_arguments", "_scopes")

    def __init__(
        self,
        tag: str | None,
        backup: str,
        readonly: bool,
        graph_pins: bool,
        device: int | None,
        pool: Pool | None,
    ) -> None:
        self._arguments = (tag, backup, readonly, graph_pins, device, pool)
        self._scopes = _Begun()

    def __enter__(self) -> None:
        if self._arguments[1] == "disk":
            _name_default_disk()
        self._scopes.numbers.append(_native.region_begin(*self._arguments))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._scopes.numbers:
            tag = self._arguments[0]
            where = "within disable_region()" if tag is None else f"in the region {tag!r}"
            wrong = RegionError(f"this thread is not {where}: end it on the thread that began it, once")
            wrong.tag = tag
            raise wrong
        _native.region_end(self._scopes.numbers.pop())


@cache
def _name_default_disk() -> None:
    _native.region_default_disk(tempfile.gettempdir())


def _split(device: Device) -> tuple[int | None, Pool | None]:
    return (None, device) if isinstance(device, Pool) else (device, None)


def region(
    tag: str,
    *,
    backup: Literal["host", "disk", "none"] = "host",
    readonly: bool = False,
    graph_pins: bool = True,
    device: Device = None,
) -> _Scope:
    """Returns a context manager within which allocations of the calling thread go to a region.

    The region is created if there is none with the tag. `backup` says where its contents go while it is
    paused: to pinned memory of the host, to the disk of the pool's open `vramp.Tiers` or the one of
    `set_region_disk`, or nowhere. With `readonly` the program writes a
    block once, before the first pause after its allocation, and later pauses copy nothing. Of nested
    regions the innermost one counts. The region lives until `remove_region`, or as long as its pool. `device` is
    the number of a device, a pool of the program's own, or None for the shared pools of all devices.

    Where captured graphs pin what is live (several processes of `torch.distributed`), a region cannot be paused
    while such a graph exists. `graph_pins=False` says that no collective of a graph uses memory of the region,
    which then can.

    Within a generator or coroutine that yields in the block, what the thread runs meanwhile allocates in the
    region too.

    A thread leaves what it entered. Leaving on another thread, as a generator that is closed there does, raises
    RegionError, and the first thread stays within the region until it calls `__exit__` of the object.
    Entering raises OptionError, a ValueError, if the tag exists with other options.
    """
    if not isinstance(tag, str):
        raise TypeError(f"a tag is a str, and not {tag!r}: disable_region() allocates in no region")
    return _Scope(tag, backup, readonly, graph_pins, *_split(device))


def remove_region(tag: str, *, device: Device = None) -> None:
    """Removes a region without live blocks, after its idle memory went back to the card.

    A program with a tag for each job leaves nothing then. `region` objects with the tag create the region anew
    when something is allocated in them, and a registration of `on_pressure` leaves a removed region out. Its counts
    leave those of `Pool.stats`. Waits for the work of the pool's streams, with the interpreter's lock released.

    Raises RegionError, and the region is as before: for a tag that no region has, while the region has blocks, or
    memory that sleeps, is exported, pinned or kept for graphs, and while a call of another thread uses it. Of
    several devices those before the one that failed are done.
    """
    for pool, _own in _chosen([tag], device):
        _native.region_remove(pool, tag)


def set_region_disk(directory: str | os.PathLike[str], *, limit: int | str | None = None) -> None:
    """Names the directory for backups on the disk, of pools without tiers that have a disk.

    `limit` is the most bytes there, a number or a text such as "500GiB"; the default is the free space. Without
    this call the first region with `backup="disk"` takes the directory for temporary files, which has to be on a
    disk. Copies made before stay where they are. The files have no names where the filesystem allows that, and
    end with the process.

    Raises OSError for a directory that cannot be used.
    """
    _native.region_disk(directory, None if limit is None else str(limit))


def disable_region(device: Device = None) -> _Scope:
    """Returns a context manager within which allocations go to the pool, also inside `region`."""
    return _Scope(None, "host", False, True, *_split(device))


def _pools(device: Device) -> list[tuple[int | None, Pool]]:
    if isinstance(device, Pool):
        return [(None, device)]
    devices = _native.opened_devices() if device is None else [device]
    found = ((number, _native.opened(number)) for number in devices)
    return [(number, pool) for number, pool in found if pool is not None]


def status(device: Device = None) -> list[RegionStatus]:
    """Returns the state of each region, by device and tag. Waits for no pause."""
    return [
        state for number, pool in _pools(device) for state in _native.regions_status(pool, number)
    ]


def _chosen(tags: Tags, device: Device) -> list[tuple[Pool, list[str]]]:
    """Returns the pools with the tags that each has. Raises RegionError for a tag that none has."""
    pools = [pool for _, pool in _pools(device)]
    if tags is None:
        chosen = [(pool, _all_tags(pool)) for pool in pools]
    else:
        wanted = _checked(tags)
        chosen = [(pool, _native.regions_known(pool, wanted)) for pool in pools]
        found = {tag for _, own in chosen for tag in own}
        for tag in wanted:
            if tag not in found:
                every = sorted({known for pool in pools for known in _all_tags(pool)})
                error = RegionError(f"there is no region {tag!r}: there are {every}")
                error.tag = tag
                raise error
    return [(pool, own) for pool, own in chosen if own]


def _all_tags(pool: Pool) -> list[str]:
    return [status.tag for status in _native.regions_status(pool, None)]


def _checked(tags: str | Iterable[str]) -> list[str]:
    """Returns each tag once. Raises TypeError for what is no text."""
    all_tags = [tags] if isinstance(tags, (str, bytes)) else tags
    if not isinstance(all_tags, Iterable):
        raise TypeError(f"a tag is a str, and several are in a list: {tags!r} is neither")
    wanted = list(all_tags)
    for tag in wanted:
        if not isinstance(tag, str):
            raise TypeError(f"a tag is a str, and not {tag!r}")
    return list(dict.fromkeys(wanted))


class RegionMove:
    """A pause or a resume in progress on a thread of its own."""

    def __init__(self, work: Callable[[], None], chosen: list[tuple[Pool, list[str]]]) -> None:
        self._chosen = chosen
        self._error: BaseException | None = None
        self._over = threading.Event()

        def run() -> None:
            try:
                work()
            except BaseException as error:
                self._error = error
            finally:
                self._over.set()

        threading.Thread(target=run, name="vramp-region").start()

    def wait(self, timeout: float | None = None) -> None:
        """Waits for the end. Raises the exception of the move, or TimeoutError after `timeout` seconds."""
        if timeout is not None and timeout > threading.TIMEOUT_MAX:
            timeout = None
        if not self._over.wait(timeout):
            raise TimeoutError("the regions are still being moved: wait again")
        if self._error is not None:
            raise self._error

    @property
    def done(self) -> bool:
        """True once it has ended, also with an exception."""
        return self._over.is_set()

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes copied, and bytes to copy of the regions whose move has begun."""
        copied = to_copy = 0
        for pool, tags in self._chosen:
            try:
                states = _native.regions_status(pool, None, tags)
            except ClosedError:
                continue
            for state in states:
                copied += state.copied
                to_copy += state.to_copy
        return copied, to_copy


def _move(
    call: Callable[[Pool, list[str]], None], tags: Tags, device: Device, wait: bool
) -> RegionMove | None:
    chosen = _chosen(tags, device)

    def work() -> None:
        for pool, own in chosen:
            call(pool, own)

    if not wait:
        return RegionMove(work, chosen)
    work()
    return None


def pause(
    tag: Tags = None,
    *,
    keep: int | str = "0",
    discard: bool = False,
    wait: bool = True,
    device: Device = None,
) -> RegionMove | None:
    """Puts regions to sleep: their contents are copied away and their memory goes to the card.

    `tag` is a tag, several, or None for all. At most `keep` bytes of each region, a number or a text such
    as "2GiB", stay on the card. Waits for the work of the card's streams, with the interpreter's lock
    released. A region that sleeps as far already is left alone. Frees are served meanwhile; a kernel that
    uses the memory of a sleeping region ends the process's CUDA context.

    With `discard` nothing is copied, copies made before are freed, also those of a region that sleeps already,
    and after the resume all contents of the regions are undefined.

    With `wait=False` a thread does it, and the result is a handle. Raises RegionError; the regions are as
    before then, of the device that failed.
    """
    # Also where there is no region: a mistake shows at the call that has it.
    most = _native.size_argument("keep", str(keep))
    return _move(lambda pool, tags: _native.regions_pause(pool, tags, most, discard), tag, device, wait)


def resume(
    tag: Tags = None, *, prefetch: bool = False, wait: bool = True, device: Device = None
) -> RegionMove | None:
    """Brings regions back to their addresses, with their contents. One that is awake is left alone.

    With `prefetch` nothing comes back yet: contents on a disk are read into pinned host memory, which takes none of
    the card's, so that a later resume copies from there. A second call does nothing, and so does one for a backup
    on the host. If the host is full it raises RegionError, and a resume reads from the disk.

    Other arguments and exceptions are those of `pause`.
    """
    return _move(_native.regions_prefetch if prefetch else _native.regions_resume, tag, device, wait)


def _number(value: SupportsIndex, name: str) -> int:
    number = index(value)
    if not 0 <= number < 1 << 64:
        raise RangeError(f"{name} is {number}: it has at most 64 bits, and no sign")
    return number


def read_backup(address: SupportsIndex, size: SupportsIndex, *, device: Device = None) -> bytearray:
    """Returns `size` bytes of a block in a sleeping region from its copy, by their address on the card.

    Raises RegionError if the region is awake or has no copy of them, or if they are not its contents. From a disk
    that was not prefetched whole pieces of 16 MiB are read. Raises RangeError for a number that is negative or needs
    more than 64 bits.
    """
    address, size = _number(address, "the address"), _number(size, "the size")
    failed = RegionError(f"there is no region with memory at {address:#x}: use the address of a block")
    for _, pool in _pools(device):
        try:
            return _native.region_backup(pool, address, size)
        except RegionError as error:
            failed = error
            if error.tag is not None:
                break
    raise failed


def clean(tag: Tags, *, device: Device = None) -> None:
    """Copies the contents of regions while they are awake, so that the next pause copies nothing.

    The program writes nothing in the regions from this call until they were paused and resumed.
    """
    _move(_native.regions_clean, tag, device, True)


class _Registered:
    """What was registered with pools, until it is closed."""

    def __init__(self, numbers: list[tuple[Pool, int]]) -> None:
        self._numbers = numbers
        self._lock = threading.Lock()

    def close(self) -> None:
        """Ends it, and waits for calls in progress on other threads. A second call does nothing."""
        with self._lock:
            numbers, self._numbers = self._numbers, []
        for pool, number in numbers:
            try:
                _native.regions_unregister(pool, number)
            except ClosedError:
                pass  # the pool ended, and the registration with it

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class PressureRegistration(_Registered):
    """Regions that are paused when memory runs short, until it is closed. It is a context manager."""

    def __enter__(self) -> PressureRegistration:
        return self


class SleepCallbacks(_Registered):
    """Functions around the sleep of regions, until it is closed. It is a context manager."""

    def __enter__(self) -> SleepCallbacks:
        return self


def around_sleep(
    name: str,
    before: Callable[[], object] | None = None,
    after: Callable[[], object] | None = None,
    *,
    tags: Tags = None,
    device: Device = None,
    collective: bool = False,
) -> SleepCallbacks:
    """Calls `before()` before memory of regions leaves the card, and `after()` once it is back at its addresses.

    They end what other libraries know of the memory and make it again: registrations of NCCL, UCX, NIXL and network
    cards, whose pins keep a region awake. `tags` is a tag or several, of regions that exist or not; None means all.
    `device` is the number of a device, a pool of the program's own, or None for the shared pools that are open; each
    calls them on its own. `name` is for errors.

    Every pause calls them, on its thread: `before` in the order of registration, before it looks for pins, and once
    until `after` was called. `after` is called in reverse order once none of the regions sleeps. If `before` raises,
    no memory leaves, `after` of those before it is called, and the pause raises CallbackError. If `after` raises, the
    memory is back, the others are called, and the resume raises CallbackError; the next resume calls it again.

    With `collective` they wait for other processes, which pause and resume too: then regions are not paused by
    `on_pressure`. They may allocate and register; to pause, resume or read a backup in them is an InUseError.
    """
    if not isinstance(name, str):
        raise TypeError(f"a name is a str, and not {name!r}")
    wanted = None if tags is None else _checked(tags)
    pools = [_native.pool(device)] if isinstance(device, int) else [pool for _, pool in _pools(device)]
    if not pools:
        raise RegionError("no pool is open yet: allocate memory first, or pass device=0")
    numbers: list[tuple[Pool, int]] = []
    try:
        for pool in pools:
            number = _native.regions_around_sleep(pool, name, before, after, wanted, collective)
            numbers.append((pool, number))
    except BaseException:
        SleepCallbacks(numbers).close()
        raise
    return SleepCallbacks(numbers)


def on_pressure(tags: Tags, *, device: Device = None) -> PressureRegistration:
    """Pauses regions, in this order and as far as needed, when a request on their device finds no memory.

    It may be a request of the pool or of any region of the device, or a resume; the region whose own request
    or resume it is stays as it is. A region that was paused has to be resumed before it is used. Raises
    RegionError for an unknown tag.
    """
    chosen = _chosen(tags, device)
    return PressureRegistration(
        [(pool, _native.regions_on_pressure(pool, own)) for pool, own in chosen]
    )
