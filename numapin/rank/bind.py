"""Apply a binding to this process and read it back.

It is called in each rank before its program starts (`shim.py`), and in a forked child or a thread of the launcher
(`rehearse`), so that the kernel's refusals are known, and reported once, before any rank exists.

Each rank imports this before its program starts: the standard library only, and neither dataclasses nor enum. Policies
are the words of `plan.request.Memory`.
"""

from __future__ import annotations

import os

from numapin.base import cpu_set
from numapin.errors import LibnumaError
from numapin.system import numa
from numapin.system.refusals import REMEDIES

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
_SHOWN: Final = {"default": "none", "prefer": "preferred", "prefer (many)": "preferred"}
"""The words of numa_maps that differ from `plan.request.Memory`'s."""
_CONFINING: Final = ("bind", "interleave")
_NOT_MAIN: Final = (
    "holds only for the thread in which the GPU became known, which is not the main thread: the others' pages go where "
    "they are first touched; call torch.cuda.set_device in the main thread first, or give the process one GPU with "
    "CUDA_VISIBLE_DEVICES"
)


class Applied:
    """The kernel's report after binding. `memory` is None if the kernel refuses to report it.

    `shortfalls` are the refused parts of the plan, each with its remedy.
    """

    __slots__ = ("cpus", "memory", "nodes", "shortfalls")

    def __init__(
        self, *, cpus: frozenset[int], memory: str | None, nodes: frozenset[int], shortfalls: tuple[str, ...]
    ) -> None:
        self.cpus, self.memory, self.nodes, self.shortfalls = cpus, memory, nodes, shortfalls

    def to_json(self) -> dict[str, object]:
        """Return the JSON form, which the rank writes to its run directory."""
        return {
            "cpus": cpu_set.render(self.cpus),
            "memory": self.memory,
            "nodes": cpu_set.render(self.nodes),
            "shortfalls": list(self.shortfalls),
        }


def apply(rank: RankPlan | RankSlice) -> Applied:
    """Bind this thread, and all threads it starts later, to the rank's CPUs and memory; then read the binding back.

    Call it before this thread starts others: Linux binds threads, not processes. Refusals by the kernel are not raised;
    they are in `shortfalls`.
    """
    policy = _kernel_policy(rank.memory, rank.nodes, rank.within)
    shortfalls = (*_bind_cpus(rank.cpus), *_bind_memory(*policy, first=rank.node))
    memory: str | None = None  # seccomp may forbid reading it, too
    nodes: frozenset[int] = frozenset()
    try:
        mode, nodes = numa.get_memory_policy()
    except OSError:
        pass
    else:
        # Kernels before 5.14 report MPOL_LOCAL as MPOL_PREFERRED without nodes.
        memory = "local" if mode == numa.MPOL_PREFERRED and not nodes else _NAMES.get(mode)
    return Applied(cpus=frozenset(os.sched_getaffinity(0)), memory=memory, nodes=nodes, shortfalls=shortfalls)


def of_main_thread(applied: Applied, policy: tuple[str, frozenset[int]] | None) -> Applied:
    """Return what another thread than the main one applied, with the main thread's policy, as numa_maps shows it.

    A policy that confines memory to nodes is then not in force; one that only prefers a node needs no message, because
    pages go to the node of the CPU that touches them first.
    """
    mode, nodes = policy or (None, frozenset())
    memory = None if mode is None else _SHOWN.get(mode, mode)
    shortfalls = applied.shortfalls
    if applied.memory in _CONFINING and (memory, nodes) != (applied.memory, applied.nodes):
        shortfalls = (*shortfalls, f"memory policy '{applied.memory}' {_NOT_MAIN}")
    return Applied(cpus=applied.cpus, memory=memory, nodes=nodes, shortfalls=shortfalls)


def surprises(rank: RankPlan, shortfalls: Iterable[str]) -> tuple[str, ...]:
    """Return the shortfalls that are not in the rank's reason; the rehearsal has reported the others."""
    return tuple(text for text in shortfalls if text not in rank.reason)


def as_bound(rank: RankPlan, shortfalls: Sequence[str]) -> RankPlan:
    """Return the rank as it was bound: after a refusal it is not exact, and its reason has each shortfall once."""
    if not shortfalls:
        return rank
    from dataclasses import replace

    return replace(rank, exact=False, reason="; ".join((rank.reason, *surprises(rank, shortfalls))))


def bind_thread(
    *, cpus: frozenset[int], memory: Memory | None, nodes: frozenset[int], within: frozenset[int] | None = None
) -> tuple[str, ...]:
    """Bind the calling thread, and threads it starts later, to CPUs and memory; return the refusals with remedies.

    Empty `cpus`, or None for `memory`, leave the current binding. Pages stay `within` these nodes if there are any.
    """
    of_memory = _bind_memory(*_kernel_policy(memory, nodes, within), first=None) if memory else ()
    return (*(_bind_cpus(cpus) if cpus else ()), *of_memory)


def _kernel_policy(memory: str, nodes: frozenset[int], within: frozenset[int] | None) -> tuple[str, frozenset[int]]:
    """Return the policy that the kernel is given, as `RankPlan.kernel_policy` does."""
    return ("bind", within) if within else (memory, nodes)


def _bind_cpus(cpus: frozenset[int]) -> Iterator[str]:
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        yield f"CPUs {cpu_set.render(cpus)} were refused ({error.strerror}); the current CPUs stay"
        return
    # The kernel drops CPUs outside the cpuset silently.
    missing = cpus - os.sched_getaffinity(0)
    if missing:
        yield f"CPUs {cpu_set.render(missing)} were dropped by the cpuset; see: cat /proc/self/cgroup"


def _bind_memory(memory: str, nodes: frozenset[int], *, first: int | None) -> Iterator[str]:
    if memory == "none":
        return
    try:
        if memory == "preferred" and len(nodes) > 1:
            only = numa.prefer(numa.set_memory_policy, nodes, first=first)
            if only is not None:
                which = f"{only} of {cpu_set.render(nodes)}"
                yield f"this kernel can prefer only one node ({which}); Linux 5.15 or newer can prefer several"
        else:
            numa.set_memory_policy(_MODES[memory], () if memory == "local" else nodes)
    except OSError as error:
        remedy = REMEDIES.get(error.errno or 0, "use --memory none to do without")
        refused = f"memory policy '{memory}' was refused ({error.strerror})"
        yield f"{refused}: pages go where they are first touched; {remedy}"
    except LibnumaError as error:
        yield f"memory policy '{memory}' cannot be set: {error.message}; {error.hint}"
