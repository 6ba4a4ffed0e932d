"""`verify` on plans and observations that are written here; and the table and the line for its report."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from numapin import Bind, Memory, Plan, RankPlan
from tests.unit.observe.seam import (
    CpuSet,
    MemoryKind,
    NcclLibrary,
    Observed,
    ObservedRank,
    Pages,
    Policy,
    Process,
    Role,
    Thread,
    VerifyFinding,
    VerifyReport,
    VerifySeverity,
    summary,
    verify,
    verify_table,
)
from tests.unit.planned import MIB, PLANNED, PREFER

APPLIED = {"cpus": "4-7", "memory": "preferred", "nodes": "1", "shortfalls": []}


def _thread(tid: int, cpus: str = "4-7", name: str = "python") -> Thread:
    return Thread(tid=tid, name=name, cpus=CpuSet.parse(cpus), last_cpu=5)


def _pages(kind: MemoryKind, **mib: float) -> Pages:
    """Return pages of a kind; n0=1.5 is 1.5 MiB on node 0."""
    sizes = {int(node.removeprefix("n")): int(size * MIB) for node, size in mib.items()}
    return Pages(kind=kind, policy=PREFER, bytes_by_node=sizes)


RANK = Process(
    pid=10,
    name="python",
    role=Role.RANK,
    threads=(_thread(10), _thread(11)),
    policy=PREFER,
    pages=(_pages(MemoryKind.ANONYMOUS, n1=100), _pages(MemoryKind.FILE, n0=500)),
)
WORKER = replace(RANK, pid=20, role=Role.WORKER, threads=(_thread(20, name="pt_data_worker"),))


def _report(
    *processes: Process,
    plan: RankPlan = PLANNED,
    nodes: str = "0-1",
    applied: dict[str, object] | None = APPLIED,  # type: ignore[assignment] # mypy takes the list for list[Never]
) -> VerifyReport:
    rank = ObservedRank(local_rank=0, pid=10, processes=processes)
    return verify(
        Plan(bind=Bind.NODE, memory=plan.memory, ranks=(plan,)),
        Observed(nodes=CpuSet.parse(nodes), ranks=(rank,)),
        applied={} if applied is None else {0: applied},
        run="run-1",
    )


def _found(report: VerifyReport) -> tuple[VerifyFinding, ...]:
    return report.ranks[0].findings


def _only(report: VerifyReport) -> VerifyFinding:
    """Return the one finding."""
    (finding,) = _found(report)
    return finding


def test_what_is_as_planned_holds() -> None:
    """The planned CPUs, a library's thread on some of them, the planned policy and local pages give no finding."""
    narrow = replace(RANK, threads=(_thread(10), _thread(11, "5"), _thread(12, "")))
    report = _report(narrow, WORKER)
    assert (report.holds, _found(report)) == (True, ())


