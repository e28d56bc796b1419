"""Which keys leave the card and the host, when, and what comes back: after the tests of dask-cuda's mapping
and of distributed's spill buffer."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sim_array import SimArray, full, on_card
from support import CountingStore

import vramp
from vramp.dask import TieredMapping
from vramp.dask._ledger import Place
from vramp.dask._values import LOOKED_AT, LOOKED_AT_IN_ALL, SMALLEST_BUFFER, is_device_value

CHUNK = 2 << 20

Make = Callable[..., TieredMapping]


@pytest.fixture
def store() -> CountingStore:
    return CountingStore()


@pytest.fixture
def make(tmp_path: Path, store: CountingStore) -> Make:
    def made(device: Any = None, host: int | None = None, max_spill: int | None = None) -> TieredMapping:
        return TieredMapping(
            tmp_path, device_memory_limit=device, memory_limit=host, max_spill=max_spill, store=store
        )

    return made


def chunk(value: float) -> SimArray:
    """A value that goes to a buffer when it leaves the card."""
    return full(CHUNK // 8, value)


def host_of(value: Any) -> Any:
    return value.to_host() if isinstance(value, SimArray) else value


def places(data: TieredMapping) -> tuple[set[str], set[str], set[str]]:
    return set(data.device), set(data.host), set(data.disk)


@pytest.mark.parametrize("host_values", [1, 10, 60])
@pytest.mark.parametrize("device_values", [1, 10, 60])
@pytest.mark.parametrize("sizes", [(1, 1000), (100, 100), (1000, 1000)])
def test_values_of_host_and_card_come_back_equal_and_nothing_stays(
    make: Make, tmp_path: Path, host_values: int, device_values: int, sizes: tuple[int, int]
) -> None:
    data = make(16 << 10, 16 << 10)
    chance = random.Random(host_values * 1000 + device_values)
    numbers = np.random.default_rng(7)
    full_list: list[tuple[str, Any]] = []
    for at in range(host_values):
        full_list.append((f"x-{at}", numbers.random(chance.randint(*sizes))))
    for at in range(device_values):
        full_list.append((f"dx-{at}", on_card(numbers.random(chance.randint(*sizes)))))
    chance.shuffle(full_list)
    for key, value in full_list:
        data[key] = value
    assert len(data) == len(full_list)
    chance.shuffle(full_list)
    for key, value in full_list:
        np.testing.assert_array_equal(host_of(data[key]), host_of(value))
        assert type(data[key]) is type(value)
        del data[key]
    assert places(data) == (set(), set(), set())
    assert data.spilled_total == (0, 0)
    assert not (tmp_path / "storage").exists() or os.listdir(tmp_path / "storage") == []


def test_keys_go_down_step_by_step_and_come_back(make: Make) -> None:
    data = make(16 << 10, 16 << 10)
    a, b = np.random.default_rng(1).random(1000), on_card(np.random.default_rng(2).random(1000))
    data["a1"] = a
    assert places(data) == (set(), {"a1"}, set())
    data["b1"] = b
    assert places(data) == ({"b1"}, {"a1"}, set())
    data["b2"] = b
    assert places(data) == ({"b1", "b2"}, {"a1"}, set())
    data["b3"] = b
    assert places(data) == ({"b2", "b3"}, {"a1", "b1"}, set())
    data["a2"] = a
    assert places(data) == ({"b2", "b3"}, {"a2", "b1"}, {"a1"})
    for _ in range(2):  # the second one replaces it
        data["b4"] = b
        assert places(data) == ({"b3", "b4"}, {"a2", "b2"}, {"a1", "b1"})
    for key, value in [("a1", a), ("a2", a), ("b1", b), ("b2", b), ("b3", b), ("b4", b)]:
        np.testing.assert_array_equal(host_of(data[key]), host_of(value))
        del data[key]
    assert places(data) == (set(), set(), set())
    data["x"] = b
    data["x"] = a
    assert places(data) == (set(), {"x"}, set())


@pytest.mark.parametrize("size", [1000, CHUNK // 8])
@pytest.mark.parametrize("collection", [dict, list, tuple])
def test_collections_of_arrays_leave_and_come_back(make: Make, collection: Any, size: int) -> None:
    data = make(0)
    arrays = [full(size, at) for at in range(3)]
    value: Any = dict(zip("abc", arrays, strict=True)) if collection is dict else collection(arrays)
    data["k"] = value
    assert places(data) == (set(), {"k"}, set())
    back: Any = data["k"]
    assert type(back) is collection
    items: list[Any] = list(back.values()) if collection is dict else list(back)
    for at, array in enumerate(items):
        assert isinstance(array, SimArray) and (array.view == at).all()


def test_a_collection_with_one_array_of_the_card_is_of_the_card(make: Make) -> None:
    data = make()
    data["mixed"] = [1, {"x": (full(10, 2.0), "text")}]
    data["host"] = [1, {"x": (np.zeros(10), "text")}]
    assert places(data) == ({"mixed"}, {"host"}, set())


def cyclic(*more: Any) -> list[Any]:
    value: list[Any] = [1, {}, *more]
    value[1].update(up=value, itself=value[1])
    return value


def test_a_value_that_contains_itself_is_kept(make: Make) -> None:
    data = make()
    data["host"] = cyclic()
    data["mixed"] = cyclic((full(10, 2.0),))
    deep: list[Any] = []
    for _ in range(50_000):
        deep = [deep]
    data["deep"] = deep
    assert places(data) == ({"mixed"}, {"host", "deep"}, set())
    assert data["host"][1]["up"] is data["host"]
    while deep:  # so that its end is no recursion
        deep = deep.pop()


@pytest.mark.parametrize("limit", ["device", "host"])
def test_a_value_that_contains_itself_leaves_or_is_refused_with_an_exception(make: Make, limit: str) -> None:
    data = make(**{limit: 1})
    try:
        data["k"] = cyclic(full(10, 2.0)) if limit == "device" else cyclic()
    except (RecursionError, TypeError):
        assert "k" not in data
    else:
        value = data["k"]
        assert value[1]["itself"] is value[1] and value[1]["up"][0] == 1
    data["next"] = 1
    assert data["next"] == 1


class Counted:
    """Counts the looks at it."""

    looks = 0

    @property
    def __cuda_array_interface__(self) -> Any:
        Counted.looks += 1
        raise AttributeError


@pytest.mark.parametrize("length", [10, 1000, 100_000])
@pytest.mark.parametrize("collection", [list, tuple, set, dict])
def test_the_elements_looked_at_are_bounded(collection: Any, length: int) -> None:
    Counted.looks = 0
    objects = [Counted() for _ in range(length)]
    value = dict(enumerate(objects)) if collection is dict else collection(objects)
    assert not is_device_value(value)
    assert Counted.looks == min(length, LOOKED_AT)
    Counted.looks = 0
    # Each of the lists is looked at once.
    assert not is_device_value([[value, value] for _ in range(500)])
    assert Counted.looks == min(length, LOOKED_AT)
    Counted.looks = 0
    assert not is_device_value([[Counted()] * 1000 for _ in range(1000)])
    assert LOOKED_AT_IN_ALL - 1000 < Counted.looks <= LOOKED_AT_IN_ALL
    assert collection is not list or is_device_value([1] * (length - 1) + [full(1, 1.0)])


def test_one_value_fits_on_the_card_and_each_use_sends_the_other_away(make: Make, store: CountingStore) -> None:
    data = make(CHUNK)
    data["a"], data["b"] = chunk(1), chunk(2)
    for _ in range(3):
        assert (data["a"].view == 1).all() and set(data.device) == {"a"}
        assert (data["b"].view == 2).all() and set(data.device) == {"b"}
    assert store.calls["keep"] == 2 and store.copied == 2 * CHUNK


def test_one_value_fits_on_the_host_and_the_others_are_on_the_disk(make: Make) -> None:
    data = make(0, 8000)
    for at in range(3):
        data[f"h{at}"] = np.full(1000, at)
        data[f"d{at}"] = full(1000, at)
    assert places(data) == (set(), {"d2"}, {"h0", "d0", "h1", "d1", "h2"})
    for at in range(3):
        assert (data[f"h{at}"] == at).all()
        assert set(data.host) == {f"h{at}"}, "a host value that is used takes the place of the one there"
        assert (data[f"d{at}"].view == at).all() and not data.device


def test_a_limit_of_zero_keeps_what_is_in_use_and_nothing_idle(make: Make) -> None:
    data = make(0)
    for at in range(3):
        data[at] = chunk(at)
        expected: object = (set(), set(range(at + 1)), set())
        assert places(data) == expected
    held = [data[at] for at in range(3)]
    assert all((value.view == at).all() for at, value in enumerate(held))
    del held
    data["another"] = "of the host"
    assert not data.device, "idle values leave with the next use of the mapping"


def test_without_limits_nothing_leaves(make: Make, store: CountingStore) -> None:
    data = make()
    for at in range(20):
        data[at], data[str(at)] = chunk(at), np.zeros(1000)
    assert len(data.device) == 20 and len(data.host) == 20 and not data.slow and store.calls == {}


def test_a_key_is_copied_out_once_and_read_without_a_copy(make: Make, store: CountingStore) -> None:
    data = make(4 * CHUNK)
    for at in range(12):
        data[at] = chunk(at)
    for _ in range(5):
        for at in range(12):
            assert (data[at].view == at).all()
    assert store.copied == 12 * CHUNK and store.calls["keep"] == 12
    array = data[11]
    assert array.view.base is not None and not array.view.flags.writeable
    assert data.cumulative_metrics["host-write", "bytes"] == 12 * CHUNK


def test_a_small_value_is_written_to_the_host_and_the_disk_once(make: Make) -> None:
    data = make(0, 0)
    data["d"], data["h"] = full(1000, 3), np.full(1000, 4)
    files = data._moves._files.bytes
    for _ in range(5):
        assert (data["d"].view == 3).all() and (data["h"] == 4).all()
    assert data.cumulative_metrics["host-write", "count"] == 1
    assert data.cumulative_metrics["disk-write", "count"] >= 2 and data._moves._files.bytes == files


def test_the_least_recently_used_keys_leave(make: Make) -> None:
    data = make(4 * CHUNK)
    for at in range(4):
        data[at] = chunk(at)
    data[0], data[2]
    data[4], data[5] = chunk(4), chunk(5)
    assert list(data.device) == [0, 2, 4, 5] and list(data.host) == [1, 3]


def test_a_value_above_the_limit_leaves_alone(make: Make) -> None:
    data = make(3 * CHUNK)
    data["a"], data["b"] = chunk(1), chunk(2)
    data["large"] = full(CHUNK, 3)
    assert places(data) == ({"a", "b"}, {"large"}, set())
    assert (data["large"].view == 3).all()


class Unpicklable:
    """A host value of a size, which cannot be serialized."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __sizeof__(self) -> int:
        return self.size

    def __reduce__(self) -> Any:
        raise ZeroDivisionError("not this one")


