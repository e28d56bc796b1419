"""CUDA tensors in other processes, with torch.multiprocessing and no change of the program."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import sharing
import torch
import torch.multiprocessing as multiprocessing
from sharing import Failed, Other, shared
from support import KIB, MIB, ON_CARD, VRAMP, block, run_script

vramp_only = pytest.mark.skipif(not VRAMP, reason="it is about vramp's counts")


@pytest.fixture(scope="module")
def lasting():
    """A process for tests that leave it as it was."""
    other = Other()
    yield other
    other.end()


@pytest.fixture
def other(lasting):
    lasting.call(sharing.drop)
    yield lasting
    lasting.call(sharing.drop)


@pytest.fixture
def own():
    """A process for one test, which may end."""
    other = Other()
    yield other
    other.process.kill()
    other.process.join()


@pytest.fixture(autouse=True)
def collected():
    """What was sent is freed once the receivers have freed it."""
    yield
    gc.collect()
    torch.cuda.ipc_collect()


def tensor(*numbers):
    return torch.tensor(numbers, dtype=torch.float32).cuda()


def test_a_tensor_is_the_same_memory_in_both_processes(other):
    sent = tensor(1, 2, 3)
    assert other.call(sharing.values, sent) == [1, 2, 3]
    other.call(sharing.keep, sent)
    sent.copy_(torch.tensor([4.0, 5, 6]))
    torch.cuda.synchronize()
    assert other.call(sharing.values_of_kept) == [[4, 5, 6]]
    other.call(sharing.write, sent, [7, 8, 9])
    assert sharing.values(sent) == [7, 8, 9]


def test_a_tensor_comes_back(other):
    received = other.call(sharing.make, [3, 4])
    assert sharing.values(received) == [3, 4]
    assert received.is_cuda and received.is_shared()


def test_a_large_tensor_of_many_handles_arrives_whole(other):
    sent = block(300 * MIB)
    sent[:4].copy_(torch.tensor([1, 2, 3, 4], dtype=torch.uint8))
    sent[-2:].copy_(torch.tensor([5, 6], dtype=torch.uint8))
    assert other.call(sharing.sums, [sent[:4], sent[-2:]]) == [10, 11]


def test_small_tensors_of_one_chunk_arrive_each_with_its_own_bytes(other):
    sent = [torch.full((17,), number, dtype=torch.int64).cuda() for number in range(200)]
    assert other.call(sharing.sums, sent) == [17 * number for number in range(200)]


def test_views_and_types_arrive_as_they_were(other):
    base = torch.arange(24, dtype=torch.float32).cuda()
    for view in (base[5:], base.view(4, 6).t(), base.view(2, 3, 4)[1], base[::2], base.view(torch.int32)):
        assert other.call(sharing.describe, view) == sharing.describe(view)
        assert other.call(sharing.values, view) == sharing.values(view)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.float16, torch.bfloat16, torch.int64, torch.complex64])
def test_every_kind_of_number_arrives(other, dtype):
    sent = torch.ones(9, dtype=dtype).cuda()
    assert other.call(sharing.describe, sent) == sharing.describe(sent)
    assert other.call(sharing.values, sent) == sharing.values(sent)


def test_tensors_of_one_storage_share_one_import(other):
    base = torch.arange(10, dtype=torch.float32).cuda()
    before = other.call(shared)
    other.call(sharing.keep, base, base[4:])
    other.call(sharing.keep, base[2:])
    first, second, third = other.call(sharing.kept_addresses)
    assert (second - first, third - first) == (16, 8)
    after = other.call(shared)
    assert after["opened"] - before["opened"] == (1 if VRAMP else 0)


def test_an_empty_tensor_arrives(other):
    assert other.call(sharing.describe, torch.empty(0, device="cuda"))[2] == (0,)


def test_a_tensor_sent_ten_thousand_times_is_published_once(own):
    sent = tensor(1, 2)
    before = shared()["published"]
    sums = 0
    for _ in range(100):
        sums += sum(own.call(sharing.sums, [sent] * 100))
    assert sums == 30_000
    assert shared()["published"] - before == (1 if VRAMP else 0)
    del sent
    gc.collect()
    torch.cuda.ipc_collect()
    assert shared()["published"] == before


def test_a_thousand_tensors_leave_nothing_behind_in_either_process(own):
    def cycle(number):
        sent = tensor(number, 1)
        assert own.call(sharing.sums, [sent]) == [number + 1]
        received = own.call(sharing.make, [number, 2])
        assert sharing.sums([received]) == [number + 2]

    for number in range(20):
        cycle(number)
    def held():
        return [dict(sharing.counts()), dict(own.call(sharing.counts))]

    def descriptors(of):
        return [counts.pop("descriptors") for counts in of]

    before = held()
    descriptors_before = descriptors(before)
    for number in range(1000):
        cycle(number)
    # Each process closes its side of a connection a moment after the other one.
    deadline = time.monotonic() + 20
    while True:
        after = held()
        more = [now > then for now, then in zip(descriptors(after), descriptors_before)]
        if (after == before and not any(more)) or time.monotonic() > deadline:
            break
    assert after == before
    assert not any(more)


def test_what_was_sent_is_freed_without_a_call(own):
    """Memory that receivers have freed is found by the next send, and by requests that need memory."""
    peak = 0
    for _ in range(200):
        sent = block(8 * MIB)
        own.call(sharing.addresses, sent)
        del sent
        peak = max(peak, torch.cuda.memory_allocated())
    assert peak <= 64 * MIB


def test_a_producer_may_free_its_tensor_right_after_it_was_sent(other):
    for number in range(50):
        sent = torch.full((70_000,), number, dtype=torch.int32).cuda()
        other.send(sharing.sums, [sent])
        del sent
        others = [torch.full((70_000,), -1, dtype=torch.int32).cuda() for _ in range(3)]
        assert other.answer() == [70_000 * number]
        del others


def test_two_consumers_have_one_block(own):
    second = Other()
    sent = tensor(1, 2, 3)
    own.call(sharing.keep, sent)
    second.call(sharing.keep, sent)
    own.call(sharing.write, sent, [5, 6, 7])
    assert second.call(sharing.values_of_kept) == [[5, 6, 7]]
    # A process that ends with tensors of others returns no count, without vramp neither.
    second.call(sharing.drop)
    second.end()
    assert own.call(sharing.values_of_kept) == [[5, 6, 7]]
    own.call(sharing.drop)


def test_a_received_tensor_is_sent_on_as_a_copy_alone(other):
    with pytest.raises(Failed, match="cloning before sending"):
        other.call(sharing.resend, tensor(1))


def test_the_block_outlives_the_producers_free_until_the_consumer_closes_it(other):
    sent = tensor(4, 5)
    other.call(sharing.keep, sent)
    before = torch.cuda.memory_allocated()
    del sent
    gc.collect()
    torch.cuda.ipc_collect()
    assert torch.cuda.memory_allocated() == before
    fill = [tensor(0, 0) for _ in range(100)]
    assert other.call(sharing.values_of_kept) == [[4, 5]]
    del fill
    other.call(sharing.drop)
    torch.cuda.ipc_collect()
    assert torch.cuda.memory_allocated() < before


def test_a_consumer_that_is_killed_disturbs_nothing_else():
    """PyTorch keeps what the consumer had, in a process of its own here: the count is not returned."""
    text = """
