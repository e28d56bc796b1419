"""Recordings of several devices: generated snapshots of PyTorch, and those of this process's own devices."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from conftest import MIB, run_python

import vramp


def event(action: str, addr: int, mib: int) -> dict[str, Any]:
    return {
        "action": action,
        "addr": addr << 20,
        "size": mib * MIB,
        "stream": 0,
        "time_us": 0,
        "frames": [],
    }


def job(number: int) -> list[dict[str, Any]]:
    """Peaks at 20 MiB, and 10 MiB more for each number."""
    return [
        event("segment_alloc", 1000, 100),
        event("alloc", 1000, 10 * number + 10),
        event("alloc", 1099, 10),
        event("free_requested", 1000, 10 * number + 10),
        event("free_completed", 1000, 10 * number + 10),
    ]


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """Devices 0, 2 and 5 of eight have events; those of device 5 refer to nothing that was allocated."""
    traces: list[list[dict[str, Any]]] = [[] for _ in range(8)]
    traces[0], traces[2] = job(0), job(2)
    traces[5] = [event("free_requested", 9, 3), event("free_completed", 9, 3)]
    path = tmp_path / "several.pickle"
    with path.open("wb") as file:
        pickle.dump({"device_traces": traces, "segments": [], "allocator_settings": {}}, file)
    return path


def test_each_device_has_its_own_results_and_the_totals_are_sums(snapshot: Path) -> None:
    found = vramp.replay(snapshot, ["vramp", "torch"], device="sim")
    order = [(replay.trace_device, replay.allocator) for replay in found]
    assert order == [(device, name) for device in (0, 2, 5) for name in ("vramp", "torch")]
    # A block that the first event frees was allocated before the recording.
    assert [replay.peak_live_bytes for replay in found[::2]] == [20 * MIB, 40 * MIB, 0]
    assert [sum(replay.repairs.values()) for replay in found[::2]] == [0, 0, 1]
    totals = vramp.replay_totals(found)
    assert [total.allocator for total in totals] == ["vramp", "torch"]
    for total, replays in zip(totals, (found[::2], found[1::2]), strict=True):
        assert total.trace_devices == (0, 2, 5) and total.fits
        assert total.events == 12
        assert total.sum_of_peak_live_bytes == 60 * MIB
        assert total.sum_of_recorded_peak_bytes is None, "that of device 5 is not known"
        assert total.sum_of_peak_reserved_bytes == sum(it.peak_reserved_bytes for it in replays)
        assert total.driver_calls == sum(it.driver_calls for it in replays)
    known = vramp.replay_totals(vramp.replay(snapshot, "torch", trace_device=[0, 2]))
    assert known[0].sum_of_recorded_peak_bytes == 200 * MIB
    (tight,) = vramp.replay_totals(vramp.replay(snapshot, "vramp", limit="30MiB", device="sim"))
    assert tight.oom_on_trace_devices == (2,) and not tight.fits
    assert vramp.replay_totals([]) == []


def test_devices_are_selected_by_their_recorded_number(snapshot: Path) -> None:
    assert [it.trace_device for it in vramp.replay(snapshot, "vramp", trace_device=2)] == [2]
    found = vramp.explain(snapshot, fits=False, trace_device=[5, 0])
    assert [it.trace_device for it in found] == [0, 5]
    assert [it.trace_device for it in vramp.advise(snapshot, trace_device=(2,))] == [2]
    for wrong in (1, 7, 8, -1, 1 << 20, [], [0, 1]):
        with pytest.raises(vramp.RangeError, match="trace_device"):
            vramp.replay(snapshot, "vramp", trace_device=wrong)
    with pytest.raises(vramp.RangeError, match="it has devices 0, 2, 5"):
        vramp.explain(snapshot, trace_device=1)


def test_a_moment_is_that_of_the_devices_that_have_its_event(snapshot: Path) -> None:
    found = vramp.explain(snapshot, fits=False, at=3)
    assert [it.at is not None for it in found] == [True, True, False]
    with pytest.raises(vramp.RangeError, match="which has 5 events"):
        vramp.explain(snapshot, fits=False, at=5)


def test_one_snapshot_has_every_device_of_the_process(tmp_path: Path) -> None:
    path = tmp_path / "process.pickle"
    code = f"""
import json, pickle, vramp
early = vramp.pool(1)
vramp.record_history(1000)
kept = [early.malloc(3 << 20), vramp.pool(4).malloc(5 << 20)]
vramp.pool(4).malloc(7 << 20).free()
vramp.snapshot({str(path)!r})
early.snapshot({str(path)!r} + ".one")
found = [pickle.load(open({str(path)!r} + end, "rb")) for end in ("", ".one")]
print(json.dumps([
    [sum(event["action"] == "alloc" for event in trace) for trace in one["device_traces"]]
    + [sorted({{segment["device"] for segment in one["segments"]}})] for one in found
]))
replays = vramp.replay({str(path)!r}, "vramp")
print(json.dumps([[it.trace_device, it.peak_live_bytes] for it in replays]))
vramp.record_history(0)
"""
    ended = run_python(code)
    assert ended.returncode == 0, ended.stderr
    counts, replays = (json.loads(line) for line in ended.stdout.splitlines())
    assert counts == [[0, 1, 0, 0, 2, [1, 4]], [0, 1, [1]]]
    assert replays == [[1, 3 * MIB], [4, 12 * MIB]]


def test_wrong_arguments_of_the_process_wide_calls_are_typed_errors(tmp_path: Path) -> None:
    for events in (-1, 1 << 40, 10_000_001):
        with pytest.raises(vramp.RangeError):
            vramp.record_history(events)
    with pytest.raises(vramp.FileError):
        vramp.snapshot(tmp_path / "missing" / "a.pickle")
