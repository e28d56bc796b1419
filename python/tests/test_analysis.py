"""Replays and explanations of the recordings in `examples/traces`."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
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
    with pytest.raises(vramp.OptionError, match="limit=.many. is invalid"):
        vramp.replay(OOM, limit="many")
    with pytest.raises(vramp.DeviceError):
        vramp.replay(OOM, device="gpu")
    for at in (-1, 1 << 40):
        with pytest.raises(vramp.RangeError):
            vramp.explain(OOM, at=at)


def test_a_report_is_written_and_shows_itself(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    report = vramp.report(OOM, page, limits=["l4", 24 * GIB])
    assert report.path == page and "llama_varlen_oom" in str(report)
    assert page.read_text().startswith("<!doctype html>")
    shown = report._repr_html_()
    assert shown.startswith("<iframe srcdoc=") and "&lt;!doctype html&gt;" in shown
    own = page.with_name("own.pickle.gz")
    shutil.copy(OOM, own)
    with pytest.raises(vramp.VrampError, match="give the output another name"):
        vramp.report(own, own)
    with pytest.raises(vramp.FileError, match="nowhere"):
        vramp.report(OOM, tmp_path / "nowhere" / "page.html")


def test_two_runs_are_compared() -> None:
    (found,) = vramp.diff(TRACES / "gnn.pickle.gz", OOM)
    assert found.after.peak_live_bytes - found.before.peak_live_bytes == sum(
        change.after_bytes - change.before_bytes for change in found.categories
    )
    text = str(found)
    assert "peak allocated 15.39 GiB before" in text and "activation" in text
    with pytest.raises(vramp.OptionError, match="has nothing of device 7"):
        vramp.diff(OOM, OOM, trace_device=7)


def test_the_program_is_that_of_rust(tmp_path: Path) -> None:
    def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "vramp", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    explained = run("explain", OOM)
    assert explained.returncode == 0 and "What to do" in explained.stdout
    assert "\x1b[" not in explained.stdout
    assert "\x1b[" in run("explain", "--color", "always", OOM).stdout
    failed = run("replay", "--limit", "10MiB", "--fail-on-oom", TRACES / "gnn.pickle.gz")
    assert failed.returncode == 3
    missing = run("explain", tmp_path / "none.pickle")
    assert missing.returncode == 1 and "none.pickle" in missing.stderr
    beside = Path(sys.executable).with_name("vramp")
    version = subprocess.run([beside, "--version"], capture_output=True, text=True, timeout=60)
    assert version.stdout == f"vramp {vramp.__version__}\n"


def test_limits_are_one_or_several_with_a_unit_or_an_int_of_bytes() -> None:
    assert [limit.bytes for limit in vramp.advise(OOM, limits="24GiB")[0].limits] == [24 * GIB]
    assert [limit.bytes for limit in vramp.advise(OOM, limits=24 * GIB)[0].limits] == [24 * GIB]
    for wrong in ("90%", "24"):
        with pytest.raises(vramp.OptionError, match="write an int of bytes, a size such as 80GiB, or a card"):
            vramp.explain(OOM, limit=wrong)
    (replay,) = vramp.replay(OOM, "vramp", limit="90%")
    assert replay.fits


def test_all_devices_print_as_text() -> None:
    assert str(vramp.explain(OOM, fits=False)).startswith("llama_varlen_oom")
    assert "gnn -> llama_varlen_oom" in str(vramp.diff(TRACES / "gnn.pickle.gz", OOM))
