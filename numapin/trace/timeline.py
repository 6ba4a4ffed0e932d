"""A report as a picture: lanes of loading, waiting, pinning, copying and computing over the steps of each rank. Pure.

Comes in: a `TraceReport` and the page's template. Goes out: one HTML page that needs nothing else, with a table that
says the same in numbers. Bars that lie close are drawn as one where there are too many: the page has some thousands at
most. Such a bar is the fainter, the less of it is filled.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from html import escape
from typing import TYPE_CHECKING, Final

from numapin.base.content_policy import policy_element
from numapin.base.printable import printable
from numapin.base.strict_json import encode
from numapin.trace.report import name_of, shown_parts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numapin.trace.analysis import Analysis
    from numapin.trace.records import Copy, Kernel, Span
    from numapin.trace.report import TraceReport

_MOST_BARS: Final = 4000
_LANE: Final = 26  # pixels
_BAR: Final = 20
_FAINTEST: Final = 0.2
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
    """A rectangle: `row` of `num_rows` in its lane, drawn as `kind`, explained by `tip`.

    It may stand for `count` that lie close, with `gaps` (microseconds) between them in all.
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
    lanes = [(analysis, _lanes(analysis)) for analysis in report.analyses]
    budget = max(_MOST_BARS // max(sum(len(one) for _, one in lanes), 1), 40)
    start = min(_begin(analysis) for analysis in report.analyses)
    end = max(analysis.trace.steps[-1].end for analysis in report.analyses)
    charts = "".join(_chart(analysis, one, start, end, budget) for analysis, one in lanes)
    return (
        template.replace("<!--policy-->", _policy(template))
        .replace("<!--view-->", encode([round(start, 3), round(end, 3)], indent=None))
        .replace("<!--findings-->", "".join(_findings(report)))
        .replace("<!--charts-->", charts)
        .replace("<!--tables-->", "".join(_table(analysis) for analysis in report.analyses))
    )


def _policy(template: str) -> str:
    """Return what allows the template's own style and script, and its empty icon."""
    style, script = (template.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0] for tag in ("style", "script"))
    return policy_element(style=style, script=script, images="data:")


def _begin(analysis: Analysis) -> float:
    """Return where the picture begins: with the loads of the first batches, but no more than two steps before them."""
    return max(min((load.start for load in analysis.trace.loads), default=0.0), -2 * analysis.step_us)


def _lanes(analysis: Analysis) -> dict[str, list[Bar]]:
    """Return the bars of each lane; a lane that has none is there, too, and says so."""
    trace = analysis.trace
    return {
        "load": _rows(trace.loads, "load"),
        "wait": [_bar(wait, "wait", f"batch {i}: the loop waits") for i, wait in enumerate(trace.waits)],
        "pin": _rows(trace.pins, "pin"),
        "copy": [_copy_bar(copy) for copy in trace.copies],
        "compute": _kernel_bars(trace.kernels)
        if trace.on_gpu
        else [_bar(one, "compute", one.name) for one in trace.operators],
    }


def _kernel_bars(kernels: Sequence[Kernel]) -> list[Bar]:
    """Draw communication below compute, where there is any."""
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


def _bar(span: Span, kind: str, tip: str) -> Bar:
    return Bar(start=span.start, end=span.end, kind=kind, tip=tip)


def _rows(spans: Sequence[Span], kind: str) -> list[Bar]:
    """Give each worker or thread a row of its own, as far as there is room for rows."""
    rows = {who: i for i, who in enumerate(dict.fromkeys(span.row for span in spans))}
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
    blocking = {True: ", the host waits", False: ", asynchronous", None: ""}[copy.blocking]
    tip = f"{copy.source or '?'} to {copy.target or '?'}{size}{blocking}"
    return Bar(start=copy.start, end=copy.end, kind=kind, tip=tip)


def _thinned(bars: Sequence[Bar], most: int, window: float) -> list[Bar]:
    """Draw neighbours of one kind and row as one where there are too many, as long as that stays a short bar.

    Of two bars in a row that were not put together, both are longer than a cell; so there are `most` at most.
    """
    if len(bars) <= most:
        return list(bars)
    cell = 2 * window * len({(bar.row, bar.kind) for bar in bars}) / most
    merged: list[Bar] = []
    for bar in sorted(bars, key=lambda bar: (bar.row, bar.kind, bar.start)):
        last = merged[-1] if merged else None
        if last and (last.row, last.kind) == (bar.row, bar.kind) and bar.end - last.start <= cell:
            gaps = last.gaps + max(bar.start - last.end, 0.0)
            merged[-1] = replace(last, end=max(last.end, bar.end), count=last.count + 1, gaps=gaps)
        else:
            merged.append(bar)
    return merged


