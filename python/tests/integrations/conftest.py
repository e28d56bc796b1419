"""What the tests of the adaptors share. They run without a GPU, on the simulated H200.

Each library is the real one. Where it refuses to work without a driver, a test replaces the named call,
and says which version's behaviour the replacement has.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import vramp
from fake_stream import FakeStream


@pytest.fixture
def pool() -> Iterator[vramp.Pool]:
    """A pool of the test's own, which must be empty and consistent at the end."""
    with vramp.open("sim:h200", limit="1GiB") as opened:
        yield opened
        gc.collect()
        assert opened.stats().live == 0
        opened.audit()


@pytest.fixture
def destroyed() -> Iterator[list[int]]:
    """The addresses of destroyed fake streams."""
    FakeStream.destroyed.clear()
    yield FakeStream.destroyed
    FakeStream.destroyed.clear()