class TestThreads:
    """Threads on CPUs outside the plan."""

    def test_one_that_was_moved(self) -> None:
        """It is an error with both sets of CPUs, where it was seen, and the command that restores them."""
        report = _report(replace(RANK, threads=(_thread(10), _thread(11, "3-4"))))
        finding = _only(report)
        assert (report.holds, finding.severity) == (False, VerifySeverity.ERROR)
        assert finding.what == "1 thread 'python' of the rank may run on CPUs 3-4; planned: 4-7"
        assert finding.where == "pid 10, thread 11, last on CPU 5"
        assert finding.remedy.endswith("numapin attach --job run-1")

    def test_alike_ones_are_one_finding(self) -> None:
        """Sixty threads of one name on the same CPUs are one finding; another name or other CPUs are another."""
        threads = [_thread(tid, "0-3") for tid in range(11, 71)]
        report = _report(replace(RANK, threads=(_thread(10), *threads, _thread(99, "0"))))
        assert [finding.what[:10] for finding in _found(report)] == ["60 threads", "1 thread '"]
        assert "thread 11-70," in _found(report)[0].where

    @pytest.mark.parametrize(
        ("name", "openmp", "role", "cause"),
        [
            ("NCCL Service 0", (), Role.RANK, "NCCL_IGNORE_CPU_AFFINITY"),
            ("pt_nccl_watchdg", ("OMP_PROC_BIND=true",), Role.RANK, "NCCL_IGNORE_CPU_AFFINITY"),
            ("python", ("GOMP_CPU_AFFINITY=0-3",), Role.RANK, "GOMP_CPU_AFFINITY=0-3: unset"),
            ("pt_data_pin", (), Role.RANK, "pin thread"),
            ("pt_data_worker", (), Role.WORKER, "worker_init_fn"),
            ("bash", (), Role.OTHER, "numapin attach --job run-1"),
        ],
    )
    def test_likely_cause(self, name: str, openmp: tuple[str, ...], role: Role, cause: str) -> None:
        """The remedy depends on the thread's name and its process's environment and role."""
        moved = replace(RANK, pid=30, role=role, threads=(_thread(31, "0-3", name),), openmp=openmp)
        finding = _only(_report(RANK, moved))
        assert f"of the {role} " in finding.what
        assert cause in finding.remedy

    def test_job_that_nobody_bound(self) -> None:
        """A rank that numapin did not start, and whose main thread is off the plan, gets one finding: not bound."""
        unbound = replace(RANK, threads=(_thread(10, "0-7"), _thread(11, "0-7"), _thread(12)))
        finding = _only(_report(unbound, applied=None))
        assert finding.what == "not bound: 2 of 3 threads may run on CPUs 0-7; planned: 4-7"
        assert "numapin run" in finding.remedy
        assert finding.remedy.endswith("to bind the running rank: numapin attach --pid 10")
        moved = replace(RANK, threads=(_thread(10), _thread(11, "0-7")))
        assert _only(_report(moved, applied=None)).what.startswith("1 thread")

    def test_rank_that_is_gone(self) -> None:
        """A rank whose own process is gone is an error, even if a worker is running; there is no other finding."""
        for processes in ((), (WORKER,)):
            report = _report(*processes)
            assert (report.holds, _only(report).what) == (False, "the process is gone")


OTHER = replace(RANK, pid=30, threads=(_thread(30), _thread(31)))
"""The process of another rank, which has the same planned CPUs."""


def _on(process: Process, cpus: str) -> Process:
    """Return a process with two threads that may use these CPUs."""
    return replace(process, threads=(_thread(process.pid, cpus), _thread(process.pid + 1, cpus)))