def _chart(analysis: Analysis, lanes: dict[str, list[Bar]], start: float, end: float, budget: int) -> str:
    """Return one rank's lanes: labels in HTML, and an SVG that is as wide as the page."""
    height, window = _LANE * len(lanes), max(end - start, 1e-3)
    shapes = list(_steps(analysis, height))
    labels = []
    for i, (lane, bars) in enumerate(lanes.items()):
        seen = [bar for bar in bars if bar.end > start and bar.start < end]
        labels.append(f"<li>{_NAMES[lane]}{'' if seen else ' <small>none</small>'}</li>")
        shapes += [
            f'<g class="lane" data-lane="{_NAMES[lane]}">',
            *(_rect(bar, i * _LANE) for bar in _thinned(seen, budget, window)),
            "</g>",
        ]
    name = _text(name_of(analysis))
    return (
        f'<section class="rank"><h2>rank {name} <small>{_summary(analysis)}</small></h2>'
        f'<div class="chart"><ol class="labels">{"".join(labels)}</ol>'
        f'<svg role="img" tabindex="0" aria-label="Timeline of rank {name}: {_summary(analysis)}" height="{height}" '
        f'viewBox="{start:.3f} 0 {window:.3f} {height}" preserveAspectRatio="none">{"".join(shapes)}</svg></div>'
        '<div class="axis" aria-hidden="true"></div></section>\n'
    )


def _steps(analysis: Analysis, height: int) -> Iterator[str]:
    for i, (step, parts) in enumerate(zip(analysis.trace.steps, analysis.steps_us, strict=True)):
        tip = f"{analysis.trace.step_unit} {i}: {_ms(step.end - step.start)} ms; " + ", ".join(
            f"{_PART_NAMES.get(part, part)} {_ms(parts[part])}" for part in shown_parts([analysis])
        )
        yield (
            f'<rect class="step s{i % 2}" x="{step.start:.3f}" y="0" width="{step.end - step.start:.3f}" '
            f'height="{height}" data-tip="{_text(tip)}"/>'
        )


def _rect(bar: Bar, top: int) -> str:
    height = _BAR / bar.num_rows
    filled = 1 - bar.gaps / (bar.end - bar.start) if bar.gaps else 1.0
    more = f"{bar.count} drawn as one, {filled:.0%} filled, the first: " if bar.count > 1 else ""
    faint = f' opacity="{max(filled, _FAINTEST):.2f}"' if filled < 1 else ""
    tip = f"{_ms(bar.end - bar.start)} ms at {_ms(bar.start)} ms: {more}{bar.tip[:120]}"
    return (
        f'<rect class="{bar.kind}" x="{bar.start:.3f}" y="{top + 3 + bar.row * height:.2f}" '
        f'width="{bar.end - bar.start:.3f}" height="{height:.2f}"{faint} data-tip="{_text(tip)}"/>'
    )


def _summary(analysis: Analysis) -> str:
    shares = ", ".join(f"{_PART_NAMES.get(p, p)} {analysis.share(p):.0%}" for p in shown_parts([analysis]))
    steps, unit = len(analysis.trace.steps), _text(analysis.trace.step_unit)
    return f"{steps} steps ({unit}) of {_ms(analysis.step_us)} ms, {analysis.num_batches} batches: {shares}"


def _findings(report: TraceReport) -> Iterator[str]:
    for shared in report.findings:
        finding = shared.finding
        cost = f"up to {finding.costs:.0%} of the time" if finding.costs else "nothing to gain"
        yield (
            f"<li><b>{_text(finding.what)}</b> ({cost}; rank {_text(', '.join(shared.ranks))}): "
            f"{_text(finding.evidence)}. <br>Change: {_text(finding.remedy)}</li>"
        )
    for note in report.notes:
        yield f"<li>Note: {_text(note)}</li>"


def _table(analysis: Analysis) -> str:
    """Return what the bars show as numbers: a row a step."""
    shown = shown_parts([analysis])
    head = "".join(f'<th scope="col">{_PART_NAMES.get(part, part)}</th>' for part in shown)
    rows = "".join(
        f'<tr><th scope="row">{i}</th><td>{_ms(step.end - step.start)}</td>'
        + "".join(f"<td>{_ms(parts[part])}</td>" for part in shown)
        + "</tr>"
        for i, (step, parts) in enumerate(zip(analysis.trace.steps, analysis.steps_us, strict=True))
    )
    return (
        f"<table><caption>rank {_text(name_of(analysis))}: milliseconds of each step</caption>"
        f'<thead><tr><th scope="col">step</th><th scope="col">all</th>{head}</tr></thead><tbody>{rows}</tbody></table>'
    )


def _ms(time_us: float) -> str:
    return f"{time_us / 1000:.3f}"


def _text(text: str) -> str:
    """Return a text as HTML, whatever is in it."""
    return escape(printable(text))
