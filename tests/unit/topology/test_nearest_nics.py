"""The nearest NICs of each GPU, on small machines made for one rule each."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from numapin.base.bounds import MAX_GPUS
from numapin.topology.adapters import adapters
from numapin.topology.model import Link, Nic, NicKind, Topology
from tests.machines.grids import grid

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def rdma(number: int, node: int | None = None, name: str = "") -> Nic:
    """Return a NIC with a verbs name."""
    pci = f"0000:{0x80 + number:02x}:00.0"
    return Nic(name=name or f"mlx5_{number}", pci=pci, node=node, kind=NicKind.INFINIBAND)


def linked(
    gpus: Sequence[int | None], nics: Sequence[Nic], words: Mapping[tuple[int, int], str], default: str = ""
) -> Topology:
    """Return a machine of two packages with these nodes of GPUs, and links by the numbers of GPU and NIC."""
    pairs = {(gpu, nic): words.get((gpu, nic), default) for gpu in range(len(gpus)) for nic in range(len(nics))}
    links = tuple(Link(a=f"gpu{gpu}", b=nics[nic].name, kind=word) for (gpu, nic), word in pairs.items() if word)
    return replace(grid(packages=2, nodes=1, gpus=gpus), nics=tuple(nics), links=links)


def firsts(machine: Topology) -> dict[int, str]:
    """Return each GPU's own NIC."""
    return {index: found.names[0] for index, found in machine.nearest_nics.items()}


class TestNearest:
    """Which NICs are the nearest."""

    @pytest.mark.parametrize(("near", "far"), [("PIX", "PXB"), ("PXB", "PHB"), ("PHB", "NODE"), ("NODE", "SYS")])
    def test_links_in_order(self, near: str, far: str) -> None:
        """The nearer link wins, whichever NIC comes first."""
        for words in ({(0, 0): near, (0, 1): far}, {(0, 0): far, (0, 1): near}):
            machine = linked([0], [rdma(0), rdma(1)], words)
            (nic,) = machine.nearest_nics[0].names
            assert words[0, int(nic[-1])] == near

    def test_an_unknown_link_is_the_farthest(self) -> None:
        """A known link, even SYS, is nearer than an unknown one."""
        machine = linked([0], [rdma(0, node=0), rdma(1, node=1)], {(0, 1): "SYS"})
        assert machine.nearest_nics[0].names == ("mlx5_1",)

    def test_distance_decides_between_equal_links(self) -> None:
        """Of NICs behind other bridges, the one on the nearer node wins; the reason has the distance."""
        machine = linked([0], [rdma(0, node=1), rdma(1, node=0)], {}, default="SYS")
        assert machine.nearest_nics[0].names == ("mlx5_1",)
        assert machine.nearest_nics[0].reason == "nearest (SYS, node distance 10)"

    def test_distance_alone(self) -> None:
        """Without any links, nodes decide."""
        machine = linked([0, 1], [rdma(0, node=1), rdma(1, node=0)], {})
        assert firsts(machine) == {0: "mlx5_1", 1: "mlx5_0"}
        assert machine.nearest_nics[0].reason == "nearest (link unknown, node distance 10)"

    def test_nothing_known(self) -> None:
        """A GPU of unknown place gets no NIC rather than any; neither does one beside NICs of unknown place."""
        assert linked([None, 0], [rdma(0, node=0)], {}).nearest_nics.keys() == {1}
        assert linked([0], [rdma(0)], {}).nearest_nics == {}
        assert linked([0], [], {}).nearest_nics == {}

    def test_only_rdma_counts(self) -> None:
        """Ethernet without verbs, and IP over InfiniBand without a known verbs name, are not RDMA NICs."""
        others = [Nic(name="eth0", pci="0000:90:00.0", node=0), rdma(1, node=0, name="ib0")]
        assert linked([0], others, {}, default="PIX").nearest_nics == {}
        machine = linked([0], [*others, rdma(3, node=1)], {(0, 0): "PIX", (0, 2): "SYS"})
        assert machine.nearest_nics[0].names == ("mlx5_3",)

    def test_a_link_by_the_network_name_counts(self) -> None:
        """An adapter's link may be given under either of its names; it is one NIC."""
        names = [rdma(0, name="mlx5_0"), rdma(0, name="ib0"), rdma(1)]
        machine = linked([0], names, {(0, 1): "PIX", (0, 2): "PHB"})
        assert machine.nearest_nics[0] == (("mlx5_0",), "PIX", "nearest (PIX)")

    @pytest.mark.parametrize(
        ("names", "verbs"),
        [
            (["ib0", "mlx5_0"], "mlx5_0"),
            (["ibp65s0", "mlx5_0"], "mlx5_0"),
            (["ib0", "ibp65s0"], "ibp65s0"),
            (["ibp65s0"], "ibp65s0"),
            (["rocep65s0f0"], "rocep65s0f0"),
            (["ib3.8001"], None),
            (["a b"], None),
            (["x" * 64], None),
        ],
    )
    def test_verbs_names(self, names: list[str], verbs: str | None) -> None:
        """The verbs name differs from the kernel's names for IP over InfiniBand, and libraries accept it."""
        (adapter,) = adapters(rdma(0, name=name) for name in names)
        assert adapter.verbs_name == verbs


