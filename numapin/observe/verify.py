"""Compare what was observed with the plan: the checks, and their findings as data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple

from numapin.base import cpu_set
from numapin.base.cpu_set import CpuSet
from numapin.base.formats import quote
from numapin.base.records import to_json
from numapin.base.text import counted, listed, not_none
from numapin.observe.model import PRIVATE, MemoryKind, Role
from numapin.plan.request import Bind, Memory
from numapin.system.libraries import NCCL_IGNORE, NCCL_MENDED
from numapin.system.refusals import SYS_NICE

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from numapin.observe.find import RunningJob
    from numapin.observe.model import NcclLibrary, Observed, ObservedRank, Process, Thread
    from numapin.plan.model import Plan, RankPlan

    _Found = tuple[Process, Thread]

SCHEMA: Final = "numapin.report/1"

JUDGED: Final = tuple(kind for kind in MemoryKind if kind is not MemoryKind.FILE)
"""Kinds of memory that are checked. Files are not: their pages are in the page cache, on the first reader's node."""

LOCKED: Final = frozenset({MemoryKind.SLOT, MemoryKind.PINNED})  # kinds that the GPU reads and writes directly

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
_WIDER: Final = (Bind.SOCKET, Bind.NONE)  # modes that give a rank CPUs of other nodes than its GPU's
_NEWER_NCCL: Final = f"install NCCL {NCCL_MENDED} or newer; see: numapin doctor"
_RESTART: Final = "start it with numapin run, which binds before the program starts"
_MOST_MASKS: Final = 4  # in a finding
_NCCL_THREADS: Final = ("NCCL", "pt_nccl")
"""How the names of NCCL's own threads begin: it gives them the CPUs of the GPU's node, as far as the rank has them."""


class VerifySeverity(StrEnum):
    """The weight of a finding."""

    ERROR = "error"  # the plan does not hold
    UNVERIFIED = "unverified"  # it is unknown whether the plan holds
    WARNING = "warning"
    NOTE = "note"


