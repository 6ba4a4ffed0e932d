"""A timeline of each rank's steps, with lanes for loading, waiting, pinning, copying and computing. Pure.

Comes in: a `TraceReport` and the page's template. Goes out: one HTML page without external files, with the same data in
a table. If there are too many bars, neighbors are merged, which keeps the page at a few thousand. The emptier a merged
bar is, the fainter it is drawn.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from html import escape
from typing import TYPE_CHECKING, Final

from numapin.base.content_policy import policy_element
from numapin.base.plural import counted
from numapin.base.printable import printable
from numapin.base.strict_json import encode
from numapin.trace.report import name_of, shown_parts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numapin.trace.analysis import Analysis
    from numapin.trace.records import Copy, Kernel, Span, Trace
    from numapin.trace.report import TraceReport

_MOST_BARS: Final = 4000
_LANE: Final = 26  # pixels
_BAR: Final = 20
_FAINTEST: Final = 0.2
_MOST_RANKS: Final = 8
_NAMES: Final = {
    "load": "load",
    "wait": "wait",
    "pin": "pin",
    "copy": "transfer",
    "compute": "compute",
}
_PART_NAMES: Final = {"wait": "waiting for data", "copy": "transfer"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A rectangle in row `row` of `num_rows` in its lane, drawn as `kind`, with the tooltip `tip`.

    It may be `count` merged bars, with `gaps` microseconds between them in total.
    """

    start: float
    end: float
    kind: str
    tip: str
    row: int = 0
    num_rows: int = 1
    count: int = 1
    gaps: float = 0.0


def timeline(report: TraceReport, template: str) -> str:
    """Return the page."""
    lanes = [_lanes(analysis) for analysis in report.analyses]
    budget = max(_MOST_BARS // max(sum(map(len, lanes)), 1), 40)
    start = min(map(_begin, report.analyses))
    end = max(analysis.trace.steps[-1].end for analysis in report.analyses)
    charts = (_chart(*rank, start, end, budget) for rank in zip(report.analyses, lanes, strict=True))
    return (
        template.replace("<!--policy-->", _policy(template))
        .replace("<!--title-->", _title(report))
        .replace("<!--view-->", encode([round(start, 3), round(end, 3)], indent=None))
        .replace("<!--findings-->", "".join(_findings(report)))
        .replace("<!--charts-->", "".join(charts))
        .replace("<!--tables-->", "".join(map(_table, report.analyses)))
    )


def _policy(template: str) -> str:
    """Return the policy that allows the template's own style, script and empty icon."""
    style, script = (template.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0] for tag in ("style", "script"))
    return policy_element(style=style, script=script, images="data:")


def _title(report: TraceReport) -> str:
    """Return the script, host, date and ranks, as far as they are known."""
    origins = [analysis.trace.noted.origin for analysis in report.analyses]
    scripts, hosts = (_names([getattr(one, name) for one in origins]) for name in ("script", "host"))
    date = min(filter(None, (origin.date for origin in origins)), default="")
    parts = (scripts, f"on {hosts}" if hosts else "", date, _ranks(report))
    return _text(f"numapin trace: {', '.join(filter(None, parts))}")


def _ranks(report: TraceReport) -> str:
    names = [name_of(analysis) for analysis in report.analyses]
    word = "rank" if len(names) == 1 else "ranks"
    more = f" and {len(names) - _MOST_RANKS} more" if len(names) > _MOST_RANKS else ""
    return f"{word} {', '.join(names[:_MOST_RANKS])}{more}"


def _names(names: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(filter(None, names)))


def _begin(analysis: Analysis) -> float:
    """Return where the chart begins: with the first load, but at most two steps before the first step."""
    return max(min((load.start for load in analysis.trace.loads), default=0.0), -2 * analysis.step_us)


def _lanes(analysis: Analysis) -> dict[str, list[Bar]]:
    """Return the bars of each lane, which may be empty."""
    trace = analysis.trace
    return {
        "load": _rows(trace.loads, "load"),
        "wait": [
            *(_bar(one, "epoch", "border of an epoch") for one in (*trace.noted.ends, *trace.noted.epochs)),
            *(_bar(wait, "wait", f"batch {i}: the loop waits") for i, wait in enumerate(trace.waits)),
        ],
        "pin": _rows(trace.pins, "pin"),
        "copy": [_copy_bar(copy) for copy in trace.copies],
        "compute": _kernel_bars(trace.kernels) if trace.on_gpu else _operator_bars(trace),
    }


