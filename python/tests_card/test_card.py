"""What only a card can show. Without one these tests fail: `python -m pytest python/tests_card`."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator

import pytest

import vramp

MIB = 1 << 20


@pytest.fixture
def pool() -> Iterator[vramp.Pool]:
    with vramp.open("cuda:0") as opened:
        assert not opened.is_simulated
        yield opened


@pytest.fixture
def cuda(pool: vramp.Pool) -> ctypes.CDLL:
    """The driver, with the card's primary context current."""
    driver = ctypes.CDLL("libcuda.so.1")
    context = ctypes.c_void_p()
    assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert driver.cuCtxSetCurrent(context) == 0
    return driver


def _fill(cuda: ctypes.CDLL, address: int, byte: int, size: int, stream: int) -> None:
    assert (
        cuda.cuMemsetD8Async(
            ctypes.c_uint64(address), ctypes.c_ubyte(byte), ctypes.c_size_t(size), ctypes.c_void_p(stream)
        )
        == 0
    )


def _read(cuda: ctypes.CDLL, address: int, size: int) -> bytes:
    into = ctypes.create_string_buffer(size)
    assert cuda.cuMemcpyDtoH_v2(into, ctypes.c_uint64(address), ctypes.c_size_t(size)) == 0
    return into.raw


def test_a_created_stream_runs_work_of_other_libraries(
    pool: vramp.Pool, cuda: ctypes.CDLL
) -> None:
    stream = pool.create_stream()
    version, handle = stream.__cuda_stream__()
    assert version == 0 and handle != 0
    block = pool.malloc(MIB, stream)
    _fill(cuda, block.ptr, 7, MIB, handle)
    assert cuda.cuStreamSynchronize(ctypes.c_void_p(handle)) == 0
    assert _read(cuda, block.ptr, MIB) == bytes([7]) * MIB
    block.free()


def test_arrays_have_the_protocols_of_a_card(pool: vramp.Pool) -> None:
    stream = pool.create_stream()
    for given, expected in (
        (None, 1),
        (stream, stream.__cuda_stream__()[1]),
    ):
        block = pool.malloc(MIB, given)
        array = block.array((16, 16), "float32")
        interface = array.__cuda_array_interface__
        assert interface["version"] == 3 and interface["stream"] == expected
        assert interface["data"] == (block.ptr, False)
        assert array.__dlpack_device__() == (2, 0)
        assert not hasattr(array, "__array_interface__")
        del array


def test_a_consumers_stream_waits_for_the_allocations(
    pool: vramp.Pool, cuda: ctypes.CDLL
) -> None:
    first, second = pool.create_stream(), pool.create_stream()
    consumer = second.__cuda_stream__()[1]
    block, copy = pool.malloc(512 * MIB, first), pool.malloc(512 * MIB, second)
    for byte in range(1, 20):
        _fill(cuda, block.ptr, byte, 512 * MIB, first.__cuda_stream__()[1])
        capsule = block.array().__dlpack__(stream=consumer)
        size, end = ctypes.c_size_t(MIB), 511 * MIB
        copied = cuda.cuMemcpyDtoDAsync_v2(
            ctypes.c_uint64(copy.ptr), ctypes.c_uint64(block.ptr + end), size, ctypes.c_void_p(consumer)
        )
        assert copied == 0
        del capsule
        assert cuda.cuStreamSynchronize(ctypes.c_void_p(consumer)) == 0
        assert _read(cuda, copy.ptr, 16) == bytes([byte]) * 16
    for stream in (1, 2, -1, None):
        block.array().__dlpack__(stream=stream)
    with pytest.raises(vramp.RangeError):
        block.array().__dlpack__(stream=0)
    block.free()
    copy.free()


def test_memory_that_was_remapped_leaves_the_card_while_it_sleeps(pool: vramp.Pool, cuda: ctypes.CDLL) -> None:
    def free() -> int:
        left, total = ctypes.c_size_t(), ctypes.c_size_t()
        assert cuda.cuMemGetInfo_v2(ctypes.byref(left), ctypes.byref(total)) == 0
        return left.value

    with vramp.region("first", device=pool):
        pool.malloc(MIB).free()
    # What the first pause needs stays: streams, and memory of the driver.
    vramp.pause(device=pool)
    before, pseudo, live = free(), random.Random(1), []
    with vramp.region("remapped", device=pool):
        for byte in range(250):
            block = pool.malloc(pseudo.randint(1, 75) * MIB)
            _fill(cuda, block.ptr, byte, block.size, 0)
            live.append((block, byte))
            if len(live) > 6:
                live.pop(pseudo.randrange(7))[0].free()
    assert pool.stats().chunks_moved > 10
    assert free() < before
    for _ in range(3):
        vramp.pause("remapped", device=pool)
        assert free() == before
        vramp.resume("remapped", device=pool)
    for block, byte in live:
        assert _read(cuda, block.ptr, block.size) == bytes([byte]) * block.size
        block.free()
