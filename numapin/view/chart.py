"""Line and bar charts as SVG. Pure; no library.

Comes in: a `Figure`. Goes out: an SVG document that follows the reader's light or dark scheme and has a description in
words (desc). Series differ in color, in the shape of their markers and in their dashes: where two lines coincide, the
lower one shows in the gaps of the upper one, and through its hollow markers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias
from xml.sax.saxutils import escape

from numapin.base.sizes import size_label

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_WIDTH: Final = 720
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 16, 34, 46  # around the plot of a panel
_PLOT_HEIGHT: Final = 220
_PANEL_HEIGHT: Final = _TOP + _PLOT_HEIGHT + _BOTTOM
_PLOT_WIDTH: Final = _WIDTH - _LEFT - _RIGHT
_HEAD: Final = 48
_LEGEND_LINE: Final = 20
_LEGEND_COLUMN: Final = 172
_PER_LINE: Final = 4  # without descriptions; with them, one
_SAMPLE: Final = 30  # width of the sample of a line
_SHOWN_CHARS: Final = 96  # of a legend's line
_NUM_TICKS: Final = 5

_DASHES: Final = ("", "7 4", "2 3", "9 3 2 3", "14 4")

# Okabe and Ito's colors for any color vision; dark enough on white, light enough on black.
_COLORS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#b59f00")
_STYLE: Final = (
    "text{font:12px system-ui,sans-serif;fill:#222}.t{font-size:15px;font-weight:600}.h{font-weight:600}"
    ".g{stroke:#ddd}.a{stroke:#666}.s{stroke:#222}.p{fill:#fff}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}.g{stroke:#444}.a{stroke:#999}.s{stroke:#eee}.p{fill:#16181c}}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A value with its spread; `x` is a size in bytes, or the name of a group of bars."""

    x: float | str
    y: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """The points of one color. `about` describes the series in the legend."""

    name: str
    points: tuple[Point, ...]
    about: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One pair of axes: lines over a logarithmic axis of sizes, or bars if `x` is a name. `y_log`: logarithmic y."""

    title: str
    y_label: str
    series: tuple[Series, ...]
    x_label: str = ""
    y_log: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Panels one below the other, with one legend; `note` explains the marks."""

    title: str
    subtitle: str
    panels: tuple[Panel, ...]
    note: str = ""


def svg(figure: Figure) -> str:
    """Return the figure as an SVG document."""
    abouts = {series.name: series.about for panel in figure.panels for series in panel.series}
    names = tuple(abouts)
    legend = list(_legend(abouts, figure.note))
    top = _HEAD + _LEGEND_LINE * len(legend)
    height = top + _PANEL_HEIGHT * len(figure.panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        'role="img" aria-labelledby="title desc">',
        f'<title id="title">{_text(figure.title)}</title>',
        f'<desc id="desc">{_text(" ".join(_descriptions(figure)))}</desc>',
        f"<style>{_STYLE}</style>",
        f'<rect class="p" width="{_WIDTH}" height="{height}"/>',
        _label(_LEFT, 20, figure.title, css="t"),
        _label(_LEFT, 38, figure.subtitle),
        *legend,
    ]
    for number, panel in enumerate(figure.panels):
        parts += [f'<g transform="translate({_LEFT},{top + _PANEL_HEIGHT * number + _TOP})">']
        parts += [*_panel(panel, names), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def _descriptions(figure: Figure) -> Iterator[str]:
    """Yield a sentence for each series."""
    for panel in figure.panels:
        for series in panel.series:
            points = (_point_in_words(point, "({} to {})") for point in series.points)
            yield f"{panel.title}, {series.name}, {panel.y_label}: {', '.join(points)}."


def _point_in_words(point: Point, spread: str) -> str:
    x = point.x if isinstance(point.x, str) else size_label(point.x)
    return f"{x}: {_number(point.y)} {spread.format(_number(point.low), _number(point.high))}"


def _text(text: str) -> str:
    """Escape a text and drop the characters that XML does not allow."""
    return escape("".join(filter(str.isprintable, text)))


def _label(x: float, y: float, text: str, *, css: str = "", anchor: str = "start") -> str:
    return f'<text class="{css}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{_text(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, attributes: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" {attributes}/>'


def _number(value: float) -> str:
    """Return a number with four significant digits; large numbers have no exponent."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _color(number: int) -> str:
    return _COLORS[number % len(_COLORS)]


def _legend(abouts: Mapping[str, str], note: str) -> Iterator[str]:
    """Yield the lines of the legend: a series each if they have descriptions, else several."""
    per_line = 1 if any(abouts.values()) else _PER_LINE
    entries: list[list[str]] = []
    for number, (name, about) in enumerate(abouts.items()):
        row, column = divmod(number, per_line)
        entries += [[]] if column == 0 else []
        entries[row].append(_entry(number, f"{name}: {about}" if about else name, row, column))
    yield from map("".join, entries)
    if note:
        yield _label(_LEFT, _HEAD + 10 + len(entries) * _LEGEND_LINE, note)


def _entry(number: int, text: str, row: int, column: int) -> str:
    """Return a sample of a series' line with its marker, and its name."""
    x, y = _LEFT + column * _LEGEND_COLUMN, _HEAD + 10 + row * _LEGEND_LINE
    sample = _line(x, y - 4, x + _SAMPLE, y - 4, f'{_stroke(number)} stroke-width="2"')
    shown = text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 1]}…"
    return sample + _marker(x + _SAMPLE / 2, y - 4, number) + _label(x + _SAMPLE + 8, y, shown)


