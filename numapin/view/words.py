"""Facts about a machine and a plan as short texts, the same in every view."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from numapin.base.formats import gib
from numapin.base.plural import counted, listed
from numapin.plan.request import Memory
from numapin.topology.model import GpuVendor, NodeKind
from numapin.view.machine import gpu_of_memory

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from numapin.plan.model import Plan, RankPlan
    from numapin.topology.model import Gpu, Node, Pcie, Topology
    from numapin.topology.nics import Adapter, NearestNics

_VENDORS: Final = {GpuVendor.NVIDIA: "NVIDIA", GpuVendor.AMD: "AMD", GpuVendor.INTEL: "Intel"}
_RUNTIMES: Final = {GpuVendor.NVIDIA: ("cuda", "CUDA"), GpuVendor.AMD: ("cuda", "HIP"), GpuVendor.INTEL: ("xpu", "XPU")}
"""Vendor -> torch's word for its devices, and the runtime's name."""
_LONGEST: Final = 2000  # characters
NODE_KINDS: Final = {NodeKind.CPU: "", NodeKind.MEMORY: "memory only", NodeKind.GPU: "GPU memory"}


class Placed(Protocol):
    """A part of a machine that may be on a node: a core, a GPU or a network device."""

    @property
    def node(self) -> int | None:
        """The node; None: unknown."""


_P = TypeVar("_P", bound=Placed)


def on_node(parts: Iterable[_P], node: int | None) -> list[_P]:
    """Return the parts that are on a node; None: on an unknown node."""
    return [part for part in parts if part.node == node]


def nodes_of(topology: Topology, package: int | None) -> list[Node]:
    """Return the nodes of a package; None: the nodes without a package."""
    return [node for node in topology.nodes if node.package == package]


def ranks_of(plan: Plan | None) -> tuple[RankPlan, ...]:
    """Return the ranks of a plan; none without a plan."""
    return plan.ranks if plan else ()


def known(value: float | str | None, form: str = "", *, unknown: str = "") -> str:
    """Return a value in the format `form`, or the text for an unknown value if it is None."""
    return unknown if value is None else format(value, form)


def size_of(num_bytes: int | None) -> str:
    """Return a size in GiB, or "" if it is unknown."""
    return "" if num_bytes is None else gib(num_bytes)


def joined(*facts: str, separator: str = ", ") -> str:
    """Join the facts that are known."""
    return separator.join(filter(None, facts))


def machine_size(topology: Topology) -> str:
    """Return the number of cores and CPUs, and the allowed CPUs unless all are allowed."""
    num_cpus, num_allowed = len(topology.cpus), len(topology.allowed.cpus)
    allowed = "" if num_cpus == num_allowed else f", {num_allowed} allowed ({topology.allowed.cpus})"
    return f"{counted(len(topology.cores), 'core')}, {counted(num_cpus, 'CPU')}{allowed}"


def kind_of(topology: Topology, node: Node) -> str:
    """Return the kind of a node without CPUs, and the GPU whose memory it is; "" for a node with CPUs."""
    owner = gpu_of_memory(topology, node)
    return f"memory of {owner.label}" if owner else NODE_KINDS[node.kind]


def memory(node: Node) -> str:
    """Return the size of a node's memory and of its free part."""
    if node.memory_bytes is None:
        return ""
    free = "" if node.free_bytes is None else f" ({gib(node.free_bytes)} free)"
    return f"{gib(node.memory_bytes)}{free}"


def pcie_link(pcie: Pcie) -> str:
    """Return the generation and lanes of a link, and its maximum if that is more."""
    if pcie.gen is None or pcie.width is None:
        return ""
    best_gen, best_width = pcie.max_gen or pcie.gen, pcie.max_width or pcie.width
    reduced = (pcie.gen, pcie.width) != (best_gen, best_width)
    return f"PCIe {pcie.gen} x{pcie.width}" + (f" of {pcie.max_gen} x{pcie.max_width}" if reduced else "")


def torch_name(gpu: Gpu) -> str:
    """Return the name of a GPU in torch, or that its runtime does not see it."""
    torch_word, runtime = _RUNTIMES[gpu.vendor or GpuVendor.NVIDIA]
    if gpu.cuda_index is not None:
        return f"{torch_word}:{gpu.cuda_index}"
    return "" if gpu.visible else f"hidden from {runtime}"


def model_name(gpu: Gpu) -> str:
    """Return a GPU's model with its vendor, which most models' names begin with."""
    vendor = _VENDORS[gpu.vendor] if gpu.vendor else ""
    model = gpu.name or ""
    return model if vendor.lower() in model.lower() else joined(vendor, model, separator=" ")


def address(gpu: Gpu, *, short: bool = False) -> str:
    """Return a GPU's PCI address, and the number of the partition if several devices have that address."""
    pci = known(gpu.pci)
    if short:
        pci = short_pci(pci)
    if gpu.partition is None:
        return pci
    word = "tile" if gpu.vendor is GpuVendor.INTEL else "partition"
    return joined(f"{word} {gpu.partition}", pci, separator=" of ")


def short_pci(pci: str) -> str:
    """Return a PCI address without domain 0000, the only one on most machines."""
    return pci.removeprefix("0000:")


def node_source(gpu: Gpu) -> str:
    """Return the source of a GPU's node."""
    return f"node from {gpu.node_source}" if gpu.node_source else "node unknown"


def policy(rank: RankPlan) -> str:
    """Return a rank's memory policy, with its nodes if it names any."""
    if rank.memory in (Memory.NONE, Memory.LOCAL):
        return rank.memory.value
    return f"{rank.memory.value} {rank.nodes}"


def own_nic(nearest: NearestNics | None) -> str:
    """Return the NIC that a GPU gets of those nearest to it, and the link between them."""
    return f"NIC {nearest.names[0]} ({nearest.link})" if nearest else ""


def nic_state(nic: Adapter) -> str:
    """Return the rate of a network device, or that it is down."""
    return "down" if nic.is_up is False else f"{nic.rate_gbit_s:g} Gbit/s" if nic.rate_gbit_s else ""


def own_nic_name(rank: RankPlan) -> str:
    """Return the name of a rank's own NIC, cut at a length that no machine needs; "" if none is known."""
    return shortened(rank.nics[0]) if rank.nics else ""


def rank_names(ranks: Collection[int]) -> str:
    """Return "rank 0" or "ranks 0-3,7"; "" for no rank."""
    return listed("rank", ranks) if ranks else ""


def shortened(text: str) -> str:
    """Return a text, cut at a length that no machine or program needs."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
