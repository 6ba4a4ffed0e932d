"""Machine files of hwloc and NCCL: their spellings, what is not believed, and how a bad file is refused."""

from __future__ import annotations

from typing import Final

from tests.topology.documents import (
    card,
    core,
    cpu,
    distances,
    info,
    interface,
    machine,
    node,
    obj,
    pci,
    system,
    two_packages,
)
from tests.topology.reading import Case

GPU: Final = "0x030200"
MAX: Final = "0380 [8086:0bd5] [0:0] 0"
IB: Final = "0207 [15b3:1013] [0:0] 0"
ETH: Final = "0200 [1d0f:efa0] [0000:0000] 00"
PART: Final = (
    '<pci busid="0000:{}0:00.0" class="0x120000" vendor="0x1002"><gpu dev="{}" sm="94" gcn="gfx942">{}</gpu></pci>'
)
XGMI: Final = '<xgmi target="0000:{}0:00.0" count="2" tclass="0x120000"/>'
TO_SWITCH: Final = '<nvlink target="fffffff:ffff:ff" count="{}" tclass="0x068000"/>'


def tiles() -> str:
    devices = [
        card(
            obj("OSDev", info("LevelZeroSubdevices", "2"), name=f"ze{n}", gp_index=50 + 3 * n),
            *(obj("OSDev", name=f"ze{n}.{tile}", gp_index=51 + 3 * n + tile) for tile in (0, 1)),
            busid=f"0000:{n + 1}8:00.0",
            pci_type=MAX,
        )
        for n in (0, 1)
    ]
    devices.append(card(obj("OSDev", name="ze2", gp_index=60), busid="0000:38:00.0", pci_type="0380 [8086:56c0] 0"))
    return two_packages(*devices)


def bridged() -> str:
    inner = obj("Bridge", card(), bridge_type="1-1", bridge_pci="0000:[18-18]", pci_busid="0000:17:0A.0")
    nic = card(interface("eth0", 2), busid="0000:19:00.0", pci_type=ETH)
    outer = obj("Bridge", inner, nic, bridge_type="1-1", bridge_pci="0000:[17-18]", pci_busid="0000:16:02.0")
    return two_packages(obj("Bridge", outer, bridge_type="0-1", bridge_pci="0000:[16-18]"))


NVML3: Final = interface("nvml3", 1, info("GPUModel", "Tesla T4"), info("NVIDIAUUID", "GPU-1"))
CUDA0: Final = interface("cuda0", 5, info("GPUModel", "no"), subtype="CUDA")
LONG: Final = info("Address", ":".join(["80"] * 20))

