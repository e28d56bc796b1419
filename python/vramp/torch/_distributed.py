"""Whether this process takes part in a group of torch.distributed with several members."""

from __future__ import annotations

import sys


def is_of_several() -> int:
    """Returns 1 if it does. Imports nothing."""
    distributed = sys.modules.get("torch.distributed")
    try:
        if distributed is None or not distributed.is_available() or not distributed.is_initialized():
            return 0
        return int(distributed.get_world_size() > 1)
    except Exception:
        # A group that is being made or destroyed on another thread.
        return 1
