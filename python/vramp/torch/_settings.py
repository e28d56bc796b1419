"""What vramp does with the settings of PYTORCH_CUDA_ALLOC_CONF."""

from __future__ import annotations

import os
from collections.abc import Mapping

from .._errors import OptionError

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

HONOURED = frozenset({"per_process_memory_fraction"})
"""Settings that hold for vramp's memory."""

POOLS_ONLY = frozenset(
    {
        "max_split_size_mb",
        "max_non_split_rounding_mb",
        "roundup_power2_divisions",
        "garbage_collection_threshold",
        "large_segment_size_mb",
        "graph_capture_record_stream_reuse",
    }
)
"""Settings that hold for graphs and memory pools, which PyTorch's own allocator goes on to serve."""

NOT_NEEDED = frozenset(
    {
        "expandable_segments",
        "expandable_segments_handle_type",
        "expandable_segments_reserve",
        "expandable_segments_reserve_by_class",
        "release_lock_on_cudamalloc",
        "release_lock_on_hipmalloc",
    }
)
"""Settings about segments, which vramp does not have."""


def variable(environment: Mapping[str, str] = os.environ) -> str:
    """Returns the name of the variable that PyTorch reads."""
    return next((name for name in VARIABLES if environment.get(name)), VARIABLES[-1])


def read(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the settings of the environment by name. Lists are kept as text."""
    text = environment.get(variable(environment), "")
    settings: dict[str, str] = {}
    depth, word, words = 0, "", []
    for letter in text + ",":
        depth += {"[": 1, "]": -1}.get(letter, 0)
        if letter == "," and depth <= 0:
            words.append(word)
            word = ""
        else:
            word += letter
    for pair in words:
        name, _, value = pair.partition(":")
        if name.strip():
            settings[name.strip()] = value.strip()
    return settings


def check(settings: Mapping[str, str]) -> None:
    """Raises OptionError for a setting that contradicts vramp, by its name.

    Unknown names are left to PyTorch, which refuses them itself. Settings of pinned host memory are
    not vramp's.
    """
    if settings.get("backend", "native") != "native":
        raise OptionError(
            f"{variable()} has backend:{settings['backend']}, which replaces the allocator that "
            "vramp extends: remove the setting"
        )
    if settings.get("throw_on_cudamalloc_oom", "False").lower() == "true":
        raise OptionError(
            f"{variable()} has throw_on_cudamalloc_oom:True, which vramp does not support: "
            "remove the setting"
        )


def without_effect(settings: Mapping[str, str]) -> list[str]:
    """Returns the names of settings that change nothing for ordinary tensors."""
    return sorted(name for name in settings if name in POOLS_ONLY or name in NOT_NEEDED)
