"""Stage 5: compare what was observed with the plan. Pure.

Comes in: a `Plan`, what `observe` saw, and each rank's record of its binding. Goes out: a `VerifyReport` with findings,
each with its evidence and a remedy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from numapin.base import cpu_set
from numapin.base.cpu_set import CpuSet
from numapin.base.plural import counted
from numapin.observe.model import PRIVATE, MemoryKind, Role
from numapin.observe.report import RankReport, VerifyFinding, VerifyReport, VerifySeverity
from numapin.plan.request import Bind, Memory
from numapin.system.nccl import IGNORE, MENDED
from numapin.system.refusals import SYS_NICE

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from numapin.observe.model import NcclLibrary, Observed, ObservedRank, Policy, Process, Thread
    from numapin.plan.model import Plan, RankPlan

JUDGED: Final = tuple(kind for kind in MemoryKind if kind is not MemoryKind.FILE)
"""Kinds of memory that are checked. Files are not: their pages are in the page cache, on the first reader's node."""

LOCKED: Final = frozenset({MemoryKind.SLOT, MemoryKind.PINNED})
"""Kinds that the GPU reads and writes directly."""

_LOCKED_SHARE: Final = 0.01  # the part of a kind that may be on other nodes
_SHARE: Final = 0.05
_MIN_REMOTE_BYTES: Final = 4 << 20  # less is not reported: the interpreter touched that much before it was bound
_MIB: Final = 1 << 20

_MODES: Final = {
    Memory.LOCAL: ("local",),
    Memory.PREFERRED: ("prefer", "prefer (many)"),
    Memory.BIND: ("bind",),
    Memory.INTERLEAVE: ("interleave",),
}
_WIDER: Final = (Bind.SOCKET, Bind.NONE)
"""Modes that give a rank CPUs of other nodes than its GPU's."""
_HARMLESS: Final = {
    True: "narrows threads to the CPUs of the GPU's node, and the rank has no others",
    False: "keeps to the rank's CPUs",
    None: "keeps to the rank's CPUs, or narrows its threads to those of the GPU's node (2.29.2 to 2.29.7)",
}
_RESTART: Final = "start it with numapin run, which binds before the program starts"


def verify(plan: Plan, observed: Observed, *, applied: Mapping[int, Mapping[str, object]], run: str) -> VerifyReport:
    """Compare every observed rank with its part of the plan.

    1. Every thread of a rank and its descendants may use planned CPUs only; fewer are fine. If roles have CPUs of
       their own, it may use those of one role only: the main thread those of `main`, a worker those of `loader`.
    2. On a machine with one node, all memory is local.
    3. The memory policy of every process is the planned one.
    4. NCCL does not undo the binding.
    5. Of each kind of memory, at most 5 % or 4 MiB, whichever is more, is on other nodes; of page-locked memory, 1 %.

    Args:
        plan: The plan of the job.
        observed: Its ranks, as `observe` saw them.
        applied: The ranks' own records by local rank. A rank without a record was not started by numapin.
        run: The name of the job.

    Returns:
        The findings for each rank.
    """
    planned = {rank.local_rank: rank for rank in plan.ranks}
    return VerifyReport(
        run=run,
        ranks=tuple(
            _judge(planned[rank.local_rank], rank, observed.nodes, applied.get(rank.local_rank), plan.bind)
            for rank in observed.ranks
        ),
    )


def _judge(
    plan: RankPlan, rank: ObservedRank, machine_nodes: CpuSet, applied: Mapping[str, object] | None, bind: Bind
) -> RankReport:
    findings: Iterable[VerifyFinding] = [_gone(rank)]
    if not rank.is_gone:
        of_nccl = (_nccl(process, process.nccl, bind) for process in rank.processes if process.nccl)
        findings = (
            *_threads(plan, rank, applied),
            *_roles(plan, rank),
            *of_nccl,
            *_memory(plan, rank, machine_nodes, applied),
        )
    return RankReport(requested=plan, applied=applied, observed=rank, findings=tuple(findings))


