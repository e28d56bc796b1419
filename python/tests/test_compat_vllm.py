"""The sleep-mode backend for vLLM on the simulator, with modules that have the names of vLLM 0.33.0."""

from __future__ import annotations

import ctypes
import importlib
import inspect
import sys
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from compat_memory import Memory, fill, holds, phases, reserved, status
from conftest import MIB
from nccl_library import Fake

import vramp
import vramp.torch
from vramp.compat import vllm


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A worker's module of vLLM, which imported the function of the allocator by its name."""
    names = ("vllm", "vllm.device_allocator", "vllm.device_allocator.sleep_mode_backend", "vllm.worker")
    modules: list[Any] = [ModuleType(name) for name in names]
    modules[1].get_mem_allocator_instance = modules[3].get_mem_allocator_instance = lambda: "cumem"
    modules[2].SleepModeBackendFactory = Factory
    modules[0].device_allocator = modules[1]
    for name, module in zip(names, modules):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(Factory, "_registry", {})
    return modules[3]


class Factory:
    """vLLM's registry: names, and loaders that import the class at its first use."""

    _registry: dict[str, Any] = {}

    @classmethod
    def register_backend(cls, name: str, module_path: str, class_name: str) -> None:
        if name in cls._registry:
            raise ValueError(name)
        cls._registry[name] = lambda: getattr(importlib.import_module(module_path), class_name)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, memory: Memory) -> Iterator[Memory]:
    """Memory of an engine whose allocator has no tag yet."""
    monkeypatch.setattr(vllm, "allocator", vllm.Allocator())
    yield memory


def allocate(memory: Memory, tag: str | None, size: int, byte: int) -> vramp.Allocation:
    with vllm.allocator.use_memory_pool(tag):
        return memory.block(size, byte)


def test_sleep_keeps_the_default_tag_and_what_is_outside(engine: Memory) -> None:
    outside = engine.block(4 * MIB, 1)
    first, second = (allocate(engine, None, 4 * MIB, byte) for byte in (2, 3))
    before = reserved()
    vllm.allocator.sleep()
    assert reserved() == before - 8 * MIB and holds(outside, 1)
    vllm.allocator.wake_up()
    assert holds(outside, 1) and holds(first, 2) and holds(second, 3)


def test_level_one_keeps_weights_and_tags_wake_one_by_one(engine: Memory) -> None:
    assert vllm.allocator.get_current_usage() == 0
    weights = allocate(engine, "weights", 32 * MIB, 1)
    cache = allocate(engine, "kv_cache", 96 * MIB, 2)
    buffers = allocate(engine, "runtime", 2 * MIB, 3)
    places = [block.ptr for block in (weights, cache, buffers)]
    tags = ("weights", "kv_cache", "runtime")
    backend = vllm.Backend()
    assert backend.state() == "RUNNING" and vllm.allocator.get_current_usage() == 130 * MIB
    before = reserved()
    backend.suspend(1)
    assert status("weights").copied == 32 * MIB and status("kv_cache").copied == 0
    backend.suspend(1)
    assert backend.state() == "SUSPENDED" and phases(*tags) == ["asleep"] * 3
    assert reserved() == before - 130 * MIB and vllm.allocator.get_current_usage() == 130 * MIB

    backend.resume(["weights"])
    assert phases(*tags) == ["awake", "asleep", "awake"] and holds(weights, 1) and holds(buffers, 3)
    backend.resume(["kv_cache"])
    assert backend.state() == "RUNNING" and phases(*tags) == ["awake"] * 3
    assert [block.ptr for block in (weights, cache, buffers)] == places


def test_level_two_takes_weights_that_are_loaded_again(engine: Memory) -> None:
    weights = allocate(engine, "weights", 32 * MIB, 1)
    allocate(engine, "kv_cache", 32 * MIB, 2)
    backend = vllm.Backend()
    before = reserved()
    for version in (3, 4):
        backend.suspend(2)
        assert reserved() == before - 64 * MIB
        assert (status("weights").on_host, status("weights").copied) == (0, 0)
        backend.resume(["weights"])
        assert phases("weights", "kv_cache") == ["awake", "asleep"]
        fill(weights, version)
        backend.resume(["kv_cache"])
        assert holds(weights, version)


