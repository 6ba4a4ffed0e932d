"""The picture of a machine: every part is drawn once, nothing overlaps, names do no harm; the page around it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, groupby
from pathlib import Path

import pytest

from numapin import Allowed, Bind, Link, Memory, Nic, Plan, Request, Topology, make_plan
from numapin.errors import UsageError
from tests.machines.grids import gpu, grid
from tests.machines.roots import NAMES
from tests.pictures import HOSTILE, assert_drawn_once, boxes, golden_machine, keys, many_nics, parsed, problems, snc4
from tests.policies import policy_of
from tests.recorded.screens import compare
from tests.unit.view import seam
from tests.unit.view.seam import Box, BoxKind, CpuSet, drawing, lay_out, svg

DGX = golden_machine("2pkg-8node-smt2-8gpu-pairs")
GB200 = golden_machine("2pkg-34node-gpumem-4gpu")
CPUSET = golden_machine("4node-cpuset-3gpu")
LOST = golden_machine("2node-every-node-lists-all")
SVG = "{http://www.w3.org/2000/svg}"


def _linked(topology: Topology, words: dict[tuple[str, str], str]) -> Topology:
    return replace(topology, links=tuple(Link(a=a, b=b, kind=word) for (a, b), word in words.items()))


def _between(*gpus: int, word: str) -> dict[tuple[str, str], str]:
    return {(f"gpu{a}", f"gpu{b}"): word for a, b in combinations(gpus, 2)}


def _sharing(topology: Topology) -> Plan:
    plan = make_plan(topology, Request(bind=Bind.EXCLUSIVE, num_ranks=2))
    first, second = plan.ranks
    return replace(plan, ranks=(first, replace(second, cpus=first.cpus | second.cpus)))


TWO_NICS = (Nic(name="nic0", node=0), Nic(name="nic1", node=0))
CASES: dict[str, Topology | tuple[Topology, Request | Plan]] = {
    "the cores and devices of a DGX A100 are in their node, and one bar between its sockets is all NVLinks": DGX,
    "ranks that share CPUs have a band each; node, memory and GPUs name them; idle CPUs have their number": (
        DGX,
        Request(),
    ),
    "each exclusive core names its rank, and the legend explains it": (
        golden_machine("2pkg-2node-smt2-8gpu-a100"),
        Request(bind=Bind.EXCLUSIVE),
    ),
    "two switches with a GPU and a NIC each are in one frame; a third GPU is outside": _linked(
        replace(grid(nodes=1, gpus=[0, 0, 0]), nics=TWO_NICS),
        {("gpu0", "nic0"): "PIX", ("gpu1", "nic1"): "PIX", ("gpu0", "nic1"): "PXB", ("gpu2", "nic0"): "NODE"},
    ),
    "pairs of GPUs with a bridge have a bar each; other links have none; an unknown model has no rate": _linked(
        grid(nodes=2, gpus=[0, 0, 1, 1, 1]),
        _between(0, 1, word="NV4") | _between(2, 3, word="NV4") | _between(0, 2, word="SYS"),
    ),
    "a GPU on a node of memory alone, which only a file can have, is drawn there, without a bar": _linked(
        grid(nodes=1, gpus=[0, 8], memory_nodes=[8]), _between(0, 1, word="NV4")
    ),
    "xGMI has a bar, too": _linked(grid(nodes=1, gpus=[0, 0, 0]), _between(0, 1, 2, word="XGMI")),
    "of GPUs in two rows, only those next to the bar have a line": _linked(
        grid(nodes=1, gpus=[0] * 24), _between(*range(24), word="NV18")
    ),
    "cores that share an L3 cache with other nodes are a group without one; distances are a line": snc4(),
    "GPU memory is in its GPU; 28 empty nodes are one box; the bar of NVLinks is below both sockets": GB200,
    "an empty node that a NIC is on has its own box": replace(GB200, nics=(Nic(name="eth0", node=3),)),
    "a single empty node is drawn as any other": grid(nodes=2, memory_nodes=[2], memoryless=[2]),
    "the names of a NIC share a box": many_nics(),
    "the used share of memory is a bar, if it is known": replace(
        grid(), nodes=(replace(grid().nodes[0], free_bytes=16 << 30), grid().nodes[1])
    ),
    "the size of memory may be unknown": golden_machine("1pkg-nonode-2cpu"),
    "cores, GPUs and NICs of unknown node, and nodes without a socket, are drawn": replace(
        LOST,
        packages=(),
        gpus=tuple(replace(one, node=None, node_source=None) for one in LOST.gpus),
        nics=(Nic(name="eth0"),),
    ),
    "CPUs and nodes that are not allowed are marked, and the legend explains the mark": CPUSET,
    "where all is allowed, nothing is marked": replace(
        CPUSET, allowed=Allowed(cpus=CPUSET.cpus, nodes=CpuSet(range(4)))
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
    said = " | ".join(label.text for label in box.labels)
    yield f"{' ' * depth}{' '.join((box.kind, box.key, *size, *ranks, *marks))}: {said}"
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
    return " ".join(
        f"{part.kind}{part.ranks}{' off' * part.off}{' idle' * part.idle}"
        f"{[label.text for label in part.labels if label.ink != drawing.Ink.PLAIN]}"
        for part in boxes(core)
    )


def test_every_picture_is_the_recorded_one() -> None:
    """The boxes of each case, with their text, have no fault; NUMAPIN_UPDATE_GOLDEN=1 records them anew."""
    text = ""
    for sentence, case in CASES.items():
        topology, request = case if isinstance(case, tuple) else (case, None)
        picture = lay_out(topology, make_plan(topology, request) if isinstance(request, Request) else request)
        assert problems(picture) == []
        size = f"{picture.box.width:.0f} x {picture.box.height:.0f}, {len(picture.lines)} lines"
        lines = (f"=== {sentence}", size, picture.title, picture.description, *_outline(picture.box))
        text += "".join(f"{line}\n" for line in lines)
    compare(text, str(Path(__file__).with_name("pictures.txt")))


def test_the_check_finds_each_kind_of_fault() -> None:
    """It names boxes, texts and lines that overlap or stick out, and finds no fault in a sound layout."""

    def faults(box: Box, *lines: tuple[float, float, float]) -> list[str]:
        return problems(drawing.Picture(box=box, lines=lines, title="", description=""))

    small = Box(kind=BoxKind.CPU, width=10, height=10, key="small")
    outer = Box(kind=BoxKind.NODE, width=99, height=20, labels=[drawing.Label(x=2, y=12, text="words", size=10)])
    assert faults(drawing.frame(BoxKind.NODE, [[small, replace(small)]])) == []
    assert faults(replace(outer, labels=[], children=[replace(small, y=15)])) == ["small outside node"]
    assert faults(replace(outer, labels=[], children=[small, replace(small, x=15)])) == ["small on small"]
    assert len(faults(replace(outer, labels=[*outer.labels, replace(outer.labels[0], x=20)]))) == 1
    assert len(faults(replace(outer, children=[replace(small, x=0, y=0)]))) == 1
    assert faults(outer, (10, 0, 20)) == ["a line on text 'words' of node"]


@pytest.mark.parametrize("name", [*NAMES, *seam.example_names()])
@pytest.mark.parametrize("bind", [None, Bind.EXCLUSIVE])
def test_everything_is_drawn_once_and_nothing_overlaps(name: str, bind: Bind | None) -> None:
    """Each socket, core, CPU, GPU, NIC, and node with CPUs or memory is one box; nothing overlaps; it is XML."""
    is_example = name.startswith("example:")
    topology = Topology.from_json(seam.read_example(name)) if is_example else golden_machine(name)
    picture = lay_out(topology, make_plan(topology, Request(bind=bind)) if bind else None)
    assert problems(picture) == []
    assert_drawn_once(picture, topology)
    box = picture.box
    assert keys(box, BoxKind.SOCKET) == [f"socket {package.id}" for package in topology.packages]
    nodes = [key for key in keys(box, BoxKind.NODE, BoxKind.MEMORY_NODE) if key.startswith("node")]
    assert {f"node{n.id}" for n in topology.nodes if n.cpus or n.memory_bytes} <= set(nodes)
    assert len(nodes) == len(set(nodes))
    drawn = [rect.get("class", "").split()[0] for rect in parsed(drawing.element(picture)).iter(f"{SVG}rect")]
    assert drawn.count("gpu") == len(topology.gpus)


@pytest.mark.parametrize(("cores", "smt"), [(1, 1), (8, 8), (64, 2)])
def test_any_size(cores: int, smt: int) -> None:
    """From one CPU to thousands, cells shrink, then lose their text, and nothing overlaps."""
    topology = grid(packages=2, nodes=4, l3=2, cores=cores, smt=smt, gpus=[i % 8 for i in range(16)])
    picture = lay_out(topology, make_plan(topology, Request()))
    assert problems(picture) == []
    assert len(keys(picture.box, BoxKind.CORE)) == 16 * cores
    (cpu,) = (part for part in boxes(picture.box) if part.key == "cpu0")
    assert bool(cpu.labels) == (16 * cores * smt <= 640)


def test_what_does_not_fit_is_refused() -> None:
    """More than 256 nodes or ranks are an error that names another view; so is a plan with another GPU's address."""
    with pytest.raises(UsageError, match="a machine of 300 nodes does not fit into a picture, which shows 256"):
        lay_out(grid(packages=10, nodes=30, cores=1))
    small = grid(nodes=1, gpus=[0])
    with pytest.raises(UsageError, match="a plan of 257 ranks does not fit") as caught:
        lay_out(small, make_plan(small, Request(num_ranks=257)))
    assert caught.value.hint == "show it as a tree: numapin topo --plan FILE"
    other = replace(small, gpus=(replace(small.gpus[0], pci="0000:99:00.0"),))
    with pytest.raises(UsageError, match=r"another machine: rank 0 has GPU 0 \(0000:10:00.0\)") as caught:
        lay_out(other, make_plan(small, Request()))
    assert "--machine FILE" in caught.value.hint
    with pytest.raises(UsageError, match="rank 0 has CPUs 4-15"):
        lay_out(grid(nodes=1, cores=2), make_plan(grid(gpus=[0]), Request(bind=Bind.NONE)))


