"""Configurations of tiers from what the program passes."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Literal

from ._errors import FileError, OptionError

# Part of the machine's memory that is pinned at most if the program names no limit.
_HOST_PART = 4


def _machine_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def configuration(
    config: str | os.PathLike[str] | Mapping[str, object] | None,
    *,
    host: int | str | None,
    disk: str | os.PathLike[str] | None,
    disk_limit: int | str | None,
    device: int | str | None,
    peers: Mapping[int, int | str] | None,
    ordinal: int,
) -> tuple[Literal["toml", "json", "sizes"], str]:
    """Returns the form of a configuration and its text, which is JSON where it is not TOML.

    `ordinal` is the number of the pool's card. A text with a line end or a table is TOML, any other the path of a
    TOML file.
    """
    if config is not None:
        if any(given is not None for given in (host, disk, disk_limit, device, peers)):
            raise OptionError("pass a configuration, or host, disk, disk_limit, device and peers: not both")
        if isinstance(config, Mapping):
            return "json", json.dumps(dict(config))
        if isinstance(config, str) and ("\n" in config or "[" in config):
            return "toml", config
        with open(config, encoding="utf-8") as file:
            return "toml", file.read()
    if disk is None and disk_limit is not None:
        raise OptionError("disk_limit is the most bytes in the directory disk: pass that too")
    if host is None:
        host = _machine_memory() // _HOST_PART
    made: dict[str, object] = {"host": [{"index": 0, "capacity": host}]}
    if device is not None:
        # It is a limit already. A GPU of a configuration has 90 % of its capacity by default.
        made["gpu"] = [{"index": ordinal, "capacity": device, "limit": 1.0}]
    if disk is not None:
        limit = _free(disk) if disk_limit is None else disk_limit
        made["disk"] = [{"index": 0, "directory": os.fspath(disk), "capacity": limit}]
    if peers is not None:
        if not isinstance(peers, Mapping):
            raise OptionError('peers has the most bytes for each number of a card, such as {1: "16GiB"}')
        made["peer"] = [{"index": index, "limit": limit} for index, limit in peers.items()]
    return "sizes", json.dumps(made)


def store_functions(
    store: Any,
) -> tuple[Callable[[int, bytes], object], Callable[[int], Any], Callable[[int], object]]:
    """Returns the functions put, get and delete of a store, or of a mapping with bytes as values."""
    if isinstance(store, MutableMapping):
        # The object of a key whose `put` failed is deleted too.
        return store.__setitem__, store.__getitem__, lambda key: store.pop(key, None)
    functions = tuple(getattr(store, name, None) for name in ("put", "get", "delete"))
    if not all(callable(function) for function in functions):
        raise TypeError(
            f"a store has put(key, data), get(key) and delete(key), or is a mutable mapping: {type(store)} is not"
        )
    put, get, delete = functions
    return put, get, delete  # type: ignore[return-value]


def cuda_memory(memory: object) -> tuple[int, int, int] | None:
    """Returns address, bytes and stream of an object with `__cuda_array_interface__`; None for others.

    Raises OptionError if its elements are not dense in memory.
    """
    interface: dict[str, Any] | None = getattr(memory, "__cuda_array_interface__", None)
    if interface is None:
        return None
    shape: tuple[int, ...] = tuple(interface["shape"])
    size = int(interface["typestr"].lstrip("<>|=")[1:])
    strides = interface.get("strides")
    if strides is not None:
        dense = size
        for length, stride in zip(reversed(shape), reversed(tuple(strides)), strict=True):
            if length > 1 and stride != dense:
                raise OptionError("the array is not dense: adopt a contiguous copy of it")
            dense *= length
    if interface.get("mask") is not None:
        raise OptionError("the array has a mask: adopt its data and its mask each")
    stream = interface.get("stream")
    return int(interface["data"][0]), size * math.prod(shape), 0 if stream in (None, 1) else int(stream)


def _free(directory: str | os.PathLike[str]) -> int:
    """Returns the free bytes of a directory's file system."""
    try:
        return shutil.disk_usage(directory).free
    except OSError as error:
        text = f"disk={os.fspath(directory)!r} cannot be used: {error.strerror}: make the directory first"
        raise FileError(text) from error
