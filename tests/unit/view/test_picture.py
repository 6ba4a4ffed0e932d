"""The picture of a machine: every part is drawn once, nothing overlaps, names do no harm."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from numapin import Allowed, Bind, Link, Memory, Nic, Request, Topology, make_plan
from numapin.errors import UsageError
from tests.machines.grids import gpu, grid
from tests.machines.roots import NAMES
from tests.pictures import HOSTILE, boxes, golden_machine, keys, many_nics, parsed, problems, snc4
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

DGX = "2pkg-8node-smt2-8gpu-pairs"
SVG = "{http://www.w3.org/2000/svg}"


def _texts(box: Box) -> list[str]:
    return [label.text for part in boxes(box) for label in part.labels]


def _part(box: Box, key: str) -> Box:
    (found,) = (part for part in boxes(box) if part.key == key)
    return found


def _drawn(topology: Topology, request: Request | None = None) -> Box:
    """Return the outermost box of a picture without faults."""
    picture = lay_out(topology, None if request is None else make_plan(topology, request))
    assert problems(picture) == []
    return picture.box


def _linked(topology: Topology, words: dict[tuple[int, int], str]) -> Topology:
    return replace(topology, links=tuple(Link(a=f"gpu{a}", b=f"gpu{b}", kind=word) for (a, b), word in words.items()))


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

    def test_cores_and_devices_are_in_their_node(self) -> None:
        """On a DGX A100, node 3 holds its 16 cores in 4 L3 groups, and a switch with GPUs 0 and 1 and a NIC."""
        node = _part(_drawn(golden_machine(DGX)), "node3")
        assert keys(node, BoxKind.CORE) == [f"core{core}" for core in range(48, 64)]
        assert len(keys(node, BoxKind.L3)) == 4
        (switch,) = (part for part in boxes(node) if part.kind is BoxKind.SWITCH)
        assert keys(switch, BoxKind.GPU, BoxKind.NIC) == ["nic:mlx5_0", "gpu0", "gpu1"]
        assert {"PCIe switch", "07:00.0", "PCIe 4 x16, 32 GB/s", "infiniband"} <= set(_texts(switch))

    def test_switches_are_nested(self) -> None:
        """Two switches with a GPU and a NIC each are in one frame of what is between them; a third GPU is outside."""
        nics = tuple(Nic(name=f"nic{i}", node=0) for i in range(2))
        words = {("gpu0", "nic0"): "PIX", ("gpu1", "nic1"): "PIX", ("gpu0", "nic1"): "PXB", ("gpu2", "nic0"): "NODE"}
        links = tuple(Link(a=a, b=b, kind=word) for (a, b), word in words.items())
        box = _drawn(replace(grid(nodes=1, gpus=[0, 0, 0]), nics=nics, links=links))
        outer, *inner = (part for part in boxes(box) if part.kind is BoxKind.SWITCH)
        assert [part.title for part in (outer, *inner)] == ["PCIe switches", "PCIe switch", "PCIe switch"]
        assert keys(outer, BoxKind.GPU) == ["gpu0", "gpu1"]
        assert [keys(part, BoxKind.GPU, BoxKind.NIC) for part in inner] == [["nic:nic0", "gpu0"], ["nic:nic1", "gpu1"]]

    def test_one_bar_for_nvlink(self) -> None:
        """All GPUs of a DGX A100 hang on one bar between its sockets; those of a GB200 tray on one below both."""
        for name, rate in ((DGX, "12 links between any two GPUs, 300"), ("2pkg-34node-gpumem-4gpu", "900")):
            picture = lay_out(golden_machine(name))
            (bar,) = (part for part in boxes(picture.box) if part.kind is BoxKind.BUS)
            assert f"{rate} GB/s each way" in _texts(bar)[0]
            assert len(picture.lines) == len(golden_machine(name).gpus)
            places = [y for part, _, y in picture.box.walk() if part.kind is BoxKind.SOCKET]
            (bar_y,) = (y for part, _, y in picture.box.walk() if part is bar)
            assert [y < bar_y for y in places] == ([True, False] if name == DGX else [True, True])

    def test_a_bar_for_each_set_of_equal_links(self) -> None:
        """Pairs of GPUs with a bridge have a bar each; other links have none; a GPU of unknown model has no rate."""
        machine = _linked(grid(nodes=2, gpus=[0, 0, 1, 1, 1]), {(0, 1): "NV4", (2, 3): "NV4", (0, 2): "SYS"})
        picture = lay_out(machine)
        assert problems(picture) == []
        bars = [_texts(part) for part in boxes(picture.box) if part.kind is BoxKind.BUS]
        assert bars == [["NVLink: 4 links between gpu0 and gpu1"], ["NVLink: 4 links between gpu2 and gpu3"]]
        assert len(picture.lines) == 4
        xgmi = _linked(grid(nodes=1, gpus=[0, 0, 0]), {(0, 1): "XGMI", (0, 2): "XGMI", (1, 2): "XGMI"})
        assert "xGMI: links between any two GPUs" in _texts(_drawn(xgmi))

    def test_a_gpu_behind_others_has_no_line(self) -> None:
        """Of GPUs in two rows, only those next to the bar have a line."""
        words = {(a, b): "NV18" for a in range(24) for b in range(a + 1, 24)}
        picture = lay_out(_linked(grid(nodes=1, gpus=[0] * 24), words))
        assert problems(picture) == []
        assert 0 < len(picture.lines) < 24

    def test_distances_are_a_line(self) -> None:
        """The distances within and between sockets are one line; one node has none."""
        assert "node distances (10 is local): 12 within a socket, 32 between sockets" in _texts(_drawn(snc4()))
        assert not any("distance" in text for text in _texts(_drawn(grid(nodes=1))))

    def test_empty_nodes_are_one_box(self) -> None:
        """The 28 nodes that a GB200 keeps for MIG are one box; a single empty node is drawn as any other."""
        topology = golden_machine("2pkg-34node-gpumem-4gpu")
        box = _drawn(topology)
        assert "28 empty nodes" in _texts(box)
        assert keys(box, BoxKind.MEMORY_NODE) == ["node2", "node10", "node18", "node26", "empty"]
        with_nic = replace(topology, nics=(Nic(name="eth0", node=3),))
        assert "node3" in keys(_drawn(with_nic), BoxKind.MEMORY_NODE)
        assert keys(_drawn(grid(nodes=2, memory_nodes=[2], memoryless=[2])), BoxKind.MEMORY_NODE) == ["node2"]

    def test_a_cache_over_nodes_is_drawn_once(self) -> None:
        """With sub-NUMA clustering, each socket has one frame for its L3 cache, with the four nodes inside."""
        box = _drawn(snc4())
        assert keys(box, BoxKind.CACHE) == ["l3 of nodes 0-3", "l3 of nodes 4-7"]
        assert keys(_part(box, "l3 of nodes 4-7"), BoxKind.NODE) == ["node4", "node5", "node6", "node7"]
        assert "L3" not in _texts(box)

    def test_a_nic_with_two_names_is_one_box(self) -> None:
        """The verbs name and the network name of a NIC share a box, in natural order."""
        assert keys(_drawn(many_nics()), BoxKind.NIC) == [f"nic:mlx5_{i}/ib{i}" for i in range(16)]

    def test_gpu_memory_is_in_its_gpu(self) -> None:
        """Node 10 of a GB200 tray is the memory of GPU 1, and is drawn in it."""
        gpu_box = _part(_drawn(golden_machine("2pkg-34node-gpumem-4gpu")), "gpu1")
        assert _part(gpu_box, "node10").title.startswith("memory of gpu1")

    def test_known_memory_has_a_bar(self) -> None:
        """The bar shows the used share of the memory; if the free part is unknown, there is no bar."""
        topology = grid(nodes=2)
        half, unknown = (
            replace(node, free_bytes=free) for node, free in zip(topology.nodes, (16 << 30, None), strict=True)
        )
        box = _drawn(replace(topology, nodes=(half, unknown)))
        (bar,) = (part for part in boxes(_part(box, "node0")) if part.kind is BoxKind.MEMORY)
        assert bar.children[0].width / bar.width == pytest.approx(0.75)
        assert "64.0 GiB (16.0 GiB free)" in _texts(_part(box, "node0"))
        assert not [part for part in boxes(_part(box, "node1")) if part.kind is BoxKind.MEMORY]
        assert "size unknown" in _texts(_drawn(golden_machine("1pkg-nonode-2cpu")))

    def test_parts_of_unknown_place_are_drawn(self) -> None:
        """Cores, GPUs and NICs of unknown node, and nodes without a socket, are still drawn once."""
        topology = golden_machine("2node-every-node-lists-all")
        lost = replace(
            topology,
            packages=(),
            gpus=tuple(replace(gpu, node=None, node_source=None) for gpu in topology.gpus),
            nics=(Nic(name="eth0"),),
        )
        box = _drawn(lost)
        assert sorted(keys(box, BoxKind.CORE)) == sorted(f"core{core.id}" for core in topology.cores)
        assert keys(box, BoxKind.GPU, BoxKind.NIC) == ["nic:eth0", "gpu0", "gpu1"]
        assert "node unknown" in _texts(box)

    def test_cpus_and_nodes_that_are_not_allowed_are_marked(self) -> None:
        """CPUs and nodes outside the cpuset are marked, and the legend explains the mark."""
        topology = golden_machine("4node-cpuset-3gpu")
        box = _drawn(topology)
        off = {part.key for part in boxes(box) if part.off and part.key}
        assert off == {*(f"cpu{cpu}" for cpu in range(4, 12)), "node1", "node2"}
        assert "not allowed to this process" in _texts(box)
        everything = Allowed(cpus=topology.cpus, nodes=CpuSet(range(4)))
        assert not any(part.off for part in boxes(_drawn(replace(topology, allowed=everything))))

    @pytest.mark.parametrize(("cores", "smt"), [(1, 1), (8, 8), (64, 2), (513, 1)])
    def test_any_size(self, cores: int, smt: int) -> None:
        """From one CPU to thousands, cells shrink, then lose their text, and nothing overlaps."""
        topology = grid(packages=2, nodes=4, l3=2, cores=cores, smt=smt, gpus=[i % 8 for i in range(16)])
        box = _drawn(topology, Request())
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


class TestPlan:
    """The ranks of a plan in the picture."""

    def test_colors_cores_memory_and_gpus(self) -> None:
        """Ranks 0 and 1 share node 3: its CPUs have both ranks, its memory and GPUs name them; node 0 has no rank."""
        box = _drawn(golden_machine(DGX), Request())
        node = _part(box, "node3")
        assert {part.ranks for part in boxes(node) if part.kind is BoxKind.CPU} == {(0, 1)}
        assert {"cores and memory of", "rank 0", "rank 1"} <= set(_texts(node))
        assert [part.ranks for part in boxes(_part(box, "gpu1")) if part.kind is BoxKind.CHIP] == [(1,)]
        assert not any(part.ranks for part in boxes(_part(box, "node0")))

    def test_shared_cpus_have_one_band(self) -> None:
        """CPUs of several ranks have one look, and each L3 group a band with the color of each rank above them."""
        topology = golden_machine(DGX)
        box = _drawn(topology, Request())
        bands = [part.ranks for part in boxes(_part(box, "node3")) if part.kind is BoxKind.SHARE]
        assert bands == [(0,), (1,)] * 4
        assert any("shared by the ranks" in text for text in _texts(box))
        exclusive = _drawn(topology, Request(bind=Bind.EXCLUSIVE))
        assert not any(len(part.ranks) > 1 or part.kind is BoxKind.SHARE for part in boxes(exclusive))

    def test_cores_that_some_ranks_share(self) -> None:
        """If only some cores of a group are shared, each of them has a band, and its ranks as a name."""
        topology = grid(nodes=1, cores=4)
        plan = make_plan(topology, Request(bind=Bind.EXCLUSIVE, num_ranks=2))
        first, second = plan.ranks
        picture = lay_out(topology, replace(plan, ranks=(first, replace(second, cpus=first.cpus | second.cpus))))
        assert problems(picture) == []
        shared = _part(picture.box, f"core{min(first.cpus)}")
        assert [part.ranks for part in boxes(shared) if part.kind is BoxKind.SHARE] == [(0,), (1,)]
        assert "r0-1" in _texts(shared)

    def test_idle_cpus_are_in_the_legend(self) -> None:
        """CPUs that no rank may use have a look of their own and their number in the legend; not without a plan."""
        topology = golden_machine(DGX)
        box = _drawn(topology, Request())
        idle = {part.key for part in boxes(box) if part.idle and part.key}
        assert idle == {f"cpu{cpu}" for node in (0, 2, 4, 6) for cpu in topology.nodes[node].cpus}
        assert "idle: no rank may use it (128 CPUs)" in _texts(box)
        assert not any(part.idle for part in boxes(_drawn(topology)))
        assert "idle: no rank may use it (4 CPUs)" in _texts(
            _drawn(golden_machine("4node-cpuset-3gpu"), Request(num_ranks=1))
        )

    def test_cores_name_their_rank_if_ranks_differ(self) -> None:
        """With exclusive cores, each core names its rank and the legend explains it; with shared cores, none does."""
        topology = golden_machine("2pkg-2node-smt2-8gpu-a100")
        exclusive, shared = (_drawn(topology, Request(bind=bind)) for bind in (Bind.EXCLUSIVE, Bind.NODE))
        assert [label.text for label in _part(exclusive, "core6").children[0].labels] == ["r1"]
        assert "rank 0 has this core" in _texts(exclusive)
        assert "rank 0 has this core" not in _texts(shared)

    def test_memory_elsewhere_than_cores(self) -> None:
        """Ranks with memory on another node than their cores are shown on both, in rows of their own."""
        box = _drawn(grid(nodes=2, gpus=[0]), Request(memory=Memory.BIND, memory_nodes=CpuSet({1})))
        assert "cores of" in _texts(_part(box, "node0"))
        assert "memory of" in _texts(_part(box, "node1"))
        assert [part.ranks for part in boxes(_part(box, "node1")) if part.ranks] == [(0,)]

    def test_a_rank_that_got_less_is_starred(self) -> None:
        """The GPU of the rank has a star, which the legend explains."""
        texts = _texts(_drawn(golden_machine("4node-cpuset-3gpu"), Request()))
        assert "rank 1 *" in texts
        assert any(text.startswith("not exact") for text in texts)

    def test_more_ranks_than_colors(self) -> None:
        """With forty ranks on every CPU, colors repeat, names do not, and ranks 8 to 15 have another outline."""
        topology = grid(nodes=1, cores=8, gpus=[0] * 8)
        assert {f"rank {rank}" for rank in range(40)} <= set(_texts(_drawn(topology, Request(num_ranks=40))))
        looks = re.findall(r'class="chip ([^"]+)"', svg(topology, make_plan(topology, Request(num_ranks=16))))
        assert len(set(looks)) == 16 == 2 * len(RANK_COLORS)

    def test_ranks_have_names_beside_colors(self) -> None:
        """The rank of every colored CPU is also named on its node."""
        topology = golden_machine("2pkg-8node-gpumem-smt4-6gpu")
        for bind in (Bind.NODE, Bind.EXCLUSIVE, Bind.CORE_COMPLEX):
            box = _drawn(topology, Request(bind=bind))
            for node in (_part(box, key) for key in ("node0", "node8")):
                ranks = {rank for part in boxes(node) if part.kind is BoxKind.CPU for rank in part.ranks}
                assert {f"rank {rank}" for rank in ranks} <= set(_texts(node))

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
        shown = [*_texts(picture.box), *titles, picture.title]
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
        text = svg(golden_machine(DGX))
        light, _, dark = text.partition("@media screen and (prefers-color-scheme:dark)")
        assert "var(" not in text
        assert ".np .machine{fill:#ffffff;}" in light
        assert ".np .machine{fill:#12161c;}" in dark
        assert text == svg(golden_machine(DGX))

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


def test_problems_compares_all_pairs_of_few() -> None:
    """The check compares all pairs of three boxes and finds the two that overlap."""
    three = [Box(kind=BoxKind.CPU, width=10, height=10, x=x, y=y, key=f"{x}") for x, y in ((0, 0), (20, 0), (5, 5))]
    box = Box(kind=BoxKind.NODE, width=40, height=40, children=three)
    found = problems(Picture(box=box, lines=(), title="", description=""))
    assert [problem for problem in found if "0 on 5" in problem] == ["0 on 5"]
