"""Compiles vramp's allocator class against the installed PyTorch, once, and caches the result.

The class of allocators is C++ without a stable ABI, so each version of PyTorch needs its own build. The
cache is `$VRAMP_CACHE_DIR`, or `$XDG_CACHE_HOME/vramp`, or `~/.cache/vramp`. Several processes may build
at the same time: one compiles, the others wait for it. A cached file ends with the digest of its contents,
so that one that was cut off is compiled again and not loaded.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import hashlib
import os
import platform
import re
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
# What ends a whole file: this text, and the digest of all before it. The loader ignores both.
_MARK = b"vramp:sha256:"
_TRAILER_BYTES = len(_MARK) + hashlib.sha256().digest_size


class NoCompilerError(VrampError):
    """The machine has no C++ compiler, or no headers of the CUDA runtime."""


class CompileError(VrampError):
    """The compiler failed. The text has its command and the end of its output."""


class UnusableFileError(CompileError):
    """The compiler made a file that does not work with the installed PyTorch."""


def version_of(torch: Any) -> tuple[int, int]:
    """Returns major and minor version of PyTorch."""
    major, minor = torch.__version__.split("+")[0].split(".")[:2]
    return int(major), int(minor)


def compiler() -> list[str]:
    """Returns the command of the C++ compiler: $CXX, or the first of g++, c++ and clang++.

    g++ comes first, because PyTorch is built with it.
    """
    named = os.environ.get("CXX")
    if named:
        try:
            words = shlex.split(named)
        except ValueError as error:
            raise CompileError(f"CXX={named}: {error}; set CXX to a C++ compiler, or unset it") from error
        if not words or shutil.which(words[0]) is None:
            raise CompileError(f"CXX={named}: there is no such program; set CXX to a C++ compiler, or unset it")
        return words
    for name in ("g++", "c++", "clang++"):
        if found := shutil.which(name):
            return [found]
    raise NoCompilerError(
        "no C++ compiler found: install one (apt-get install g++), or set CXX to its command"
    )


def other_compilers(first: list[str]) -> list[list[str]]:
    """Returns the machine's other C++ compilers, for a first one whose files do not work."""
    found = [path for name in ("g++", "c++", "clang++") if (path := shutil.which(name))]
    # One that is installed elsewhere may hide the system's.
    found += [path for name in ("g++", "c++") if os.access(path := f"/usr/bin/{name}", os.X_OK)]
    known = {os.path.realpath(shutil.which(first[0]) or first[0])}
    others = []
    for path in found:
        if os.path.realpath(path) not in known:
            known.add(os.path.realpath(path))
            others.append([path])
    return others


def cuda_headers(torch: Any) -> Path:
    """Returns the folder of cuda_runtime_api.h: of wheels, of $CUDA_HOME, or of another CUDA toolkit.

    Headers of the CUDA version that PyTorch was built with are preferred to all others.
    """
    found = [folder for folder in _header_folders() if (folder / "cuda_runtime_api.h").is_file()]
    if not found:
        raise NoCompilerError(
            "the headers of the CUDA runtime are missing: install the wheel nvidia-cuda-runtime, or set "
            "CUDA_HOME to a CUDA toolkit"
        )
    wanted = int(torch.version.cuda.split(".")[0])
    return next((folder for folder in found if _cuda_major(folder) == wanted), found[0])


def _header_folders() -> list[Path]:
    folders: list[Path] = []
    nvidia = find_spec("nvidia")
    for root in (nvidia.submodule_search_locations or []) if nvidia else []:
        folders += sorted(Path(root).glob("cu[0-9]*/include"), reverse=True)
        folders.append(Path(root) / "cuda_runtime" / "include")
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if toolkit := os.environ.get(variable):
            folders.append(Path(toolkit) / "include")
    if nvcc := shutil.which("nvcc"):
        folders.append(Path(nvcc).resolve().parent.parent / "include")
    folders.append(Path("/usr/local/cuda/include"))
    return folders


def _cuda_major(folder: Path) -> int | None:
    text = (folder / "cuda_runtime_api.h").read_text(errors="replace")
    version = re.search(r"^#define\s+CUDART_VERSION\s+(\d+)", text, re.MULTILINE)
    return int(version[1]) // 1000 if version else None


def cache_folder() -> Path:
    """Returns the folder of compiled files. It may not exist. Raises OSError if there is no home."""
    if own := os.environ.get("VRAMP_CACHE_DIR"):
        return Path(own)
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "vramp"
    try:
        return Path.home() / ".cache" / "vramp"
    except RuntimeError as error:
        # A user without an entry in passwd, as in some containers.
        raise FileNotFoundError(errno.ENOENT, "the user has no home directory", "~") from error


def cached(torch: Any, vramp_version: str) -> Path | None:
    """Returns the compiled class if the cache has all of it."""
    try:
        file = cache_folder() / f"{key(torch, vramp_version)}.so"
    except OSError:
        return None
    return file if _is_whole(file) else None


