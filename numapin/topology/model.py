"""The machine as data: its parts, `Topology` which holds them all, and its JSON."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from itertools import chain
from operator import attrgetter
from typing import Annotated, Final, Self

from numapin.base import bounds
from numapin.base.cpu_set import CpuSet
from numapin.base.formats import gib
from numapin.base.records import AtMost, Texts, read_record, to_json
from numapin.base.text import GPU_PREFIX, counted, listed, not_none, printable_lines
from numapin.errors import UsageError
from numapin.topology.address import pci_address
from numapin.topology.nics import Adapter, Link, NearestNics, Nic, adapters, nearest_nics
from numapin.topology.vendors import GpuVendor

SCHEMA: Final = "numapin.topology/1"
_ID: Final = attrgetter("id")
_CPUS: Final = attrgetter("cpus")


class NodeKind(StrEnum):
    """The kind of a NUMA node."""

    CPU = "cpu"
    """It has CPUs."""
    MEMORY = "memory"
    """Memory without CPUs: CXL, HBM, persistent memory."""
    GPU = "gpu"
    """The memory of a GPU, shown as a node (POWER9, Grace). Never used for host memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A processor package (socket).

    Attributes:
        id: Its number.
        nodes: Its nodes.
    """

    id: int
    nodes: CpuSet


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A NUMA node.

    Attributes:
        id: The kernel's number.
        kind: Its kind.
        cpus: Its CPUs. Empty unless the kind is `cpu`.
        package: Its package.
        memory_bytes: Its memory.
        free_bytes: Its free memory when it was read.
        distances: The kernel's distance to each node (ACPI SLIT); 10 is local.
    """

    id: int
    kind: NodeKind
    cpus: CpuSet
    package: int | None = None
    memory_bytes: int | None = None
    free_bytes: int | None = None
    distances: Annotated[Mapping[int, int], AtMost(bounds.MAX_NODES)] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check that the kind agrees with the CPUs."""
        if bool(self.cpus) != (self.kind is NodeKind.CPU):
            raise ValueError(f"node {self.id} of kind {self.kind.value!r} has CPUs {str(self.cpus)!r}")

    def distance_to(self, node: int) -> float:
        """Return the distance to another node.

        Args:
            node: The other node's number.

        Returns:
            The kernel's distance; infinity if it is unknown.
        """
        return self.distances.get(node, 10 if node == self.id else float("inf"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Core:
    """A physical core.

    Attributes:
        id: Its lowest CPU.
        cpus: Its CPUs (hardware threads).
        node: Its node.
        package: Its package.
        l3: The lowest CPU of the cores that share its L3 cache.
    """

    id: int
    cpus: CpuSet
    node: int | None = None
    package: int | None = None
    l3: int | None = None

    def __post_init__(self) -> None:
        """Check that the core has CPUs."""
        if not self.cpus:
            raise ValueError(f"core {self.id} has no CPUs")


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuSpeed:
    """CPUs with the same ratings; only ratings of one kind can be compared. None: unknown."""

    cpus: CpuSet
    highest_perf: int | None = None
    """The highest performance, on the scale of the firmware (ACPI CPPC)."""
    capacity: int | None = None
    """The kernel's `cpu_capacity`; 1024 is the fastest core of the machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pcie:
    """A PCI Express link: its generation and number of lanes, now and at most. None: unknown."""

    gen: int | None = None
    width: int | None = None
    max_gen: int | None = None
    max_width: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mig:
    """A MIG instance of a GPU; its name is its profile."""

    uuid: str
    name: str | None = None


