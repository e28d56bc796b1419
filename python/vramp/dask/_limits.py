"""Limits in bytes, from numbers and texts."""

from __future__ import annotations

import math
from operator import index

from dask.utils import parse_bytes

from .._errors import OptionError

Limit = int | float | str | None


def parse_limit(name: str, limit: Limit) -> int | None:
    """Returns the bytes of a limit, or None for none. Raises OptionError, a ValueError."""
    if limit is None:
        return None
    try:
        number = _number(limit)
    except (TypeError, ValueError, OverflowError):
        number = -1
    if number < 0:
        raise OptionError(f"{name}={limit!r} is no limit: use bytes, a text such as '30GiB', or None")
    return number


def parse_card_limit(name: str, limit: Limit) -> int | float | None:
    """Returns what `parse_limit` does, or a fraction of the card's memory: a float, or a text that is one, above 0
    and up to 1. The number 1 and the text "1" are a byte."""
    fraction = _fraction(limit)
    return parse_limit(name, limit) if fraction is None else fraction


def _number(limit: object) -> int:
    if isinstance(limit, bool):
        raise TypeError
    if isinstance(limit, str):
        if not limit.strip():
            raise ValueError
        return parse_bytes(limit)
    if isinstance(limit, float):
        return -1 if math.isnan(limit) or limit < 0 else int(limit)
    return index(limit)  # type: ignore[arg-type]


def _fraction(limit: object) -> float | None:
    if not isinstance(limit, (float, str)) or limit == "1":
        return None
    try:
        fraction = float(limit)
    except ValueError:
        return None
    return fraction if 0 < fraction <= 1 else None
