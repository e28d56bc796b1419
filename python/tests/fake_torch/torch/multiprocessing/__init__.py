"""Sending tensors to other processes."""

from . import reductions  # noqa: F401
