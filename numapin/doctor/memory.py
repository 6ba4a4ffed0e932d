"""Checks of the host's memory: its size by several sources, the free part of each node, and swap. Pure.

Comes in: `DoctorReadings` and the `Topology`. Goes out: one `DoctorFinding` per check.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from numapin.base import sizes
from numapin.base.cpu_set import CpuSet
from numapin.base.plural import listed
from numapin.doctor.model import Check, DoctorSeverity

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numapin.doctor.model import DoctorFinding, DoctorReadings
    from numapin.topology.model import Topology

HOST_MEMORY: Final = Check(
    name="host-memory",
    where="MemTotal in /proc/meminfo and /sys/devices/system/node/node*/meminfo, memory.max of the cgroups",
    why="Jobs and loaders are sized by one of these. If another one is smaller, the kernel may kill a rank while "
    "the first still shows free memory.",
)
NODE_MEMORY: Final = Check(
    name="node-memory",
    where="/sys/devices/system/node/node*/meminfo",
    why="When a node is full, the kernel silently takes pages of another node rather than drop its file caches.",
)
SWAP: Final = Check(
    name="swap",
    where="/proc/meminfo",
    why="Pinned pages are never swapped out, so other pages are. One rank that waits for swap makes all ranks wait.",
)

_TOLERANCE: Final = 0.05
"""Linux counts the same pages in the nodes and in /proc/meminfo, so they agree exactly on a physical machine. But they
are read one after the other, and in a virtual machine a balloon may move pages in between. Limits of cgroups are
usually round numbers somewhat below the memory of the host."""
_LITTLE_FREE: Final = 0.05
_MUCH_SWAP: Final = 0.01
_COMPARE: Final = "compare twice, because a balloon changes size: numactl -H; grep MemTotal /proc/meminfo"
_SIZE_FOR_LIMIT: Final = (
    "size jobs by the limit, or raise it (docker run --memory …; srun --mem=0; systemd: MemoryMax=)"
)
_FREE_MEMORY: Final = "sync; echo 1 | sudo tee /proc/sys/vm/drop_caches (to see what uses the memory: numastat -m)"


def host_memory(readings: DoctorReadings, topology: Topology) -> DoctorFinding:
    """Find sizes of the host's memory that disagree: its nodes, /proc/meminfo, and the cgroup's limit."""
    whole = topology.memory_bytes
    if whole is None:
        return HOST_MEMORY.unknown("/proc/meminfo does not show it")
    disagreements = list(_disagreements(readings, topology, whole))
    if disagreements:
        differing, remedies = zip(*disagreements, strict=True)
        return HOST_MEMORY.note("; ".join(differing), remedy="; ".join(remedies))
    sources = "the nodes and /proc/meminfo agree" if _sum_of_nodes(topology) else "/proc/meminfo"
    return HOST_MEMORY.ok(f"{sizes.render(whole)} ({sources}; no lower limit of a cgroup)")


def _disagreements(readings: DoctorReadings, topology: Topology, whole: int) -> Iterator[tuple[str, str]]:
    """Yield each source that disagrees with /proc/meminfo, and what to do."""
    in_nodes = _sum_of_nodes(topology)
    if in_nodes is not None and _differ(in_nodes, whole):
        sums = f"the nodes have {sizes.render(in_nodes)} together, but /proc/meminfo says {sizes.render(whole)}"
        yield f"{sums}: {_cause(readings, whole)}", _COMPARE
    limit = readings.memory_limit
    if limit is not None and limit < whole * (1 - _TOLERANCE):
        yield f"a cgroup limits this process to {sizes.render(limit)} of {sizes.render(whole)}", _SIZE_FOR_LIMIT


def _differ(a: int, b: int) -> bool:
    return abs(a - b) > _TOLERANCE * max(a, b)


def _cause(readings: DoctorReadings, whole: int) -> str:
    limit = readings.memory_limit
    if limit is not None and not _differ(limit, whole):
        return "/proc/meminfo shows the limit of this container"
    return (
        "a hypervisor may give and take memory while the machine runs (ballooning), or a container replaces one of them"
    )


def _sum_of_nodes(topology: Topology) -> int | None:
    """Return the total memory of all nodes; None if the memory of any node is unknown."""
    known = [node.memory_bytes for node in topology.nodes if node.memory_bytes is not None]
    return sum(known) if len(known) == len(topology.nodes) else None


def node_memory(_readings: DoctorReadings, topology: Topology) -> DoctorFinding:
    """Find nodes that are full while others are not."""
    shares = _free_shares(topology)
    if not shares:
        return NODE_MEMORY.unknown("the free memory of the nodes is unknown")
    lowest, highest = min(shares.values()), max(shares.values())
    if lowest < _LITTLE_FREE and highest >= 2 * _LITTLE_FREE:
        return NODE_MEMORY.warning(_uneven(shares), remedy=_FREE_MEMORY)
    return NODE_MEMORY.ok(f"at least {lowest:.0%} free on every node")


def _uneven(shares: Mapping[int, float]) -> str:
    full = CpuSet(node for node, share in shares.items() if share < _LITTLE_FREE)
    free = ", ".join(f"{share:.1%} of node {node}" for node, share in sorted(shares.items()))
    return f"almost full: {listed('node', full)} (free: {free})"


def _free_shares(topology: Topology) -> Mapping[int, float]:
    return {
        node.id: node.free_bytes / node.memory_bytes
        for node in topology.cpu_nodes
        if node.memory_bytes and node.free_bytes is not None
    }


def swap(readings: DoctorReadings, _topology: Topology) -> DoctorFinding:
    """Find swap that is in use."""
    try:
        total, swap_total, swap_free = (readings.memory[key] for key in ("MemTotal", "SwapTotal", "SwapFree"))
    except KeyError:
        return SWAP.unknown("/proc/meminfo does not show it")
    if not swap_total:
        return SWAP.ok("no swap")
    used = max(0, swap_total - swap_free)
    what = f"{sizes.render(used)} of {sizes.render(swap_total)} in use"
    if not used:
        return SWAP.ok(what)
    severity = DoctorSeverity.WARNING if used > _MUCH_SWAP * total else DoctorSeverity.NOTE
    remedy = "find the processes: grep -H VmSwap /proc/[0-9]*/status; then: sudo sysctl vm.swappiness=1"
    return SWAP.found(severity, what, remedy)
