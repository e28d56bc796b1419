"""Pools, allocations, streams, limits and statistics."""

from __future__ import annotations

import ctypes
import gc
import json
import pickle
import re
import threading
import weakref
from pathlib import Path

import pytest
from conftest import GIB, MIB, run_python

import vramp


def test_an_allocation_frees_itself_in_every_way(pool: vramp.Pool) -> None:
    with pool.malloc(5000) as block:
        assert block.size == 5000
        assert block.usable_size >= 5000
        assert block.ptr % 512 == 0
        assert pool.stats().live == 5000
    assert block.is_freed
    explicit = pool.malloc(1 * MIB)
    explicit.free()
    dropped = pool.malloc(3 * MIB)
    assert pool.stats().live == 3 * MIB
    del dropped
    stats = pool.stats()
    assert (stats.live, stats.allocated, stats.freed) == (0, 3, 3)


def test_a_double_free_is_an_error_and_changes_nothing(pool: vramp.Pool) -> None:
    block = pool.malloc(4096)
    other = pool.malloc(4096)
    block.free()
    for use in (block.free, lambda: block.ptr, block.record_use, block.array):
        with pytest.raises(vramp.UnknownPointerError, match="freed before"):
            use()
    address = pool.allocate(4096)
    pool.deallocate(address)
    with pytest.raises(vramp.UnknownPointerError, match="no block of this allocator"):
        pool.deallocate(address)
    with pytest.raises(ValueError, match="lies 512 bytes inside"):
        pool.deallocate(other.ptr + 512)
    assert pool.stats().live == 4096


def test_memory_of_an_object_is_freed_by_its_address_once(pool: vramp.Pool) -> None:
    block = pool.malloc(2 * MIB)
    pool.deallocate(block.ptr)
    with pytest.raises(vramp.UnknownPointerError):
        block.free()
    del block
    assert pool.stats().freed == 1


def test_out_of_memory_carries_its_numbers(pool: vramp.Pool) -> None:
    pool.limit = "1GiB"
    held = pool.malloc(700 * MIB)
    with pytest.raises(MemoryError) as caught:
        pool.malloc(400 * MIB)
    error = caught.value
    assert isinstance(error, vramp.OutOfMemoryError)
    assert isinstance(error, vramp.VrampError)
    assert isinstance(error, RuntimeError)
    assert (error.requested, error.limit) == (400 * MIB, GIB)
    assert error.allocated >= 700 * MIB
    assert error.device_total is not None and error.device_total > 100 * GIB
    assert "what to do" in str(error)
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.requested, str(copy)) == (error.requested, str(error))
    held.free()
    pool.malloc(400 * MIB).free()


