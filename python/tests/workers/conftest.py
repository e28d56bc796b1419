"""Tests of workers run on the simulator, each process on a card of its own."""

from __future__ import annotations

import os

os.environ.setdefault("VRAMP_DEVICE", "sim")

import pytest

pytest.importorskip("distributed", reason="Dask is not installed: pip install distributed")
