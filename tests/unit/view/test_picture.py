"""The layout of a machine's picture: every part is drawn once, nothing overlaps, names do no harm."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING

import pytest

from numapin import Allowed, Bind, Link, Memory, Nic, Request, Topology, make_plan
from numapin.errors import UsageError
from tests.machines.grids import gpu, grid
from tests.machines.roots import NAMES
from tests.pictures import HOSTILE, golden_machine, keys, many_nics, problems, snc4
from tests.unit.view.seam import (
    NARROW,
    PAD,
    WIDE,
    Box,
    BoxKind,
    CpuSet,
    Ink,
    Label,
    adapters,
    fit,
    flow,
    frame,
    lay_out,
    printable,
    width_of,
    wrapped,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

DGX = "2pkg-8node-smt2-8gpu-pairs"


def _texts(box: Box) -> list[str]:
    return [label.text for part in box.walk() for label in part.labels]


def _part(box: Box, key: str) -> Box:
    (found,) = (part for part in box.walk() if part.key == key)
    return found


def _named(topology: Topology, names: Iterable[str]) -> Topology:
    """Return the machine with these names for its host, GPUs, devices and links."""
    names = tuple(names)
    nics = tuple(Nic(name=name, pci=name, node=i % 2) for i, name in enumerate(names))
    return replace(
        topology,
        host=names[0],
        gpus=tuple(replace(gpu(i, i % 2), name=name, uuid=name, pci=name) for i, name in enumerate(names)),
        nics=nics,
        links=tuple(Link(a="gpu0", b=nic.name, kind=nic.name) for nic in nics),
    )


class TestCheck:
    """The check that the tests below use finds faults."""

    def test_finds_each_kind_of_fault(self) -> None:
        """It names boxes and texts that overlap or stick out, and finds no fault in a sound layout."""
        small = Box(kind=BoxKind.CPU, width=10, height=10, key="small")
        text = Label(x=2, y=12, text="words", size=10)
        sound = frame(BoxKind.NODE, [[small, small]], width=100)
        assert problems(sound) == []
        outside = Box(kind=BoxKind.NODE, width=10, height=10, children=(replace(small, x=5),))
        assert problems(outside) == ["small outside node"]
        overlapping = Box(kind=BoxKind.NODE, width=30, height=10, children=(small, replace(small, x=5)))
        assert problems(overlapping) == ["small on small"]
        crossed = Box(kind=BoxKind.NODE, width=99, height=20, labels=(text, replace(text, x=20)))
        assert len(problems(crossed)) == 1
        on_child = Box(kind=BoxKind.NODE, width=99, height=20, labels=(text,), children=(small,))
        assert len(problems(on_child)) == 1


class TestMachines:
    """Every picture of a machine."""

    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize(("bind", "width"), [*((bind, WIDE) for bind in (None, *Bind)), (Bind.EXCLUSIVE, NARROW)])
    def test_shows_everything_once_and_nothing_overlaps(self, name: str, bind: Bind | None, width: float) -> None:
        """Each package, core, CPU, GPU, NIC, and node with CPUs or memory is one box; nothing overlaps."""
        topology = golden_machine(name)
        plan = None if bind is None else make_plan(topology, Request(bind=bind))
        box = lay_out(topology, plan, page_width=width).box
        assert problems(box) == []
        assert box.width <= width + 2 * PAD
        assert sorted(keys(box, BoxKind.CORE)) == sorted(f"core{core.id}" for core in topology.cores)
        drawn_cpus = sorted(key for key in keys(box, BoxKind.CPU) if key)  # the one in the legend has no key
        assert drawn_cpus == sorted(f"cpu{cpu}" for cpu in topology.cpus)
        assert sorted(keys(box, BoxKind.GPU)) == sorted(gpu.label for gpu in topology.gpus)
        assert sorted(keys(box, BoxKind.NIC)) == sorted(f"nic:{nic.name}" for nic in adapters(topology.nics))
        assert keys(box, BoxKind.PACKAGE) == [f"package {package.id}" for package in topology.packages]
        nodes = [key for key in keys(box, BoxKind.NODE, BoxKind.MEMORY_NODE) if key.startswith("node")]
        assert {f"node{n.id}" for n in topology.nodes if n.cpus or n.memory_bytes} <= set(nodes)
        assert len(nodes) == len(set(nodes))

    def test_cores_and_devices_are_in_their_node(self) -> None:
        """On a DGX A100, node 3 holds its 16 cores in 4 L3 groups, GPUs 0 and 1, and the NIC beside them."""
        node = _part(lay_out(golden_machine(DGX)).box, "node3")
        assert keys(node, BoxKind.CORE) == [f"core{core}" for core in range(48, 64)]
        assert len(keys(node, BoxKind.L3)) == 4
        assert keys(node, BoxKind.GPU, BoxKind.NIC) == ["gpu0", "gpu1", "nic:mlx5_0"]
        assert {"0c:00.0", "PIX to gpu0, gpu1", "07:00.0 · PCIe 4 x16", "NV12 to 7 GPUs"} <= set(_texts(node))

    def test_empty_nodes_are_one_box(self) -> None:
        """The 28 nodes that a GB200 keeps for MIG are one box, and are not in the matrix of distances."""
        box = lay_out(golden_machine("2pkg-34node-gpumem-4gpu")).box
        assert "28 empty nodes" in _texts(box)
        assert keys(box, BoxKind.MEMORY_NODE) == ["node2", "node10", "node18", "node26", "empty"]
        topology = golden_machine("2pkg-34node-gpumem-4gpu")
        with_nic = replace(topology, nics=(Nic(name="eth0", node=3),))
        assert "node3" in keys(lay_out(with_nic).box, BoxKind.MEMORY_NODE)

    def test_one_empty_node_has_its_box(self) -> None:
        """A single empty node is drawn as any other."""
        box = lay_out(grid(nodes=2, memory_nodes=[2], memoryless=[2])).box
        assert keys(box, BoxKind.MEMORY_NODE) == ["node2"]

    def test_a_cache_over_nodes_is_drawn_once(self) -> None:
        """With sub-NUMA clustering, each package has one frame for its L3 cache, with the four nodes inside."""
        for width in (WIDE, NARROW):
            box = lay_out(snc4(), page_width=width).box
            assert problems(box) == []
            assert keys(box, BoxKind.CACHE) == ["l3 of nodes 0-3", "l3 of nodes 4-7"]
            assert keys(_part(box, "l3 of nodes 4-7"), BoxKind.NODE) == ["node4", "node5", "node6", "node7"]
            assert "L3" not in _texts(box)

    def test_a_nic_with_two_names_is_one_box(self) -> None:
        """The verbs name and the network name of a NIC share a box and a row of the matrix, in natural order."""
        box = lay_out(many_nics()).box
        assert keys(box, BoxKind.NIC) == [f"nic:mlx5_{i}/ib{i}" for i in range(16)]
        texts = _texts(box)
        assert texts.count("mlx5_3/ib3") == 2
        assert texts.count("mlx5_3") == 1
        assert "PXB to gpu0, gpu1, gpu2, gpu3" in " ".join(_texts(_part(box, "nic:mlx5_3/ib3")))

    def test_gpu_memory_names_its_gpu(self) -> None:
        """Node 10 of a GB200 tray is the memory of GPU 1."""
        box = lay_out(golden_machine("2pkg-34node-gpumem-4gpu")).box
        assert "memory of gpu1" in _texts(_part(box, "node10"))

    def test_long_names_wrap(self) -> None:
        """A long name of a GPU, a NIC or a host is broken into lines; no letter is lost, wide or narrow."""
        long = "NVIDIA H100 80GB HBM3 with a name that a vendor made long"
        nic = Nic(name="enp101s0f0np0_a_name_that_an_administrator_made_long", node=0)
        machine = replace(grid(gpus=[0]), host="host-" * 20, nics=(nic,))
        machine = replace(machine, gpus=(replace(machine.gpus[0], name=long),))
        for width in (WIDE, NARROW):
            box = lay_out(machine, page_width=width).box
            text = "".join("".join(_texts(box)).split())
            assert all("".join(name.split()) in text for name in (long.removeprefix("NVIDIA "), nic.name, "host-" * 20))
            assert "…" not in text

    def test_a_wide_matrix_has_blocks_on_a_narrow_page(self) -> None:
        """On a narrow page each block of the links has the names of all rows, and every entry is there."""
        machine = many_nics()
        wide, narrow = (lay_out(machine, page_width=width).box for width in (WIDE, NARROW))
        entries = [
            sorted(part.title for part in box.walk() if part.kind is BoxKind.HEAT and part.title)
            for box in (wide, narrow)
        ]
        assert entries[0] == entries[1]
        assert problems(narrow) == []
        assert _texts(narrow).count("mlx5_15/ib15") > 2

    def test_no_link_is_cut(self) -> None:
        """Links with long names, such as XGMI1, widen their columns."""
        box = lay_out(golden_machine("2pkg-2node-2amd-cpx4"), page_width=NARROW).box
        assert _texts(box).count("XGMI1") == 8 * 7
        assert not [text for text in _texts(box) if "…" in text]

    def test_every_row_is_within_the_width(self) -> None:
        """Five nodes without cores fill two rows as wide as the packages above; rounding breaks no row."""
        box = lay_out(golden_machine("2pkg-34node-gpumem-4gpu")).box
        rows: dict[float, list[Box]] = {part.y: [] for part in box.children}
        for part in box.children:
            rows[part.y].append(part)
        nodes = [[part.key for part in row] for row in rows.values() if row[0].kind is BoxKind.MEMORY_NODE]
        assert nodes == [["node2", "node10", "node18"], ["node26", "empty"]]
        assert max(part.x + part.width for part in box.children) == max(
            part.x + part.width for part in rows[box.children[0].y]
        )

    def test_known_memory_has_a_bar(self) -> None:
        """The bar shows the used share of the memory; if the free part is unknown, there is no bar."""
        topology = grid(nodes=2)
        half, unknown = (
            replace(node, free_bytes=free) for node, free in zip(topology.nodes, (16 << 30, None), strict=True)
        )
        box = lay_out(replace(topology, nodes=(half, unknown))).box
        (bar,) = (part for part in _part(box, "node0").walk() if part.kind is BoxKind.MEMORY)
        assert bar.children[0].width / bar.width == pytest.approx(0.75)
        assert "64.0 GiB (16.0 GiB free)" in _texts(_part(box, "node0"))
        assert not [part for part in _part(box, "node1").walk() if part.kind is BoxKind.MEMORY]

    def test_a_laptop_has_no_matrix(self) -> None:
        """With one node and no GPU, there are no distances, links or ranks, and the legend does not explain them."""
        texts = _texts(lay_out(golden_machine("1pkg-nonode-2cpu")).box)
        assert not {"Node distances", "Links"} & set(texts)
        assert "memory: used and free" not in texts
        assert "size unknown" in texts

    def test_parts_of_unknown_place_are_drawn(self) -> None:
        """Cores, GPUs and NICs of unknown node, and nodes without a package, are still drawn once."""
        topology = golden_machine("2node-every-node-lists-all")
        lost = replace(
            topology,
            packages=(),
            gpus=tuple(replace(gpu, node=None, node_source=None) for gpu in topology.gpus),
            nics=(Nic(name="eth0"),),
        )
        box = lay_out(lost).box
        assert problems(box) == []
        assert sorted(keys(box, BoxKind.CORE)) == sorted(f"core{core.id}" for core in topology.cores)
        assert keys(box, BoxKind.GPU, BoxKind.NIC) == ["gpu0", "gpu1", "nic:eth0"]
        assert "node unknown" in _texts(box)

    def test_cpus_and_nodes_that_are_not_allowed_are_marked(self) -> None:
        """CPUs and nodes outside the cpuset are marked, and the legend explains the mark."""
        topology = golden_machine("4node-cpuset-3gpu")
        box = lay_out(topology).box
        off = {part.key for part in box.walk() if part.off and part.key}
        assert off == {*(f"cpu{cpu}" for cpu in range(4, 12)), "node1", "node2"}
        assert "not allowed to this process" in _texts(box)
        everything = Allowed(cpus=topology.cpus, nodes=CpuSet(range(4)))
        assert not any(part.off for part in lay_out(replace(topology, allowed=everything)).box.walk())

    @pytest.mark.parametrize(("cores", "smt"), [(1, 1), (8, 8), (64, 2), (513, 1)])
    def test_any_size(self, cores: int, smt: int) -> None:
        """From one CPU to thousands, cells shrink, then lose their text, and nothing overlaps."""
        topology = grid(packages=2, nodes=4, l3=2, cores=cores, smt=smt, gpus=[i % 8 for i in range(16)])
        box = lay_out(topology, make_plan(topology, Request())).box
        assert problems(box) == []
        assert len(keys(box, BoxKind.CORE)) == 16 * cores
        numbered = any(
            label.ink in (Ink.PLAIN, Ink.ON_RANK) for part in box.walk() if part.key == "cpu0" for label in part.labels
        )
        assert numbered == (16 * cores * smt <= 640)

    def test_too_many_devices_for_a_matrix(self) -> None:
        """Sixty linked devices are drawn; instead of the matrix of their links there is the command that shows it."""
        topology = replace(
            grid(gpus=[0] * 60), links=tuple(Link(a="gpu0", b=f"gpu{i}", kind="SYS") for i in range(1, 60))
        )
        box = lay_out(topology).box
        assert problems(box) == []
        assert any("numapin topo --format matrix" in text for text in _texts(box))


class TestPlan:
    """The ranks of a plan in the picture."""

    def test_colors_cores_memory_and_gpus(self) -> None:
        """Ranks 0 and 1 share node 3: its CPUs have both ranks, its memory and GPUs name them; node 0 has no rank."""
        topology = golden_machine(DGX)
        box = lay_out(topology, make_plan(topology, Request())).box
        node = _part(box, "node3")
        assert {part.ranks for part in node.walk() if part.kind is BoxKind.CPU} == {(0, 1)}
        assert {"cores and memory of", "rank 0", "rank 1"} <= set(_texts(node))
        assert [part.ranks for part in _part(box, "gpu1").walk() if part.kind is BoxKind.CHIP] == [(1,)]
        assert not any(part.ranks for part in _part(box, "node0").walk())

    def test_shared_cpus_have_one_band(self) -> None:
        """CPUs of several ranks have one look, and each L3 group a band with the color of each rank above them."""
        topology = golden_machine(DGX)
        box = lay_out(topology, make_plan(topology, Request())).box
        node = _part(box, "node3")
        cpus = [part for part in node.walk() if part.kind is BoxKind.CPU]
        assert {len(part.ranks) for part in cpus} == {2}
        bands = [part.ranks for part in node.walk() if part.kind is BoxKind.SHARE]
        assert bands == [(0,), (1,)] * 4
        assert any("shared by the ranks" in text for text in _texts(box))
        exclusive = lay_out(topology, make_plan(topology, Request(bind=Bind.EXCLUSIVE))).box
        assert not any(len(part.ranks) > 1 or part.kind is BoxKind.SHARE for part in exclusive.walk())

    def test_cores_that_some_ranks_share(self) -> None:
        """If only some cores of a group are shared, each of them has a band, and its ranks as a name."""
        topology = grid(nodes=1, cores=4)
        plan = make_plan(topology, Request(bind=Bind.EXCLUSIVE, num_ranks=2))
        first, second = plan.ranks
        plan = replace(plan, ranks=(first, replace(second, cpus=first.cpus | second.cpus)))
        box = lay_out(topology, plan).box
        assert problems(box) == []
        shared = _part(box, f"core{min(first.cpus)}")
        assert [part.ranks for part in shared.walk() if part.kind is BoxKind.SHARE] == [(0,), (1,)]
        assert "r0-1" in _texts(shared)

    def test_idle_cpus_are_in_the_legend(self) -> None:
        """CPUs that no rank may use have a look of their own and their number in the legend; not without a plan."""
        topology = golden_machine(DGX)
        box = lay_out(topology, make_plan(topology, Request())).box
        idle = {part.key for part in box.walk() if part.idle and part.key}
        assert idle == {f"cpu{cpu}" for node in (0, 2, 4, 6) for cpu in topology.nodes[node].cpus}
        assert "idle: no rank may use it (128 CPUs)" in _texts(box)
        assert not any(part.idle for part in lay_out(topology).box.walk())
        banned = golden_machine("4node-cpuset-3gpu")
        plan = make_plan(banned, Request(num_ranks=1))
        assert "idle: no rank may use it (4 CPUs)" in _texts(lay_out(banned, plan).box)

    def test_cores_name_their_rank_if_ranks_differ(self) -> None:
        """With exclusive cores, each core names its rank and the legend explains it; with shared cores, none does."""
        topology = golden_machine("2pkg-2node-smt2-8gpu-a100")
        exclusive, shared = (
            lay_out(topology, make_plan(topology, Request(bind=bind))).box for bind in (Bind.EXCLUSIVE, Bind.NODE)
        )
        assert [label.text for label in _part(exclusive, "core6").children[0].labels] == ["r1"]
        assert "rank 0 has this core" in _texts(exclusive)
        assert "rank 0 has this core" not in _texts(shared)

    def test_memory_elsewhere_than_cores(self) -> None:
        """Ranks with memory on another node than their cores are shown on both, in rows of their own."""
        topology = grid(nodes=2, gpus=[0])
        plan = make_plan(topology, Request(memory=Memory.BIND, memory_nodes=CpuSet({1})))
        box = lay_out(topology, plan).box
        assert "cores of" in _texts(_part(box, "node0"))
        assert "memory of" in _texts(_part(box, "node1"))
        assert [part.ranks for part in _part(box, "node1").walk() if part.ranks] == [(0,)]

    def test_a_rank_that_got_less_is_starred(self) -> None:
        """The legend has a star for the rank, and explains it."""
        topology = golden_machine("4node-cpuset-3gpu")
        texts = _texts(lay_out(topology, make_plan(topology, Request())).box)
        assert any(text.startswith("gpu1") and text.endswith("*") for text in texts)
        assert any(text.startswith("not exact") for text in texts)

    def test_more_ranks_than_colors(self) -> None:
        """With forty ranks on every CPU, colors repeat, names do not, and everything fits."""
        topology = grid(nodes=1, cores=8, gpus=[0] * 8)
        box = lay_out(topology, make_plan(topology, Request(num_ranks=40))).box
        assert problems(box) == []
        assert {f"rank {rank}" for rank in range(40)} <= set(_texts(box))

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
        """Names of ten thousand letters, markup or control characters are cut to their boxes and printable."""
        topology = _named(grid(), HOSTILE)
        picture = lay_out(topology, make_plan(topology, Request()))
        assert problems(picture.box) == []
        shown = [
            *_texts(picture.box),
            *(line for part in picture.box.walk() for line in part.title.split("\n")),
            picture.title,
        ]
        assert all(text.isprintable() and len(text) <= 400 for text in shown)

    @pytest.mark.parametrize("text", [*HOSTILE, "NVIDIA H100 80GB HBM3", "0-3,8"])
    @pytest.mark.parametrize("width", [0, 5, 20, 100, 1000])
    def test_fit(self, text: str, width: float) -> None:
        """The result fits the width: the whole text, a part that ends in "…", or nothing."""
        shown = fit(text, width, 10)
        assert width_of(shown, 10) <= width
        assert shown in ("", printable(text)) or (shown.endswith("…") and len(shown) > 2)
        if width_of(printable(text), 10) <= width:
            assert shown == printable(text)

    @pytest.mark.parametrize("text", [*HOSTILE, "NVIDIA H100 80GB HBM3", "0-3,8-11,16-19,24-27,32-35,40-43"])
    @pytest.mark.parametrize("width", [40, 60, 300])
    def test_wrapped(self, text: str, width: float) -> None:
        """Each line fits the width, and the lines are the text, but for an unusually long one."""
        lines = wrapped(text, width, 10)
        assert all(width_of(line, 10) <= width for line in lines)
        assert len(lines) <= 6
        if not any(line.endswith("…") for line in lines):
            assert "".join("".join(lines).split()) == "".join(printable(text).split())

    def test_wrapped_begins_beside_a_name(self) -> None:
        """The first line may be shorter; if no word fits there it is empty."""
        assert wrapped("0-3,8-11", 100, 10, first=30) == ["0-3,", "8-11"]
        assert wrapped("CPUs", 100, 10, first=5) == ["", "CPUs"]

    def test_flow_breaks_rows_and_evens_heights(self) -> None:
        """A new row starts where the width ends; a wider box has a row of its own; boxes of a row have one height."""
        low, high = (Box(kind=BoxKind.CPU, width=40, height=height) for height in (10, 20))
        placed = flow([low, high, low, replace(low, width=500)], width=90, gap=10)
        assert [(box.x, box.y, box.height) for box in placed] == [(0, 0, 20), (50, 0, 20), (0, 30, 10), (0, 50, 10)]

    def test_ranks_have_names_beside_colors(self) -> None:
        """The rank of every colored CPU is also named on its core, its group or its node."""
        topology = golden_machine("2pkg-8node-gpumem-smt4-6gpu")
        for bind in (Bind.NODE, Bind.EXCLUSIVE, Bind.CORE_COMPLEX):
            box = lay_out(topology, make_plan(topology, Request(bind=bind))).box
            for node in (part for part in box.walk() if part.key in ("node0", "node8")):
                ranks = {rank for part in node.walk() if part.kind is BoxKind.CPU for rank in part.ranks}
                assert {f"rank {rank}" for rank in ranks} <= set(_texts(node))


def test_problems_compares_all_pairs_of_few() -> None:
    """The check compares all pairs of three boxes and finds the two that overlap."""
    boxes = [Box(kind=BoxKind.CPU, width=10, height=10, x=x, y=y, key=f"{x}") for x, y in ((0, 0), (20, 0), (5, 5))]
    box = Box(kind=BoxKind.NODE, width=40, height=40, children=tuple(boxes))
    assert [problem for problem in problems(box) if "0 on 5" in problem] == ["0 on 5"]
    assert len(list(combinations(boxes, 2))) == 3
