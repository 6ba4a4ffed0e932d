"""The picture of a machine: every part is drawn once, nothing overlaps, names do no harm."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from itertools import combinations, groupby
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from numapin import Allowed, Bind, Link, Memory, Nic, Plan, Request, Topology, make_plan
from numapin.errors import UsageError
from tests.machines.grids import gpu, grid
from tests.machines.roots import NAMES
from tests.pictures import HOSTILE, boxes, golden_machine, keys, many_nics, parsed, problems, snc4
from tests.recorded.screens import compare
from tests.unit.view.seam import (
    RANK_COLORS,
    WIDE,
    Box,
    BoxKind,
    CpuSet,
    Ink,
    Label,
    Picture,
    adapters,
    best_rows,
    element,
    example_names,
    fit,
    frame,
    lay_out,
    printable,
    read_example,
    rows_within,
    svg,
    width_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

DGX = golden_machine("2pkg-8node-smt2-8gpu-pairs")
GB200 = golden_machine("2pkg-34node-gpumem-4gpu")
CPUSET = golden_machine("4node-cpuset-3gpu")
LOST = golden_machine("2node-every-node-lists-all")
RECORDED = Path(__file__).with_name("pictures.txt")
SVG = "{http://www.w3.org/2000/svg}"


def _linked(topology: Topology, words: dict[tuple[str, str], str]) -> Topology:
    return replace(topology, links=tuple(Link(a=a, b=b, kind=word) for (a, b), word in words.items()))


def _between(*gpus: int, word: str) -> dict[tuple[str, str], str]:
    return {(f"gpu{a}", f"gpu{b}"): word for a, b in combinations(gpus, 2)}


def _sharing(topology: Topology) -> Plan:
    """Return a plan whose second rank has the cores of the first, too."""
    plan = make_plan(topology, Request(bind=Bind.EXCLUSIVE, num_ranks=2))
    first, second = plan.ranks
    return replace(plan, ranks=(first, replace(second, cpus=first.cpus | second.cpus)))


TWO_NICS = (Nic(name="nic0", node=0), Nic(name="nic1", node=0))
CASES: dict[str, tuple[Topology, Request | Plan | None]] = {
    "the cores and devices of a DGX A100 are in their node, and one bar between its sockets is all NVLinks": (
        DGX,
        None,
    ),
    "ranks that share CPUs have a band each; node, memory and GPUs name them; idle CPUs have their number": (
        DGX,
        Request(),
    ),
    "each exclusive core names its rank, and the legend explains it": (
        golden_machine("2pkg-2node-smt2-8gpu-a100"),
        Request(bind=Bind.EXCLUSIVE),
    ),
    "two switches with a GPU and a NIC each are in one frame; a third GPU is outside": (
        _linked(
            replace(grid(nodes=1, gpus=[0, 0, 0]), nics=TWO_NICS),
            {("gpu0", "nic0"): "PIX", ("gpu1", "nic1"): "PIX", ("gpu0", "nic1"): "PXB", ("gpu2", "nic0"): "NODE"},
        ),
        None,
    ),
    "pairs of GPUs with a bridge have a bar each; other links have none; an unknown model has no rate": (
        _linked(
            grid(nodes=2, gpus=[0, 0, 1, 1, 1]),
            _between(0, 1, word="NV4") | _between(2, 3, word="NV4") | _between(0, 2, word="SYS"),
        ),
        None,
    ),
    "xGMI has a bar, too": (_linked(grid(nodes=1, gpus=[0, 0, 0]), _between(0, 1, 2, word="XGMI")), None),
    "of GPUs in two rows, only those next to the bar have a line": (
        _linked(grid(nodes=1, gpus=[0] * 24), _between(*range(24), word="NV18")),
        None,
    ),
    "the L3 cache of four nodes is one frame around them; distances are a line": (snc4(), None),
    "GPU memory is in its GPU; 28 empty nodes are one box; the bar of NVLinks is below both sockets": (GB200, None),
    "an empty node that a NIC is on has its own box": (replace(GB200, nics=(Nic(name="eth0", node=3),)), None),
    "a single empty node is drawn as any other": (grid(nodes=2, memory_nodes=[2], memoryless=[2]), None),
    "the names of a NIC share a box": (many_nics(), None),
    "the used share of memory is a bar, if it is known": (
        replace(grid(), nodes=(replace(grid().nodes[0], free_bytes=16 << 30), grid().nodes[1])),
        None,
    ),
    "the size of memory may be unknown": (golden_machine("1pkg-nonode-2cpu"), None),
    "cores, GPUs and NICs of unknown node, and nodes without a socket, are drawn": (
        replace(
            LOST,
            packages=(),
            gpus=tuple(replace(one, node=None, node_source=None) for one in LOST.gpus),
            nics=(Nic(name="eth0"),),
        ),
        None,
    ),
    "CPUs and nodes that are not allowed are marked, and the legend explains the mark": (CPUSET, None),
    "where all is allowed, nothing is marked": (
        replace(CPUSET, allowed=Allowed(cpus=CPUSET.cpus, nodes=CpuSet(range(4)))),
        None,
    ),
    "the GPU of a rank that got less has a star, which the legend explains": (CPUSET, Request()),
    "CPUs that no rank may use are idle, not those that are not allowed": (CPUSET, Request(num_ranks=1)),
    "if only some cores of a group are shared, each of them has a band and names its ranks": (
        grid(nodes=1, cores=4),
        _sharing(grid(nodes=1, cores=4)),
    ),
    "memory on another node than the cores is in a row of its own": (
        grid(nodes=2, gpus=[0]),
        Request(memory=Memory.BIND, memory_nodes=CpuSet({1})),
    ),
    "forty ranks on every CPU have their names": (grid(nodes=1, cores=8, gpus=[0] * 8), Request(num_ranks=40)),
}


def _outline(box: Box, depth: int = 0) -> Iterator[str]:
    """Yield a line for each box with its text, ranks and marks; equal cores beside each other share one."""
    marks = [name for name, is_set in (("off", box.off), ("idle", box.idle)) if is_set]
    ranks = [f"ranks {','.join(map(str, box.ranks))}"] if box.ranks else []
    size = [] if box.labels or box.children else [f"{box.width:.0f} x {box.height:.0f}"]
    said = [label.text for label in box.labels] + [box.title.replace("\n", " / ")] * bool(box.title)
    yield f"{' ' * depth}{' '.join((box.kind, box.key, *size, *ranks, *marks))}: {' | '.join(said)}"
    for is_core, parts in groupby(box.children, lambda part: part.kind is BoxKind.CORE):
        if is_core:
            for text, alike in groupby(parts, _core_text):
                names = [part.key for part in alike]
                yield f"{' ' * depth} {names[0]} to {names[-1]}, {len(names)}: {text}"
        else:
            for part in parts:
                yield from _outline(part, depth + 1)


def _core_text(core: Box) -> str:
    """Return what a core shows, without the numbers of its CPUs."""
    parts = [
        (part.kind, part.ranks, part.off, part.idle, [label.text for label in part.labels if label.ink != Ink.PLAIN])
        for part in boxes(core)
    ]
    return " ".join(f"{kind}{ranks}{' off' * off}{' idle' * idle}{texts}" for kind, ranks, off, idle, texts in parts)


@pytest.fixture(scope="module")
def outlines() -> dict[str, str]:
    """Return the outline of each case's picture, which has no fault."""
    found = {}
    for sentence, (topology, request) in CASES.items():
        picture = lay_out(topology, make_plan(topology, request) if isinstance(request, Request) else request)
        assert problems(picture) == []
        size = f"{picture.box.width:.0f} x {picture.box.height:.0f}, {len(picture.lines)} lines"
        found[sentence] = "\n".join((size, picture.title, picture.description, *_outline(picture.box)))
    return found


