"""Replays and explanations of recordings. Amounts are in bytes, times in the unit that a name ends with."""

from __future__ import annotations

import functools
import json
import os
import pathlib
import types
import typing
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeVar

from . import _native, _show

_T = TypeVar("_T")

PRESETS = ("vramp", "vpmm", "stream-ordered", "torch", "torch-expandable")
"""Allocators that a recording can be replayed on."""


@dataclass(frozen=True)
class CallCount:
    """Driver calls of one kind."""

    count: int
    ms: float


@dataclass(frozen=True)
class Replay:
    """A recorded job on one allocator."""

    trace: str
    """Name of the recording."""
    trace_device: int
    """Number of the recorded device."""
    allocator: str
    """Preset of the allocator."""
    settings: str | None
    """Settings of the recorded allocator that PyTorch's models were given."""
    device: str
    """Device of the replay."""
    events: int
    requests: int
    streams: int
    peak_live_bytes: int
    """Peak of requested bytes of live blocks."""
    peak_demand_bytes: int
    """Peak of what the job needs, with memory that other streams may still use."""
    recorded_peak_bytes: int | None
    """Peak of reserved bytes in the recording, if it has one."""
    peak_reserved_bytes: int
    """Peak of reserved bytes in the replay."""
    overhead: float | None
    """`peak_reserved_bytes` over `peak_demand_bytes`. None after a failure."""
    driver_ms: float
    """Time of all driver calls: modelled on the simulator, measured on a card (`driver_ms_is`)."""
    driver_ms_is: str
    worst_malloc_us: float
    hits: int
    misses: int
    driver_calls: int
    handles_created: int
    handles_moved: int
    moved_bytes: int
    oom_at_event: int | None
    """Event of the first request that failed for want of memory. The replay ends there."""
    oom: str | None
    """Report of that failure."""
    replay_s: float
    calls: dict[str, CallCount]
    """Driver calls by kind."""
    repairs: dict[str, int]
    """Repairs of an incomplete recording, by kind."""

    @property
    def fits(self) -> bool:
        """True if no request failed."""
        return self.oom_at_event is None


@dataclass(frozen=True)
class ReplayTotal:
    """One allocator on all devices of a recording, added up.

    Devices may reach their peaks at different times, so a sum of peaks is at least what was in use at once,
    and may be more.
    """

    allocator: str
    trace_devices: tuple[int, ...]
    """Numbers of the recorded devices."""
    events: int
    sum_of_peak_live_bytes: int
    sum_of_peak_demand_bytes: int
    sum_of_recorded_peak_bytes: int | None
    """None if the recording does not have that of every device."""
    sum_of_peak_reserved_bytes: int
    driver_ms: float
    driver_calls: int
    hits: int
    misses: int
    moved_bytes: int
    oom_on_trace_devices: tuple[int, ...]
    """Devices on which a request failed. The sums have what came before."""

    @property
    def fits(self) -> bool:
        """True if no request failed on any device."""
        return not self.oom_on_trace_devices


@dataclass(frozen=True)
class Finding:
    """Something that contributed to a failure."""

    kind: str
    bytes: int
    text: str


@dataclass(frozen=True)
class Remedy:
    """One thing to do about a job."""

    kind: str
    """nothing, record, limit, setting, vramp, program or card."""
    text: str
    code: str | None
    """A line to paste into a shell or a program."""
    fits_bytes: int | None
    """Memory that the recorded requests fit into with it, by replay."""


@dataclass(frozen=True)
class Verdict:
    """Why a job failed, in words."""

    cause: str
    """none, no_history, demand, growth, fragmentation or limit."""
    headline: str
    findings: tuple[Finding, ...]
    remedies: tuple[Remedy, ...]
    """What to do, in the order in which to try it. A job that failed has at least one."""


@dataclass(frozen=True)
class Recording:
    """What a recording has."""

    events: int
    streams: int
    coverage: str
    missing: str
    has_stacks: bool
    peak_reserved_bytes: int | None
    settings: str | None
    failures: int


@dataclass(frozen=True)
class Card:
    """A card with enough memory."""

    id: str
    name: str
    usable_bytes: int


@dataclass(frozen=True)
class SiteShare:
    """Live memory that a line of the program allocated."""

    site: str
    bytes: int
    blocks: int


@dataclass(frozen=True)
class CategoryShare:
    """Live memory for one purpose, such as activation."""

    category: str
    bytes: int
    blocks: int


