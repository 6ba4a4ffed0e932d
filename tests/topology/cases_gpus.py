"""GPUs and NICs on PCI: what they are, where a GPU's node comes from, links, NVML, --gpu-nodes, nearest NICs."""

from __future__ import annotations

from typing import Any, Final

from tests.topology.reading import Case, Files

GPU: Final = {"vendor": "0x10de", "class": "0x030200", "numa_node": "1", "local_cpulist": "2-3,10-11"}
PLAIN: Final = {"vendor": "0x10de", "class": "0x030200"}
ETH: Final = {"class": "0x020000", "net/eth0/mtu": "1"}
A, B, C = "pci0000:16/0000:18:00.0", "pci0000:16/0000:19:00.0", "pci0000:96/0000:98:00.0"
ADDRESS: Final = "0000:18:00.0"


def rdma(number: int, node: str = "") -> Files:
    return {"class": "0x020700", f"infiniband/mlx5_{number}/fw_ver": "1"} | ({"numa_node": node} if node else {})


def port(number: int, *, state: str = "4: ACTIVE", rate: str = "400 Gb/sec (4X NDR)") -> Files:
    at = f"infiniband/mlx5_{number}/ports/1"
    return {"class": "0x020700", f"{at}/state": state, f"{at}/rate": rate}


def cassini(number: int, **more: str) -> Files:
    """Return the files of a Slingshot NIC, as HPE's driver shows them (docs/ABI/testing/sysfs-class-cxi)."""
    return {
        "class": "0x020000",
        "vendor": "0x17db",
        "device": "0x0501",
        f"cxi/cxi{number}/uevent": "",
        "properties/speed": "200000",
        f"net/hsn{number}/type": "1",
    } | {name.replace("__", "/"): text for name, text in more.items()}


# Every source of a GPU's node, in order. Each reports node 1; a case leaves out the first ones.
LADDER: Final[dict[str, dict[str, Any]]] = {
    "sysfs": {"device": {"numa_node": "1"}},
    "a PCI bridge above": {"bridge": {"numa_node": "1"}},
    "NVML's memory affinity": {"nvml": {"memory_nodes": "1"}},
    "the kernel's local CPUs": {"device": {"local_cpulist": "2-3,10-11"}},
    "NVML's CPU affinity": {"nvml": {"cpus": "3"}},
    "NCCL's file": {"nccl": {ADDRESS: 1}},
}
WRONG: Final[dict[str, dict[str, Any]]] = {
    "numa_node of a node without CPUs": {"device": {"numa_node": "4"}},
    "numa_node of a node that does not exist": {"device": {"numa_node": "77"}},
    "a bridge on a node without CPUs, whose own bridge is not asked": {"bridge": {"numa_node": "4"}},
    "an NVML that names all nodes": {"nvml": {"memory_nodes": "0-1"}},
    "an NVML that names a memory node": {"nvml": {"memory_nodes": "4"}},
    "an NVML that names no node": {"nvml": {"memory_nodes": ""}},
    "local CPUs of all nodes, the kernel's mask for node -1": {"device": {"local_cpulist": "0-3,8-11"}},
    "no local CPUs": {"device": {"local_cpulist": ""}},
    "NVML's CPUs of two nodes": {"nvml": {"cpus": "1-2"}},
    "NVML's empty CPU affinity": {"nvml": {"cpus": ""}},
    "NCCL's file with a node without CPUs": {"nccl": {ADDRESS: 4}},
}


def known(*sources: dict[str, Any]) -> Case:
    """Return a machine with a memory node 4, and one GPU below a bridge, of whose node these sources speak."""
    merged: dict[str, dict[str, Any]] = {"device": dict(PLAIN), "bridge": {}, "nvml": {"pci": ADDRESS}, "nccl": {}}
    for source in reversed(sources):
        for name, values in source.items():
            merged[name] |= values
    return Case(
        devices={"pci0000:16/0000:16:02.0/0000:18:00.0": merged["device"]},
        files={"node:online": "0-1,4", "node:node4/cpulist": ""}
        | {f"up:pci0000:16/0000:16:02.0/{name}": text for name, text in merged["bridge"].items()},
        nvml=[merged["nvml"]],
        nccl=merged["nccl"],
    )