class NodeSource(StrEnum):
    """The source of a GPU's node, most trusted first."""

    USER = "gpu-nodes-option"
    SYSFS = "sysfs"
    PCI_PARENT = "pci-parent"
    NVML_MEMORY = "nvml-memory-affinity"
    LOCAL_CPUS = "local-cpus"
    NVML_CPUS = "nvml-cpu-affinity"
    HWLOC_FILE = "hwloc-file"
    NCCL_FILE = "nccl-topology-file"
    SINGLE = "single-node"
    """The machine has one node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU. The driver and the runtime (CUDA, HIP, Level Zero) may number GPUs differently.

    Attributes:
        index: Its number in NVML's order; AMD: in the driver's (KFD) order, which HIP uses too; Intel: by address.
        cuda_index: Its number in CUDA's, HIP's or Level Zero's order. None: the runtime does not see it, or the order
            is unknown (NVIDIA GPUs of different models without CUDA_DEVICE_ORDER=PCI_BUS_ID).
        visible: Whether CUDA, HIP or Level Zero sees it.
        uuid: Its UUID.
        pci: Its PCI address. Partitions of one GPU share it.
        name: Its model.
        node: Its node. None: unknown.
        node_source: The source that reported the node.
        cpus: The CPUs that are local to it.
        pcie: Its PCI Express link.
        mig: Its MIG instances.
        vendor: Its maker. None: unknown.
        partition: Its number among the partitions (AMD) or tiles (Intel) of one GPU. None: it is a whole GPU.
        memory_node: The node that is its own memory (Grace, POWER9). None: unknown, or its memory is not a node.
        pci_parents: The addresses of the PCI bridges above it, nearest first. None: unknown.
    """

    index: int
    cuda_index: int | None = None
    visible: bool = True
    uuid: str | None = None
    pci: str | None = None
    name: str | None = None
    node: int | None = None
    node_source: NodeSource | None = None
    cpus: CpuSet | None = None
    pcie: Pcie = Pcie()
    mig: Annotated[tuple[Mig, ...], AtMost(bounds.MAX_MIG)] = ()
    vendor: GpuVendor | None = None
    partition: int | None = None
    memory_node: int | None = None
    pci_parents: Annotated[tuple[str, ...], AtMost(bounds.MAX_PARENTS)] | None = None

    def __post_init__(self) -> None:
        """Check that a node has a source and that only visible GPUs have a number in the runtime's order."""
        if (self.node is None) != (self.node_source is None):
            raise ValueError(f"GPU {self.index} has node {self.node} from source {self.node_source}")
        if self.cuda_index is not None and not self.visible:
            raise ValueError(f"GPU {self.index} is not visible but has CUDA index {self.cuda_index}")

    @property
    def is_nvidia(self) -> bool:
        """Whether it is NVIDIA's, or of an unknown maker."""
        return self.vendor in (None, GpuVendor.NVIDIA)

    @property
    def label(self) -> str:
        """Its name in output and in `Topology.links`: `gpu0`."""
        return f"gpu{self.index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """The CPUs and nodes that this process may use, by its cpuset and affinity.

    Attributes:
        cpus: Allowed CPUs.
        nodes: Nodes with allowed memory.
    """

    cpus: CpuSet
    nodes: CpuSet


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
    packages: Annotated[tuple[Package, ...], AtMost(bounds.MAX_PACKAGES)]
    nodes: Annotated[tuple[Node, ...], AtMost(bounds.MAX_NODES)]
    cores: Annotated[tuple[Core, ...], AtMost(bounds.MAX_CPUS)]
    allowed: Allowed
    gpus: Annotated[tuple[Gpu, ...], AtMost(bounds.MAX_GPUS)] = ()
    nics: Annotated[tuple[Nic, ...], AtMost(bounds.MAX_NICS)] = ()
    links: Annotated[tuple[Link, ...], AtMost(bounds.MAX_LINKS)] = ()
    notes: Texts = ()
    siblings_known: bool = True
    doubtful_nodes: CpuSet = CpuSet()
    memory_bytes: int | None = None
    speeds: Annotated[tuple[CpuSpeed, ...], AtMost(bounds.MAX_CPUS)] = ()
    gpu_order_known: bool = True
    allowed_known: bool = True

    def __post_init__(self) -> None:
        """Check that numbers are unique and that every node that a part is on exists."""
        for what, numbers in (
            ("node", map(_ID, self.nodes)),
            ("package", map(_ID, self.packages)),
            ("the speed of CPU", chain.from_iterable(map(_CPUS, self.speeds))),
            ("CPU", chain.from_iterable(map(_CPUS, self.cores))),
            ("GPU", (gpu.index for gpu in self.gpus)),
            ("CUDA index", not_none(gpu.cuda_index for gpu in self.gpus)),
        ):
            seen: set[int] = set()
            for number in numbers:
                if number in seen:
                    raise ValueError(f"{what} {number} appears twice")
                seen.add(number)
        known = {None, *map(_ID, self.nodes)}
        places = chain(
            ((f"core {core.id}", core.node) for core in self.cores),
            ((gpu.label, gpu.node) for gpu in self.gpus),
            ((nic.name, nic.node) for nic in self.nics),
            ((f"the memory of {gpu.label}", gpu.memory_node) for gpu in self.gpus),
            ((f"package {package.id}", node) for package in self.packages for node in package.nodes),
        )
        for what, node in places:
            if node not in known:
                raise ValueError(f"{what} is on node {node}, which the machine does not have")

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
        vendors = [gpu.vendor for gpu in (*self.visible_gpus, *self.gpus)]
        return tuple(gpu for gpu in self.gpus if gpu.vendor == vendors[0])

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
            key: An index (as in `numapin topo`), the beginning of a UUID, or a PCI address in any spelling.
            option: The option that names the GPU, for the error message.

        Returns:
            The GPU.

        Raises:
            UsageError: The name fits no GPU, or several.
        """
        name = key.strip()
        address = pci_address(name)
        matches = [
            gpu
            for gpu in self.gpus
            if name == str(gpu.index)
            or (name.startswith(GPU_PREFIX) and (gpu.uuid or "").startswith(name))
            or (address is not None and gpu.pci == address)
        ]
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
        for gpu in self.gpus:
            devices[gpu.node].append(gpu.label)
        for nic in self.nics:
            devices[nic.node].append(nic.name)
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
        return read_record(cls, text, source=source, hint=hint, schema=SCHEMA)
