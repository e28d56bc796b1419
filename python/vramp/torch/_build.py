"""Compiles vramp's allocator class against the installed PyTorch, once, and caches the result.

The class of allocators is C++ without a stable ABI, so each version of PyTorch needs its own build. The
cache is `$VRAMP_CACHE_DIR`, or `$XDG_CACHE_HOME/vramp`, or `~/.cache/vramp`. Several processes may build
at the same time: one compiles, the others wait for it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .._errors import VrampError

OLDEST = (2, 9)
"""Oldest version of PyTorch whose allocator class is supported."""

_SOURCES = Path(__file__).parent / "csrc"
_HEADERS = Path(__file__).parent.parent / "include"


class NoCompilerError(VrampError):
    """The machine has no C++ compiler, or no headers of the CUDA runtime."""


class CompileError(VrampError):
    """The compiler failed. The text has its command and the end of its output."""


def version_of(torch: Any) -> tuple[int, int]:
    """Returns major and minor version of PyTorch."""
    major, minor = torch.__version__.split("+")[0].split(".")[:2]
    return int(major), int(minor)


def compiler() -> list[str]:
    """Returns the command of the C++ compiler: $CXX, or the first of c++, g++ and clang++."""
    named = os.environ.get("CXX")
    if named:
        words = shlex.split(named)
        if not words or shutil.which(words[0]) is None:
            raise CompileError(f"CXX={named}: there is no such program; set CXX to a C++ compiler, or unset it")
        return words
    for name in ("c++", "g++", "clang++"):
        if found := shutil.which(name):
            return [found]
    raise NoCompilerError(
        "no C++ compiler found: install one (apt-get install g++), or set CXX to its command"
    )


def cuda_headers() -> Path:
    """Returns the folder of cuda_runtime_api.h: of PyTorch's own wheels, or of a CUDA toolkit."""
    folders: list[Path] = []
    nvidia = find_spec("nvidia")
    for root in (nvidia.submodule_search_locations or []) if nvidia else []:
        folders += sorted(Path(root).glob("cu[0-9]*/include"), reverse=True)
        folders.append(Path(root) / "cuda_runtime" / "include")
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            folders.insert(0, Path(os.environ[variable]) / "include")
    if nvcc := shutil.which("nvcc"):
        folders.append(Path(nvcc).resolve().parent.parent / "include")
    folders.append(Path("/usr/local/cuda/include"))
    for folder in folders:
        if (folder / "cuda_runtime_api.h").is_file():
            return folder
    raise NoCompilerError(
        "the headers of the CUDA runtime are missing: install the wheel nvidia-cuda-runtime, or set "
        "CUDA_HOME to a CUDA toolkit"
    )


def cache_folder() -> Path:
    """Returns the folder of compiled files. It may not exist."""
    if own := os.environ.get("VRAMP_CACHE_DIR"):
        return Path(own)
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "vramp"
    return Path.home() / ".cache" / "vramp"


def command(torch: Any, to: Path, vramp_version: str) -> list[str]:
    """Returns the command that compiles the class into the shared object `to`."""
    root = Path(torch.__file__).parent
    major, minor = version_of(torch)
    abi = int(bool(torch._C._GLIBCXX_USE_CXX11_ABI))
    libraries = root / "lib"
    return [
        *compiler(),
        *("-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-w"),
        f"-DVRAMP_TORCH={major * 100 + minor}",
        f"-D_GLIBCXX_USE_CXX11_ABI={abi}",
        f"-I{_HEADERS}",
        *("-isystem", str(root / "include"), "-isystem", str(cuda_headers())),
        *("-idirafter", str(_SOURCES / "no_crt")),
        str(_SOURCES / "allocator.cpp"),
        *("-o", str(to), f"-L{libraries}", "-lc10", "-lc10_cuda", f"-Wl,-rpath,{libraries}"),
    ]


def key(torch: Any, vramp_version: str) -> str:
    """Returns a name that differs whenever another build is needed."""
    digest = hashlib.sha256()
    about = (
        vramp_version,
        torch.__version__,
        str(getattr(torch.version, "git_version", "")),
        str(torch._C._GLIBCXX_USE_CXX11_ABI),
        str(Path(torch.__file__).parent),
        platform.machine(),
    )
    for text in about:
        digest.update(text.encode() + b"\0")
    for source in [*sorted(_SOURCES.rglob("*.*")), _HEADERS / "vramp.h"]:
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return f"torch-{torch.__version__.split('+')[0]}-{digest.hexdigest()[:16]}"


def compiled(torch: Any, vramp_version: str, *, again: bool = False) -> Path:
    """Returns the compiled class, after compiling it if the cache lacks it or `again` is set.

    Raises NoCompilerError and CompileError. A cache that cannot be written is replaced by a temporary
    folder of this process.
    """
    name = f"{key(torch, vramp_version)}.so"
    folder = cache_folder()
    if not again and (folder / name).is_file():
        return folder / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f"{name}.lock"):
            if again or not (folder / name).is_file():
                _compile(torch, folder / name, vramp_version)
        return folder / name
    except OSError as error:
        own = Path(tempfile.mkdtemp(prefix="vramp-"))
        print(f"vramp: cannot write to {folder} ({error.strerror}): compiling into {own}", file=sys.stderr)
        _compile(torch, own / name, vramp_version)
        return own / name


def _compile(torch: Any, to: Path, vramp_version: str) -> None:
    """Compiles into a file of another name, which replaces `to` at once."""
    draft = to.with_name(f".{to.name}.{os.getpid()}")
    arguments = command(torch, draft, vramp_version)
    try:
        done = subprocess.run(arguments, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode != 0 or not draft.is_file():
            end = "\n".join((done.stdout + done.stderr).strip().splitlines()[-20:])
            raise CompileError(
                f"the C++ compiler failed with status {done.returncode}:\n{shlex.join(arguments)}\n{end}\n"
                "Set CXX to another compiler (C++20: GCC 10 or newer), or use enable(route='pluggable')."
            )
        draft.replace(to)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds a lock file, which the system releases if the process dies."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
