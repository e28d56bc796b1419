"""What the tests of the adaptors share. They run without a GPU, on the simulated H200.

Each library is the real one. Where it refuses to work without a driver, a test replaces the named call,
and says which version's behaviour the replacement has.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import ClassVar

import pytest
import vramp


@pytest.fixture
def pool() -> Iterator[vramp.Pool]:
    """A pool of the test's own, which must be empty and consistent at the end."""
    with vramp.open("sim:h200", limit="1GiB") as opened:
        yield opened
        gc.collect()
        assert opened.stats().live == 0
        opened.audit()


class FakeStream:
    """A stream as cupy.cuda.Stream 13.6 and 14.2 has it: destroyed with its last reference."""

    destroyed: ClassVar[list[int]] = []

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr
        self.device_id = 0

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.ptr)

    def __del__(self) -> None:
        FakeStream.destroyed.append(self.ptr)


@pytest.fixture
def destroyed() -> Iterator[list[int]]:
    """The addresses of destroyed fake streams."""
    FakeStream.destroyed.clear()
    yield FakeStream.destroyed
    FakeStream.destroyed.clear()
