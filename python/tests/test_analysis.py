"""Replays and explanations of the recordings in `examples/traces`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from conftest import GIB

import vramp

TRACES = Path(__file__).parents[2] / "examples" / "traces"
OOM = TRACES / "llama_varlen_oom.pickle.gz"


def test_a_recording_is_replayed_on_every_allocator() -> None:
    names = ["vramp", "torch", "torch-expandable", "vpmm", "stream-ordered"]
    found = vramp.replay(TRACES / "gnn.pickle.gz", names)
    assert [replay.allocator for replay in found] == names
    for replay in found:
        assert replay.fits and replay.oom is None
        assert replay.peak_reserved_bytes >= replay.peak_live_bytes > 0
        assert replay.driver_calls == sum(call.count for call in replay.calls.values())
    with pytest.raises(dataclasses.FrozenInstanceError):
        found[0].hits = 1  # type: ignore[misc]


def test_a_limit_that_is_too_small_is_a_result() -> None:
    (replay,) = vramp.replay(TRACES / "gnn.pickle.gz", "vramp", limit="10MiB", device="sim:h200")
    assert not replay.fits
    assert replay.oom is not None and "limit of 10.00 MiB" in replay.oom


def test_a_failure_is_explained() -> None:
    (explanation,) = vramp.explain(OOM, fits=False)
    assert explanation.failure is not None
    assert explanation.verdict.cause in ("demand", "growth", "fragmentation", "limit")
    assert explanation.verdict.headline
    assert explanation.verdict.remedies
    assert explanation.failure.moment.live_bytes > 0
    assert explanation.peak.blocks >= len(explanation.peak.largest) > 0
    assert explanation.fits == ()
    (fitted,) = vramp.explain(OOM, limit=80 * GIB, at=10, top=3)
    assert {fit.allocator for fit in fitted.fits} >= {"vramp"}
    assert fitted.at is not None
    assert fitted.verdict.remedies[0].kind == "nothing"


def test_advice_tries_settings() -> None:
    (advice,) = vramp.advise(TRACES / "gnn.pickle.gz", limits=["1GiB", 2 * GIB])
    assert [limit.bytes for limit in advice.limits] == [GIB, 2 * GIB]
    assert all(len(tried.limited) == 2 for tried in advice.tried)
    assert all(conclusion.remedies for conclusion in advice.conclusions)


def test_results_are_readable() -> None:
    (explanation,) = vramp.explain(OOM)
    (advice,) = vramp.advise(OOM, limits=["l4"])
    assert "Raise the limit of the process to 18.00 GiB" in str(explanation)
    assert "To fit into l4 (21.49 GiB)\n- It fits already: change nothing." in str(advice)
    for found in (explanation, advice):
        shown = found._repr_html_()
        assert shown.startswith("<pre>") and found.trace in shown


def test_files_that_are_no_recordings_are_typed_errors(tmp_path: Path) -> None:
    empty, junk, cut = (tmp_path / name for name in ("empty", "junk", "cut"))
    empty.write_bytes(b"")
    junk.write_bytes(b"not a recording" * 100)
    cut.write_bytes(OOM.read_bytes()[:5000])
    for call in (vramp.replay, vramp.explain, vramp.advise):
        for path in (empty, junk):
            with pytest.raises(vramp.TraceError, match="cannot read the recording"):
                call(path)
        with pytest.raises((vramp.TraceError, vramp.FileError)):
            call(cut)
        with pytest.raises(OSError, match="cannot open"):
            call(tmp_path / "absent")
        with pytest.raises(TypeError):
            call(3)  # type: ignore[arg-type]
    with pytest.raises(vramp.OptionError):
        vramp.replay(OOM, ["malloc"])
    with pytest.raises(vramp.OptionError, match="limit=many"):
        vramp.replay(OOM, limit="many")
    with pytest.raises(vramp.DeviceError):
        vramp.replay(OOM, device="gpu")
    for at in (-1, 1 << 40):
        with pytest.raises(vramp.RangeError):
            vramp.explain(OOM, at=at)
