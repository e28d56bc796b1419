"""Enables vramp in the Python programs that a program under `python -m vramp run` starts.

1. `run` puts this folder into PYTHONPATH, and the route into VRAMP_RUN_ROUTE. Programs that are started
   inherit both: processes of torchrun, of multiprocessing's spawn, and of subprocess.
2. Python imports this module at its start. It leaves the path, imports the sitecustomize that it hides,
   and waits for an import of torch.
3. `import torch_memory_saver` and `import kvcached.vmm_ops` find vramp's: see `vramp/compat/_alias.py`.
4. After torch is imported, and before anything can use CUDA, vramp.torch.enable() is called. A failure is a
   line on stderr, and the program goes on with PyTorch's own allocator.

A program that never imports torch has an entry more in sys.meta_path, and nothing of vramp is imported.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

_FOLDER = os.path.dirname(os.path.abspath(__file__))


class _AfterTorch:
    """Finds torch with the other finders, and enables vramp once it is imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Returns the spec of torch with a loader that calls enable(), those of vramp's stand-ins, and None for other
        modules.
        """
        if name in ("torch_memory_saver", "kvcached.vmm_ops"):
            return _stand_in(name)
        if name != "torch":
            return None
        for finder in list(sys.meta_path):
            found = getattr(finder, "find_spec", None)
            if finder is self or found is None:
                continue
            spec = found(name, path, target)
            if spec is not None:
                _call_after(spec.loader)
                return spec
        return None


def _stand_in(name: str) -> Any:
    """Returns the spec of vramp's module of this name, or None if what is installed is wanted."""
    try:
        from vramp.compat import _alias
    except ImportError:
        return None
    return _alias.spec(name) if _alias.is_wanted() else None


def _call_after(loader: Any) -> None:
    execute = getattr(loader, "exec_module", None)
    if execute is None:
        return

    def execute_and_enable(module: Any) -> None:
        execute(module)
        _enable(module)

    loader.exec_module = execute_and_enable


def _enable(torch: Any) -> None:
    route = os.environ.get("VRAMP_RUN_ROUTE")
    if not route or getattr(getattr(torch, "version", None), "cuda", None) is None:
        return
    try:
        import vramp.torch

        vramp.torch.enable(route)  # type: ignore[arg-type]
        if os.environ.get("VRAMP_SNAPSHOT_ON_OOM"):
            from vramp import _oom

            _oom.install_inherited()
    except Exception as error:
        text = f"vramp: process {os.getpid()} uses PyTorch's own allocator: {error}"
        print(text, file=sys.stderr)


def _import_the_hidden() -> None:
    """Imports the sitecustomize that Python would have imported, in place of this one."""
    own = sys.modules.pop(__name__)
    try:
        importlib.import_module(__name__)
    except ImportError as error:
        if error.name != __name__:
            raise
    finally:
        sys.modules.setdefault(__name__, own)


if __name__ == "sitecustomize":
    sys.path[:] = [path for path in sys.path if not path or os.path.abspath(path) != _FOLDER]
    if os.environ.get("VRAMP_RUN_ROUTE"):
        sys.meta_path.insert(0, _AfterTorch())
    _import_the_hidden()