def _gone(rank: ObservedRank) -> VerifyFinding:
    return VerifyFinding(
        severity=VerifySeverity.ERROR,
        what="the process is gone",
        where=f"pid {rank.pid}",
        remedy="see the job's own output for the reason; torch ends or restarts the other ranks",
    )


def strays(plan: RankPlan, rank: ObservedRank) -> list[tuple[Process, Thread]]:
    """Return the threads that may run on CPUs outside the plan, with their processes."""
    return [
        (process, thread)
        for process, thread in rank.threads
        if not any(thread.cpus <= cpus for cpus in _planned(plan, process, thread))
    ]


def _planned(plan: RankPlan, process: Process, thread: Thread) -> Collection[CpuSet]:
    """Return the sets of CPUs, in one of which a thread must be. Threads do not say which role they have."""
    if plan.roles is None:
        return (plan.cpus,)
    if process.role is Role.WORKER:
        return (plan.worker_cpus,)
    if process.role is Role.RANK and thread.tid == process.pid:
        return (plan.main_cpus,)
    of_rank = (plan.main_cpus, plan.roles.optimizer or plan.main_cpus)
    return of_rank if process.role is Role.RANK else (*of_rank, plan.worker_cpus)


def elsewhere(plan: RankPlan, by_node: Mapping[int, int]) -> dict[int, int]:
    """Return the bytes on each node outside the plan."""
    return {node: size for node, size in sorted(by_node.items()) if size and node not in plan.nodes}


def _threads(plan: RankPlan, rank: ObservedRank, applied: Mapping[str, object] | None) -> Iterator[VerifyFinding]:
    found = strays(plan, rank)
    if applied is None and any(thread.tid == rank.pid for _, thread in found):
        yield _unbound(plan, rank, found)
    else:
        yield from (_moved(plan, group) for group in _alike(found))


def _alike(found: list[tuple[Process, Thread]]) -> Iterable[list[tuple[Process, Thread]]]:
    """Return the threads in groups of the same process, name and CPUs."""
    groups: dict[tuple[int, str, CpuSet], list[tuple[Process, Thread]]] = {}
    for process, thread in found:
        groups.setdefault((process.pid, thread.name, thread.cpus), []).append((process, thread))
    return groups.values()


def _moved(plan: RankPlan, group: list[tuple[Process, Thread]]) -> VerifyFinding:
    """Return the finding for threads of one name and process that may run on the same CPUs outside the plan."""
    process, thread = group[0]
    threads = f"{counted(len(group), 'thread')} {thread.name!r}"
    planned = " or ".join(dict.fromkeys(map(str, _planned(plan, process, thread))))
    return VerifyFinding(
        severity=VerifySeverity.ERROR,
        what=f"{threads} of the {process.role} may run on CPUs {thread.cpus}; planned: {planned}",
        where=_where_threads(group),
        remedy=_remedy(plan, process, thread),
    )


def _unbound(plan: RankPlan, rank: ObservedRank, found: list[tuple[Process, Thread]]) -> VerifyFinding:
    """Return one finding, instead of one per thread, for a rank that numapin did not start."""
    num_threads = len(list(rank.threads))
    cpus = str(CpuSet().union(*(thread.cpus for _, thread in found)))
    bind = f"taskset --all-tasks --cpu-list --pid {plan.cpus} {rank.pid}"
    return VerifyFinding(
        severity=VerifySeverity.ERROR,
        what=f"not bound: {len(found)} of {num_threads} threads may run on CPUs {cpus}; planned: {plan.cpus}",
        where=_where_threads(found),
        remedy=f"{_RESTART}; to bind the CPUs of the running rank: {bind}",
    )


