"""Arenas for caches as tensors of torch, with kvcached's operations and SGLang's arena on them."""

import gc

import pytest
import torch
from support import GIB, MIB, VRAMP, allocated, busy

if not VRAMP:
    pytest.skip("PyTorch's own allocator has no arenas for caches", allow_module_level=True)

import vramp
import vramp.compat.kvcached as ops
import vramp.compat.sglang_kv as sglang_kv
import vramp.kv

PAGE = 2 * MIB


@pytest.fixture
def arena():
    with vramp.kv.arena(tensors=4, size=16 * PAGE, superpage=PAGE) as made:
        yield made
        gc.collect()


def test_a_tensor_has_the_addresses_of_its_part(arena):
    before = allocated()
    keys = arena.tensor(1, torch.float16, (-1, 16, 8, 128))
    assert keys.device == torch.device("cuda:0") and keys.dtype == torch.float16 and keys.is_contiguous()
    assert keys.shape == (16 * PAGE // (16 * 8 * 128 * 2), 16, 8, 128)
    assert keys.data_ptr() == arena.ptr + 16 * PAGE and allocated() == before
    assert arena.tensor(3, "bfloat16").data_ptr() == arena.ptr + 3 * 16 * PAGE
    assert arena.flat(torch.uint8).numel() == arena.size
    with pytest.raises(vramp.RangeError, match="elements"):
        arena.tensor(0, torch.float16, (5, 7))
    with pytest.raises(vramp.RangeError, match="4 tensors"):
        arena.tensor(4, torch.float16)


def test_bytes_of_committed_pages_stay_over_growth(arena):
    whole = arena.tensor(2, torch.uint8)
    arena.commit(0)
    whole[:PAGE].copy_(torch.arange(PAGE, dtype=torch.int64).to(torch.uint8))
    arena.commit(range(1, 16))
    assert torch.equal(whole[:PAGE].cpu(), torch.arange(PAGE, dtype=torch.int64).to(torch.uint8))
    assert whole.data_ptr() == arena.ptr + 2 * 16 * PAGE


def test_interleaved_tensors_have_strides_of_pages():
    with vramp.kv.arena(tensors=3, size=4 * PAGE, layout="interleaved") as arena:
        keys = arena.tensor(1, torch.float16, (-1, 128))
        assert keys.shape == (4, PAGE // 256, 128) and keys.stride() == (3 * PAGE // 2, 128, 1)
        assert keys.data_ptr() == arena.ptr + PAGE and keys[2].data_ptr() == arena.ptr + 7 * PAGE
        del keys
        gc.collect()


def test_tensors_keep_the_arena_open():
    arena = vramp.kv.arena(tensors=2, size=4 * PAGE)
    part = arena.tensor(1, torch.float32)[8:16]
    with pytest.raises(vramp.InUseError, match="del tensor"):
        arena.close()
    del part
    gc.collect()
    arena.close()


def test_parked_pages_wait_for_the_work_of_all_streams(arena):
    stream = torch.cuda.Stream()
    arena.commit(range(4), stream)
    with busy(stream):
        arena.park(range(4))
        assert arena.release() == 0 and arena.stats().parked == 4
        arena.commit([0], stream)
    torch.cuda.synchronize()
    assert arena.release() == 3 * 4 * PAGE and arena.stats().committed == 1


def test_kvcached_has_tensors_of_torch():
    ops.init_kvcached("cuda:0", PAGE, False)
    tensors = ops.create_kv_tensors(2 * 8 * PAGE, 2, "cuda:0", 3)
    assert [tensor.dtype for tensor in tensors] == [torch.int16] * 3 and tensors[0].is_cuda
    first = tensors[0].data_ptr()
    assert [tensor.data_ptr() - first for tensor in tensors] == [0, 16 * PAGE, 32 * PAGE]
    assert all(tensor.storage_offset() == 0 for tensor in tensors)
    ops.map_to_kv_tensors([3 * PAGE])
    keys = tensors[1].view(torch.float16)
    keys[3 * PAGE // 2 : 4 * PAGE // 2].copy_(torch.ones(PAGE // 2, dtype=torch.float16))
    assert (keys[3 * PAGE // 2 : 4 * PAGE // 2].cpu() == 1).all()
    ops.shutdown_kvcached()
    del tensors, keys
    gc.collect()


def test_sglangs_arena_hands_its_addresses_to_torch():
    arena = sglang_kv.KvVmmArena(0, GIB)
    with torch.cuda.use_mem_pool(arena.pool):
        tensors = [torch.empty(24 * MIB, dtype=torch.uint8, device="cuda") for _ in range(3)]
    offsets = [tensor.data_ptr() - arena.base for tensor in tensors]
    assert offsets[0] == 0 and sorted(offsets) == offsets and all(offset % PAGE == 0 for offset in offsets)
    assert offsets[-1] + 24 * MIB <= arena.cursor_bytes <= GIB
    arena.commit_range(offsets[1], PAGE)
    tensors[1][:PAGE].copy_(torch.ones(PAGE, dtype=torch.uint8))
    assert (tensors[1][:PAGE].cpu() == 1).all()
    del tensors
    gc.collect()
    arena.close()
