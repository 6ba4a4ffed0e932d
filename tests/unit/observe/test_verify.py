"""`verify` on plans and observations that are written here; findings, table and summary of each case are recorded.

NUMAPIN_UPDATE_GOLDEN=1 records them again, so that a change is a diff to review. The sentence that names a case says
what its findings must be.
"""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from numapin import Bind, Memory, Plan, RankPlan
from tests.recorded.screens import compare
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
    VerifyReport,
    summary,
    verify,
    verify_table,
)
from tests.unit.planned import MIB, PLANNED, PREFER

RECORDED: Final = Path(__file__).parent / "recorded/verify.json"
APPLIED: Final[dict[str, object]] = {"cpus": "4-7", "memory": "preferred", "nodes": "1", "shortfalls": []}


def _threads(first: int, *cpus: str, name: str = "python") -> tuple[Thread, ...]:
    """Return threads with these CPUs, numbered from `first`."""
    return tuple(
        Thread(tid=first + number, name=name, cpus=CpuSet.parse(each), last_cpu=5) for number, each in enumerate(cpus)
    )


def _pages(kind: MemoryKind, **mib: float) -> Pages:
    """Return pages of a kind; n0=1.5 is 1.5 MiB on node 0."""
    sizes = {int(node.removeprefix("n")): int(size * MIB) for node, size in mib.items()}
    return Pages(kind=kind, policy=PREFER, bytes_by_node=sizes)


def _policy(mode: str, nodes: str = "") -> Policy:
    return Policy(mode=mode, nodes=CpuSet.parse(nodes))


RANK: Final = Process(
    pid=10,
    name="python",
    role=Role.RANK,
    threads=_threads(10, "4-7", "4-7"),
    policy=PREFER,
    pages=(_pages(MemoryKind.ANONYMOUS, n1=100), _pages(MemoryKind.FILE, n0=500)),
)
OTHER: Final = replace(RANK, pid=30, threads=_threads(30, "4-7", "4-7"))
"""The process of another rank, which has the same planned CPUs."""


def _rank(*cpus: str, **more: Any) -> Process:
    """Return a rank's process whose threads have these CPUs, the main thread first."""
    return replace(RANK, threads=_threads(10, *cpus), **more)


def _other(*cpus: str, **more: Any) -> Process:
    return replace(OTHER, threads=_threads(30, *cpus), **more)


def _worker(cpus: str = "4-7", number: int = 0, **more: Any) -> Process:
    pid = 20 + number
    return replace(RANK, pid=pid, role=Role.WORKER, threads=_threads(pid, cpus, name="pt_data_worker"), **more)


def _moved(name: str, role: Role = Role.RANK, openmp: tuple[str, ...] = ()) -> Process:
    """Return a process with a thread of this name that is off the plan."""
    return replace(RANK, pid=40, role=role, threads=_threads(41, "0-3", name=name), openmp=openmp)


def _report(
    *processes: Process,
    second: Process | None = None,
    plan: RankPlan = PLANNED,
    bind: Bind = Bind.NODE,
    nodes: str = "0-1",
    applied: dict[str, object] | None = APPLIED,
    cpuset: str | None = None,
) -> VerifyReport:
    """Verify rank 0 with these processes, and a second rank with the same plan."""
    allowed = None if cpuset is None else CpuSet.parse(cpuset)
    trees = [processes, *([] if second is None else [(second,)])]
    ranks = tuple(
        ObservedRank(local_rank=number, pid=(10, 30)[number], processes=tree, cpuset=allowed)
        for number, tree in enumerate(trees)
    )
    return verify(
        Plan(bind=bind, memory=plan.memory, ranks=tuple(replace(plan, local_rank=rank.local_rank) for rank in ranks)),
        Observed(nodes=CpuSet.parse(nodes), ranks=ranks),
        applied={} if applied is None else {rank.local_rank: applied for rank in ranks},
        run="run-1",
    )


def _with_policy(memory: Memory, planned: str, mode: str, nodes: str) -> VerifyReport:
    plan = replace(PLANNED, memory=memory, nodes=CpuSet.parse(planned))
    return _report(_rank("4-7", policy=_policy(mode, nodes)), plan=plan, applied={**APPLIED, "memory": memory.value})


def _with_pages(*pages: Pages, plan: RankPlan = PLANNED) -> VerifyReport:
    return _report(replace(RANK, pages=pages), plan=plan)


def _with_nccl(version: str | None, bind: Bind, *, ignores: bool = False, cpus: str = "4-7") -> VerifyReport:
    library = NcclLibrary(library="/lib/libnccl.so.2", version=version, ignores_affinity=ignores)
    return _report(_rank(cpus, nccl=library), _worker(), bind=bind)


