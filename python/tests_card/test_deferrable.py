"""Deferrable buffers on a card, with CuPy and PyTorch: `python -m pytest python/tests_card`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import vramp

cupy = pytest.importorskip("cupy")

MIB = 1 << 20
LIMIT = 512 * MIB


@pytest.fixture
def tiers() -> Iterator[vramp.Tiers]:
    # CuPy and PyTorch use the primary context, as vramp does.
    cupy.cuda.Device(0).use()
    cupy.zeros(1)
    with (
        vramp.open("cuda:0", limit=LIMIT) as pool,
        vramp.Tiers(pool, host="4GiB") as opened,
    ):
        yield opened
        opened.audit()


@contextmanager
def _stream(tiers: vramp.Tiers) -> Iterator[Any]:
    """A stream that ends while its work may run. It is forgotten before, as `Pool` requires."""
    stream = cupy.cuda.Stream(non_blocking=True)
    try:
        yield stream
    finally:
        tiers.pool.forget_stream(stream)


def _fill(buffer: vramp.Buffer, value: int) -> None:
    with _stream(buffer.tiers) as stream:
        with buffer.lease("overwrite", stream, dtype="int32") as view, stream:
            cupy.asarray(view)[:] = value


def _expect(buffer: vramp.Buffer, value: int) -> None:
    with _stream(buffer.tiers) as stream:
        with buffer.lease("r", stream, dtype="int32") as view, stream:
            wrong = (cupy.asarray(view) != value).sum()
            stream.synchronize()
    assert int(wrong) == 0


def test_three_times_the_limit_with_kernels_of_cupy(tiers: vramp.Tiers) -> None:
    buffers = [tiers.buffer(96 * MIB) for _ in range(3 * LIMIT // (96 * MIB))]
    for value, buffer in enumerate(buffers):
        _fill(buffer, value)
    assert any(buffer.is_deferred for buffer in buffers)
    for _ in range(3):
        for value, buffer in enumerate(buffers):
            _expect(buffer, value)
    assert tiers.stats().to_host > 0


def test_threads_with_streams_of_their_own(tiers: vramp.Tiers) -> None:
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            buffers = [tiers.buffer(32 * MIB) for _ in range(8)]
            for turn in range(6):
                for index, buffer in enumerate(buffers):
                    _fill(buffer, 1000 * seed + 10 * turn + index)
                for index, buffer in enumerate(buffers):
                    _expect(buffer, 1000 * seed + 10 * turn + index)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_an_array_of_cupys_own_pool_becomes_spillable(tiers: vramp.Tiers) -> None:
    array = cupy.arange(16 * MIB, dtype=cupy.int32)
    cupy.cuda.Device(0).synchronize()
    adopted = tiers.adopt(array)
    del array
    assert adopted.spill() == 64 * MIB
    assert adopted.is_deferred
    with adopted.lease("r", dtype="int32") as view:
        restored = cupy.asarray(view)
        assert int((restored != cupy.arange(16 * MIB, dtype=cupy.int32)).sum()) == 0


def test_a_tensor_of_pytorch_keeps_the_lease(tiers: vramp.Tiers) -> None:
    torch = pytest.importorskip("torch")
    buffer = tiers.buffer(64 * MIB)
    _fill(buffer, 7)
    with buffer.lease("rw", dtype="int32") as view:
        tensor = torch.from_dlpack(view)
    assert buffer.is_locked
    tensor += 1
    assert tiers.evict(LIMIT) == 0
    torch.cuda.synchronize()
    del tensor
    assert not buffer.is_locked
    assert tiers.evict(LIMIT) >= 64 * MIB
    _expect(buffer, 8)


def test_launches_of_the_controller_find_buffers(tiers: vramp.Tiers) -> None:
    controller = vramp.Controller(tiers)
    seen: list[str] = []

    class Client:
        def deferred(self, buffer: Any) -> None:
            seen.append("deferred")

        def retrieved(self, buffer: Any) -> None:
            seen.append("retrieved")

    client: Any = Client()
    controller.add_client(client)
    one, two = (controller.register(tiers.buffer(64 * MIB)) for _ in range(2))
    _fill(one, 3)
    _fill(two, 4)
    with _stream(tiers) as stream:

        def add(source: Any, target: Any) -> None:
            with stream:
                cupy.asarray(target.array(dtype="int32"))[:] += cupy.asarray(source.array(dtype="int32"))

        tiers.evict(LIMIT)
        controller.lock_and_launch_async(add, one, two, stream=stream)
        controller.sync_and_unlock(stream)
    _expect(two, 7)
    assert controller.flush(10)
    assert "deferred" in seen and "retrieved" in seen
    controller.close()