class TestFewerCpus:
    """Threads that may use only some of the planned CPUs."""

    @staticmethod
    def _both(
        first: Process,
        second: Process,
        *workers: Process,
        bind: Bind = Bind.NODE,
        applied: bool = True,
        cpuset: CpuSet | None = None,
    ) -> VerifyReport:
        """Return the report of two ranks with the same plan; the workers are the first rank's."""
        plans = (PLANNED, replace(PLANNED, local_rank=1))
        ranks = (
            ObservedRank(local_rank=0, pid=first.pid, processes=(first, *workers), cpuset=cpuset),
            ObservedRank(local_rank=1, pid=second.pid, processes=(second,), cpuset=cpuset),
        )
        return verify(
            Plan(bind=bind, memory=PLANNED.memory, ranks=plans),
            Observed(nodes=CpuSet({0, 1}), ranks=ranks),
            applied={0: APPLIED, 1: APPLIED} if applied else {},
            run="run-1",
        )

    def test_main_thread_and_worker(self) -> None:
        """A rank whose program narrowed it is off the plan with its workers, in one finding; `attach` undoes that."""
        report = _report(_on(RANK, "4"), replace(WORKER, threads=(_thread(20, "4"),)))
        finding = _only(report)
        assert (report.holds, finding.severity) == (False, VerifySeverity.ERROR)
        assert finding.what == "the main thread and 1 data worker may run on CPUs 4 only; planned: 4-7"
        assert finding.where == "pid 10,20, thread 10,20, last on CPU 5"
        assert "called sched_setaffinity" in finding.remedy
        assert finding.remedy.endswith("numapin attach --job run-1 --widen")
        assert report.ranks[0].num_off_plan == 2

    @pytest.mark.parametrize(
        ("masks", "shown"),
        [
            (("5-6",) * 3, "5-6"),
            (("4", "5", "6"), "4 or 5 or 6"),
            (("4", "5", "6", "7", "4-5"), "4 or 5 or 6 or 7 or others"),
        ],
    )
    def test_workers_alone(self, masks: tuple[str, ...], shown: str) -> None:
        """Workers that a worker_init_fn narrowed are off the plan, all of them in one finding."""
        workers = [replace(WORKER, pid=20 + n, threads=(_thread(20 + n, cpus),)) for n, cpus in enumerate(masks)]
        finding = _only(_report(RANK, *workers))
        assert finding.what == f"{len(masks)} data workers may run on CPUs {shown} only; planned: 4-7"
        assert "worker_init_fn" in finding.remedy

    def test_other_children(self) -> None:
        """A program that the rank started may run on fewer CPUs: its own options may say so."""
        assert _report(RANK, replace(RANK, pid=40, role=Role.OTHER, threads=(_thread(40, "5"),))).holds

    def test_openmp(self) -> None:
        """OpenMP pins the main thread, too, and the pools of two ranks on the same CPUs; its variables are named."""
        pinned = [
            replace(each, threads=(_thread(each.pid, "4"), _thread(each.pid + 1, "5")), openmp=("OMP_PROC_BIND=true",))
            for each in (RANK, OTHER)
        ]
        report = self._both(*pinned)
        assert [finding.what for finding in _found(report)] == [
            "the main thread may run on CPUs 4 only; planned: 4-7",
            "2 threads of ranks 0-1 may run on CPUs 5 only; planned: 4-7",
        ]
        assert all("OMP_PROC_BIND=true: unset it" in finding.remedy for finding in _found(report))
        assert [rank.num_off_plan for rank in report.ranks] == [2, 2]

    @pytest.mark.parametrize(
        ("first", "second", "name", "holds"),
        [
            (("5",), ("5",), "python", False),
            (("5",), ("6",), "python", True),
            (("5", "6"), ("5", "6"), "python", False),
            (("5-6",), ("5-6",), "python", True),
            (("5-6", "5-6"), ("5-6",), "python", False),
            (("5", "5"), (), "python", True),  # of one rank
            (("5",), ("5",), "NCCL Service", True),
        ],
    )
    def test_threads_of_several_ranks(
        self,
        first: tuple[str, ...],
        second: tuple[str, ...],
        name: str,
        holds: bool,  # noqa: FBT001 - a parameter
    ) -> None:
        """Pools of several ranks on the same few CPUs are off the plan if they have more threads than these CPUs."""
        own = [_thread(11 + number, cpus, name) for number, cpus in enumerate(first)]
        others = [_thread(31 + number, cpus, name) for number, cpus in enumerate(second)]
        report = self._both(replace(RANK, threads=(_thread(10), *own)), replace(OTHER, threads=(_thread(30), *others)))
        assert report.holds is holds

    def test_cpuset(self) -> None:
        """A cpuset that was cut below the plan is named as the reason."""
        rank = ObservedRank(
            local_rank=0, pid=10, processes=(replace(RANK, threads=(_thread(10, "4-5"),)),), cpuset=CpuSet(range(6))
        )
        plan = Plan(bind=Bind.NODE, memory=PLANNED.memory, ranks=(PLANNED,))
        report = verify(plan, Observed(nodes=CpuSet({0, 1}), ranks=(rank,)), applied={0: APPLIED}, run="run-1")
        assert report.holds is False
        assert "the cpuset of the rank allows CPUs 0-5 only" in _only(report).remedy
        at_start = _report(_on(RANK, "4-5"), applied={**APPLIED, "cpus": "4-5"})
        assert "the cpuset of the rank did not allow more when it was bound" in _only(at_start).remedy

    def test_nccl(self) -> None:
        """A main thread that NCCL narrowed to the GPU's node is off a plan with more CPUs; the remedy is an upgrade."""
        library = NcclLibrary(library="/lib/libnccl.so.2", version="2.29.7", ignores_affinity=False)
        narrow = replace(RANK, threads=(_thread(10, "4-5"),), nccl=library)
        report = self._both(narrow, OTHER, bind=Bind.SOCKET)
        assert report.ranks[0].holds is False
        assert "install NCCL 2.30.3 or newer" in _found(report)[0].remedy

    def test_binding_none(self) -> None:
        """With --bind none a program may bind itself."""
        narrow = replace(RANK, threads=(_thread(10, "4"),))
        assert self._both(narrow, replace(OTHER, threads=(_thread(30, "4"),)), bind=Bind.NONE).holds

    def test_rank_of_another_launcher(self) -> None:
        """A rank that another launcher bound to fewer CPUs is a warning; its workers must have those, too."""
        own = _on(RANK, "4-5")
        inherited = replace(WORKER, threads=(_thread(20, "4-5"),))
        report = _report(own, inherited, applied=None)
        assert (report.holds, _only(report).severity) == (True, VerifySeverity.WARNING)
        assert _only(report).what == "bound to fewer CPUs than numapin would give it: 4-5; planned: 4-7"
        assert _only(report).remedy.endswith("numapin attach --pid 10 --widen")
        assert report.ranks[0].num_off_plan == 0
        narrowed = _report(own, replace(WORKER, threads=(_thread(20, "4"),)), applied=None)
        assert "1 data worker may run on CPUs 4 only; planned: 4-7" in [finding.what for finding in _found(narrowed)]

    def test_ranks_of_another_launcher_on_the_same_cpus(self) -> None:
        """Ranks that share few CPUs although the plan has more are off it, whatever started them."""
        squeezed = (_on(RANK, "4"), _on(OTHER, "4"))
        report = self._both(*squeezed, applied=False)
        assert [finding.what for finding in _found(report)] == [
            "4 threads of ranks 0-1 may run on CPUs 4 only; planned: 4-7"
        ]
        assert report.holds is False
        assert self._both(_on(RANK, "4"), _on(OTHER, "5"), applied=False).holds

    def test_openmp_under_another_launcher(self) -> None:
        """A main thread that OpenMP pinned is off the plan also if another launcher started it."""
        pinned = replace(RANK, threads=(_thread(10, "4"),), openmp=("OMP_PROC_BIND=true",))
        assert _report(pinned, applied=None).holds is False

    def test_job_in_a_smaller_cpuset(self) -> None:
        """A job of another launcher is compared with the part of the plan that its cpuset allows."""
        ranks = (_on(RANK, "4-5"), _on(OTHER, "4-5"))
        report = self._both(*ranks, applied=False, cpuset=CpuSet({4, 5}))
        assert (report.holds, _found(report)) == (True, ())


