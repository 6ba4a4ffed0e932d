"""The picture as SVG and as a page: well-formed, self-contained, with the facts in words and readable colors."""

from __future__ import annotations

import math
import os
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path

import pytest

from numapin import Bind, Nic, Request, Topology, make_plan
from tests.machines.grids import gpu, grid
from tests.machines.roots import NAMES
from tests.pictures import HOSTILE, golden_machine, keys, parsed
from tests.policies import policy_of
from tests.unit.view.seam import (
    COLORS,
    NARROW,
    NUM_LOOKS,
    PATTERN_INK,
    RANK_COLORS,
    BoxKind,
    adapters,
    color_of,
    element,
    lay_out,
    look_of,
    page,
    pattern_of,
    read_example,
    svg,
)

SVG = "{http://www.w3.org/2000/svg}"
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


def _hostile_page_and_svg() -> tuple[str, str]:
    topology = replace(
        grid(nodes=2),
        host=HOSTILE[0],
        gpus=tuple(replace(gpu(i, i % 2), name=name, uuid=name) for i, name in enumerate(HOSTILE)),
        nics=tuple(Nic(name=name, node=0) for name in HOSTILE),
        notes=HOSTILE,
    )
    plan = make_plan(topology, Request())
    plan = replace(plan, ranks=tuple(replace(rank, reason=HOSTILE[rank.local_rank]) for rank in plan.ranks))
    return page(topology, plan), svg(lay_out(topology, plan))


