"""Buffers, leases and the arrays of leased buffers. Bytes are read through NumPy."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import time
import weakref
from typing import Any

import numpy
import pytest
from conftest import MIB, check, fill, run_python

import vramp


def test_contents_leave_the_card_and_come_back_to_the_same_address(tiers: vramp.Tiers) -> None:
    buffers = [tiers.buffer(32 * MIB) for _ in range(4)]
    addresses = [buffer.ptr for buffer in buffers]
    for byte, buffer in enumerate(buffers, 1):
        fill(buffer, byte)
    assert [buffer.is_deferred for buffer in buffers] == [True, True, False, False]
    for byte, buffer in enumerate(buffers, 1):
        check(buffer, byte)
    assert [buffer.ptr for buffer in buffers] == addresses
    assert tiers.stats().from_host >= 64 * MIB


def test_the_third_tier_is_a_directory(tmp_path: Any) -> None:
    with vramp.open("sim:h200", limit="64MiB") as pool:
        with vramp.Tiers(pool, host="64MiB", disk=tmp_path, disk_limit="512MiB") as tiers:
            buffers = [tiers.buffer(32 * MIB) for _ in range(8)]
            for byte, buffer in enumerate(buffers, 1):
                fill(buffer, byte)
            assert tiers.stats().to_disk > 0
            for byte, buffer in enumerate(buffers, 1):
                check(buffer, byte)
            tiers.audit()
            del buffer, buffers


def test_a_request_of_the_pool_evicts(tiers: vramp.Tiers) -> None:
    buffers = [tiers.buffer(16 * MIB) for _ in range(4)]
    for buffer in buffers:
        fill(buffer, 7)
    with tiers.pool.malloc(48 * MIB):
        assert sum(buffer.is_deferred for buffer in buffers) >= 3
    for buffer in buffers:
        check(buffer, 7)


def test_evict_returns_what_it_freed_and_zero_if_none_may_leave(tiers: vramp.Tiers) -> None:
    buffer = tiers.buffer(16 * MIB)
    assert tiers.evict("1GiB") == 0, "it has no contents"
    fill(buffer, 1)
    lease = buffer.lease("r")
    lease.acquire()
    assert tiers.evict("1GiB") == 0
    lease.release()
    assert tiers.evict("1GiB") == 16 * MIB
    assert buffer.is_deferred and not buffer.is_resident
    check(buffer, 1)


def test_every_protocol_of_a_view_fails_after_the_lease(tiers: vramp.Tiers) -> None:
    buffer = tiers.buffer(MIB)
    with buffer.lease("rw", shape=(256, 1024), dtype="float32") as view:
        other = view.array((16,), "int64", offset=8)
        assert other.ptr == buffer.ptr + 8 and other.shape == (16,)
        assert not view.is_ended
    for ended in (view, other):
        assert ended.is_ended
        for use in (
            lambda v: v.ptr,
            lambda v: v.__array_interface__,
            lambda v: v.__cuda_array_interface__,
            lambda v: v.__dlpack__(),
            lambda v: v.__dlpack_device__(),
            lambda v: v.array(),
            numpy.asarray,
            numpy.from_dlpack,
        ):
            with pytest.raises(vramp.LeaseEndedError, match="lease the buffer again"):
                use(ended)
    assert (view.shape, view.dtype, view.nbytes) == ((256, 1024), "float32", MIB)
    assert view.buffer is buffer and "ended" in repr(view)


def test_an_exception_ends_the_lease(tiers: vramp.Tiers) -> None:
    buffer = tiers.buffer(MIB)
    lease = buffer.lease("rw")
    with pytest.raises(KeyError), lease as view:
        raise KeyError
    assert view.is_ended and not lease.is_held
    fill(buffer, 2)


def test_a_wrong_shape_leaves_no_lease(tiers: vramp.Tiers) -> None:
    buffer = tiers.buffer(MIB)
    lease = buffer.lease("rw", shape=(MIB, 2))
    with pytest.raises(vramp.RangeError), lease:
        pass
    assert not lease.is_held and tiers.stats().leases == 0
    fill(buffer, 1)


def test_a_lease_for_reading_gives_arrays_that_cannot_be_written(tiers: vramp.Tiers) -> None:
    buffer = tiers.buffer(MIB)
    fill(buffer, 3)
    with buffer.lease("r") as view:
        assert view.is_read_only
        assert not numpy.asarray(view).flags.writeable
        assert not numpy.from_dlpack(view).flags.writeable
        assert view.__array_interface__["data"] == (buffer.ptr, True)
    with buffer.lease("rw") as view:
        assert not view.is_read_only and numpy.from_dlpack(view).flags.writeable


def test_a_tensor_of_dlpack_keeps_the_lease(tiers: vramp.Tiers) -> None:
    buffer = tiers.buffer(16 * MIB)
    fill(buffer, 4)
    lease = buffer.lease("rw")
    with lease as view:
        tensor = numpy.from_dlpack(view)
    assert view.is_ended and lease.is_held and "kept by DLPack" in repr(lease)
    assert tiers.evict("1GiB") == 0, "its memory is used"
    assert (tensor == 4).all()
    with pytest.raises(vramp.LeaseTimeoutError), buffer.lease("r", timeout=0.05):
        pass
    del tensor
    assert not lease.is_held and tiers.evict("1GiB") == 16 * MIB


def test_a_capsule_that_no_library_takes_ends_the_lease(tiers: vramp.Tiers) -> None:
    buffer = tiers.buffer(MIB)
    with buffer.lease("rw") as view:
        capsules = [view.__dlpack__(), view.__dlpack__(max_version=(1, 0))]
    assert tiers.stats().leases == 1
    del capsules
    assert tiers.stats().leases == 0


def test_a_buffer_lives_as_long_as_what_is_made_of_it(tiers: vramp.Tiers) -> None:
    buffer = tiers.buffer(MIB)
    fill(buffer, 5)
    alive = weakref.ref(buffer)
    with buffer.lease("r") as view:
        tensor = numpy.from_dlpack(view)
    del buffer, view
    gc.collect()
    assert (tensor == 5).all()
    del tensor
    assert alive() is None
    assert tiers.stats().buffers == 0


def test_a_view_keeps_a_lease_that_is_not_ended(tiers: vramp.Tiers) -> None:
    buffer = tiers.buffer(MIB)
    view = buffer.lease("rw").acquire()
    other = view.array((4,))
    del view
    assert buffer.is_locked and other.ptr == buffer.ptr
    del other
    assert not buffer.is_locked


def test_readers_share_and_a_writer_waits(tiers: vramp.Tiers) -> None:
    buffer = tiers.buffer(MIB)
    with buffer.lease("r"), buffer.lease("r", timeout=0):
        with pytest.raises(vramp.LeaseTimeoutError) as error, buffer.lease("w", timeout=0):
            pass
        assert isinstance(error.value, TimeoutError)


def test_a_set_is_leased_as_a_whole(tiers: vramp.Tiers) -> None:
    first, second = tiers.buffer(16 * MIB), tiers.buffer(16 * MIB)
    with tiers.lease([(first, "rw"), (second, "overwrite")]) as (one, two):
        numpy.asarray(one)[:] = 1
        numpy.asarray(two)[:] = 2
        assert (one.buffer, two.buffer) == (first, second)
    with second.lease("r"):
        with pytest.raises(vramp.LeaseTimeoutError):
            tiers.lease([(first, "rw"), (second, "rw")], timeout=0.01).acquire()
        fill(first, 3)
    with tiers.lease([(first, "r"), (first, "r")]) as (one, two):
        assert one.ptr == two.ptr


def test_contents_that_are_overwritten_are_not_restored(tiers: vramp.Tiers) -> None:
    buffer = tiers.buffer(16 * MIB)
    fill(buffer, 1)
    buffer.spill()
    before = tiers.stats().from_host
    with buffer.lease("overwrite") as view:
        numpy.asarray(view)[:] = 2
    assert tiers.stats().from_host == before
    check(buffer, 2)
    buffer.spill()
    check(buffer, 2)


def test_a_set_that_never_fits_says_the_sizes(tiers: vramp.Tiers) -> None:
    buffers = [tiers.buffer(32 * MIB) for _ in range(3)]
    with pytest.raises(vramp.TierFullError) as error:
        tiers.lease([(buffer, "r") for buffer in buffers]).acquire()
    assert (error.value.needed, error.value.capacity) == (96 * MIB, 64 * MIB)
    assert isinstance(error.value, MemoryError)


@pytest.mark.parametrize(
    ("wanted", "error"),
    [
        ([], vramp.RangeError),
        ([1], TypeError),
        ([(1, "r")], TypeError),
        ([("r",)], TypeError),
        (7, TypeError),
    ],
)
def test_wrong_sets_are_refused(tiers: vramp.Tiers, wanted: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        tiers.lease(wanted)


def test_wrong_arguments_are_refused(tiers: vramp.Tiers) -> None:
    buffer = tiers.buffer(MIB)
    access: Any = "x"
    with pytest.raises(TypeError, match="use 'r'"):
        buffer.lease(access)
    wrong: Any = "cpu"
    for make, error in (
        (lambda: buffer.lease("r", timeout=-1.0), vramp.RangeError),
        (lambda: buffer.lease("r", timeout=float("nan")), vramp.RangeError),
        (lambda: tiers.buffer(0), vramp.RangeError),
        (lambda: tiers.buffer("many"), vramp.RangeError),
        (lambda: tiers.buffer(-1), vramp.RangeError),
        (lambda: buffer.read(0, MIB + 1), vramp.RangeError),
        (lambda: buffer.read(MIB + 1), vramp.RangeError),
        (lambda: buffer.write(b"12", MIB - 1), vramp.RangeError),
        (lambda: tiers.reserve(1, wrong), TypeError),
        (lambda: tiers.reserve(1, "disk"), vramp.RangeError),
    ):
        with pytest.raises(error):
            lease: Any = make()
            if isinstance(lease, vramp.Lease):
                lease.acquire()
    assert tiers.stats().leases == 0


def test_a_lease_is_entered_once(tiers: vramp.Tiers) -> None:
    buffer = tiers.buffer(MIB)
    lease = buffer.lease("r")
    lease.release()  # it was not entered
    with lease:
        with pytest.raises(vramp.InUseError):
            lease.acquire()
    with pytest.raises(vramp.LeaseEndedError):
        lease.acquire()
    lease.release()
    assert "ended" in repr(lease)


def test_a_request_that_failed_may_be_tried_again(tiers: vramp.Tiers) -> None:
    buffer = tiers.buffer(MIB)
    lease = buffer.lease("w", timeout=0.0)
    with buffer.lease("r"):
        with pytest.raises(vramp.LeaseTimeoutError):
            lease.acquire()
    with lease:
        assert lease.is_held


def test_a_waiting_lease_is_served_when_another_thread_ends_its_own(tiers: vramp.Tiers) -> None:
    buffer = tiers.buffer(MIB)
    held = buffer.lease("rw")
    held.acquire()
    served = threading.Event()

    def wait() -> None:
        with buffer.lease("rw", timeout=20.0):
            served.set()

    thread = threading.Thread(target=wait)
    thread.start()
    while tiers.stats().waiting == 0:
        time.sleep(0.001)  # the waiting thread does not hold the interpreter
    assert not served.is_set()
    held.release()
    thread.join()
    assert served.is_set()


def test_a_lease_of_another_pool_s_tiers_is_refused(tiers: vramp.Tiers) -> None:
    with vramp.open("sim:h200", limit="64MiB") as pool, vramp.Tiers(pool, host="64MiB") as others:
        foreign = others.buffer(MIB)
        with pytest.raises(vramp.VrampError, match="another manager"):
            tiers.lease([(foreign, "r")]).acquire()
        del foreign


def test_streams_of_the_pool_and_of_others(tiers: vramp.Tiers) -> None:
    buffer = tiers.buffer(MIB)
    stream = tiers.pool.create_stream()
    for named in (None, 0, stream, 0x7000):
        with buffer.lease("rw", named) as view:
            numpy.asarray(view)[:] = 9
    foreign = vramp.open("sim").create_stream()
    with pytest.raises(vramp.UnknownStreamError):
        buffer.lease("r", foreign).acquire()


def test_host_bytes_are_written_and_read(tiers: vramp.Tiers) -> None:
    buffer = tiers.buffer(32 * MIB)
    for data in (b"abc", bytearray(b"abc"), memoryview(b"abc"), numpy.array([97, 98, 99], "uint8")):
        written: Any = data
        buffer.write(b"\0" * 16)
        buffer.write(written, 5)
        assert buffer.read(0, 10) == b"\0" * 5 + b"abc" + b"\0" * 2
    assert len(buffer.read()) == len(buffer) == buffer.nbytes
    assert buffer.read(buffer.nbytes) == b""
    tiers.evict("1GiB")
    assert buffer.read(5, 3) == b"abc"


def test_hints_and_discard(tiers: vramp.Tiers) -> None:
    first, second = tiers.buffer(16 * MIB, priority=1), tiers.buffer(16 * MIB)
    fill(first, 1)
    fill(second, 2)
    assert tiers.evict(16 * MIB) == 16 * MIB
    assert (first.is_deferred, second.is_deferred) == (False, True)
    first.wont_need()
    first.will_need()
    second.prefetch()
    assert second.is_resident
    with first.lease("r"):
        with pytest.raises(vramp.InUseError):
            first.discard()
    first.discard()
    assert tiers.stats().empty == 16 * MIB
    check(second, 2)


def test_a_pinned_buffer_stays(tiers: vramp.Tiers) -> None:
    buffer = tiers.buffer(16 * MIB)
    fill(buffer, 1)
    tiers.evict("1GiB")
    with buffer.pin() as pin:
        assert pin.ptr == buffer.ptr and pin.buffer is buffer and buffer.is_resident
        assert tiers.evict("1GiB") == 0
    assert pin.is_unpinned and tiers.evict("1GiB") == 16 * MIB


def test_ids_hash_and_compare(tiers: vramp.Tiers) -> None:
    first, second = tiers.buffer(MIB), tiers.buffer(MIB)
    assert first == first and first != second and first != 7
    assert len({first.id, second.id}) == 2
    assert {first: 1, second: 2}[first] == 1
    seen = first.id
    del first
    third = tiers.buffer(MIB)
    assert third.id not in (seen, second.id), "ids are not used again"


def test_nothing_is_pickled_or_copied(tiers: vramp.Tiers) -> None:
    buffer = tiers.buffer(MIB)
    with buffer.lease("r") as view:
        for thing in (tiers, buffer, view):
            for use in (pickle.dumps, copy.copy, copy.deepcopy):
                call: Any = use
                with pytest.raises(TypeError, match="cannot be pickled"):
                    call(thing)


def test_reservations(tiers: vramp.Tiers) -> None:
    with tiers.reserve("32MiB") as reserved:
        assert (reserved.nbytes, reserved.tier, reserved.tiers) == (32 * MIB, "device", tiers)
        with pytest.raises(vramp.TierFullError) as error:
            tiers.reserve("48MiB")
        assert error.value.needed == 48 * MIB
        with pytest.raises(vramp.LeaseTimeoutError):
            tiers.reserve("48MiB", timeout=0.01)
    assert reserved.is_released
    tiers.reserve("48MiB").release()
    assert tiers.reserve("1MiB", "host").nbytes == MIB


def test_a_close_ends_buffers_and_reservations_and_not_leases() -> None:
    pool = vramp.open("sim:h200", limit="64MiB")
    tiers = vramp.open_tiers(pool, host="64MiB")
    assert tiers.pool is pool
    buffer, reserved = tiers.buffer(MIB), tiers.reserve(MIB)
    fill(buffer, 1)
    pin = buffer.pin()
    with buffer.lease("r"):
        for close in (tiers.close, pool.close):
            with pytest.raises(vramp.InUseError, match="2 leases, pins and waiting requests"):
                close()
    pin.unpin()
    check(buffer, 1)
    tiers.close()
    tiers.close()
    assert tiers.is_closed and "closed" in repr(tiers) and reserved.is_released
    assert buffer.nbytes == MIB and str(buffer.id) in repr(buffer)
    for use in (
        lambda: tiers.buffer(1),
        tiers.stats,
        tiers.audit,
        lambda: tiers.evict(1),
        lambda: tiers.reserve(1),
        buffer.read,
        buffer.prefetch,
        buffer.pin,
        lambda: buffer.lease("r").acquire(),
        lambda: buffer.is_deferred,
    ):
        with pytest.raises(vramp.ClosedError):
            use()
    pool.close()


def test_the_close_of_a_pool_closes_its_tiers() -> None:
    with vramp.open("sim:h200", limit="64MiB") as pool:
        first, second = vramp.Tiers(pool, host="64MiB"), vramp.Tiers(pool, host="64MiB")
        buffer, other = first.buffer(MIB), second.buffer(MIB)
        fill(buffer, 1)
        fill(other, 2)
        check(buffer, 1)
    assert pool.is_closed and first.is_closed and second.is_closed


def test_configurations(tmp_path: Any) -> None:
    toml = '[[host]]\nindex = 0\ncapacity = "256MiB"\n'
    path = tmp_path / "tiers.toml"
    path.write_text(toml)
    table = {"host": [{"index": 0, "capacity": "256MiB"}]}
    with vramp.open("sim:h200", limit="64MiB") as pool:
        for config in (toml, path, str(path), table):
            with vramp.Tiers(pool, config) as tiers:
                # Without a GPU in it all of the pool is for buffers, as with arguments.
                buffer = tiers.buffer(64 * MIB)
                fill(buffer, 1)
                del buffer
        named = toml + '[[gpu]]\nindex = 0\ncapacity = "64MiB"\n'
        with vramp.Tiers(pool, named) as tiers, pytest.raises(vramp.TierFullError, match="57.60 MiB"):
            fill(tiers.buffer(64 * MIB), 1)
        wrong: Any
        for wrong in (
            {"config": toml, "host": 1},
            {"config": "[[host]]\nindex = 0\n"},
            {"config": {}},
            {"config": {"gpu": []}},
            {"config": {"host": [{"index": 0, "capacity": -1}]}},
            {"host": "64MiB", "disk_limit": "1GiB"},
        ):
            with pytest.raises(vramp.OptionError):
                vramp.Tiers(pool, **wrong)
        with pytest.raises(vramp.FileError):
            vramp.Tiers(pool, host="64MiB", disk=tmp_path / "none", disk_limit="1GiB")


def test_a_limit_of_the_card_for_buffers(tmp_path: Any) -> None:
    with vramp.open("sim:h200", limit="64MiB") as pool:
        with vramp.Tiers(pool, host="256MiB", device="32MiB") as tiers:
            buffers = [tiers.buffer(16 * MIB) for _ in range(3)]
            for buffer in buffers:
                fill(buffer, 1)
            assert sum(buffer.is_resident for buffer in buffers) == 2
            del buffer, buffers


def test_tiers_need_a_pool_that_can_move_memory() -> None:
    with vramp.open("sim:h200", preset="stream-ordered") as pool:
        with pytest.raises(vramp.VrampError):
            with vramp.Tiers(pool, host="64MiB") as tiers:
                tiers.buffer(MIB)


def test_ctrl_c_ends_a_wait_on_the_main_thread() -> None:
    done = run_python(
        """
import os, signal, threading, time
import vramp

pool = vramp.open("sim:h200", limit="64MiB")
tiers = vramp.Tiers(pool, host="64MiB")
buffer = tiers.buffer(1 << 20)
held, ends = threading.Event(), threading.Event()

def hold():
    with buffer.lease("rw"):
        held.set()
        ends.wait()

def interrupt():
    while tiers.stats().waiting == 0:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGINT)

holder = threading.Thread(target=hold)
holder.start()
held.wait()
threading.Thread(target=interrupt).start()
lease = buffer.lease("rw", timeout=50.0)
try:
    lease.acquire()
except KeyboardInterrupt:
    assert tiers.stats().waiting == 0
    ends.set()
    holder.join()
    with lease:
        print("interrupted")
tiers.audit()
"""
    )
    assert (done.stdout, done.returncode) == ("interrupted\n", 0), done.stderr
