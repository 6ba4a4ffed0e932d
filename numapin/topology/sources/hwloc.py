"""hwloc XML (versions 2 and 3) as readings.

Source: hwloc's topology-xml.c and hwloc2.dtd, which is valid for version 3 too. Of the values read here, two differ in
version 3: `osdev_type` is a set of bits instead of a number, and HostName belongs to the topology, not to the machine.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from itertools import islice
from typing import TYPE_CHECKING, Final

from numapin.base import cpu_set
from numapin.base.bounds import MAX_DEVICES, MAX_LINKS, MAX_NICS, MAX_NODES
from numapin.base.cpu_set import CpuSet
from numapin.base.plural import listed
from numapin.topology.readings import (
    CpuReading,
    NodeReading,
    Readings,
    core_notes,
    distinct_packages,
)
from numapin.topology.sources.hwloc_devices import (
    Fabrics,
    find_pci_devices,
    read_other_interfaces,
    read_pci_devices,
)
from numapin.topology.sources.hwloc_objects import NUMBER, info, kind_of, numbers, placed_of_kind, square

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numapin.errors import MachineFileError
    from numapin.topology.sources.hwloc_objects import Placed
    from numapin.topology.sources.xmlfile import Element

    Ancestors = dict[str | None, Element]
    """The elements above a CPU by their type."""

_LATENCY: Final = 1 << 2  # HWLOC_DISTANCES_KIND_VALUE_LATENCY (MEANS_LATENCY in version 2)
_ALLOWED: Final = ("allowed_cpuset", "allowed_nodeset")
_GROUPS: Final = frozenset({"Core", "L3Cache"})
_OLD: Final = "convert it with hwloc 2 or newer: lstopo -i old.xml --of xml new.xml"


def read_hwloc(root: Element) -> Readings:
    """Read hwloc XML. Raises MachineFileError that names the file, the line and the element.

    It has neither free memory nor PCI Express generations (`pci_link_speed` is a bandwidth).
    """
    version = _version(root)
    machine = _machine(root)
    objects = _objects(machine)
    cpus, package_notes = _read_cpus(objects, machine)
    nodes, doubtful = _read_nodes(objects, CpuSet(cpu.cpu for cpu in cpus), _distances(root))
    with_cpus = _with_cpus(nodes)
    pci_devices = find_pci_devices(objects)
    fabrics = Fabrics(root, pci_devices)
    devices = read_pci_devices(pci_devices, with_cpus, version, fabrics.parts)
    allowed_cpus, allowed_nodes = (_allowed(machine, name) for name in _ALLOWED)
    return Readings(
        host=info(machine, "HostName") or info(root, "HostName"),
        source=root.source,
        cpus=cpus,
        nodes=nodes,
        allowed_cpus=allowed_cpus,
        allowed_nodes=allowed_nodes,
        pci=tuple(islice(devices, MAX_DEVICES + 1)),  # `build` refuses that many
        nics=tuple(islice(read_other_interfaces(objects, with_cpus, version), MAX_NICS + 1)),
        fabric=tuple(islice(fabrics.links(), MAX_LINKS)),
        gpu_memory_nodes=_gpu_memory_nodes(objects),
        doubtful_nodes=doubtful,
        notes=(*package_notes, *_doubtful_notes(doubtful), *core_notes(cpus)),
        allowed_known=all(map(machine.text, _ALLOWED)),
    )


def _objects(machine: Element) -> list[Placed]:
    return [placed for placed in machine.walk() if placed[0].tag == "object"]


def _with_cpus(nodes: Iterable[NodeReading]) -> CpuSet:
    return CpuSet(node.id for node in nodes if node.cpus)


def _machine(root: Element) -> Element:
    machine = next(root.named("object"), None)
    if machine is None or machine.text("type") != "Machine":
        raise root.error('the first element in it is not <object type="Machine">')
    return machine


def _version(root: Element) -> int:
    version = root.word("version")
    match = re.fullmatch(r"([23])\.[0-9.]{1,8}", version)
    if match is None:
        raise _unsupported(root, version)
    return int(match[1])


def _unsupported(root: Element, version: str) -> MachineFileError:
    found = f"version {version!r}" if version else "no version, which is hwloc 1"
    problem = f"{found}; versions 2 and 3 are supported"
    is_old = not version or version.startswith("1.")
    return root.error(problem, hint=_OLD) if is_old else root.error(problem)


def _allowed(machine: Element, name: str) -> CpuSet | None:
    """Return the allowed set of the process that wrote the file; hwloc writes an infinite set as "0xf...f"."""
    return None if machine.word(name).startswith("0xf...f") else machine.mask(name)


# --- CPUs and nodes --------------------------------------------------------------------------------------------------


def _read_cpus(objects: list[Placed], machine: Element) -> tuple[tuple[CpuReading, ...], tuple[str, ...]]:
    """Return the CPUs, and notes on their packages."""
    around = _ancestors(objects)
    if not around:
        raise machine.error("it has no PU")
    groups = _groups(around)
    in_order = sorted(around)
    numbers, notes = distinct_packages(_package_numbers(around[cpu] for cpu in in_order))
    return tuple(_cpu(cpu, around[cpu], groups, numbers) for cpu in in_order), notes


def _package_numbers(around: Iterable[Ancestors]) -> dict[Element, int | None]:
    """Return the number of each package, in the order of their first CPUs."""
    packages = (above["Package"] for above in around if "Package" in above)
    return {package: package.number("os_index") for package in packages}


def _ancestors(objects: list[Placed]) -> dict[int, Ancestors]:
    """Return the elements above each CPU."""
    ancestors: dict[int, Ancestors] = {}
    for pu, above in placed_of_kind(objects, "PU"):
        cpu = pu.id("os_index")
        if cpu in ancestors:
            raise pu.error(f"os_index={cpu} appears twice")
        ancestors[cpu] = {kind_of(element): element for element in above}
    return ancestors


def _groups(ancestors: dict[int, Ancestors]) -> dict[Element, CpuSet]:
    """Return the CPUs below each core and each L3 cache."""
    members: defaultdict[Element, set[int]] = defaultdict(set)
    for cpu, above in ancestors.items():
        for kind in _GROUPS & above.keys():
            members[above[kind]].add(cpu)
    return {element: CpuSet(cpus) for element, cpus in members.items()}


def _cpu(cpu: int, around: Ancestors, groups: dict[Element, CpuSet], packages: dict[Element, int | None]) -> CpuReading:
    core, package, l3 = around.get("Core"), around.get("Package"), around.get("L3Cache")
    return CpuReading(
        cpu=cpu,
        siblings=groups[core] if core else None,
        package=packages[package] if package else None,
        l3=groups[l3] if l3 else None,
    )


def _gpu_memory_nodes(objects: list[Placed]) -> CpuSet:
    nodes = (node for node, _ in placed_of_kind(objects, "NUMANode"))
    return CpuSet(node.id("os_index") for node in nodes if node.word("subtype").endswith("GPUMemory"))


def _read_nodes(
    objects: list[Placed], online: CpuSet, distances: dict[int, dict[int, int]]
) -> tuple[tuple[NodeReading, ...], CpuSet]:
    """Return the nodes, and those of which the file does not say whether they have the CPUs that it lists."""
    elements = _node_elements(objects)
    inside = cpu_set.Inside(online)
    near = {node: inside.of(element.members("cpuset")) for node, element in elements.items()}
    cpus = _own_cpus(near, _of_subtype(elements, "DRAM"))
    readings = [_node(elements[node], node, cpus[node], distances.get(node, {})) for node in sorted(elements)]
    return tuple(readings), _doubtful(near, _of_subtype(elements, None))


def _of_subtype(elements: dict[int, Element], subtype: str | None) -> CpuSet:
    """Return the nodes of a kind of memory; None: the kind is unknown."""
    return CpuSet(node for node, element in elements.items() if element.text("subtype") == subtype)


def _node(element: Element, node: int, cpus: CpuSet, distances: dict[int, int]) -> NodeReading:
    memory_bytes = element.number("local_memory") or 0  # hwloc leaves a zero out
    return NodeReading(id=node, cpus=cpus, memory_bytes=memory_bytes, distances=distances)


def _doubtful(near: dict[int, CpuSet], untyped: CpuSet) -> CpuSet:
    """Return the nodes near the same CPUs of which no kind of memory tells which one has the CPUs."""
    num_near = Counter(near[node] for node in untyped)
    return CpuSet(node for node in untyped if near[node] and num_near[near[node]] > 1)


def _doubtful_notes(nodes: CpuSet) -> tuple[str, ...]:
    if not nodes:
        return ()
    problem = "list the same CPUs, and the file does not say which node owns them"
    assumed = "the smaller list, then the lower number, is assumed"
    remedy = "capture the machine's sysfs instead: hwloc-gather-topology"
    return (f"{listed('node', nodes)} {problem}; {assumed}; {remedy}",)


def _node_elements(objects: list[Placed]) -> dict[int, Element]:
    elements: dict[int, Element] = {}
    for element, _ in placed_of_kind(objects, "NUMANode"):
        node = element.id("os_index")
        if node in elements:
            raise element.error(f"os_index={node} appears twice")
        elements[node] = element
        if len(elements) > MAX_NODES:
            raise element.error(f"there are more than {MAX_NODES} NUMA nodes, the most that are accepted")
    return elements


def _own_cpus(near: dict[int, CpuSet], dram: CpuSet) -> dict[int, CpuSet]:
    """Return each node's own CPUs.

    For a node without CPUs, hwloc writes the CPUs near it, which belong to another node. The owner is the node of
    plain memory, then the node with fewer CPUs near it, then the node with the lower number (Linux numbers nodes with
    CPUs first).
    """
    own: dict[int, CpuSet] = {}
    taken: set[int] = set()
    for node in sorted(near, key=lambda n: (n not in dram, len(near[n]), n)):
        own[node] = near[node] if taken.isdisjoint(near[node]) else CpuSet()
        taken |= own[node]
    return own


def _distances(root: Element) -> dict[int, dict[int, int]]:
    """Return the latencies between NUMA nodes, from node to node."""
    matrix = min(filter(_has_latencies, root.named("distances2")), key=_is_added_by_user, default=None)
    if matrix is None:
        return {}
    nodes = numbers(matrix, "indexes", NUMBER)
    return {
        node: dict(zip(nodes, row, strict=True)) for node, row in zip(nodes, square(matrix, len(nodes)), strict=True)
    }


def _has_latencies(matrix: Element) -> bool:
    is_of_nodes = matrix.text("type") == "NUMANode" and matrix.text("indexing") == "os"
    return is_of_nodes and (matrix.number("kind") or 0) & _LATENCY != 0


def _is_added_by_user(matrix: Element) -> bool:
    """Return whether a matrix is not the kernel's own, which is named NUMALatency."""
    return matrix.text("name") != "NUMALatency"
