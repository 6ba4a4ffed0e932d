"""A machine's facts as the files that other programs would write of it: hwloc XML and an NCCL (RCCL) topology dump.

The sysfs tree of `roots.py` has the same facts, so what is read from all three must agree as far as the files go.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING, Any

from tests.machines.roots import cores_of, kernel_node, uuid
from tests.machines.seam import CpuSet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.machines.roots import Machine

_GPU_CLASS = {"nvidia": ("0302", "10de"), "amd": ("1200", "1002"), "intel": ("0380", "8086")}


def describe(machine: Machine, kind: str) -> str:
    """Return the machine as a file of this kind."""
    return _KINDS[kind](machine)


def _tag(tag: str, /, *inner: str, **attributes: object) -> str:
    words = "".join(f' {key}="{value}"' for key, value in attributes.items())
    return f"<{tag}{words}>{''.join(inner)}</{tag}>"


def _mask(numbers: CpuSet) -> str:
    """Return a mask as hwloc and NCCL write it, in words of 32 bits."""
    value = sum(1 << number for number in numbers)
    words = [f"{value >> 32 * word & 0xFFFFFFFF:08x}" for word in range(max(numbers, default=0) // 32, -1, -1)]
    return ",".join(words)


# --- hwloc -----------------------------------------------------------------------------------------------------------


def _hwloc(machine: Machine) -> str:
    nodes = CpuSet(node["id"] for node in machine.nodes)
    inner = (_package(machine, package) for package in machine.packages)
    allowed = machine.allowed
    allowed_cpus = CpuSet.parse(allowed["cpus"]) if allowed else machine.online
    allowed_nodes = CpuSet.parse(allowed["nodes"]) if allowed else nodes
    sets = _sets(machine.online, nodes) | {"allowed_cpuset": _hex(allowed_cpus), "allowed_nodeset": _hex(allowed_nodes)}
    others = (_tag("object", **_interface(nic, "1")) for nic in machine.nics if "bus" in nic)
    whole = _tag("object", *inner, *others, type="Machine", os_index=0, **sets)
    topology = ET.fromstring(_tag("topology", whole, _latencies(machine), version="2.0"))  # noqa: S314
    _complete(topology)
    return ET.tostring(topology, encoding="unicode") + "\n"


def _complete(topology: ET.Element) -> None:
    """Add what hwloc itself needs to read the file: numbers of all objects, and the sets of those below a node."""
    for number, element in enumerate(topology.iter("object"), 1):
        element.attrib.setdefault("gp_index", str(number))
        for child in element.findall("object"):
            if "cpuset" in child.attrib:
                child.attrib.setdefault("nodeset", element.attrib["nodeset"])
        for name in ("cpuset", "nodeset"):
            if name in element.attrib:
                element.attrib[f"complete_{name}"] = element.attrib[name]


def _hex(numbers: CpuSet) -> str:
    return ",".join(f"0x{word}" for word in _mask(numbers).split(","))


def _sets(cpus: CpuSet, nodes: CpuSet) -> dict[str, str]:
    return {"cpuset": _hex(cpus), "nodeset": _hex(nodes)}


def _package(machine: Machine, package: dict[str, Any]) -> str:
    cpus = CpuSet.parse(package["cpus"])
    homes = [node for node, own in machine.cpu_nodes.items() if own <= cpus]
    groups = (_group(machine, node, package) for node in homes)
    return _tag("object", *groups, type="Package", os_index=package["id"], **_sets(cpus, CpuSet(homes)))


def _group(machine: Machine, node: int, package: dict[str, Any]) -> str:
    cpus = machine.cpu_nodes[node]
    near = [other["id"] for other in machine.nodes if other["id"] == node or other.get("near") == node]
    gib = {other["id"]: other.get("gib", 64) for other in machine.nodes}
    memory = (
        _tag("object", type="NUMANode", os_index=other, local_memory=gib[other] << 30, **_sets(cpus, CpuSet({other})))
        for other in near
    )
    cores = [core for core in cores_of(machine, sorted(CpuSet.parse(package["cpus"]))) if core <= cpus]
    return _tag(
        "object",
        *memory,
        *_caches(machine, cores),
        *_bridges(machine, node),
        type="Group",
        kind=1001,
        subkind=0,
        **_sets(cpus, CpuSet(near)),
    )


def _caches(machine: Machine, cores: list[CpuSet]) -> Iterator[str]:
    size = machine.l3_cores or 0
    for start in range(0, len(cores), size or len(cores)):
        members = cores[start : start + (size or len(cores))]
        inner = "".join(map(_core, members))
        cpus = CpuSet().union(*members)
        l3 = {"type": "L3Cache", "cache_size": 1 << 24, "depth": 3, "cache_linesize": 64, "cache_associativity": 16}
        yield _tag("object", inner, **l3, cache_type=0, cpuset=_hex(cpus)) if size else inner


def _core(cpus: CpuSet) -> str:
    threads = (_tag("object", type="PU", os_index=cpu, cpuset=_hex(CpuSet({cpu}))) for cpu in sorted(cpus))
    return _tag("object", *threads, type="Core", cpuset=_hex(cpus))


def _bridges(machine: Machine, node: int) -> Iterator[str]:
    """Yield the host bridges of a node with the devices below, each behind a bridge of its own."""
    devices = [device for device in (*machine.gpus, *machine.nics) if kernel_node(machine, device) == node]
    for root in dict.fromkeys(device["at"].partition("/")[0] for device in devices):
        below = (_pci(machine, device) for device in devices if device["at"].startswith(f"{root}/"))
        bus = root.removeprefix("pci").replace(":", ":[") + "-ff]"
        yield _tag("object", *below, type="Bridge", bridge_type="0-1", depth=0, bridge_pci=bus)


def _pci(machine: Machine, device: dict[str, Any]) -> str:
    *above, address = device["at"].split("/")[1:]
    inner = _tag("object", _os_device(machine, device), **_identity(machine, device, address))
    for bridge in reversed(above):
        below = f"{bridge[:4]}:[{bridge[5:7]}-ff]"
        kind = {"bridge_type": "1-1", "depth": 1, "bridge_pci": below, "pci_type": "0604 [1022:1483] [0000:0000] 00"}
        inner = _tag("object", inner, type="Bridge", pci_busid=bridge, **kind, pci_link_speed="31.5")
    return inner


def _identity(machine: Machine, device: dict[str, Any], address: str) -> dict[str, str]:
    default, vendor = _GPU_CLASS[machine.vendor] if device in machine.gpus else ("0200", "15b3")
    device_class = device["class"][2:6] if "class" in device else default
    return {
        "type": "PCIDev",
        "pci_busid": address,
        "pci_type": f"{device_class} [{vendor}:20b0] [0000:0000] 00",
        "pci_link_speed": "31.5",
    }


def _os_device(machine: Machine, device: dict[str, Any]) -> str:
    if device not in machine.gpus:
        infos = _tag("info", name="Address", value=":".join(["80"] * 20)) if device.get("type") == 32 else ""
        verbs = "3" if device.get("kind") == "infiniband" else "2"
        return _tag("object", infos, **_interface(device, verbs))
    index = machine.gpus.index(device)
    word, key, value = {
        "nvidia": ("nvml", "NVIDIAUUID", uuid(index)),
        "amd": ("rsmi", "AMDUUID", f"{0xA000 + index:016x}"),
        "intel": ("ze", "LevelZeroUUID", f"{index:032x}"),
    }[machine.vendor]
    infos = _tag("info", name="GPUModel", value=machine.gpu) + _tag("info", name=key, value=value)
    return _tag("object", infos, type="OSDev", name=f"{word}{index}", osdev_type=1, gp_index=900 + index)


def _interface(nic: dict[str, Any], osdev_type: str) -> dict[str, str]:
    return {"type": "OSDev", "name": nic["name"], "osdev_type": "2" if "bus" in nic else osdev_type}


def _latencies(machine: Machine) -> str:
    nodes = sorted(machine.cpu_nodes)
    values = " ".join("10" if a == b else str(machine.distance["other"]) for a in nodes for b in nodes)
    parts = _numbers("indexes", " ".join(map(str, nodes))), _numbers("u64values", values)
    return _tag("distances2", *parts, type="NUMANode", nbobjs=len(nodes), kind=5, name="NUMALatency", indexing="os")


def _numbers(tag: str, text: str) -> str:
    return _tag(tag, f"{text} ", length=len(text) + 1)


# --- NCCL ------------------------------------------------------------------------------------------------------------


def _nccl(machine: Machine) -> str:
    cpus = (
        _tag("cpu", *_nccl_devices(machine, node), numaid=node, affinity=_mask(cpus), arch="x86_64")
        for node, cpus in machine.cpu_nodes.items()
    )
    return _tag("system", *cpus, version=1) + "\n"


def _nccl_devices(machine: Machine, node: int) -> Iterator[str]:
    for device in (*machine.gpus, *machine.nics):
        if kernel_node(machine, device) == node:
            *above, address = device["at"].split("/")[1:]
            inner = _nccl_gpu(machine, device) if device in machine.gpus else _nccl_nic(device)
            default = _GPU_CLASS[machine.vendor][0] if device in machine.gpus else "0200"
            device_class = device.get("class", f"0x{default}00")
            yield _nested(_tag("pci", inner, busid=address, **{"class": device_class}, link_width=16), above)


def _nested(inner: str, above: list[str]) -> str:
    for bridge in reversed(above):
        inner = _tag("pci", inner, busid=bridge, **{"class": "0x060400"}, link_width=16)
    return inner


def _nccl_nic(nic: dict[str, Any]) -> str:
    ports = {"port": 1} if nic.get("kind") == "infiniband" else {"port": 0}
    return _tag("nic", _tag("net", name=nic["name"], dev=0, **ports))


def _nccl_gpu(machine: Machine, gpu: dict[str, Any]) -> str:
    word, number = ("xgmi", machine.xgmi) if machine.vendor == "amd" else ("nvlink", machine.nvlinks)
    others = [other["at"].rpartition("/")[2] for other in machine.gpus if other is not gpu]
    links = (_tag(word, target=other, count=number, tclass="0x030200") for other in others if number)
    architecture = {"gcn": "gfx90a"} if machine.vendor == "amd" else {}
    return _tag("gpu", *links, dev=machine.gpus.index(gpu), sm=80, **architecture, rank=0, gdr=1)


_KINDS: dict[str, Callable[[Machine], str]] = {"hwloc": _hwloc, "nccl": _nccl}
