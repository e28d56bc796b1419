"""Several cards in one process: copies, access, and streams of other devices. On the fake runtime a copy needs the
access that it needs on a card."""

import pytest
from support import ON_CARD, VRAMP, run_script

pytestmark = pytest.mark.skipif(ON_CARD, reason="calls are counted by the fake runtime")

START = """
import ctypes, gc, os
name = next(path for path in os.environ["LD_PRELOAD"].split(":") if "libcudart" in path)
runtime = ctypes.CDLL(name)
for function in ("set_access", "maps", "unmaps", "mapped", "peer_copies", "direct_copies", "events", "used", "mallocs"):
    getattr(runtime, "fake_cuda_" + function).restype = ctypes.c_size_t
torch.cuda.init()

def may_access(device, tensor):
    size = tensor.untyped_storage().nbytes()
    return bool(runtime.fake_cuda_may_access(device, ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(size)))

def copies():
    return runtime.fake_cuda_direct_copies(), runtime.fake_cuda_peer_copies()

def on(device, *numbers):
    return torch.tensor(numbers, dtype=torch.float32).to(f"cuda:{device}")
"""


def run(text, **environment):
    environment = {"FAKE_CUDA_DEVICES": "2", **environment}
    return run_script(START + text, **environment).stdout.splitlines()


def test_copies_between_cards_arrive_both_ways():
    text = """
first = on(0, 1, 2, 3)
second = first.to("cuda:1")
print(second.cpu().tolist(), second.to("cuda:0").cpu().tolist())
large = torch.arange(20_000_000, dtype=torch.int32).to("cuda:1")
back = torch.empty_like(large, device="cuda:0")
back.copy_(large, non_blocking=True)
torch.cuda.synchronize()
print(torch.equal(back.cpu(), large.cpu()))
print(copies())
"""
    assert run(text) == ["[1.0, 2.0, 3.0] [1.0, 2.0, 3.0]", "True", "(3, 0)"]


@pytest.mark.skipif(not VRAMP, reason="PyTorch maps nothing here")
def test_access_is_granted_when_a_copy_asks_and_not_before():
    text = """
kept = [on(device, 1, 2) for device in (0, 1)]
print(may_access(1, kept[0]), may_access(0, kept[1]))
before = runtime.fake_cuda_set_access()
torch.empty(200 << 20, dtype=torch.uint8, device="cuda:0")
grown = runtime.fake_cuda_set_access() - before
kept[1].copy_(kept[0])
# The source's card makes the copy.
print(may_access(1, kept[0]), may_access(0, kept[1]))
before = runtime.fake_cuda_set_access()
kept[1].copy_(kept[0])
print(runtime.fake_cuda_set_access() - before)
later = torch.empty(100 << 20, dtype=torch.uint8, device="cuda:1")
print(may_access(0, later))
kept[0].copy_(kept[1])
print(may_access(1, kept[0]), kept[0].cpu().tolist())
"""
    assert run(text) == ["False False", "False True", "0", "True", "True [1.0, 2.0]"]


@pytest.mark.skipif(not VRAMP, reason="it is about the option peers")
def test_without_peers_a_copy_is_an_error_each_time_and_the_process_goes_on():
    text = """
first, second = on(0, 1, 2), on(1, 3, 4)
for _ in range(2):
    try:
        second.copy_(first)
    except RuntimeError as error:
        print(str(error).splitlines()[0])
print(second.cpu().tolist(), may_access(0, second))
"""
    refused = "vramp cannot give device 0 access to memory of device 1: the setting `peers` excludes device 0"
    lines = run(text, VRAMP_CONF="peers=none")
    assert [line.startswith(refused) for line in lines] == [True, True, False], lines
    assert lines[2] == "[3.0, 4.0] False"


def test_cards_without_a_link_copy_through_the_driver():
    text = """
first = on(0, 1, 2)
print(first.to("cuda:1").cpu().tolist(), copies())
"""
    lines = run(text, FAKE_CUDA_LINKS="0")
    assert lines[0].startswith("[1.0, 2.0]") and (not VRAMP or lines[0].endswith("(0, 1)")), lines


