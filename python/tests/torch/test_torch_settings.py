"""Settings of PyTorch's allocator, its names and what a program asks of it."""

import random

import pytest
import torch
from support import GIB, MIB, ON_CARD, TOO_MUCH, VRAMP, address, allocated, block, limit, run_script, runtime, settings, stat


def power_of_two_part(size, divisions):
    """The next multiple of a part of the power of two below `size`."""
    power = 1
    while power < size:
        power *= 2
    if power == size:
        return power
    step = power // 2 // divisions
    return -(-(size - power // 2) // step) * step + power // 2


def active_bytes_of(size):
    start = stat("active_bytes.all.current")
    kept = block(size)
    grown = stat("active_bytes.all.current") - start
    del kept
    return grown


def test_the_backend_is_pytorchs_own():
    assert torch.cuda.get_allocator_backend() == "native"


def test_sizes_are_rounded_as_the_setting_says():
    size = 84 * MIB + 512
    assert active_bytes_of(size) == size
    if VRAMP:
        # vramp remaps free memory of any size, so sizes need no rounding to be reused.
        with settings("roundup_power2_divisions:4"):
            assert active_bytes_of(size) == size
        return
    with settings("roundup_power2_divisions:4"):
        assert active_bytes_of(size) == power_of_two_part(size, 4)
    assert active_bytes_of(size) == size
    with settings("roundup_power2_divisions:[64:8,128:2,256:2,512:2,1024:1,>:1]"):
        torch.cuda.empty_cache()
        assert active_bytes_of(84 * MIB) == power_of_two_part(84 * MIB, 8)
        torch.cuda.empty_cache()
        assert active_bytes_of(400 * MIB) == power_of_two_part(400 * MIB, 2)


@pytest.mark.parametrize(
    "text",
    ["foo:1,bar:2", "garbage_collection_threshold:1.2", "max_split_size_mb:2", "release_lock_on_cudamalloc:none"]
    + ["pinned_use_cuda_host_register:none", "pinned_num_register_threads:none", "pinned_num_register_threads:1024"],
)
def test_wrong_settings_are_refused(text):
    before = allocated()
    with pytest.raises(ValueError):
        torch._C._accelerator_setAllocatorSettings(text)
    kept = block(MIB)
    assert allocated() == before + MIB
    del kept


def test_other_settings_are_accepted_while_memory_is_in_use():
    kept = block(30 * MIB)
    for text in (
        "release_lock_on_cudamalloc:True",
        "garbage_collection_threshold:0.5,max_split_size_mb:40",
        "expandable_segments:True",
        "expandable_segments:False",
    ):
        with settings(text):
            more = block(50 * MIB)
            del more
    del kept


def test_expandable_and_ordinary_segments_serve_one_program():
    with limit(120 * MIB):
        parts = []
        for expandable in (False, True, False):
            with settings(f"expandable_segments:{expandable},max_split_size_mb:40"):
                parts.append(block(40 * MIB))
        with pytest.raises(torch.OutOfMemoryError):
            block(40 * MIB)
        parts.clear()
        whole = block(120 * MIB)
        del whole


def test_garbage_is_collected_above_the_threshold():
    with limit(120 * MIB), settings("garbage_collection_threshold:0.5"):
        first, second = block(40 * MIB), block(40 * MIB)
        del first, second
        third = block(80 * MIB)
        del third


def test_a_backend_named_in_the_environment_is_used_or_refused():
    done = run_script(
        "torch.cuda.init(); print(torch.cuda.get_allocator_backend())",
        check=False,
        PYTORCH_CUDA_ALLOC_CONF="backend:cudaMallocAsync",
    )
    if VRAMP:
        # cudaMallocAsync and vramp cannot both serve a process: that is said, and no third thing happens.
        assert done.stdout.strip() in ("native", "cudaMallocAsync") or "vramp" in done.stderr
        assert done.returncode >= 0, "a crash"
    else:
        assert done.stdout == "cudaMallocAsync\n"


@pytest.mark.parametrize("value", ["expandable_segments:True", "max_split_size_mb:64", "garbage_collection_threshold:0.6,roundup_power2_divisions:8"])
def test_settings_of_the_environment_are_accepted(value):
    text = "t = torch.empty(30 << 20, dtype=torch.uint8, device='cuda'); del t; torch.cuda.empty_cache(); print(torch.cuda.memory_allocated())"
    assert run_script(text, PYTORCH_CUDA_ALLOC_CONF=value).stdout == "0\n"


def test_memory_without_caching_is_freed_at_once():
    text = """
kept = torch.empty(5 << 20, dtype=torch.uint8, device="cuda")
del kept
print(torch.cuda.memory_allocated(), torch.cuda.memory_reserved())
"""
    assert run_script(text, PYTORCH_NO_CUDA_MEMORY_CACHING="1").stdout == "0 0\n"


def test_caching_off_and_on_again_leaves_nothing():
    start = allocated()
    torch.cuda.caching_allocator_enable(False)
    try:
        plain = block(5 * MIB)
        assert allocated() == start
    finally:
        torch.cuda.caching_allocator_enable(True)
    cached = block(5 * MIB)
    assert allocated() == start + 5 * MIB
    del cached
    del plain
    assert allocated() == start


def test_the_largest_free_block_is_known():
    """The size that cuDNN's search for an algorithm may use for its workspace."""
    kept = block(64 * MIB)
    del kept
    free, _ = torch.cuda.mem_get_info()
    assert torch.cuda.memory_reserved() >= 64 * MIB
    assert free > 0
    again = block(64 * MIB)
    del again


def test_a_gibibyte_of_small_pieces_and_large_ones_again():
    start = torch.cuda.memory_reserved()
    kept = [block(64 << 10) for _ in range(4096)]
    assert len({address(tensor) for tensor in kept}) == 4096
    del kept[::2]
    large = [block(64 * MIB) for _ in range(8)]
    kept.clear()
    large.clear()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == start


def test_a_hundred_thousand_cycles_leak_nothing():
    draw = random.Random(2)
    sizes = [draw.randrange(1, 4 * MIB) for _ in range(1000)]
    torch.cuda.reset_accumulated_memory_stats()
    for size in sizes:
        block(size)
    reserved, held = torch.cuda.memory_reserved(), memory_of_process()
    for _ in range(99):
        for size in sizes:
            torch.empty(size, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_reserved() == reserved
    assert allocated() == 0
    assert stat("allocation.all.allocated") == stat("allocation.all.freed") == 100_000
    assert memory_of_process() < held + 32 * MIB


def memory_of_process():
    """Resident bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_cycles_with_memory_kept_end_with_what_was_kept():
    kept = []
    for step in range(20_000):
        made = block(1 + step * 7919 % (2 * MIB))
        if step % 200 == 0:
            kept.append(made)
        del made
    assert stat("requested_bytes.all.current") == sum(tensor.numel() for tensor in kept)
    assert stat("allocation.all.current") == len(kept)
    kept.clear()
    assert allocated() == 0


def test_the_cards_calls_are_few_in_a_steady_state():
    if ON_CARD or VRAMP:
        calls = lambda: (stat("num_device_alloc"), stat("num_device_free"))
    else:
        calls = lambda: (runtime().fake_cuda_mallocs(0), runtime().fake_cuda_frees(0))
    sizes = (1000, 3 * MIB, 30 * MIB, 200)

    def step():
        kept = [block(size) for size in sizes]
        del kept

    step()
    before = calls()
    for _ in range(1000):
        step()
    assert calls() == before


def test_a_process_ends_cleanly_with_memory_in_use():
    text = """
import threading
kept = [torch.empty(1 << 20, dtype=torch.uint8, device="cuda") for _ in range(10)]
pool = torch.cuda.MemPool()
with torch.cuda.use_mem_pool(pool):
    kept.append(torch.empty(5 << 20, dtype=torch.uint8, device="cuda"))
stream = torch.cuda.Stream()
kept[0].record_stream(stream)
torch.cuda.memory._record_memory_history()
print("end")
"""
    done = run_script(text)
    assert done.stdout == "end\n"
    assert done.stderr == ""


def test_a_forked_child_that_uses_the_card_fails_with_pytorchs_error():
    text = """
import multiprocessing, warnings
warnings.simplefilter("ignore")
kept = torch.empty(10, device="cuda")
def child(sender):
    try:
        torch.empty(10, device="cuda")
        sender.send("served")
    except RuntimeError as error:
        sender.send(str(error))
receiver, sender = multiprocessing.Pipe(False)
process = multiprocessing.get_context("fork").Process(target=child, args=(sender,))
process.start()
assert receiver.poll(60), "no answer in 60 s"
print("Cannot re-initialize CUDA in forked subprocess" in receiver.recv())
process.join(60)
print(process.exitcode)
"""
    assert run_script(text).stdout == "True\n0\n"


def test_a_forked_child_that_leaves_the_card_alone_ends():
    text = """
import os
kept = torch.empty(10, device="cuda")
child = os.fork()
if child == 0:
    torch.empty(1000)
    os._exit(0)
print(os.waitpid(child, 0)[1])
"""
    assert run_script(text).stdout == "0\n"


def test_sharing_memory_between_processes_works_or_is_refused_and_never_hangs():
    text = """
import sys, torch.multiprocessing as mp
def child(queue, answers):
    answers.put(queue.get(timeout=60).shape[0])
if __name__ == "__main__":
    torch.empty(1, device="cuda")
    try:
        torch.empty(1000, dtype=torch.uint8, device="cuda").untyped_storage()._share_cuda_()
        print("shared")
    except RuntimeError as error:
        print("refused:", str(error).splitlines()[0])
"""
    line = run_script(text).stdout
    assert line == "shared\n" or (line.startswith("refused: ") and len(line) > 20), line


def test_two_sizes_above_the_cards_are_refused_under_both_kinds_of_segment():
    for text in ("expandable_segments:True", "expandable_segments:False"):
        with settings(text):
            for size in (TOO_MUCH, 4096 * GIB):
                with pytest.raises(torch.OutOfMemoryError):
                    block(size)
