"""PyTorch's history of memory, its snapshots, and the viewer's functions on them."""

import gc
import json
import pickle
import random

import pytest
import torch
from support import EXPANDABLE, MIB, VRAMP, address, block, has_address, segments, tidy
from torch.cuda import _memory_viz as viz

SEGMENT_KEYS = {
    "device", "address", "total_size", "allocated_size", "active_size", "requested_size", "stream", "segment_type",
    "segment_pool_id", "is_expandable", "frames", "blocks",
}  # fmt: skip
BLOCK_KEYS = {"address", "size", "requested_size", "state", "frames"}
ACTIONS = {
    "alloc", "free_requested", "free_completed", "oom", "snapshot", "segment_alloc", "segment_free", "segment_map",
    "segment_unmap", "workspace_snapshot",
}  # fmt: skip


def record(*args, **kwargs):
    torch.cuda.memory._record_memory_history(*args, **kwargs)


def trace():
    return torch.cuda.memory._snapshot()["device_traces"][0]


def actions():
    return [event["action"] for event in trace()]


def test_a_snapshot_has_pytorchs_keys():
    record()
    kept = block(3 * MIB)
    snapshot = torch.cuda.memory._snapshot()
    assert {"segments", "device_traces", "allocator_settings", "external_annotations"} <= set(snapshot)
    for segment in snapshot["segments"]:
        assert SEGMENT_KEYS <= set(segment)
        assert segment["segment_type"] in ("small", "large")
        assert all(BLOCK_KEYS <= set(part) for part in segment["blocks"])
    for event in snapshot["device_traces"][0]:
        assert {"action", "size", "stream", "frames", "time_us"} <= set(event)
        assert "device_free" in event if event["action"] == "oom" else "addr" in event
        assert event["action"] in ACTIONS
    for key in ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size", "expandable_segments", "garbage_collection_threshold"):
        assert key in snapshot["allocator_settings"]
    del kept


def test_a_snapshot_has_the_stack_of_each_block():
    record("state", stacks="python")
    unused, kept = block(310 * 410 * 4), block(311 * 411 * 4)
    small = [block(512) for _ in range(1000)]
    draw = random.Random(1)
    while small:
        small.pop(draw.randrange(len(small)))
    block(512 * 5)
    found = [
        part
        for segment in segments()
        for part in segment["blocks"]
        if part["requested_size"] == 311 * 411 * 4
    ]
    assert len(found) == 1
    assert found[0]["address"] == address(kept)
    assert any("test_torch_history.py" in frame["filename"] for frame in found[0]["frames"])
    del unused, kept
    torch.cuda.empty_cache()
    assert actions()[-1] in ("segment_free", "segment_unmap")


def test_frames_of_cpp_are_there_when_asked_for():
    record("state", stacks="all")
    kept = block(311 * 411)
    frames = str([part["frames"] for segment in segments() for part in segment["blocks"]])
    assert "at::" in frames or "torch::" in frames
    del kept


@pytest.mark.parametrize("context", ["alloc", "all", "state", None])
def test_stacks_are_recorded_for_what_was_asked(context):
    record(context=context, stacks="python")
    kept = []

    def the_allocation():
        kept.append(block(100))

    def the_free():
        kept.clear()

    the_allocation()
    while_alive = json.dumps(torch.cuda.memory._snapshot()["segments"])
    the_free()
    text = json.dumps(torch.cuda.memory._snapshot()["device_traces"])
    assert ("the_allocation" in while_alive) == (context is not None)
    assert ("the_allocation" in text) == (context in ("alloc", "all"))
    assert ("the_free" in text) == (context == "all")


@pytest.mark.parametrize("context", ["alloc", "all", "state"])
def test_the_stack_of_an_emptied_cache_is_recorded_for_all_alone(context):
    tidy()
    record(context=context)
    block(100)
    torch.cuda.memory.empty_cache()
    assert ("empty_cache" in json.dumps(torch.cuda.memory._snapshot())) == (context == "all")


@pytest.mark.parametrize("enabled, least, most", [("all", 20, 40), ("state", 0, 1), (None, 0, 0)])
def test_events_are_recorded_in_the_mode_for_all_events(enabled, least, most):
    record(enabled, clear_history=True)
    for _ in range(10):
        block(100)
    assert least <= len(trace()) <= most


def test_recording_can_be_changed_while_it_runs():
    def recorded_once():
        return block(200)

    def not_recorded():
        return block(300)

    def recorded_again():
        return block(400)

    record(context="all", stacks="python")
    first = recorded_once()
    record(context=None)
    second = not_recorded()
    record(context="all", stacks="python")
    third = recorded_again()
    text = json.dumps(torch.cuda.memory._snapshot())
    assert "recorded_once" in text and "recorded_again" in text
    assert "not_recorded" not in text.replace("test_recording", "")
    del first, second, third


def test_each_tensor_is_an_allocation_and_two_events_of_its_free():
    torch.cuda.empty_cache()
    record(max_entries=10_000, clear_history=True)
    kept = block(5 * MIB)
    at = address(kept)
    del kept
    events = [(event["action"], event["size"]) for event in trace() if event["addr"] == at and "segment" not in event["action"]]
    assert events == [("alloc", 5 * MIB), ("free_requested", 5 * MIB), ("free_completed", 5 * MIB)]
    times = [event["time_us"] for event in trace()]
    assert times == sorted(times)


def test_the_oldest_events_go_when_the_history_is_full():
    record(max_entries=10, clear_history=True)
    for size in range(1, 101):
        block(size * 512)
    events = trace()
    assert len(events) == 10
    assert events[-1]["action"] == "free_completed" and events[-1]["size"] == 100 * 512
    assert min(event["size"] for event in events) >= 96 * 512


