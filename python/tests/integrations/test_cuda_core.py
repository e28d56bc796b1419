"""cuda.core: the real Buffer and base class of the installed version (0.5 to 1.2).

A buffer of device memory binds its stream to a context, which needs a driver. Therefore the resource
of these tests says that its memory is not accessible on the device: cuda.core 1.2 then records no
stream, and passes the default stream at the end. All else is as on a card.
"""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import cast

import pytest
from array_support import pool

import vramp
import vramp.cuda_core as adaptor

core = pytest.importorskip("cuda.core", reason="cuda.core is not installed: pip install cuda-core")

# Before 1.0 the module had no name for it.
DEFAULT_STREAM = getattr(core, "LEGACY_DEFAULT_STREAM", None)


class HostSide(adaptor.MemoryResource):
    """The resource, with buffers that record no stream."""

    @property
    def is_device_accessible(self) -> bool:
        return False


@pytest.fixture
def resource(pool: vramp.Pool) -> HostSide:
    return HostSide(pool=pool)


def test_a_buffer_is_vramps_memory_and_is_freed_on_close(
    resource: HostSide, pool: vramp.Pool
) -> None:
    buffer = resource.allocate(1000, stream=DEFAULT_STREAM)
    assert isinstance(buffer, core.Buffer)
    assert buffer.size == 1000 and buffer.memory_resource is resource
    assert int(buffer.handle) % 512 == 0 and pool.stats().live == 1000
    buffer.close()
    assert pool.stats().live == 0


def test_a_buffer_that_is_dropped_is_freed(resource: HostSide, pool: vramp.Pool) -> None:
    buffer = resource.allocate(1000)
    assert pool.stats().live == 1000
    del buffer
    gc.collect()
    assert pool.stats().live == 0


def test_the_resource_has_every_property_of_its_base(pool: vramp.Pool) -> None:
    resource = adaptor.MemoryResource(3, pool=pool)
    assert isinstance(resource, core.MemoryResource)
    assert resource.pool is pool and resource.device_id == 3
    assert resource.is_device_accessible is True
    assert resource.is_host_accessible is False and resource.is_managed is False
    public = {name for name in dir(core.MemoryResource) if not name.startswith("_")}
    assert public <= set(vars(type(resource))), "nothing is left to the abstract class"
    assert "sim:h200" in repr(resource)


def test_memory_is_allocated_and_freed_on_the_streams_that_are_passed(pool: vramp.Pool) -> None:
    seen: list[tuple[str, int]] = []

    class Watched:
        is_simulated = True

        def allocate(self, size: int, stream: int) -> int:
            seen.append(("allocate", stream))
            return pool.allocate(size, stream)

        def deallocate(self, address: int, stream: int) -> None:
            seen.append(("deallocate", stream))
            pool.deallocate(address, stream)

    class Stream:
        def __init__(self, raw: int) -> None:
            self.raw = raw

        def __cuda_stream__(self) -> tuple[int, int]:
            return (0, self.raw)

    resource = HostSide(pool=cast(vramp.Pool, Watched()))
    address = resource.pool.allocate(100, 0)
    resource.deallocate(address, 100, stream=Stream(0x6000))
    address = resource.pool.allocate(100, 0)
    builder = SimpleNamespace(stream=Stream(0x7000))
    resource.deallocate(address, 100, stream=builder)
    assert [stream for what, stream in seen if what == "deallocate"] == [0x6000, 0x7000]


def test_a_buffer_that_does_not_keep_its_stream_is_freed_on_it(pool: vramp.Pool) -> None:
    """Before 1.2, from_handle took no stream, and 1.0 passes the default stream at the end."""

    class Buffer:
        @staticmethod
        def from_handle(ptr: int, size: int, mr: HostSide) -> tuple[int, int, HostSide]:
            return ptr, size, mr

    old = SimpleNamespace(Buffer=Buffer, MemoryResource=object)
    resource = adaptor._build(old)(pool=pool)
    default = SimpleNamespace(__cuda_stream__=lambda: (0, 1))
    mine = SimpleNamespace(__cuda_stream__=lambda: (0, 0x9000))
    for passed in (None, mine, default):
        address, size, _ = resource.allocate(4 << 20, stream=mine)
        resource.deallocate(address, size, stream=passed)
        assert resource._streams == {}
        with pool.malloc(4 << 20, 0x9000) as block:
            assert block.ptr == address, "that stream reuses it at once"


def test_the_per_thread_default_stream_is_served(resource: HostSide, pool: vramp.Pool) -> None:
    stream = SimpleNamespace(__cuda_stream__=lambda: (0, 2))
    address = pool.allocate(4 << 20, 2)
    resource.deallocate(address, 4 << 20, stream=stream)
    with pool.malloc(4 << 20, 2) as block:
        assert block.ptr == address, "the thread's stream reuses it at once"
    assert pool.stats().live == 0


def test_what_is_no_stream_is_refused_before_anything_is_allocated(
    resource: HostSide, pool: vramp.Pool
) -> None:
    with pytest.raises(TypeError, match="stream"):
        resource.allocate(100, stream="0")
    assert pool.stats().allocated == 0


def test_out_of_memory_is_a_memory_error(resource: HostSide) -> None:
    with pytest.raises(MemoryError):
        resource.allocate(4 << 30)
    with pytest.raises(vramp.OutOfMemoryError) as caught:
        resource.allocate(4 << 30)
    assert caught.value.requested == 4 << 30
    resource.allocate(512 << 20).close()


def test_zero_bytes_are_a_buffer_too(resource: HostSide, pool: vramp.Pool) -> None:
    buffer = resource.allocate(0)
    assert buffer.size == 0
    buffer.close()
    assert pool.stats().allocated == pool.stats().freed


def test_use_on_another_stream_is_recorded_and_a_stream_forgotten(
    resource: HostSide, pool: vramp.Pool
) -> None:
    stream = SimpleNamespace(__cuda_stream__=lambda: (0, 0x8000))
    buffer = resource.allocate(1000)
    resource.record_use(buffer, stream)
    resource.forget_stream(stream)
    buffer.close()
    with pytest.raises(vramp.UnknownPointerError):
        resource.record_use(SimpleNamespace(handle=0x10), stream)


def test_a_simulated_device_is_refused() -> None:
    with pytest.raises(vramp.UnsupportedError, match="simulated"):
        adaptor.MemoryResource()


def test_ten_thousand_buffers_leave_nothing(resource: HostSide, pool: vramp.Pool) -> None:
    for index in range(10_000):
        resource.allocate(1 + 37 * index % 100_000)
    stats = pool.stats()
    assert (stats.live, stats.allocated, stats.freed) == (0, 10_000, 10_000)


def test_the_doctor_names_what_is_missing() -> None:
    checks = adaptor.doctor()
    assert checks[0][:2] == ("cuda.core", True)
    assert all(len(check) == 3 and check[2] for check in checks)
