"""What the tests of vramp.compat share: memory of regions of the shared pool, on the simulator."""

from __future__ import annotations

import ctypes

import vramp


def fill(block: vramp.Allocation, byte: int) -> None:
    ctypes.memset(block.ptr, byte, block.size)


def holds(block: vramp.Allocation, byte: int) -> bool:
    """Returns whether a block of an awake region has the byte everywhere."""
    return ctypes.string_at(block.ptr, block.size) == bytes([byte]) * block.size


def phases(*tags: str) -> list[str]:
    """Returns the phases of regions."""
    found = {status.tag: status.phase for status in vramp.status()}
    return [found[tag] for tag in tags]


def status(tag: str) -> vramp.RegionStatus:
    return next(found for found in vramp.status() if found.tag == tag)


def reserved() -> int:
    return vramp.pool().stats().reserved


class Memory:
    """Blocks of one test on the shared pool of the first device."""

    def __init__(self) -> None:
        self.blocks: list[vramp.Allocation] = []

    def block(self, size: int, byte: int) -> vramp.Allocation:
        block = vramp.pool().malloc(size)
        self.blocks.append(block)
        fill(block, byte)
        return block

    def free(self) -> None:
        """Frees the blocks, after all regions are awake again."""
        vramp.resume()
        for block in self.blocks:
            if not block.is_freed:
                block.free()
        vramp.pool().trim()
        vramp.pool().audit()