class TestSharing:
    """Each GPU's own NIC."""

    def test_equally_near_nics_are_dealt_out(self) -> None:
        """Two GPUs below one switch with two NICs take one each, in the order of PCI addresses."""
        machine = linked([0, 0], [rdma(0), rdma(1)], {}, default="PIX")
        assert firsts(machine) == {0: "mlx5_0", 1: "mlx5_1"}
        assert machine.nearest_nics[1].names == ("mlx5_1", "mlx5_0")
        assert machine.nearest_nics[1].reason == "nearest (PIX), one of 2 equally near"

    def test_more_gpus_than_nics(self) -> None:
        """Four GPUs and two NICs: two GPUs each, and the reason says so."""
        machine = linked([0] * 4, [rdma(0), rdma(1)], {}, default="PHB")
        assert firsts(machine) == {0: "mlx5_0", 1: "mlx5_1", 2: "mlx5_0", 3: "mlx5_1"}
        assert machine.nearest_nics[0].reason == "nearest (PHB), one of 2 equally near, shared by 2 GPUs"

    def test_others_move_to_make_room(self) -> None:
        """A GPU with one nearest NIC gets it, although a GPU with a choice came first."""
        words = {(0, 0): "PIX", (0, 1): "PIX", (1, 0): "PIX", (1, 1): "SYS"}
        assert firsts(linked([0, 0], [rdma(0), rdma(1)], words)) == {0: "mlx5_1", 1: "mlx5_0"}

    def test_a_farther_nic_is_no_choice(self) -> None:
        """Fairness does not send a GPU to a farther NIC."""
        words = {(0, 0): "PIX", (0, 1): "SYS", (1, 0): "PIX", (1, 1): "SYS"}
        assert firsts(linked([0, 0], [rdma(0), rdma(1)], words)) == {0: "mlx5_0", 1: "mlx5_0"}

    def test_natural_order(self) -> None:
        """mlx5_9 comes before mlx5_10."""
        machine = linked([0, 0], [rdma(10), rdma(9)], {}, default="PIX")
        assert firsts(machine) == {0: "mlx5_9", 1: "mlx5_10"}

    def test_hidden_gpus_count(self) -> None:
        """A job that sees half of the GPUs gets the same NICs as one that sees all."""
        machine = linked([0] * 4, [rdma(n) for n in range(4)], {}, default="PIX")
        gpus = tuple(replace(gpu, visible=gpu.index % 2 == 1, cuda_index=None) for gpu in machine.gpus)
        assert firsts(replace(machine, gpus=gpus)) == firsts(machine)


def test_moved_gpus_have_other_nics() -> None:
    """With --gpu-nodes, the NICs are those near to the new node."""
    from numapin.topology.build import with_gpu_nodes

    machine = linked([0], [rdma(0, node=0), rdma(1, node=1)], {(0, 0): "NODE", (0, 1): "SYS"})
    assert firsts(machine) == {0: "mlx5_0"}
    assert firsts(with_gpu_nodes(machine, [("0", 1)])) == {0: "mlx5_1"}


def test_the_largest_machines_take_no_time() -> None:
    """256 GPUs and 256 equally near NICs take a second at most; with more NICs there are no links to go by."""
    nics = [rdma(n % 64, name=f"mlx5_{n}") for n in range(256)]
    nics = [replace(nic, pci=f"{n:04x}:00:00.0", node=0) for n, nic in enumerate(nics)]
    machine = linked([0] * MAX_GPUS, nics, {})
    start = time.perf_counter()
    assert len(set(firsts(machine).values())) == 256
    assert time.perf_counter() - start < 2
    more = [replace(nics[0], name=f"mlx5_{n}", pci=f"{n:04x}:01:00.0") for n in range(257)]
    assert replace(machine, nics=tuple(more)).nearest_nics == {}
