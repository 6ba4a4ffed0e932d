"""A report of `numapin compare` as an HTML page that needs no other file. Pure.

Comes in: a `CompareReport`. Goes out: the page: outcomes, plots and tables. Places on the plots are percentages, so
that they are as wide as the window and their text stays as large as the rest.
"""

from __future__ import annotations

import math
from html import escape
from itertools import chain
from typing import TYPE_CHECKING, Final

from numapin.base import quoting
from numapin.base.content_policy import policy_element
from numapin.base.printable import printable
from numapin.compare.figures import FIGURES
from numapin.compare.ratio import Verdict
from numapin.compare.report import verdict_lines
from numapin.view.bench_table import machine_in_words
from numapin.view.compare_style import CAVEATS, STYLE
from numapin.view.compare_table import OTHERS, figure_text, other_figures, step_ms

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numapin.compare.ratio import StepRatio
    from numapin.compare.report import CompareReport
    from numapin.compare.results import VariantResult

_NUM_TICKS: Final = 4
_SHOWN_STEPS: Final = 400
_CLASSES: Final = {
    Verdict.FASTER: "faster",
    Verdict.SLOWER: "slower",
    Verdict.NO_DIFFERENCE: "same",
    Verdict.UNKNOWN: "unknown",
    Verdict.UNSETTLED: "unknown",
}
_TRACE_HEIGHT: Final = 48
_MARGIN_DEFAULT: Final = 0.05


class _Axis:
    """A horizontal axis between two values, with round numbers on it."""

    def __init__(self, low: float, high: float, *, unit: str = "") -> None:
        step = _round_step((high - low) / _NUM_TICKS)
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        self.ticks = [number * step for number in range(first, max(last, first + 1) + 1)]
        self._digits = max(0, -math.floor(math.log10(step)))
        self._unit = unit

    def place(self, value: float) -> str:
        """Return the x coordinate of a value; one beyond the axis is at its end."""
        low, high = self.ticks[0], self.ticks[-1]
        share = min(max((value - low) / (high - low), 0.0), 1.0)
        return f"{1.5 + 97 * share:.2f}%"

    def label(self, tick: float) -> str:
        """Return the text below a tick."""
        return f"{tick:.{self._digits}f}{self._unit}"