def linked(*nics: Files, to: str = "PIX", gpus: int = 1, **rest: Any) -> Case:
    """Return GPUs of node 0 below the first bridge, and NICs at this link from them."""
    below = {
        "PIX": "pci0000:16/0000:16:02.0/0000:17:00.0/{}",
        "PHB": "pci0000:16/0000:16:0{}.0/0000:{}",
        "NODE": "pci0000:26/{}",
        "SYS": "pci0000:96/{}",
    }
    places = [below[to].format(*(f"0000:2{n}:00.0",) if to != "PHB" else (n + 3, f"2{n}:00.0")) for n in range(4)]
    cards = {
        f"pci0000:16/0000:16:02.0/0000:17:00.0/0000:1{n + 8:x}:00.0": PLAIN | {"numa_node": "0"} for n in range(gpus)
    }
    return Case(devices=cards | dict(zip(places, nics, strict=False)), **rest)


BELOW_A_SWITCH: Final = "pci0000:00/0000:00:01.0/0000:03:00.0"
PAIRS: Final = {
    "PIX: below one switch": (
        f"{BELOW_A_SWITCH}/0000:04:01.0/0000:18:00.0",
        f"{BELOW_A_SWITCH}/0000:04:02.0/0000:19:00.0",
    ),
    "PIX: below one root port": ("pci0000:00/0000:00:01.0/0000:18:00.0", "pci0000:00/0000:00:01.0/0000:18:00.1"),
    "PXB: several switches": (
        f"{BELOW_A_SWITCH}/0000:04:03.0/0000:05:00.0/0000:06:01.0/0000:18:00.0",
        f"{BELOW_A_SWITCH}/0000:04:02.0/0000:19:00.0",
    ),
    "PHB: one host bridge": ("pci0000:00/0000:00:01.0/0000:18:00.0", "pci0000:00/0000:00:02.0/0000:19:00.0"),
    "NODE and SYS: other host bridges": (A, C),
}

MAYBE_GPUS: Final[tuple[Files, ...]] = (
    {"vendor": "0x10de", "class": "0x030000"},
    {"vendor": "0x10de", "class": "0x068000"},
    {"vendor": "0x1a03", "class": "0x030200"},
    {"class": "0x030200"},
    {"class": "0x030000"},
    {"class": "0x030000", "config": b"\xde\x10\x34\x12"},
    {"class": "0x030200", "config": b"\x03\x1a\x34\x12"},
    {"class": "0x030200", "config": b""},
    {"vendor": "0x10de"},
    {"vendor": "0x10de", "class": "display"},
)

