"""`import torch_memory_saver` finds vramp's stand-in in programs under `python -m vramp run`.

With VRAMP_COMPAT=off it finds what is installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

NAME = "torch_memory_saver"


class _Finder:
    """Finds the stand-in before what is installed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return spec() if name == NAME else None


class _Loader:
    """Fills a module with what the stand-in has."""

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        found = importlib.import_module("vramp.compat.torch_memory_saver")
        public = {name: value for name, value in vars(found).items() if not name.startswith("_")}
        vars(module).update(public, __doc__=found.__doc__)


def is_wanted() -> bool:
    """Returns False if the environment says that the program keeps what is installed."""
    return os.environ.get("VRAMP_COMPAT") != "off"


def spec() -> ModuleSpec | None:
    """Returns what `import torch_memory_saver` loads."""
    return importlib.util.spec_from_loader(NAME, _Loader())  # type: ignore[arg-type]


def install() -> None:
    """Lets this process find the stand-in, if that is wanted."""
    if is_wanted():
        sys.meta_path.insert(0, _Finder())