@dataclass(frozen=True)
class LargeBlock:
    """One live block."""

    bytes: int
    event: int | None
    site: str
    operation: str
    category: str


@dataclass(frozen=True)
class Moment:
    """What was live at one moment."""

    event: int | None
    live_bytes: int
    blocks: int
    sites: tuple[SiteShare, ...]
    categories: tuple[CategoryShare, ...]
    largest: tuple[LargeBlock, ...]


@dataclass(frozen=True)
class Layout:
    """How free memory lay in the recorded segments."""

    reserved_bytes: int
    segments: int
    rounding_bytes: int
    waiting_bytes: int
    free_bytes: int
    holes: int
    largest_hole_bytes: int
    empty_segment_bytes: int
    private_free_bytes: int


@dataclass(frozen=True)
class Failure:
    """The request that failed."""

    event: int
    size_bytes: int
    live_bytes: int
    reserved_bytes: int | None
    card_free_bytes: int | None
    limited: bool
    site: str
    operation: str
    moment: Moment
    layout: Layout | None


@dataclass(frozen=True)
class GrowingSite:
    """A line of the program whose blocks survive from step to step."""

    site: str
    category: str
    bytes: int
    blocks: int
    bytes_per_step: int


@dataclass(frozen=True)
class Growth:
    """What grows from step to step: a leak."""

    steps: int
    boundaries: str
    first_bytes: int
    last_bytes: int
    sites: tuple[GrowingSite, ...]


@dataclass(frozen=True)
class Fit:
    """The least memory with which an allocator serves the job."""

    allocator: str
    peak_reserved_bytes: int
    smallest_limit_bytes: int | None
    roomy_limit_bytes: int | None
    """A limit that leaves 5 % for runs that differ slightly."""
    smallest_card: Card | None


class _Shown:
    """A result with a text for a person, and that text for a notebook."""

    def _repr_html_(self) -> str:
        return _show.html(str(self))


@dataclass(frozen=True)
class Explanation(_Shown):
    """Why a job used its memory as it did."""

    trace: str
    trace_device: int
    verdict: Verdict
    recording: Recording
    peak_live_bytes: int
    demand_bytes: int
    card: Card | None
    failure: Failure | None
    peak: Moment
    peak_layout: Layout | None
    at: Moment | None
    growth: Growth | None
    fits: tuple[Fit, ...]

    def __str__(self) -> str:
        return _show.explanation(self)


@dataclass(frozen=True)
class Run:
    """One replay of advice."""

    fits: bool
    peak_reserved_bytes: int
    driver_ms: float
    oom_at_event: int | None
    tight: bool
    """True if it fits, and fails with a limit that is 5 % lower."""


@dataclass(frozen=True)
class Tried:
    """Settings that were tried."""

    name: str
    line: str | None
    """What to set to use it, if it is a setting."""
    unlimited: Run
    limited: tuple[Run, ...]
    """One run for each of `Advice.limits`."""


@dataclass(frozen=True)
class Limit:
    """Memory that a job may reserve."""

    bytes: int
    card: str | None
    """The card that the limit was given as."""

    def __str__(self) -> str:
        return f"{self.card} ({_show.size(self.bytes)})" if self.card else _show.size(self.bytes)


@dataclass(frozen=True)
class Conclusion:
    """What to do to fit into one limit, in the order in which to try it."""

    limit: Limit
    remedies: tuple[Remedy, ...]


@dataclass(frozen=True)
class Advice(_Shown):
    """Allocators and settings, tried on a recorded job."""

    trace: str
    trace_device: int
    demand_bytes: int
    recording: str
    duration_ms: float | None
    """Time from the first to the last event, if recorded."""
    limits: tuple[Limit, ...]
    tried: tuple[Tried, ...]
    """The recorded settings first."""
    conclusions: tuple[Conclusion, ...]
    """One for each limit."""

    def __str__(self) -> str:
        return _show.advice(self)


@dataclass(frozen=True)
class DiffRun:
    """One of two runs that are compared."""

    trace: str
    trace_device: int
    recording: str
    peak_live_bytes: int
    demand_bytes: int
    peak_reserved_bytes: int | None
    """Peak of reserved bytes in the recording, if it has one."""
    allocations: int
    steps: int


@dataclass(frozen=True)
class Change:
    """Live memory at the peak of one run and of the other."""

    of: str
    """A category, or a line of the program."""
    before_bytes: int
    after_bytes: int