def _stroke(number: int) -> str:
    """Return the color and the dashes of a series."""
    dashes = _DASHES[number % len(_DASHES)]
    return f'stroke="{_color(number)}"' + (f' stroke-dasharray="{dashes}"' if dashes else "")


def _marker(x: float, y: float, number: int) -> str:
    """Return a circle, square, triangle or diamond, by the number of the series; every other one is hollow."""
    color = _color(number)
    fill = f'fill="none" stroke="{color}" stroke-width="1.5"' if number % 2 else f'fill="{color}"'
    shapes = (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" {fill}/>',
        f'<rect x="{x - 3.5:.1f}" y="{y - 3.5:.1f}" width="7" height="7" {fill}/>',
        f'<path d="M{x:.1f} {y - 5:.1f}l4.5 8.5h-9z" {fill}/>',
        f'<path d="M{x:.1f} {y - 5:.1f}l5 5l-5 5l-5-5z" {fill}/>',
    )
    return shapes[number % len(shapes)]


def _panel(panel: Panel, names: Sequence[str]) -> Iterator[str]:
    yield _label(0, -12, panel.title, css="h")
    points = [point for series in panel.series for point in series.points]
    if not points:
        yield _label(0, 20, "nothing was measured")
        return
    axis = _y_axis(points, log=panel.y_log)
    yield from _grid(axis)
    yield _line(0, _PLOT_HEIGHT, _PLOT_WIDTH, _PLOT_HEIGHT, 'class="a"')
    yield f'<g transform="rotate(-90)">{_label(-_PLOT_HEIGHT / 2, -54, panel.y_label, anchor="middle")}</g>'
    yield _label(_PLOT_WIDTH / 2, _PLOT_HEIGHT + 38, panel.x_label, anchor="middle")
    draw = _bars if isinstance(points[0].x, str) else _lines
    yield from draw(panel, names, axis)


class _LinearAxis:
    """The y axis from 0 to a round value."""

    def __init__(self, highest: float) -> None:
        step = _round_up(highest / _NUM_TICKS)
        num_steps = math.ceil(highest / step)
        self._top = step * num_steps
        self.ticks = [step * i for i in range(num_steps + 1)]

    def place(self, value: float) -> float:
        """Return the y coordinate of a value."""
        return _PLOT_HEIGHT * (1 - max(value, 0.0) / self._top)


class _LogAxis:
    """The y axis between two powers of ten."""

    def __init__(self, lowest: float, highest: float) -> None:
        self._first = math.floor(math.log10(lowest))
        last = max(math.ceil(math.log10(highest)), self._first + 1)
        self._num_powers = last - self._first
        self.ticks = [10.0**power for power in range(self._first, last + 1)]

    def place(self, value: float) -> float:
        """Return the y coordinate of a value; values below the axis are on it."""
        power = math.log10(max(value, self.ticks[0]))
        return _PLOT_HEIGHT * (1 - (power - self._first) / self._num_powers)


