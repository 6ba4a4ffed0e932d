"""`verify` and `top` on plans and observations that are written here; what they find and show is recorded.

NUMAPIN_UPDATE_GOLDEN=1 records it again, so that a change is a diff to review. The sentence that names a case says
what its findings must be.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from numapin import Bind, Memory, Plan, RankPlan
from tests.nvml.fake import FakeGpu, FakeNvml, render
from tests.recorded.screens import compare, rendered
from tests.unit import watched
from tests.unit.observe import seam
from tests.unit.observe.seam import CpuSet, MemoryKind, Role, Sample, Top, model
from tests.unit.planned import MIB, PLANNED, PREFER
from tests.unit.seam import GpuLoad, GpuRef, Waited
from tests.unit.watched import job, loop, rank

APPLIED: Final[dict[str, object]] = {"cpus": "4-7", "memory": "preferred", "nodes": "1", "shortfalls": []}


def _threads(first: int, *cpus: str, name: str = "python") -> tuple[model.Thread, ...]:
    """Return threads with these CPUs, numbered from `first`."""
    return tuple(
        model.Thread(tid=first + number, name=name, cpus=CpuSet.parse(each), last_cpu=5)
        for number, each in enumerate(cpus)
    )


def _pages(kind: MemoryKind, **mib: float) -> model.Pages:
    """Return pages of a kind; n0=1.5 is 1.5 MiB on node 0."""
    sizes = {int(node.removeprefix("n")): int(size * MIB) for node, size in mib.items()}
    return model.Pages(kind=kind, policy=PREFER, bytes_by_node=sizes)


def _policy(mode: str, nodes: str = "") -> model.Policy:
    return model.Policy(mode=mode, nodes=CpuSet.parse(nodes))


RANK: Final = model.Process(
    pid=10,
    name="python",
    role=Role.RANK,
    threads=_threads(10, "4-7", "4-7"),
    policy=PREFER,
    pages=(_pages(MemoryKind.ANONYMOUS, n1=100), _pages(MemoryKind.FILE, n0=500)),
)
OTHER: Final = replace(RANK, pid=30, threads=_threads(30, "4-7", "4-7"))
"""The process of another rank, which has the same planned CPUs."""


def _rank(*cpus: str, **more: Any) -> model.Process:
    return replace(RANK, threads=_threads(10, *cpus), **more)


def _other(*cpus: str, **more: Any) -> model.Process:
    return replace(OTHER, threads=_threads(30, *cpus), **more)


def _worker(cpus: str = "4-7", number: int = 0, **more: Any) -> model.Process:
    pid = 20 + number
    return replace(RANK, pid=pid, role=Role.WORKER, threads=_threads(pid, cpus, name="pt_data_worker"), **more)


def _moved(name: str, role: Role = Role.RANK, openmp: tuple[str, ...] = ()) -> model.Process:
    """Return a process with a thread of this name that is off the plan."""
    return replace(RANK, pid=40, role=role, threads=_threads(41, "0-3", name=name), openmp=openmp)


def _report(
    *processes: model.Process,
    second: model.Process | None = None,
    plan: RankPlan = PLANNED,
    bind: Bind = Bind.NODE,
    nodes: str = "0-1",
    applied: dict[str, object] | None = APPLIED,
    cpuset: str | None = None,
) -> seam.VerifyReport:
    """Verify rank 0 with these processes, and a second rank with the same plan."""
    allowed = None if cpuset is None else CpuSet.parse(cpuset)
    trees = [processes, *([] if second is None else [(second,)])]
    ranks = tuple(
        model.ObservedRank(local_rank=number, pid=(10, 30)[number], processes=tree, cpuset=allowed)
        for number, tree in enumerate(trees)
    )
    plans = tuple(replace(plan, local_rank=rank.local_rank) for rank in ranks)
    found = seam.RunningJob(
        name="run-1",
        folder=None if applied is None else Path("/tmp/a b/run-1"),  # noqa: S108 - never opened
        plan=Plan(bind=bind, memory=plan.memory, ranks=plans),
        pids={rank.local_rank: rank.pid for rank in ranks},
        applied={} if applied is None else {rank.local_rank: applied for rank in ranks},
    )
    return seam.verify(found, model.Observed(nodes=CpuSet.parse(nodes), ranks=ranks))


def _with_policy(memory: Memory, planned: str, mode: str, nodes: str) -> seam.VerifyReport:
    plan = replace(PLANNED, memory=memory, nodes=CpuSet.parse(planned))
    return _report(_rank("4-7", policy=_policy(mode, nodes)), plan=plan, applied={**APPLIED, "memory": memory.value})


def _with_pages(*pages: model.Pages, plan: RankPlan = PLANNED) -> seam.VerifyReport:
    return _report(replace(RANK, pages=pages), plan=plan)


def _with_nccl(version: str | None, bind: Bind, *, ignores: bool = False, cpus: str = "4-7") -> seam.VerifyReport:
    library = model.NcclLibrary(library="/lib/libnccl.so.2", version=version, ignores_affinity=ignores)
    return _report(_rank(cpus, nccl=library), _worker(), bind=bind)


def _pool(first: str, second: str, name: str = "python") -> seam.VerifyReport:
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
    "no cpuset moves a thread off the plan": _report(_rank("4-5", "3-4"), cpuset="0-5"),
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


def test_each_case_has_its_recorded_findings() -> None:
    """The verdict, the findings, the table and the summary are the recorded ones."""
    lines = []
    for sentence, report in CASES.items():
        heads, *rest = rendered(seam.verify_table(report), 400).splitlines()
        where = [finding.where for rank in report.ranks for finding in rank.findings]
        num_off_plan = [rank.num_off_plan for rank in report.ranks]
        lines += [f"=== {sentence}", seam.summary(report), f"off plan: {num_off_plan}; where: {where}", heads]
        lines += [line for line in rest if not line.startswith("threads: on planned CPUs / total")]  # the legend
    compare("\n".join([*lines, ""]), str(Path(__file__).parent / "recorded/verify.txt"))


# --- `top`: the comparison of two samples, its table, the pace of loops, and the readers behind it --------------------


def _tree(
    *pages: model.Pages, unreadable: str | None = None, threads: tuple[str, ...] = ("4-7", "5")
) -> model.ObservedRank:
    own = None if unreadable else pages
    rank = replace(RANK, threads=_threads(10, *threads), pages=own, unreadable=unreadable)
    return model.ObservedRank(local_rank=0, pid=10, processes=(rank,))


SAMPLE = Sample(
    at_s=100.0,
    ranks={0: _tree(_pages(MemoryKind.HEAP, n1=10))},
    bound=frozenset({0}),
    gone=frozenset(),
    loads={"GPU-1": GpuLoad(busy_share=0.87, h2d_gbps=24.0)},
    swapped=(1000, 5000),
)


def _top(now: Sample, *, plan: RankPlan = PLANNED, before: Sample = SAMPLE) -> Top:
    return seam.top("run-1", Plan(bind=Bind.NODE, memory=plan.memory, ranks=(plan,)), before=before, now=now)


def _later(seconds: float = 1.0, **more: Any) -> Sample:
    return replace(SAMPLE, at_s=SAMPLE.at_s + seconds, **more)


def _seen(*pages: model.Pages, **more: Any) -> Sample:
    return _later(ranks={0: _tree(*pages, **more)})


def _waited(waited_s: float, stepped_s: float) -> dict[str, Any]:
    return {"waited": {0: Waited(waited_s=waited_s, stepped_s=stepped_s)}}


def _red(**facts: object) -> Top:
    return watched.job(watched.rank(0), watched.rank(1, **facts))


HEAP: Final = _pages(MemoryKind.HEAP, n1=10)
GONE: Final = _later(gone=frozenset({0}), ranks={0: _tree(threads=())})
OF_AMD: Final = replace(_tree(HEAP).processes[0], hides_pinned=True)
WAITED: Final = replace(SAMPLE, **_waited(1.0, 10.0))
USED: Final = replace(SAMPLE, cpu_s={0: {10: 5.0, 11: 2.0}})
ON_512_CPUS: Final = replace(PLANNED, local_rank=15, cpus=CpuSet(range(0, 512, 2)))
BUSY: Final = replace(_tree(_pages(MemoryKind.SLOT, n0=65536, n1=65536), threads=("1",) * 4000), local_rank=15)

TOPS: Final = {
    "a row has GPU, node, CPUs, threads off them, remote share, GB/s and percent": _top(_later(swapped=(1010, 5000))),
    "swap is divided by the time between the samples": _top(_later(4.0, swapped=(1400, 5000))),
    "swap is unknown without counters now": _top(_later(swapped=None)),
    "swap is unknown without counters before": _top(_later(), before=replace(SAMPLE, swapped=None)),
    "at the same moment there is no rate": _top(SAMPLE),
    "a thread that may leave its CPUs counts, one that a library pinned does not": _top(
        _seen(HEAP, threads=("4-7", "4,8", "0", "5"))
    ),
    "a narrowed main thread counts": _top(_seen(HEAP, threads=("4", "4"))),
    "unless another launcher gave the rank these CPUs": _top(
        replace(_seen(HEAP, threads=("4", "4")), bound=frozenset())
    ),
    "the remote share leaves files out; slots and page-locked memory are pinned": _top(
        _seen(
            _pages(MemoryKind.HEAP, n0=10, n1=50),
            _pages(MemoryKind.FILE, n0=900),
            _pages(MemoryKind.SLOT, n1=30),
            _pages(MemoryKind.PINNED, n0=10),
        )
    ),
    "unreadable memory, unknown loads and swap are dashes, never zeros": _top(
        _later(loads={}, ranks={0: _tree(unreadable="no")}, swapped=None)
    ),
    "pinned memory is unknown on AMD": _top(
        _later(ranks={0: model.ObservedRank(local_rank=0, pid=10, processes=(OF_AMD,))})
    ),
    "without planned nodes only pinned bytes count": _top(
        _seen(_pages(MemoryKind.SLOT, n0=5)), plan=replace(PLANNED, nodes=CpuSet(), memory=Memory.NONE)
    ),
    "a rank without a GPU has no load, and no slot of it is pinned": _top(
        _seen(_pages(MemoryKind.SLOT, n1=5)), plan=replace(PLANNED, gpu=None)
    ),
    "so has a GPU without a UUID": _top(_later(), plan=replace(PLANNED, gpu=GpuRef(index=1, uuid=None, pci=None))),
    "and one that NVML does not know": _top(_later(), plan=replace(PLANNED, gpu=GpuRef(index=1, uuid="X", pci=None))),
    "waiting is a share of the time in steps": _top(_later(**_waited(1.5, 12.0)), before=WAITED),
    "without a step it is unknown": _top(_later(**_waited(1.0, 10.0)), before=WAITED),
    "without a loader before it is unknown": _top(_later(**_waited(1.5, 12.0))),
    "without a loader now it is unknown": _top(_later(), before=WAITED),
    "CPU time counts of processes in both samples: a new worker has used it before": _top(
        _later(2.0, cpu_s={0: {10: 7.0, 11: 3.0, 12: 50.0}}), before=USED
    ),
    "without CPU time before its share is unknown": _top(_later(cpu_s={0: {10: 7.0}})),
    "a job has ended when all ranks are gone, which have no numbers": _top(GONE),
    "a rank on every second of 512 CPUs fits into 80 columns": _top(_later(ranks={15: BUSY}), plan=ON_512_CPUS),
    "the row of a rank on its plan is not red": _red(),
    "a rank with threads off its plan is red": _red(num_off_plan=1),
    "a rank far from its memory is red": _red(remote_share=0.06),
    "a rank that is gone is red, and its numbers are left out": _red(is_gone=True),
    "the power of a GPU that two ranks share counts once": watched.job(
        watched.rank(0), watched.rank(1, plan=replace(watched.planned(0), local_rank=1))
    ),
}


def test_each_table_of_top_is_the_recorded_one() -> None:
    """The JSON and the table are the recorded ones; NUMAPIN_UPDATE_GOLDEN=1 records them again."""
    lines = []
    for sentence, case in TOPS.items():
        shown = rendered(seam.top_table(case, {}, width=80), 80, color_system="standard", force_terminal=True)
        told = case.to_json()
        ranks = told.pop("ranks")
        lines += [f"=== {sentence}", *map(json.dumps, (told, *ranks))]
        lines += shown.replace("\x1b", "^[").splitlines()[:-2]  # without the legend
    compare("\n".join([*lines, ""]), str(Path(__file__).parent / "recorded/top.txt"))


@pytest.mark.parametrize("width", [1, 20, 40, 80, 120, 200])
def test_any_width(width: int) -> None:
    """Less important columns are left out before a line is cut, and the ranks stay."""
    lines = rendered(seam.top_table(replace(_top(SAMPLE), run="x" * 300), {}, width=width), width).splitlines()
    assert len(lines) == 6
    assert max(map(len, lines)) <= width


def test_swap_counters(tmp_path: Path) -> None:
    """Both counters are read; without the file, or without swap, they are unknown."""
    vmstat = tmp_path / "proc/vmstat"
    vmstat.parent.mkdir()
    assert seam.read_swapped(root=tmp_path) is None
    vmstat.write_text("nr_free_pages 5\n")
    assert seam.read_swapped(root=tmp_path) is None
    vmstat.write_text("nr_free_pages 5\npswpin 12\npswpout 34\n")
    assert seam.read_swapped(root=tmp_path) == (12, 34)


_LOADS = """
import sys
from numapin.topology.sources.nvml import open_loads
with open_loads(sys.argv[1:]) as loads:
    loads()
    print({uuid: tuple(load) for uuid, load in loads().items()})
