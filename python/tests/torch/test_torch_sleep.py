"""Programs for torch_memory_saver and for vLLM's sleep mode: tensors, memory pools and graphs that sleep."""

import gc
import os
import random
import subprocess
import sys
import threading

import pytest
import torch
from support import MIB, ON_CARD, VRAMP, address, block, capture_stream, live_blocks, run_script, tidy

pytestmark = pytest.mark.skipif(not VRAMP, reason="PyTorch's own allocator has no regions")

if VRAMP:
    import vramp
    from vramp.compat import vllm
    from vramp.compat.torch_memory_saver import torch_memory_saver


def on_card():
    """Bytes of the card that are in use, without caches."""
    tidy()
    free, total = torch.cuda.mem_get_info()
    return total - free


def fill(tensor, byte):
    """Fills without a kernel."""
    tensor.copy_(torch.full((tensor.numel(),), byte, dtype=torch.uint8))


def holds(tensor, byte):
    return bool((tensor.cpu() == byte).all())


def filled(size, byte):
    made = block(size)
    fill(made, byte)
    return made


@pytest.fixture(autouse=True)
def ends_awake():
    """Frees are served by regions that sleep too, but the next test begins with none."""
    yield
    vramp.resume()
    gc.collect()


# torch_memory_saver


def test_simple_pause_and_resume():
    normal = filled(10 * MIB, 100)
    with torch_memory_saver.region("simple"):
        pauseable = block(300 * MIB)
    at, before = address(pauseable), on_card()
    torch_memory_saver.pause()
    paused = on_card()
    assert before - paused >= 300 * MIB and holds(normal, 100)
    torch_memory_saver.resume()
    assert on_card() - paused >= 300 * MIB and address(pauseable) == at
    fill(pauseable, 7)
    assert holds(pauseable, 7) and holds(normal, 100)


def test_contents_with_a_backup_come_back_while_others_used_the_card():
    with torch_memory_saver.region("cpu backup", enable_cpu_backup=True):
        kept = filled(20 * MIB, 10)
        odd = filled(6001, 3)
    with torch_memory_saver.region("no cpu backup"):
        lost = filled(20 * MIB, 20)
    torch_memory_saver.pause()
    unrelated = filled(60 * MIB, 30)
    torch_memory_saver.resume()
    assert holds(kept, 10) and holds(odd, 3) and holds(unrelated, 30)
    fill(lost, 40)
    assert holds(lost, 40) and holds(kept, 10)


def test_a_tag_sleeps_alone():
    with torch_memory_saver.region("a", enable_cpu_backup=True):
        first = filled(64 * MIB, 1)
    with torch_memory_saver.region("b"):
        second = block(64 * MIB)
    both = on_card()
    torch_memory_saver.pause("b")
    assert both - on_card() >= 64 * MIB and holds(first, 1)
    torch_memory_saver.pause("a")
    assert both - on_card() >= 128 * MIB
    torch_memory_saver.resume("b")
    fill(second, 2)
    torch_memory_saver.resume("a")
    assert holds(first, 1) and holds(second, 2) and on_card() == both


def test_a_memory_pool_in_a_region_sleeps_with_it():
    pool = torch.cuda.MemPool()
    with torch_memory_saver.region("pooled", enable_cpu_backup=True), torch.cuda.use_mem_pool(pool):
        inside = filled(40 * MIB, 5)
    assert live_blocks(pool.id) == 1
    before, at = on_card(), address(inside)
    torch_memory_saver.pause("pooled")
    assert before - on_card() >= 40 * MIB
    torch_memory_saver.resume("pooled")
    assert holds(inside, 5) and address(inside) == at
    del inside, pool