def _round_step(value: float) -> float:
    """Return the next 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= value * 0.999)


def compare_page(report: CompareReport) -> str:
    """Return the page."""
    script = quoting.join(report.command)
    body = (
        f"<h1>{_text(script)}</h1>",
        f"<p class=dim>{_text(report.host)}, {_text(report.date)}: {_text(machine_in_words(report.machine))}</p>",
        f"<p class=dim>{_text(report.steps_in_words)}</p>",
        f"<ul class=outcomes>{''.join(_outcomes(report))}</ul>",
        *_plots(report),
        "<h2>All figures</h2>",
        _table(report),
        "<h2>Commands</h2>",
        "".join(_commands(report)),
        "<h2>How to read this</h2>",
        f"<ul>{''.join(f'<li>{_text(text)}</li>' for text in _reading(report))}</ul>",
    )
    head = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"{policy_element(style=STYLE, script='', images='data:')}\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>numapin compare</title><link rel="icon" href="data:,"><style>{STYLE}</style></head>'
    )
    return f"{head}\n<body>\n{chr(10).join(body)}\n</body></html>\n"


def _outcomes(report: CompareReport) -> Iterator[str]:
    yield from chain.from_iterable(map(_outcome, report.variants))
    yield from (f"<li>{_text(note)}</li>" for note in report.notes)
    if not report.is_complete:
        yield "<li>Stopped early: these are the runs that had ended.</li>"


def _outcome(variant: VariantResult) -> Iterator[str]:
    if variant.ratio is not None:
        lines = "<br>".join(map(_text, verdict_lines(variant)))
        yield f'<li class="{_CLASSES[variant.ratio.verdict]}">{lines}</li>'
    if variant.failure is not None:
        yield f"<li class=slower><b>failed</b> {_text(variant.name)}<pre>{_lines(variant.failure)}</pre></li>"
    yield from (f"<li>{_text(variant.name)}: {_text(note)}</li>" for note in variant.notes)


def _plots(report: CompareReport) -> Iterator[str]:
    if not report.measured:
        return
    rows = [(variant, variant.ratio) for variant in report.measured if variant.ratio is not None]
    if rows:
        yield f"<h2>Times as fast as {_text(report.baseline or '')}</h2>"
        yield (
            "<p class=dim>Dot: estimate; line: 99 % interval. An interval beside the line at 1 is a difference, unless "
            "that is below 1 %; one that touches this line and stays in the band is no difference.</p>"
        )
        yield _ratio_plot(rows, report.settings.get("margin"))
    yield "<h2>Step time of each run</h2><p class=dim>A dot is the mean of one run; the bar is their median.</p>"
    yield _runs_plot(report.measured)
    yield (
        "<h2>Steps of the last run</h2><p class=dim>Time of each measured step of the slowest rank, on one scale. "
        "Regular peaks are waits for data, or work that is done every few steps.</p>"
    )
    yield _steps_plot(report.measured)


def _ratio_plot(rows: Sequence[tuple[VariantResult, StepRatio]], given_margin: object) -> str:
    margin = given_margin if isinstance(given_margin, float) else _MARGIN_DEFAULT
    ends = [end for _, ratio in rows for end in (ratio.low, ratio.high, ratio.ratio) if end is not None]
    shown = [end for end in ends if 0.1 <= end <= 10]  # an interval of two runs may reach from 0 to 1000
    axis = _Axis(min([*shown, 1 / (1 + margin)]), max([*shown, 1 + margin]), unit="x")
    back = _band(axis, margin)
    return "".join([*(_ratio_row(variant, ratio, axis, back) for variant, ratio in rows), _ticks(axis)])


def _band(axis: _Axis, margin: float) -> str:
    """Return the band of ratios that count as no difference, and the line at 1."""
    left, right = axis.place(1 / (1 + margin)), axis.place(1 + margin)
    width = float(right[:-1]) - float(left[:-1])
    return (
        f'<rect class="band" x="{left}" y="0" width="{width:.2f}%" height="100%"/>'
        f'<line class="one" x1="{axis.place(1)}" x2="{axis.place(1)}" y1="0" y2="100%"/>'
    )


def _ratio_row(variant: VariantResult, ratio: StepRatio, axis: _Axis, back: str) -> str:
    low, high = ratio.low or ratio.ratio, ratio.high or ratio.ratio
    css = _CLASSES[ratio.verdict]
    marks = (
        f'<line class="interval {css}" x1="{axis.place(low)}" x2="{axis.place(high)}" y1="14" y2="14"/>'
        f'<circle class="{css}" cx="{axis.place(ratio.ratio)}" cy="14" r="6"/>'
    )
    value = f"{ratio.ratio:.3f}x [{low:.3f}, {high:.3f}] {ratio.verdict}"
    return _row(variant.name, value, back + marks, height=28)


def _runs_plot(variants: Sequence[VariantResult]) -> str:
    values = {variant.name: [run.figures["step_s"] * 1000 for run in variant.runs] for variant in variants}
    axis = _Axis(0.0, max(chain.from_iterable(values.values())), unit=" ms")
    parts = []
    for variant in variants:
        middle = axis.place(variant.figures["step_s"].median * 1000)
        marks = f'<line class="median" x1="{middle}" x2="{middle}" y1="3" y2="25"/>' + "".join(
            f'<circle class="run" cx="{axis.place(value)}" cy="14" r="4"><title>{value:.3f} ms</title></circle>'
            for value in values[variant.name]
        )
        parts.append(_row(variant.name, f"{step_ms(variant.figures['step_s'])} ms", _grid(axis) + marks, height=28))
    return "".join([*parts, _ticks(axis)])


def _steps_plot(variants: Sequence[VariantResult]) -> str:
    series = {variant.name: [step * 1000 for step in variant.runs[-1].steps_s[:_SHOWN_STEPS]] for variant in variants}
    highest = _percentile(list(chain.from_iterable(series.values())), 0.99) * 1.15
    parts = []
    for name, steps in series.items():
        places = (
            f"{number / max(len(steps) - 1, 1) * 100:.2f},{_TRACE_HEIGHT * (1 - min(step / highest, 1)):.2f}"
            for number, step in enumerate(steps)
        )
        trace = (
            f'<svg class="trace" viewBox="0 0 100 {_TRACE_HEIGHT}" preserveAspectRatio="none" role="img" '
            f'aria-label="{_text(name)}: the time of {len(steps)} steps"><polyline points="{" ".join(places)}"/></svg>'
        )
        scale = f"{len(steps)} steps; 0 to {highest:.3g} ms"
        parts.append(f"<div class=row><p><b>{_text(name)}</b> <span>{scale}</span></p>{trace}</div>")
    return "".join(parts)


def _percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def _row(name: str, value: str, marks: str, *, height: int) -> str:
    """Return one variant's name and value, and its marks below them."""
    return (
        f"<div class=row><p><b>{_text(name)}</b> <span>{_text(value)}</span></p>"
        f'<svg height="{height}" role="img" aria-label="{_text(name)}: {_text(value)}">{marks}</svg></div>'
    )