def test_memory_of_pools_is_accessible_to_peers():
    text = """
pool = torch.cuda.MemPool()
with torch.cuda.device(1), torch.cuda.use_mem_pool(pool):
    inside = torch.tensor([1.0, 2.0]).to("cuda:1")
print(inside.to("cuda:0").cpu().tolist())
inside.copy_(on(0, 5, 6))
print(inside.cpu().tolist())
"""
    assert run(text) == ["[1.0, 2.0]", "[5.0, 6.0]"]


def test_a_block_waits_for_a_stream_of_another_card():
    """A block that another card's stream uses is not reused before that work is over, and without an error."""
    text = """
size = 4 << 20
used = torch.empty(size, dtype=torch.uint8, device="cuda:0")
address = used.data_ptr()
other = torch.cuda.Stream(device="cuda:1")
runtime.fake_cuda_hold(ctypes.c_void_p(other.cuda_stream))
with torch.cuda.stream(other):
    elsewhere = torch.empty(1 << 20, dtype=torch.uint8, device="cuda:1")
    elsewhere.zero_()
used.record_stream(other)
del used
blocks = [torch.empty(size, dtype=torch.uint8, device="cuda:0") for _ in range(3)]
print(any(block.data_ptr() <= address < block.data_ptr() + size for block in blocks))
runtime.fake_cuda_release(ctypes.c_void_p(other.cuda_stream))
torch.cuda.synchronize(0), torch.cuda.synchronize(1)
del blocks
print(torch.cuda.memory_allocated(0))
torch.cuda.empty_cache()
print(torch.cuda.memory_reserved(0))
"""
    assert run(text) == ["False", "0", "0"]


@pytest.mark.skipif(not VRAMP, reason="PyTorch takes it for the default stream of the tensor's own card")
def test_a_block_waits_for_the_default_stream_of_another_card():
    text = """
size = 4 << 20
used = torch.empty(size, dtype=torch.uint8, device="cuda:0")
address = used.data_ptr()
with torch.cuda.device(1):
    runtime.fake_cuda_hold(ctypes.c_void_p(0))
    torch.empty(1 << 20, dtype=torch.uint8, device="cuda:1").zero_()
    used.record_stream(torch.cuda.current_stream(1))
del used
blocks = [torch.empty(size, dtype=torch.uint8, device="cuda:0") for _ in range(3)]
print(any(block.data_ptr() <= address < block.data_ptr() + size for block in blocks))
with torch.cuda.device(1):
    runtime.fake_cuda_release(ctypes.c_void_p(0))
del blocks
torch.cuda.synchronize(0), torch.cuda.synchronize(1)
torch.cuda.empty_cache()
print(torch.cuda.memory_reserved(0))
"""
    assert run(text) == ["False", "0"]


def test_a_thousand_uses_by_another_card_leave_nothing_behind():
    text = """
other = torch.cuda.Stream(device="cuda:1")
def cycle():
    used = torch.empty(1 << 20, dtype=torch.uint8, device="cuda:0")
    used.record_stream(other)
for _ in range(10):
    cycle()
torch.cuda.synchronize(0)
before = torch.cuda.memory_reserved(0), runtime.fake_cuda_events()
for _ in range(1000):
    cycle()
torch.cuda.synchronize(0)
after = torch.cuda.memory_reserved(0), runtime.fake_cuda_events()
print(after[0] == before[0], after[1] - before[1] <= 4, torch.cuda.memory_allocated(0))
"""
    assert run(text) == ["True True 0"]


def test_memory_is_freed_on_its_own_card_whichever_is_current():
    text = """
import threading
kept = [torch.empty(32 << 20, dtype=torch.uint8, device="cuda:0") for _ in range(4)]
with torch.cuda.device(1):
    kept.clear()
    torch.empty(32 << 20, dtype=torch.uint8, device="cuda:1")
print([torch.cuda.memory_allocated(device) for device in (0, 1)])
failures = []
def work(number):
    try:
        for index in range(200):
            with torch.cuda.device((number + index) % 2):
                here = torch.empty((index % 7 + 1) << 18, dtype=torch.uint8, device="cuda")
                there = torch.empty((index % 5 + 1) << 18, dtype=torch.uint8, device=f"cuda:{(number + index + 1) % 2}")
                assert here.device != there.device
                del here
            del there
    except Exception as error:
        failures.append(error)
threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(failures, [torch.cuda.memory_allocated(device) for device in (0, 1)])
"""
    assert run(text) == ["[0, 0]", "[] [0, 0]"]