@dataclass(frozen=True)
class Diff(_Shown):
    """What changed between two runs of a job."""

    before: DiffRun
    after: DiffRun
    categories: tuple[Change, ...]
    sites: tuple[Change, ...]
    growth: tuple[Change, ...]
    """Memory that each line keeps from step to step."""

    def __str__(self) -> str:
        return _show.diff(self)


@dataclass(frozen=True)
class Report:
    """A page about recorded jobs. In a notebook it shows itself."""

    path: pathlib.Path
    """The file of the page, which needs no other file."""
    summary: str
    """The verdict of each recorded device, and what was written."""

    def __str__(self) -> str:
        return self.summary

    def _repr_html_(self) -> str:
        return _show.frame(self.path.read_text())


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _value(hint: Any, data: Any) -> Any:
    if data is None:
        return None
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        return _value(next(kind for kind in arguments if kind is not type(None)), data)
    if origin is tuple:
        return tuple(_value(arguments[0], item) for item in data)
    if origin is dict:
        return {key: _value(arguments[1], item) for key, item in data.items()}
    return _load(hint, data) if is_dataclass(hint) else data


def _load(cls: Any, data: dict[str, Any]) -> Any:
    """Makes a dataclass of JSON. Fields that it does not have are left out."""
    hints = _hints(cls)
    return cls(**{field.name: _value(hints[field.name], data.get(field.name)) for field in fields(cls)})


class _All(list[_T]):
    """Results, one for each recorded device, which print and show as text."""

    def __str__(self) -> str:
        return "\n\n".join(map(str, self))

    def _repr_html_(self) -> str:
        return _show.html(str(self))


def _all(cls: type[_T], text: str) -> list[_T]:
    return _All(_load(cls, item) for item in json.loads(text))


def _devices(trace_device: int | typing.Sequence[int] | None) -> list[int] | None:
    """Returns the numbers of the selected devices. None selects all."""
    if trace_device is None:
        return None
    devices = [trace_device] if isinstance(trace_device, int) else list(trace_device)
    wrong = [device for device in devices if not 0 <= device < 1 << 16]
    if wrong or not devices:
        from ._errors import RangeError

        what = f"has no device {wrong[0]}" if wrong else "selects no device"
        raise RangeError(f"trace_device={trace_device!r} {what}: use numbers of recorded devices")
    return devices


def replay_totals(replays: typing.Sequence[Replay]) -> list[ReplayTotal]:
    """Adds up the replays of a recording's devices. Returns one total for each allocator."""
    by_allocator: dict[str, list[Replay]] = {}
    for result in replays:
        by_allocator.setdefault(result.allocator, []).append(result)
    return [_total(name, results) for name, results in by_allocator.items()]


def _total(allocator: str, results: list[Replay]) -> ReplayTotal:
    recorded = [result.recorded_peak_bytes for result in results]
    known = [peak for peak in recorded if peak is not None]
    return ReplayTotal(
        allocator=allocator,
        trace_devices=tuple(result.trace_device for result in results),
        events=sum(result.events for result in results),
        sum_of_peak_live_bytes=sum(result.peak_live_bytes for result in results),
        sum_of_peak_demand_bytes=sum(result.peak_demand_bytes for result in results),
        sum_of_recorded_peak_bytes=sum(known) if len(known) == len(recorded) else None,
        sum_of_peak_reserved_bytes=sum(result.peak_reserved_bytes for result in results),
        driver_ms=sum(result.driver_ms for result in results),
        driver_calls=sum(result.driver_calls for result in results),
        hits=sum(result.hits for result in results),
        misses=sum(result.misses for result in results),
        moved_bytes=sum(result.moved_bytes for result in results),
        oom_on_trace_devices=tuple(result.trace_device for result in results if not result.fits),
    )


_Limit = int | str


def _limit(limit: _Limit | None) -> str | None:
    """Returns a limit as text: an int is bytes."""
    return f"{limit}B" if isinstance(limit, int) else limit


def _limits(limits: _Limit | typing.Sequence[_Limit]) -> list[str]:
    """Returns limits as texts, from one or several."""
    several = [limits] if isinstance(limits, (int, str)) else limits
    return [text for limit in several if (text := _limit(limit)) is not None]