def is_cache_writable() -> bool:
    """Returns whether the folder of compiled files, or the first one above it, can be written to."""
    try:
        folder = cache_folder().absolute()
    except OSError:
        return False
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)


def command(torch: Any, to: Path, with_compiler: list[str] | None = None) -> list[str]:
    """Returns the command that compiles the class into the shared object `to`."""
    root = Path(torch.__file__).parent
    major, minor = version_of(torch)
    abi = int(bool(torch._C._GLIBCXX_USE_CXX11_ABI))
    libraries = root / "lib"
    return [
        *(with_compiler or compiler()),
        *("-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-w"),
        f"-DVRAMP_TORCH={major * 100 + minor}",
        f"-D_GLIBCXX_USE_CXX11_ABI={abi}",
        f"-I{_HEADERS}",
        *("-isystem", str(root / "include"), "-isystem", str(cuda_headers(torch))),
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
    folder, which is removed when the process exits.
    """
    name = f"{key(torch, vramp_version)}.so"
    try:
        folder = cache_folder()
        if not again and _is_whole(folder / name):
            return folder / name
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f"{name}.lock"):
            if again or not _is_whole(folder / name):
                # Left by compilations that were killed: the holder of the lock has none yet.
                for draft in folder.glob(f".{name}.*"):
                    draft.unlink()
                _compile(torch, folder / name)
        return folder / name
    except OSError as error:
        own = Path(tempfile.mkdtemp(prefix="vramp-"))
        atexit.register(shutil.rmtree, own, ignore_errors=True)
        print(
            f"vramp: cannot write to the cache ({error}): compiling into {own} for this process alone. "
            "Set VRAMP_CACHE_DIR to a folder that can be written to",
            file=sys.stderr,
        )
        try:
            _compile(torch, own / name)
        except OSError as failure:
            raise CompileError(f"the compiled file cannot be written: {failure}") from failure
        return own / name


def _compile(torch: Any, to: Path) -> None:
    """Compiles with the first compiler whose file works.

    One that links a C++ library of its own makes files that do not. Raises the error of the first compiler.
    """
    first = compiler()
    try:
        _compile_with(first, torch, to)
        return
    except UnusableFileError as error:
        failure = error
    for other in other_compilers(first):
        with contextlib.suppress(CompileError):
            _compile_with(other, torch, to)
            return
    raise CompileError(str(failure))


def _compile_with(chosen: list[str], torch: Any, to: Path) -> None:
    """Compiles into a file of another name, which replaces `to` at once."""
    draft = to.with_name(f".{to.name}.{os.getpid()}")
    arguments = command(torch, draft, chosen)
    advice = "Set CXX to another compiler (C++20: GCC 10 or newer), or use enable(route='pluggable')."
    try:
        try:
            done = subprocess.run(
                arguments,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
            )
        except OSError as error:
            raise CompileError(f"the C++ compiler cannot be started: {error}. {advice}") from error
        if done.returncode != 0 or not draft.is_file():
            failure = f"failed with status {done.returncode}" if done.returncode else "wrote no file"
            end = "\n".join((done.stdout + done.stderr).strip().splitlines()[-20:])
            raise CompileError(f"the C++ compiler {failure}:\n{shlex.join(arguments)}\n{end}\n{advice}")
        if reason := _failed_self_test(draft):
            raise UnusableFileError(
                f"the file that the C++ compiler made does not work with this PyTorch ({reason}):\n"
                f"{shlex.join(arguments)}\n{advice}"
            )
        digest = hashlib.sha256(draft.read_bytes()).digest()
        with open(draft, "ab") as file:
            file.write(_MARK + digest)
        draft.replace(to)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()


def _failed_self_test(file: Path) -> str | None:
    """Returns why a compiled file does not work, or None if it does.

    In a process of its own: exceptions end the process if the compiler linked an unwinder of its own.
    """
    program = "import ctypes, sys, torch; sys.exit(ctypes.PyDLL(sys.argv[1]).vramp_torch_self_test())"
    path = os.pathsep.join(filter(None, sys.path))
    try:
        done = subprocess.run(
            [sys.executable, "-c", program, str(file)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=120,
            check=False,
            # Without vramp: a program under `python -m vramp run` would enable it, and compile again.
            env={**os.environ, "PYTHONPATH": path, "VRAMP_RUN_ROUTE": ""},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"its test did not end: {error}"
    if done.returncode == 0:
        return None
    if done.returncode < 0:
        return f"its test ended with signal {-done.returncode}"
    end = "\n".join(done.stderr.strip().splitlines()[-5:])
    return f"its test failed with status {done.returncode}\n{end}"


def _is_whole(path: Path) -> bool:
    """True if the file is there and none of it is missing, as after a crash of the machine.

    The loader would kill the process if the end of a file is missing.
    """
    try:
        contents = path.read_bytes()
    except OSError:
        return False
    digest = hashlib.sha256(contents[:-_TRAILER_BYTES]).digest()
    return contents[-_TRAILER_BYTES:] == _MARK + digest


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds a lock file, which the system releases if the process dies."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