def test_a_history_can_be_cleared_and_goes_on():
    record()
    block(100)
    assert trace()
    record(clear_history=True)
    assert trace() == []
    block(100)
    assert "alloc" in actions()


def test_a_stopped_history_records_nothing_more():
    record()
    block(100)
    record(None)
    count = len(trace())
    block(100)
    assert len(trace()) in (0, count)


@pytest.mark.parametrize("skipped", [["free_requested"], ["free_requested", "free_completed"], ["alloc"], [], None])
def test_actions_can_be_left_out(skipped):
    torch.cuda.empty_cache()
    record(context="all", stacks="python", skip_actions=skipped, clear_history=True)
    block(5 * MIB)
    found = set(actions())
    assert found
    assert not found & set(skipped or [])
    assert {"alloc", "free_requested", "free_completed"} - set(skipped or []) <= found
    record(None)
    record(skip_actions=[])


def test_metadata_of_the_user_is_in_every_event():
    record(clear_history=True)
    torch.cuda.memory._set_memory_metadata("step 1")
    assert torch.cuda.memory._get_memory_metadata() == "step 1"
    block(5 * MIB)
    torch.cuda.memory.empty_cache()
    torch.cuda.memory._set_memory_metadata("")
    assert {event["user_metadata"] for event in trace()} == {"step 1"}


def test_running_out_is_an_event_with_what_was_free():
    record(clear_history=True)
    with pytest.raises(torch.OutOfMemoryError):
        block(1 << 50)
    event = next(event for event in trace() if event["action"] == "oom")
    assert event["size"] == 1 << 50
    assert 0 <= event["device_free"] <= torch.cuda.get_device_properties(0).total_memory


def test_replaying_the_history_gives_the_snapshots_blocks():
    tidy()
    record(max_entries=1_000_000, clear_history=True)
    draw, kept = random.Random(3), []
    for _ in range(500):
        if kept and draw.random() < 0.5:
            kept.pop(draw.randrange(len(kept)))
        else:
            kept.append(block(draw.randrange(1, 4 * MIB)))
    snapshot = torch.cuda.memory._snapshot()
    live = {}
    for event in snapshot["device_traces"][0]:
        if event["action"] == "alloc":
            assert event["addr"] not in live
            live[event["addr"]] = event["size"]
        elif event["action"] == "free_completed":
            assert event["addr"] in live
            del live[event["addr"]]
    blocks = {
        part["address"]: part["requested_size"]
        for segment in snapshot["segments"]
        for part in segment["blocks"]
        if part["state"] == "active_allocated"
    }
    assert set(live) == set(blocks)
    assert set(live) == {address(tensor) for tensor in kept}
    kept.clear()


def test_events_of_segments_add_up_to_what_is_reserved():
    tidy()
    start = torch.cuda.memory_reserved()
    record(max_entries=1_000_000, clear_history=True)
    kept = [block(size * MIB) for size in (1, 3, 20, 70)]
    del kept[1::2]
    torch.cuda.empty_cache()
    sign = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
    change = sum(sign.get(event["action"], 0) * event["size"] for event in trace())
    assert torch.cuda.memory_reserved() == start + change
    del kept


def test_a_dumped_snapshot_is_what_the_viewers_read(tmp_path):
    record()
    kept = [block(3 * MIB), block(100)]
    path = tmp_path / "snapshot.pickle"
    torch.cuda.memory._dump_snapshot(str(path))
    snapshot = pickle.loads(path.read_bytes())
    assert "test_torch_history.py" in json.dumps(snapshot)
    assert viz.segsum(snapshot) and viz.trace(snapshot)
    # The picture itself is drawn by a program that the viewer downloads.
    assert viz.memory(snapshot, format_flamegraph=str) and viz.segments(snapshot, format_flamegraph=str)
    for plot in (viz.trace_plot(snapshot), viz.trace_plot(snapshot, filter_freed=True), viz.segment_plot(snapshot)):
        assert "<html>" in plot or "<!DOCTYPE" in plot
    kept.append(block(90 * MIB))
    after = torch.cuda.memory._snapshot()
    kept.clear()
    assert viz.compare(snapshot["segments"], after["segments"], format_flamegraph=str)


def test_a_view_keeps_its_block_and_the_snapshot_shows_the_blocks_start():
    kept = block(4 * MIB)[MIB:]
    assert kept.data_ptr() == address(kept) + MIB
    assert has_address(kept) == ["active_allocated"]
    del kept


def test_a_cycle_of_tensors_is_in_the_history_when_it_is_collected():
    record(clear_history=True)

    class Node:
        pass

    node = Node()
    node.own, node.kept = node, block(7 * MIB)
    at = address(node.kept)
    del node
    assert not any(event["action"] == "free_completed" and event["addr"] == at for event in trace())
    gc.collect()
    assert any(event["action"] == "free_completed" and event["addr"] == at for event in trace())


def test_snapshots_without_traces_have_the_same_segments():
    record()
    kept = block(3 * MIB)
    without = torch.cuda.memory_snapshot(include_traces=False)
    assert [segment["address"] for segment in without] == [segment["address"] for segment in segments()]
    del kept


def test_expandable_segments_are_marked():
    kept = block(30 * MIB)
    marks = {segment["is_expandable"] for segment in segments() if segment["active_size"]}
    if not VRAMP:
        assert marks == {EXPANDABLE}
    assert marks <= {True, False}
    del kept


def test_frames_of_a_free_name_the_line(tmp_path):
    record(context="all", stacks="python", clear_history=True)
    kept = block(9 * MIB)
    del kept
    event = next(event for event in trace() if event["action"] == "free_requested" and event["size"] == 9 * MIB)
    assert any(frame["name"] == "test_frames_of_a_free_name_the_line" for frame in event["frames"])
