"""`python -m vramp doctor`: what works on this machine, and why not."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

from . import _native

Check = tuple[str, "bool | None", str]
"""Name, whether it works (None: it is no failure), and the finding."""

# Library to look for, name of its package, module here that adds checks.
_LIBRARIES = (
    ("numpy", ("numpy",), None),
    ("torch", ("torch",), "vramp.torch"),
    ("cupy", ("cupy", "cupy-cuda13x", "cupy-cuda12x", "cupy-cuda11x"), "vramp.cupy"),
    ("numba", ("numba",), "vramp.numba"),
    ("rmm", ("rmm", "rmm-cu13", "rmm-cu12", "rmm-cu11"), "vramp.rmm"),
    ("cuda.core", ("cuda-core",), "vramp.cuda_core"),
)


_NO_DEVICE = "the CUDA driver finds no device"
"""The start of what the native library says if there is a driver without a card."""


def _bytes(amount: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if amount >= scale:
            return f"{amount / scale:.2f} {unit}"
    return f"{amount} B"


def _package() -> Iterator[Check]:
    import vramp

    yield "package", True, f"vramp {vramp.__version__}, library {vramp.library_path()}"
    python = f"Python {platform.python_version()} on {platform.platform()}"
    yield "python", True, python


def _visible_devices(visible: str, missing: str | None) -> Check:
    """Returns the finding about CUDA_VISIBLE_DEVICES. Names of cards that the machine lacks are a
    failure: the program would compute on the simulator, unless that was asked for."""
    text = f"CUDA_VISIBLE_DEVICES={visible}"
    if visible.strip() in ("", "-1"):
        return "visible devices", None, f"{text} hides every card"
    if missing is None or _NO_DEVICE not in missing:
        return "visible devices", None, text
    simulated = "sim" in _named_device()
    text = f"{text} names no card of this machine: use numbers from 0 as in nvidia-smi, or unset it"
    return "visible devices", None if simulated else False, text


def _named_device() -> str:
    """Returns the device that the environment names, or nothing."""
    options = os.environ.get("VRAMP_CONF", "").replace(" ", "").split(",")
    named = [option.partition("=")[2] for option in options if option.startswith("device=")]
    return named[-1] if named else os.environ.get("VRAMP_DEVICE", "")


def _device() -> Iterator[Check]:
    import vramp

    missing = _native.missing_card()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        yield _visible_devices(visible, missing)
    for name in ("VRAMP_CONF", "VRAMP_DEVICE"):
        if os.environ.get(name):
            yield name, None, os.environ[name]
    named = _named_device()
    if missing is not None and not named:
        # Nothing is simulated unasked; the checks of this process ask for it.
        os.environ["VRAMP_DEVICE"] = "sim"
    try:
        pool = vramp.pool()
        info = pool.device_info
    except vramp.VrampError as error:
        yield "pool", False, str(error)
        return
    if info.is_simulated:
        if missing is not None:
            yield "card", False, missing
        why = "VRAMP_DEVICE or VRAMP_CONF says so" if named else "the checks below are of it"
        yield "device", None, f"{info.name}: {why}"
    else:
        yield "device", True, f"{info.id}, {info.name}, {_bytes(info.memory)}"
        yield "driver", True, info.driver
    if info.has_virtual_memory:
        yield "virtual memory", True, f"mapped in pages of {_bytes(info.page)}"
    else:
        text = "the driver maps no memory at chosen addresses, so the pool does not remap: update it"
        yield "virtual memory", False, text
    limit = pool.limit
    yield "limit", None, "memory of the device" if limit is None else _bytes(limit)
    try:
        with pool.measure() as measured, pool.malloc(1 << 20):
            pass
        pool.audit()
    except vramp.VrampError as error:
        yield "allocation", False, str(error)
        return
    # The block may have come from memory that was reserved before.
    yield "allocation", measured.allocated >= 1, "allocated 1 MiB and freed it"
    stats = pool.stats()
    pinned = f"{_bytes(stats.host_pinned)} of the host, of which copies take {_bytes(stats.host_used)}"
    yield "pinned memory", None, pinned
    yield from _sharing(pool)


_HANDLES = {
    "posix-fd": "file descriptors, on this machine",
    "fabric": "fabric handles",
    "none": "no, the memory is for this process only",
}


def _sharing(pool: _native.Pool) -> Iterator[Check]:
    """Returns what of sharing is possible, and what is on."""
    import vramp

    state, info = pool.sharing, pool.device_info
    text = _HANDLES[state.handle_type]
    if state.fallback is not None:
        text = f"{text}: {state.fallback}"
    if state.handle_type == "none":
        why = "set the option sharing=posix-fd" if info.has_posix_fd else "the device cannot"
        yield "other processes", None, f"{text} ({why})"
    else:
        # The way through the socket is that of another process too.
        try:
            with pool.malloc(1 << 20) as block, vramp.ipc.export(block) as exported:
                vramp.ipc.open(exported.ticket(), pool).close()
            yield "other processes", True, f"{text}; exported 1 MiB and opened it"
        except vramp.VrampError as error:
            yield "other processes", False, f"{text}: {error}"
    peers = ", ".join(map(str, info.peers)) or "none with a link"
    granted = ", ".join(map(str, state.peers)) or "none yet"
    access = f"; with access: {granted}" if info.peers else ""
    yield "other cards", None, f"{peers}{access}"
    if not info.has_rdma:
        rdma = "the device cannot"
    else:
        rdma = "on" if state.rdma else "possible, off (option rdma=on)"
    dma_buf = "yes" if info.has_dma_buf else "no"
    yield "network cards", None, f"GPUDirect RDMA: {rdma}; dma-buf: {dma_buf}"


def _number(path: str) -> int | None:
    try:
        text = Path(path).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() and int(text) < 1 << 60 else None


def _host() -> Iterator[Check]:
    limit = _number("/sys/fs/cgroup/memory.max")
    if limit is None:
        limit = _number("/sys/fs/cgroup/memory/memory.limit_in_bytes")
    if limit is not None:
        yield "host memory", None, f"the container is limited to {_bytes(limit)}"
    maps = _number("/proc/sys/vm/max_map_count")
    if maps is not None and maps < 65530:
        text = f"vm.max_map_count is {maps}: large pools need 65530 (sysctl -w vm.max_map_count=65530)"
        yield "mappings", None, text


def _exec() -> Iterator[Check]:
    """Whether this process runs under `vramp exec`, or could."""
    library = Path(os.environ.get("VRAMP_PRELOAD_LIBRARY") or Path(__file__).with_name("libvramp_preload.so"))
    settings = os.environ.get("VRAMP_EXEC")
    if settings is not None:
        preloaded = os.environ.get("LD_PRELOAD", "")
        asked = [pair.partition("=")[0] for pair in settings.split(";")]
        modes = ", ".join(mode for mode in ("record", "limit", "pool") if mode in asked)
        if library.name in preloaded:
            yield "vramp exec", None, f"this process runs under it ({modes}): LD_PRELOAD={preloaded}"
        else:
            yield "vramp exec", False, f"asked for ({modes}), but LD_PRELOAD={preloaded} does not name {library.name}"
    elif library.is_file():
        yield "vramp exec", True, str(library)
    else:
        yield "vramp exec", None, f"{library} is not there: build it with cargo build --release -p vramp-preload"


def _version(packages: tuple[str, ...]) -> str | None:
    for package in packages:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return None


def _library(name: str, packages: tuple[str, ...], module: str | None) -> Iterator[Check]:
    version = _version(packages)
    if version is None:
        yield name, None, "not installed"
        return
    if module is None or importlib.util.find_spec(module) is None:
        yield name, True, version
        return
    try:
        doctor = getattr(importlib.import_module(module), "doctor", None)
    except Exception as error:
        # Whatever a broken installation raises is the finding.
        yield name, False, f"cannot be imported: {type(error).__name__}: {error}"
        return
    try:
        checks: list[Check] = [] if doctor is None else list(doctor())
        # An integration that found the library's version has a line for it.
        if not any(check[0] == name for check in checks):
            yield name, True, version
        yield from checks
    except Exception as error:
        yield name, False, f"its check failed: {type(error).__name__}: {error}"


def checks() -> Iterator[Check]:
    """Returns every check of this machine, with what the integrations add."""
    parts: tuple[Callable[[], Iterator[Check]], ...] = (_package, _device, _host, _exec)
    for part in parts:
        yield from part()
    for library in _LIBRARIES:
        yield from _library(*library)


_SIMULATOR_ONLY = 3
"""Exit code if everything works, but on the simulator only."""


def main(arguments: list[str]) -> int:
    """Prints every check. Returns 0 if vramp works on a card, 3 if on the simulator only, and 1 otherwise."""
    if arguments:
        print("usage: python -m vramp doctor", file=sys.stderr)
        return 0 if arguments[0] in ("-h", "--help") else 2
    essential = {"package", "visible devices", "pool", "allocation"}
    works, simulated = True, False
    for name, ok, text in checks():
        mark = {True: "ok", False: "FAIL", None: "--"}[ok]
        first, *rest = text.splitlines() or [""]
        print(f"{mark:<4} {name:<16} {first}")
        for line in rest:
            print(f"{'':<21} {line}")
        if ok is False and name in essential:
            works = False
        simulated = simulated or (name == "device" and ok is None)
    if not works:
        print("vramp does not work here: see FAIL above")
        return 1
    if simulated:
        print("vramp works on the simulator only: no program computes on a card here")
        return _SIMULATOR_ONLY
    print("vramp works here")
    return 0