_ERROR, _WARNING = VerifySeverity.ERROR, VerifySeverity.WARNING
_HOLDS: Final = {VerifySeverity.ERROR: False, VerifySeverity.UNVERIFIED: None}
"""Whether the plan holds, for the findings that decide it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyFinding:
    """One difference from the plan: what it is, where it was seen, and the remedy."""

    severity: VerifySeverity
    what: str
    where: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """One rank: the request, the record of what was applied (None if missing), and what was observed."""

    requested: RankPlan
    applied: Mapping[str, object] | None
    observed: ObservedRank
    findings: tuple[VerifyFinding, ...]
    num_off_plan: int  # threads

    @property
    def holds(self) -> bool | None:
        """Return whether this rank is as planned; None if that could not be verified."""
        return _all_hold(_HOLDS.get(finding.severity, True) for finding in self.findings)

    def to_json(self) -> dict[str, object]:
        """Return the JSON form."""
        return {
            **unobserved(self.requested, self.observed.pid, self.applied),
            "observed": {"processes": [process.to_json() for process in self.observed.processes]},
            "findings": [to_json(finding) for finding in self.findings],
        }


def unobserved(requested: RankPlan, pid: int | None, applied: Mapping[str, object] | None) -> dict[str, object]:
    """Return the JSON form of a rank that has not been observed; `pid` is None if it did not start."""
    return {
        "local_rank": requested.local_rank,
        "pid": pid,
        "requested": requested.to_json(),
        "applied": applied,
        "observed": {"processes": []},
        "findings": [],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """The findings of `verify` on one run on this host."""

    run: str
    ranks: tuple[RankReport, ...]

    @property
    def holds(self) -> bool | None:
        """Return whether the plan holds; None if nothing contradicts it but something could not be verified.

        In a report without ranks, nothing was verified.
        """
        return _all_hold(rank.holds for rank in self.ranks) if self.ranks else None

    def to_json(self) -> dict[str, object]:
        """Return the JSON form (schema numapin.report/1)."""
        return {
            "schema": SCHEMA,
            "run": self.run,
            "ranks": [rank.to_json() for rank in self.ranks],
            "holds": self.holds,
        }


def _all_hold(verdicts: Iterable[bool | None]) -> bool | None:
    found = set(verdicts)
    return next((worst for worst in (False, None) if worst in found), True)


def verify(job: RunningJob, observed: Observed) -> VerifyReport:
    """Compare every observed rank of a job with its part of the plan.

    1. Every thread of a rank and its descendants may use planned CPUs only.
    2. The main threads of the rank and of its DataLoader workers may use all of these CPUs. A library may pin other
       threads to some of them, but not more threads of several ranks than there are CPUs.
    3. On a machine with one node, all memory is local.
    4. The memory policy of every process is the planned one.
    5. NCCL does not undo the binding.
    6. Of each kind of memory, at most 5 % or 4 MiB, whichever is more, is on other nodes; of page-locked memory, 1 %.

    A rank without a record of what was applied was not started by numapin.
    """
    plan = job.plan
    planned = {rank.local_rank: rank for rank in plan.ranks}
    off = off_plan(plan, observed.ranks, bound=job.applied.keys())
    reports = []
    for rank in observed.ranks:
        number = rank.local_rank
        record = job.applied.get(number)
        # The path, because the run's name is found only where its TMPDIR or NUMAPIN_RUN_DIR is set, too.
        whom = f"--pid {rank.pid}" if job.folder is None else f"--job {quote(str(job.folder))}"
        seen = _Seen(planned[number], rank, plan.bind, record, f"numapin attach {whom}")
        if rank.is_gone:
            remedy = "see the job's own output for the reason; torch ends or restarts the other ranks"
            findings: tuple[VerifyFinding, ...] = (_finding("the process is gone", f"pid {rank.pid}", remedy),)
        else:
            findings = (
                *_threads(seen, off),
                *(_nccl(process, process.nccl, plan.bind) for process in rank.processes if process.nccl),
                *_memory(seen, observed.nodes),
            )
        num_off_plan = off[number].num_threads
        reports.append(
            RankReport(requested=seen.plan, applied=record, observed=rank, findings=findings, num_off_plan=num_off_plan)
        )
    return VerifyReport(run=job.name, ranks=tuple(reports))


class _Seen(NamedTuple):
    """A rank and what it is compared with; `again` is the command that binds it again."""

    plan: RankPlan
    rank: ObservedRank
    bind: Bind
    applied: Mapping[str, object] | None
    again: str


def _finding(what: str, where: str, remedy: str = "", severity: VerifySeverity = _ERROR) -> VerifyFinding:
    return VerifyFinding(severity=severity, what=what, where=where, remedy=remedy)


class OffPlan(NamedTuple):
    """The threads of a rank that are not where the plan has them, with their processes.

    `outside` may leave the planned CPUs. `squeezed` are main threads, of the rank and of its workers, that have only
    some of their CPUs. `stacked` share some of the planned CPUs with threads of other ranks, more threads than CPUs.
    """

    outside: list[_Found]
    squeezed: list[_Found]
    stacked: list[_Found]

    @property
    def num_threads(self) -> int:
        """The number of these threads."""
        return len(self.outside) + len(self.squeezed) + len(self.stacked)


def off_plan(plan: Plan, ranks: Iterable[ObservedRank], *, bound: Collection[int]) -> dict[int, OffPlan]:
    """Return the threads of each rank that are off the plan. `bound` are the ranks that numapin bound.

    New threads and processes inherit the CPUs of a main thread, so this must have all of them. Libraries pin single
    threads of theirs. Another launcher may have given its ranks fewer CPUs on purpose, if these are not the same ones;
    then the workers must have those of their rank. With `--bind none` programs may bind themselves.
    """
    planned = {rank.local_rank: rank.cpus for rank in plan.ranks}
    found: dict[int, OffPlan] = {}
    pinned: dict[CpuSet, list[tuple[int, _Found]]] = {}
    for rank in ranks:
        number, is_bound = rank.local_rank, rank.local_rank in bound
        found[number] = off = OffPlan([], [], [])
        main, allowed = main_thread(rank), planned[number]
        if not is_bound and rank.cpuset:  # its launcher could not give it more
            allowed &= rank.cpuset
        for process, thread in rank.threads:
            if not thread.cpus <= planned[number]:
                off.outside.append((process, thread))
                continue
            if not thread.cpus < allowed or plan.bind is Bind.NONE or process.role is Role.OTHER:
                continue
            needed = allowed
            if main is not None and not is_bound and not process.openmp:  # what another launcher gave it
                needed = main.cpus
            if thread.tid == process.pid and thread.cpus < needed:
                off.squeezed.append((process, thread))
            elif thread.cpus and not thread.name.startswith(_NCCL_THREADS):
                pinned.setdefault(thread.cpus, []).append((number, (process, thread)))
    reported = {thread.cpus for off in found.values() for _, thread in off.squeezed}
    for cpus, there in pinned.items():
        is_shared = len({number for number, _ in there}) > 1
        if is_shared and len(there) > len(cpus) and cpus not in reported:
            for number, each in there:
                found[number].stacked.append(each)
    return found


def main_thread(rank: ObservedRank) -> Thread | None:
    """Return the main thread of a rank's own process; None if it has ended."""
    return next((thread for _, thread in rank.threads if thread.tid == rank.pid), None)