def _hostile() -> tuple[Topology, Plan]:
    """Return a machine and a plan with long names, markup or control characters in each name, note and reason."""
    nics = tuple(Nic(name=name, pci=name, node=i % 2) for i, name in enumerate(HOSTILE))
    topology = replace(
        grid(nodes=2),
        host=HOSTILE[0],
        gpus=tuple(replace(gpu(i, i % 2), name=name, uuid=name, pci=name) for i, name in enumerate(HOSTILE)),
        nics=nics,
        links=tuple(Link(a="gpu0", b=nic.name, kind=nic.name) for nic in nics),
        notes=HOSTILE,
    )
    plan = make_plan(topology, Request())
    return topology, replace(plan, ranks=tuple(replace(rank, reason=HOSTILE[rank.local_rank]) for rank in plan.ranks))


def test_hostile_names_stay_in_their_boxes() -> None:
    """Names of ten thousand letters, markup or control characters are cut to their boxes, and are only text."""
    topology, plan = _hostile()
    picture = lay_out(topology, plan)
    assert problems(picture) == []
    shown = [*(label.text for part in boxes(picture.box) for label in part.labels), picture.title, picture.description]
    assert all(text.isprintable() and len(text) <= 400 for text in shown)
    tags = {part.tag.removeprefix(SVG) for part in parsed(svg(topology, plan)).iter()}
    assert tags == {"svg", "style", "title", "desc", "defs", "pattern", "rect", "path", "text"}