def _pool(first: str, second: str, name: str = "python") -> VerifyReport:
    """Return two ranks with single threads on these CPUs, given as words, beside their main threads."""
    pools = [_threads(tid, *cpus.split(), name=name) for tid, cpus in ((11, first), (31, second))]
    return _report(
        replace(RANK, threads=(*_threads(10, "4-7"), *pools[0])),
        second=replace(OTHER, threads=(*_threads(30, "4-7"), *pools[1])),
    )


BESIDE_GPU_MEMORY: Final = replace(PLANNED, within=CpuSet({0, 1}))
AS_BIND: Final[dict[str, object]] = {**APPLIED, "memory": "bind", "nodes": "0-1"}
UNREADABLE: Final = _rank("4-7", pages=None, policy=None, unreadable="run this as root")
NO_POLICY: Final = replace(PLANNED, memory=Memory.NONE)
OPENMP: Final = ("OMP_PROC_BIND=true",)

CASES: Final = {
    # threads outside the plan
    "planned CPUs, policy and pages, and a library's thread on some CPUs, hold": _report(
        _rank("4-7", "5", ""), _worker()
    ),
    "a thread that was moved is an error, with the command that binds it again": _report(_rank("4-7", "3-4")),
    "threads of one name on the same CPUs are one finding, and other CPUs another": _report(
        _rank("4-7", *["0-3"] * 60, "0")
    ),
    "a thread of NCCL is off the plan because of NCCL_IGNORE_CPU_AFFINITY": _report(RANK, _moved("NCCL Service 0")),
    "so is torch's thread for NCCL, whatever OpenMP does": _report(RANK, _moved("pt_nccl_watchdg", openmp=OPENMP)),
    "a thread that OpenMP places elsewhere": _report(RANK, _moved("python", openmp=("GOMP_CPU_AFFINITY=0-3",))),
    "a pin thread that was moved": _report(RANK, _moved("pt_data_pin")),
    "a worker whose worker_init_fn moves it": _report(RANK, _moved("pt_data_worker", Role.WORKER)),
    "a child process that was moved": _report(RANK, _moved("bash", Role.OTHER)),
    "a rank that numapin did not start is unbound in one finding": _report(_rank("0-7", "0-7", "4-7"), applied=None),
    "if only its other threads are off, each is a finding": _report(_rank("4-7", "0-7"), applied=None),
    "a rank that was bound and whose threads were all moved": _report(_rank("0-7", "0-7")),
    "a rank without a process is gone": _report(),
    "a rank of which only a worker is left is gone, too": _report(_worker()),
    # threads on fewer CPUs
    "a rank that its program narrowed is off the plan with its worker, in one finding": _report(
        _rank("4", "4"), _worker("4")
    ),
    "a worker on other CPUs than its narrowed rank is a finding of its own": _report(_rank("4"), _worker("5")),
    "threads that inherited a narrowed main thread's CPUs are in its finding": _report(
        _rank("4", "4"), second=_other("4", "4")
    ),
    "workers alone, on the same CPUs": _report(RANK, *[_worker("5-6", number) for number in range(3)]),
    "workers alone, each on its CPU": _report(RANK, *[_worker(cpu, int(cpu)) for cpu in "456"]),
    "workers on many CPUs": _report(RANK, *[_worker(cpus, n) for n, cpus in enumerate(["4", "5", "6", "7", "4-5"])]),
    "other children may have fewer CPUs": _report(RANK, replace(_worker("5"), role=Role.OTHER)),
    "OpenMP pins main threads, and pools of two ranks on the same CPU": _report(
        _rank("4", "5", openmp=OPENMP), second=_other("4", "5", openmp=OPENMP)
    ),
    "threads of two ranks on one CPU are off the plan": _pool("5", "5"),
    "threads of two ranks on different CPUs are not": _pool("5", "6"),
    "two pairs on the same CPUs are": _pool("5 6", "5 6"),
    "two threads on two CPUs are not": _pool("5-6", "5-6"),
    "three threads on two CPUs are": _pool("5-6 5-6", "5-6"),
    "two threads of one rank on one CPU are not": _pool("5 5", ""),
    "threads of NCCL may share a CPU": _pool("5", "5", "NCCL Service"),
    "a cpuset that was cut below the plan is named": _report(_rank("4-5"), cpuset="0-5"),
    "a cpuset that did not allow more at the start is named": _report(
        _rank("4-5", "4-5"), applied={**APPLIED, "cpus": "4-5"}
    ),
    "NCCL narrows a main thread that has CPUs of other nodes": _with_nccl("2.29.7", Bind.SOCKET, cpus="4-5"),
    "the same NCCL is not the cause where the plan has the CPUs of one node": _with_nccl(
        "2.29.7", Bind.NODE, cpus="4-5"
    ),
    "with --bind none programs may bind themselves": _report(_rank("4"), second=_other("4"), bind=Bind.NONE),
    "fewer CPUs from another launcher are a warning": _report(_rank("4-5", "4-5"), _worker("4-5"), applied=None),
    "its workers must have as many as their rank": _report(_rank("4-5", "4-5"), _worker("4"), applied=None),
    "ranks of another launcher share a CPU": _report(_rank("4", "4"), second=_other("4", "4"), applied=None),
    "ranks of another launcher have different CPUs": _report(_rank("4", "4"), second=_other("5", "5"), applied=None),
    "OpenMP pins the main thread under another launcher, too": _report(_rank("4", openmp=OPENMP), applied=None),
    "a job of another launcher in a smaller cpuset holds": _report(
        _rank("4-5", "4-5"), second=_other("4-5", "4-5"), applied=None, cpuset="4-5"
    ),
    # policies
    "prefer one node": _with_policy(Memory.PREFERRED, "1", "prefer", "1"),
    "prefer several nodes": _with_policy(Memory.PREFERRED, "0-1", "prefer (many)", "0-1"),
    "before Linux 5.15 one of several nodes is preferred": _with_policy(Memory.PREFERRED, "0-1", "prefer", "0"),
    "prefer another node": _with_policy(Memory.PREFERRED, "1", "prefer", "0"),
    "prefer no node": _with_policy(Memory.PREFERRED, "1", "prefer", ""),
    "bind instead of prefer": _with_policy(Memory.PREFERRED, "1", "bind", "1"),
    "default instead of prefer": _with_policy(Memory.PREFERRED, "1", "default", ""),
    "local instead of prefer": _with_policy(Memory.PREFERRED, "1", "local", ""),
    "bind to one node": _with_policy(Memory.BIND, "1", "bind", "1"),
    "bind to more nodes": _with_policy(Memory.BIND, "1", "bind", "0-1"),
    "interleave": _with_policy(Memory.INTERLEAVE, "0-1", "interleave", "0-1"),
    "default instead of interleave": _with_policy(Memory.INTERLEAVE, "0-1", "default", ""),
    "local": _with_policy(Memory.LOCAL, "1", "local", ""),
    "prefer instead of local": _with_policy(Memory.LOCAL, "1", "prefer", "1"),
    "a preference that must stay out of GPU memory is bind in the kernel": _report(
        _rank("4-7", policy=_policy("bind", "0-1")), plan=BESIDE_GPU_MEMORY, applied=AS_BIND
    ),
    "a plain preference is wrong then": _report(RANK, plan=BESIDE_GPU_MEMORY, applied=AS_BIND),
    "pages belong on the preferred node all the same": _report(
        _rank("4-7", policy=_policy("bind", "0-1"), pages=(_pages(MemoryKind.HEAP, n0=8),)),
        plan=BESIDE_GPU_MEMORY,
        applied=AS_BIND,
    ),
    "a policy that the kernel refused at the start is a warning": _report(
        _rank("4-7", policy=_policy("default")), applied={**APPLIED, "memory": None}
    ),
    "a policy under another launcher": _report(_rank("4-7", policy=_policy("default")), applied=None),
    "a worker's policy is checked": _report(RANK, _worker(policy=_policy("bind", "0"))),
    # NCCL
    "NCCL that keeps to the CPUs is a note": _with_nccl("2.27.3", Bind.EXCLUSIVE),
    "NCCL that narrows does no harm on one node": _with_nccl("2.29.7", Bind.NODE),
    "NCCL that narrows is a warning where the rank has other CPUs": _with_nccl("2.29.7", Bind.SOCKET),
    "NCCL that ignores the affinity and narrows": _with_nccl("2.29.7", Bind.EXCLUSIVE, ignores=True),
    "NCCL that ignores the affinity": _with_nccl("2.27.3", Bind.EXCLUSIVE, ignores=True),
    "NCCL of unknown version": _with_nccl(None, Bind.NODE),
    # pages
    "less than 4 MiB elsewhere holds": _with_pages(_pages(MemoryKind.ANONYMOUS, n0=3.9, n1=100)),
    "also if it is most of the memory": _with_pages(_pages(MemoryKind.ANONYMOUS, n0=3.9, n1=1)),
    "less than 5 % elsewhere holds": _with_pages(_pages(MemoryKind.ANONYMOUS, n0=40, n1=1000)),
    "4 MiB and 5 % elsewhere is an error": _with_pages(_pages(MemoryKind.ANONYMOUS, n0=4, n1=60)),
    "a heap elsewhere": _with_pages(_pages(MemoryKind.HEAP, n0=4)),
    "a stack elsewhere": _with_pages(_pages(MemoryKind.STACK, n0=8)),
    "torch's shared memory elsewhere": _with_pages(_pages(MemoryKind.TORCH_SHARED, n0=10, n1=10)),
    "shared memory elsewhere may be another rank's": _with_pages(_pages(MemoryKind.SHARED, n0=10, n1=10)),
    "files may be anywhere": _with_pages(_pages(MemoryKind.FILE, n0=1000)),
    "1 % of the slots elsewhere holds": _with_pages(_pages(MemoryKind.SLOT, n0=1, n1=100)),
    "more of the slots does not, and cannot be moved": _with_pages(_pages(MemoryKind.SLOT, n0=1.1, n1=100)),
    "a page of pinned memory elsewhere": _with_pages(_pages(MemoryKind.PINNED, n0=4096 / MIB)),
    "kinds are judged one by one, and processes with local memory are not named": _report(
        replace(RANK, pages=(_pages(MemoryKind.HEAP, n1=100), _pages(MemoryKind.ANONYMOUS, n0=30, n1=60, n2=10))),
        _worker(),
    ),
    "pinned memory of AMD and Intel is not judged, said once": _report(
        replace(RANK, hides_pinned=True), _worker(hides_pinned=True)
    ),
    "memory that may not be read is unverified": _report(UNREADABLE),
    "an error elsewhere comes first": _report(replace(UNREADABLE, threads=_threads(11, "0"))),
    "a machine with one node has local memory only": _report(
        replace(UNREADABLE, pages=None), plan=replace(NO_POLICY, nodes=CpuSet({0})), nodes="0"
    ),
    "its threads are checked": _report(replace(RANK, threads=_threads(11, "0")), plan=NO_POLICY, nodes="0"),
    "without a policy memory is not checked": _with_pages(_pages(MemoryKind.SLOT, n0=9), plan=NO_POLICY),
    # what ranks have alike is shown once
    "a finding of two ranks is shown once": _report(RANK, second=OTHER, nodes="0"),
    "memory of all kinds is in the table": _report(
        replace(
            _rank("4-7", "0"),
            pages=(
                _pages(MemoryKind.ANONYMOUS, n0=20, n1=80),
                _pages(MemoryKind.SLOT, n1=64),
                _pages(MemoryKind.SHARED, n0=1, n1=31),
            ),
        ),
        _worker(),
    ),
}