def _kernel_bars(kernels: Sequence[Kernel]) -> list[Bar]:
    """Return the kernels' bars, with communication in a row of its own."""
    num_rows = 2 if any(kernel.communicates for kernel in kernels) else 1
    return [
        Bar(
            start=kernel.start,
            end=kernel.end,
            kind="communication" if kernel.communicates else "compute",
            tip=kernel.name,
            row=int(kernel.communicates),
            num_rows=num_rows,
        )
        for kernel in kernels
    ]


def _operator_bars(trace: Trace) -> list[Bar]:
    """Return the operators' bars, with collective operations in a row of their own."""
    num_rows = 2 if trace.exchanges else 1
    kinds = (("compute", trace.operators), ("communication", trace.exchanges))
    return [
        Bar(start=span.start, end=span.end, kind=kind, tip=span.name, row=min(row, num_rows - 1), num_rows=num_rows)
        for row, (kind, spans) in enumerate(kinds)
        for span in spans
    ]


def _bar(span: Span, kind: str, tip: str) -> Bar:
    return Bar(start=span.start, end=span.end, kind=kind, tip=tip)


def _rows(spans: Sequence[Span], kind: str) -> list[Bar]:
    """Return the bars with a row per worker or thread, in up to six rows."""
    rows = {row: i for i, row in enumerate(dict.fromkeys(span.row for span in spans))}
    num_rows = min(len(rows), 6) or 1
    return [
        Bar(
            start=span.start,
            end=span.end,
            kind=kind,
            tip=f"{kind}, process or thread {span.row}",
            row=rows[span.row] % num_rows,
            num_rows=num_rows,
        )
        for span in spans
    ]


def _copy_bar(copy: Copy) -> Bar:
    kind = "pageable" if "Pageable" in (copy.source, copy.target) else "transfer"
    size = "" if copy.num_bytes is None else f", {copy.num_bytes / 1e6:.3f} MB"
    blocking = {True: ", blocks the host", False: ", asynchronous", None: ""}[copy.blocking]
    tip = f"{copy.source or '?'} to {copy.target or '?'}{size}{blocking}"
    return Bar(start=copy.start, end=copy.end, kind=kind, tip=tip)


def _thinned(bars: Sequence[Bar], most: int, window: float) -> list[Bar]:
    """Merge neighbors of the same row and kind if there are too many bars, as long as the result stays short.

    Of two neighbors that were not merged, both together are longer than a cell; so at most `most` remain.
    """
    if len(bars) <= most:
        return list(bars)
    cell = 2 * window * len(set(map(_row_and_kind, bars))) / most
    merged: list[Bar] = []
    for bar in sorted(bars, key=lambda bar: (*_row_and_kind(bar), bar.start)):
        if merged and _row_and_kind(merged[-1]) == _row_and_kind(bar) and bar.end - merged[-1].start <= cell:
            merged[-1] = _merged(merged[-1], bar)
        else:
            merged.append(bar)
    return merged


def _row_and_kind(bar: Bar) -> tuple[int, str]:
    return bar.row, bar.kind


def _merged(last: Bar, bar: Bar) -> Bar:
    gaps = last.gaps + max(bar.start - last.end, 0.0)
    return replace(last, end=max(last.end, bar.end), count=last.count + 1, gaps=gaps)


def _chart(analysis: Analysis, lanes: dict[str, list[Bar]], start: float, end: float, budget: int) -> str:
    """Return one rank's lanes: labels in HTML, and an SVG that is as wide as the page."""
    height, window = _LANE * len(lanes), max(end - start, 1e-3)
    shapes = list(_steps(analysis, height))
    labels = []
    for i, (lane, bars) in enumerate(lanes.items()):
        seen = [bar for bar in bars if bar.end > start and bar.start < end]
        labels.append(f"<li>{_NAMES[lane]}{'' if seen else ' <small>none</small>'}</li>")
        rectangles = "".join(_rect(bar, i * _LANE) for bar in _thinned(seen, budget, window))
        shapes.append(f'<g class="lane" data-lane="{_NAMES[lane]}">{rectangles}</g>')
    name = _text(name_of(analysis))
    return (
        f'<section class="rank"><h2>rank {name} <small>{_summary(analysis)}</small></h2>'
        f'<div class="chart"><ol class="labels">{"".join(labels)}</ol>'
        f'<svg role="img" tabindex="0" aria-label="Timeline of rank {name}: {_summary(analysis)}" height="{height}" '
        f'viewBox="{start:.3f} 0 {window:.3f} {height}" preserveAspectRatio="none">{"".join(shapes)}</svg></div>'
        '<div class="axis" aria-hidden="true"></div></section>\n'
    )