def _grid(axis: _Axis) -> str:
    places = map(axis.place, axis.ticks)
    return "".join(f'<line class="grid" x1="{x}" x2="{x}" y1="0" y2="100%"/>' for x in places)


def _ticks(axis: _Axis) -> str:
    """Return the axis below the rows. The outer labels stay inside."""
    anchors = ["start", *["middle"] * (len(axis.ticks) - 2), "end"]
    labels = "".join(
        f'<text x="{axis.place(tick)}" y="13" text-anchor="{anchor}">{axis.label(tick)}</text>'
        for tick, anchor in zip(axis.ticks, anchors, strict=True)
    )
    return f'<svg class="axis" height="18" aria-hidden="true">{labels}</svg>'


def _table(report: CompareReport) -> str:
    shown = other_figures(report)
    head = ["variant", "runs", "step ms", "median step ms", "95 % below ms", *(OTHERS[name][0] for name in shown)]
    rows = "".join(_table_row(variant, shown) for variant in report.measured)
    headings = "".join(f'<th scope="col">{_text(text)}</th>' for text in head)
    return (
        f'<div class="scroll" tabindex="0"><table><thead><tr>{headings}</tr></thead><tbody>{rows}</tbody></table></div>'
    )


def _commands(report: CompareReport) -> Iterator[str]:
    for variant in report.variants:
        yield f"<p><b>{_text(variant.name)}</b></p><pre>{_text(quoting.join(variant.command))}</pre>"


def _table_row(variant: VariantResult, shown: Sequence[str]) -> str:
    cells = (
        str(variant.num_runs),
        step_ms(variant.figures["step_s"]),
        f"{variant.figures['step_median_s'].median * 1000:.2f}",
        f"{variant.figures['step_p95_s'].median * 1000:.2f}",
        *(figure_text(variant, name) for name in shown),
    )
    return f'<tr><th scope="row">{_text(variant.name)}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'


def _reading(report: CompareReport) -> Iterable[str]:
    settings = ", ".join(f"{name} {value}" for name, value in report.settings.items())
    meanings = {OTHERS[name][0] if name in OTHERS else name: meaning for name, meaning in FIGURES.items()}
    return (f"Settings: {settings}.", *(f"{name}: {meaning}." for name, meaning in meanings.items()), *CAVEATS)


def _lines(text: str) -> str:
    return "\n".join(_text(line) for line in text.split("\n"))


def _text(text: str) -> str:
    """Return text as HTML, with every special or invisible character replaced."""
    return escape(printable(text))
