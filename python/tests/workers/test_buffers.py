"""A mapping on the deferrable buffers of a simulated card, which a limit of its pool makes small."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ideal
import numpy as np
import pytest
from dask.utils import Dispatch
from distributed.protocol import deserialize, serialize
from sim_array import SimArray, full, on_card

import vramp
from vramp.dask import TieredMapping
from vramp.dask._spillable import register_with
from vramp.dask._store import LeasedArray, TierStore

MIB = 1 << 20
CHUNK = 4 * MIB
LIMIT = 10 * CHUNK


@pytest.fixture
def pool() -> Iterator[vramp.Pool]:
    """The shared pool, with room for ten chunks."""
    shared = vramp.pool()
    before = shared.limit
    gc.collect()  # what tests before this one left in cycles
    shared.trim()
    shared.limit = LIMIT
    shared.reset_peaks()
    stats = shared.stats()
    assert (stats.live, stats.reserved_peak) == (0, 0), "another test's memory is left"
    yield shared
    gc.collect()
    shared.audit()
    shared.limit = before


@pytest.fixture
def data(pool: vramp.Pool, tmp_path: Path) -> Iterator[TieredMapping]:
    made = TieredMapping(tmp_path, memory_limit="1GiB")
    yield made
    made.clear()
    gc.collect()
    if made._store is not None:
        stats = tiers_of(made).stats()
        assert (stats.buffers, stats.leases, stats.host, stats.disk) == (0, 0, 0, 0)
        tiers_of(made).audit()
    assert pool.stats().live == 0


def chunk(value: float) -> SimArray:
    return full(CHUNK // 8, value)


def tiers_of(data: TieredMapping) -> vramp.Tiers:
    assert isinstance(data.store, TierStore)
    return data.store.tiers


def flush(data: TieredMapping) -> None:
    """Waits until the mapping knows which buffers left."""
    assert isinstance(data.store, TierStore)
    assert data.store._controller.flush(30)


def test_values_of_three_times_the_card_are_kept_and_read(data: TieredMapping, pool: vramp.Pool) -> None:
    for at in range(30):
        data[at] = chunk(at)
    for _ in range(2):
        for at in range(30):
            assert (data[at].view == at).all()
    stats = tiers_of(data).stats()
    assert stats.to_host == stats.total <= 30 * CHUNK, "each was copied out once"
    assert pool.stats().reserved_peak <= LIMIT
    assert stats.failures == 0


def test_memory_leaves_for_an_allocation_of_any_library(data: TieredMapping, pool: vramp.Pool) -> None:
    for at in range(10):
        data[at] = chunk(at)
    with pool.malloc(6 * CHUNK):  # temporaries of cuDF, PyTorch or a kernel
        flush(data)
        assert list(data.host) == [0, 1, 2, 3, 4, 5] and len(data.device) == 4
    for at in range(10):
        assert (data[at].view == at).all()
    with pool.malloc(9 * CHUNK):  # restored values leave without a call of the mapping
        flush(data)
        assert len(data.device) <= 1 and len(data.host) >= 9
        assert data.spilled_total.memory == sum(10 - len(data.device) for _ in "1") * CHUNK
    assert tiers_of(data).stats().to_host <= 10 * CHUNK


def test_what_a_task_uses_stays_on_the_card(data: TieredMapping, pool: vramp.Pool) -> None:
    for at in range(10):
        data[at] = chunk(at)
    used = [data[0], data[1]]
    pool.malloc(8 * CHUNK).free()
    used += [data[2], data[3]]
    views = [array.view for array in used]
    pool.malloc(6 * CHUNK).free()
    with pytest.raises(vramp.OutOfMemoryError):
        pool.malloc(7 * CHUNK)
    for at, view in enumerate(views):
        assert (view == at).all()
    assert {0, 1, 2, 3} <= set(data.device)
    # A value that is in buffers needs no array of its own alive: what was made of it is enough.
    del used
    gc.collect()
    assert (views[3] == 3).all()


def test_a_restored_value_cannot_be_written(data: TieredMapping, pool: vramp.Pool) -> None:
    data["a"] = chunk(1)
    pool.malloc(10 * CHUNK).free()
    value = data["a"]
    with pytest.raises(ValueError, match="read-only"):
        value.view[:] = 2


def test_a_key_with_a_restored_value_shares_its_buffer(data: TieredMapping, pool: vramp.Pool) -> None:
    data["a"] = chunk(1)
    pool.malloc(10 * CHUNK).free()
    data["b"] = data["a"]
    pool.malloc(10 * CHUNK).free()
    assert tiers_of(data).stats().buffers == 1
    del data["a"]
    assert (data["b"].view == 1).all()


def test_the_host_is_bounded_and_the_rest_is_on_the_disk(pool: vramp.Pool, tmp_path: Path) -> None:
    data = TieredMapping(tmp_path, device_memory_limit=2 * CHUNK, memory_limit=3 * CHUNK)
    for at in range(9):
        data[at] = chunk(at)
    assert (len(data.device), len(data.host), len(data.disk)) == (2, 3, 4)
    stats = tiers_of(data).stats()
    assert stats.host <= 3 * CHUNK and stats.disk >= 4 * CHUNK
    for at in range(9):
        assert (data[at].view == at).all()
    assert data.evict() == CHUNK
    data.clear()
    gc.collect()
    assert tiers_of(data).stats().disk == 0


@pytest.mark.parametrize("seed", range(5))
def test_bytes_copied_out_are_those_of_an_ideal_mapping(data: TieredMapping, pool: vramp.Pool, seed: int) -> None:
    """At most 1.2 times those that an ideal least-recently-used mapping copies out for the same accesses."""
    chance = random.Random(seed)
    trace: list[ideal.Access] = []
    live: list[int] = []
    for step in range(300):
        what = chance.random()
        if what < 0.25 and len(live) < 30 or len(live) < 5:
            data[step] = chunk(step)
            live.append(step)
            trace.append(("set", step, CHUNK))
        elif what < 0.85:
            # Recent ones more often, as Dask orders tasks by depth.
            key = live[-1 - int(len(live) * chance.random() ** 2)]
            assert data[key].view[7] == key
            trace.append(("get", key, CHUNK))
        else:
            key = live.pop(chance.randrange(len(live)))
            del data[key]
            trace.append(("del", key, CHUNK))
    lru = ideal.by_lru(trace, LIMIT)
    assert lru > 20 * CHUNK
    assert tiers_of(data).stats().to_host <= 1.2 * lru
    assert ideal.by_belady(trace, LIMIT) <= lru


def test_a_mapping_that_is_dropped_leaves_nothing(pool: vramp.Pool, tmp_path: Path) -> None:
    data = TieredMapping(tmp_path)
    for at in range(15):
        data[at] = chunk(at)
    gone = weakref.ref(data)
    del data
    gc.collect()
    assert gone() is None and pool.stats().live == 0
    with pytest.raises(vramp.OutOfMemoryError):
        pool.malloc(LIMIT + 1)  # no handler is left behind


@pytest.mark.parametrize("families", [("cuda",), ("dask",), ("cuda", "dask", "pickle")])
@pytest.mark.parametrize("resident", [True, False])
def test_buffers_and_leased_arrays_are_serialized(
    data: TieredMapping, pool: vramp.Pool, families: tuple[str, ...], resident: bool
) -> None:
    tiers = tiers_of(data)
    buffer = tiers.adopt(bytes(range(256)) * 1000)
    if not resident:
        buffer.spill()
    sent: Any
    for sent in (buffer, LeasedArray(buffer)):
        header, frames = serialize(sent, serializers=families, on_error="raise")
        assert header["serializer"] == families[0]
        if families[0] == "dask":
            frames = [bytes(frame) for frame in frames]
        back = deserialize(header, frames)
        assert type(back) is type(sent) and back.nbytes == 256_000
        contents = back.read() if isinstance(back, vramp.Buffer) else np.asarray(back).tobytes()
        assert contents == bytes(range(256)) * 1000
    del sent, back, frames, buffer


@pytest.mark.parametrize("families", [("cuda",), ("dask",), ("cuda", "dask", "pickle")])
@pytest.mark.parametrize("shape", [(500, 3), (0, 3), ()])
def test_the_pools_own_arrays_are_serialized(
    data: TieredMapping, pool: vramp.Pool, families: tuple[str, ...], shape: tuple[int, ...]
) -> None:
    tiers_of(data)
    count = int(np.prod(shape))
    array = pool.malloc(max(8 * count, 1)).array(shape, "float64")
    np.asarray(array)[...] = np.arange(count).reshape(shape)
    block = pool.malloc(256)
    np.asarray(block.array())[:] = range(256)
    for sent, nbytes in ((array, 8 * count), (block, 256)):
        from dask.sizeof import sizeof

        assert sizeof(sent) == nbytes
        header, frames = serialize(sent, serializers=families, on_error="raise")
        assert header["serializer"] == families[0]
        if families[0] == "dask":
            frames = [bytes(frame) for frame in frames]
        back = np.asarray(deserialize(header, frames))
        if sent is block:
            assert back.tobytes() == bytes(range(256))
        else:
            assert back.shape == shape and back.dtype == np.float64
            assert (back == np.arange(count).reshape(shape)).all()


def test_the_pools_own_arrays_leave_the_card_and_come_back(data: TieredMapping, pool: vramp.Pool) -> None:
    def own(number: int) -> vramp.Array:
        made = pool.malloc(CHUNK).array((CHUNK // 8, 1), "int64")
        np.asarray(made)[:] = number
        return made

    for number in range(40):
        data[number] = own(number)
    assert len(data.device) + len(data.host) + len(data.disk) == 40 and len(data.host) > 0
    for number in range(40):
        back = data[number]
        assert back.shape == (CHUNK // 8, 1) and back.dtype == "int64" and len(back) == CHUNK // 8
        assert (np.asarray(back) == number).all()
        del back
    for number in range(40):
        data.evict()
    assert len(data.host) == 0
    assert (np.asarray(data[3]) == 3).all()
    data.clear()


def test_pinned_memory_falls_with_what_is_evicted(pool: vramp.Pool, tmp_path: Path) -> None:
    data = TieredMapping(tmp_path, memory_limit="160MiB")
    for number in range(40):
        data[number] = chunk(number)
    tiers = tiers_of(data)
    before = tiers.stats()
    assert before.host_used >= before.host > 20 * CHUNK
    # Parts of a sixteenth of the budget are pinned at once. An evicted chunk shares at most two with others.
    part = (160 << 20) // 16
    while data.fast:
        assert data.evict() > 0
        stats = tiers.stats()
        assert stats.host_pinned <= stats.host_used + 3 * part, stats
    stats = tiers.stats()
    assert (stats.host, stats.host_used) == (0, 0) and stats.host_pinned <= part, stats
    pool.trim()
    assert tiers.stats().host_pinned == pool.stats().host_pinned == 0
    data.clear()


def test_dask_cuda_leaves_buffers_alone_and_knows_their_sizes(data: TieredMapping) -> None:
    spillable, objects = Dispatch("is_spillable_object"), Dispatch("get_device_memory_objects")
    spillable.register(object, lambda _value: False)
    objects.register(object, lambda _value: [])
    register_with(spillable, objects)
    buffer = tiers_of(data).buffer(CHUNK)
    with buffer.lease("overwrite"):
        pass
    array = LeasedArray(buffer)
    assert spillable(buffer) and spillable(array) and not spillable(1)
    assert objects(buffer) == objects(array) == [buffer]
    block = vramp.pool().malloc(64)
    assert objects(block) == objects(block.array()) == [block] and not spillable(block)
    from dask.sizeof import sizeof

    assert sizeof(buffer) == sizeof(array) == CHUNK


def test_an_empty_frame_leaves_and_comes_back(data: TieredMapping, pool: vramp.Pool) -> None:
    data["pair"] = [on_card(np.zeros((0, 7))), chunk(1)]
    pool.malloc(10 * CHUNK).free()
    empty, other = data["pair"]
    assert empty.shape == (0, 7) and (other.view == 1).all()