def test_every_picture_is_the_recorded_one(outlines: dict[str, str]) -> None:
    """The boxes of each case, with their text; NUMAPIN_UPDATE_GOLDEN=1 records them anew."""
    compare("".join(f"=== {sentence}\n{text}\n" for sentence, text in outlines.items()), str(RECORDED))


class TestCheck:
    """The check that the tests below use finds faults, and layouts are exact."""

    def test_finds_each_kind_of_fault(self) -> None:
        """It names boxes, texts and lines that overlap or stick out, and finds no fault in a sound layout."""

        def faults(box: Box, *lines: tuple[float, float, float]) -> list[str]:
            return problems(Picture(box=box, lines=lines, title="", description=""))

        small = Box(kind=BoxKind.CPU, width=10, height=10, key="small")
        text = Label(x=2, y=12, text="words", size=10)
        assert faults(frame(BoxKind.NODE, [[small, replace(small)]])) == []
        outside = Box(kind=BoxKind.NODE, width=10, height=10, children=[replace(small, x=5, y=0)])
        assert faults(outside) == ["small outside node"]
        overlapping = Box(kind=BoxKind.NODE, width=30, height=20, children=[replace(small), replace(small, x=15)])
        assert faults(overlapping) == ["small on small"]
        crossed = Box(kind=BoxKind.NODE, width=99, height=20, labels=[text, replace(text, x=20)])
        assert len(faults(crossed)) == 1
        on_child = Box(kind=BoxKind.NODE, width=99, height=20, labels=[text], children=[replace(small, x=0, y=0)])
        assert len(faults(on_child)) == 1
        assert faults(Box(kind=BoxKind.NODE, width=99, height=20, labels=[text]), (10, 0, 20)) == [
            "a line on text 'words' of node"
        ]

    def test_rows(self) -> None:
        """Boxes of a row have one height; a row ends where the width does; rows are filled evenly."""
        one = [Box(kind=BoxKind.CPU, width=40, height=height) for height in (10, 20, 10)]
        wide = Box(kind=BoxKind.CPU, width=500, height=10)
        rows = rows_within([*one, wide], 90)
        assert [[box.width for box in row] for row in rows] == [[40, 40], [40], [500]]
        outer = frame(BoxKind.NODE, rows, pad=0, gap=10)
        assert [(box.x, box.y, box.height) for box in outer.children] == [
            (0, 0, 20),
            (50, 0, 20),
            (0, 30, 10),
            (0, 50, 10),
        ]
        cores = [Box(kind=BoxKind.CORE, width=32, height=28) for _ in range(56)]
        assert [len(row) for row in best_rows(cores, goal=3, most=WIDE)] == [14, 14, 14, 14]

    def test_more_height_goes_to_one_row(self) -> None:
        """A frame that becomes higher gives the height to its growing row, and moves the rows below down."""
        top, middle, end = (Box(kind=BoxKind.CPU, width=10, height=10) for _ in range(3))
        outer = frame(BoxKind.NODE, [[top], [middle], [end]], pad=0, gap=0, grow=1)
        outer.stretch(50)
        assert [(box.y, box.height) for box in (top, middle, end)] == [(0, 10), (10, 30), (40, 10)]