def test_a_limit_is_an_int_a_size_or_a_part_of_the_device(pool: vramp.Pool) -> None:
    assert pool.limit is None
    memory = pool.device_info.memory
    for given, expected in (
        (3 * GIB, 3 * GIB),
        ("80GiB", 80 * GIB),
        ("50%", memory // 2),
        (None, None),
    ):
        pool.limit = given
        assert pool.limit == expected
    for wrong in ("many", "0%", "200%", "1KiB", 5):
        with pytest.raises(vramp.OptionError, match="limit"):
            pool.limit = wrong
    for kind in (1.5, True, [1]):
        with pytest.raises(TypeError, match="a limit is"):
            pool.limit = kind  # type: ignore[assignment]
    with pytest.raises(vramp.RangeError):
        pool.limit = -1
    assert pool.limit is None


def test_wrong_arguments_say_what_is_accepted(pool: vramp.Pool) -> None:
    with pytest.raises(vramp.RangeError, match="use a size such as '8GiB'"):
        pool.malloc("1 MB of memory")
    with pytest.raises(TypeError, match="number of bytes"):
        pool.malloc(1.5)  # type: ignore[arg-type]
    for wrong in (-1, 1 << 64):
        with pytest.raises(vramp.RangeError, match="use a number from 0"):
            pool.malloc(wrong)
    for kind in ("0", 1.5, True, object()):
        with pytest.raises(TypeError, match="a stream is None"):
            pool.malloc(1, stream=kind)  # type: ignore[arg-type]
    with pytest.raises(vramp.RangeError, match="stream"):
        pool.malloc(1, stream=-3)
    with pytest.raises(vramp.OutOfMemoryError):
        pool.malloc((1 << 64) - 1)
    assert pool.stats().live == 0


class _Foreign:
    """A stream of another library."""

    def __init__(self, version: int, handle: int) -> None:
        self.pair = (version, handle)

    def __cuda_stream__(self) -> tuple[int, int]:
        return self.pair


def test_everything_that_names_a_stream_is_accepted(pool: vramp.Pool) -> None:
    created = pool.create_stream()
    assert pool.malloc(1, created).stream is created
    assert pool.malloc(1, _Foreign(0, 0x7F00)).stream == 0x7F00
    assert pool.malloc(1, 0x7F00).stream == 0x7F00
    assert pool.malloc(1).stream == 0
    # cudaStreamLegacy is the default stream.
    assert pool.malloc(1, 1).stream == 0
    with pytest.raises(vramp.UnsupportedError, match="version"):
        pool.malloc(1, _Foreign(7, 0x7F00))
    with pytest.raises(vramp.UnsupportedError, match="simulated"):
        created.__cuda_stream__()
    with vramp.open("sim") as other, pytest.raises(vramp.UnknownStreamError):
        other.malloc(1, created)
    pool.forget_stream(0x7F00)
    pool.forget_stream(0x7F00)
    pool.malloc(1, 0x7F00).free()


def test_a_use_on_another_stream_is_recorded(pool: vramp.Pool) -> None:
    first, second = pool.create_stream(), pool.create_stream()
    block = pool.malloc(2 * MIB, first)
    block.record_use(second)
    pool.record_use(block.ptr, second)
    block.free(second)
    with pytest.raises(vramp.UnknownPointerError):
        pool.record_use(12345)
    assert pool.stats().live == 0


def test_measured_blocks_nest_and_overlap(pool: vramp.Pool) -> None:
    base = pool.malloc(10 * MIB)
    with pool.measure() as outer:
        pool.malloc(100 * MIB).free()
        with pool.measure() as inner:
            pool.malloc(30 * MIB).free()
            assert inner.live_peak == 40 * MIB
            kept = pool.malloc(5 * MIB)
        assert (inner.allocated, inner.freed) == (2, 1)
        assert (inner.live_start, inner.live_end) == (10 * MIB, 15 * MIB)
        kept.free()
    assert (inner.live_peak, outer.live_peak) == (40 * MIB, 110 * MIB)
    assert outer.reserved_peak >= 110 * MIB
    assert (outer.allocated, outer.freed) == (3, 3)
    assert outer.hits + outer.misses == 3
    # The peaks of the pool are its own.
    assert pool.stats().live_peak == 110 * MIB
    first, second = pool.measure(), pool.measure()
    first.__enter__()
    pool.malloc(50 * MIB).free()
    second.__enter__()
    first.__exit__(None, None, None)
    pool.malloc(70 * MIB).free()
    second.__exit__(None, None, None)
    assert (first.live_peak, second.live_peak) == (60 * MIB, 80 * MIB)
    with pytest.raises(vramp.VrampError, match="measured already"):
        first.__enter__()
    with pytest.raises(vramp.VrampError, match="nothing was measured"):
        _ = pool.measure().live_peak
    base.free()


def test_peaks_are_reset(pool: vramp.Pool) -> None:
    pool.malloc(100 * MIB).free()
    with pool.measure() as measured:
        pool.malloc(90 * MIB).free()
        pool.reset_peaks()
        assert pool.stats().live_peak == 0
    assert measured.live_peak == 90 * MIB


def test_statistics_have_the_names_of_pytorch(pool: vramp.Pool) -> None:
    with pool.malloc(5 * MIB):
        named = pool.memory_stats()
        assert named["requested_bytes.all.current"] == 5 * MIB
        assert named["allocation.large_pool.current"] == 1
        assert {"num_ooms", "num_alloc_retries", "segment.all.peak"} <= set(named)
    assert pool.memory_stats()["allocation.all.freed"] == 1


def test_sizes_are_numbers_or_texts(pool: vramp.Pool) -> None:
    with pool.malloc("64MiB") as block:
        assert block.size == 64 << 20
    pool.deallocate(pool.allocate("1MiB"))
    pool.trim("64MiB")
    assert pool.stats().reserved <= 64 << 20


def test_idle_memory_is_trimmed(pool: vramp.Pool) -> None:
    pool.malloc(200 * MIB).free()
    assert pool.stats().reserved >= 200 * MIB
    pool.trim(keep=100 * MIB)
    assert pool.stats().reserved <= 200 * MIB
    pool.trim()
    assert pool.stats().reserved == 0


def test_a_snapshot_is_written_for_both_viewers(pool: vramp.Pool, tmp_path: Path) -> None:
    pool.record_history(1000)
    held = pool.malloc(3 * MIB)
    pool.malloc(2 * MIB).free()
    snapshot, timeline = tmp_path / "memory.pickle", tmp_path / "memory.json"
    pool.snapshot(snapshot)
    pool.snapshot(str(timeline))
    content = pickle.loads(snapshot.read_bytes())
    assert content["segments"] and content["device_traces"]
    assert json.loads(timeline.read_text())
    pool.record_history(0)
    (replayed,) = vramp.replay(snapshot, ["vramp"])
    assert replayed.peak_live_bytes == 5 * MIB
    with pytest.raises(OSError, match="cannot write"):
        pool.snapshot(tmp_path / "no" / "such" / "folder")
    for wrong in (-1, 10_000_001):
        with pytest.raises(vramp.RangeError):
            pool.record_history(wrong)
    held.free()


def test_the_shared_pool_is_the_one_of_c_and_pytorch() -> None:
    shared = vramp.pool()
    assert shared is vramp.pool(0)
    assert shared.is_simulated
    library = ctypes.CDLL(vramp.library_path())
    handle = ctypes.c_uint64()
    assert library.vramp_torch_allocator(0, ctypes.byref(handle)) == 0
    assert handle.value == shared.handle
    # One map of addresses: memory of one interface is freed by the other.
    library.vramp_torch_pool_malloc.restype = ctypes.c_void_p
    library.vramp_torch_pool_malloc.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    before = shared.stats()
    address = library.vramp_torch_pool_malloc(3 * MIB, 0, None)
    assert shared.stats().live == before.live + 3 * MIB
    shared.deallocate(address)
    address = shared.allocate(2 * MIB)
    library.vramp_torch_free.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_void_p,
    ]
    library.vramp_torch_free.restype = None
    library.vramp_torch_free(address, 2 * MIB, 0, None)
    assert shared.stats().live == before.live
    with pytest.raises(vramp.InUseError, match="do not close"):
        shared.close()
    assert not shared.is_closed
    for wrong in (-1, 64, 1 << 40):
        with pytest.raises(vramp.RangeError, match="device number"):
            vramp.pool(wrong)