def _effect(report: VerifyReport) -> dict[str, object]:
    console = Console(width=400, file=StringIO())
    with console.capture() as capture:
        console.print(verify_table(report))
    return {
        "holds": report.holds,
        "off plan": [rank.num_off_plan for rank in report.ranks],
        "where": [finding.where for rank in report.ranks for finding in rank.findings],
        "summary": summary(report),
        "shown": [line.rstrip() for line in capture.get().splitlines()],
    }


def test_each_case_has_its_recorded_findings() -> None:
    """The verdict, the findings, the table and the summary are the recorded ones."""
    found = {sentence: _effect(report) for sentence, report in CASES.items()}
    compare(json.dumps(found, indent=1, ensure_ascii=False) + "\n", str(RECORDED))


def test_json() -> None:
    """The report has each rank's request, applied binding, observation and findings, and the verdict."""
    told = json.loads(json.dumps(_report(_rank("4-7", "0"), _worker()).to_json()))
    assert (told["schema"], told["run"], told["holds"]) == ("numapin.report/1", "run-1", False)
    (rank,) = told["ranks"]
    assert rank.keys() == {"local_rank", "pid", "requested", "applied", "observed", "findings"}
    assert (rank["requested"]["cpus"], rank["applied"]) == ("4-7", APPLIED)
    first, second = rank["observed"]["processes"]
    assert (first["role"], second["role"], first["policy"]) == ("rank", "data worker", "prefer:1")
    assert first["threads"][1] == {"tid": 11, "name": "python", "cpus": "0", "last_cpu": 5}
    assert first["memory"][0]["bytes_by_node"] == {"1": 100 * MIB}
    assert [finding["severity"] for finding in rank["findings"]] == ["error"]