class TestMachines:
    """Every picture of a machine."""

    @pytest.mark.parametrize("name", [*NAMES, *example_names()])
    @pytest.mark.parametrize("bind", [None, *Bind])
    def test_shows_everything_once_and_nothing_overlaps(self, name: str, bind: Bind | None) -> None:
        """Each socket, core, CPU, GPU, NIC, and node with CPUs or memory is one box; nothing overlaps; it is XML."""
        is_example = name.startswith("example:")
        topology = Topology.from_json(read_example(name)) if is_example else golden_machine(name)
        plan = None if bind is None else make_plan(topology, Request(bind=bind))
        picture = lay_out(topology, plan)
        assert problems(picture) == []
        box = picture.box
        assert sorted(keys(box, BoxKind.CORE)) == sorted(f"core{core.id}" for core in topology.cores)
        drawn_cpus = sorted(key for key in keys(box, BoxKind.CPU) if key)  # the one in the legend has no key
        assert drawn_cpus == sorted(f"cpu{cpu}" for cpu in topology.cpus)
        assert sorted(keys(box, BoxKind.GPU)) == sorted(gpu.label for gpu in topology.gpus)
        assert sorted(keys(box, BoxKind.NIC)) == sorted(f"nic:{nic.name}" for nic in adapters(topology.nics))
        assert keys(box, BoxKind.SOCKET) == [f"socket {package.id}" for package in topology.packages]
        nodes = [key for key in keys(box, BoxKind.NODE, BoxKind.MEMORY_NODE) if key.startswith("node")]
        assert {f"node{n.id}" for n in topology.nodes if n.cpus or n.memory_bytes} <= set(nodes)
        assert len(nodes) == len(set(nodes))
        drawn = [rect.get("class", "").split()[0] for rect in parsed(element(picture)).iter(f"{SVG}rect")]
        assert drawn.count("gpu") == len(topology.gpus)

    @pytest.mark.parametrize(("cores", "smt"), [(1, 1), (8, 8), (64, 2), (513, 1)])
    def test_any_size(self, cores: int, smt: int) -> None:
        """From one CPU to thousands, cells shrink, then lose their text, and nothing overlaps."""
        topology = grid(packages=2, nodes=4, l3=2, cores=cores, smt=smt, gpus=[i % 8 for i in range(16)])
        picture = lay_out(topology, make_plan(topology, Request()))
        assert problems(picture) == []
        box = picture.box
        assert len(keys(box, BoxKind.CORE)) == 16 * cores
        numbered = any(
            label.ink in (Ink.PLAIN, Ink.ON_RANK) for part in boxes(box) if part.key == "cpu0" for label in part.labels
        )
        assert numbered == (16 * cores * smt <= 640)

    def test_too_large_machines_and_plans_are_refused(self) -> None:
        """More than 256 nodes or ranks are an error that names another view."""
        with pytest.raises(UsageError, match="a machine of 300 nodes does not fit into a picture, which shows 256"):
            lay_out(grid(packages=10, nodes=30, cores=1))
        small = grid(nodes=1)
        with pytest.raises(UsageError, match="a plan of 257 ranks does not fit") as caught:
            lay_out(small, make_plan(small, Request(num_ranks=257)))
        assert caught.value.hint == "show it as a tree: numapin topo --plan FILE"

    @pytest.mark.parametrize(
        ("other", "seen"),
        [
            (grid(nodes=1, cores=2), "CPUs 4-7,12-15"),
            (replace(grid(gpus=[0]), gpus=()), "GPU 0"),
            (replace(grid(gpus=[0]), gpus=(replace(gpu(0, 0), pci="0000:99:00.0"),)), "GPU 0 (0000:10:00.0)"),
        ],
    )
    def test_of_another_machine_is_refused(self, other: Topology, seen: str) -> None:
        """A plan whose CPUs or GPU this machine does not have is an error that names them and the remedy."""
        machine = grid(gpus=[0])
        plan = make_plan(machine, Request(bind=Bind.NONE if "CPUs" in seen else Bind.NODE))
        with pytest.raises(UsageError, match="the plan is of another machine") as caught:
            lay_out(other, plan)
        assert "--machine FILE" in caught.value.hint
        assert seen.partition(" ")[0] in caught.value.message
        lay_out(machine, plan)  # its own