def test_a_pool_is_closed_once(pool: vramp.Pool) -> None:
    block = pool.malloc(MIB)
    stream = pool.create_stream()
    pool.close()
    assert pool.is_closed
    for call in (pool.close, pool.stats, pool.trim, lambda: pool.malloc(1), block.free):
        with pytest.raises(vramp.ClosedError):
            call()
    assert "closed" in repr(pool)
    del block, stream


def test_a_pool_ends_with_its_last_reference() -> None:
    pool = vramp.open("sim")
    handle, block = pool.handle, pool.malloc(MIB)
    seen = weakref.ref(pool)
    del pool
    assert seen() is not None and block.pool.handle == handle
    del block
    gc.collect()
    assert seen() is None
    library = ctypes.CDLL(vramp.library_path())

    class Handle(ctypes.Structure):
        _fields_ = [("id", ctypes.c_uint64)]

    assert library.vramp_audit(Handle(handle)) != 0, "it is closed for C too"


def test_wrong_options_and_devices_are_named() -> None:
    with pytest.raises(vramp.DeviceError, match="no device 'gpu'"):
        vramp.open("gpu")
    with pytest.raises(vramp.OptionError, match="unknown option 'limits'"):
        vramp.open("sim", limits=1)
    with pytest.raises(TypeError, match="option limit"):
        vramp.open("sim", limit=1.5)
    with vramp.open("sim:a100-80g", limit=GIB, preset="torch") as pool:
        assert pool.limit == GIB
        assert pool.device == "sim:a100-80g"