@pytest.mark.parametrize("width", [0, 5, 20, 100, 1000])
def test_text_is_cut_to_a_width(width: float) -> None:
    """The result fits the width: the whole text, a part that ends in "…", or nothing."""
    for text in (*HOSTILE, "NVIDIA H100 80GB HBM3", "0-3,8"):
        shown, whole = drawing.fit(text, width, 10), seam.printable(text)
        assert drawing.width_of(shown, 10) <= width
        is_cut = drawing.width_of(whole, 10) > width and (not shown or (shown[-1] == "…" and len(shown) > 2))
        assert shown == whole or is_cut


def test_more_ranks_than_colors() -> None:
    """Colors repeat, but ranks 8 to 15 have another outline."""
    topology = grid(nodes=1, cores=8, gpus=[0] * 8)
    looks = re.findall(r'class="chip ([^"]+)"', svg(topology, make_plan(topology, Request(num_ranks=16))))
    assert len(set(looks)) == 16 == 2 * len(drawing.RANK_COLORS)


def test_the_picture_in_the_documentation_is_current() -> None:
    """It is what the commands of docs/quick-start.md draw today; NUMAPIN_UPDATE_GOLDEN=1 rewrites it."""
    topology = Topology.from_json(seam.read_example("example:p4d"))
    text = svg(topology, make_plan(topology, Request(bind=Bind.EXCLUSIVE)))
    assert len(text) < 60_000
    compare(text, str(Path(__file__).resolve().parents[3] / "docs" / "topo.svg"))