class TestSvg:
    """The SVG file."""

    @pytest.mark.parametrize("name", NAMES)
    def test_is_xml_with_every_cpu_and_device(self, name: str) -> None:
        """It parses, is the same each time, and has a rectangle for each CPU, GPU and NIC and the CPU in the legend."""
        topology = golden_machine(name)
        text = svg(lay_out(topology, make_plan(topology, Request())))
        assert text == svg(lay_out(topology, make_plan(topology, Request())))
        classes = [rect.get("class", "").split() for rect in parsed(text).iter(f"{SVG}rect")]
        num_banned = len(topology.cpus - topology.allowed.cpus)
        picture = lay_out(topology, make_plan(topology, Request()))
        num_in_legend = keys(picture.box, BoxKind.CPU).count("")
        assert sum("cpu" in names for names in classes) == len(topology.cpus) + num_in_legend
        assert sum("off" in names and "cpu" in names for names in classes) == num_banned + bool(num_banned)
        assert sum("gpu" in names for names in classes) == len(topology.gpus)
        assert sum("nic" in names for names in classes) == len(adapters(topology.nics))

    def test_has_a_text_alternative(self) -> None:
        """It is an image with a title and a description of the machine."""
        topology = golden_machine("2pkg-2node-smt2-8gpu-a100")
        root = parsed(svg(lay_out(topology, make_plan(topology, Request()))))
        named = {part.get("id"): part.text for part in root}
        assert root.get("role") == "img"
        title, description = (named[name] for name in (root.get("aria-labelledby") or "").split())
        assert title == "Topology of 2pkg-2node-smt2-8gpu-a100"
        assert description == (
            "2 packages, 2 NUMA nodes, 8 GPUs, 48 cores, 96 CPUs. Plan: 8 ranks, bind node, memory preferred"
        )

    def test_more_than_eight_ranks_have_patterns(self) -> None:
        """Rank 8 has the color of rank 0 with a pattern, the pattern is defined, and rank 16 has another one."""
        topology = golden_machine("2pkg-8node-smt2-8gpu-pairs")
        text = svg(lay_out(topology, make_plan(topology, Request(bind=Bind.EXCLUSIVE, num_ranks=24))))
        patterns = {part.get("id"): list(part) for part in parsed(text).iter(f"{SVG}pattern")}
        assert {f"np-c{look}" for look in range(8, 24)} == patterns.keys() - {"np-off"}
        assert patterns["np-c8"][0].get("fill") == patterns["np-c16"][0].get("fill") == RANK_COLORS[0]
        assert patterns["np-c8"][1].get("d") != patterns["np-c16"][1].get("d")
        assert ".np .c8{fill:url(#np-c8)}" in text
        ids = {part.get("id") for part in parsed(text).iter()}
        assert set(re.findall(r"url\(#([^)]+)\)", text)) <= ids

    def test_shared_cpus_are_calm(self) -> None:
        """CPUs of several ranks have no color; the band has the colors."""
        topology = golden_machine("2pkg-8node-smt2-8gpu-pairs")
        text = svg(lay_out(topology, make_plan(topology, Request())))
        classes = [rect.get("class", "") for rect in parsed(text).iter(f"{SVG}rect")]
        assert not [name for name in classes if name.startswith("cpu c")]
        assert classes.count("share c0") == 4 + 1
        assert "linearGradient" not in text

    def test_hostile_names_are_text(self) -> None:
        """Markup and control characters in names make no element; the SVG parses."""
        _, text = _hostile_page_and_svg()
        tags = {part.tag.removeprefix(SVG) for part in parsed(text).iter()}
        assert tags == {"svg", "style", "title", "desc", "defs", "pattern", "rect", "path", "g", "text"}

    def test_the_picture_in_the_documentation_is_current(self) -> None:
        """docs/topo.svg is what README's commands draw today; NUMAPIN_UPDATE_GOLDEN=1 rewrites it."""
        topology = Topology.from_json(read_example("example:p4d"))
        text = svg(lay_out(topology, make_plan(topology, Request(bind=Bind.EXCLUSIVE))))
        shown = Path(__file__).resolve().parents[3] / "docs" / "topo.svg"
        if os.environ.get("NUMAPIN_UPDATE_GOLDEN"):
            shown.write_text(text, encoding="utf-8")
        assert len(text) < 150_000
        assert text == shown.read_text(encoding="utf-8")


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
        assert element(lay_out(topology, plan, page_width=NARROW), name="np-narrow") in text
        ids = [attributes["id"] for _, attributes in reader.seen if "id" in attributes]
        assert len(ids) == len(set(ids))
        assert not {"src", "href", "xlink:href", "srcset"} & {
            name for _, attributes in reader.seen for name in attributes
        }
        assert "@import" not in text
        assert set(re.findall(r"https?://[^\"' )]+", text)) == {"http://www.w3.org/2000/svg"}
        assert not {"link", "img", "iframe", "object", "embed"} & {tag for tag, _ in reader.seen}

    def test_only_its_own_style_and_script_are_allowed(self) -> None:
        """The policy allows one style and one script by hash, and there are no style attributes, which it refuses."""
        topology = golden_machine("2pkg-8node-smt2-8gpu-pairs")
        text = page(topology, make_plan(topology, Request()))
        policy = policy_of(text)
        assert {name for name, sources in policy.items() if sources != ["'none'"]} == {"style-src", "script-src"}
        assert all(len(policy[name]) == 1 for name in ("style-src", "script-src"))
        assert all(policy[name][0].startswith("'sha256-") for name in ("style-src", "script-src"))
        assert policy["default-src"] == ["'none'"]
        assert not [attributes for _, attributes in _read(text).seen if "style" in attributes]

    def test_tables_have_the_facts_of_the_picture(self) -> None:
        """One row per node with CPUs, GPUs and ranks, one row per rank with its reason, and the warnings."""
        topology = golden_machine("2pkg-8node-smt2-8gpu-pairs")
        plan = make_plan(topology, Request())
        text = page(topology, plan)
        assert (
            '<tr><th scope="row">3</th><td>CPUs</td><td>0</td><td>48-63,176-191</td><td>128.0 GiB</td>'
            "<td>64.0 GiB</td><td>gpu0, gpu1</td><td>mlx5_0</td><td>0-1</td><td>0-1</td></tr>" in text
        )
        cells = _read(text).texts("td")
        assert {rank.reason for rank in plan.ranks} <= set(cells)
        assert plan.warnings[0] in _read(text).texts("li")
        assert {gpu.uuid for gpu in topology.gpus} <= set(cells)

    def test_empty_nodes_share_a_row(self) -> None:
        """The 28 empty nodes of a GB200 tray are one row, and their distances are elsewhere."""
        text = page(golden_machine("2pkg-34node-gpumem-4gpu"))
        assert '<tr><th scope="row">3-9,11-17,19-25,27-33</th><td>empty</td>' in text
        assert text.count("<summary>node") == 6
        assert "Empty nodes: 3-9,11-17,19-25,27-33." in text

    def test_partitions_are_told_apart(self) -> None:
        """Devices at one PCI address have the number of the partition, in the tables and in the picture."""
        machine = golden_machine("2pkg-2node-2amd-cpx4")
        places = [f"partition {i} of {pci}" for pci in ("0000:03:00.0", "0000:83:00.0") for i in range(4)]
        text = page(machine)
        cells = _read(text).texts("td")
        assert sorted(cell for cell in cells if cell.startswith("partition")) == sorted(places)
        assert all(text.count(f">{place.replace('0000:', '')}") == 2 for place in places)  # wide and narrow

    def test_without_a_plan_ranks_are_not_mentioned(self) -> None:
        """No buttons and no table of ranks."""
        reader = _read(page(golden_machine("1pkg-nonode-2cpu")))
        assert "Ranks" not in reader.texts("h2")
        assert not [tag for tag, attributes in reader.seen if attributes.get("class") == "rank"]

    def test_devices_of_unknown_node_have_a_row(self) -> None:
        """Devices of unknown node are listed, not left out."""
        topology = replace(grid(gpus=[None]), nics=(Nic(name="eth0"),))
        row = '<tr><th scope="row">unknown</th>' + "<td></td>" * 5 + "<td>gpu0</td><td>eth0</td>"
        assert row in page(topology)

    def test_hostile_names_are_text(self) -> None:
        """Markup in names, notes and reasons is shown as text; control characters are replaced; long texts are cut."""
        text, _ = _hostile_page_and_svg()
        reader = _read(text)
        assert [tag for tag, _ in reader.seen].count("script") == 1
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

    def test_text_is_readable_on_patterns(self) -> None:
        """Text keeps a contrast of 4.5 where it crosses the marks of a pattern."""
        alpha = int(PATTERN_INK[-2:], 16) / 255
        for color in RANK_COLORS:
            parts = (int(color[at : at + 2], 16) for at in (1, 3, 5))
            darkened = "#" + "".join(f"{round(part * (1 - alpha)):02x}" for part in parts)
            assert _contrast(COLORS["on"][0], darkened) >= 4.5
            assert _contrast(color, darkened) >= 1.3  # and the marks can be seen without color

    def test_looks_repeat_after_64_ranks(self) -> None:
        """Sixty-four ranks differ in color or pattern."""
        looks = [(color_of(look_of(rank)), pattern_of(look_of(rank))) for rank in range(65)]
        assert len(set(looks)) == NUM_LOOKS == 64
        assert looks[64] == looks[0]

    @pytest.mark.parametrize("dark", [False, True])
    def test_text_is_readable(self, *, dark: bool) -> None:
        """Text has a contrast of at least 4.5 (WCAG AA) on every background, light and dark."""
        color = {name: pair[dark] for name, pair in COLORS.items()}
        for ink in ("ink", "dim"):
            for ground in ("page", "package", "node", "l3", "gpu", "nic"):
                assert _contrast(color[ink], color[ground]) >= 4.5, (ink, ground)
        assert _contrast(color["ink"], color["cpu"]) >= 4.5
        assert all(_contrast(color["on"], rank) >= 4.5 for rank in RANK_COLORS)