def _roles(plan: RankPlan, rank: ObservedRank) -> Iterator[VerifyFinding]:
    """Note how many threads are on the CPUs of each role."""
    if plan.roles is None:
        return
    masks = [thread.cpus for _, thread in rank.threads]
    on = {name: sum(mask <= cpus for mask in masks) for name, cpus in plan.roles.by_name.items()}
    numbers = ", ".join(f"{name} {number}" for name, number in on.items())
    yield _note(f"threads by role: {numbers} (CPUs {plan.roles})", rank)


def _where_threads(found: list[tuple[Process, Thread]]) -> str:
    pids = cpu_set.render({process.pid for process, _ in found})
    tids = cpu_set.render({thread.tid for _, thread in found})
    last = str(CpuSet({thread.last_cpu for _, thread in found}))
    return f"pid {pids}, thread {tids}, last on CPU {last}"


def _remedy(plan: RankPlan, process: Process, thread: Thread) -> str:
    """Name the likely cause, from the thread's name and the process's environment and role."""
    if thread.name.startswith(("NCCL", "pt_nccl")):
        return (
            "NCCL moved it: unset NCCL_IGNORE_CPU_AFFINITY; NCCL 2.29.2 to 2.29.7 moves it anyway; see: numapin doctor"
        )
    if process.openmp:
        return f"OpenMP places threads by {' '.join(process.openmp)}: unset it; the rank is bound already"
    if thread.name == "pt_data_pin":
        return "something moved the DataLoader's pin thread: numapin.DataLoader binds its own to the rank's node"
    if process.role is Role.WORKER:
        return "the worker_init_fn, or a library that the dataset imports, sets the affinity: remove that call"
    restore = f"taskset --cpu-list --pid {plan.main_cpus} {thread.tid}"
    return f"the program or another process called sched_setaffinity; restore the CPUs with: {restore}"


def _nccl(process: Process, nccl: NcclLibrary, bind: Bind) -> VerifyFinding:
    """Name the version of NCCL; a warning if it undoes the binding, whether or not it has done so yet."""
    name = f"NCCL {nccl.version or 'of unknown version'}"
    upgrade = f"install NCCL {MENDED} or newer; see: numapin doctor"
    severity, remedy = VerifySeverity.WARNING, f"unset {IGNORE}"
    if nccl.ignores_affinity and nccl.narrows:
        what, remedy = "moves all threads of the rank to the CPUs of the GPU's node", f"unset {IGNORE}, or {upgrade}"
    elif nccl.ignores_affinity:
        what = "moves its own threads to all CPUs of the GPU's node"
    elif nccl.narrows and bind in _WIDER:
        what, remedy = f"narrows the rank to the CPUs of the GPU's node, despite --bind {bind}", upgrade
    else:
        severity, remedy, what = VerifySeverity.NOTE, "", _HARMLESS[nccl.narrows]
    variable = f" with {IGNORE}" if nccl.ignores_affinity else ""
    return VerifyFinding(
        severity=severity, what=f"{name}{variable} {what}", where=f"pid {process.pid}, {nccl.library}", remedy=remedy
    )


def _memory(
    plan: RankPlan, rank: ObservedRank, machine_nodes: CpuSet, applied: Mapping[str, object] | None
) -> Iterator[VerifyFinding]:
    if len(machine_nodes) == 1:
        yield _note("all memory is local: this machine has one NUMA node", rank)
    elif plan.memory is Memory.NONE or not plan.nodes:
        yield _note("memory was not checked: the plan has no memory policy", rank)
    else:
        yield from _policies(plan, rank, applied)
        for kind in JUDGED:
            yield from _pages(plan, rank, kind)


def _policies(plan: RankPlan, rank: ObservedRank, applied: Mapping[str, object] | None) -> Iterator[VerifyFinding]:
    """Return a finding for each process whose memory is unreadable or whose policy is not the planned one."""
    for process in rank.processes:
        if process.unreadable is not None:
            yield _unreadable(process, process.unreadable)
        elif process.policy is not None and not _fits(process.policy, plan):
            yield _wrong_policy(plan, process, process.policy, applied)


