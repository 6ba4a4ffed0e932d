"""The live screen of `numapin top`: its layout at any size, its keys, and what it marks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from numapin.observe.history import History
from numapin.topology.readings import GpuLoad
from numapin.view.gauges import ASCII, BLOCKS, bar, curve
from numapin.view.top_screen import TopScreen
from numapin.view.top_view import RowOrder, TopView
from tests.terminals import HOSTILE
from tests.unit.watched import job, loop, rank

if TYPE_CHECKING:
    from rich.text import Text

    from numapin.observe.top import Top, TopRank


def _screen(*ranks: TopRank, view: TopView | None = None, seen: Top | None = None) -> TopScreen:
    now = seen or job(*ranks)
    before = [
        replace(rank, loop=loop(rank.loop.waited_s * 0.995, rank.loop.stepped_s - 1, 990))
        for rank in now.ranks
        if rank.loop
    ]
    history = History().added(job(*before)).added(now)
    return TopScreen(top=now, history=history, view=view or TopView(), glyphs=BLOCKS)


def _plain(lines: list[Text]) -> list[str]:
    return [line.plain for line in lines]


def _red(line: Text) -> list[str]:
    """Return the parts of a line that are red."""
    return [line.plain[span.start : span.end] for span in line.spans if "red" in str(span.style)] + (
        [line.plain] if "red" in str(line.style) else []
    )


EIGHT = tuple(rank(number) for number in range(8))


class TestSizes:
    """The lines fit the screen."""

    @pytest.mark.parametrize("size", [(80, 24), (200, 50), (40, 10), (120, 30), (20, 5), (1, 1), (300, 3)])
    @pytest.mark.parametrize("details", [False, True])
    def test_fits(self, size: tuple[int, int], *, details: bool) -> None:
        """No line is wider than the screen, and there are as many lines as rows."""
        width, height = size
        gone = rank(8, is_gone=True, loop=None)
        screen = _screen(*EIGHT, gone, view=TopView(selected=8, shows_details=details))
        lines = screen.lines(width=width, height=height)
        assert len(lines) == height
        assert max(line.cell_len for line in lines) <= width

    def test_narrow(self) -> None:
        """80 columns have a bar, the rate and its curve, the loader, CPU, what is off plan, and the GPU."""
        title, totals, heading, first, *_ = _plain(_screen(*EIGHT).lines(width=80, height=24))
        assert title == "numapin top: run-20261123-101500-host-8e8e0dd1  up 1:02:03  8 ranks"
        assert totals == "CPU 3400%  GPU power 4898 W  swap: 0 pages/s in, 0 out (whole machine)"
        assert heading.split() == [
            *("rank", "step", "steps/s", "trend", "loader", "CPU", "off", "remote", "GPU", "GiB", "W")
        ]
        assert first.split() == [
            "0",
            "██████░",
            "10.0",
            "█",
            "ok",
            "425%",
            "0/120",
            "0.1%",
            "87%",
            "40.0/80",
            "612",
        ]

    def test_wide(self) -> None:
        """200 columns have all facts, a longer bar, and the legend; all ranks end in the same column."""
        lines = _plain(_screen(*EIGHT).lines(width=200, height=50))
        assert lines[2].split()[-7:] == ["H2D", "data", "pinned", "node", "CPUs", "device", "pid"]
        assert lines[3].count("█") > 12
        assert lines[3].endswith("0 00:00.0      40000")
        assert {len(line) for line in lines[3:11]} == {len(lines[3])}
        assert any("pinned: GiB" in line for line in lines)

    def test_more_ranks_than_rows(self) -> None:
        """The rows that fit are shown with the number of the others; the selected rank is always among them."""
        lines = _plain(_screen(*EIGHT, view=TopView(selected=7)).lines(width=80, height=10))
        assert [line.split()[0] for line in lines[3:8]] == ["4", "5", "6", ">", "4"]
        assert lines[7] == "4 more ranks: up and down move"

    def test_what_stays(self) -> None:
        """The lines that stay after the end have all ranks and no keys."""
        lines = _plain(_screen(*EIGHT).final(width=80))
        assert [line.split()[0] for line in lines[3:]] == [str(number) for number in range(8)]


class TestMarks:
    """What needs attention is red, and what is unknown is a dash."""

    def test_off_plan(self) -> None:
        """Threads off the plan and pages on other nodes are red, and nothing else of the row."""
        lines = _screen(rank(num_off_plan=3, remote_share=0.3)).lines(width=80, height=24)
        assert [part.strip() for part in _red(lines[3])] == ["3/120", "30.0%"]
        assert not any(map(_red, _screen(*EIGHT).lines(width=80, height=24)))

    def test_gone(self) -> None:
        """A rank that is gone is red as a whole, without figures, with its place in the plan."""
        lines = _screen(rank(), rank(1, is_gone=True, loop=None)).lines(width=200, height=24)
        assert lines[4].plain.split()[:2] == ["1", "gone"]
        assert lines[4].plain.endswith("40001")
        assert _red(lines[4]) == [lines[4].plain]
        assert "1 gone" in lines[0].plain
        selected = _screen(rank(1, is_gone=True, loop=None), view=TopView(selected=1)).lines(width=80, height=24)[3]
        assert selected.plain.startswith(">  1  gone")

    def test_unknown(self) -> None:
        """A rank without numapin's loader and without a GPU that answers has dashes there, and its CPU and memory."""
        bare = rank(loop=None, load=GpuLoad())
        cells = _plain(_screen(bare).lines(width=80, height=24))[3].split()
        assert cells == ["0", "-", "-", "-", "425%", "0/120", "0.1%", "-", "-", "-"]

    def test_many_threads(self) -> None:
        """Where the threads do not fit, those off the plan are shown."""
        line = _plain(_screen(rank(num_threads=4000, num_off_plan=12)).lines(width=80, height=24))[3]
        assert line.split()[-5] == "12"

    def test_names_stay_in_their_line(self) -> None:
        """A run's name cannot control the terminal, and is cut."""
        seen = replace(job(rank()), run=HOSTILE * 9)
        title = _screen(seen=seen).lines(width=80, height=24)[0]
        assert title.plain.isprintable()
        assert title.plain.endswith("…")

    def test_shared_gpu(self) -> None:
        """The power of a GPU that two ranks share counts once."""
        both = rank(), replace(rank(), plan=replace(rank().plan, local_rank=1))
        assert "GPU power 612 W" in _plain(_screen(*both).lines(width=80, height=24))[1]


