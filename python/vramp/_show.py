"""Results of the analysis as text for a person, and that text for a notebook."""

from __future__ import annotations

import html as _html
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ._analysis import Advice, Change, Diff, Explanation, Moment, Remedy

_ROWS = 5
"""Rows of each list."""


def size(amount: int) -> str:
    """Returns bytes as the program `vramp` writes them: 15.20 GiB."""
    value = float(amount)
    if amount < 1024:
        return f"{amount} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        if value < 1024:
            return f"{value:.2f} {unit}"
    return f"{value / 1024:.2f} PiB"


def html(text: str) -> str:
    """Returns a text for a notebook."""
    return f"<pre>{_html.escape(text)}</pre>"


def frame(page: str) -> str:
    """Returns a whole page for a notebook."""
    return f'<iframe srcdoc="{_html.escape(page)}" style="width: 100%; height: 50em; border: 0"></iframe>'


def _remedies(title: str, remedies: Iterable[Remedy]) -> list[str]:
    lines = [title]
    for remedy in remedies:
        lines.append(f"- {remedy.text}")
        if remedy.code is not None:
            lines.append(f"    {remedy.code}")
    return lines


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns rows with the first column aligned left and the others right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))])
        for row in rows
    ]


def _moment(title: str, moment: Moment) -> list[str]:
    lines = ["", f"{title}: {size(moment.live_bytes)} in {moment.blocks} blocks"]
    for category in moment.categories[:_ROWS]:
        lines.append(f"  {size(category.bytes):>11}  {category.category.replace('_', ' ')}")
    for site in moment.sites[:_ROWS]:
        lines.append(f"  {size(site.bytes):>11}  {site.site}")
    return lines


def explanation(found: Explanation) -> str:
    """Returns an explanation in words: the cause, what holds the memory, what to do."""
    lines = [f"{found.trace}, device {found.trace_device}", "", found.verdict.headline]
    lines += [f"- {finding.text}" for finding in found.verdict.findings]
    if found.failure is not None:
        lines += _moment("Allocated when the request failed", found.failure.moment)
    else:
        lines += _moment("Allocated at the peak", found.peak)
    if found.fits:
        rows = [["allocator", "peak reserved", "smallest limit"]]
        for fit in found.fits:
            smallest = fit.smallest_limit_bytes
            rows.append([fit.allocator, size(fit.peak_reserved_bytes), "none" if smallest is None else size(smallest)])
        lines += ["", *_table(rows)]
    return "\n".join([*lines, "", *_remedies("What to do", found.verdict.remedies)])


def advice(found: Advice) -> str:
    """Returns advice in words: what was tried, and what to do for each limit."""
    lines = [f"{found.trace}, device {found.trace_device}: needs {size(found.demand_bytes)} at once", ""]
    rows = [["allocator or setting", "peak, no limit", *map(str, found.limits)]]
    for tried in found.tried:
        peak = size(tried.unlimited.peak_reserved_bytes) if tried.unlimited.fits else "-"
        runs = [
            f"{'tight' if run.tight else 'fits'}, {size(run.peak_reserved_bytes)}" if run.fits else "no"
            for run in tried.limited
        ]
        rows.append([tried.name, peak, *runs])
    lines += _table(rows)
    for conclusion in found.conclusions:
        lines += ["", *_remedies(f"To fit into {conclusion.limit}", conclusion.remedies)]
    return "\n".join(lines)


def _signed(before: int, after: int) -> str:
    return f"{'-' if after < before else '+'}{size(abs(after - before))}"


def diff(found: Diff) -> str:
    """Returns what changed between two runs, as text."""
    before, after = found.before, found.after
    change = _signed(before.peak_live_bytes, after.peak_live_bytes)
    peaks = f"{size(before.peak_live_bytes)} before, {size(after.peak_live_bytes)} after"
    runs = f"{before.trace} -> {after.trace}, device {after.trace_device}"
    lines = [f"{runs}: peak allocated {peaks} ({change})"]
    for title, changes in (
        ("By category", found.categories),
        ("By line", found.sites),
        ("Kept from step to step", found.growth),
    ):
        lines += _changes(title, changes)
    return "\n".join(lines)


def _changes(title: str, changes: Sequence[Change]) -> list[str]:
    rows = [
        (change.of, size(change.before_bytes), size(change.after_bytes), changed)
        for change in changes[:_ROWS]
        if (changed := _signed(change.before_bytes, change.after_bytes))
    ]
    return ["", *_table([(title, "before", "after", "change"), *rows])] if rows else []