"""


def test_loads(fake_nvml: FakeNvml, tmp_path: Path) -> None:
    """kB/s are GB/s to the device, mW are W; a refused question, or a lost or foreign GPU, costs only itself.

    A driver that refuses has no loads.
    """

    def loads(environ: dict[str, str]) -> str:
        uuids = ("GPU-a", "GPU-b", "GPU-c", "GPU-d", "GPU-e", "GPU-none")
        command = [sys.executable, "-W", "error", "-c", _LOADS, *uuids]
        child = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        assert (child.returncode, child.stderr) == (0, "")
        return child.stdout.strip()

    partly = {"throughput": 3, "vram": 3, "power": 999}
    gpus = [
        FakeGpu(uuid="GPU-a", pci="00000000:1B:00.0", load=(87, 24_500_000), vram=(30, 80), power=612_300),
        FakeGpu(uuid="GPU-b", pci="00000000:1C:00.0", load=(0, 0), vram=(1, 2), power=1, fails=partly),
        FakeGpu(uuid="GPU-c", pci="00000000:1D:00.0"),
        FakeGpu(uuid="GPU-d", pci="00000000:1E:00.0", load=(1, 1), fails={"any": 15}),
        FakeGpu(uuid="GPU-e", pci="00000000:1F:00.0", load=(1, 1), fails={"handle": 15}),
    ]
    known = {"GPU-a": (0.87, 24.5, 30 * MIB, 80 * MIB, 612.3), "GPU-b": (0.0, *[None] * 4), "GPU-c": (None,) * 5}
    assert loads(fake_nvml.environment(tmp_path, render(gpus))) == str(known)
    calls = (tmp_path / "calls").read_text().split()
    assert (calls.count("nvmlInitWithFlags"), calls[-1]) == (1, "nvmlShutdown")
    assert loads(fake_nvml.environment(tmp_path, render([], fails={"init": 18}))) == "{}"


# --- the pace of a running job's loops over several samples ----------------------------------------------------------


def _pace(*loops: tuple[float, float, int], interval_s: float = 1.0) -> seam.LoopPace:
    """Return the pace of rank 0, whose loop has these totals: waited, stepped, steps."""
    paces, found = seam.LoopPaces(), {}
    for waited_s, stepped_s, num_steps in loops:
        found = paces.add(job(rank(loop=loop(waited_s, stepped_s, num_steps)), interval_s=interval_s))
    return found[0]


def test_the_pace_of_loops() -> None:
    """Rates and shares of waiting come from the totals between samples; the totals of another process begin anew."""
    assert _pace((0.1, 10.0, 50)).steps_per_s == 5.0  # since the loops began
    assert _pace((0.0, 10.0, 100), (0.5, 12.0, 120), (1.0, 14.0, 140), interval_s=2.0) == (10.0, 0.25)
    every_third = ((0.0, 3.0 * (i // 3), i // 3) for i in range(13))
    assert _pace(*every_third).steps_per_s == 0.4  # 4 steps in 10 intervals
    assert _pace((1.0, 2.0, 3), (1.0, 2.0, 3)) == (0.0, None)  # it stands still
    paces = seam.LoopPaces()
    assert paces.add(job(rank(loop=None))) == {}
    paces.add(job(rank(loop=loop(1.0, 50.0, 500))))
    assert paces.add(job(rank(loop=loop(0.0, 1.0, 10), pid=99)))[0].steps_per_s == 10.0
