"""The machine as data. Pure.

Comes in: what `build` made of the readings, or JSON (schema numapin.topology/1). Goes out: one frozen `Topology` that
every later stage reads and none changes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from numapin.base.bounds import MAX_CPUS, MAX_GPUS, MAX_LINKS, MAX_MIG, MAX_NICS, MAX_NODES, MAX_PACKAGES
from numapin.base.cpu_set import CpuSet
from numapin.base.fields import Fields
from numapin.errors import UsageError
from numapin.topology.address import pci_address

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from _typeshed import DataclassInstance


SCHEMA: Final = "numapin.topology/1"


class NodeKind(StrEnum):
    """What a NUMA node is made of."""

    CPU = "cpu"
    """It has CPUs."""
    MEMORY = "memory"
    """Memory without CPUs: CXL, HBM, persistent memory."""
    GPU = "gpu"
    """The memory of a GPU, shown as a node (POWER9, Grace). Never used for host memory."""


class LinkKind(StrEnum):
    """How two PCI devices reach each other, nearest first, in the words of `nvidia-smi topo -m`.

    NVLink has no word here: it is "NV<count>".
    """

    SAME_BOARD = "PSB"
    ONE_SWITCH = "PIX"
    SWITCHES = "PXB"
    HOST_BRIDGE = "PHB"
    SAME_NODE = "NODE"
    SYSTEM = "SYS"


class NicKind(StrEnum):
    """What a network device speaks; RoCE and EFA devices that show verbs count as InfiniBand."""

    ETHERNET = "ethernet"
    INFINIBAND = "infiniband"


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """One processor package (socket)."""

    id: int
    nodes: CpuSet


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One NUMA node, by the kernel's number. `distances` are the kernel's (ACPI SLIT: 10 is local)."""

    id: int
    kind: NodeKind
    cpus: CpuSet
    package: int | None = None
    memory_bytes: int | None = None
    free_bytes: int | None = None
    distances: Mapping[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check that the kind agrees with the CPUs."""
        if bool(self.cpus) != (self.kind is NodeKind.CPU):
            msg = f"node {self.id} of kind {self.kind.value!r} has CPUs {str(self.cpus)!r}"
            raise ValueError(msg)

    def distance_to(self, node: int) -> float:
        """Return the distance to another node; an unknown distance is the farthest."""
        return self.distances.get(node, 10 if node == self.id else float("inf"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Core:
    """One physical core. `id` is its lowest CPU; `l3` is the lowest CPU of the group that shares its L3 cache."""

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
class Pcie:
    """A PCI Express link: generation and lanes now and at most; None is unknown."""

    gen: int | None = None
    width: int | None = None
    max_gen: int | None = None
    max_width: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mig:
    """One MIG instance of a GPU."""

    uuid: str
    name: str | None = None


class NodeSource(StrEnum):
    """Where a GPU's node comes from, most trusted first."""

    USER = "gpu-nodes-option"
    SYSFS = "sysfs"
    PCI_PARENT = "pci-parent"
    NVML_MEMORY = "nvml-memory-affinity"
    LOCAL_CPUS = "local-cpus"
    NVML_CPUS = "nvml-cpu-affinity"
    NCCL_FILE = "nccl-topology-file"
    MEASURED = "measured"
    """By `numapin bench transfer --save`: the node from which copies are fastest."""
    SINGLE = "single-node"
    """The machine has one node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One NVIDIA GPU. `index` is NVML's order, `cuda_index` the CUDA runtime's; the two are different name spaces.

    `visible` says whether CUDA sees the GPU at all; `cuda_index` is None where it does not, or where its order cannot
    be known (GPUs of different kinds without CUDA_DEVICE_ORDER=PCI_BUS_ID).
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
    mig: tuple[Mig, ...] = ()

    def __post_init__(self) -> None:
        """Check that a node has a source and that only visible GPUs have a CUDA index."""
        if (self.node is None) != (self.node_source is None):
            raise ValueError(f"GPU {self.index} has node {self.node} from source {self.node_source}")
        if self.cuda_index is not None and not self.visible:
            msg = f"GPU {self.index} is not visible but has CUDA index {self.cuda_index}"
            raise ValueError(msg)

    @property
    def label(self) -> str:
        """Name the GPU for people and in `links`."""
        return f"gpu{self.index}"

    def goes_by(self, name: str) -> bool:
        """Say whether that is its NVML index, a beginning of its UUID, or its PCI address in any spelling."""
        return (
            name == str(self.index)
            or (name.startswith("GPU-") and (self.uuid or "").startswith(name))
            or (self.pci is not None and self.pci == pci_address(name))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Nic:
    """One network device."""

    name: str
    pci: str | None = None
    node: int | None = None
    kind: NicKind = NicKind.ETHERNET


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """How device `a` reaches device `b`: a `LinkKind` word, or "NV<links>"."""

    a: str
    b: str
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """The CPUs and nodes that this process may use (cpuset, affinity)."""

    cpus: CpuSet
    nodes: CpuSet


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """One machine. Sequences are sorted by number; `notes` are what the readers could not tell, with the remedy."""

    host: str | None
    source: str
    packages: tuple[Package, ...]
    nodes: tuple[Node, ...]
    cores: tuple[Core, ...]
    allowed: Allowed
    gpus: tuple[Gpu, ...] = ()
    nics: tuple[Nic, ...] = ()
    links: tuple[Link, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check that numbers are unique and that what refers to a node or package refers to one that is here."""
        for what, ids in (
            ("node", (node.id for node in self.nodes)),
            ("package", (package.id for package in self.packages)),
            ("CPU", (cpu for core in self.cores for cpu in core.cpus)),  # the first that appears twice ends it
            ("GPU", (gpu.index for gpu in self.gpus)),
            ("CUDA index", (gpu.cuda_index for gpu in self.gpus if gpu.cuda_index is not None)),
        ):
            _require_unique(what, ids)
        self._require_known_nodes()

    def _require_known_nodes(self) -> None:
        known = {node.id for node in self.nodes}
        for what, node in (
            *((f"core {core.id}", core.node) for core in self.cores),
            *((gpu.label, gpu.node) for gpu in self.gpus),
            *((nic.name, nic.node) for nic in self.nics),
            *((f"package {package.id}", node) for package in self.packages for node in package.nodes),
        ):
            if node is not None and node not in known:
                raise ValueError(f"{what} is on node {node}, which the machine does not have")

    @property
    def cpus(self) -> CpuSet:
        """Return every online CPU."""
        return CpuSet(cpu for core in self.cores for cpu in core.cpus)

    @property
    def cpu_nodes(self) -> tuple[Node, ...]:
        """Return the nodes that have CPUs."""
        return tuple(node for node in self.nodes if node.kind is NodeKind.CPU)

    @property
    def visible_gpus(self) -> tuple[Gpu, ...]:
        """Return the GPUs that CUDA sees, in CUDA's order; those of unknown order last, in NVML's."""
        visible = (gpu for gpu in self.gpus if gpu.visible)
        return tuple(sorted(visible, key=lambda g: (g.cuda_index is None, g.cuda_index or 0, g.index)))

    @property
    def has_usable_gpu(self) -> bool:
        """Return whether a driver told of a GPU: sysfs shows them in containers, too, that may not use them."""
        return any(gpu.uuid for gpu in self.visible_gpus)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return all that the user should know: the `notes`, and what is wrong with the machine as it is described."""
        return (*self.notes, *_overlap_warning(self.cpu_nodes), *_unknown_nodes_warning(self.gpus))

    def find_gpu(self, key: str, *, option: str) -> Gpu:
        """Return the GPU that `key`, which stands in `option`, names (see `Gpu.goes_by`). Raises UsageError."""
        matches = [gpu for gpu in self.gpus if gpu.goes_by(key.strip())]
        if len(matches) == 1:
            return matches[0]
        problem = "names more than one GPU" if matches else "names no GPU of this machine"
        there = ", ".join(f"{gpu.index} ({gpu.pci or gpu.uuid})" for gpu in self.gpus) or "none"
        raise UsageError(f"{option}: {key!r} {problem}; there are: {there}", "list them with: numapin topo")

    def restrict(self, allowed: Allowed) -> Topology:
        """Return the same machine with less of it allowed; what was not allowed before stays so."""
        both = Allowed(cpus=self.allowed.cpus & allowed.cpus, nodes=self.allowed.nodes & allowed.nodes)
        return replace(self, allowed=both)

    def to_json(self) -> dict[str, object]:
        """Return the JSON form (schema numapin.topology/1); `json.dumps` takes it as it is."""
        return {"schema": SCHEMA, **_to_json(self)}

    @classmethod
    def from_json(cls, text: str, *, source: str = "JSON") -> Topology:
        """Read the JSON form. Raises MachineFileError that names `source` and the line or element."""
        top = Fields.top(source, text, hint="write a machine file with: numapin topo --save FILE")
        top.expect_schema(SCHEMA)
        allowed = top.mapping("allowed")
        try:
            return cls(
                host=top.optional_text("host"),
                source=top.text("source"),
                packages=top.each("packages", _package_from_json, most=MAX_PACKAGES),
                nodes=top.each("nodes", _node_from_json, most=MAX_NODES),
                cores=top.each("cores", _core_from_json, most=MAX_CPUS),
                allowed=Allowed(cpus=allowed.numbers("cpus"), nodes=allowed.numbers("nodes")),
                gpus=top.each("gpus", _gpu_from_json, most=MAX_GPUS),
                nics=top.each("nics", _nic_from_json, most=MAX_NICS),
                links=top.each("links", _link_from_json, most=MAX_LINKS),
                notes=top.texts("notes") if "notes" in top.values else (),
            )
        except ValueError as error:
            raise top.error("", str(error)) from None


def _require_unique(what: str, ids: Iterable[int]) -> None:
    seen: set[int] = set()
    for number in ids:
        if number in seen:
            raise ValueError(f"{what} {number} appears twice")
        seen.add(number)


def _overlap_warning(nodes: tuple[Node, ...]) -> tuple[str, ...]:
    listed_twice = sum(len(node.cpus) for node in nodes) > len(CpuSet().union(*(node.cpus for node in nodes)))
    text = "several NUMA nodes list the same CPUs: the firmware's tables are wrong; check with: numactl -H"
    return (text,) if listed_twice else ()


def _unknown_nodes_warning(gpus: tuple[Gpu, ...]) -> tuple[str, ...]:
    unknown = [gpu for gpu in gpus if gpu.node is None]
    if not unknown:
        return ()
    names = ", ".join(f"{gpu.label} ({gpu.pci})" for gpu in unknown)
    option = f"--gpu-nodes {unknown[0].index}=NODE,…"
    return (f"the NUMA node of {names} is unknown; if you know it, say so with {option} or NCCL_TOPO_FILE",)


def _to_json(part: DataclassInstance) -> dict[str, object]:
    return {f.name: _value_to_json(getattr(part, f.name)) for f in fields(part)}


def _value_to_json(value: object) -> object:
    """Write sets of CPUs or nodes as list strings, choices as their words, and parts as objects."""
    match value:
        case CpuSet() | StrEnum():
            return str(value)
        case tuple():
            return [_value_to_json(item) for item in value]
        case dict():
            return {str(node): distance for node, distance in sorted(value.items())}
        case _:
            return _to_json(value) if is_dataclass(value) and not isinstance(value, type) else value


def _link_from_json(f: Fields) -> Link:
    return Link(**{key: f.text(key) for key in ("a", "b", "kind")})


def _package_from_json(f: Fields) -> Package:
    return Package(id=f.number("id"), nodes=f.numbers("nodes"))


def _node_from_json(f: Fields) -> Node:
    return Node(
        id=f.number("id"),
        kind=NodeKind(f.text("kind")),
        cpus=f.numbers("cpus"),
        package=f.optional_number("package"),
        memory_bytes=f.optional_number("memory_bytes"),
        free_bytes=f.optional_number("free_bytes"),
        distances=f.number_map("distances", most=MAX_NODES),
    )


def _core_from_json(f: Fields) -> Core:
    places = {key: f.optional_number(key) for key in ("node", "package", "l3")}
    return Core(id=f.number("id"), cpus=f.numbers("cpus"), **places)


def _gpu_from_json(f: Fields) -> Gpu:
    pcie, source = f.mapping("pcie"), f.optional_text("node_source")
    return Gpu(
        index=f.number("index"),
        cuda_index=f.optional_number("cuda_index"),
        visible=f.flag("visible"),
        uuid=f.optional_text("uuid"),
        pci=f.optional_text("pci"),
        name=f.optional_text("name"),
        node=f.optional_number("node"),
        node_source=None if source is None else NodeSource(source),
        cpus=f.optional_numbers("cpus"),
        pcie=Pcie(**{key: pcie.optional_number(key) for key in ("gen", "width", "max_gen", "max_width")}),
        mig=f.each("mig", lambda m: Mig(uuid=m.text("uuid"), name=m.optional_text("name")), most=MAX_MIG),
    )


def _nic_from_json(f: Fields) -> Nic:
    name, pci, node = f.text("name"), f.optional_text("pci"), f.optional_number("node")
    return Nic(name=name, pci=pci, node=node, kind=NicKind(f.text("kind")))