class TestPolicy:
    """Memory policies."""

    @pytest.mark.parametrize(
        ("memory", "nodes", "mode", "observed", "fits"),
        [
            (Memory.PREFERRED, "1", "prefer", "1", True),
            (Memory.PREFERRED, "0-1", "prefer (many)", "0-1", True),
            (Memory.PREFERRED, "0-1", "prefer", "0", True),  # before Linux 5.15
            (Memory.PREFERRED, "1", "prefer", "0", False),
            (Memory.PREFERRED, "1", "bind", "1", False),
            (Memory.PREFERRED, "1", "default", "", False),
            (Memory.PREFERRED, "1", "local", "", False),
            (Memory.BIND, "1", "bind", "1", True),
            (Memory.BIND, "1", "bind", "0-1", False),
            (Memory.INTERLEAVE, "0-1", "interleave", "0-1", True),
            (Memory.INTERLEAVE, "0-1", "default", "", False),
            (Memory.LOCAL, "1", "local", "", True),
            (Memory.LOCAL, "1", "prefer", "1", False),
        ],
    )
    def test_modes_and_nodes(self, memory: Memory, nodes: str, mode: str, observed: str, fits: bool) -> None:  # noqa: FBT001 - a parameter
        """A policy is as planned with the planned mode and no other nodes; anything else is an error."""
        plan = replace(PLANNED, memory=memory, nodes=CpuSet.parse(nodes))
        process = replace(RANK, policy=Policy(mode=mode, nodes=CpuSet.parse(observed)))
        report = _report(process, plan=plan, applied={**APPLIED, "memory": memory.value})
        assert report.holds is fits
        if not fits:
            assert f"planned: {memory} {nodes}" in _only(report).what

    @pytest.mark.parametrize(("mode", "observed", "fits"), [("bind", "0-1", True), ("prefer", "1", False)])
    def test_beside_gpu_memory(self, mode: str, observed: str, fits: bool) -> None:  # noqa: FBT001 - a parameter
        """A preference that must stay out of GPU memory is `bind` in the kernel; pages belong on the preferred node."""
        plan = replace(PLANNED, within=CpuSet({0, 1}))
        process = replace(RANK, policy=Policy(mode=mode, nodes=CpuSet.parse(observed)))
        report = _report(process, plan=plan, applied={**APPLIED, "memory": "bind", "nodes": "0-1"})
        assert report.holds is fits
        if not fits:
            assert _only(report).what == "the memory policy of the rank is prefer:1; planned: bind 0-1"

    def test_pages_beside_gpu_memory(self) -> None:
        """Pages belong on the preferred node, also where the kernel may put them on another."""
        plan = replace(PLANNED, within=CpuSet({0, 1}))
        policy = Policy(mode="bind", nodes=CpuSet({0, 1}))
        process = replace(RANK, policy=policy, pages=(_pages(MemoryKind.HEAP, n0=8),))
        assert "planned: node 1" in _only(_report(process, plan=plan, applied={**APPLIED, "memory": "bind"})).what

    def test_one_that_was_refused(self) -> None:
        """A policy that the kernel refused at the start, and that was reported then, is a warning with the remedy."""
        process = replace(RANK, policy=Policy(mode="default", nodes=CpuSet()))
        report = _report(process, applied={**APPLIED, "memory": None})
        assert (report.holds, _only(report).severity) == (True, VerifySeverity.WARNING)
        assert "SYS_NICE" in _only(report).remedy

    def test_worker_with_another(self) -> None:
        """A worker's policy is checked like the rank's."""
        report = _report(RANK, replace(WORKER, policy=Policy(mode="bind", nodes=CpuSet({0}))))
        assert _only(report).what == "the memory policy of the data worker is bind:0; planned: preferred 1"