def _unreadable(process: Process, remedy: str) -> VerifyFinding:
    return VerifyFinding(
        severity=VerifySeverity.UNVERIFIED,
        what=f"the memory of the {process.role} could not be read",
        where=f"pid {process.pid}",
        remedy=remedy,
    )


def _note(what: str, rank: ObservedRank) -> VerifyFinding:
    return VerifyFinding(severity=VerifySeverity.NOTE, what=what, where=f"pid {rank.pid}", remedy="")


def _fits(policy: Policy, plan: RankPlan) -> bool:
    """Return whether a policy is the planned one. Old kernels can prefer only one of several planned nodes."""
    memory, nodes = plan.kernel_policy
    names_nodes = memory is not Memory.LOCAL
    return policy.mode in _MODES[memory] and policy.nodes <= nodes and bool(policy.nodes) == names_nodes


def _wrong_policy(
    plan: RankPlan, process: Process, policy: Policy, applied: Mapping[str, object] | None
) -> VerifyFinding:
    """Return the finding; a warning if the kernel refused the policy at the start: first touch may do as well then."""
    memory, nodes = plan.kernel_policy
    severity = VerifySeverity.ERROR
    if applied is None:
        remedy = f"another process's policy cannot be set: {_RESTART}"
    elif applied.get("memory") != memory.value:
        severity, remedy = VerifySeverity.WARNING, f"the kernel refused it when the rank was bound: {SYS_NICE}"
    else:
        remedy = "the program, or a library that it uses, called set_mempolicy (numa_set_membind, …): remove that call"
    return VerifyFinding(
        severity=severity,
        what=f"the memory policy of the {process.role} is {policy}; planned: {memory} {nodes}",
        where=f"pid {process.pid}",
        remedy=remedy,
    )


def _pages(plan: RankPlan, rank: ObservedRank, kind: MemoryKind) -> Iterator[VerifyFinding]:
    """Return a finding if too many pages of a kind are on nodes outside the plan."""
    by_node = rank.bytes_by_node([kind])
    away, total = elsewhere(plan, by_node), by_node.total()
    if sum(away.values()) > _limit_bytes(kind, total):
        yield _misplaced(plan, rank, kind, away, total)


def _misplaced(
    plan: RankPlan, rank: ObservedRank, kind: MemoryKind, away: Mapping[int, int], total: int
) -> VerifyFinding:
    holders = [process.pid for process in rank.processes if elsewhere(plan, process.bytes_by_node(kind))]
    nodes = ", ".join(f"{size / _MIB:.1f} MiB on node {node}" for node, size in away.items())
    return VerifyFinding(
        # Other ranks write to shared memory, too: it may be where it belongs for them.
        severity=VerifySeverity.WARNING if kind is MemoryKind.SHARED else VerifySeverity.ERROR,
        what=f"{sum(away.values()) / total:.1%} of the {kind} memory ({total / _MIB:.1f} MiB) is elsewhere: {nodes}; "
        f"planned: node {plan.nodes}",
        where=f"pid {cpu_set.render(holders)}",
        remedy=_page_remedy(plan, holders, kind, away),
    )


def _limit_bytes(kind: MemoryKind, total: int) -> float:
    """Return how much of a kind of memory may be on nodes outside the plan."""
    return _LOCKED_SHARE * total if kind in LOCKED else max(_SHARE * total, _MIN_REMOTE_BYTES - 1)


def _page_remedy(plan: RankPlan, holders: list[int], kind: MemoryKind, away: Mapping[int, int]) -> str:
    full = "the node was full when it was touched (numactl -H)"
    if kind in LOCKED:
        return f"{full}, or an unbound thread allocated it; page-locked memory cannot be moved: restart"
    if kind in PRIVATE:
        there = f"{cpu_set.render(away)} {plan.nodes}"
        move = "; ".join(f"migratepages {pid} {there}" for pid in holders)
        return f"it was allocated before the binding, it was migrated, or {full}; move it with: {move}"
    return f"another process touched it first, or {full}"
