"""The whole machine as data: `Topology`, and its JSON."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from operator import attrgetter
from typing import Annotated, Final, Self

from numapin.base.bounds import MAX_CPUS, MAX_GPUS, MAX_LINKS, MAX_NICS, MAX_NODES, MAX_PACKAGES
from numapin.base.cpu_set import CpuSet
from numapin.base.formats import gib
from numapin.base.not_none import not_none
from numapin.base.plural import counted, listed
from numapin.base.printable import printable_lines
from numapin.base.records import AtMost, Texts, read_record, to_json
from numapin.errors import UsageError
from numapin.topology.nics import Adapter, NearestNics, adapters, nearest_nics
from numapin.topology.parts import (
    Allowed,
    Core,
    CpuSpeed,
    Gpu,
    Link,
    LinkKind,
    Mig,
    Nic,
    NicInterface,
    NicKind,
    Node,
    NodeKind,
    NodeSource,
    Package,
    Pcie,
)
from numapin.topology.vendors import GpuVendor

SCHEMA: Final = "numapin.topology/1"
_MISSING: Final = {  # in older files
    "notes": [],
    "siblings_known": True,
    "doubtful_nodes": "",
    "speeds": [],
    "gpu_order_known": True,
    "allowed_known": True,
}
_ID: Final = attrgetter("id")
_CPUS: Final = attrgetter("cpus")

__all__ = [
    "SCHEMA",
    "Allowed",
    "Core",
    "CpuSpeed",
    "Gpu",
    "GpuVendor",
    "Link",
    "LinkKind",
    "Mig",
    "Nic",
    "NicInterface",
    "NicKind",
    "Node",
    "NodeKind",
    "NodeSource",
    "Package",
    "Pcie",
    "Topology",
]


@dataclass(frozen=True, kw_only=True)  # without slots, for the cached property
class Topology:
    """A machine. Sequences are sorted by number.

    Attributes:
        host: The host name.
        source: Where it was read: `live`, a root directory, or a file.
        packages: Its processor packages.
        nodes: Its NUMA nodes.
        cores: Its physical cores.
        allowed: What this process may use.
        gpus: Its GPUs.
        nics: Its network devices.
        links: How GPUs and network devices reach each other.
        notes: What could not be read, with the remedy.
        siblings_known: Whether the source reports which CPUs are threads of one core. If it does not, each CPU counts
            as a core.
        doubtful_nodes: Nodes whose CPUs are uncertain, because several nodes list the same ones.
        memory_bytes: The memory of the host, without regard to nodes.
        speeds: The ratings of CPUs by speed. Empty: the kernel does not report them.
        gpu_order_known: Whether the source reports the order of `cuda_index`. If it does not, the order is assumed.
        allowed_known: Whether the source reports `allowed`. If it does not, everything counts as allowed.
    """

    host: str | None
    source: str
    packages: Annotated[tuple[Package, ...], AtMost(MAX_PACKAGES)]
    nodes: Annotated[tuple[Node, ...], AtMost(MAX_NODES)]
    cores: Annotated[tuple[Core, ...], AtMost(MAX_CPUS)]
    allowed: Allowed
    gpus: Annotated[tuple[Gpu, ...], AtMost(MAX_GPUS)] = ()
    nics: Annotated[tuple[Nic, ...], AtMost(MAX_NICS)] = ()
    links: Annotated[tuple[Link, ...], AtMost(MAX_LINKS)] = ()
    notes: Texts = ()
    siblings_known: bool = True
    doubtful_nodes: CpuSet = CpuSet()
    memory_bytes: int | None = None
    speeds: Annotated[tuple[CpuSpeed, ...], AtMost(MAX_CPUS)] = ()
    gpu_order_known: bool = True
    allowed_known: bool = True

    def __post_init__(self) -> None:
        """Check that numbers are unique and that every node that a part is on exists."""
        _require_unique("node", map(_ID, self.nodes))
        _require_unique("package", map(_ID, self.packages))
        _require_unique("the speed of CPU", chain.from_iterable(map(_CPUS, self.speeds)))
        _require_unique("CPU", chain.from_iterable(map(_CPUS, self.cores)))
        _require_unique("GPU", map(attrgetter("index"), self.gpus))
        cuda_indices = map(attrgetter("cuda_index"), self.gpus)
        _require_unique("CUDA index", not_none(cuda_indices))
        known = {None, *map(_ID, self.nodes)}
        places = chain(
            ((f"core {core.id}", core.node) for core in self.cores),
            self._device_places(),
            ((f"the memory of {gpu.label}", gpu.memory_node) for gpu in self.gpus),
            ((f"package {package.id}", node) for package in self.packages for node in package.nodes),
        )
        for what, node in places:
            if node not in known:
                raise ValueError(f"{what} is on node {node}, which the machine does not have")

    def _device_places(self) -> Iterator[tuple[str, int | None]]:
        """Yield the name and the node of every GPU and NIC."""
        yield from ((gpu.label, gpu.node) for gpu in self.gpus)
        yield from ((nic.name, nic.node) for nic in self.nics)

    @property
    def cpus(self) -> CpuSet:
        """Every online CPU."""
        return CpuSet(chain.from_iterable(map(_CPUS, self.cores)))

    @property
    def cpu_nodes(self) -> tuple[Node, ...]:
        """The nodes that have CPUs."""
        return tuple(node for node in self.nodes if node.kind is NodeKind.CPU)

    @property
    def visible_gpus(self) -> tuple[Gpu, ...]:
        """The GPUs that the ranks' runtime sees, in its order; those of unknown order come last, by index."""
        visible = (gpu for gpu in self.gpus if gpu.visible)
        return tuple(sorted(visible, key=lambda g: (g.cuda_index is None, g.cuda_index or 0, g.index)))

    @property
    def vendor_gpus(self) -> tuple[Gpu, ...]:
        """All GPUs of the vendor whose GPUs ranks use, hidden ones included."""
        first = next(iter((*self.visible_gpus, *self.gpus)), None)
        return tuple(gpu for gpu in self.gpus if first is not None and gpu.vendor == first.vendor)

    @property
    def has_usable_gpu(self) -> bool:
        """Whether the driver reports a GPU. sysfs also shows NVIDIA's to containers that may not use them."""
        return any(gpu.uuid or not gpu.is_nvidia for gpu in self.visible_gpus)

    @cached_property
    def nearest_nics(self) -> dict[int, NearestNics]:
        """The nearest RDMA NICs of each GPU, its own first, by the GPU's index; none for a GPU near no known one."""
        return nearest_nics(self)

    @cached_property
    def nic_devices(self) -> tuple[Adapter, ...]:
        """The NICs, without repetition: names with the same PCI address are one device."""
        return adapters(self.nics)

    @cached_property
    def links_of(self) -> Mapping[str, Sequence[int]]:
        """The places in `links` of each device's links, by the name of the device."""
        places: defaultdict[str, list[int]] = defaultdict(list)
        for place, link in enumerate(self.links):
            places[link.a].append(place)
            places[link.b].append(place)
        return places

    @property
    def warnings(self) -> tuple[str, ...]:
        """The `notes`, unknown GPU nodes, and contradictions in the description of the machine."""
        found = list(self.notes)
        num_listed = sum(len(node.cpus) for node in self.cpu_nodes)
        if num_listed > len(CpuSet().union(*map(_CPUS, self.cpu_nodes))):
            problem = "several NUMA nodes list the same CPUs: the firmware's tables are wrong"
            found.append(f"{problem}; check with: numactl -H")
        unknown = [gpu for gpu in self.gpus if gpu.node is None]
        if unknown:
            names = ", ".join(f"{gpu.label} ({gpu.pci})" for gpu in unknown)
            option = f"--gpu-nodes {unknown[0].index}=NODE,…"
            found.append(f"the NUMA node of {names} is unknown; if you know it, set it with {option} or NCCL_TOPO_FILE")
        return tuple(found)

    def find_gpu(self, key: str, *, option: str) -> Gpu:
        """Return the GPU of a name.

        Args:
            key: The name, as in `Gpu.goes_by`.
            option: The option that names the GPU, for the error message.

        Returns:
            The GPU.

        Raises:
            UsageError: The name fits no GPU, or several.
        """
        matches = [gpu for gpu in self.gpus if gpu.goes_by(key.strip())]
        if len(matches) != 1:
            number = "more than one" if matches else "no"
            available = ", ".join(f"{gpu.index} ({gpu.pci or gpu.uuid})" for gpu in self.gpus) or "none"
            raise UsageError(
                f"{option}: {number} GPU matches {key!r}; available: {available}", "list them with: numapin topo"
            )
        return matches[0]

    def __str__(self) -> str:
        """Return the machine's size, and a line per node with its CPUs, memory and devices."""
        counts = (
            counted(len(self.packages), "socket") if self.packages else "sockets unknown",
            counted(len(self.nodes), "NUMA node"),
            counted(len(self.gpus), "GPU"),
            counted(len(self.cores), "core"),
            counted(len(self.cpus), "CPU"),
        )
        lines = [f"{self.host or self.source}: {', '.join(counts)}"]
        devices: defaultdict[int | None, list[str]] = defaultdict(list)
        for name, place in self._device_places():
            devices[place].append(name)
        others: list[int] = []
        for node in self.nodes:
            if not node.cpus and node.id not in devices:  # has no line of its own
                others.append(node.id)
                continue
            cpus = f"CPUs {node.cpus}" if node.cpus else ""
            size = "" if node.memory_bytes is None else gib(node.memory_bytes)
            lines.append(f"  node {node.id}: {', '.join(filter(None, (cpus, size, *devices.get(node.id, []))))}")
        if others:
            lines.append(f"  without CPUs: {listed('node', others)}")
        if None in devices:
            lines.append(f"  node unknown: {', '.join(devices[None])}")
        return printable_lines("\n".join(lines))

    def restrict(self, allowed: Allowed) -> Self:
        """Return the same machine with less of it allowed.

        Args:
            allowed: What remains allowed. What was not allowed before stays forbidden.

        Returns:
            A new topology.
        """
        both = Allowed(cpus=self.allowed.cpus & allowed.cpus, nodes=self.allowed.nodes & allowed.nodes)
        return replace(self, allowed=both)

    def to_json(self) -> dict[str, object]:
        """Return the JSON form (schema numapin.topology/1) for `json.dumps`; reading it ignores the nearest NICs."""
        gpus: list[dict[str, object]] = []
        for gpu in self.gpus:
            nearest = self.nearest_nics.get(gpu.index)
            nics, reason = (None, None) if nearest is None else (list(nearest.names), nearest.reason)
            gpus.append({**to_json(gpu), "nics": nics, "nics_reason": reason})
        return {"schema": SCHEMA, **to_json(self), "gpus": gpus}

    @classmethod
    def from_json(cls, text: str, *, source: str = "JSON") -> Self:
        """Read the JSON form.

        Args:
            text: The JSON text.
            source: The name of the file, for error messages.

        Returns:
            The machine.

        Raises:
            MachineFileError: The text is malformed; the message names `source` and the line or element.

        Example:
            ```python
            import numapin

            topology = numapin.Topology.from_json(open("machine.json").read(), source="machine.json")
            ```
        """
        hint = "write a machine file with: numapin topo --save FILE"
        return read_record(cls, text, source=source, hint=hint, schema=SCHEMA, **_MISSING)


def _require_unique(what: str, ids: Iterable[int]) -> None:
    seen: set[int] = set()
    for number in ids:
        if number in seen:
            raise ValueError(f"{what} {number} appears twice")
        seen.add(number)