def elsewhere(plan: RankPlan, by_node: Mapping[int, int]) -> dict[int, int]:
    """Return the bytes on each node outside the plan."""
    return {node: size for node, size in sorted(by_node.items()) if size and node not in plan.nodes}


def _threads(seen: _Seen, off: Mapping[int, OffPlan]) -> Iterator[VerifyFinding]:
    plan, rank, _, applied, again = seen
    outside, squeezed, stacked = off[rank.local_rank]
    main = main_thread(rank)
    if applied is None and any(thread is main for _, thread in outside):
        cpus = CpuSet().union(*(thread.cpus for _, thread in outside))
        threads = f"{len(outside)} of {len(list(rank.threads))} threads"
        what = f"not bound: {threads} may run on CPUs {cpus}; planned: {plan.cpus}"
        # One finding, instead of one for each thread: numapin did not start the rank.
        yield _finding(what, _where_threads(outside), f"{_RESTART}; to bind the running rank: {again}")
    else:
        alike: dict[tuple[int, str, CpuSet], list[_Found]] = {}
        for process, thread in outside:
            alike.setdefault((process.pid, thread.name, thread.cpus), []).append((process, thread))
        for group in alike.values():
            process, thread = group[0]
            threads = f"{counted(len(group), 'thread')} {thread.name!r}"
            what = f"{threads} of the {process.role} may run on CPUs {thread.cpus}; planned: {plan.cpus}"
            yield _finding(what, _where_threads(group), _remedy(seen, process, thread, is_outside=True))

    # Workers that inherited the main thread's CPUs are in its finding. A worker_init_fn may give each CPUs of its own.
    groups: dict[bool, list[_Found]] = {}
    for process, thread in squeezed:
        is_as_main = main is not None and thread.cpus == main.cpus
        groups.setdefault(is_as_main, []).append((process, thread))
    for group in groups.values():
        masks = list(dict.fromkeys(str(thread.cpus) for _, thread in group))
        shown = " or ".join([*masks[:_MOST_MASKS], *(["others"] if len(masks) > _MOST_MASKS else [])])
        num_workers = sum(process.role is Role.WORKER for process, _ in group)
        whose = ["the main thread"] if len(group) > num_workers else []
        if num_workers:
            whose.append(counted(num_workers, str(Role.WORKER)))
        what = f"{' and '.join(whose)} may run on CPUs {shown} only; planned: {plan.cpus}"
        yield _finding(what, _where_threads(group), _remedy(seen, *group[0], is_outside=False))

    for cpus in dict.fromkeys(thread.cpus for _, thread in stacked):
        own = [(process, thread) for process, thread in stacked if thread.cpus == cpus]
        sharing = [number for number, each in off.items() for _, thread in each.stacked if thread.cpus == cpus]
        threads = f"{len(sharing)} threads of {listed('rank', set(sharing))}"
        what = f"{threads} may run on CPUs {cpus} only; planned: {plan.cpus}"
        yield _finding(what, _where_threads(own), _remedy(seen, *own[0], is_outside=False))

    planned = plan.cpus if rank.cpuset is None else plan.cpus & rank.cpuset
    is_reported = any(thread is main for _, thread in (*squeezed, *stacked))
    if applied is None and main is not None and main.cpus < planned and not is_reported:
        what = f"bound to fewer CPUs than numapin would give it: {main.cpus}; planned: {planned}"
        remedy = f"unless that is intended (taskset, srun --cpu-bind, numapin attach --bind, …): {again} --widen"
        yield _finding(what, f"pid {rank.pid}", remedy, _WARNING)


