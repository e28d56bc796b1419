"""Several cards, pinned memory, comm pools, and what a pool says of them."""

from __future__ import annotations

import time

import numpy as np
import pytest
from conftest import MIB

import vramp


def test_cards_of_a_machine_are_opened_together() -> None:
    pools = vramp.open_all("sim:h200x3", limit="1GiB")
    infos = [pool.device_info for pool in pools]
    assert [info.ordinal for info in infos] == [0, 1, 2]
    assert [info.peers for info in infos] == [(1, 2), (0, 2), (0, 1)]
    assert [pool.limit for pool in pools] == [1 << 30] * 3
    with pools[1].malloc(64 * MIB) as block:
        np.asarray(block)[:] = 3
        change = pools[1].grant_access(2)
        assert change.calls == 1 and change.bytes >= 64 * MIB
        assert pools[1].grant_access(2) == vramp.AccessChange(calls=0, bytes=0)
        pools[1].grant_access(0)
        assert list(pools[1].sharing.peers) == [0, 2]
        assert pools[1].revoke_access(0).calls == 1
        assert list(pools[1].sharing.peers) == [2] and pools[0].sharing.peers == ()
        with pytest.raises(vramp.RangeError, match="device 1 is no peer"):
            pools[1].grant_access(1)
    for pool in pools:
        pool.audit()
        pool.close()


def test_one_card_of_a_machine_is_opened_by_its_number() -> None:
    with vramp.open("sim:h200x2:1", peers="[0]") as pool:
        assert (pool.device_info.ordinal, pool.sharing.peers) == (1, (0,))
    with vramp.open("sim:h200x2:1", peers="none") as pool:
        with pytest.raises(vramp.UnsupportedError, match="excludes device 0"):
            pool.grant_access(0)
    (only,) = vramp.open_all("sim:h200")
    with only:
        assert only.device_info.peers == ()
    for name in ("sim:h200x0", "sim:h200x2:2", "sim:h200x65", "gpu"):
        with pytest.raises(vramp.DeviceError):
            vramp.open_all(name)
    with pytest.raises(vramp.OptionError):
        vramp.open_all("sim:h200x2", limit="many")


def test_many_failures_to_open_all_leave_no_pool() -> None:
    # 256 can be open at once: each failure returns those that were opened.
    for _ in range(10):
        pools = []
        with pytest.raises(vramp.RangeError, match="maximum"):
            while True:
                pools += vramp.open_all("sim:h200x60")
        for pool in pools:
            pool.close()
    with vramp.open("sim"):
        pass


def test_pinned_memory_stays_until_it_is_unpinned(pool: vramp.Pool) -> None:
    block = pool.malloc(32 * MIB)
    address = block.ptr
    with pool.pin(block) as pin, pool.pin(address + 512, 4096) as part:
        assert (pin.ptr, pin.size, pin.pool) == (address, block.usable_size, pool)
        assert part.size == 4096 and part.pinned_bytes >= 2 * MIB
        assert pool.sharing.pinned_bytes >= 32 * MIB
        block.free()
        pool.trim()
        assert pool.stats().reserved >= 32 * MIB
        assert not pin.is_unpinned
    assert pin.is_unpinned and "ended" in repr(pin)
    pin.unpin()
    pool.trim()
    assert (pool.stats().reserved, pool.sharing.pinned) == (0, 0)
    with pytest.raises(vramp.UnknownPointerError):
        pool.pin(block)
    with pytest.raises(vramp.UnknownPointerError):
        pool.pin(1 << 20, 4096)
    with pytest.raises(vramp.UnknownPointerError):
        pool.pin(address + 512)
    dropped = pool.pin(pool.malloc(4 * MIB))
    del dropped
    assert pool.sharing.pinned == 0


def test_a_pin_may_outlive_its_pool() -> None:
    with vramp.open("sim") as pool:
        pin = pool.pin(pool.malloc(4 * MIB))
    pin.unpin()


def test_a_comm_pool_shares_streams_and_limit() -> None:
    with vramp.open("sim:h200x2", limit="256MiB") as pool:
        stream = pool.create_stream()
        pool.grant_access(1)
        with pool.comm_pool("nccl") as comm:
            assert comm.sharing.peers == (1,)
            with comm.malloc(100 * MIB, stream) as block:
                block.record_use(pool.create_stream())
                with vramp.ipc.export(block) as exported:
                    with vramp.ipc.open(exported.ticket(), pool) as memory:
                        np.asarray(memory)[7] = 9
                        assert np.asarray(block)[7] == 9
                    assert exported.wait_released(60)
                with pytest.raises(vramp.OutOfMemoryError):
                    pool.malloc(200 * MIB, stream)
            while comm.sharing.exported:  # the server's thread gives its reference up a moment later
                time.sleep(0.001)
            comm.trim()
            assert comm.stats().reserved == 0
            comm.audit()
        pool.malloc(200 * MIB, stream).free()
    with pytest.raises(vramp.ClosedError):
        pool.comm_pool()


def test_a_pool_says_what_is_possible_and_why_not() -> None:
    cases: tuple[tuple[dict[str, str], str, bool, str | None], ...] = (
        ({}, "posix-fd", False, None),
        ({"sharing": "none"}, "none", False, None),
        ({"rdma": "auto"}, "posix-fd", True, None),
        ({"sharing": "fabric"}, "posix-fd", False, "NOT_PERMITTED"),
    )
    for options, handle_type, rdma, why in cases:
        with vramp.open("sim:h200", **options) as pool:
            state = pool.sharing
            assert (state.handle_type, state.rdma) == (handle_type, rdma)
            assert (why is None) == (state.fallback is None)
            assert (why or "") in (state.fallback or "")
            assert (state.exported, state.pinned, state.pinned_bytes) == (0, 0, 0)
            info = pool.device_info
            assert info.has_posix_fd and info.has_fabric and info.has_rdma and info.has_dma_buf
    with pytest.raises(vramp.OptionError, match="use none or posix-fd or fabric"):
        vramp.open("sim", sharing="fd")