class TestNccl:
    """The NCCL library that a rank has loaded."""

    @pytest.mark.parametrize(
        ("version", "ignores", "bind", "severity", "what"),
        [
            ("2.27.3", False, Bind.EXCLUSIVE, VerifySeverity.NOTE, "NCCL 2.27.3 keeps to the rank's CPUs"),
            ("2.29.7", False, Bind.NODE, VerifySeverity.NOTE, "NCCL 2.29.7 narrows threads to the CPUs"),
            (
                "2.29.7",
                False,
                Bind.SOCKET,
                VerifySeverity.WARNING,
                "NCCL 2.29.7 narrows the rank to the CPUs of the GPU's node, despite --bind socket",
            ),
            (
                "2.29.7",
                True,
                Bind.EXCLUSIVE,
                VerifySeverity.WARNING,
                "NCCL 2.29.7 with NCCL_IGNORE_CPU_AFFINITY moves all threads of the rank to the CPUs of the GPU's node",
            ),
            (
                "2.27.3",
                True,
                Bind.EXCLUSIVE,
                VerifySeverity.WARNING,
                "NCCL 2.27.3 with NCCL_IGNORE_CPU_AFFINITY moves its own threads to all CPUs of the GPU's node",
            ),
            (None, False, Bind.NODE, VerifySeverity.NOTE, "NCCL of unknown version keeps to the rank's CPUs, or"),
        ],
    )
    def test_what_is_said(
        self,
        version: str | None,
        ignores: bool,  # noqa: FBT001 - a parameter
        bind: Bind,
        severity: VerifySeverity,
        what: str,
    ) -> None:
        """The version is named; where it would undo the binding, it is a warning with a remedy. The plan holds."""
        library = NcclLibrary(library="/lib/libnccl.so.2", version=version, ignores_affinity=ignores)
        rank = ObservedRank(local_rank=0, pid=10, processes=(replace(RANK, nccl=library), WORKER))
        plan = Plan(bind=bind, memory=PLANNED.memory, ranks=(PLANNED,))
        observed = Observed(nodes=CpuSet({0, 1}), ranks=(rank,))
        report = verify(plan, observed, applied={0: APPLIED}, run="run-1")
        finding = _only(report)
        assert (finding.severity, report.holds) == (severity, True)
        assert finding.what.startswith(what)
        assert finding.where == "pid 10, /lib/libnccl.so.2"
        assert ("unset NCCL_IGNORE_CPU_AFFINITY" in finding.remedy) is ignores
        upgrade = "install NCCL 2.30.3 or newer" in finding.remedy
        assert upgrade is (severity is VerifySeverity.WARNING and version == "2.29.7")