def _where_threads(found: list[_Found]) -> str:
    pids = cpu_set.render({process.pid for process, _ in found})
    tids = cpu_set.render({thread.tid for _, thread in found})
    last = str(CpuSet(not_none(thread.last_cpu for _, thread in found)))
    return f"pid {pids}, thread {tids}, last on CPU {last}"


def _remedy(  # noqa: PLR0911 - one return per cause
    seen: _Seen, process: Process, thread: Thread, *, is_outside: bool
) -> str:
    """Name the likely cause for threads outside the plan, or on some of its CPUs only; this is the first of them."""
    plan, rank, bind, applied, again = seen
    if thread.name.startswith(_NCCL_THREADS):
        return f"NCCL moved it: unset {NCCL_IGNORE}; NCCL 2.29.2 to 2.29.7 moves it anyway; see: numapin doctor"
    if process.openmp:
        return f"OpenMP places threads by {' '.join(process.openmp)}: unset it, and start the job again"
    excludes = rank.cpuset is not None and not plan.cpus <= rank.cpuset
    was_cut = applied is not None and applied.get("cpus") == str(thread.cpus)  # when the rank was bound
    if not is_outside and (excludes or was_cut):
        return (
            "the cpuset of the rank lacks planned CPUs, or did at the start: give it the others, or start the job "
            f"again, which plans with what it may use; see: cat /proc/{rank.pid}/cgroup"
        )
    if process.role is Role.WORKER:
        return "the worker_init_fn, or a library that the dataset imports, sets the affinity: remove that call"
    if is_outside:
        return f"the program or another process called sched_setaffinity; bind it again with: {again}"
    if bind in _WIDER and any(each.nccl is not None and each.nccl.narrows for each in rank.processes):
        return f"NCCL narrowed it to the CPUs of the GPU's node: {_NEWER_NCCL}"
    remedy = "the program, or a library that it uses, called sched_setaffinity: remove that call"
    return f"{remedy}; to give the CPUs back now: {again} --widen"


def _nccl(process: Process, nccl: NcclLibrary, bind: Bind) -> VerifyFinding:
    """Name the version of NCCL; a warning if it undoes the binding, whether or not it has done so yet."""
    name = f"NCCL {nccl.version or 'of unknown version'}"
    severity, remedy = _WARNING, f"unset {NCCL_IGNORE}"
    if nccl.ignores_affinity and nccl.narrows:
        what = "moves all threads of the rank to the CPUs of the GPU's node"
        remedy = f"unset {NCCL_IGNORE}, or {_NEWER_NCCL}"
    elif nccl.ignores_affinity:
        what = "moves its own threads to all CPUs of the GPU's node"
    elif nccl.narrows and bind in _WIDER:
        what, remedy = f"narrows the rank to the CPUs of the GPU's node, despite --bind {bind}", _NEWER_NCCL
    else:
        severity, remedy = VerifySeverity.NOTE, ""
        keeps = nccl.narrows is False
        what = "keeps to the rank's CPUs" if keeps else "may narrow threads to the CPUs of the GPU's node"
    variable = f" with {NCCL_IGNORE}" if nccl.ignores_affinity else ""
    return _finding(f"{name}{variable} {what}", f"pid {process.pid}, {nccl.library}", remedy, severity)


