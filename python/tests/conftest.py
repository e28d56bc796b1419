"""What tests of the core share. They run on the simulator, on machines with a card too."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

os.environ.setdefault("VRAMP_DEVICE", "sim")

import pytest

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


def run_python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a program in a fresh interpreter, which must end within a minute."""
    environment = {**os.environ, **variables}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
