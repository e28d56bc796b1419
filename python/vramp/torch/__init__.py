"""PyTorch on vramp.

    import vramp.torch
    vramp.torch.enable()                 # all CUDA tensors; before the first use of CUDA

    pool = vramp.torch.mem_pool()        # or only what is allocated inside
    with torch.cuda.use_mem_pool(pool):
        cache = torch.empty(8 << 30, dtype=torch.uint8, device="cuda")

`python -m vramp run train.py` does the first without a change to the program.

`enable()` compiles an implementation of PyTorch's own allocator class with the machine's C++ compiler,
once for each version of PyTorch. All of PyTorch works on it: statistics, snapshots, history, memory
pools, graphs, torch.OutOfMemoryError, memory shared with other processes, access from other GPUs.

Without a compiler `enable()` uses PyTorch's pluggable allocator, which lacks memory pools, history, sharing,
out-of-memory observers, torch.compile(mode="reduce-overhead") and cuDNN's benchmark mode, and raises
RuntimeError when memory runs out. Statistics work on both. `route()` says which one is in use.
"""

from __future__ import annotations

import ctypes
import threading
import warnings
from typing import Any, Literal

from .. import Pool, library_path, pool
from .. import __version__ as _vramp_version
from .._errors import DeviceError, InUseError, OptionError, UnsupportedError, VrampError
from . import _build, _distributed, _settings, _sharing
from ._build import CompileError, NoCompilerError

__all__ = [
    "CompileError",
    "NoCompilerError",
    "audit",
    "comm_pool",
    "doctor",
    "enable",
    "is_enabled",
    "mem_pool",
    "report",
    "route",
    "trim",
]

Route = Literal["compiled", "pluggable"]

_TOO_LATE = (
    "PyTorch uses CUDA already: call vramp.torch.enable() before anything uses it, or run the program with "
    "`python -m vramp run`"
)

_lock = threading.Lock()
_route: Route | None = None
# PyTorch keeps only the addresses of these, so they live until the process ends.
_kept: list[Any] = []
_pool_allocator: Any = None
# The compiled file, once it is loaded.
_extension: Any = None
_ASK = ctypes.CFUNCTYPE(ctypes.c_int)


def enable(route: Literal["auto", "compiled", "pluggable"] = "auto") -> None:
    """Makes vramp the allocator of all CUDA tensors of this process.

    Call it before the first use of CUDA. Calling it again changes nothing. The first call on a machine
    takes some seconds to compile; the next ones load the result.

    `auto` takes the compiled route, or the pluggable one with a warning if the machine has no C++
    compiler or no CUDA headers. A compiler that fails is an error.

    Raises UnsupportedError without a PyTorch that has CUDA, InUseError if CUDA is in use already,
    OptionError for settings in VRAMP_CONF, VRAMP_DEVICE or PYTORCH_CUDA_ALLOC_CONF that cannot be used,
    and CompileError. After an error the process is as before, and a corrected call works.
    """
    global _route
    if route not in ("auto", "compiled", "pluggable"):
        raise OptionError(f"route={route!r}: use auto, compiled or pluggable")
    # Before the lock is taken: under `python -m vramp run` the import calls enable().
    torch = _torch()
    with _lock:
        if _route is not None:
            if route not in ("auto", _route):
                raise InUseError(f"vramp is enabled already, by the {_route} route: that cannot be changed")
            return
        _check_settings()
        if torch.cuda.is_initialized():
            raise InUseError(_TOO_LATE)
        _route = _install(torch, route)


def is_enabled() -> bool:
    """Returns True once enable() has succeeded."""
    return _route is not None


def route() -> Route | None:
    """Returns how PyTorch uses vramp: "compiled", "pluggable", or None before enable()."""
    return _route


def comm_pool() -> Any:
    """Returns a torch.cuda.MemPool for memory that communication libraries register.

        pool = vramp.torch.comm_pool()
        with torch.cuda.use_mem_pool(pool):
            gradients = torch.empty(1 << 28, device="cuda")
        backend.register_mem_pool(pool)          # of torch.distributed's NCCL group

    Its segments are one handle each, stay where they are until the pool is deleted, and other processes and
    cards can access them. Needs the compiled route of enable().
    """
    torch = _torch()
    if _route != "compiled":
        raise UnsupportedError("comm_pool() needs enable() with a C++ compiler: `python -m vramp doctor`")
    _extension.vramp_torch_make_comm_pools(1)
    try:
        return torch.cuda.MemPool()
    finally:
        _extension.vramp_torch_make_comm_pools(0)


def mem_pool() -> Any:
    """Returns a torch.cuda.MemPool whose segments come from vramp, without enable().

    For torch.cuda.use_mem_pool, and for torch.cuda.graph(g, pool=pool.id). PyTorch's own allocator
    serves the pool. Raises OptionError if PyTorch's expandable segments are on: they bypass pools.
    """
    global _pool_allocator
    torch = _torch()
    if _route == "compiled":
        return torch.cuda.MemPool()
    if _route == "pluggable":
        raise UnsupportedError(
            "PyTorch's pluggable allocators have no memory pools: use enable() with a C++ compiler, or "
            "mem_pool() without enable()"
        )
    if _settings.read().get("expandable_segments", "").lower() == "true":
        raise OptionError(
            "expandable segments bypass memory pools: remove expandable_segments:True from "
            f"{_settings.variable()}"
        )
    with _lock:
        if _pool_allocator is None:
            from . import _pools

            _check_settings()
            _pools.install(torch)
            _pool_allocator = torch.cuda.memory.CUDAPluggableAllocator(
                library_path(), "vramp_torch_pool_malloc", "vramp_torch_free"
            )
    return torch.cuda.MemPool(_pool_allocator.allocator())