def test_limits_statistics_and_snapshots_are_of_each_card():
    text = """
torch.cuda.set_per_process_memory_fraction(0.001, 0)
kept = torch.empty(300 << 20, dtype=torch.uint8, device="cuda:1")
try:
    torch.empty(300 << 20, dtype=torch.uint8, device="cuda:0")
except torch.OutOfMemoryError:
    print("refused")
print(torch.cuda.memory_allocated(0), torch.cuda.memory_allocated(1) >> 20)
small = torch.empty(10 << 20, dtype=torch.uint8, device="cuda:0")
print(sorted({segment["device"] for segment in torch.cuda.memory_snapshot()}))
"""
    assert run(text) == ["refused", "0 300", "[0, 1]"]


def test_visible_devices_renumber_cards():
    text = """
kept = torch.empty(30 << 20, dtype=torch.uint8, device="cuda:0")
print(torch.cuda.device_count(), torch.cuda.memory_reserved(0) >= 30 << 20)
"""
    assert run(text, CUDA_VISIBLE_DEVICES="1") == ["1 True"]


PINS = """
def capture():
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.empty(1 << 20, dtype=torch.uint8, device="cuda").zero_()
    return graph

def churn(cycles):
    kept = []
    for number in range(cycles):
        kept.append(torch.empty((number % 37 + 1) << 19, dtype=torch.uint8, device="cuda"))
        if len(kept) > 6:
            kept.pop(number % 6)
        if number % 50 == 0:
            torch.cuda.empty_cache()

def is_mapped(address):
    return bool(runtime.fake_cuda_may_access(0, ctypes.c_void_p(address), ctypes.c_size_t(1)))

static = [torch.empty((number + 1) << 20, dtype=torch.uint8, device="cuda") for number in range(12)]
addresses = [tensor.data_ptr() for tensor in static]
graph = capture()
runtime.fake_cuda_watch.restype = ctypes.c_size_t
for tensor in static:
    runtime.fake_cuda_watch(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes))
del tensor
static.clear()
torch.cuda.empty_cache()
churn(1000)
print(all(map(is_mapped, addresses)), runtime.fake_cuda_watch(None, ctypes.c_size_t(0)))
graph.reset()
del graph
gc.collect()
torch.cuda.synchronize()
torch.cuda.empty_cache()
print(any(map(is_mapped, addresses)), torch.cuda.memory_reserved())
"""


@pytest.mark.skipif(not VRAMP, reason="PyTorch frees whole segments")
def test_memory_of_a_captured_graph_is_neither_unmapped_nor_moved_before_the_graph_is_destroyed():
    """`watch` counts the calls of cuMemUnmap that touch what was live at the capture, over 1,000 cycles."""
    assert run(PINS, VRAMP_CONF="graph_pins=on") == ["True 0", "False 0"]
    # The test sees what happens without.
    mapped, calls = run(PINS, VRAMP_CONF="graph_pins=off")[0].split()
    assert mapped == "False" and int(calls) > 0
    assert run(PINS)[0].split()[0] == "False", "one process alone pins nothing"


@pytest.mark.skipif(not VRAMP, reason="it is about vramp's option")
def test_graphs_pin_by_themselves_in_a_group_of_several():
    text = """
import sys, types
group = types.SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True, get_world_size=lambda: 2)
sys.modules["torch.distributed"] = group
"""
    assert run(text + PINS) == ["True 0", "False 0"]


REGIONS = """
import sys, types, vramp
group = types.SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True, get_world_size=lambda: 2)
sys.modules["torch.distributed"] = group

tensors = {}
for tag, pins in (("weights", False), ("gradients", True)):
    with vramp.region(tag, graph_pins=pins):
        tensors[tag] = torch.full((20 << 20,), 7, dtype=torch.uint8).cuda()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    copied = torch.empty(20 << 20, dtype=torch.uint8, device="cuda")
    copied.copy_(tensors["weights"])
vramp.pause("weights")
try:
    vramp.pause("gradients")
except vramp.RegionError as error:
    print("pinned" in str(error))
print([(each.tag, each.phase, each.graph_pins) for each in vramp.status()])
vramp.resume("weights")
graph.replay()
print(int(copied[0]), int(copied[-1]))
graph.reset()
del graph, copied
gc.collect()
torch.cuda.synchronize()
torch.cuda.empty_cache()
vramp.pause("gradients")
"""