def test_page_locked_memory_of_other_gpus_is_not_judged() -> None:
    """A note says so once, and the plan holds."""
    report = _report(replace(RANK, hides_pinned=True), replace(RANK, pid=40, hides_pinned=True))
    finding = _only(report)
    assert finding.what.startswith("page-locked memory was not checked: it is not recognized on AMD and Intel GPUs")
    assert report.holds


class TestPages:
    """Where pages are."""

    @pytest.mark.parametrize(
        ("kind", "there", "away", "severity"),
        [
            (MemoryKind.ANONYMOUS, 100, 3.9, None),  # below 4 MiB
            (MemoryKind.ANONYMOUS, 1, 3.9, None),
            (MemoryKind.ANONYMOUS, 1000, 40, None),  # below 5 %
            (MemoryKind.ANONYMOUS, 60, 4, VerifySeverity.ERROR),
            (MemoryKind.HEAP, 0, 4, VerifySeverity.ERROR),
            (MemoryKind.STACK, 0, 8, VerifySeverity.ERROR),
            (MemoryKind.TORCH_SHARED, 10, 10, VerifySeverity.ERROR),
            (MemoryKind.SHARED, 10, 10, VerifySeverity.WARNING),  # it may be another rank's
            (MemoryKind.FILE, 0, 1000, None),
            (MemoryKind.SLOT, 100, 1, None),
            (MemoryKind.SLOT, 100, 1.1, VerifySeverity.ERROR),
            (MemoryKind.PINNED, 0, 4096 / MIB, VerifySeverity.ERROR),
        ],
    )
    def test_thresholds(self, kind: MemoryKind, there: float, away: float, severity: VerifySeverity | None) -> None:
        """More than 5 % and 4 MiB of a kind on other nodes is a finding, of page-locked memory 1 %; files never are."""
        report = _report(replace(RANK, pages=(_pages(kind, n0=away, n1=there),)))
        assert [finding.severity for finding in _found(report)] == ([severity] if severity else [])
        assert report.holds is (severity is not VerifySeverity.ERROR)

    def test_what_is_said(self) -> None:
        """The finding has share, kind, MiB, nodes and process, and the command that moves the pages back."""
        plan = replace(PLANNED, nodes=CpuSet({1}))
        pages = (_pages(MemoryKind.HEAP, n1=100), _pages(MemoryKind.ANONYMOUS, n0=30, n1=60, n2=10))
        finding = _only(_report(replace(RANK, pages=pages), WORKER, plan=plan))  # of the worker all is local
        assert finding.what == (
            "20.0% of the anonymous memory (200.0 MiB) is elsewhere: "
            "30.0 MiB on node 0, 10.0 MiB on node 2; planned: node 1"
        )
        assert finding.where == "pid 10"
        assert finding.remedy.endswith("move it with: numapin attach --job run-1 --migrate")

    def test_pinned_memory_cannot_be_moved(self) -> None:
        """The remedy for page-locked memory is not a command that would fail."""
        finding = _only(_report(replace(RANK, pages=(_pages(MemoryKind.SLOT, n0=1),))))
        assert "--migrate" not in finding.remedy
        assert "restart" in finding.remedy

    def test_pinned_memory_that_is_not_recognized(self) -> None:
        """On AMD and Intel GPUs a note says that page-locked memory was not checked."""
        report = _report(replace(RANK, hides_pinned=True), WORKER)
        assert (report.holds, _only(report).severity) == (True, VerifySeverity.NOTE)
        assert "not recognized on AMD and Intel GPUs" in _only(report).what

    def test_memory_that_may_not_be_read(self) -> None:
        """It is unverified, so the verdict is unknown; an error elsewhere still means that the plan does not hold."""
        closed = replace(RANK, pages=None, policy=None, unreadable="run this as root")
        report = _report(closed)
        assert (report.holds, _only(report).severity) == (None, VerifySeverity.UNVERIFIED)
        assert _only(report).remedy == "run this as root"
        assert _report(replace(closed, threads=(_thread(11, "0"),))).holds is False

    def test_machine_with_one_node(self) -> None:
        """All memory is local there, and the report says so; threads still count."""
        plan = replace(PLANNED, memory=Memory.NONE, nodes=CpuSet({0}))
        report = _report(replace(RANK, pages=None, unreadable="x"), plan=plan, nodes="0")
        assert (report.holds, _only(report).severity) == (True, VerifySeverity.NOTE)
        assert "one NUMA node" in _only(report).what
        assert _report(replace(RANK, threads=(_thread(11, "0"),)), plan=plan, nodes="0").holds is False

    def test_plan_without_a_policy(self) -> None:
        """Without a policy in the plan, memory may be anywhere; the report says that it was not checked."""
        report = _report(
            replace(RANK, pages=(_pages(MemoryKind.SLOT, n0=9),)), plan=replace(PLANNED, memory=Memory.NONE)
        )
        assert (report.holds, _only(report).severity) == (True, VerifySeverity.NOTE)