_Axis: TypeAlias = _LinearAxis | _LogAxis


def _grid(axis: _Axis) -> Iterator[str]:
    for tick in axis.ticks:
        yield _line(0, axis.place(tick), _PLOT_WIDTH, axis.place(tick), 'class="g"')
        yield _label(-6, axis.place(tick) + 4, _number(tick), anchor="end")


def _y_axis(points: Sequence[Point], *, log: bool) -> _Axis:
    highest = max(point.high for point in points)
    above_zero = [point.low for point in points if point.low > 0]
    if log and above_zero:
        return _LogAxis(min(above_zero), highest)
    return _LinearAxis(highest if highest > 0 else 1.0)


def _round_up(value: float) -> float:
    """Return the next 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= value * 0.999)


def _spread(x: float, point: Point, axis: _Axis, attributes: str) -> Iterator[str]:
    low, high = axis.place(point.low), axis.place(point.high)
    yield _line(x, low, x, high, attributes)
    for y in (low, high):
        yield _line(x - 3, y, x + 3, y, attributes)


def _lines(panel: Panel, names: Sequence[str], axis: _Axis) -> Iterator[str]:
    places = _size_places(panel)
    for size, x in places.items():
        yield _label(x, _PLOT_HEIGHT + 18, size_label(size), anchor="middle")
    for series in panel.series:
        places_and_points = [(places[float(point.x)], point) for point in series.points]
        yield from _line_with_markers(places_and_points, panel, series, names.index(series.name), axis)


def _line_with_markers(
    points: Sequence[tuple[float, Point]], panel: Panel, series: Series, number: int, axis: _Axis
) -> Iterator[str]:
    """Yield the line through the points of a series, each of which has its x coordinate, and their markers."""
    stroke = f'stroke="{_color(number)}"'
    path = " ".join(f"{x:.1f},{axis.place(point.y):.1f}" for x, point in points)
    yield f'<polyline points="{path}" fill="none" {_stroke(number)} stroke-width="2"/>'
    for x, point in points:
        yield from _spread(x, point, axis, stroke)
        yield _titled(_marker(x, axis.place(point.y), number), series, point, panel)


def _size_places(panel: Panel) -> dict[float, float]:
    """Return the x coordinate of each size, on a logarithmic axis; a single size is in the middle."""
    sizes = sorted({float(point.x) for series in panel.series for point in series.points})
    first, last = math.log2(sizes[0]), math.log2(sizes[-1])
    if first == last:
        return {sizes[0]: _PLOT_WIDTH / 2}
    width = _PLOT_WIDTH - 40
    return {size: 20 + width * (math.log2(size) - first) / (last - first) for size in sizes}


def _bars(panel: Panel, names: Sequence[str], axis: _Axis) -> Iterator[str]:
    groups = list(dict.fromkeys(str(point.x) for series in panel.series for point in series.points))
    group_width = _PLOT_WIDTH / len(groups)
    width = 0.8 * group_width / len(panel.series)
    for number, group in enumerate(groups):
        yield _label((number + 0.5) * group_width, _PLOT_HEIGHT + 18, group, anchor="middle")
    for place, series in enumerate(panel.series):
        color, weight = _fill(names.index(series.name))
        for point in series.points:
            x, y = (groups.index(str(point.x)) + 0.1) * group_width + place * width, axis.place(point.y)
            size = f'width="{width * 0.92:.1f}" height="{_PLOT_HEIGHT - y:.1f}"'
            bar = f'<rect x="{x:.1f}" y="{y:.1f}" {size} fill="{color}" fill-opacity="{weight}" stroke="{color}"/>'
            yield _titled(bar, series, point, panel)
            yield from _spread(x + width * 0.46, point, axis, 'class="s"')


def _fill(number: int) -> tuple[str, float]:
    """Return the color and the opacity of a series' bars; the colors return, paler, after the last one."""
    return _color(number), (1.0, 0.45, 0.15)[number // len(_COLORS) % 3]


def _titled(shape: str, series: Series, point: Point, panel: Panel) -> str:
    """Return a shape with the text that is shown when the pointer rests on it."""
    words = f"{series.name}, {_point_in_words(point, '[{}, {}]')} {panel.y_label}"
    return f"<g><title>{_text(words)}</title>{shape}</g>"
