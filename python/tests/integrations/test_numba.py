"""Numba: the real plugin interface, pointers and settings of the installed numba-cuda (0.20 to 0.30).

A context needs a driver, so a small one stands in: `device.id`, `create_stream`, `push`, `pop` and
`synchronize`, as numba.cuda.cudadrv.driver.Context of 0.30.4 has them.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from array_support import pool

import vramp
import vramp.numba as adaptor

cuda = pytest.importorskip(
    "numba.cuda", reason="numba-cuda is not installed: pip install numba-cuda[cu13]"
)
driver = pytest.importorskip("numba.cuda.cudadrv.driver", reason="as above")


class Context:
    """A context that counts its synchronizations."""

    def __init__(self) -> None:
        self.device = SimpleNamespace(id=0)
        self.depth = 0
        self.synchronized = 0
        self.refuses = False
        self.streams = 0
        self.memory_manager: Any = None

    def create_stream(self) -> SimpleNamespace:
        self.streams += 1
        return SimpleNamespace(
            __cuda_stream__=lambda: (0, 0x4000 + 16 * self.streams), synchronize=lambda: None
        )

    def push(self) -> None:
        self.depth += 1

    def pop(self) -> None:
        self.depth -= 1

    def synchronize(self) -> None:
        assert self.depth == 1, "the context is current"
        if self.refuses:
            raise driver.CudaAPIError(900, "a stream captures")
        self.synchronized += 1


@pytest.fixture
def context(pool: vramp.Pool, monkeypatch: pytest.MonkeyPatch) -> Iterator[Context]:
    monkeypatch.setattr(adaptor, "device_pool", lambda device: pool)
    made = Context()
    made.memory_manager = adaptor.manager()(context=made)
    yield made
    gc.collect()
    made.refuses = False
    made.memory_manager.flush()
    assert made.depth == 0


def test_numba_accepts_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_memory_manager", None)
    adaptor.install()
    adaptor.install()
    assert driver._memory_manager is adaptor._numba_memory_manager


def test_numba_finds_the_plugin_by_the_variable() -> None:
    code = (
        "from numba.cuda.cudadrv import driver\n"
        "driver._ensure_memory_manager()\n"
        "print(driver._memory_manager.__name__)\n"
    )
    environment = dict(os.environ, NUMBA_CUDA_MEMORY_MANAGER="vramp.numba")
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert ran.stdout.strip() == "VrampMemoryManager", ran.stderr


def test_installing_after_a_context_exists_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_memory_manager", None)
    device = SimpleNamespace(primary_context=object())
    fake = SimpleNamespace(_memory_manager=None, driver=SimpleNamespace(devices={0: device}))
    monkeypatch.setattr(adaptor, "load", lambda name, _: fake if "driver" in name else cuda)
    with pytest.raises(vramp.InUseError, match="NUMBA_CUDA_MEMORY_MANAGER"):
        adaptor.install()


def test_a_pointer_frees_itself_after_the_context_was_synchronized(
    context: Context, pool: vramp.Pool
) -> None:
    manager = context.memory_manager
    pointer = manager.memalloc(1000)
    assert isinstance(pointer, cuda.MemoryPointer) and pointer.size == 1000
    assert pool.stats().live == 1000
    view = pointer.view(100)
    assert view.device_pointer_value == pointer.device_pointer_value + 100
    del pointer, view
    gc.collect()
    assert pool.stats().live == 1000 and context.synchronized == 0
    assert manager.flush() == 1
    assert pool.stats().live == 0 and context.synchronized == 1


def test_frees_are_batched_by_numbas_own_setting(context: Context, pool: vramp.Pool) -> None:
    manager = context.memory_manager
    most = driver.config.CUDA_DEALLOCS_COUNT
    for _ in range(20 * (most + 1)):
        manager.memalloc(4096)
    assert context.synchronized == 20
    assert pool.stats().live == 0


def test_many_waiting_bytes_are_freed_at_once(context: Context, pool: vramp.Pool) -> None:
    manager = context.memory_manager
    manager.memalloc(1)
    manager._frees.most_bytes = 1 << 20
    manager.memalloc(2 << 20)
    assert context.synchronized == 1 and pool.stats().live == 0


def test_cleanup_is_deferred_and_made_up_for(context: Context, pool: vramp.Pool) -> None:
    manager = context.memory_manager
    with manager.defer_cleanup(), manager.defer_cleanup():
        for _ in range(100):
            manager.memalloc(4096)
        assert context.synchronized == 0
    manager.memalloc(4096)
    assert context.synchronized == 1 and pool.stats().live == 0


def test_waiting_memory_is_freed_before_an_allocation_fails(
    context: Context, pool: vramp.Pool
) -> None:
    manager = context.memory_manager
    with manager.defer_cleanup():
        manager.memalloc(800 << 20)
        pointer = manager.memalloc(800 << 20)
        assert context.synchronized == 1
    del pointer


def test_waiting_memory_is_freed_before_another_library_fails(
    context: Context, pool: vramp.Pool
) -> None:
    manager = context.memory_manager
    manager.memalloc(800 << 20)
    assert pool.stats().live == 800 << 20
    pool.malloc(800 << 20).free()
    assert context.synchronized == 1 and pool.stats().live == 0
    context.refuses = True
    manager.memalloc(800 << 20)
    with pytest.raises(vramp.OutOfMemoryError):
        pool.malloc(800 << 20)
    context.refuses = False
    pool.malloc(800 << 20).free()


def test_the_end_of_a_manager_ends_its_handler(pool: vramp.Pool) -> None:
    for _ in range(100):
        context = Context()
        manager = adaptor.manager()(context=context)
        adaptor._flush_in_shortages(manager, pool)
        ended = weakref.ref(manager)
        del manager, context
        gc.collect()
        assert ended() is None
    with pytest.raises(vramp.OutOfMemoryError):
        pool.malloc(4 << 30)


def test_out_of_memory_is_numbas_error_with_the_report(context: Context, pool: vramp.Pool) -> None:
    with pytest.raises(driver.CudaAPIError) as caught:
        context.memory_manager.memalloc(4 << 30)
    assert caught.value.code == 2
    assert isinstance(caught.value.__cause__, vramp.OutOfMemoryError)
    pointer = context.memory_manager.memalloc(512 << 20)
    del pointer


def test_a_context_that_cannot_be_synchronized_frees_nothing(
    context: Context, pool: vramp.Pool
) -> None:
    manager = context.memory_manager
    context.refuses = True
    for _ in range(30):
        manager.memalloc(4096)
    assert pool.stats().live == 30 * 4096 and len(manager._frees.waiting) == 30
    context.refuses = False
    assert manager.flush() == 30


def test_reset_frees_everything_once(context: Context, pool: vramp.Pool) -> None:
    manager = context.memory_manager
    kept = [manager.memalloc(4096) for _ in range(5)]
    manager.reset()
    assert pool.stats().live == 0
    again = [manager.memalloc(4096) for _ in range(5)]
    del kept
    gc.collect()
    assert pool.stats().live == 5 * 4096 and len(manager._frees.live) == 5
    assert context.streams == 2, "the first one was forgotten"
    del again


def test_memory_info_counts_free_memory_of_the_pool(context: Context, pool: vramp.Pool) -> None:
    manager = context.memory_manager
    manager.initialize()
    free, total = manager.get_memory_info()
    assert total == 1 << 30 and free == 1 << 30
    assert manager.deallocations.memory_capacity == pool.stats().device_total
    pointer = manager.memalloc(256 << 20)
    assert manager.get_memory_info().free == 768 << 20
    del pointer
    manager.flush()
    assert manager.get_memory_info().free == 1 << 30


def test_an_ipc_handle_is_refused_with_a_reason(context: Context) -> None:
    pointer = context.memory_manager.memalloc(4096)
    with pytest.raises(vramp.UnsupportedError, match="IPC"):
        context.memory_manager.get_ipc_handle(pointer)
    del pointer


def test_ten_thousand_arrays_leave_nothing(context: Context, pool: vramp.Pool) -> None:
    manager = context.memory_manager
    for index in range(10_000):
        manager.memalloc(1 + 37 * index % 100_000)
    manager.flush()
    stats = pool.stats()
    assert (stats.live, stats.allocated, stats.freed) == (0, 10_000, 10_000)
    assert manager._frees.live == {} and manager._frees.waiting_bytes == 0


def test_the_doctor_names_what_is_missing() -> None:
    checks = adaptor.doctor()
    assert checks[0][:2] == ("numba.cuda", True)
    assert all(len(check) == 3 and check[2] for check in checks)