CASES: Final = {
    # --- what is a GPU
    "a GPU has its node, its CPUs and its place in the PCI tree": Case(
        devices={"pci0000:16/0000:16:02.0/0000:17:00.0/0000:18:00.0": GPU}
    ),
    "a 32-bit domain: the nearest root bus counts": Case(
        devices={
            "pci0000:00/0000:00:0e.0/pci10000:e0/10000:e0:01.0/10000:e1:00.0": GPU,
            "pci0000:00/0000:00:0e.0/pci10000:e0/10000:e0:02.0/10000:e2:00.0": ETH,
            "pci0000:00/0000:00:02.0/0000:01:00.0": {"class": "0x020000", "net/eth1/mtu": "1"},
        }
    ),
    "of more bridges than any machine has, the nearest are read": Case(
        devices={"/".join(("pci0000:00", *(f"0000:{bus:02x}:00.0" for bus in range(40)), "0000:80:00.0")): GPU}
    ),
    "captures may have devices as plain directories": Case(
        files={f"pci:0004:05:00.0/{name}": text for name, text in GPU.items()}
    ),
    "local CPUs from a mask, without the offline ones": Case(
        devices={A: {"vendor": "0x10de", "class": "0x030000", "local_cpus": "ffffffff,0000ff03"}}
    ),
    **{f"is it a GPU of NVIDIA: {files}": Case(devices={A: files}) for files in MAYBE_GPUS},
    "a VGA device that the driver lists is a GPU, however the driver spells its address": Case(
        devices={"pci000a:16/000a:18:00.0": {"class": "0x030000"}},
        files={"nvidia:000A:18:00.0/numa_status": "Node: -1"},
    ),
    **{
        f"link speed {speed!r}": Case(devices={A: GPU | {"current_link_speed": speed, "max_link_width": "16"}})
        for speed in (
            *("2.5 GT/s PCIe", "5.0 GT/s PCIe", "8.0 GT/s PCIe", "16.0 GT/s PCIe", "32.0 GT/s PCIe", "64.0 GT/s PCIe"),
            *("8 GT/s", "Unknown", "12.0 GT/s PCIe"),
        )
    },
    "width 63 is an unreachable device; the current link is not its maximum": Case(
        devices={A: GPU | {"current_link_width": "8", "max_link_speed": "32.0 GT/s PCIe", "max_link_width": "63"}}
    ),
    "the driver's file has model and UUID": Case(
        devices={A: GPU},
        files={
            f"nvidia:{ADDRESS}/information": "Model: \t\t NVIDIA H100\nIRQ:   \t\t 66\nGPU UUID: \t GPU-1234\n"
            "Bus Location: \t 0000:18:00.0"
        },
    ),
    "before a GPU is initialized the driver masks its UUID": Case(
        devices={A: GPU}, files={f"nvidia:{ADDRESS}/information": "Model: Unknown\nGPU UUID: GPU-????????-????"}
    ),
    "nodes that are GPU memory are named by the driver; -1 is not a node": Case(
        files={
            "node:online": "0-1,250",
            "node:node250/cpulist": "",
            f"nvidia:{ADDRESS}/numa_status": "Node:      250\nStatus: online",
            "nvidia:0000:19:00.0/numa_status": "Node: -1",
            "nvidia:x/numa_status": "garbage",
        }
    ),
    "a node with CPUs is never GPU memory": Case(files={f"nvidia:{ADDRESS}/numa_status": "Node: 0"}),
    "NVML names the node that is a GPU's memory": Case(
        files={"node:online": "0-1,4", "node:node4/cpulist": ""}, nvml=[{"pci": ADDRESS, "own_node": 4}]
    ),
    # --- NICs
    "interfaces below net are sorted": Case(
        devices={A: {"class": "0x020000", "vendor": "0x8086", "net/b/mtu": "1", "net/a/mtu": "1"}}
    ),
    "a RoCE device has both kinds": Case(
        devices={A: {"class": "0x020000", "net/eth0/mtu": "1", "infiniband/mlx5_0/fw_ver": "1"}}
    ),
    "IP over InfiniBand by another name is no verbs device": linked(
        {**rdma(0), "net/a0/mtu": "1"}, {"class": "0x020700", "net/hsi0/mtu": "1"}
    ),
    "a verbs device may be called ib0": linked(
        {"class": "0x020700", "infiniband/ib0/fw_ver": "1", "net/net0/mtu": "1"}
    ),
    **{
        f"state and rate of a verbs device: {state!r}, {rate!r}": Case(devices={A: port(0, state=state, rate=rate)})
        for state, rate in (("4: ACTIVE", "2.5 Gb/sec (1X SDR)"), ("1: DOWN", "x"), ("3: ARMED", ""), ("", "1"))
    },
    **{
        f"state and rate of an interface: {state}, {speed}": Case(
            devices={A: ETH | {"net/eth0/operstate": state, "net/eth0/speed": speed}}
        )
        for state, speed in (
            *(("up", "100000"), ("down", "-1"), ("lowerlayerdown", "4294967295"), ("unknown", "10"), ("x", "0")),
        )
    },
    "an interface on an InfiniBand device is InfiniBand": Case(
        devices={A: {"class": "0x020700", "net/ib0/mtu": "1", "infiniband/mlx5_0/fw_ver": "1"}}
    ),
    "a virtio device has its interface one directory deeper": Case(
        devices={A: {"class": "0x020000", "virtio0/net/eth0/mtu": "1"}}
    ),
    "no NIC: without an interface, a disk controller, a name that is no address": Case(
        devices={A: {"class": "0x020000"}, B: {"class": "0x010802", "net/eth0/mtu": "1"}},
        files={"pci:power/class": "0x020000", "pci:power/net/eth0/mtu": "1"},
    ),
    "a NIC's node comes from the same sources, NCCL's file included": Case(
        devices={A: rdma(0), C: ETH | {"numa_node": "1"}}, nccl={ADDRESS: 0}
    ),
    # --- the sources of a GPU's node
    **{
        f"{name} answers if all before it are silent": known(*list(LADDER.values())[place:])
        for place, name in enumerate(LADDER)
    },
    **{f"{name} answers alone": known(LADDER[name]) for name in LADDER},
    **{f"{name} says nothing": known(wrong) for name, wrong in WRONG.items()},
    **{
        f"{name} is passed over": known(wrong, LADDER["NCCL's file"])
        for name, wrong in WRONG.items()
        if "nccl" not in wrong
    },
    "the earlier source wins if they disagree": known({"device": {"numa_node": "0"}}, *list(LADDER.values())[1:]),
    "on one CPU node that node is the answer": Case(
        devices={A: PLAIN}, files={"node:node0/cpulist": "0-3,8-11", "node:node1/cpulist": ""}
    ),
    "an affinity that equals the cpuset says nothing": Case(
        devices={A: PLAIN},
        files={"proc/self/status": "Cpus_allowed_list:\t0-1,8-9\nMems_allowed_list:\t0"},
        nvml=[{"pci": ADDRESS, "cpus": "0-1,8-9", "memory_nodes": "0"}],
    ),
    "under another cpuset it still places the GPU": Case(
        devices={A: PLAIN},
        files={"proc/self/status": "Cpus_allowed_list:\t1-3,8-11\nMems_allowed_list:\t0-1"},
        nvml=[{"pci": ADDRESS, "cpus": "0-1,8-9", "memory_nodes": "0"}],
    ),
    # --- NVML beside sysfs
    "NVML gives order and names, and sysfs the values that NVML lacks": Case(
        devices={A: PLAIN | {"numa_node": "1", "current_link_width": "8", "max_link_width": "16"}},
        files={f"nvidia:{ADDRESS}/information": "Model: from sysfs\nGPU UUID: GPU-s"},
        nvml=[{"pci": ADDRESS, "pcie": {"gen": 5, "max_gen": 5}}],
    ),
    "a GPU without a node keeps NVML's CPUs": Case(nvml=[{"pci": ADDRESS, "cpus": "0-3,8-11"}]),
    "without NVML GPUs are numbered by bus address, a long domain last": Case(
        devices={f"pci0000:16/{address}": PLAIN for address in ("10000:01:00.0", "0000:90:00.0", "0000:20:00.0")}
    ),
    "an NVML that sees no GPU is believed": Case(devices={A: PLAIN}, nvml=[]),
    "a missing NVML is noted where a GPU is missed": Case(devices={A: PLAIN}, nvml_more={"notes": ("no NVML",)}),
    "a missing NVML is not noted without a GPU": Case(devices={A: ETH}, nvml_more={"notes": ("no NVML",)}),
    "a broken NVML is always noted": Case(devices={A: ETH}, nvml_more={"notes": ("no NVML",), "broken": True}),
    "CUDA's variables give what is visible": Case(
        nvml=[{"pci": ADDRESS, "name": "T4"}, {"pci": "0000:98:00.0", "name": "T4"}],
        environ={"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
    ),
    # --- links
    **{f"{name}, GPU and NIC": Case(devices={a: GPU, b: ETH | {"numa_node": "1"}}) for name, (a, b) in PAIRS.items()},
    **{
        f"{name}, two GPUs": Case(
            devices={a: GPU, b: PLAIN | {"numa_node": "0"}}, nvml=[{"pci": a[-12:]}, {"pci": b[-12:]}]
        )
        for name, (a, b) in PAIRS.items()
    },
    "the link of a device of unknown node is unknown": Case(devices={A: GPU, C: ETH}),
    "two GPUs may have NVLinks that sysfs does not show: their link is unknown": Case(
        devices={A: PLAIN | {"numa_node": "0"}, C: PLAIN | {"numa_node": "1"}, B: ETH | {"numa_node": "1"}}
    ),
    "NVML has the word on links, in either order of the pair": Case(
        devices={A: GPU, B: GPU},
        nvml=[{"pci": ADDRESS}, {"pci": "0000:19:00.0"}],
        nvml_more={"links": ((1, 0, "NV4"),)},
    ),
    # --- --gpu-nodes
    **{
        f"--gpu-nodes {key!r}=1 places the GPU and removes the warning": Case(
            devices={A: PLAIN, C: GPU}, gpu_nodes=[(key, 1)]
        )
        for key in ("0", " 0 ", ADDRESS, "00000000:18:00.0", "18:00.0")
    },
    "what the user replaces is noted, and links are judged anew": Case(
        devices={A: PLAIN | {"numa_node": "0"}, C: GPU, "pci0000:26/0000:28:00.0": ETH | {"numa_node": "1"}},
        nvml=[{"pci": ADDRESS}, {"pci": "0000:98:00.0"}],
        gpu_nodes=[("0", 1), ("1", 1)],
    ),
    **{
        f"--gpu-nodes is refused: {pairs}": Case(
            devices={A: PLAIN, C: GPU}, files={"node:online": "0-1,4", "node:node4/cpulist": ""}, gpu_nodes=pairs
        )
        for pairs in ([("7", 0)], [("0", 9)], [("0", 4)], [("0", 0), (ADDRESS, 1)], [("0", 1), ("0", 0)])
    },
    **{
        f"a GPU by the name {key!r}": Case(
            nvml=[{"pci": "0000:10:00.0", "uuid": "GPU-00a"}, {"pci": "0000:11:00.0", "uuid": "GPU-01b"}],
            gpu_nodes=[(key, 1)],
        )
        for key in ("1", "GPU-01", "GPU-01b", "0000:11:00.0", "GPU-0", "GPU-02", "-1", "0000:12:00.0", "", "10:00.8")
    },
    "a GPU by name on a machine without GPUs": Case(gpu_nodes=[("0", 0)]),
    # --- nearest NICs
    **{
        f"a NIC at {word} is the nearest": linked(rdma(0, "0" if word == "NODE" else "1"), to=word)
        for word in ("PIX", "PHB", "NODE", "SYS")
    },
    "between equal links the node's distance decides": linked(rdma(0, "1"), rdma(1, "0"), to="SYS"),
    "only RDMA NICs count": linked(ETH, {"class": "0x020700", "net/ib0/mtu": "1"}),
    "one adapter with a verbs and a network name": linked({**rdma(0), "net/ib0/mtu": "1"}, rdma(1)),
    "a GPU of unknown place gets no NIC": Case(devices={A: PLAIN, C: rdma(0, "0")}),
    "equally near NICs are dealt out in the order of PCI addresses": linked(rdma(0), rdma(1), gpus=2),
    "more GPUs than NICs share them, and say so": linked(rdma(0), rdma(1), gpus=4),
    "a NIC whose first port is down is not handed out, and the reason says so": linked(
        port(0, state="1: DOWN"), port(1), to="PHB", gpus=2
    ),
    "a GPU near NICs that are all down has none": linked(port(0, state="2: INIT"), port(1, state="1: DOWN")),
    "mlx5_9 comes before mlx5_10": linked(rdma(10), rdma(9), gpus=2),
    "Slingshot NICs count by their name in libfabric, although they have no verbs device": linked(
        cassini(0, properties__link="1"), cassini(1), to="PHB", gpus=2
    ),
    "a Slingshot NIC without a link is not handed out": linked(cassini(0, properties__link="0"), cassini(1), to="PHB"),
    "a capture without the folder of the cxi driver: Slingshot by its PCI ids": linked(
        {"class": "0x020000", "vendor": "0x1590", "device": "0x0371", "net/hsn0/type": "1"}
    ),
    "hsn0 of another maker (Slingshot 10 has Mellanox's NICs) is used through verbs": linked(
        {**rdma(0), "vendor": "0x15b3", "device": "0x1017", "net/hsn0/type": "1"}
    ),
    "hidden GPUs count": linked(
        *map(rdma, range(4)),
        gpus=4,
        nvml=[{"pci": f"0000:1{n + 8:x}:00.0", "name": "T4"} for n in range(4)],
        environ={"CUDA_VISIBLE_DEVICES": "1,3", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
    ),
    "a GPU with one nearest NIC gets it, although another came first": Case(
        devices={
            "pci0000:16/0000:16:02.0/0000:18:00.0": PLAIN | {"numa_node": "0"},
            "pci0000:16/0000:16:02.0/0000:19:00.0": PLAIN | {"numa_node": "0"},
            "pci0000:16/0000:16:02.0/0000:20:00.0": rdma(0, "0"),
            "pci0000:96/0000:16:03.0/0000:21:00.0": rdma(1, "0"),
        },
        gpu_nodes=[("1", 1)],
    ),
}