class TestText:
    """Text fits and is printable."""

    def test_hostile_names_stay_in_their_boxes(self) -> None:
        """Names of ten thousand letters, markup or control characters are cut to their boxes, and are only text."""
        nics = tuple(Nic(name=name, pci=name, node=i % 2) for i, name in enumerate(HOSTILE))
        topology = replace(
            grid(),
            host=HOSTILE[0],
            gpus=tuple(replace(gpu(i, i % 2), name=name, uuid=name, pci=name) for i, name in enumerate(HOSTILE)),
            nics=nics,
            links=tuple(Link(a="gpu0", b=nic.name, kind=nic.name) for nic in nics),
        )
        picture = lay_out(topology, make_plan(topology, Request()))
        assert problems(picture) == []
        titles = (line for part in boxes(picture.box) for line in part.title.split("\n"))
        texts = [label.text for part in boxes(picture.box) for label in part.labels]
        shown = [*texts, *titles, picture.title]
        assert all(text.isprintable() and len(text) <= 400 for text in shown)
        tags = {part.tag.removeprefix(SVG) for part in parsed(svg(topology, make_plan(topology, Request()))).iter()}
        assert tags == {"svg", "style", "title", "desc", "defs", "pattern", "rect", "path", "g", "text"}

    @pytest.mark.parametrize("text", [*HOSTILE, "NVIDIA H100 80GB HBM3", "0-3,8"])
    @pytest.mark.parametrize("width", [0, 5, 20, 100, 1000])
    def test_fit(self, text: str, width: float) -> None:
        """The result fits the width: the whole text, a part that ends in "…", or nothing."""
        shown = fit(text, width, 10)
        assert width_of(shown, 10) <= width
        assert shown in ("", printable(text)) or (shown.endswith("…") and len(shown) > 2)
        if width_of(printable(text), 10) <= width:
            assert shown == printable(text)