def test_a_captured_graph_sleeps_with_its_tag():
    static = filled(4 * MIB, 1)
    graph = torch.cuda.CUDAGraph()
    stream = capture_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch_memory_saver.cuda_graph(graph, stream=stream, tag="graph", enable_cpu_backup=True):
        result = block(48 * MIB)
        result[: 4 * MIB].copy_(static, non_blocking=True)
    at = address(result)
    fill(result, 9)
    torch.cuda.synchronize()
    before = on_card()
    torch_memory_saver.pause("graph")
    assert before - on_card() >= 48 * MIB
    other = filled(100 * MIB, 2)
    torch_memory_saver.resume("graph")
    assert address(result) == at and holds(result, 9) and holds(other, 2)
    fill(static, 3)
    graph.replay()
    torch.cuda.synchronize()
    # The fake runtime's graphs have no nodes.
    assert holds(result[: 4 * MIB], 3 if ON_CARD else 9) and holds(result[4 * MIB :], 9)
    del graph, result


def test_a_graph_outside_of_regions_uses_memory_that_slept():
    with torch_memory_saver.region("kv", enable_cpu_backup=True):
        cache = filled(32 * MIB, 1)
    graph = torch.cuda.CUDAGraph()
    stream = capture_stream()
    stream.wait_stream(torch.cuda.current_stream())
    static = filled(4 * MIB, 7)
    with torch.cuda.graph(graph, stream=stream):
        cache[: 4 * MIB].copy_(static, non_blocking=True)
    torch_memory_saver.pause("kv")
    torch_memory_saver.resume("kv")
    fill(cache[: 4 * MIB], 0)
    graph.replay()
    torch.cuda.synchronize()
    assert holds(cache[4 * MIB :], 1) and holds(cache[: 4 * MIB], 7 if ON_CARD else 0)
    del graph


def test_trainer_and_engine_take_turns():
    """Weights with a backup, a cache without, and a trainer that needs the memory of both."""
    with torch_memory_saver.region("rl weights", enable_cpu_backup=True):
        weights = filled(30 * MIB, 0)
    with torch_memory_saver.region("rl cache"):
        cache = block(100 * MIB)
    places = (address(weights), address(cache))
    awake = on_card()
    for step in range(1, 5):
        torch_memory_saver.pause("rl cache")
        torch_memory_saver.pause("rl weights")
        assert on_card() <= awake - 130 * MIB
        gradients = filled(120 * MIB, step)
        assert holds(gradients, step)
        del gradients
        tidy()
        torch_memory_saver.resume("rl weights")
        assert holds(weights, step - 1)
        fill(weights, step)
        torch_memory_saver.resume("rl cache")
        fill(cache, step)
        assert (address(weights), address(cache)) == places and on_card() == awake


TRAINING = """
from vramp.compat.torch_memory_saver import torch_memory_saver
def on_card():
    free, total = torch.cuda.mem_get_info()
    return total - free
def filled(size, byte):
    made = torch.empty(size, dtype=torch.uint8, device="cuda")
    made.copy_(torch.full((size,), byte, dtype=torch.uint8))
    return made
def holds(tensor, byte):
    return bool((tensor.cpu() == byte).all())
MIB = 1 << 20
torch.cuda.init()
empty = on_card()
weights = [filled(size, 42) for size in (256 * MIB, MIB, 1 << 10, 42)]
with torch_memory_saver.region("gradients", enable_cpu_backup=False):
    gradients = filled(64 * MIB, 99)
activations = filled(512 * MIB, 1)
del activations
awake = on_card()
torch_memory_saver.pause()
paused = on_card()
assert paused <= empty + 64 * MIB, (paused, empty)
with torch_memory_saver.disable():
    temporary = filled(256 * MIB, 53)
    assert holds(temporary, 53)
    del temporary
    torch.cuda.empty_cache()
assert on_card() <= paused + 10 * MIB, (on_card(), paused)
torch_memory_saver.resume()
assert all(holds(tensor, 42) for tensor in weights)
gradients.copy_(torch.zeros(64 * MIB, dtype=torch.uint8))
assert holds(gradients, 0)
later = filled(8 * MIB, 7)
torch_memory_saver.pause()
torch_memory_saver.resume()
assert holds(later, 7)
print("right")
"""