def report(device: int = 0) -> dict[str, int]:
    """Returns vramp's own statistics of a device: see vramp.Stats."""
    from dataclasses import asdict

    return asdict(_pool(device).stats())


def trim(keep: int = 0, device: int = 0) -> None:
    """Releases idle memory of a device until at most `keep` bytes are reserved."""
    _pool(device).trim(keep)


def audit(device: int = 0) -> None:
    """Checks the consistency of vramp's state. Raises InternalError if it is inconsistent."""
    _pool(device).audit()


def doctor() -> list[tuple[str, bool | None, str]]:
    """Returns what works with PyTorch here: a name, True, False, or None if it is unknown, and why.

    Compiles nothing and does not initialize CUDA.
    """
    try:
        torch = _torch()
    except VrampError as error:
        return [("torch", None, str(error))]
    found: list[tuple[str, bool | None, str]] = [
        ("torch", True, f"{torch.__version__} with CUDA {torch.version.cuda}")
    ]
    found.append(("vramp.torch.enable()", *_prospect(torch)))
    try:
        _check_settings()
        ignored = _settings.without_effect(_settings.read())
        if ignored:
            text = f"no effect on ordinary tensors: {', '.join(ignored)}"
            found.append((_settings.variable(), True, text))
    except VrampError as error:
        found.append(("settings", False, str(error)))
    said = ctypes.create_string_buffer(1024)
    if _library().vramp_torch_sharing_text(0, said, ctypes.c_uint64(len(said))) == 0 and said.value:
        found.append(("sharing", True, said.value.decode(errors="replace")))
    return found


def _prospect(torch: Any) -> tuple[bool | None, str]:
    """Returns whether enable() works, and by which route."""
    if _route is not None:
        return True, f"called: route {_route}"
    if torch.cuda.is_initialized():
        return False, _TOO_LATE
    if _build.cached(torch, _vramp_version):
        return True, "route compiled: all of PyTorch works; compiled already"
    try:
        _build.compiler()
        _build.cuda_headers(torch)
    except NoCompilerError as error:
        limits = "statistics work; memory pools, history and graph trees do not"
        return None, f"route pluggable: {limits}. {error}"
    except VrampError as error:
        return False, str(error)
    if not _build.is_cache_writable():
        text = "compiles in every process, because the cache cannot be written: set VRAMP_CACHE_DIR"
        return True, f"route compiled: all of PyTorch works; {text}"
    return True, "route compiled: all of PyTorch works; compiles at the first enable()"


def _torch() -> Any:
    """Returns the module torch, if it can be used."""
    try:
        import torch
    except (ImportError, OSError) as error:
        # OSError: a library that PyTorch needs is missing.
        raise UnsupportedError(f"PyTorch cannot be imported ({error}): pip install torch") from error
    if not hasattr(torch, "version"):
        # A folder of that name is imported where PyTorch is not installed.
        where = getattr(torch, "__file__", None) or next(iter(torch.__path__), "?")
        raise UnsupportedError(f"the module torch at {where} is not PyTorch: pip install torch")
    if torch.version.cuda is None:
        raise UnsupportedError(
            f"PyTorch {torch.__version__} is built without CUDA: install a build with CUDA"
        )
    if _build.version_of(torch) < _build.OLDEST:
        oldest = ".".join(map(str, _build.OLDEST))
        raise UnsupportedError(f"PyTorch {torch.__version__} is too old: use {oldest} or newer")
    return torch


def _check_settings() -> None:
    library = _library()
    if library.vramp_torch_check_settings() != 0:
        raise OptionError(_last_error(library))
    _settings.check(_settings.read())


def _library() -> Any:
    library = ctypes.PyDLL(library_path())
    library.vramp_last_error.restype = ctypes.c_char_p
    return library


def _last_error(library: Any) -> str:
    text: bytes = library.vramp_last_error()
    return text.decode(errors="replace")


def _pool(device: int) -> Pool:
    try:
        return pool(device)
    except DeviceError as error:
        raise DeviceError(f"device {device} cannot be opened: {error}") from error


def _install(torch: Any, wanted: str) -> Route:
    made: Route = "pluggable"
    if wanted != "pluggable":
        try:
            _install_compiled(torch)
            made = "compiled"
        except NoCompilerError as error:
            if wanted == "compiled":
                raise
            warnings.warn(
                f"{error}. vramp uses PyTorch's pluggable allocator instead: memory pools, history and "
                "graph trees do not work (`python -m vramp doctor`)",
                RuntimeWarning,
                stacklevel=3,
            )
    if made == "pluggable":
        from . import _pluggable

        share = _sharing.prepared()
        _kept.append(_pluggable.install(torch, _library()))
        share()
    return made


def _install_compiled(torch: Any) -> None:
    global _extension
    path = _build.compiled(torch, _vramp_version)
    try:
        extension = ctypes.PyDLL(str(path))
    except OSError:
        # A cache that another system wrote.
        path = _build.compiled(torch, _vramp_version, again=True)
        try:
            extension = ctypes.PyDLL(str(path))
        except OSError as error:
            raise CompileError(
                f"the compiled file cannot be loaded: {error}. If its folder is mounted without permission "
                "to execute, set VRAMP_CACHE_DIR to another one"
            ) from error
    extension.vramp_torch_install.restype = ctypes.c_char_p
    extension.vramp_torch_install.argtypes = [ctypes.c_char_p]
    failure: bytes | None = extension.vramp_torch_install(library_path().encode())
    if failure is not None:
        raise InUseError(failure.decode(errors="replace"))
    ask = _ASK(_distributed.is_of_several)
    extension.vramp_torch_ask_distributed(ask)
    _kept.extend((extension, ask))
    _sharing.install_enabling()
    _extension = extension