@pytest.mark.skipif(not VRAMP, reason="PyTorch's own allocator has no regions")
def test_graphs_keep_a_region_awake_unless_it_has_no_pins():
    states = [("gradients", "awake", True), ("weights", "asleep", False)]
    assert run(REGIONS) == ["True", str(states), "7 7"]


IPC = """
def handle_of(tensor):
    start = next(s["address"] for s in torch.cuda.memory_snapshot() if s["address"] <= tensor.data_ptr() < s["address"] + s["total_size"])
    return runtime.cudaIpcGetMemHandle((ctypes.c_char * 64)(), ctypes.c_void_p(start))

graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    inside = torch.empty(20 << 20, dtype=torch.uint8, device="cuda")
    inside.fill_(1)
print(handle_of(inside), torch.cuda.memory_reserved() >> 20)
graph.replay()
torch.cuda.synchronize()
print(int(inside[-1]))
del inside
graph.reset()
del graph
gc.collect()
torch.cuda.empty_cache()
print(torch.cuda.memory_reserved())
"""


@pytest.mark.skipif(not VRAMP, reason="it is about vramp's option")
def test_memory_of_graphs_has_an_ipc_handle_where_it_was_asked_for_and_in_a_group_of_several():
    group = """
import sys, types
group = types.SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True, get_world_size=lambda: 2)
sys.modules["torch.distributed"] = group
"""
    assert run(IPC, VRAMP_CONF="ipc=legacy") == ["0 20", "1", "0"]
    assert run(group + IPC) == ["0 20", "1", "0"]
    # cudaErrorInvalidValue, as on a card.
    assert run(IPC) == ["1 20", "1", "0"], "one process alone"
    assert run(group + IPC, VRAMP_CONF="ipc=off") == ["1 20", "1", "0"]


@pytest.mark.skipif(not VRAMP, reason="it is vramp's function")
def test_a_comm_pool_has_one_handle_for_each_segment_and_never_moves_it():
    text = """
pool = vramp.torch.comm_pool()
before = runtime.fake_cuda_mallocs(0)
with torch.cuda.use_mem_pool(pool):
    registered = torch.empty(100 << 20, dtype=torch.uint8, device="cuda:0")
print(runtime.fake_cuda_mallocs(0) - before, torch.cuda.memory_reserved(0) >> 20, may_access(1, registered))
torch.empty(1, device="cuda:1").copy_(registered[:4].view(torch.float32))
registered[:4].view(torch.float32).copy_(torch.empty(1, device="cuda:1"))
print(may_access(1, registered))
address = registered.data_ptr()
kept = [torch.empty(300 << 20, dtype=torch.uint8, device="cuda:0") for _ in range(4)]
del kept[::2]
torch.cuda.empty_cache()
print(registered.data_ptr() == address, len([s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == tuple(pool.id)]))
handle = registered.untyped_storage()._share_cuda_()[1]
print(handle.startswith(b"vramp/1:"))
del registered, pool
gc.collect()
"""
    assert run(text, FAKE_CUDA_MEMORY=str(8 << 30)) == ["1 100 False", "True", "True 1", "True"]


@pytest.mark.skipif(not VRAMP, reason="CUDA refuses to open a process's own memory")
def test_access_holds_for_memory_of_other_processes_before_and_after_it_is_granted():
    text = """
from torch.multiprocessing.reductions import reduce_tensor
def received(*numbers):
    kept.append(on(0, *numbers))
    rebuild, arguments = reduce_tensor(kept[-1])
    return rebuild(*arguments)
kept = []
before = received(1, 2)
print(may_access(1, before))
before.copy_(on(1, 3, 4))
after = received(5, 6)
after.copy_(on(1, 7, 8))
print(may_access(1, before), may_access(1, after), before.cpu().tolist(), after.cpu().tolist())
del before, after
"""
    assert run(text) == ["False", "True True [3.0, 4.0] [7.0, 8.0]"]