@pytest.mark.parametrize("settings", ["", "expandable_segments:True"])
def test_a_training_engine_is_one_region_by_the_environment(settings):
    variables = {"TMS_INIT_ENABLE": "1", "TMS_INIT_ENABLE_CPU_BACKUP": "1", "PYTORCH_CUDA_ALLOC_CONF": settings}
    done = run_script(TRAINING, **variables)
    assert done.stdout.strip() == "right"


TWO_CARDS = """
from vramp.compat.torch_memory_saver import torch_memory_saver
def on_cards():
    return [total - free for free, total in map(torch.cuda.mem_get_info, (0, 1))]
torch.cuda.set_device(1)
tensors = []
for device in ("cuda:0", "cuda", "cuda:1"):
    with torch_memory_saver.region(enable_cpu_backup=True):
        tensors.append(torch.empty(100 << 20, dtype=torch.uint8, device=device))
        tensors[-1].copy_(torch.full((100 << 20,), len(tensors), dtype=torch.uint8))
awake = on_cards()
torch_memory_saver.pause()
asleep = on_cards()
assert [a - b >> 20 for a, b in zip(awake, asleep)] == [100, 200], (awake, asleep)
torch_memory_saver.resume()
assert on_cards() == awake
assert all(bool((tensor.cpu() == place + 1).all()) for place, tensor in enumerate(tensors))
print("right")
"""


@pytest.mark.skipif(ON_CARD, reason="a second card is counted by the fake runtime")
def test_a_tag_has_memory_on_several_cards():
    assert run_script(TWO_CARDS, FAKE_CUDA_DEVICES="2").stdout.strip() == "right"


PLUGGABLE = """
import vramp.torch
vramp.torch.enable("pluggable")
import torch
from vramp.compat.torch_memory_saver import torch_memory_saver
with torch_memory_saver.region("weights", enable_cpu_backup=True):
    weights = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
weights.copy_(torch.full((64 << 20,), 3, dtype=torch.uint8))
at, before = weights.data_ptr(), torch.cuda.mem_get_info()[0]
torch_memory_saver.pause()
assert torch.cuda.mem_get_info()[0] - before == 64 << 20
torch_memory_saver.resume()
assert weights.data_ptr() == at and bool((weights.cpu() == 3).all())
print("right")
"""


def test_tensors_of_the_pluggable_route_sleep():
    done = subprocess.run(
        [sys.executable, "-c", PLUGGABLE], env=dict(os.environ), capture_output=True, text=True, timeout=300
    )
    assert done.stdout.strip() == "right", done.stderr


SENT = """
import vramp
from torch.multiprocessing.reductions import reduce_tensor
from vramp.compat.torch_memory_saver import torch_memory_saver
with torch_memory_saver.region("sent", enable_cpu_backup=True):
    sent = torch.empty(8 << 20, dtype=torch.uint8, device="cuda")
with torch_memory_saver.region("kept", enable_cpu_backup=True):
    kept = torch.empty(8 << 20, dtype=torch.uint8, device="cuda")
message = reduce_tensor(sent)
try:
    torch_memory_saver.pause("sent")
except vramp.RegionError as error:
    print(error.tag, "exports to other processes" in str(error))
torch_memory_saver.pause("kept")
print([status.phase for status in vramp.status()])
"""


def test_a_tensor_that_was_sent_keeps_its_region_awake():
    assert run_script(SENT).stdout.splitlines() == ["sent True", "['asleep', 'awake']"]