def _steps(analysis: Analysis, height: int) -> Iterator[str]:
    shown = shown_parts([analysis])
    for i, (step, parts) in enumerate(zip(analysis.trace.steps, analysis.steps_us, strict=True)):
        times = (f"{_PART_NAMES.get(part, part)} {_ms(parts[part])}" for part in shown)
        tip = f"{analysis.trace.step_unit} {i}: {_ms(step.end - step.start)} ms; {', '.join(times)}"
        yield (
            f'<rect class="step s{i % 2}" x="{step.start:.3f}" y="0" width="{step.end - step.start:.3f}" '
            f'height="{height}" data-tip="{_text(tip)}"/>'
        )


def _rect(bar: Bar, top: int) -> str:
    height = _BAR / bar.num_rows
    filled = 1 - bar.gaps / (bar.end - bar.start) if bar.gaps else 1.0
    more = f"{bar.count} merged, {filled:.0%} filled, the first: " if bar.count > 1 else ""
    faint = f' opacity="{max(filled, _FAINTEST):.2f}"' if filled < 1 else ""
    tip = f"{_ms(bar.end - bar.start)} ms at {_ms(bar.start)} ms: {more}{bar.tip[:120]}"
    return (
        f'<rect class="{bar.kind}" x="{bar.start:.3f}" y="{top + 3 + bar.row * height:.2f}" '
        f'width="{bar.end - bar.start:.3f}" height="{height:.2f}"{faint} data-tip="{_text(tip)}"/>'
    )


def _summary(analysis: Analysis) -> str:
    shares = ", ".join(f"{_PART_NAMES.get(p, p)} {analysis.share(p):.0%}" for p in shown_parts([analysis]))
    steps, unit = len(analysis.trace.steps), _text(analysis.trace.step_unit)
    batches = counted(analysis.num_batches, "batch")
    return f"{counted(steps, 'step')} ({unit}) of {_ms(analysis.step_us)} ms, {batches}: {shares}"


def _findings(report: TraceReport) -> Iterator[str]:
    for shared in report.findings:
        finding = shared.finding
        cost = (
            f"up to {finding.costs:.0%} of the step time, {shared.saves_s:.3g} s a step"
            if finding.costs
            else "nothing to gain"
        )
        yield (
            f"<li><b>{_text(finding.what)}</b> ({cost}; rank {_text(', '.join(shared.ranks))}): "
            f"{_text(finding.evidence)}. <br>Change: {_text(finding.remedy)}</li>"
        )
    if report.nothing_found:
        yield f"<li>{_text(report.nothing_found)}</li>"
    for note in report.notes:
        yield f"<li>Note: {_text(note)}</li>"


def _table(analysis: Analysis) -> str:
    """Return the steps as numbers, one row per step."""
    shown = shown_parts([analysis])
    head = "".join(f'<th scope="col">{_PART_NAMES.get(part, part)}</th>' for part in shown)
    rows = "".join(
        f'<tr><th scope="row">{i}</th><td>{_ms(step.end - step.start)}</td>'
        + "".join(f"<td>{_ms(parts[part])}</td>" for part in shown)
        + "</tr>"
        for i, (step, parts) in enumerate(zip(analysis.trace.steps, analysis.steps_us, strict=True))
    )
    return (
        f"<table><caption>rank {_text(name_of(analysis))}: time of each step in milliseconds</caption>"
        f'<thead><tr><th scope="col">step</th><th scope="col">all</th>{head}</tr></thead><tbody>{rows}</tbody></table>'
    )


def _ms(time_us: float) -> str:
    return f"{time_us / 1000:.3f}"


def _text(text: str) -> str:
    """Return text as HTML, with every special or invisible character replaced."""
    return escape(printable(text))