@pytest.mark.parametrize("level", [1, 2])
def test_runtime_state_survives_both_levels(engine: Memory, level: int) -> None:
    with vllm.allocator.use_memory_pool("runtime"):
        state = engine.block(8 * MIB, 1)
        cache = allocate(engine, "kv_cache", 8 * MIB, 2)
    backend = vllm.Backend()
    backend.suspend(level)
    backend.resume(["weights"])
    assert phases("runtime", "kv_cache") == ["awake", "asleep"] and holds(state, 1)
    backend.resume(["kv_cache"])
    fill(cache, 3)
    assert holds(cache, 3)


def test_chosen_tags_are_discarded(engine: Memory) -> None:
    weights = allocate(engine, "weights", 4 * MIB, 1)
    allocate(engine, "kv_cache", 4 * MIB, 2)
    backend = vllm.Backend()
    backend.discard(("kv_cache", "unknown"))
    assert backend.state() == "SUSPENDED"
    assert phases("weights", "kv_cache") == ["awake", "asleep"] and holds(weights, 1)
    # The copy of what sleeps is freed.
    backend.suspend(1)
    assert status("weights").on_host >= 4 * MIB
    backend.discard(("weights",))
    assert status("weights").on_host == 0
    backend.resume()
    assert backend.state() == "RUNNING" and phases("weights", "kv_cache") == ["awake"] * 2


def test_a_tag_without_memory_neither_sleeps_nor_wakes(engine: Memory) -> None:
    with vllm.allocator.use_memory_pool("never allocated in"):
        pass
    backend = vllm.Backend()
    backend.suspend()
    backend.resume(["never allocated in"])
    backend.resume()
    assert backend.state() == "RUNNING" and vllm.allocator.get_current_usage() == 0


def test_the_contents_of_a_tag_without_backup_are_not_lost_silently(engine: Memory) -> None:
    cache = allocate(engine, "kv_cache", 4 * MIB, 1)
    with pytest.raises(vramp.UnsupportedError, match="kv_cache would be lost"):
        vllm.allocator.sleep("kv_cache")
    assert phases("kv_cache") == ["awake"] and holds(cache, 1)


def test_errors_leave_the_state_true_and_a_later_call_goes_on(engine: Memory) -> None:
    weights = allocate(engine, "weights", 64 * MIB, 1)
    backend = vllm.Backend()
    with pytest.raises(vramp.UnsupportedError, match="level 3"):
        backend.suspend(3)
    with vramp.pool().pin(weights), pytest.raises(vramp.RegionError, match="pinned"):
        backend.suspend()
    assert backend.state() == "RUNNING" and phases("weights") == ["awake"] and holds(weights, 1)
    # What cannot be given up leaves the tags that are kept awake.
    cache = allocate(engine, "kv_cache", 4 * MIB, 2)
    with vramp.pool().pin(cache), pytest.raises(vramp.RegionError, match="pinned"):
        backend.suspend()
    assert phases("weights", "kv_cache") == ["awake"] * 2 and holds(weights, 1) and holds(cache, 2)
    backend.suspend()
    # No room on the card.
    pool = vramp.pool()
    pool.limit = pool.stats().reserved + 32 * MIB
    try:
        with pytest.raises(vramp.VrampError):
            backend.resume()
        assert backend.state() == "SUSPENDED" and phases("weights") == ["asleep"]
    finally:
        pool.limit = None
    backend.resume()
    assert backend.state() == "RUNNING" and holds(weights, 1)


@pytest.mark.parametrize("is_enabled", [True, False])
def test_registers_once(worker: Any, monkeypatch: pytest.MonkeyPatch, is_enabled: bool) -> None:
    monkeypatch.setattr(vramp.torch, "is_enabled", lambda: is_enabled)
    vllm.register()
    vllm.register()
    backend = Factory._registry["vramp"]()
    assert backend is vllm.Backend and backend.is_supported() == is_enabled
    assert worker.get_mem_allocator_instance() == (vllm.allocator if is_enabled else "cumem")


