"""What tests of the core share. They run on the simulator, on machines with a card too."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

os.environ.setdefault("VRAMP_DEVICE", "sim")

# A shell that starts a job in the background makes it, and what it starts, ignore this signal.
signal.signal(signal.SIGINT, signal.default_int_handler)

import numpy
import pytest
from compat_memory import Memory

import vramp

MIB = 1 << 20
GIB = 1 << 30


@pytest.fixture
def pool() -> Iterator[vramp.Pool]:
    """A pool of the test's own, closed after the test."""
    with vramp.open("sim:h200") as opened:
        yield opened
        if not opened.is_closed:
            opened.audit()


@pytest.fixture
def tiers() -> Iterator[vramp.Tiers]:
    """Tiers below a pool of 64 MiB, audited and closed after the test."""
    with vramp.open("sim:h200", limit="64MiB") as opened, vramp.Tiers(opened, host="512MiB") as below:
        yield below
        gc.collect()  # views and leases of tracebacks
        below.audit()


@pytest.fixture
def memory() -> Iterator[Memory]:
    """Blocks and regions of the shared pool, freed and awake after the test."""
    made = Memory()
    yield made
    made.free()


def fill(buffer: vramp.Buffer, byte: int) -> None:
    """Writes every byte of a buffer."""
    with buffer.lease("rw") as view:
        numpy.asarray(view)[:] = byte


def check(buffer: vramp.Buffer, byte: int) -> None:
    """Reads every byte of a buffer."""
    with buffer.lease("r") as view:
        assert (numpy.asarray(view) == byte).all()


def run_python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a program in a fresh interpreter, which must end within a minute."""
    environment = {**os.environ, **variables}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
