"""Arrays over allocations, for NumPy and DLPack."""

from __future__ import annotations

import ctypes
import gc
from typing import Any

import numpy as np
import pytest
from conftest import MIB

import vramp


def test_numpy_reads_and_writes_the_memory_itself(pool: vramp.Pool) -> None:
    block = pool.malloc(4 * 1000)
    array = block.array((10, 100), "float32")
    view = np.asarray(array)
    assert view.shape == (10, 100) and view.dtype == np.float32
    view[:] = np.arange(1000).reshape(10, 100)
    assert view.__array_interface__["data"][0] == block.ptr == array.ptr
    assert ctypes.cast(block.ptr + 4 * 999, ctypes.POINTER(ctypes.c_float))[0] == 999.0
    assert np.asarray(block.array(1000, np.dtype("f4")))[999] == 999.0
    assert np.asarray(block).nbytes == 4000
    assert np.asarray(block).__array_interface__["data"][0] == block.ptr
    assert np.array(block, copy=True).__array_interface__["data"][0] != block.ptr
    assert np.asarray(block, dtype="uint16").dtype == np.uint16
    with pytest.raises(ValueError, match="needs a copy"):
        np.asarray(block, dtype="uint16", copy=False)
    assert (len(array), array.nbytes, array.dtype) == (10, 4000, "float32")


def test_bytes_survive_when_memory_around_them_is_remapped(pool: vramp.Pool) -> None:
    pool.limit = "1GiB"
    blocks = [pool.malloc(20 * MIB) for _ in range(48)]
    for number, block in enumerate(blocks):
        np.asarray(block.array()).fill(number)
    for block in blocks[::2]:
        block.free()
    # Holes of 20 MiB: this block needs their chunks side by side.
    large = pool.malloc(300 * MIB)
    stats = pool.stats()
    assert stats.chunks_moved + stats.chunks_reactivated > 0
    np.asarray(large.array()).fill(255)
    for number in range(1, 48, 2):
        bytes_ = np.asarray(blocks[number].array())
        assert (bytes_.min(), bytes_.max()) == (number, number)
    pool.audit()


@pytest.mark.parametrize("preset", ["vramp", "torch", "torch-expandable", "vpmm"])
def test_memory_of_every_preset_can_be_written(preset: str) -> None:
    with vramp.open("sim", preset=preset) as pool:
        blocks = [pool.malloc(size) for size in (4 * MIB, 30 * MIB, 3 * MIB)]
        for number, block in enumerate(blocks):
            np.asarray(block.array()).fill(number)
        assert [int(np.asarray(block.array())[-1]) for block in blocks] == [0, 1, 2]
        pool.trim()


def test_memory_that_is_only_addresses_says_so() -> None:
    with vramp.open("sim", preset="stream-ordered") as pool:
        block = pool.malloc(MIB)
        with pytest.raises(vramp.UnsupportedError, match="addresses only"):
            block.array()
        block.free()


def test_an_array_keeps_its_memory(pool: vramp.Pool) -> None:
    view = np.asarray(pool.malloc(MIB).array())
    gc.collect()
    view.fill(3)
    assert pool.stats().live == MIB
    del view
    assert pool.stats().live == 0


def test_memory_in_use_is_not_freed(pool: vramp.Pool) -> None:
    block = pool.malloc(MIB)
    view = np.asarray(block.array())
    for refused in (block.free, pool.close):
        with pytest.raises(vramp.InUseError, match="1 arrays"):
            refused()
    with pytest.raises(vramp.InUseError), block:
        pass
    with pytest.raises(KeyError), block:
        raise KeyError("the exception of the block is not replaced")
    view.fill(1)
    del view
    block.free()
    pool.close()


class _Consumer:
    """A consumer of DLPack in plain ctypes, which sees the struct and calls the deleter itself."""

    def __init__(self, capsule: Any, versioned: bool) -> None:
        name = b"dltensor_versioned" if versioned else b"dltensor"
        api = ctypes.pythonapi
        api.PyCapsule_GetPointer.restype = ctypes.c_void_p
        api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
        api.PyCapsule_SetName.argtypes = [ctypes.py_object, ctypes.c_char_p]
        self.address = api.PyCapsule_GetPointer(capsule, name)
        self.used = b"used_" + name
        api.PyCapsule_SetName(capsule, self.used)
        # The deleter is behind version and context, or behind tensor and context.
        self.deleter_offset = 16 if versioned else 56
        self.tensor_offset = 32 if versioned else 0

    def fields(self) -> tuple[int, int, int, int]:
        """Address, kind of the device, number of dimensions, length of the first."""
        start = self.address + self.tensor_offset
        data = ctypes.c_uint64.from_address(start).value
        kind, ndim = (ctypes.c_int32.from_address(start + at).value for at in (8, 16))
        shape = ctypes.c_uint64.from_address(start + 24).value
        return data, kind, ndim, ctypes.c_int64.from_address(shape).value

    def delete(self) -> None:
        function = ctypes.c_uint64.from_address(self.address + self.deleter_offset).value
        # A function of ctypes is called without the interpreter's lock.
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)(self.address)


