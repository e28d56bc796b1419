"""An import of what vramp stands in for finds vramp's module: in programs under `python -m vramp run`, and in those
that ask for it.

With VRAMP_COMPAT=off programs under `python -m vramp run` find what is installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

STAND_INS = {
    "torch_memory_saver": "vramp.compat.torch_memory_saver",
    "kvcached.vmm_ops": "vramp.compat.kvcached",
}
"""By the name of what is imported. `_inherit/sitecustomize.py` has the names too."""


class _Finder:
    """Finds stand-ins before what is installed."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return spec(name) if name in self.names else None


class _Loader:
    """Fills a module with what the stand-in has."""

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        found = importlib.import_module(STAND_INS[module.__name__])
        public = {name: value for name, value in vars(found).items() if not name.startswith("_")}
        vars(module).update(public, __doc__=found.__doc__)


def is_wanted() -> bool:
    """Returns False if the environment says that the program keeps what is installed."""
    return os.environ.get("VRAMP_COMPAT") != "off"


def spec(name: str) -> ModuleSpec | None:
    """Returns what an import of the name loads."""
    return importlib.util.spec_from_loader(name, _Loader())  # type: ignore[arg-type]


def install(*names: str) -> None:
    """Lets this process find stand-ins."""
    if not any(isinstance(finder, _Finder) and finder.names == names for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(names))