def test_what_cannot_be_serialized_stays_or_is_refused(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    data = make(None, 400)
    with pytest.raises(TypeError):
        data["large"] = Unpicklable(500)
    assert "large" not in data and len(data) == 0
    data["small"] = Unpicklable(300)
    with caplog.at_level(logging.ERROR):
        for at in range(5):
            data[at] = "x" * 200
    assert "small" in data.host and [record for record in caplog.records if "'small'" in record.getMessage()]
    assert len([record for record in caplog.records if "'small'" in record.getMessage()]) == 1
    assert set(data.disk) == {0, 1, 2, 3} or set(data.disk) == {0, 1, 2, 3, 4}
    del data["small"]


def test_evict_returns_bytes_or_minus_one_and_never_raises(make: Make) -> None:
    data = make()
    assert data.evict() == -1 and not data.fast
    data["a"], data["b"] = np.zeros(100), np.zeros(200)
    data["stuck"] = Unpicklable(300)
    data["a"]
    assert data.fast and data.evict() == 1600 and set(data.disk) == {"b"}
    assert data.evict() == -1, "the failed one is next"
    assert data.evict() == 800
    assert data.evict() == -1 and set(data.fast) == {"stuck"}


def test_evict_pushes_what_left_the_card(make: Make, store: CountingStore) -> None:
    data = make(0)
    data["large"], data["small"] = chunk(1), full(10, 2)
    assert places(data) == (set(), {"large", "small"}, set())
    assert data.evict() == CHUNK and store.calls["push"] == 1
    assert data.evict() == 80
    assert places(data) == (set(), set(), {"large", "small"})
    assert (data["large"].view == 1).all() and (data["small"].view == 2).all()


def test_a_failed_write_keeps_the_value(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = make(None, 1000)
    data["a"] = np.zeros(100)
    (tmp_path / "storage").write_text("a file in the place of the directory")
    data["b"] = np.ones(100)
    assert set(data.host) == {"a", "b"} and data.evict() == -1
    assert "Writing" in caplog.text and data._moves._files.bytes == 0
    (tmp_path / "storage").unlink()
    assert data.evict() == 800 and (data["a"] == 0).all() and (data["b"] == 1).all()


def test_files_have_at_most_max_spill_bytes(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    data = make(None, 0, 5000)
    for at in range(6):
        data[at] = np.random.default_rng(at).random(200)
    assert data._moves._files.bytes <= 5000 and len(data.disk) == 2 and len(data.host) == 4
    assert "max_spill" in caplog.text
    del data[0]
    assert data.evict() == 1600


def test_a_value_that_is_still_in_use_is_not_read_again(make: Make) -> None:
    data = make(None, 1000)
    held = data["a"] = np.zeros(100)
    data["b"] = np.zeros(100)
    assert set(data.disk) == {"a"}
    assert data["a"] is held and data.cumulative_metrics["disk-read", "count"] == 0


def test_failures_of_the_store_take_the_way_through_the_host(make: Make, store: CountingStore) -> None:
    def fail() -> None:
        raise MemoryError("no room for another copy")

    data = make(CHUNK)
    store.hooks["keep"] = fail
    data["a"], data["b"] = chunk(1), chunk(2)
    assert places(data) == ({"b"}, {"a"}, set())
    assert (data["a"].view == 1).all() and store.copied == 0


def test_a_failed_restore_keeps_the_contents(make: Make, store: CountingStore) -> None:
    def fail() -> None:
        raise OSError("the disk cannot be read")

    data = make(0)
    data["a"] = chunk(1)
    store.hooks["lease"] = fail
    for _ in range(2):
        with pytest.raises(OSError):
            data["a"]
    store.hooks.clear()
    assert (data["a"].view == 1).all() and data.spilled_total.memory in (0, CHUNK)


def test_a_restore_without_room_makes_room_and_is_tried_again(make: Make, store: CountingStore) -> None:
    data = make()
    data["a"] = chunk(1)
    assert data.make_room(1)
    data["b"], data["c"] = chunk(2), chunk(3)
    failures = [MemoryError("no room"), TimeoutError("no room")]

    def fail() -> None:
        if failures:
            raise failures.pop()

    store.hooks["lease"] = fail
    assert (data["a"].view == 1).all()
    assert set(data.host) == {"b", "c"} and failures == []


def test_make_room_evicts_the_deficit_and_nothing_in_use(make: Make) -> None:
    data = make()
    for at in range(8):
        data[at] = chunk(at)
    used = [data[0], data[2]]
    assert data.make_room(3 * CHUNK - 1)
    assert list(data.host) == [1, 3, 4]
    assert data.make_room(100 * CHUNK)
    assert set(data.device) == {0, 2}
    assert not data.make_room(1), "what a task uses would free nothing"
    del used
    assert data.make_room(1) and len(data.device) == 1


def test_a_shortage_that_nothing_helps_is_reported(
    make: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Another test may have written the line in the last seconds.
    monkeypatch.setattr(logging.getLogger("distributed.worker.memory.vramp"), "filters", [])
    data = make()
    data["used"] = value = chunk(1)
    with caplog.at_level(logging.WARNING):
        assert not data.make_room(5 << 20)
    assert "5.00 MiB" in caplog.text and "1 keys, 2.00 MiB, are in use" in caplog.text
    assert value.nbytes == CHUNK


def test_sizes_and_counts_are_those_of_the_keys(make: Make) -> None:
    data = make(2 * CHUNK, 3 * CHUNK)
    for at in range(6):
        data[at] = chunk(at)
    assert data.spilled_total == (4 * CHUNK, 4 * CHUNK)
    assert (len(data), len(data.slow), len(data.fast), len(data.disk)) == (6, 4, 3, 1)
    data[0]
    assert data.spilled_total == (4 * CHUNK, 4 * CHUNK) and 0 in data.device
    for at in range(6):
        del data[at]
    assert data.spilled_total == (0, 0) and not data.slow and not data.fast


def test_a_mapping_is_a_mapping(make: Make) -> None:
    data = make(0, 0)
    data["a"], data["b"], data["n"] = full(10, 1), "text", None
    assert list(data) == ["a", "b", "n"] and "a" in data and "c" not in data
    assert data["n"] is None and data.get("c") is None and data["b"] == "text"
    for call in (lambda: data["c"], lambda: data.__delitem__("c")):
        with pytest.raises(KeyError):
            call()
    data.update(d=1)
    assert data.pop("d") == 1 and data.setdefault("b", 0) == "text"
    data.clear()
    assert not data and len(data) == 0


def test_text_limits_are_bytes(tmp_path: Path) -> None:
    data = TieredMapping(tmp_path, device_memory_limit="30GiB", memory_limit="1 MB", max_spill="5kB")
    assert list(data._moves.limits.values()) == [30 << 30, 10**6]


def test_a_fraction_is_a_part_of_the_card(make: Make) -> None:
    memory = vramp.pool().device_info.memory
    for limit, expected in ((0.5, memory // 2), (1.0, memory), ("0.25", memory // 4), (1e-8, int(memory * 1e-8))):
        data = make(limit)
        data["a"] = full(10, 1.0)
        assert data._moves.limits[Place.DEVICE] == expected
    data["b"] = chunk(2.0)
    assert places(data) == ({"a"}, {"b"}, set())
    others: list[tuple[Any, int]] = [(1, 1), ("1", 1), (1.5, 1), (0.0, 0), (np.int64(7), 7), ("2 kB", 2000)]
    for limit, expected in others:
        assert make(limit)._moves.limits[Place.DEVICE] == expected


@pytest.mark.parametrize("name", ["device_memory_limit", "memory_limit", "max_spill"])
@pytest.mark.parametrize(
    "limit", [-1, -0.5, float("nan"), float("inf"), "", " ", "nan", "-1GB", "50%", "much", b"1GB", True, []]
)
def test_a_limit_that_is_none_is_refused_at_once(tmp_path: Path, name: str, limit: Any) -> None:
    with pytest.raises(vramp.OptionError, match=name):
        TieredMapping(tmp_path, **{name: limit})


@pytest.mark.parametrize("limit", [0, 1, 1 << 20, 5 << 20, 13 << 19])
def test_a_small_memory_limit_holds_and_values_of_the_card_leave(tmp_path: Path, limit: int) -> None:
    data = TieredMapping(tmp_path, device_memory_limit=CHUNK, memory_limit=limit)
    for at in range(6):
        data[at] = chunk(at)
    assert data._ledger.bytes(Place.HOST) <= limit
    assert all((data[at].view == at).all() for at in range(6))
    data.clear()


def test_the_smallest_buffer_is_half_a_page() -> None:
    assert SMALLEST_BUFFER == 1 << 20


@pytest.mark.parametrize("keys", [100, 10_000])
def test_choosing_a_key_looks_at_one(make: Make, keys: int) -> None:
    """Each eviction looks at one key, and at one more for each that is in use."""
    data = make()
    used = [full(1, at) for at in range(5)]
    for at, value in enumerate(used):
        data[f"used{at}"] = value
    for at in range(keys):
        data[at] = full(1, at)
    before = data._ledger.scanned
    for _ in range(20):
        assert data.make_room(1)
    assert data._ledger.scanned - before == 20 * (1 + len(used))
