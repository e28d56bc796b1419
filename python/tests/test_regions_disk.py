"""Regions with a backup on the disk, reads of backups, and contents that are given up."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import MIB, run_python

import vramp


@pytest.fixture
def pool() -> Iterator[vramp.Pool]:
    """A pool of 1 GiB."""
    with vramp.open("sim:h200", limit="1GiB") as opened:
        yield opened
        if not opened.is_closed:
            opened.audit()


@pytest.fixture
def blocks(pool: vramp.Pool, tmp_path: Path) -> Iterator[list[vramp.Allocation]]:
    """Blocks of a region with a backup on a disk, full of 0, 1 and 2."""
    vramp.set_region_disk(tmp_path, limit="512MiB")
    with vramp.region("weights", backup="disk", device=pool):
        made = [pool.malloc(size) for size in (100, 3 * MIB, 40 * MIB)]
    for byte, block in enumerate(made):
        ctypes.memset(block.ptr, byte, block.size)
    yield made


def right(blocks: list[vramp.Allocation]) -> bool:
    return all(
        ctypes.string_at(block.ptr, block.size) == bytes([byte]) * block.size for byte, block in enumerate(blocks)
    )


def state(pool: vramp.Pool, tag: str = "weights") -> vramp.RegionStatus:
    return next(found for found in vramp.status(pool) if found.tag == tag)


def test_contents_come_back_from_the_disk(pool: vramp.Pool, blocks: list[vramp.Allocation]) -> None:
    for wait in (True, False):
        move = vramp.pause("weights", wait=wait, device=pool)
        if move is not None:
            move.wait(60)
            assert move.progress[0] == move.progress[1] >= 43 * MIB
        asleep = state(pool)
        assert (asleep.backup, asleep.phase, asleep.on_card, asleep.on_host) == ("disk", "asleep", 0, 0)
        assert asleep.on_disk >= 43 * MIB
        vramp.resume("weights", device=pool)
        assert state(pool).on_disk == 0 and right(blocks)


def test_a_prefetched_region_comes_back_from_the_host(pool: vramp.Pool, blocks: list[vramp.Allocation]) -> None:
    vramp.resume("weights", prefetch=True, device=pool)
    vramp.pause("weights", device=pool)
    for _ in range(2):
        vramp.resume("weights", prefetch=True, device=pool)
        asleep = state(pool)
        assert (asleep.phase, asleep.on_card) == ("asleep", 0)
        assert asleep.on_host >= 43 * MIB and asleep.on_disk >= 43 * MIB
    vramp.resume("weights", device=pool)
    assert state(pool).on_host == 0 and right(blocks)


def test_a_full_host_refuses_a_prefetch_and_a_resume_reads_from_the_disk(
    pool: vramp.Pool, blocks: list[vramp.Allocation]
) -> None:
    with vramp.Tiers(pool, host="72MiB") as tiers:
        vramp.pause("weights", device=pool)
        with tiers.reserve(64 * MIB, "host"), pytest.raises(vramp.RegionError, match="read ahead") as raised:
            vramp.resume("weights", prefetch=True, device=pool)
        assert raised.value.tag == "weights" and state(pool).on_host == 0
        vramp.resume("weights", device=pool)
    assert right(blocks)


def test_backups_are_read_by_address(pool: vramp.Pool, blocks: list[vramp.Allocation]) -> None:
    last = blocks[2]
    with pytest.raises(vramp.RegionError, match="awake"):
        vramp.read_backup(last.ptr, 8, device=pool)
    vramp.pause("weights", device=pool)
    assert vramp.read_backup(last.ptr, last.size, device=pool) == b"\2" * last.size
    assert vramp.read_backup(last.ptr + 7, 3, device=pool) == b"\2\2\2"
    with pytest.raises(vramp.RegionError, match="contents of a region"):
        vramp.read_backup(7, 8, device=pool)
    vramp.pause("weights", discard=True, device=pool)
    with pytest.raises(vramp.RegionError, match="no copy"):
        vramp.read_backup(last.ptr, 8, device=pool)
    vramp.resume("weights", device=pool)


def test_what_is_discarded_is_not_copied(pool: vramp.Pool, blocks: list[vramp.Allocation]) -> None:
    vramp.pause("weights", discard=True, device=pool)
    asleep = state(pool)
    assert (asleep.phase, asleep.copied, asleep.on_disk) == ("asleep", 0, 0)
    vramp.resume("weights", device=pool)
    for byte, block in enumerate(blocks):
        ctypes.memset(block.ptr, byte, block.size)
    vramp.pause("weights", device=pool)
    assert state(pool).on_disk > 0
    vramp.pause("weights", discard=True, device=pool)
    assert state(pool).on_disk == 0
    vramp.resume("weights", device=pool)


def test_a_full_disk_leaves_a_region_as_it_was(
    pool: vramp.Pool, blocks: list[vramp.Allocation], tmp_path: Path
) -> None:
    vramp.set_region_disk(tmp_path, limit="32MiB")
    with pytest.raises(vramp.RegionError, match="disk"):
        vramp.pause("weights", device=pool)
    assert state(pool).phase == "awake" and right(blocks)
    vramp.set_region_disk(tmp_path, limit=1 << 30)
    vramp.pause("weights", device=pool)
    vramp.resume("weights", device=pool)
    assert right(blocks)
    with pytest.raises(OSError):
        vramp.set_region_disk(tmp_path / "nowhere")
    with pytest.raises(vramp.OptionError, match="size"):
        vramp.set_region_disk(tmp_path, limit="much")


def test_the_disk_of_open_tiers_counts_first(
    pool: vramp.Pool, blocks: list[vramp.Allocation], tmp_path: Path
) -> None:
    (tmp_path / "tiers").mkdir()
    with vramp.Tiers(pool, host="64MiB", disk=tmp_path / "tiers", disk_limit="64MiB") as tiers:
        vramp.pause("weights", device=pool)
        with pytest.raises(vramp.VrampError):
            tiers.reserve(32 * MIB, "disk")
        vramp.resume("weights", device=pool)
        tiers.reserve(32 * MIB, "disk").release()
        vramp.pause("weights", device=pool)
    # The copy outlives the tiers.
    vramp.resume("weights", device=pool)
    vramp.pause("weights", device=pool)
    vramp.resume("weights", device=pool)
    assert right(blocks)


DEFAULT = """
import vramp
with vramp.open("sim:h200") as pool:
    try:
        with vramp.region("w", backup="disk", device=pool):
            block = pool.malloc(4 << 20)
    except vramp.OptionError as error:
        assert "set_region_disk" in str(error), error
    else:
        vramp.pause("w", device=pool)
        assert vramp.status(pool)[0].on_disk >= 4 << 20
        vramp.resume("w", device=pool)
print("done")
"""


def test_the_default_is_the_directory_of_temporary_files(tmp_path: Path) -> None:
    done = run_python(DEFAULT, TMPDIR=str(tmp_path))
    assert (done.returncode, done.stdout.strip()) == (0, "done"), done.stderr
    assert list(tmp_path.iterdir()) == []
    # Files there are in memory, where this is a filesystem of the usual kind.
    done = run_python(DEFAULT, TMPDIR="/dev/shm")
    assert (done.returncode, done.stdout.strip()) == (0, "done"), done.stderr
