"""Facts about a machine and a plan in words, the same in every view. Pure.

Comes in: parts of a `Topology` or a `Plan`. Goes out: short texts; "" where nothing is known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from numapin.base import cpu_set
from numapin.base.sizes import gib
from numapin.plan.request import Memory
from numapin.topology.model import NodeKind

if TYPE_CHECKING:
    from collections.abc import Collection

    from numapin.plan.model import RankPlan
    from numapin.topology.model import Node, Pcie, Topology

_LONGEST: Final = 2000  # characters
NODE_KINDS: Final = {NodeKind.CPU: "", NodeKind.MEMORY: "memory only", NodeKind.GPU: "GPU memory"}


def machine_size(topology: Topology) -> str:
    """Return the number of cores and CPUs, and which of them are allowed if not all are."""
    num_cpus, num_allowed = len(topology.cpus), len(topology.allowed.cpus)
    allowed = "" if num_cpus == num_allowed else f", {num_allowed} allowed ({topology.allowed.cpus})"
    return f"{len(topology.cores)} cores, {num_cpus} CPUs{allowed}"


def memory(node: Node) -> str:
    """Return a node's memory and how much of it is free."""
    if node.memory_bytes is None:
        return ""
    free = "" if node.free_bytes is None else f" ({gib(node.free_bytes)} free)"
    return f"{gib(node.memory_bytes)}{free}"


def pcie_link(pcie: Pcie) -> str:
    """Return generation and lanes of a link, and its best if it is below that."""
    if pcie.gen is None or pcie.width is None:
        return ""
    full = pcie.gen == (pcie.max_gen or pcie.gen) and pcie.width == (pcie.max_width or pcie.width)
    return f"PCIe {pcie.gen} x{pcie.width}" + ("" if full else f" of {pcie.max_gen} x{pcie.max_width}")


def policy(rank: RankPlan) -> str:
    """Return a rank's memory policy, with the nodes if it names any."""
    if rank.memory in (Memory.NONE, Memory.LOCAL):
        return rank.memory.value
    return f"{rank.memory.value} {rank.nodes}"


def rank_names(ranks: Collection[int]) -> str:
    """Return "rank 0" or "ranks 0-3,7"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {cpu_set.render(ranks)}" if ranks else ""


def shortened(text: str) -> str:
    """Return a text, cut where it is longer than any machine or program writes it."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