import os, signal, sharing
own, other = sharing.Other(), sharing.Other()
sent = torch.tensor([1.0, 2.0]).cuda()
own.call(sharing.keep, sent)
os.kill(own.process.pid, signal.SIGKILL)
own.process.join()
print(other.call(sharing.values, sent))
others = [torch.full((2,), 9.0).cuda() for _ in range(100)]
print(sharing.values(sent), torch.cuda.memory_allocated() // 512)
other.end()
del sent, others
print(sharing.counts()["allocated"] // 512)
"""
    done = run_script(text, PYTHONPATH=os.pathsep.join(sys.path))
    assert done.stdout == "[1.0, 2.0]\n[1.0, 2.0] 101\n1\n", (done.stdout, done.stderr)


@vramp_only
def test_a_consumer_keeps_its_memory_when_the_producer_is_killed(own):
    received = own.call(sharing.make, [6, 7, 8])
    os.kill(own.process.pid, signal.SIGKILL)
    own.process.join()
    assert sharing.values(received) == [6, 7, 8]
    before = shared()["opened"]
    del received
    gc.collect()
    assert shared()["opened"] == before - 1


@vramp_only
def test_memory_of_a_process_that_is_gone_is_an_error_at_once(own):
    rebuild, arguments = own.call(sharing.reduced, [1, 2])
    os.kill(own.process.pid, signal.SIGKILL)
    own.process.join()
    with pytest.raises(RuntimeError, match="vramp cannot open CUDA memory of another process"):
        rebuild(*arguments)


def test_a_tensor_sent_to_its_own_process_arrives(other):
    if not VRAMP:
        pytest.skip("CUDA refuses to open a process's own memory")
    rebuild, arguments = multiprocessing.reductions.reduce_tensor(tensor(3, 4))
    received = rebuild(*arguments)
    assert sharing.values(received) == [3, 4]
    # Its counter is returned as any receiver's.
    del received


def test_parameters_of_a_model_are_trained_by_another_process(other):
    model = torch.nn.Linear(4, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    model = model.cuda()
    other.call(sharing.add_to_parameters, model, 2.0)
    assert sharing.values(model.bias) == [3, 3]
    assert sharing.values(model.weight) == [[3] * 4] * 2


def test_gradients_and_leaves_arrive(other):
    parameter = torch.nn.Parameter(tensor(1, 2))
    assert other.call(sharing.gradient, parameter) == (True, None)
    parameter.grad = tensor(5, 6)
    assert other.call(sharing.values, parameter.grad) == [5, 6]
    leaf = tensor(1, 2).requires_grad_()
    assert other.call(sharing.describe, leaf)[5:7] == (True, True)
    whole = torch.nn.Parameter(torch.ones(3, dtype=torch.int32).cuda(), requires_grad=False)
    assert other.call(sharing.describe, whole)[0] == "Parameter"
    with pytest.raises(RuntimeError, match="non-leaf"):
        multiprocessing.reductions.reduce_tensor(leaf.view(2))


def test_events_are_shared_both_ways(other):
    event = torch.cuda.Event(enable_timing=False, interprocess=True)
    event.record()
    assert other.call(sharing.wait, event) == (True, "Event")
    handle = other.call(sharing.make_event)
    assert sharing.open_event(torch.device("cuda", 0), handle)


def test_a_receiver_waits_for_the_work_that_was_queued_before_the_send(other):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        sent = tensor(8, 9)
        assert other.call(sharing.values, sent) == [8, 9]


def test_tensors_of_a_memory_pool_arrive(other):
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        first, second = tensor(1, 2), tensor(3, 4)
    if not VRAMP:
        pytest.skip("PyTorch's segments differ")
    assert other.call(sharing.values, first) == [1, 2]
    assert other.call(sharing.values, second[1:]) == [4]
    other.call(sharing.keep, first, second)
    opened = other.call(shared)["opened"]
    other.call(sharing.drop)
    # One segment.
    assert other.call(shared)["opened"] == opened - 1
    del first, second


@pytest.mark.skipif(ON_CARD, reason="a card's copy from host memory cannot be captured like this")
def test_a_static_input_and_an_output_of_a_graph_arrive(other):
    static = tensor(1, 2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = static.clone()
    assert other.call(sharing.describe, static)[2] == (2,)
    assert other.call(sharing.describe, result)[2] == (2,)
    del result
    graph.reset()


@vramp_only
def test_memory_freed_during_a_capture_is_closed_after_it(other):
    sent = block(4 * MIB)
    other.call(sharing.keep, sent)
    before, inside, after = other.call(sharing.drop_in_capture)
    assert (inside, after) == (before, before - 1)


@vramp_only
def test_threads_send_and_receive_at_the_same_time():
    failures = []

    def send(number):
        try:
            for index in range(50):
                rebuild, arguments = multiprocessing.reductions.reduce_tensor(tensor(number, index))
                assert sharing.values(rebuild(*arguments)) == [number, index]
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=send, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@vramp_only
def test_a_process_without_vramp_refuses_a_handle_of_vramp():
    rebuild, arguments = multiprocessing.reductions.reduce_tensor(tensor(1))
    device, handle = arguments[6:8]
    text = f"""
import torch
torch.cuda.init()
try:
    torch.UntypedStorage._new_shared_cuda({device}, {handle!r}, 4, 0, b"", 0, b"", False)
except RuntimeError as error:
    print("refused:", str(error).splitlines()[0])
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("refused: "), (done.stdout, done.stderr)
    # Returns the count of the tensor.
    rebuild(*arguments)


@vramp_only
def test_a_preset_without_shareable_memory_is_an_error_with_its_remedy():
    text = """
torch.cuda.init()
try:
    torch.empty(1000, device="cuda").untyped_storage()._share_cuda_()
except RuntimeError as error:
    print(str(error).splitlines()[0])
"""
    line = run_script(text, VRAMP_CONF="sharing=none").stdout
    assert line.startswith("vramp cannot share CUDA memory with other processes: ") and "sharing" in line, line


@vramp_only
def test_the_route_without_a_compiler_refuses_to_share():
    text = """
import io, warnings
from multiprocessing.reduction import ForkingPickler
buffer = io.BytesIO()
sent = ForkingPickler.dumps(torch.empty(1000, device="cuda"))
try:
    ForkingPickler.loads(sent)
except Exception as error:
    print(type(error).__name__, error)
"""
    start = "import vramp.torch\nvramp.torch.enable('pluggable')\nimport torch\n"
    done = subprocess.run([sys.executable, "-c", start + text], capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("UnsupportedError") and "compiled route" in done.stdout, done.stderr


def test_a_chunk_is_shared_with_its_neighbours_and_they_stay_usable(other):
    neighbours = [block(4 * KIB) for _ in range(100)]
    other.call(sharing.keep, neighbours[50])
    del neighbours
    gc.collect()
    more = [block(4 * KIB) for _ in range(100)]
    assert len({item.data_ptr() for item in more}) == 100
    del more


@vramp_only
def test_a_handle_of_an_address_is_a_chunk_and_of_a_comm_pool_the_segment():
    """What `cuMemRetainAllocationHandle` returns for the first and the last byte of a tensor."""
    text = """
import ctypes
import vramp.torch
driver = ctypes.CDLL("libcuda.so.1")
def handle_at(address):
    handle = ctypes.c_uint64()
    assert driver.cuMemRetainAllocationHandle(ctypes.byref(handle), ctypes.c_void_p(address)) == 0
    assert driver.cuMemRelease(handle) == 0
    return handle.value
def has_one(tensor):
    return handle_at(tensor.data_ptr()) == handle_at(tensor.data_ptr() + tensor.numel() - 1)
ordinary = torch.empty(100 << 20, dtype=torch.uint8, device="cuda")
pool = vramp.torch.comm_pool()
with torch.cuda.use_mem_pool(pool):
    shared = torch.empty(100 << 20, dtype=torch.uint8, device="cuda")
print(has_one(ordinary), has_one(shared))
"""
    assert run_script(text).stdout.split() == ["False", "True"]
