"""Line and bar charts as SVG. Pure; no library.

Comes in: a `Figure`. Goes out: an SVG document of its own, which follows the reader's light or dark scheme, and says in
words (desc) what it shows. Lines have markers of different shapes, so that colours are not all that tells them apart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_WIDTH: Final = 720
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 16, 34, 46  # around the plot of a panel
_PLOT_HEIGHT: Final = 220
_PANEL_HEIGHT: Final = _TOP + _PLOT_HEIGHT + _BOTTOM
_PLOT_WIDTH: Final = _WIDTH - _LEFT - _RIGHT
_HEAD: Final = 48
_LEGEND_LINE: Final = 20
_LEGEND_COLUMN: Final = 172
_PER_LINE: Final = 4
_NUM_TICKS: Final = 5

# Okabe and Ito's colours, which the colour-blind tell apart; dark enough on white, light enough on black.
_COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#b59f00")
_STYLE: Final = (
    "text{font:12px system-ui,sans-serif;fill:#222}.t{font-size:15px;font-weight:600}.h{font-weight:600}"
    ".g{stroke:#ddd}.a{stroke:#666}.s{stroke:#222}.p{fill:#fff}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}.g{stroke:#444}.a{stroke:#999}.s{stroke:#eee}.p{fill:#16181c}}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A value with its spread; `x` is a number, or the name of a group of bars."""

    x: float | str
    y: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """What has one colour."""

    name: str
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One pair of axes. With numbers for `x` lines over a logarithmic axis of bytes, else bars; `y_log` for y."""

    title: str
    y_label: str
    series: tuple[Series, ...]
    x_label: str = ""
    y_log: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Panels below each other, with one legend."""

    title: str
    subtitle: str
    panels: tuple[Panel, ...]