@pytest.mark.parametrize("max_version", [None, (0, 8), (1, 0), (2, 0)])
def test_a_dlpack_tensor_keeps_its_memory_until_it_is_deleted(
    pool: vramp.Pool, max_version: tuple[int, int] | None
) -> None:
    block = pool.malloc(MIB)
    array = block.array((8, 16), float)
    assert array.__dlpack_device__() == (1, 0)
    capsule = array.__dlpack__(max_version=max_version)
    consumer = _Consumer(capsule, versioned=max_version is not None and max_version[0] >= 1)
    assert consumer.fields() == (block.ptr, 1, 2, 8)
    del array, capsule
    with pytest.raises(vramp.InUseError):
        block.free()
    consumer.delete()
    block.free()


def test_a_capsule_that_is_not_consumed_is_deleted(pool: vramp.Pool) -> None:
    block = pool.malloc(MIB)
    for version in (None, (1, 1)):
        capsule = block.array().__dlpack__(max_version=version)
        assert "dltensor" in repr(capsule)
        with pytest.raises(vramp.InUseError):
            block.free()
        del capsule
    block.free()


def test_numpy_takes_dlpack(pool: vramp.Pool) -> None:
    block = pool.malloc(800)
    view = np.from_dlpack(block.array((10, 10), "int64"))
    np.asarray(block.array(100, int))[:] = np.arange(100)
    assert view[9, 9] == 99
    del view
    block.free()


def test_what_dlpack_cannot_do_is_a_buffer_error(pool: vramp.Pool) -> None:
    array = pool.malloc(MIB).array()
    for wrong in ({"copy": True}, {"dl_device": (2, 0)}, {"stream": 1}):
        with pytest.raises(BufferError):
            array.__dlpack__(**wrong)
    del array


def test_the_simulator_has_no_interface_of_cuda(pool: vramp.Pool) -> None:
    array = pool.malloc(MIB).array()
    assert not hasattr(array, "__cuda_array_interface__")
    assert hasattr(array, "__array_interface__")


def test_every_element_type_has_its_size(pool: vramp.Pool) -> None:
    block = pool.malloc(1600)
    sizes = {"bool": 1, "int16": 2, "uint32": 4, "float16": 2, "complex64": 8, "complex128": 16}
    for name, size in sizes.items():
        array = block.array(100, name)
        view = np.asarray(array)
        assert (array.nbytes, view.dtype.name, view.itemsize) == (100 * size, name, size)
        assert np.from_dlpack(array).dtype.name == name
    for given in (np.float32, np.dtype("<f4"), "f4", "<f4", "float32"):
        assert block.array(1, given).dtype == "float32"
    brain = block.array(10, "bfloat16")
    assert brain.nbytes == 20
    assert not hasattr(brain, "__array_interface__")
    for wrong in ("float", ">f4", "U3", object, 3):
        with pytest.raises(TypeError, match="no element type"):
            block.array(1, wrong)


def test_shapes_that_do_not_fit_are_refused(pool: vramp.Pool) -> None:
    block = pool.malloc(1024)
    assert block.array((), "float32").shape == ()
    assert block.array((0, 5), "float32").nbytes == 0
    assert block.array(offset=1000).shape == (24,)
    assert block.array((2, 3), "int32", offset=8).ptr == block.ptr + 8
    for shape in (100_000, (1 << 40, 1 << 40), (1025,)):
        with pytest.raises(vramp.RangeError, match="does not fit"):
            block.array(shape)
    with pytest.raises(vramp.RangeError, match="not a multiple"):
        block.array(1, "float64", offset=4)
    with pytest.raises(vramp.RangeError):
        block.array(-1)
    with pytest.raises(TypeError):
        block.array(1.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        len(block.array(()))
