"""Charts: valid XML with every point, for any names and values."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from numapin.base.sizes import size_label
from numapin.bench.model import Benchmark, BenchReport, Case, Peer, Run, summarize
from numapin.view.bench_layouts import LAUNCH, TRANSFER
from numapin.view.bench_plot import bench_figure
from numapin.view.chart import Figure, Panel, Point, Series, svg
from tests.pictures import parsed

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = '</text><script>alert("x")</script>&amp; \x00\x1b \u202e "quoted"'


def line(name: str, *values: float) -> Series:
    """Return a series over 4 KiB, 64 KiB, 1 MiB and so on, with a spread of 10% up and down."""
    points = (Point(x=4096.0 * 16**i, y=y, low=y * 0.9, high=y * 1.1) for i, y in enumerate(values))
    return Series(name=name, points=tuple(points))


def figure(*series: Series, y_log: bool = False) -> Figure:
    """Return a figure of one panel."""
    panel = Panel(title="h2d", y_label="GB/s", x_label="size", series=series, y_log=y_log)
    return Figure(title="a title", subtitle="a machine", panels=(panel,))


def drawn(shown: Figure) -> Element:
    """Draw a figure and parse the document."""
    return parsed(svg(shown))


def texts(root: Element) -> list[str]:
    """Return the texts of a document, in order."""
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def test_every_point_is_drawn() -> None:
    """Each point has a marker with a title of series, size and value; a line joins the points of a series."""
    root = drawn(figure(line("pinned", 1, 20, 50), line("pageable", 1, 5, 10)))
    words = [element.text or "" for element in root.iter(f"{SVG}title")][1:]
    assert len(words) == 6
    assert words[1] == "pinned, 64 KiB: 20 [18, 22] GB/s"
    lines = [element.get("points", "").split() for element in root.iter(f"{SVG}polyline")]
    assert [len(points) for points in lines] == [3, 3]


@pytest.mark.parametrize("y_log", [False, True])
def test_higher_values_are_higher_up(*, y_log: bool) -> None:
    """The line rises with its values and stays inside the axes; sizes are spaced by their logarithms."""
    (points,) = (
        e.get("points", "").split() for e in drawn(figure(line("a", 1, 20, 500), y_log=y_log)).iter(f"{SVG}polyline")
    )
    places = [tuple(map(float, point.split(","))) for point in points]
    assert all(later[1] < earlier[1] for earlier, later in pairwise(places))
    assert all(0 <= y <= 220 for _, y in places)
    assert places[1][0] - places[0][0] == pytest.approx(places[2][0] - places[1][0], abs=0.2)


def test_the_spread_is_drawn() -> None:
    """A line goes from the lowest to the highest value, to scale: 25 to 75 is half of an axis from 0 to 100."""
    point = Point(x=4096.0, y=50, low=25, high=75)
    other = Point(x=8192.0, y=100, low=100, high=100)
    root = drawn(figure(Series(name="a", points=(point, other))))
    color = next(e.get("stroke") for e in root.iter(f"{SVG}polyline"))
    bars = [e for e in root.iter(f"{SVG}line") if e.get("stroke") == color and e.get("x1") == e.get("x2")]
    lengths = [abs(float(bar.get("y1", "")) - float(bar.get("y2", ""))) for bar in bars]
    assert lengths == [pytest.approx(110, abs=0.2), 0]


def test_text_alternative() -> None:
    """A screen reader finds the title and every figure."""
    root = drawn(figure(line("pinned", 1, 20)))
    assert (root.get("role"), root.get("aria-labelledby")) == ("img", "title desc")
    assert "h2d, pinned, GB/s: 4 KiB: 1 (0.9 to 1.1), 64 KiB: 20 (18 to 22)." in (root.findtext(f"{SVG}desc") or "")


def test_light_and_dark() -> None:
    """Text and background have colors for a dark scheme; nothing is loaded from other hosts."""
    text = svg(figure(line("a", 1)))
    assert "@media(prefers-color-scheme:dark)" in text
    assert text.count("http") == 1  # the name space


def test_hostile_names() -> None:
    """Names with markup stay text and make no element; characters that are not printable are dropped."""
    shown = figure(replace(line("x", 1, 2), name=HOSTILE))
    root = drawn(replace(shown, title=HOSTILE, subtitle=HOSTILE))
    assert [element for element in root.iter() if "script" in element.tag] == []
    assert '</text><script>alert("x")</script>&amp;   "quoted"' in texts(root)


@pytest.mark.parametrize(
    "values",
    [(), (0.0,), (1e-9, 2e-9), (1e12,), (0.0, 5.0), (3.0, 3.0, 3.0)],
    ids=["none", "zero", "tiny", "huge", "zero-and-more", "equal"],
)
@pytest.mark.parametrize("y_log", [False, True])
def test_odd_values(values: tuple[float, ...], *, y_log: bool) -> None:
    """Without values, and with zeros and extremes, all coordinates are finite."""
    root = drawn(figure(line("a", *values), y_log=y_log))
    numbers = [float(e.get(key, "0")) for e in root.iter() for key in ("x", "y", "x1", "y1", "x2", "y2", "cx", "cy")]
    assert all(math.isfinite(number) for number in numbers)
    assert ("nothing was measured" in texts(root)) == (not values)


def test_bars() -> None:
    """If x is a name, values are bars of their height, side by side within their group."""
    series = tuple(
        Series(name=name, points=tuple(Point(x=x, y=y, low=y, high=y) for x, y in (("one", y), ("two", 2 * y))))
        for name, y in (("ours", 10.0), ("theirs", 20.0))
    )
    bars = [(float(e[1].get("x", "")), float(e[1].get("height", ""))) for e in drawn(figure(*series)).iter(f"{SVG}g")
            if len(e) == 2 and e[1].tag == f"{SVG}rect"]  # fmt: skip
    ours_one, ours_two, theirs_one, theirs_two = bars
    assert ours_one[0] < theirs_one[0] < ours_two[0] < theirs_two[0]
    assert theirs_two[1] == pytest.approx(4 * ours_one[1], abs=0.3)


@pytest.mark.parametrize(
    ("num_bytes", "label"),
    [(1, "1 B"), (4096, "4 KiB"), (1536 << 10, "1.5 MiB"), (1 << 30, "1 GiB"), (1 << 42, "4096 GiB")],
)
def test_size_labels(num_bytes: int, label: str) -> None:
    """A size has the largest unit that leaves at least one."""
    assert size_label(num_bytes) == label


def report(*cases: Case, figures: dict[str, float]) -> BenchReport:
    """Return a report of two repeats in which every peer has these figures, doubled in the second."""
    benchmark = Benchmark(name="transfer", module="none", cases=cases)
    runs = [
        Run(
            case=case.name, peer=peer.name, repeat=i, figures={name: value * (i + 1) for name, value in figures.items()}
        )
        for case in cases
        for peer in case.peers
        for i in range(2)
    ]
    return BenchReport(benchmark="transfer", command=(), machine={}, settings={}, cases=summarize(benchmark, runs))


class TestOfReports:
    """The plotted figures of a report."""

    def test_a_sweep(self) -> None:
        """One panel per sweep and figure, one series per peer, one point per size with the spread over the repeats."""
        peers = (Peer(name="pinned", specs=()),)
        cases = [
            Case(name=f"{g}{n}", about="", group=g, num_bytes=n, peers=peers) for g in ("h2d", "d2h") for n in (64, 256)
        ]
        shown = bench_figure(report(*cases, figures={"gbps": 10, "us": 3}), TRANSFER)
        assert [panel.title for panel in shown.panels] == [
            "h2d: bandwidth in GB/s",
            "d2h: bandwidth in GB/s",
            "h2d: time of one copy in us",
            "d2h: time of one copy in us",
        ]
        (series,) = shown.panels[0].series
        assert series.points == tuple(Point(x=size, y=15, low=10, high=20) for size in (64.0, 256.0))

    def test_cases_without_a_sweep(self) -> None:
        """One panel per figure, with the cases along the axis."""
        cases = [Case(name=name, about="", peers=(Peer(name="ours", specs=()),)) for name in ("print", "all-reduce")]
        shown = bench_figure(report(*cases, figures={"total_s": 2}), LAUNCH)
        (panel,) = shown.panels
        assert [point.x for point in panel.series[0].points] == ["print", "all-reduce"]

    def test_nothing_measured(self) -> None:
        """A report of skipped cases gives a document without panels."""
        case = Case(name="transfer", about="", skipped="torch sees no GPU")
        assert drawn(bench_figure(report(case, figures={}), TRANSFER)).tag == f"{SVG}svg"
