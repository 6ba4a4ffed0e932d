"""Apply a binding to this process and read it back. Edge.

Comes in: one rank's `RankPlan`, or what its shim read of that, a `RankSlice`. Goes out: `Applied`, which is what the
kernel says afterwards, not what was asked. Called in each rank before its program starts (`shim.py`), and in a forked
child or a thread of the launcher (`rehearse`) so that what the kernel refuses is known, and said once, before any rank
exists.

Each rank imports this before its program starts: the standard library only, and neither dataclasses nor enum; policies
are the words of `plan.request.Memory`.
"""

from __future__ import annotations

import errno
import os

from numapin.base import cpu_set
from numapin.errors import LibnumaError
from numapin.system import numa

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from typing import Final

    from numapin.plan.model import RankPlan
    from numapin.plan.request import Memory
    from numapin.rank.handover import RankSlice

_MODES: Final = {
    "local": numa.MPOL_LOCAL,
    "preferred": numa.MPOL_PREFERRED,
    "bind": numa.MPOL_BIND,
    "interleave": numa.MPOL_INTERLEAVE,
}


_NAMES: Final = {
    numa.MPOL_DEFAULT: "none",
    numa.MPOL_PREFERRED: "preferred",
    numa.MPOL_PREFERRED_MANY: "preferred",
    **{mode: memory for memory, mode in _MODES.items()},
}


_REMEDY: Final = {
    errno.EPERM: "seccomp forbids it; run the container with --cap-add SYS_NICE (Kubernetes: securityContext)",
    errno.ENOSYS: "the kernel has no NUMA support; use --memory none",
    errno.EINVAL: "the kernel does not know the policy or does not allow the node; see: numapin topo",
}


class Applied:
    """What the kernel says after binding. `memory` is None where it refuses to tell.

    `shortfalls` are what could not be done as planned, each with its remedy.
    """

    __slots__ = ("cpus", "memory", "nodes", "shortfalls")

    def __init__(
        self, *, cpus: frozenset[int], memory: str | None, nodes: frozenset[int], shortfalls: tuple[str, ...]
    ) -> None:
        self.cpus, self.memory, self.nodes, self.shortfalls = cpus, memory, nodes, shortfalls

    def to_json(self) -> dict[str, object]:
        """Return the JSON form; the rank writes it to its run directory."""
        return {
            "cpus": cpu_set.render(self.cpus),
            "memory": self.memory,
            "nodes": cpu_set.render(self.nodes),
            "shortfalls": list(self.shortfalls),
        }


def apply(rank: RankPlan | RankSlice) -> Applied:
    """Bind this thread, and all it starts later, to the rank's CPUs and memory; then ask the kernel what holds.

    Must be called before this thread starts others: Linux binds threads, not processes. Raises nothing for what the
    kernel refuses: that is in `shortfalls`.
    """
    shortfalls = (*_bind_cpus(rank.cpus), *_bind_memory(rank.memory, rank.nodes, first=rank.node))
    memory, nodes = _read_policy()
    return Applied(cpus=frozenset(os.sched_getaffinity(0)), memory=memory, nodes=nodes, shortfalls=shortfalls)


def surprises(rank: RankPlan, shortfalls: Iterable[str]) -> tuple[str, ...]:
    """Return the shortfalls that the rank's reason does not have: the rehearsal has told the others."""
    return tuple(text for text in shortfalls if text not in rank.reason)


def as_bound(rank: RankPlan, shortfalls: Sequence[str]) -> RankPlan:
    """Return the rank as it turned out: where anything was refused not exact, with all of it in its reason, once."""
    if not shortfalls:
        return rank
    from dataclasses import replace

    return replace(rank, exact=False, reason="; ".join((rank.reason, *surprises(rank, shortfalls))))


def bind_thread(*, cpus: frozenset[int], memory: Memory | None, nodes: frozenset[int]) -> tuple[str, ...]:
    """Bind the calling thread, and what it starts later, to CPUs and memory; return what was refused, with the remedy.

    Empty `cpus` and None for `memory` leave what there is.
    """
    return (*(_bind_cpus(cpus) if cpus else ()), *(_bind_memory(memory, nodes, first=None) if memory else ()))


def _bind_cpus(cpus: frozenset[int]) -> Iterator[str]:
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        yield f"CPUs {cpu_set.render(cpus)} were refused ({error.strerror}); the CPUs there are stay"
        return
    # The kernel drops CPUs outside the cpuset silently.
    missing = cpus - os.sched_getaffinity(0)
    if missing:
        yield f"CPUs {cpu_set.render(missing)} were dropped by the cpuset; see: cat /proc/self/cgroup"


def _bind_memory(memory: str, nodes: frozenset[int], *, first: int | None) -> Iterator[str]:
    if memory == "none":
        return
    try:
        yield from _set_policy(memory, nodes, first)
    except OSError as error:
        remedy = _REMEDY.get(error.errno or 0, "use --memory none to do without")
        yield f"memory policy '{memory}' was refused ({error.strerror}): first touch decides; {remedy}"
    except LibnumaError as error:
        yield f"memory policy '{memory}' cannot be set: {error.message}; {error.hint}"


def _set_policy(memory: str, nodes: frozenset[int], first: int | None) -> Iterator[str]:
    if memory == "preferred" and len(nodes) > 1:
        yield from _prefer_many(nodes, first)
    else:
        numa.set_memory_policy(_MODES[memory], () if memory == "local" else nodes)


def _prefer_many(nodes: frozenset[int], first: int | None) -> Iterator[str]:
    """Prefer all nodes where the kernel can (5.15), else the GPU's own node, or the first."""
    try:
        numa.set_memory_policy(numa.MPOL_PREFERRED_MANY, nodes)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        node = first if first in nodes else min(nodes)
        numa.set_memory_policy(numa.MPOL_PREFERRED, (node,))
        yield f"this kernel prefers one node only: node {node} of {cpu_set.render(nodes)}; Linux 5.15 prefers all"


def _read_policy() -> tuple[str | None, frozenset[int]]:
    try:
        mode, nodes = numa.get_memory_policy()
    except OSError:
        return None, frozenset()  # seccomp forbids asking too; `memory: null` says so
    if mode == numa.MPOL_PREFERRED and not nodes:
        return "local", nodes  # how kernels before 5.14 tell MPOL_LOCAL
    return _NAMES.get(mode), nodes