def svg(figure: Figure) -> str:
    """Return the figure as an SVG document."""
    names = tuple(dict.fromkeys(series.name for panel in figure.panels for series in panel.series))
    top = _HEAD + _LEGEND_LINE * -(-len(names) // _PER_LINE)
    height = top + _PANEL_HEIGHT * len(figure.panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        'role="img" aria-labelledby="title desc">',
        f'<title id="title">{_text(figure.title)}</title>',
        f'<desc id="desc">{_text(" ".join(_words(figure)))}</desc>',
        f"<style>{_STYLE}</style>",
        f'<rect class="p" width="{_WIDTH}" height="{height}"/>',
        _label(_LEFT, 20, figure.title, css="t"),
        _label(_LEFT, 38, figure.subtitle),
        *_legend(names),
    ]
    for number, panel in enumerate(figure.panels):
        parts += [f'<g transform="translate({_LEFT},{top + _PANEL_HEIGHT * number + _TOP})">']
        parts += [*_panel(panel, names), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def size_label(num_bytes: float) -> str:
    """Write bytes as people do: 4 KiB, 1.5 MiB."""
    power = min(3, int(math.log2(max(num_bytes, 1)) // 10))
    return f"{num_bytes / 1024**power:.4g} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def _words(figure: Figure) -> Iterator[str]:
    for panel in figure.panels:
        for series in panel.series:
            points = (_point(point, "({} to {})") for point in series.points)
            yield f"{panel.title}, {series.name}, {panel.y_label}: {', '.join(points)}."


def _point(point: Point, spread: str) -> str:
    return f"{_name(point.x)}: {_number(point.y)} {spread.format(_number(point.low), _number(point.high))}"


def _name(x: float | str) -> str:
    return x if isinstance(x, str) else size_label(x)


def _text(text: str) -> str:
    """Escape, and leave out what XML has no place for."""
    return escape("".join(c for c in text if c.isprintable()))


def _label(x: float, y: float, text: str, *, css: str = "", anchor: str = "start") -> str:
    return f'<text class="{css}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{_text(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, attributes: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" {attributes}/>'


def _number(value: float) -> str:
    """Write a number with four digits that count, and without an exponent where it is large."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]


def _legend(names: Sequence[str]) -> Iterator[str]:
    for number, name in enumerate(names):
        line, column = divmod(number, _PER_LINE)
        x, y = _LEFT + column * _LEGEND_COLUMN, _HEAD + 10 + line * _LEGEND_LINE
        yield _marker(x + 5, y - 4, number)
        yield _label(x + 16, y, name)


def _marker(x: float, y: float, number: int) -> str:
    """Return a circle, square, triangle or diamond, by the number of the series."""
    fill = f'fill="{_colour(number)}"'
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
    to_y, ticks = _y_axis(points, log=panel.y_log)
    for tick in ticks:
        yield _line(0, to_y(tick), _PLOT_WIDTH, to_y(tick), 'class="g"')
        yield _label(-6, to_y(tick) + 4, _number(tick), anchor="end")
    yield _line(0, _PLOT_HEIGHT, _PLOT_WIDTH, _PLOT_HEIGHT, 'class="a"')
    yield f'<g transform="rotate(-90)">{_label(-_PLOT_HEIGHT / 2, -54, panel.y_label, anchor="middle")}</g>'
    yield _label(_PLOT_WIDTH / 2, _PLOT_HEIGHT + 38, panel.x_label, anchor="middle")
    draw = _bars if isinstance(points[0].x, str) else _lines
    yield from draw(panel, names, to_y)


def _y_axis(points: Sequence[Point], *, log: bool) -> tuple[Callable[[float], float], list[float]]:
    """Return what turns a value into a height, and the values that are written."""
    highest = max(point.high for point in points)
    positive = [point.low for point in points if point.low > 0]
    if log and positive:
        first, last = math.floor(math.log10(min(positive))), math.ceil(math.log10(highest))
        last = max(last, first + 1)

        def to_y_log(value: float) -> float:
            return _PLOT_HEIGHT * (1 - (math.log10(max(value, 10.0**first)) - first) / (last - first))

        return to_y_log, [10.0**power for power in range(first, last + 1)]
    step = _round_up((highest if highest > 0 else 1.0) / _NUM_TICKS)
    top = step * math.ceil((highest if highest > 0 else 1.0) / step)
    return (lambda value: _PLOT_HEIGHT * (1 - max(value, 0.0) / top)), [step * i for i in range(round(top / step) + 1)]


def _round_up(value: float) -> float:
    """Return the next of 1, 2 and 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= value * 0.999)


def _spread(x: float, point: Point, to_y: Callable[[float], float], attributes: str) -> Iterator[str]:
    low, high = to_y(point.low), to_y(point.high)
    yield _line(x, low, x, high, attributes)
    for y in (low, high):
        yield _line(x - 3, y, x + 3, y, attributes)


def _lines(panel: Panel, names: Sequence[str], to_y: Callable[[float], float]) -> Iterator[str]:
    sizes = sorted({point.x for series in panel.series for point in series.points if not isinstance(point.x, str)})
    first, last = math.log2(sizes[0]), math.log2(sizes[-1])

    def to_x(size: float) -> float:
        return 20 + (_PLOT_WIDTH - 40) * (0.5 if last == first else (math.log2(size) - first) / (last - first))

    for size in sizes:
        yield _label(to_x(size), _PLOT_HEIGHT + 18, size_label(size), anchor="middle")
    for series in panel.series:
        number = names.index(series.name)
        stroke = f'stroke="{_colour(number)}"'
        places = [(to_x(float(point.x)), point) for point in series.points]
        path = " ".join(f"{x:.1f},{to_y(point.y):.1f}" for x, point in places)
        yield f'<polyline points="{path}" fill="none" {stroke} stroke-width="2"/>'
        for x, point in places:
            yield from _spread(x, point, to_y, stroke)
            yield _titled(_marker(x, to_y(point.y), number), series, point, panel)


def _bars(panel: Panel, names: Sequence[str], to_y: Callable[[float], float]) -> Iterator[str]:
    groups = list(dict.fromkeys(str(point.x) for series in panel.series for point in series.points))
    group_width = _PLOT_WIDTH / len(groups)
    width = 0.8 * group_width / len(panel.series)
    for number, group in enumerate(groups):
        yield _label((number + 0.5) * group_width, _PLOT_HEIGHT + 18, group, anchor="middle")
    for place, series in enumerate(panel.series):
        colour = _colour(names.index(series.name))
        for point in series.points:
            x, y = (groups.index(str(point.x)) + 0.1) * group_width + place * width, to_y(point.y)
            size = f'width="{width * 0.92:.1f}" height="{_PLOT_HEIGHT - y:.1f}"'
            yield _titled(f'<rect x="{x:.1f}" y="{y:.1f}" {size} fill="{colour}"/>', series, point, panel)
            yield from _spread(x + width * 0.46, point, to_y, 'class="s"')


def _titled(shape: str, series: Series, point: Point, panel: Panel) -> str:
    """Give a shape the text that is shown when the pointer rests on it."""
    words = f"{series.name}, {_point(point, '[{}, {}]')} {panel.y_label}"
    return f"<g><title>{_text(words)}</title>{shape}</g>"