class TestKeys:
    """Sorting, selecting, details, pause."""

    def test_sorting(self) -> None:
        """The key s goes through the orders and comes back to the ranks."""
        view, seen = TopView(), []
        for _ in RowOrder:
            seen.append(view.order)
            view = view.pressed("s", [])
        assert seen == list(RowOrder)
        assert view.order is RowOrder.RANK

    @pytest.mark.parametrize(
        ("order", "expected"),
        [
            (RowOrder.RANK, [0, 1, 2]),
            (RowOrder.SLOWEST, [1, 0, 2]),
            (RowOrder.WAIT, [0, 1, 2]),
            (RowOrder.CPU, [2, 0, 1]),
            (RowOrder.OFF, [1, 0, 2]),
        ],
    )
    def test_orders(self, order: RowOrder, expected: list[int]) -> None:
        """What needs attention comes first, what is unknown last, and ranks that are equal by number."""
        ranks = (
            rank(0, loop=loop(50.0, 100.0, 1000)),
            rank(1, loop=loop(10.0, 100.0, 995), num_off_plan=1),
            rank(2, loop=None, cpu_share=9.0),
        )
        assert [row.plan.local_rank for row in _screen(*ranks, view=TopView(order=order)).rows] == expected

    def test_selecting(self) -> None:
        """Up and down move within the rows as they are sorted, and stop at the ends."""
        rows, view = [3, 1, 2], TopView()
        seen = []
        for key in ("down", "j", "down", "down", "up", "k", "up"):
            view = view.pressed(key, rows)
            seen.append(view.selected)
        assert seen == [3, 1, 2, 2, 1, 3, 3]
        assert TopView(selected=9).pressed("up", rows).selected == 2
        assert TopView().pressed("down", []) == TopView()

    def test_details(self) -> None:
        """The key d shows the selected rank, the first if none is, and hides it again; Escape hides both."""
        view = TopView().pressed("d", [4, 5])
        assert (view.selected, view.shows_details) == (4, True)
        assert not view.pressed("enter", [4, 5]).shows_details
        assert view.pressed("escape", [4, 5]) == TopView()
        lines = _plain(_screen(*EIGHT, view=view).lines(width=80, height=24))
        at = lines.index("rank 4")
        assert lines[at + 1 : at + 4] == [
            "process   40004, up 1:02:03",
            "GPU       4 04:00.0 GPU-4",
            "GPU load  87% busy, 40.0/80 GiB, 612 W, 12.4 GB/s received",
        ]

    def test_pause(self) -> None:
        """A pause is shown in the title; unknown keys change nothing."""
        view = TopView().pressed("p", [])
        assert _plain(_screen(rank(), view=view).lines(width=80, height=24))[0].endswith("PAUSED")
        assert view.pressed(" ", []) == TopView()
        assert TopView().pressed("x", [1]) == TopView()


class TestGauges:
    """Bars and curves."""

    @pytest.mark.parametrize(
        ("wait", "copy", "shown"),
        [
            (None, None, "-         "),
            (0.0, None, "##########"),
            (1.0, 0.5, ".........."),
            (0.5, 0.2, "###==....."),
            (0.02, 0.02, "########=."),
            (0.999, 0.0, "#........."),
            (0.001, 0.001, "##########"),
        ],
    )
    def test_bar(self, wait: float | None, copy: float | None, shown: str) -> None:
        """Each part has its share of the width; a small one is seen, and only a whole one fills the bar."""
        assert bar(wait_share=wait, copy_share=copy, width=10, glyphs=ASCII).plain == shown

    def test_curve(self) -> None:
        """The latest values are at the right, from 0 to the largest."""
        assert curve([9.0, 0.0, 2.0, 4.0], width=3, glyphs=BLOCKS).plain == "▁▅█"
        assert curve([1.0], width=3, glyphs=BLOCKS).plain == "  █"
        assert curve([0.0, 0.0], width=2, glyphs=ASCII).plain == "__"
