"""The page allocator of kvcached: which pages an engine has, which stay mapped for the next request, and the file in
/dev/shm that `kvctl` and `kvtop` read and write.

A page is in one of four places: in use, `reserved` (mapped, for the next request), free, or beyond the limit. Its
memory is mapped and unmapped without the lock; pages that a thread moves meanwhile are counted in `_moving`, and a
thread that finds no page waits for them.

Deliberately absent: memory. `kvcached.py` maps and unmaps, in this process or, by the callbacks of the program, in
others.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence

MapPages = Callable[[Sequence[int]], None]
Broadcast = Callable[[int, list[int]], None]

_POLL_SECONDS = 0.1
"""How often the thread reads the limit in the file."""

_USAGE = struct.Struct("=qqq")
_PAIR = struct.Struct("=qq")


class InternalPage:
    """The blocks of one page."""

    __slots__ = ("_blocks", "_free", "page_id", "page_size")

    def __init__(self, page_id: int, page_size: int) -> None:
        self.page_id = page_id
        self.page_size = page_size
        self._blocks = 0
        self._free: list[int] = []

    def init(self, block_mem_size: int) -> None:
        """Cuts the page into blocks, all free."""
        start, end = self.get_block_range(self.page_id, self.page_size, block_mem_size)
        self._free = list(range(start, end))
        self._blocks = len(self._free)

    def alloc(self, num_blocks: int = 1) -> list[int]:
        """Takes the blocks that have been free for longest. Raises RuntimeError if there are too few."""
        if num_blocks > len(self._free):
            raise RuntimeError(
                f"page {self.page_id} has {len(self._free)} free blocks, and not {num_blocks}: ask for no more "
                "than num_free_blocks()"
            )
        taken, self._free = self._free[:num_blocks], self._free[num_blocks:]
        return taken

    def free(self, block_id: int) -> None:
        """Returns a block."""
        self._free.append(block_id)

    def free_batch(self, block_ids: Sequence[int]) -> None:
        """Returns blocks."""
        self._free.extend(block_ids)

    def empty(self) -> bool:
        """Returns True if all blocks are free."""
        return len(self._free) == self._blocks

    def full(self) -> bool:
        """Returns True if no block is free."""
        return not self._free

    def num_free_blocks(self) -> int:
        """Returns the number of free blocks."""
        return len(self._free)

    def get_free_blocks(self) -> list[int]:
        """Returns the free blocks."""
        return list(self._free)

    @staticmethod
    def get_block_range(page_id: int, page_size: int, block_mem_size: int) -> tuple[int, int]:
        """Returns the first block of a page, and the one after its last. Blocks across two pages are in neither."""
        return -(-page_id * page_size // block_mem_size), (page_id + 1) * page_size // block_mem_size

    @staticmethod
    def get_num_blocks(page_size: int, block_mem_size: int) -> int:
        """Returns the number of blocks that fit into a page."""
        return page_size // block_mem_size


class UsageFile:
    """Three numbers in /dev/shm: the limit, what is in use, and what is reserved, in bytes over all layers.

    Other processes write the first, and this one the others.
    """

    def __init__(self, name: str, group: int, limit: int) -> None:
        if not name:
            name = os.environ.get("KVCACHED_IPC_NAME") or f"kvcached_engine_{os.getpgrp()}"
            name += f"_g{group}" if group else ""
        self.path = os.path.join("/dev/shm", name)
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._end = weakref.finalize(self, _end_file, self._file, self.path, os.getpid())
        self._write(_USAGE.pack(limit, 0, 0), 0)

    def _write(self, data: bytes, offset: int) -> None:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            os.pwrite(self._file, data, offset)
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def write_usage(self, used: int, reserved: int) -> None:
        """Writes the usage and leaves the limit as it is."""
        self._write(_PAIR.pack(used, reserved), _USAGE.size - _PAIR.size)

    def limit(self) -> int | None:
        """Returns the limit. None if the file was removed or cut."""
        try:
            if not os.path.samestat(os.stat(self.path), os.fstat(self._file)):
                return None
        except FileNotFoundError:
            return None
        data = os.pread(self._file, _USAGE.size, 0)
        return int(_USAGE.unpack(data)[0]) if len(data) == _USAGE.size else None


def _end_file(file: int, path: str, process: int) -> None:
    os.close(file)
    if os.getpid() == process:
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass


class Wanted:
    """Says that pages should be mapped ahead. Guarded by the lock of the pages."""

    def __init__(self, lock: threading.Lock) -> None:
        self.changed = threading.Condition(lock)
        # At first, no page is reserved.
        self.is_short = True


class Pages:
    """Pages of one group, by number. Threads may share it."""

    def __init__(
        self,
        pages: int,
        bounds: tuple[int, int],
        map_pages: MapPages,
        unmap_pages: MapPages,
        note_usage: Callable[[int, int], None],
    ) -> None:
        self._map, self._unmap, self._note_usage = map_pages, unmap_pages, note_usage
        self.total = pages
        self.vacant = pages
        self.min_reserved, self.max_reserved = min(pages, bounds[0]), min(pages, bounds[1])
        # Guards all that follows.
        self._lock = threading.Lock()
        self._came = threading.Condition(self._lock)
        """A page came into a list."""
        self.wanted = Wanted(self._lock)
        self._next = pages
        self._free = deque(range(pages))
        self._reserved: deque[int] = deque()
        self._beyond: deque[int] = deque()
        self._moving = 0
        self._waiting = 0
        self._resizing = threading.Lock()

    def state(self) -> dict[str, int]:
        """Returns the counts of one moment."""
        with self._lock:
            return {
                "total_pages": self.total,
                "free_pages": self.vacant,
                "inuse_pages": self.total - self.vacant,
                "reserved_pages": len(self._reserved),
            }

    def _note(self) -> None:
        self._note_usage(self.total - self.vacant, len(self._reserved))
        if self._waiting:
            self._came.notify_all()

    def _call_for_pages(self) -> None:
        if not self.wanted.is_short:
            self.wanted.is_short = True
            self.wanted.changed.notify_all()

    def take(self, refills: bool) -> int:
        """Returns a page that is mapped: a reserved one, or else the first free one."""
        with self._lock:
            while True:
                if self._reserved:
                    page = self._reserved.popleft()
                    self.vacant -= 1
                    if refills and len(self._reserved) < self.min_reserved:
                        self._call_for_pages()
                    self._note()
                    return page
                if self._free:
                    page = self._free.popleft()
                    self.vacant -= 1
                    break
                if not self._moving:
                    raise RuntimeError(
                        f"no page is left of {self.total}: free blocks, or raise the limit (kvctl limit)"
                    )
                self._waiting += 1
                self._came.wait()
                self._waiting -= 1
        try:
            self._map([page])
        except Exception as error:
            with self._lock:
                self._free.appendleft(page)
                self.vacant += 1
                self._came.notify_all()
            raise RuntimeError(f"page {page} was not mapped: {error}") from error
        with self._lock:
            if refills and len(self._reserved) < self.min_reserved:
                self._call_for_pages()
            self._note()
        return page

    def give(self, pages: Sequence[int]) -> None:
        """Takes pages back: some stay mapped, the others are unmapped."""
        with self._lock:
            self.vacant += len(pages)
            kept = max(0, self.max_reserved - len(self._reserved))
            self._reserved.extend(pages[:kept])
            rest = list(pages[kept:])
            self._moving += len(rest)
            self._note()
        self._unmap_moving(rest)

    def _unmap_moving(self, pages: Sequence[int]) -> None:
        """Unmaps pages that are counted in `_moving`. Those of a failed call stay mapped, and reserved."""
        if not pages:
            return
        is_unmapped = False
        try:
            self._unmap(pages)
            is_unmapped = True
        finally:
            with self._lock:
                self._moving -= len(pages)
                # Chosen with the lock: `sort` replaces the list.
                (self._free if is_unmapped else self._reserved).extend(pages)
                self._note()

    def trim(self) -> None:
        """Unmaps what is reserved."""
        with self._lock:
            pages = list(self._reserved)
            self._reserved.clear()
            self._moving += len(pages)
        self._unmap_moving(pages)

    def refill(self, most: int) -> None:
        """Maps pages ahead, `most` at most, until as many are reserved as should be."""
        with self._lock:
            wanted = min(self.min_reserved - len(self._reserved), len(self._free), most)
            pages = [self._free.popleft() for _ in range(wanted)]
            self._moving += len(pages)
        if not pages:
            return
        is_mapped = False
        try:
            self._map(pages)
            is_mapped = True
        finally:
            with self._lock:
                self._moving -= len(pages)
                if is_mapped:
                    self._reserved.extend(pages)
                else:
                    self._free.extendleft(reversed(pages))
                self._note()

    def resize(self, total: int) -> bool:
        """Changes the number of pages. Returns False if more are in use."""
        with self._resizing:
            with self._lock:
                if total < self.total - self.vacant:
                    return False
                if total >= self.total:
                    self._grow(total - self.total)
                    return True
                must_trim = len(self._free) < self.total - total
            if must_trim:
                self.trim()
            with self._lock:
                fewer = self.total - total
                if fewer > len(self._free):
                    return False
                self._beyond.extend(self._free.pop() for _ in range(fewer))
                self.vacant -= fewer
                self.total = total
                self._note()
                return True

    def _grow(self, more: int) -> None:
        back = [self._beyond.popleft() for _ in range(min(more, len(self._beyond)))]
        first, self._next = self._next, self._next + more - len(back)
        self._free.extend((*back, *range(first, self._next)))
        self.vacant += more
        self.total += more
        self._note()

    def sort(self) -> None:
        """Puts the free pages into the order of their numbers."""
        with self._lock:
            self._free = deque(sorted(self._free))


class Refiller:
    """A thread that calls `work` ten times a second, and when pages are wanted: then with True.

    It ends with the object of `work`.
    """

    def __init__(self, wanted: Wanted, work: Callable[[bool], None]) -> None:
        self._wanted = wanted
        self._is_running = True
        self._thread = threading.Thread(
            target=self._run, args=(weakref.WeakMethod(work),), name="vramp-kvcached", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread and waits for it."""
        with self._wanted.changed:
            self._is_running = False
            self._wanted.changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self, work: weakref.WeakMethod[Callable[[bool], None]]) -> None:
        while True:
            with self._wanted.changed:
                if self._is_running and not self._wanted.is_short:
                    self._wanted.changed.wait(_POLL_SECONDS)
                if not self._is_running:
                    return
                is_short, self._wanted.is_short = self._wanted.is_short, False
            call = work()
            if call is None:
                return
            call(is_short)
            del call