def replay(
    path: str | os.PathLike[str],
    allocators: typing.Sequence[str] = ("vramp", "torch", "torch-expandable"),
    *,
    limit: int | str | None = None,
    device: str | None = None,
    trace_device: int | typing.Sequence[int] | None = None,
) -> list[Replay]:
    """Replays a recording on allocators. Returns one result for each recorded device and allocator;
    `replay_totals` adds them up. `trace_device` selects recorded devices, all of them by default, and each
    is replayed on a device of its own.

    `path` is a snapshot of PyTorch, an RMM log or a .vtrace file, plain or compressed. `limit` is in
    bytes, or a text such as "80GiB" or "90%" of the device. `device` is as of `vramp.open`; without it
    the card that the job ran on is simulated, as far as the recording says. Out of memory is a result.

    Takes about a microsecond for each event and allocator, with the interpreter's lock released.
    Raises FileError, TraceError, OptionError or DeviceError, and RangeError for a device that was not
    recorded.
    """
    names = [allocators] if isinstance(allocators, str) else list(allocators)
    devices = _devices(trace_device)
    return _all(Replay, _native.replay(os.fspath(path), names, _limit(limit), device, devices))


def explain(
    path: str | os.PathLike[str],
    *,
    limit: int | str | None = None,
    at: int | None = None,
    top: int = 10,
    fits: bool = True,
    trace_device: int | typing.Sequence[int] | None = None,
) -> list[Explanation]:
    """Explains why a recorded job ran out of memory. Returns one explanation for each recorded device.

    `limit` is the memory that the job may reserve; that of the recorded failure by default. `at` is an
    event of a device whose live memory is summed up too, and `top` the length of lists. With `fits`, about
    50 replays find the least memory for each allocator. `trace_device` is as of `replay`. Devices with fewer
    events than `at` have none there.

    Raises as `replay`, and RangeError if no device has the event `at`.
    """
    if at is not None and at < 0:
        from ._errors import RangeError

        raise RangeError(f"at={at} is no event: count from 0")
    devices = _devices(trace_device)
    text = _native.explain(os.fspath(path), _limit(limit), at, top, fits, devices)
    return _all(Explanation, text)


def advise(
    path: str | os.PathLike[str],
    *,
    limits: _Limit | typing.Sequence[_Limit] = (),
    trace_device: int | typing.Sequence[int] | None = None,
) -> list[Advice]:
    """Tries allocators and settings of PyTorch on a recorded job, without a limit and with each of
    `limits`. Returns one advice for each recorded device. `trace_device` is as of `replay`. Raises as
    `replay`.
    """
    devices = _devices(trace_device)
    return _all(Advice, _native.advise(os.fspath(path), _limits(limits), devices))


_Paths = str | os.PathLike[str]


def diff(
    before: _Paths, after: _Paths, *, trace_device: int | typing.Sequence[int] | None = None
) -> list[Diff]:
    """Compares two runs of a job: what grew, by line and category. Returns one result for each device that both
    recorded. `trace_device` is as of `replay`. Raises as `replay`, and VrampError if they have no device in common.
    """
    lines = _command("diff", before, after, "--json", trace_device=trace_device).splitlines()
    return _All(_load(Diff, json.loads(line)) for line in lines)


def report(
    recordings: _Paths | typing.Sequence[_Paths],
    output: _Paths = "report.html",
    *,
    limits: _Limit | typing.Sequence[_Limit] = (),
    trace_device: int | typing.Sequence[int] | None = None,
) -> Report:
    """Writes a page that shows why recorded jobs used their memory as they did: verdict, timeline, flame graph,
    address map. Several recordings are compared, as the ranks of one job. The page tries settings with each of
    `limits`. An existing file is replaced, but no recording. `trace_device` is as of `replay`.

    Takes about as long as ten replays. Raises as `replay`, and FileError if the page cannot be written.
    """
    paths = [recordings] if isinstance(recordings, (str, os.PathLike)) else list(recordings)
    arguments: list[_Paths] = [*paths, "--output", output]
    for limit in _limits(limits):
        arguments += ["--limit", limit]
    summary = _command("report", *arguments, trace_device=trace_device)
    return Report(pathlib.Path(output), summary.rstrip())


def _command(name: str, *arguments: _Paths, trace_device: int | typing.Sequence[int] | None) -> str:
    """Runs a command of the program `vramp` and returns what it prints."""
    devices = _devices(trace_device)
    selected = [] if devices is None else ["--trace-device", ",".join(map(str, devices))]
    return _native.command(["vramp", name, *selected, *(os.fspath(argument) for argument in arguments)])