def test_a_version_without_backends_gets_the_pools_alone(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # As of vLLM 0.24: the worker asks the allocator itself.
    monkeypatch.delitem(sys.modules, "vllm.device_allocator.sleep_mode_backend")
    monkeypatch.setattr(vramp.torch, "is_enabled", lambda: True)
    vllm.register()
    assert worker.get_mem_allocator_instance() is vllm.allocator


def raises(*arguments: object) -> None:
    raise TypeError("it has other arguments")


@pytest.mark.parametrize("lacks", ["vllm", "the function", "the registry", "its arguments"])
def test_a_version_that_is_not_served_starts_and_logs_one_line(
    lacks: str, worker: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(vramp.torch, "is_enabled", lambda: True)
    match lacks:
        case "vllm":
            monkeypatch.delitem(sys.modules, "vllm.device_allocator")
        case "the function":
            monkeypatch.delattr(sys.modules["vllm.device_allocator"], "get_mem_allocator_instance")
        case "the registry":
            monkeypatch.delattr(sys.modules["vllm.device_allocator.sleep_mode_backend"], "SleepModeBackendFactory")
        case _:
            monkeypatch.setattr(Factory, "register_backend", raises)
    vllm.register()
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "does not serve" in record.getMessage()


def test_a_sleep_and_a_wake_up_return_idle_memory_and_garbage(engine: Memory) -> None:
    allocate(engine, "weights", 8 * MIB, 1)
    for call in (vllm.allocator.sleep, vllm.allocator.wake_up):
        # In a cycle that only a collection finds.
        cycle: list[Any] = [vramp.pool().malloc(32 * MIB)]
        cycle.append(cycle)
        idle = vramp.pool().malloc(64 * MIB)
        idle.free()
        before = reserved()
        del cycle
        call()
        # The weights came back in the wake-up.
        assert before - reserved() >= (96 - 8) * MIB


def test_communicators_of_groups_are_suspended_while_weights_sleep(
    engine: Memory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = Fake(tmp_path)
    comms = [fake.make()[0] for _ in range(2)]

    class Comm:
        """As vLLM's PyNcclCommunicator. Of a group of one process it has no communicator."""

        def __init__(self, comm: int | None) -> None:
            self.nccl = SimpleNamespace(lib=fake.library)
            self.comm = None if comm is None else ctypes.c_void_p(comm)

    groups = [SimpleNamespace(device_communicator=SimpleNamespace(pynccl_comm=Comm(comm))) for comm in [*comms, None]]
    groups.append(SimpleNamespace(device_communicator=None))
    known: dict[int, Any] = {}
    state = SimpleNamespace(parallel_state=SimpleNamespace(_groups=known))
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.distributed", state)
    monkeypatch.setattr(vllm, "_suspension", None)
    assert "no communicator" in str(vllm.suspend_communicators())
    known.update({nth: lambda group=group: group for nth, group in enumerate(groups)})
    known[9] = lambda: None
    allocate(engine, "weights", 4 * MIB, 1)
    allocate(engine, "kv_cache", 4 * MIB, 2)
    assert vllm.suspend_communicators() is None and vllm.suspend_communicators("worker") is None
    vllm.allocator.sleep(("weights",))
    vllm.allocator.wake_up(["weights"])
    vllm.allocator.wake_up(["kv_cache"])
    assert [fake.taken(comm) for comm in comms] == ["suspend resume"] * 2
    vllm._suspension.close()


def test_the_installed_package_names_the_plug_in(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (point,) = (point for point in distribution("vramp").entry_points if point.group == "vllm.general_plugins")
    assert point.name == "vramp"
    monkeypatch.setattr(vramp.torch, "is_enabled", lambda: True)
    point.load()()
    assert Factory._registry["vramp"]() is vllm.Backend
    assert worker.get_mem_allocator_instance() is vllm.allocator


# Methods of vLLM 0.33.0's SleepModeBackend, and of what get_mem_allocator_instance() returns, with the names
# of their parameters.
BACKEND = {
    "suspend": ["level"],
    "resume": ["tags"],
    "discard": ["tags"],
    "state": [],
    "is_supported": [],
    "preserves_communicators": [],
    "preserves_compiled_artifacts": [],
    "preserves_graphs_with_communicators": [],
    "supports_durable_storage": [],
}
ALLOCATOR = {
    "use_memory_pool": ["tag"],
    "sleep": ["offload_tags"],
    "discard": ["tags"],
    "wake_up": ["tags"],
    "get_current_usage": [],
}


@pytest.mark.parametrize(("made", "expected"), [(vllm.Backend(), BACKEND), (vllm.Allocator(), ALLOCATOR)])
def test_names_and_arguments_are_theirs(made: object, expected: dict[str, list[str]]) -> None:
    for name, parameters in expected.items():
        assert list(inspect.signature(getattr(made, name)).parameters) == parameters, name