# --- the HTML page around the picture: well-formed, self-contained, with the facts in words; and readable colors -----


LOADING = {"src", "href", "{http://www.w3.org/1999/xlink}href", "srcset", "style"}  # "style" is refused by the policy


@pytest.mark.parametrize("bind", [None, Bind.NODE, "hostile"])
def test_it_is_well_formed_and_nothing_else_is_loaded_or_runs(bind: Bind | str | None) -> None:
    """It has the picture, names no other file, and has one style, which the policy allows by hash, and no script."""
    topology, plan = _hostile() if bind == "hostile" else (DGX, bind and make_plan(DGX, Request(bind=Bind(bind))))
    text = seam.page(topology, plan or None)
    assert drawing.element(lay_out(topology, plan or None)) in text
    parts = list(parsed(text).iter())
    attributes = {name for part in parts for name in part.attrib}
    assert not attributes & LOADING
    assert not [name for name in attributes if name.startswith("on")]
    tags = {part.tag for part in parts}
    assert not {"link", "img", "iframe", "object", "embed", "script"} & tags
    assert "@import" not in text
    assert set(re.findall(r"https?://[^\"' )]+", text)) == {"http://www.w3.org/2000/svg"}
    policy = policy_of(text)
    assert {name for name, sources in policy.items() if sources != ["'none'"]} == {"style-src"}
    assert [source[:8] for source in policy["style-src"]] == ["'sha256-"]


def test_the_page_has_the_plan() -> None:
    """One line per rank, then its reasons, and the warnings."""
    plan = make_plan(DGX, Request())
    parts = list(parsed(seam.page(DGX, plan)).iter())
    (text,) = (part.text for part in parts if part.tag == "pre")
    assert text == "\n".join([str(plan), "", *(f"rank {rank.local_rank}: {rank.reason}" for rank in plan.ranks)])
    assert list(plan.warnings) == [part.text for part in parts if part.tag == "li"]
    assert "rank 1" not in seam.page(DGX)


def test_hostile_names_are_text() -> None:
    """Markup in names, notes and reasons is shown as text; control characters are replaced; long texts are cut."""
    text = seam.page(*_hostile())
    assert "<script>alert(1)</script>" in "".join(parsed(text).itertext())
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\u202e\u2028\ufffe]", text)
    assert "W" * 2001 not in text


def _luminance(color: str) -> float:
    values = (int(color[at : at + 2], 16) / 255 for at in (1, 3, 5))
    linear = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values)
    return sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("dark", [False, True])
def test_text_is_readable(*, dark: bool) -> None:
    """Text has a contrast of at least 4.5 (WCAG AA) on every background, light and dark."""
    color = {name: pair[dark] for name, pair in drawing.COLORS.items()}
    grounds = ("page", "socket", "node", "l3", "gpu", "nic", "switch", "bus")
    pairs = [(color[ink], color[ground]) for ink in ("ink", "dim") for ground in grounds]
    pairs += [(color["ink"], color["cpu"]), *((color["on"], rank) for rank in drawing.RANK_COLORS)]
    for pair in pairs:
        low, high = sorted(map(_luminance, pair))
        assert (high + 0.05) / (low + 0.05) >= 4.5, pair