def _memory(seen: _Seen, machine_nodes: CpuSet) -> Iterator[VerifyFinding]:
    plan, rank, _, applied, again = seen
    where_rank = f"pid {rank.pid}"
    if len(machine_nodes) == 1:
        what = "all memory is local: this machine has one NUMA node"
        yield _finding(what, where_rank, severity=VerifySeverity.NOTE)
        return
    if plan.memory is Memory.NONE or not plan.nodes:
        what = "memory was not checked: the plan has no memory policy"
        yield _finding(what, where_rank, severity=VerifySeverity.NOTE)
        return
    memory, nodes = plan.kernel_policy
    for process in rank.processes:
        policy, where = process.policy, f"pid {process.pid}"
        if process.unreadable is not None:
            what = f"the memory of the {process.role} could not be read"
            yield _finding(what, where, process.unreadable, VerifySeverity.UNVERIFIED)
            continue
        if policy is None:
            continue
        has_nodes = bool(policy.nodes) == (memory is not Memory.LOCAL)
        if policy.mode in _MODES[memory] and policy.nodes <= nodes and has_nodes:
            continue  # old kernels can prefer only one of several planned nodes
        severity = _ERROR
        if applied is None:
            remedy = f"another process's policy cannot be set: {_RESTART}"
        elif applied.get("memory") != memory.value:  # first touch may do as well then
            severity, remedy = _WARNING, f"the kernel refused it when the rank was bound: {SYS_NICE}"
        else:
            remedy = (
                "the program, or a library that it uses, called set_mempolicy (numa_set_membind, …): remove that call"
            )
        what = f"the memory policy of the {process.role} is {policy}; planned: {memory} {nodes}"
        yield _finding(what, where, remedy, severity)

    full = "the node was full when it was touched (numactl -H)"
    for kind in JUDGED:
        by_node = rank.bytes_by_node([kind])
        away, total = elsewhere(plan, by_node), by_node.total()
        limit_bytes = _LOCKED_SHARE * total if kind in LOCKED else max(_SHARE * total, _MIN_REMOTE_BYTES - 1)
        if sum(away.values()) <= limit_bytes:
            continue
        if kind in LOCKED:
            remedy = f"{full}, or an unbound thread allocated it; page-locked memory cannot be moved: restart"
        elif kind in PRIVATE:
            move = f"move it with: {again} --migrate"
            remedy = f"it was allocated before the binding, it was migrated, or {full}; {move}"
        else:
            remedy = f"another process touched it first, or {full}"
        holders = [process.pid for process in rank.processes if elsewhere(plan, process.bytes_by_node(kind))]
        sizes = ", ".join(f"{size / _MIB:.1f} MiB on node {node}" for node, size in away.items())
        share = f"{sum(away.values()) / total:.1%} of the {kind} memory ({total / _MIB:.1f} MiB)"
        # Other ranks write to shared memory, too: it may be where it belongs for them.
        severity = _WARNING if kind is MemoryKind.SHARED else _ERROR
        what = f"{share} is elsewhere: {sizes}; planned: node {plan.nodes}"
        yield _finding(what, f"pid {cpu_set.render(holders)}", remedy, severity)
    if rank.hides_pinned:
        unknown = "it is not recognized on AMD and Intel GPUs and counts as file or anonymous memory"
        yield _finding(f"page-locked memory was not checked: {unknown}", where_rank, severity=VerifySeverity.NOTE)