class TestShown:
    """JSON, table and line."""

    def test_json(self) -> None:
        """The report has each rank's request, applied binding, observation and findings, and the verdict."""
        report = _report(replace(RANK, threads=(_thread(10), _thread(11, "0"))), WORKER)
        told = json.loads(json.dumps(report.to_json()))
        assert (told["schema"], told["run"], told["holds"]) == ("numapin.report/1", "run-1", False)
        (rank,) = told["ranks"]
        assert rank.keys() == {"local_rank", "pid", "requested", "applied", "observed", "findings"}
        assert (rank["requested"]["cpus"], rank["applied"]) == ("4-7", APPLIED)
        first, second = rank["observed"]["processes"]
        assert (first["role"], second["role"], first["policy"]) == ("rank", "data worker", "prefer:1")
        assert first["threads"][1] == {"tid": 11, "name": "python", "cpus": "0", "last_cpu": 5}
        assert first["memory"][0]["bytes_by_node"] == {"1": 100 * MIB}
        assert [finding["severity"] for finding in rank["findings"]] == ["error"]

    def test_table(self) -> None:
        """A row has threads and memory on and off the plan; findings follow, with where they were seen and remedies."""
        pages = (_pages(MemoryKind.ANONYMOUS, n0=20, n1=80), _pages(MemoryKind.SLOT, n1=64))
        lines = _shown(_report(replace(RANK, threads=(_thread(10), _thread(11, "0")), pages=pages), WORKER))
        assert " ".join(lines[1].split()) == "0 10 1 81:00.0 1 2/3 1 180/200 0/0 64/64 off plan"
        assert max(map(len, lines[:2])) <= 80
        assert lines[3].startswith("error: rank 0: 1 thread 'python'")
        assert lines[4].startswith("  seen: pid 10, thread 11")
        assert lines[5].startswith("  fix: ")

    def test_memory_that_was_not_seen_is_no_number(self) -> None:
        """Unknown memory is a question mark in the table, not zero."""
        lines = _shown(_report(replace(RANK, pages=None, unreadable="x")))
        assert lines[1].split()[-4:] == ["?", "?", "?", "unverified"]

    def test_what_ranks_have_alike_is_said_once(self) -> None:
        """A finding of two ranks is one line with both ranks."""
        (rank,) = _report(RANK, nodes="0").ranks
        other = replace(rank, requested=replace(PLANNED, local_rank=1))
        lines = _shown(VerifyReport(run="x", ranks=(rank, other)))
        assert [line for line in lines if line.startswith("note: ")] == [
            "note: ranks 0-1: all memory is local: this machine has one NUMA node"
        ]

    def test_line(self) -> None:
        """The line has the verdict and its basis."""
        assert summary(_report(RANK)) == "the plan holds: 1 rank, 1 process, 2 threads, 100 MiB"
        report = _report(replace(RANK, threads=(_thread(11, "0"),)), WORKER)
        assert summary(report).startswith("the plan does not hold: 1 rank, 2 processes")


def _shown(report: VerifyReport) -> list[str]:
    console = Console(width=200, file=StringIO())
    with console.capture() as capture:
        console.print(verify_table(report))
    return [line.rstrip() for line in capture.get().splitlines()]