@pytest.mark.parametrize(
    ("variables", "error", "text"),
    [
        ({"VRAMP_CONF": "limits=1"}, "OptionError", "VRAMP_CONF is invalid: unknown option"),
        ({"VRAMP_CONF": "limit=80"}, "OptionError", "write a unit"),
        ({"VRAMP_DEVICE": "gpu"}, "DeviceError", "VRAMP_DEVICE=gpu is invalid"),
    ],
)
def test_wrong_settings_are_an_error_of_every_call(
    variables: dict[str, str], error: str, text: str
) -> None:
    code = """
import vramp
for _ in range(2):
    try:
        vramp.pool()
    except vramp.VrampError as error:
        print(type(error).__name__, error)
"""
    lines = run_python(code, **variables).stdout.splitlines()
    assert len(lines) == 2
    assert all(line.startswith(error) and text in line for line in lines)


def test_settings_reach_the_shared_pool() -> None:
    code = "import vramp; print(vramp.pool().limit, vramp.pool().device)"
    done = run_python(code, VRAMP_CONF="limit=3GiB", VRAMP_DEVICE="sim:a100-80g")
    assert done.stdout.split() == [str(3 * GIB), "sim:a100-80g"], done.stderr
    done = run_python(code, VRAMP_CONF="device=sim:a100-80g,limit=3GiB", VRAMP_DEVICE="sim")
    assert done.stdout.split() == [str(3 * GIB), "sim:a100-80g"], done.stderr


def test_objects_cannot_be_made_or_changed_by_hand(pool: vramp.Pool) -> None:
    for kind in (vramp.Pool, vramp.Allocation, vramp.Stream, vramp.Array, vramp.Measure):
        with pytest.raises(TypeError):
            kind()
    with pytest.raises(AttributeError):
        pool.malloc(1).size = 2  # type: ignore[misc]
    with pytest.raises(AttributeError):
        pool.stats().live = 2  # type: ignore[misc]


def test_the_library_exports_every_function_of_the_header() -> None:
    header = Path(__file__).parents[2] / "crates" / "vramp-capi" / "include" / "vramp.h"
    code = re.sub(r"/\*.*?\*/", "", header.read_text(), flags=re.DOTALL)
    functions = set(re.findall(r"\b(vramp_\w+)\(", re.sub(r"//.*", "", code)))
    assert len(functions) > 40
    library = ctypes.CDLL(vramp.library_path())
    assert [name for name in sorted(functions) if not hasattr(library, name)] == []


def test_the_per_thread_default_stream_is_another_one_in_each_thread(pool: vramp.Pool) -> None:
    mine = pool.malloc(4 << 20, stream=2)
    address = mine.ptr
    seen: list[int] = []

    def free_and_allocate() -> None:
        mine.free()
        with pool.malloc(4 << 20, stream=2) as theirs:
            seen.append(theirs.ptr)

    thread = threading.Thread(target=free_and_allocate)
    thread.start()
    thread.join()
    assert len(seen) == 1 and seen[0] != address, "the first thread may still use it"
    with pool.malloc(4 << 20, stream=2) as again:
        assert again.ptr == address
    pool.forget_stream(2)
    assert pool.stats().live == 0
