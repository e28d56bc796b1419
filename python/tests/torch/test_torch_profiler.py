"""Memory events of torch.profiler."""

import json

import torch
from support import MIB, address, allocated, block
from torch.profiler import ProfilerActivity, profile


def memory_events(prof, tmp_path):
    path = tmp_path / "trace.json"
    prof.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    return [event["args"] for event in events if event.get("name") == "[memory]" and event["args"]["Device Type"] == 1]


def test_every_allocation_and_free_is_an_event(tmp_path):
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        kept = block(5 * MIB)
        at = address(kept)
        del kept
    events = [event for event in memory_events(prof, tmp_path) if event["Addr"] == at]
    assert [event["Bytes"] for event in events] == [5 * MIB, -5 * MIB]
    assert events[0]["Total Allocated"] == events[1]["Total Allocated"] + 5 * MIB
    assert events[0]["Total Reserved"] >= 5 * MIB
    assert [event["Device Id"] for event in events] == [0, 0]


def test_totals_of_events_are_the_statistics(tmp_path):
    kept = []
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        for size in (100, MIB, 7 * MIB):
            kept.append(block(size))
        del kept[1]
        end = allocated(), torch.cuda.memory_reserved()
    last = memory_events(prof, tmp_path)[-1]
    assert (last["Total Allocated"], last["Total Reserved"]) == end
    kept.clear()


def test_the_sum_for_each_operator_is_in_the_table():
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        kept = block(5 * MIB)
    rows = {row.key: row for row in prof.key_averages()}
    assert rows["aten::empty"].self_device_memory_usage == 5 * MIB
    del kept


def test_a_timeline_of_memory_is_built(tmp_path):
    from torch.cuda import _memory_viz as viz

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True, with_stack=True) as prof:
        kept = block(128 * 128 * 4)
        more = torch.empty_like(kept)
    assert viz.profile_plot(prof)
    text = json.dumps(viz._profile_to_snapshot(prof))
    assert "test_torch_profiler.py" in text
    assert "category" in text
    del kept, more
