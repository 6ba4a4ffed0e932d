"""The NCCL topology reader, on XML written here and on files of two clouds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from numapin.base import cpu_set
from numapin.errors import MachineFileError
from numapin.topology.build import build
from numapin.topology.model import GpuVendor, Pcie
from numapin.topology.sources import xmlfile
from numapin.topology.sources.nccl import nccl_nodes, read_nccl

if TYPE_CHECKING:
    from numapin.topology.readings import Readings

CAPTURES = Path(__file__).parents[4] / "shared" / "machines"


def pci(busid: str, pci_class: str, *inner: str, link: str = 'link_speed="16.0 GT/s PCIe" link_width="16"') -> str:
    """Write a PCI device."""
    return f'<pci busid="{busid}" class="{pci_class}" {link}>\n{"".join(inner)}</pci>\n'


def cpu(*inner: str, numaid: str | None = "0", affinity: str | None = "0000000f") -> str:
    """Write a NUMA node, which NCCL calls a CPU."""
    said = {"numaid": numaid, "affinity": affinity, "arch": "x86_64"}
    written = "".join(f' {name}="{value}"' for name, value in said.items() if value is not None)
    return f"<cpu{written}>\n{''.join(inner)}</cpu>\n"


def system(*inner: str) -> str:
    """Write a topology."""
    return f'<system version="1">\n{"".join(inner)}</system>\n'


def gpu(busid: str, *, dev: int | None = None) -> str:
    """Write a GPU as a cloud image's file does, or with the child that a dump has."""
    child = f'<gpu dev="{dev}" sm="80" rank="0"><nvlink target="0000:c7:00.0" count="12"/></gpu>'
    return pci(busid, "0x030200", "" if dev is None else child)


def read(text: str) -> Readings:
    """Read XML."""
    return read_nccl(xmlfile.parse(text, source="t.xml"))


def nodes(text: str) -> dict[str, int]:
    """Read only the nodes of the PCI devices."""
    return nccl_nodes(xmlfile.parse(text, source="t.xml"))


class TestReadings:
    """A whole machine from a file."""

    def test_cpus_and_nodes(self) -> None:
        """The file has no threads of cores, and a note says so; all else is unknown too."""
        readings = read(system(cpu(numaid="1", affinity="00000001,0000000c"), cpu(affinity="3")))
        assert [(n.id, cpu_set.render(n.cpus)) for n in readings.nodes] == [(0, "0-1"), (1, "2-3,32")]
        assert [(c.cpu, c.siblings) for c in readings.cpus] == [(c, None) for c in (0, 1, 2, 3, 32)]
        assert {(c.package, c.l3) for c in readings.cpus} == {(None, None)}
        assert {(n.memory_bytes, n.free_bytes, len(n.distances)) for n in readings.nodes} == {(None, None, 0)}
        assert (readings.host, readings.source, readings.allowed_cpus) == (None, "t.xml", None)
        assert len(readings.notes) == 1
        assert "threads of one core" in readings.notes[0]

    @pytest.mark.parametrize("affinity", [None, "", "0"])
    def test_no_affinity(self, affinity: str | None) -> None:
        """A file without CPUs still has the nodes of devices; a note says what it is useful for."""
        readings = read(system(cpu(gpu("0000:0f:00.0"), affinity=affinity)))
        assert (readings.cpus, readings.nodes[0].cpus) == ((), frozenset())
        assert (readings.pci[0].node, readings.pci[0].local_cpus) == (0, None)
        assert "NCCL_TOPO_FILE" in readings.notes[0]

    @pytest.mark.parametrize("numaid", ["-1", None])
    def test_an_unknown_node(self, numaid: str | None) -> None:
        """A numaid of -1 is not a node, but the CPUs and devices are read."""
        readings = read(system(cpu(gpu("0000:0f:00.0"), numaid=numaid)))
        assert (readings.nodes, len(readings.cpus), readings.pci[0].node) == ((), 4, None)

    def test_a_gpu_below_switches(self) -> None:
        """Switches are its parents, nearest first, including made-up ones: they show which devices are close."""
        switches = pci("ffff:ff:01.0", "0x060400", pci("0000:0B:00.0", "0x060400", gpu("0000:0F:00.0", dev=3)))
        (found,) = read(system(cpu(switches, numaid="1"))).pci
        assert (found.address, found.is_gpu, found.node, found.index) == ("0000:0f:00.0", True, 1, 3)
        assert (found.parents, found.host_bridge) == (("0000:0b:00.0", "ffff:ff:01.0"), None)
        assert cpu_set.render(found.local_cpus or ()) == "0-3"

    def test_the_link_is_what_it_can_do_at_most(self) -> None:
        """NCCL copies the kernel's maximum; a width of 0 is unknown."""
        (found,) = read(system(cpu(gpu("0000:0f:00.0")))).pci
        assert found.pcie == Pcie(max_gen=4, max_width=16)
        (found,) = read(system(cpu(pci("0000:0f:00.0", "0x030200", link='link_speed="" link_width="0"')))).pci
        assert found.pcie == Pcie()

    def test_nics(self) -> None:
        """NICs are named by NCCL, or by their address; class 0207 is InfiniBand."""
        nets = '<nic><net name="mlx5_0" dev="0" speed="200000"/><net name="mlx5_1" dev="1"/><net dev="2"/></nic>'
        text = system(cpu(pci("0000:10:00.0", "0x020700", nets), pci("0000:11:00.0", "0x020000")))
        first, second = read(text).pci
        assert first.interfaces == (("mlx5_0", "infiniband"), ("mlx5_1", "infiniband"))
        assert second.interfaces == (("0000:11:00.0", "ethernet"),)
        assert not first.is_gpu

    def test_other_devices(self) -> None:
        """NVSwitches, bridges, made-up addresses and NICs outside PCI are left out."""
        others = pci("0000:12:00.0", "0x068000"), pci("ffff:ff:01.0", "0x030200"), pci("x", "0x030200")
        assert read(system(cpu(*others, '<nic><net name="eth0"/></nic>'))).pci == ()


