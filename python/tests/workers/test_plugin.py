"""What the plugin does in a worker, and which cards a cluster's workers see."""

from __future__ import annotations

import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from sim_array import full
from support import CountingStore

import vramp
import vramp.dask
import vramp.dask._plugin as plugin_module
import vramp.rmm
from vramp.dask import Plugin, TieredMapping
from vramp.dask._cluster import environments


class FakeWorker:
    """What the plugin uses of a worker."""

    def __init__(self, data: Any) -> None:
        self.data = data
        self.handlers = {"get_data": self.get_data}

    async def get_data(self, comm: Any, keys: Any) -> Any:
        return {key: self.data[key] for key in keys}

    async def gather_dep(self) -> str:
        return "gathered"

    async def execute(self, key: Any) -> Any:
        return self.data[key]


SHARED = SimpleNamespace(is_simulated=False, limit=None)


@pytest.fixture
def on_a_card(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces the pool by one of a card, and the adaptors by ones that record their calls."""
    calls: list[str] = []
    monkeypatch.setattr(plugin_module, "pool", lambda: SHARED)
    for name in plugin_module._ALLOCATORS:
        adaptor = ModuleType(f"fake_{name}")
        adaptor.install = lambda name=name: calls.append(name)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, adaptor.__name__, adaptor)
        monkeypatch.setitem(plugin_module._ALLOCATORS, name, ("json", adaptor.__name__, "install"))
    return calls


def test_allocators_are_installed_before_the_first_task(on_a_card: list[str]) -> None:
    Plugin(limit="10GiB").setup(FakeWorker({}))
    assert on_a_card == ["numba", "torch", "cupy", "rmm"]
    assert SHARED.limit == "10GiB"
    on_a_card.clear()
    Plugin(allocators=["cupy"]).setup(FakeWorker({}))
    assert on_a_card == ["cupy"]


def test_an_allocator_that_fails_is_a_warning_unless_it_was_named(
    on_a_card: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise vramp.InUseError("there is a context already")

    monkeypatch.setattr(sys.modules["fake_numba"], "install", fail)
    with caplog.at_level(logging.WARNING):
        Plugin().setup(FakeWorker({}))
    assert on_a_card == ["torch", "cupy", "rmm"] and "numba" in caplog.text
    with pytest.raises(vramp.InUseError):
        Plugin(allocators=["numba"]).setup(FakeWorker({}))
    with pytest.raises(ValueError, match="cudf"):
        Plugin(allocators=["cudf"])


def test_what_is_not_installed_is_left_out(on_a_card: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, (_library, adaptor, function) in list(plugin_module._ALLOCATORS.items()):
        if name != "cupy":
            monkeypatch.setitem(plugin_module._ALLOCATORS, name, ("no_such_module.inner", adaptor, function))
    Plugin().setup(FakeWorker({}))
    assert on_a_card == ["cupy"]


def test_a_failed_allocation_of_rmm_makes_room(
    on_a_card: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    class Adaptor:
        def __init__(self, upstream: Any, callback: Any) -> None:
            self.upstream, self.callback = upstream, callback

    resources: list[Any] = ["first"]
    mr = SimpleNamespace(
        FailureCallbackResourceAdaptor=Adaptor,
        get_current_device_resource=lambda: resources[-1],
        set_current_device_resource=resources.append,
    )
    monkeypatch.setattr(vramp.rmm, "_rmm", lambda: SimpleNamespace(mr=mr))
    data = TieredMapping(tmp_path, store=CountingStore())
    for at in range(4):
        data[at] = full(1 << 18, at)
    Plugin(allocators=["rmm"]).setup(FakeWorker(data))
    assert on_a_card == ["rmm"] and resources[-1].upstream == "first"
    assert resources[-1].callback(3 << 20) and list(data.host) == [0, 1]
    assert resources[-1].callback(100 << 20) and not resources[-1].callback(1)


def test_setting_a_worker_up_again_changes_nothing(tmp_path: Any) -> None:
    worker = FakeWorker(TieredMapping(tmp_path, store=CountingStore()))
    before = (worker.handlers["get_data"], worker.execute, worker.gather_dep)
    Plugin().setup(worker)
    changed = (worker.handlers["get_data"], worker.execute, worker.gather_dep)
    assert not any(new == old for new, old in zip(changed, before, strict=True))
    Plugin().setup(worker)
    assert (worker.handlers["get_data"], worker.execute, worker.gather_dep) == changed


def test_a_worker_with_other_data_is_left_as_it_is() -> None:
    worker = FakeWorker({})
    before = (worker.handlers["get_data"], worker.execute, worker.gather_dep)
    Plugin().setup(worker)
    assert (worker.handlers["get_data"], worker.execute, worker.gather_dep) == before


def test_each_worker_sees_its_own_card_first(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = [each["CUDA_VISIBLE_DEVICES"] for each in environments([0, 1, 2])]
    assert cards == ["0,1,2", "1,2,0", "2,0,1"]
    assert environments("3, GPU-12") == [{"CUDA_VISIBLE_DEVICES": "3,GPU-12"}, {"CUDA_VISIBLE_DEVICES": "GPU-12,3"}]
    monkeypatch.setenv("VRAMP_DEVICE", "sim:a100-80gx3")
    assert environments(None) == [{"VRAMP_DEVICE": "sim:a100-80g"}] * 3
    assert environments("sim") == [{"VRAMP_DEVICE": "sim"}]
    monkeypatch.setenv("VRAMP_DEVICE", "cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    assert environments(None) == [{"CUDA_VISIBLE_DEVICES": "5"}]
    with pytest.raises(ValueError, match="GPU-"):
        environments("first")
    with pytest.raises(vramp.DeviceError, match="sim:h200x2"):
        environments("")


def test_impossible_clusters_are_refused() -> None:
    with pytest.raises(ValueError, match="there are 2 cards"):
        vramp.dask.LocalCluster("sim:h200x2", n_workers=3)
    with pytest.raises(ValueError, match="processes"):
        vramp.dask.LocalCluster("sim", processes=False)