class TestSvg:
    """The SVG file."""

    def test_more_ranks_than_colors(self) -> None:
        """Colors repeat, but ranks 8 to 15 have another outline."""
        topology = grid(nodes=1, cores=8, gpus=[0] * 8)
        looks = re.findall(r'class="chip ([^"]+)"', svg(topology, make_plan(topology, Request(num_ranks=16))))
        assert len(set(looks)) == 16 == 2 * len(RANK_COLORS)

    def test_has_a_text_alternative(self) -> None:
        """It is an image with a title and a description of the machine."""
        topology = golden_machine("2pkg-2node-smt2-8gpu-a100")
        root = parsed(svg(topology, make_plan(topology, Request())))
        assert root.get("role") == "img"
        assert [part.text for part in root[:2]] == [
            "Topology of 2pkg-2node-smt2-8gpu-a100",
            "2 sockets, 2 NUMA nodes, 8 GPUs, 48 cores, 96 CPUs. Plan: 8 ranks, bind node, memory preferred",
        ]

    def test_needs_neither_variables_nor_media_queries(self) -> None:
        """The light colors are plain rules, for programs that know no others; dark ones are for screens only."""
        text = svg(DGX)
        light, _, dark = text.partition("@media screen and (prefers-color-scheme:dark)")
        assert "var(" not in text
        assert ".np .machine{fill:#ffffff;}" in light
        assert ".np .machine{fill:#12161c;}" in dark
        assert text == svg(DGX)

    @pytest.mark.parametrize(
        ("file", "name", "bind"),
        [("topo", "p4d", "exclusive"), *((name, name, "node") for name in ("dgx-a100", "dgx-h100", "gb200", "ndv4"))],
    )
    def test_the_pictures_in_the_documentation_are_current(self, file: str, name: str, bind: str) -> None:
        """They are what README's and the guide's commands draw today; NUMAPIN_UPDATE_GOLDEN=1 rewrites them."""
        topology = Topology.from_json(read_example(f"example:{name}"))
        text = svg(topology, make_plan(topology, Request(bind=Bind(bind))))
        shown = Path(__file__).resolve().parents[3] / "docs" / f"{file}.svg"
        if os.environ.get("NUMAPIN_UPDATE_GOLDEN"):
            shown.write_text(text, encoding="utf-8")
        assert len(text) < 60_000
        assert text == shown.read_text(encoding="utf-8")