class TestNodes:
    """The node of each PCI device in NCCL_TOPO_FILE."""

    def test_every_address_below_a_cpu(self) -> None:
        """Devices and real switches have the node of their CPU; made-up switches are left out."""
        first = cpu(pci("ffff:ff:01.0", "0x060400", gpu("0000:0F:00.0"), pci("0001:10:00.0", "0x020700")))
        second = cpu(pci("0000:b0:00.0", "0x060400", gpu("0000:b7:00.0")), numaid="3", affinity="")
        unknown = cpu(gpu("0000:c0:00.0"), numaid="-1")
        assert nodes(system(first, second, unknown)) == {
            "0000:0f:00.0": 0,
            "0001:10:00.0": 0,
            "0000:b0:00.0": 3,
            "0000:b7:00.0": 3,
        }

    def test_a_bad_file(self) -> None:
        """It fails as the reader of the whole file does."""
        with pytest.raises(MachineFileError, match=r"t\.xml: line 1: <topology>: it has no <cpu>"):
            nodes("<topology/>")


class TestErrors:
    """Every bad file is a MachineFileError that names the file and the place, with the remedy."""

    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            ("", "line 1, column 1: not XML"),
            ('<system version="1">\n<cpu>', "line 2, column 6: not XML: no element found"),
            (system(), "line 1: <system>: it has no <cpu>"),
            (system(cpu(), cpu()), "line 4: <cpu>: numaid=0 appears twice: the file describes several hosts"),
            (system(cpu(numaid="zero")), "line 2: <cpu>: numaid='zero' is not a number"),
            (system(cpu(numaid="1048576")), "numaid=1048576 is larger than any"),
            (system(cpu(affinity="0-3")), "line 2: <cpu>: affinity: '0-3' is not a CPU mask"),
            (system(cpu(pci("0000:0f:00.0", "0x030200", link='link_width="x16"'))), "link_width='x16' is not a number"),
            ('<!DOCTYPE system [<!ENTITY a "b">]><system version="1">&a;</system>', "the DOCTYPE contains declaration"),
        ],
    )
    def test_a_bad_file(self, text: str, problem: str) -> None:
        """The message names file, place and problem; the hint says how NCCL writes a good file."""
        with pytest.raises(MachineFileError) as caught:
            read(text)
        assert caught.value.message.startswith("t.xml: ")
        assert problem in caught.value.message
        assert "NCCL_TOPO_DUMP_FILE" in caught.value.hint


@pytest.mark.parametrize(
    ("name", "cpus", "gen"),
    [("nccl-aws-p4d.xml", ["0-23,48-71", "24-47,72-95"], 3), ("nccl-azure-ndv5.xml", ["0-47", "48-95"], 5)],
)
def test_files_of_two_clouds(name: str, cpus: list[str], gen: int) -> None:
    """Both have GPUs 0-3 on node 0 and 4-7 on node 1, and half of the NICs on each."""
    path = CAPTURES / name
    if not path.is_file():
        pytest.skip("captured machines are not beside this checkout")
    readings = read(path.read_text())
    assert [cpu_set.render(node.cpus) for node in readings.nodes] == cpus
    gpus = sorted((device for device in readings.pci if device.is_gpu), key=lambda device: device.address)
    assert [device.node for device in gpus] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert {device.pcie for device in gpus} == {Pcie(max_gen=gen, max_width=16)}
    nics = [device.node for device in readings.pci if not device.is_gpu]
    assert nics.count(0) == nics.count(1) > 0
    assert nodes(path.read_text()) == {device.address: device.node for device in readings.pci}