def test_every_byte_is_right_after_random_pauses_by_threads():
    """Three tags with a backup, moved by two threads while a third one uses memory outside of them."""
    tags = {}
    for number in range(3):
        with torch_memory_saver.region(f"random {number}", enable_cpu_backup=True):
            sizes = (1 << 10, 3 * MIB + 512, 24 * MIB)
            tags[f"random {number}"] = [filled(size, 10 * number + place) for place, size in enumerate(sizes)]
    errors = []

    def move(seed):
        chosen = random.Random(seed)
        try:
            for _ in range(15):
                call = chosen.choice((torch_memory_saver.pause, torch_memory_saver.resume))
                call(chosen.choice((None, *tags)))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=move, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for byte in range(20):
        assert holds(filled(8 * MIB, byte), byte)
    for thread in threads:
        thread.join()
    assert not errors
    torch_memory_saver.resume()
    for number, tensors in enumerate(tags.values()):
        assert all(holds(tensor, 10 * number + place) for place, tensor in enumerate(tensors))


# vLLM


@pytest.fixture
def allocator(monkeypatch):
    monkeypatch.setattr(vllm, "allocator", vllm.Allocator())
    return vllm.allocator


def test_vllm_tensors_of_a_pool_sleep_beside_others(allocator):
    outside = filled(4 * MIB, 0)
    with allocator.use_memory_pool():
        first, second = filled(4 * MIB, 1), filled(4 * MIB, 2)
    before = on_card()
    allocator.sleep()
    assert on_card() < before and holds(outside, 0)
    allocator.wake_up()
    assert holds(outside, 0) and holds(first, 1) and holds(second, 2)


def test_vllm_graphs_stay_valid_over_a_sleep(allocator):
    with allocator.use_memory_pool("weights"):
        weights = filled(4 * MIB, 6)
    with allocator.use_memory_pool("discard"):
        cache = block(4 * MIB)
    graph = torch.cuda.CUDAGraph()
    stream = capture_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with allocator.cudagraph_pool() as pool, torch.cuda.graph(graph, pool=pool, stream=stream):
        result = block(40 * MIB)
        result[: 4 * MIB].copy_(weights, non_blocking=True)
        cache.copy_(weights, non_blocking=True)
    assert tuple(graph.pool()) == tuple(pool)
    places = [address(tensor) for tensor in (weights, cache, result)]
    fill(result, 1)
    before = on_card()
    allocator.sleep(("weights", "cudagraph"))
    assert before - on_card() >= 48 * MIB
    allocator.wake_up()
    assert [address(tensor) for tensor in (weights, cache, result)] == places
    assert holds(weights, 6) and holds(result, 1)
    graph.replay()
    torch.cuda.synchronize()
    assert holds(result[4 * MIB :], 1) and holds(result[: 4 * MIB], 6 if ON_CARD else 1)
    del graph, result
    allocator._graph_pool = None


def test_vllm_wakes_up_later_where_the_card_is_full(allocator):
    total = torch.cuda.mem_get_info()[1]
    size = int(total * 0.7) if not ON_CARD else 8 << 30
    with allocator.use_memory_pool("kv_cache"):
        asleep = block(size)
    allocator.sleep(())
    blocker = block(total - size // 2 if not ON_CARD else int(total * 0.95))
    with pytest.raises(RuntimeError):
        allocator.wake_up()
    del blocker
    tidy()
    allocator.wake_up()
    fill(asleep[:MIB], 3)
    assert holds(asleep[:MIB], 3)


def test_vllm_sleeps_at_both_levels_and_wakes_by_tags(allocator):
    with allocator.use_memory_pool("weights"):
        layers = [filled(16 * MIB, layer) for layer in range(4)]
    with allocator.use_memory_pool("kv_cache"):
        cache = block(256 * MIB)
    backend = vllm.Backend()
    awake = on_card()
    backend.suspend(1)
    assert awake - on_card() >= 320 * MIB
    backend.resume()
    assert all(holds(tensor, layer) for layer, tensor in enumerate(layers)) and on_card() == awake

    backend.suspend(2)
    assert awake - on_card() >= 320 * MIB
    backend.resume(["weights"])
    assert awake - on_card() >= 256 * MIB
    for layer, tensor in enumerate(layers):
        fill(tensor, 10 + layer)
    backend.resume(["kv_cache"])
    fill(cache, 1)
    assert all(holds(tensor, 10 + layer) for layer, tensor in enumerate(layers)) and on_card() == awake
