"""The parts of a machine as data: nodes, cores, GPUs, links."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from numapin.base.bounds import MAX_MIG, MAX_NODES, MAX_PARENTS
from numapin.base.cpu_set import CpuSet
from numapin.base.records import AtMost
from numapin.base.text import GPU_PREFIX
from numapin.topology.address import pci_address
from numapin.topology.vendors import GpuVendor


class NodeKind(StrEnum):
    """The kind of a NUMA node."""

    CPU = "cpu"
    """It has CPUs."""
    MEMORY = "memory"
    """Memory without CPUs: CXL, HBM, persistent memory."""
    GPU = "gpu"
    """The memory of a GPU, shown as a node (POWER9, Grace). Never used for host memory."""


class LinkKind(StrEnum):
    """The path between two PCI devices, nearest first, in the words of `nvidia-smi topo -m`.

    Links that GPUs have of their own are not in this list. Their words are "NV<count>" (NVLink), "XGMI<count>" and
    "XELINK"; without a count, their number is unknown.
    """

    SAME_BOARD = "PSB"
    ONE_SWITCH = "PIX"
    SWITCHES = "PXB"
    HOST_BRIDGE = "PHB"
    SAME_NODE = "NODE"
    SYSTEM = "SYS"


class NicKind(StrEnum):
    """The protocol of a network device; RoCE and EFA devices with a verbs interface count as InfiniBand."""

    ETHERNET = "ethernet"
    INFINIBAND = "infiniband"
    SLINGSHOT = "slingshot"
    """HPE Slingshot (Cassini): Ethernet, and RDMA of its own without a verbs device."""


class NicInterface(StrEnum):
    """The interface of the kernel that a network device's name belongs to."""

    VERBS = "verbs"
    """RDMA (/sys/class/infiniband): mlx5_0."""
    NETWORK = "net"
    """Sockets (/sys/class/net): eth0, ib0, hsn0."""
    CXI = "cxi"
    """RDMA of Slingshot, through libfabric (/sys/class/cxi): cxi0."""


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
    distances: Annotated[Mapping[int, int], AtMost(MAX_NODES)] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check that the kind agrees with the CPUs."""
        if bool(self.cpus) != (self.kind is NodeKind.CPU):
            msg = f"node {self.id} of kind {self.kind.value!r} has CPUs {str(self.cpus)!r}"
            raise ValueError(msg)

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
    """The ratings of CPUs that have the same ones; only ratings of one kind can be compared. None: unknown.

    Attributes:
        cpus: The CPUs.
        highest_perf: The highest performance, on the scale of the firmware (ACPI CPPC).
        capacity: The kernel's `cpu_capacity`; 1024 is the fastest core of the machine.
    """

    cpus: CpuSet
    highest_perf: int | None = None
    capacity: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pcie:
    """A PCI Express link. None: unknown.

    Attributes:
        gen: The generation now.
        width: The number of lanes now.
        max_gen: The highest generation.
        max_width: The highest number of lanes.
    """

    gen: int | None = None
    width: int | None = None
    max_gen: int | None = None
    max_width: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mig:
    """A MIG instance of a GPU.

    Attributes:
        uuid: Its UUID.
        name: Its profile.
    """

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
        vendor: Its maker. None: the file is older than this field.
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
    mig: Annotated[tuple[Mig, ...], AtMost(MAX_MIG)] = ()
    vendor: GpuVendor | None = None
    partition: int | None = None
    memory_node: int | None = None
    pci_parents: Annotated[tuple[str, ...], AtMost(MAX_PARENTS)] | None = None

    def __post_init__(self) -> None:
        """Check that a node has a source and that only visible GPUs have a number in the runtime's order."""
        if (self.node is None) != (self.node_source is None):
            raise ValueError(f"GPU {self.index} has node {self.node} from source {self.node_source}")
        if self.cuda_index is not None and not self.visible:
            msg = f"GPU {self.index} is not visible but has CUDA index {self.cuda_index}"
            raise ValueError(msg)

    @property
    def is_nvidia(self) -> bool:
        """Whether it is NVIDIA's; machine files from before other vendors were read do not say so."""
        return self.vendor in (None, GpuVendor.NVIDIA)

    @property
    def label(self) -> str:
        """Its name in output and in `Topology.links`: `gpu0`."""
        return f"gpu{self.index}"

    def goes_by(self, name: str) -> bool:
        """Return whether a name refers to this GPU.

        Args:
            name: An index (as in `numapin topo`), the beginning of a UUID, or a PCI address in any spelling.

        Returns:
            Whether it is one of this GPU's names.
        """
        return (
            name == str(self.index)
            or (name.startswith(GPU_PREFIX) and (self.uuid or "").startswith(name))
            or (self.pci is not None and self.pci == pci_address(name))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Nic:
    """A network device.

    Attributes:
        name: Its name.
        pci: Its PCI address.
        node: Its node.
        kind: Its protocol.
        interface: The interface that the name belongs to. None: the source does not say, or the file is older than
            this field.
        is_up: Whether it has a link: of a verbs device, whether its first port is active. None: unknown.
        rate_gbit_s: The rate of the link in 1e9 bits/s.
        pci_parents: The addresses of the PCI bridges above it, nearest first. None: unknown.
    """

    name: str
    pci: str | None = None
    node: int | None = None
    kind: NicKind = NicKind.ETHERNET
    interface: NicInterface | None = None
    is_up: bool | None = None
    rate_gbit_s: float | None = None
    pci_parents: Annotated[tuple[str, ...], AtMost(MAX_PARENTS)] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The path between two devices.

    Attributes:
        a: `gpu0`, or the name of a network device.
        b: The other device.
        kind: A word of `nvidia-smi topo -m`, or `NV` and the number of NVLinks.
    """

    a: str
    b: str
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """The CPUs and nodes that this process may use, by its cpuset and affinity.

    Attributes:
        cpus: Allowed CPUs.
        nodes: Nodes with allowed memory.
    """

    cpus: CpuSet
    nodes: CpuSet