class TestVendorsAndLinks:
    """The owner of a GPU, and the links that NCCL and RCCL write."""

    @pytest.mark.parametrize(
        ("attributes", "child", "vendor"),
        [
            ('class="0x030200"', "", GpuVendor.NVIDIA),
            ('class="0x120000" vendor="0x1002"', "", GpuVendor.AMD),
            ('class="0x120000"', "", GpuVendor.AMD),
            ('class="0x038000"', '<gpu dev="0" gcn="910"/>', GpuVendor.AMD),
            ('class="0x038000" vendor="0x8086"', "", GpuVendor.INTEL),
            ('class="0x030000" vendor="0x1a03"', "", None),
        ],
    )
    def test_the_vendor(self, attributes: str, child: str, vendor: GpuVendor | None) -> None:
        """It is the PCI vendor; older files lack it, and AMD's devices then have a class or attribute of their own."""
        found = read(system(cpu(f'<pci busid="0000:10:00.0" {attributes}>{child}</pci>'))).pci
        assert [reading.vendor for reading in found] == ([vendor] if vendor else [])

    def test_nvlinks_to_a_switch(self) -> None:
        """GPUs are linked through a switch by the smaller number of their links to it."""
        link = '<nvlink target="fffffff:ffff:ff" count="{}" tclass="0x068000"/>'
        gpus = [
            pci(f"0000:{bus}:00.0", "0x030200", f'<gpu dev="{n}" sm="90">{link.format(18 - n)}</gpu>')
            for n, bus in enumerate(("10", "20"))
        ]
        topology = build(read(system(cpu(*gpus))))
        assert [(found.a, found.b, found.kind) for found in topology.links] == [("gpu0", "gpu1", "NV17")]

    def test_no_link_is_known_only_from_a_dump(self) -> None:
        """A dump (with `sm`) without a link means PCI; a cloud image's file does not say."""
        dump = [pci(f"0000:{bus}:00.0", "0x030200", f'<gpu dev="{n}" sm="75"/>') for n, bus in enumerate(("10", "20"))]
        assert [link.kind for link in build(read(system(cpu(*dump)))).links] == ["NODE"]
        assert build(read(system(cpu(gpu("0000:10:00.0"), gpu("0000:20:00.0"))))).links == ()

    def test_partitions_have_the_links_of_their_gpus(self) -> None:
        """XGMI between two addresses links each partition at one with each at the other."""
        part = (
            '<pci busid="0000:{}0:00.0" class="0x120000" vendor="0x1002"><gpu dev="{}" sm="94" gcn="gfx942">'
            '<xgmi target="0000:{}0:00.0" count="2" tclass="0x120000"/></gpu></pci>'
        )
        written = [part.format(1, 0, 2), part.format(1, 1, 2), part.format(2, 2, 1), part.format(2, 3, 1)]
        topology = build(read(system(cpu(*written))))
        words = {(link.a, link.b): link.kind for link in topology.links}
        pairs = (("gpu0", "gpu2"), ("gpu0", "gpu3"), ("gpu1", "gpu2"), ("gpu1", "gpu3"))
        assert words == {("gpu0", "gpu1"): "PSB", ("gpu2", "gpu3"): "PSB"} | dict.fromkeys(pairs, "XGMI2")

    def test_a_boards_vga_chip_is_not_a_gpu(self) -> None:
        """NCCL writes <gpu> for the GPUs that its runtime shows; another vendor's VGA device without it is no GPU."""
        chip = '<pci busid="0000:01:03.0" class="0x030000" vendor="0x1002"/>'
        assert build(read(system(cpu(chip)))).gpus == ()

    def test_partitions_share_an_address(self) -> None:
        """RCCL writes each partition of AMD's GPUs as a device; they get numbers in the order of the file."""
        part = '<pci busid="0000:10:00.0" class="0x120000" vendor="0x1002"><gpu dev="{}" sm="94" gcn="gfx942"/></pci>'
        topology = build(read(system(cpu(part.format(0), part.format(1)))))
        assert [(found.index, found.partition) for found in topology.gpus] == [(0, 0), (1, 1)]
        assert [link.kind for link in topology.links] == ["PSB"]
