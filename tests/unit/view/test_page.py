"""The HTML page around the picture: well-formed, self-contained, with the facts in words; and readable colors."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import combinations

import pytest

from numapin import Bind, Nic, Request, make_plan
from tests.machines.grids import gpu, grid
from tests.pictures import HOSTILE, golden_machine
from tests.policies import policy_of
from tests.unit.view.seam import COLORS, RANK_COLORS, element, lay_out, page

VOID = {"meta"}


class _Reader(HTMLParser):
    """Checks that elements close in order, and keeps their text and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[tuple[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.words.append((self.open[-1], data))

    def texts(self, tag: str) -> list[str]:
        return [data for opened, data in self.words if opened == tag]


def _read(text: str) -> _Reader:
    reader = _Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    return reader


class TestPage:
    """The HTML page."""

    @pytest.mark.parametrize("bind", [None, Bind.NODE, Bind.EXCLUSIVE])
    def test_elements_close_and_nothing_is_loaded(self, bind: Bind | None) -> None:
        """It is well-formed, contains the picture, and names no other file."""
        topology = golden_machine("2pkg-8node-smt2-8gpu-pairs")
        plan = None if bind is None else make_plan(topology, Request(bind=bind))
        text = page(topology, plan)
        reader = _read(text)
        assert element(lay_out(topology, plan)) in text
        assert not {"src", "href", "xlink:href", "srcset"} & {
            name for _, attributes in reader.seen for name in attributes
        }
        assert "@import" not in text
        assert set(re.findall(r"https?://[^\"' )]+", text)) == {"http://www.w3.org/2000/svg"}
        assert not {"link", "img", "iframe", "object", "embed", "script"} & {tag for tag, _ in reader.seen}

    def test_only_its_own_style_is_allowed(self) -> None:
        """The policy allows one style by hash and no script, and there are no style attributes, which it refuses."""
        topology = golden_machine("2pkg-8node-smt2-8gpu-pairs")
        text = page(topology, make_plan(topology, Request()))
        policy = policy_of(text)
        assert {name for name, sources in policy.items() if sources != ["'none'"]} == {"style-src"}
        assert [source[:8] for source in policy["style-src"]] == ["'sha256-"]
        assert not [attributes for _, attributes in _read(text).seen if "style" in attributes]

    def test_tables_have_the_facts_of_the_picture(self) -> None:
        """One row per node with CPUs, devices and ranks, one row per rank with its reason, and the warnings."""
        topology = golden_machine("2pkg-8node-smt2-8gpu-pairs")
        plan = make_plan(topology, Request())
        text = page(topology, plan)
        assert (
            '<tr><th scope="row">3</th><td>CPUs</td><td>0</td><td>48-63,176-191</td><td>128.0 GiB</td>'
            "<td>64.0 GiB</td><td>gpu0, gpu1, mlx5_0</td><td>0-1</td><td>0-1</td></tr>" in text
        )
        assert {rank.reason for rank in plan.ranks} <= set(_read(text).texts("td"))
        assert plan.warnings[0] in _read(text).texts("li")

    def test_empty_nodes_and_lost_devices_have_a_row(self) -> None:
        """The 28 empty nodes of a GB200 tray are one row; devices of unknown node are listed, not left out."""
        text = page(golden_machine("2pkg-34node-gpumem-4gpu"))
        assert '<tr><th scope="row">3-9,11-17,19-25,27-33</th><td>empty</td>' in text
        lost = replace(grid(gpus=[None]), nics=(Nic(name="eth0"),))
        assert '<tr><th scope="row">unknown</th>' + "<td></td>" * 5 + "<td>gpu0, eth0</td>" in page(lost)

    def test_without_a_plan_ranks_are_not_mentioned(self) -> None:
        """There is no table of ranks."""
        assert "The binding of each rank" not in page(golden_machine("1pkg-nonode-2cpu"))

    def test_hostile_names_are_text(self) -> None:
        """Markup in names, notes and reasons is shown as text; control characters are replaced; long texts are cut."""
        topology = replace(
            grid(nodes=2),
            host=HOSTILE[0],
            gpus=tuple(replace(gpu(i, i % 2), name=name, uuid=name) for i, name in enumerate(HOSTILE)),
            nics=tuple(Nic(name=name, node=0) for name in HOSTILE),
            notes=HOSTILE,
        )
        plan = make_plan(topology, Request())
        plan = replace(plan, ranks=tuple(replace(rank, reason=HOSTILE[rank.local_rank]) for rank in plan.ranks))
        text = page(topology, plan)
        reader = _read(text)
        assert "script" not in [tag for tag, _ in reader.seen]
        assert not [name for _, attributes in reader.seen for name in attributes if name.startswith("on")]
        assert "<script>alert(1)</script>" in "".join(reader.texts("li"))
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\u202e\u2028\ufffe]", text)
        assert "W" * 600 not in text


# --- colors ---------------------------------------------------------------------------------------------------------

# How colors look with one kind of cone missing, as a matrix on linear RGB (Machado et al. 2009, severity 1).
VISIONS = {
    "all cones": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
RGB_TO_XYZ = ((0.4124564, 0.3575761, 0.1804375), (0.2126729, 0.7151522, 0.0721750), (0.0193339, 0.1191920, 0.9503041))
WHITE = (0.95047, 1.0, 1.08883)

Vector = tuple[float, ...]
Matrix = tuple[tuple[float, ...], ...]


def _linear(color: str) -> Vector:
    values = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return tuple(v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values)


def _times(matrix: Matrix, vector: Vector) -> Vector:
    return tuple(min(1.1, max(0.0, sum(m * v for m, v in zip(row, vector, strict=True)))) for row in matrix)


def _lab(linear: Vector) -> Vector:
    x, y, z = (
        (v / w) ** (1 / 3) if v / w > 216 / 24389 else (24389 / 27 * v / w + 16) / 116
        for v, w in zip(_times(RGB_TO_XYZ, linear), WHITE, strict=True)
    )
    return (116 * y - 16, 500 * (x - y), 200 * (y - z))


def _difference(a: str, b: str, vision: Matrix) -> float:
    labs = (_lab(_times(vision, _linear(color))) for color in (a, b))
    return math.dist(*labs)


def _contrast(a: str, b: str) -> float:
    low, high = sorted(_times(RGB_TO_XYZ, _linear(color))[1] for color in (a, b))
    return (high + 0.05) / (low + 0.05)


class TestColors:
    """Colors are distinct and readable for any color vision."""

    def test_the_measures_are_right(self) -> None:
        """Black on white has contrast 21; red and green of the same lightness are close without the green cone."""
        assert _contrast("#000000", "#ffffff") == pytest.approx(21, abs=0.01)
        red, green = "#c06040", "#7f8a2a"
        assert _difference(red, green, VISIONS["deuteranopia"]) < _difference(red, green, VISIONS["all cones"]) / 3

    @pytest.mark.parametrize("vision", VISIONS)
    def test_rank_colors_are_distinct(self, vision: str) -> None:
        """Any two of the eight differ clearly (ten times the visible minimum), neighbors far more."""
        assert all(_difference(a, b, VISIONS[vision]) > 10 for a, b in combinations(RANK_COLORS, 2))
        pairs = zip(RANK_COLORS[::2], RANK_COLORS[1::2], strict=True)
        assert all(_difference(a, b, VISIONS[vision]) > 35 for a, b in pairs)

    @pytest.mark.parametrize("dark", [False, True])
    def test_text_is_readable(self, *, dark: bool) -> None:
        """Text has a contrast of at least 4.5 (WCAG AA) on every background, light and dark."""
        color = {name: pair[dark] for name, pair in COLORS.items()}
        for ink in ("ink", "dim"):
            for ground in ("page", "socket", "node", "l3", "gpu", "nic", "switch", "bus"):
                assert _contrast(color[ink], color[ground]) >= 4.5, (ink, ground)
        assert _contrast(color["ink"], color["cpu"]) >= 4.5
        assert all(_contrast(color["on"], rank) >= 4.5 for rank in RANK_COLORS)