HWLOC: Final = {
    "a CPU outside a core has no siblings, package or L3, and a note": machine(node(0, [3]), obj("PU", os_index=3)),
    "a package without a number is unknown, not 0": machine(obj("Package", core(0))),
    "the node of plain memory keeps the CPUs, whatever the order": machine(
        obj(
            "Group",
            *(node(n, c, subtype=s) for n, c, s in ((0, (0, 4), "HBM"), (2, (0, 4), "DRAM"), (1, (0, 1, 4, 5), "NVM"))),
            core(0, 4),
        ),
        core(1, 5),
    ),
    "without plain memory, nodes of high-bandwidth memory have the CPUs": machine(
        *(node(n, c, subtype=s) for n, c, s in ((2, (0, 4), "CXL-DRAM"), (0, (0, 4), "HBM"), (1, (1, 5), "HBM"))),
        core(0, 4),
        core(1, 5),
    ),
    "KNL: a node of MCDRAM is near the CPUs of a node without a subtype": machine(
        node(0, (0, 4)), node(1, (0, 4), subtype="MCDRAM"), core(0, 4)
    ),
    "empty nodes near all CPUs, as on a Grace host, leave no doubt whose these are": machine(
        node(0, (0, 4)), node(1, (1, 5)), node(2, (0, 1, 4, 5)), node(3, (0, 1, 4, 5)), core(0, 4), core(1, 5)
    ),
    "without subtypes the lowest number has the CPUs, fewer before all": machine(
        node(0, (0, 1, 4, 5)), node(1, (0, 4)), node(3, (1, 5)), node(2, (1, 5)), core(0, 4), core(1, 5)
    ),
    "a node behind a memory-side cache is found": machine(obj("MemCache", node(7, [0])), core(0)),
    "CPUs without a PU are in no node": machine(node(0, range(8)), core(0, 4)),
    "the subtype says that a node is GPU memory": machine(
        node(0, [0]), node(255, [0], subtype="GPUMemory"), node(9, [0], subtype="CXL-GPUMemory"), core(0)
    ),
    "the allowed sets are those of the reader": two_packages(allowed_cpuset="0x00000003", allowed_nodeset="0x2"),
    "an infinite set is unknown": two_packages(allowed_cpuset="0xf...f", allowed_nodeset="0xf...f,0x0"),
    "the host's name is in the machine (version 2)": machine(info("HostName", "h"), core(0), version="2.11"),
    "the host's name is after the machine (version 3)": machine(core(0), version="3.0", after=info("HostName", "h")),
    "row i, column j is the distance from i to j; lines break anywhere": two_packages(
        after=distances("0 1 ", "10 21 ", "31 ", "10 ")
    ),
    "the indexes name rows and columns": two_packages(after=distances("1 0", "10 21 31 10")),
    **{
        f"a matrix with {name} {value!r} is ignored": two_packages(
            after=distances("0 1", "10 21 31 10", **{name: value})
        )
        for name, value in (("type", "PU"), ("kind", 9), ("indexing", "gp"), ("kind", ""))
    },
    "a matrix that a user added does not hide the kernel's": two_packages(
        after=distances("0 1", "1 2 3 4", name="mine") + distances("0 1", "10 21 31 10")
    ),
    **{
        f"a matrix of the wrong size is an error: {indexes}, {values}": two_packages(after=distances(indexes, values))
        for indexes, values in (("0 1", "10 21 31"), ("0 1", "10 21 31 x"), ("0", "10 21 31 10"))
    },
    "NVML's index, UUID and name count, and not CUDA's": two_packages(card(CUDA0, interface("opencl0d0", 5), NVML3)),
    "a GPU without NVML is known by vendor and class": two_packages(
        card(info("PCIDevice", "TU104GL"), pci_type="0300 [10DE:1eb8] [10de:12a2] a1 00")
    ),
    **{
        f"is it a GPU: {pci_type!r} at {busid}": two_packages(card(pci_type=pci_type, busid=busid))
        for pci_type, busid in (
            *((text, "0000:18:00.0") for text in ("0302 [1a03:1eb8] [0:0] 0", "0680 [10de:1ac2] [0:0] a1", "", "x")),
            *((text, "0000:18:00.0") for text in (ETH, "0380 [1002:740f] [1002:0834] 00", MAX)),
            ("0300 [1002:66a1] [1002:0834] 00", "0000:13:00.0"),
            ("0300 [8086:4680] [0:0] 0", "0000:00:02.0"),
        )
    },
    "NVML knows better than the type": two_packages(card(interface("nvml0", 12), pci_type="0300 [0:0]")),
    **{
        f"a VGA device with {name} is a GPU": two_packages(
            card(interface(name, 1), pci_type="0300 [1002:66a1] [1002:0834] 00")
        )
        for name in ("renderD128", "rsmi0", "opencl0d0")
    },
    "bridges are parents, in the kernel's spelling; the node is that of the package": bridged(),
    "below a machine of two nodes the node is unknown": machine(
        node(0, (0, 4)), core(0, 4), card(), obj("Group", node(1, (1, 5)), core(1, 5))
    ),
    "nodes without CPUs do not make the one with CPUs unknown": machine(
        node(0, (0, 4)), node(1, (0, 4)), core(0, 4), card()
    ),
    **{
        f"a verbs device is InfiniBand, a disk is none (version {version}, {kinds})": two_packages(
            card(*(map(interface, ("eth0", "mlx5_0", "nvme0n1"), kinds)), pci_type=ETH), version=version
        )
        for version, kinds in (("2.0", (2, 3, 0)), ("3.0", (16, 48, 1)), ("3.0", (16, 32, 2)))
    },
    "a name belongs to the interface of its type, whatever it looks like": two_packages(
        card(), card(interface("hsi0", 2), interface("mlx5_0", 3), busid="0000:19:00.0", pci_type=IB)
    ),
    "the state of the first port of a verbs device": two_packages(
        *(
            card(interface(f"mlx5_{n}", 3, info("Port1State", state)), busid=f"0000:{n + 1}8:00.0", pci_type=IB)
            for n, state in enumerate(("4", "1"))
        )
    ),
    "Slingshot NICs, as hwloc before 2.14 and later versions show them": two_packages(
        card(),
        card(interface("hsn0", 2, subtype="Slingshot"), busid="0000:19:00.0", pci_type=ETH),
        card(
            interface("hsn1", 2, subtype="Slingshot"),
            interface("cxi1", 2, subtype="Slingshot"),
            busid="0000:1a:00.0",
            pci_type=ETH,
        ),
    ),
    "IP over an InfiniBand device is InfiniBand": two_packages(card(interface("ib0", 2), pci_type=IB)),
    "the long address of IP over InfiniBand tells its kind; an interface need not be on PCI": two_packages(
        card(interface("ib0", 2, LONG), pci_type="0200 [15b3:1] [0:0] 0"), interface("eth7", 2)
    ),
    "devices of ROCm SMI below one PCI device are partitions": two_packages(
        card(
            *(interface(f"rsmi{n}", 5, info("AMDUUID", f"{n}a"), gp_index=70 + n) for n in (0, 1)),
            pci_type="1200 [1002:74a1] [0:0] 0",
        )
    ),
    "tiles are devices": tiles(),
    **{
        f"{text} tiles are not believed": two_packages(
            card(obj("OSDev", info("LevelZeroSubdevices", text), name="ze0"), pci_type=MAX)
        )
        for text in ("99999999999", "x", "-1")
    },
    "unknown tiles make the order unknown": two_packages(
        *(card(busid=f"0000:{n}8:00.0", pci_type=MAX) for n in (1, 2))
    ),
    "CPUs without a Core element have unknown siblings": two_packages().replace('type="Core"', 'type="Group"'),
    "the encoding declaration is ignored": two_packages().replace("UTF-8", "UTF-16"),
    "a byte order mark is ignored": "\ufeff" + two_packages(),
    **{
        f"refused: {number}": text
        for number, text in enumerate(
            (
                "",
                "{}",
                "\n<root/>",
                "<topology version='2.0'><object>",
                "<topology/>",
                *(f"<topology version='{number}'/>" for number in ("1.11", "4.0")),
                "<topology version='2.0'/>",
                machine(),
                machine(core(0), core(0)),
                *(machine(obj("PU", **said)) for said in ({}, {"os_index": "x"}, {"os_index": 1 << 20})),
                machine(core(0), node(0, [0]), node(0, [0])),
                *(machine(core(0), obj("NUMANode", os_index=0, cpuset=text)) for text in ("0xzz", "0x0," * 2000)),
                two_packages(card(busid="18")),
                "<a>" * 150 + "</a>" * 150,
                two_packages().replace('hwloc2.dtd"', 'hwloc2.dtd" [<!ATTLIST a z CDATA "x">]'),
            )
        )
    },
}
NCCL: Final = {
    "a mask of two words; no threads of cores are known, and a note says so": system(
        cpu(numaid="1", affinity="00000001,0000000c"), cpu(affinity="3")
    ),
    **{
        f"a file without CPUs (affinity {text!r}) says what it is useful for": system(
            cpu(pci("0000:0f:00.0", GPU), affinity=text)
        )
        for text in (None, "", "0")
    },
    **{
        f"numaid {text!r} is not a node, but CPUs and devices are read": system(
            cpu(pci("0000:0f:00.0", GPU), numaid=text)
        )
        for text in ("-1", None)
    },
    "switches are parents, made-up ones too": system(
        cpu(
            pci(
                "ffff:ff:01.0",
                "0x060400",
                pci("0000:0B:00.0", "0x060400", pci("0000:0F:00.0", GPU, '<gpu dev="3" sm="80"/>')),
                pci("0000:10:00.0", "0x020700", '<nic><net name="mlx5_0"/></nic>'),
            )
        )
    ),
    "a link of width 0 is unknown": system(cpu(pci("0000:0f:00.0", GPU, link='link_speed="" link_width="0"'))),
    "NICs are named by NCCL, or by their address": system(
        cpu(
            pci(
                "0000:10:00.0", "0x020700", '<nic><net name="mlx5_0" dev="0"/><net name="mlx5_1"/><net dev="2"/></nic>'
            ),
            pci("0000:11:00.0", "0x020000"),
        )
    ),
    "the port says which names are verbs devices": system(
        cpu(
            pci("0000:0f:00.0", GPU),
            *(
                pci(f"0000:1{number}:00.0", "0x020700", f'<nic><net name="hsi{number}" port="{port}"/></nic>')
                for number, port in enumerate((0, 1, -1))
            ),
        )
    ),
    "functions of a card at one address are NICs of their own, ports are not": system(
        cpu(
            pci("0000:0f:00.0", GPU),
            pci("0000:0e:00.0", GPU),
            pci(
                "0000:10:00.0",
                "0x020700",
                '<nic><net name="mlx5_0" port="1"/><net name="mlx5_1" port="1"/><net name="mlx5_1" port="2"/></nic>',
            ),
        )
    ),
    "libfabric's name of a Slingshot NIC is no verbs device": system(
        cpu(
            pci("0000:0f:00.0", GPU),
            pci("0000:10:00.0", "0x020000", '<nic><net name="cxi0" port="1" speed="200000"/></nic>'),
        )
    ),
    **{
        f"a rate of {text!r}": system(
            cpu(pci("0000:10:00.0", "0x020700", f'<nic><net name="mlx5_0" port="1" speed="{text}"/></nic>'))
        )
        for text in ("400000", "-1", "fast")
    },
    "NVSwitches and made-up addresses are left out, a NIC outside PCI has no node": system(
        cpu(pci("0000:12:00.0", "0x068000"), pci("ffff:ff:01.0", GPU), pci("x", GPU), '<nic><net name="eth0"/></nic>')
    ),
    **{
        f"the vendor: {said}{child}": system(cpu(f'<pci busid="0000:10:00.0" {said}>{child}</pci>'))
        for said, child in (
            ('class="0x030200"', ""),
            ('class="0x120000" vendor="0x1002"', ""),
            ('class="0x120000"', ""),
            ('class="0x038000"', '<gpu dev="0" gcn="910"/>'),
            ('class="0x038000" vendor="0x8086"', ""),
            ('class="0x030000" vendor="0x1a03"', ""),
            ('class="0x030000" vendor="0x1002"', ""),
        )
    },
    "GPUs are linked through a switch by the smaller number of links": system(
        cpu(
            *(
                pci(f"0000:{n + 1}0:00.0", GPU, f'<gpu dev="{n}" sm="90">{TO_SWITCH.format(18 - n)}</gpu>')
                for n in (0, 1)
            )
        )
    ),
    "a dump without a link means PCI": system(
        cpu(*(pci(f"0000:{n + 1}0:00.0", GPU, f'<gpu dev="{n}" sm="75"/>') for n in (0, 1)))
    ),
    "a cloud image's file does not say": system(cpu(pci("0000:10:00.0", GPU), pci("0000:20:00.0", GPU))),
    "partitions have the links of their GPUs": system(
        cpu(*(PART.format(bus, dev, XGMI.format(3 - bus)) for bus, dev in ((1, 0), (1, 1), (2, 2), (2, 3))))
    ),
    "partitions share an address": system(cpu(PART.format(1, 0, ""), PART.format(1, 1, ""))),
    **{
        f"refused: {number}": text
        for number, text in enumerate(
            (
                system(),
                system(cpu(), cpu()),
                system(cpu(numaid="zero")),
                system(cpu(affinity="0-3")),
                system(cpu(pci("0000:0f:00.0", GPU, link='link_width="x16"'))),
            )
        )
    },
}
NODES: Final = system(
    cpu(pci("ffff:ff:01.0", "0x060400", pci("0000:18:00.0", GPU), pci("0001:10:00.0", "0x020700"))),
    cpu(pci("0000:b0:00.0", "0x060400", pci("0000:98:00.0", GPU)), numaid="1", affinity=""),
    cpu(pci("0000:c0:00.0", GPU), numaid="-1"),
)
PLAIN: Final = {"vendor": "0x10de", "class": GPU}

CASES: Final = {
    **{f"hwloc: {sentence}": Case(on="hwloc", document=text) for sentence, text in HWLOC.items()},
    **{f"NCCL: {sentence}": Case(on="nccl", document=text) for sentence, text in NCCL.items()},
    "NCCL_TOPO_FILE gives every device below a <cpu> its node": Case(
        devices={f"pci0000:16/0000:{bus}:00.0": PLAIN for bus in ("18", "98", "b0", "c0")}, nccl_file=NODES
    ),
    "a bad NCCL_TOPO_FILE fails as the whole file does": Case(nccl_file="<topology/>"),
}
