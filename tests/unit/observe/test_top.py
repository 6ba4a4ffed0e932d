"""`top`: the comparison of two samples, its table, the pace of loops, and the readers behind it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from rich.console import Console

from numapin import Bind, Memory, Plan, RankPlan
from numapin.errors import UsageError
from tests.nvml.fake import FakeGpu, render
from tests.recorded.screens import compare
from tests.unit import watched
from tests.unit.observe.seam import (
    CpuSet,
    GpuLoad,
    GpuRef,
    LoopPace,
    LoopPaces,
    MemoryKind,
    ObservedRank,
    Pages,
    Process,
    Role,
    RunningJob,
    Sample,
    Sampler,
    Thread,
    Top,
    Waited,
    _follow,
    read_swapped,
    top,
    top_table,
)
from tests.unit.planned import MIB, PLANNED, PREFER
from tests.unit.watched import job, loop, rank

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.nvml.fake import FakeNvml


RECORDED: Final = Path(__file__).parent / "recorded/top.json"


def _pages(kind: MemoryKind, *mib: int) -> Pages:
    """Return pages of a kind, in MiB on node 0, node 1, …."""
    return Pages(kind=kind, policy=PREFER, bytes_by_node={node: size * MIB for node, size in enumerate(mib)})


def _rank(*pages: Pages, unreadable: str | None = None, threads: tuple[str, ...] = ("4-7", "5")) -> ObservedRank:
    """Return a rank with these pages, and threads on these CPUs, its main thread first."""
    rank = Process(
        pid=10,
        name="python",
        role=Role.RANK,
        threads=tuple(
            Thread(tid=10 + number, name="python", cpus=CpuSet.parse(cpus), last_cpu=None)
            for number, cpus in enumerate(threads)
        ),
        policy=PREFER,
        pages=None if unreadable else pages,
        unreadable=unreadable,
    )
    return ObservedRank(local_rank=0, pid=10, processes=(rank,))


SAMPLE = Sample(
    at_s=100.0,
    ranks={0: _rank(_pages(MemoryKind.HEAP, 0, 10))},
    bound=frozenset({0}),
    gone=frozenset(),
    loads={"GPU-1": GpuLoad(busy_share=0.87, h2d_gbps=24.0)},
    swapped=(1000, 5000),
)


def _top(now: Sample, *, plan: RankPlan = PLANNED, before: Sample = SAMPLE) -> Top:
    return top("run-1", Plan(bind=Bind.NODE, memory=plan.memory, ranks=(plan,)), before=before, now=now)


def _later(seconds: float = 1.0, **more: Any) -> Sample:
    return replace(SAMPLE, at_s=SAMPLE.at_s + seconds, **more)


def _seen(*pages: Pages, **more: Any) -> Sample:
    """Return a sample of a rank with these pages."""
    return _later(ranks={0: _rank(*pages, **more)})


def _waited(waited_s: float, stepped_s: float) -> dict[str, Any]:
    return {"waited": {0: Waited(waited_s=waited_s, stepped_s=stepped_s)}}


def _red(**facts: object) -> Top:
    return watched.job(watched.rank(0), watched.rank(1, **facts))


HEAP: Final = _pages(MemoryKind.HEAP, 0, 10)
GONE: Final = _later(gone=frozenset({0}), ranks={0: _rank(threads=())})
OF_AMD: Final = replace(_rank(HEAP).processes[0], hides_pinned=True)
WAITED: Final = replace(SAMPLE, **_waited(1.0, 10.0))
USED: Final = replace(SAMPLE, cpu_s={0: {10: 5.0, 11: 2.0}})
ON_512_CPUS: Final = replace(PLANNED, local_rank=15, cpus=CpuSet(range(0, 512, 2)))
BUSY: Final = replace(_rank(_pages(MemoryKind.SLOT, 65536, 65536), threads=("1",) * 4000), local_rank=15)

CASES: Final = {
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
            _pages(MemoryKind.HEAP, 10, 50),
            _pages(MemoryKind.FILE, 900, 0),
            _pages(MemoryKind.SLOT, 0, 30),
            _pages(MemoryKind.PINNED, 10, 0),
        )
    ),
    "unreadable memory, unknown loads and swap are dashes, never zeros": _top(
        _later(loads={}, ranks={0: _rank(unreadable="no")}, swapped=None)
    ),
    "pinned memory is unknown on AMD": _top(_later(ranks={0: ObservedRank(local_rank=0, pid=10, processes=(OF_AMD,))})),
    "without planned nodes only pinned bytes count": _top(
        _seen(_pages(MemoryKind.SLOT, 5)), plan=replace(PLANNED, nodes=CpuSet(), memory=Memory.NONE)
    ),
    "a rank without a GPU has no load": _top(_later(), plan=replace(PLANNED, gpu=None)),
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


def _effect(seen: Top) -> dict[str, object]:
    console = Console(width=80, color_system="standard", force_terminal=True)
    with console.capture() as captured:
        console.print(top_table(seen, {}, width=80))
    return {"json": seen.to_json(), "shown": captured.get().splitlines()[:-2]}  # without the legend


def test_each_case_is_shown_as_recorded() -> None:
    """The JSON and the table are the recorded ones; NUMAPIN_UPDATE_GOLDEN=1 records them again."""
    found = {sentence: _effect(case) for sentence, case in CASES.items()}
    compare(json.dumps(found, indent=1, ensure_ascii=False) + "\n", str(RECORDED))


@pytest.mark.parametrize("width", [1, 20, 40, 80, 120, 200])
def test_any_width(width: int) -> None:
    """Less important columns are left out before a line is cut, and the ranks stay."""
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(top_table(replace(_top(SAMPLE), run="x" * 300), {}, width=width))
    lines = captured.get().splitlines()
    assert len(lines) == 6
    assert max(map(len, lines)) <= width


def test_swap_counters(tmp_path: Path) -> None:
    """Both counters are read; without the file, or without swap, they are unknown."""
    vmstat = tmp_path / "proc/vmstat"
    vmstat.parent.mkdir()
    assert read_swapped(root=tmp_path) is None
    vmstat.write_text("nr_free_pages 5\n")
    assert read_swapped(root=tmp_path) is None
    vmstat.write_text("nr_free_pages 5\npswpin 12\npswpout 34\n")
    assert read_swapped(root=tmp_path) == (12, 34)


@contextmanager
def _processes(num: int) -> Iterator[list[int]]:
    """Start processes that wait; yield their ids."""
    with ExitStack() as stack:
        started = [stack.enter_context(subprocess.Popen(["cat"], stdin=subprocess.PIPE)) for _ in range(num)]
        yield [process.pid for process in started]


def _job(pids: dict[int, int]) -> RunningJob:
    ranks = tuple(replace(PLANNED, local_rank=rank) for rank in pids)
    plan = Plan(bind=Bind.NODE, memory=PLANNED.memory, ranks=ranks)
    return RunningJob(name="run-1", plan=plan, pids=pids, applied={})


class TestFollowing:
    """Ranks that end and are restarted while `top` is running."""

    def test_a_restarted_rank_is_found_while_another_lives(self) -> None:
        """When one rank of two is gone, its new process is looked for; without one, the rank stays gone."""
        with _processes(2) as (first, second), subprocess.Popen(["true"]) as ended:
            ended.wait()
            answers = [_job({0: first, 1: ended.pid}), _job({0: first, 1: second})]
            follow = _follow(answers.pop(0), lambda: answers[0], dict, lambda: None)
            assert [rank.is_gone for rank in next(follow).ranks] == [False, True]
            assert [(rank.pid, rank.is_gone) for rank in next(follow).ranks] == [(first, False), (second, False)]

    def test_a_rank_that_starts_later(self) -> None:
        """A run that had not started all of its ranks is read again until it has."""
        with _processes(2) as (first, second):
            complete = replace(_job({0: first, 1: second}), owner=os.getuid())
            follow = _follow(replace(complete, pids={0: first}), lambda: complete, dict, lambda: None)
            assert [len(next(follow).ranks) for _ in range(2)] == [1, 2]

    def test_a_launcher_that_was_killed(self) -> None:
        """A rank that outlives its run is shown; when all are gone, `top` ends."""

        def over() -> RunningJob:
            raise UsageError("the run is over", "")

        with subprocess.Popen(["true"]) as ended:
            ended.wait()
            with _processes(1) as (first,):
                follow = _follow(_job({0: first, 1: ended.pid}), over, dict, lambda: time.sleep(0.05))
                assert [rank.is_gone for _ in range(2) for rank in next(follow).ranks] == [False, True] * 2
            *_, last = follow
            assert last.has_ended

    def test_a_foreign_process_is_no_rank(self) -> None:
        """A process id that another process has taken over has no threads and no pages in the table."""
        job = replace(_job({0: os.getpid()}), gone=frozenset({0}))
        sample = Sampler(job, dict).sample()
        assert (sample.gone, sample.ranks[0].processes) == (frozenset({0}), ())


_LOADS = """
import sys
from numapin.topology.sources.nvml import open_loads
with open_loads(sys.argv[1:]) as loads:
    loads()
    print({uuid: tuple(load) for uuid, load in loads().items()})
"""


def _loads(environ: dict[str, str], *uuids: str) -> str:
    child = subprocess.run(
        [sys.executable, "-W", "error", "-c", _LOADS, *uuids], env=environ, capture_output=True, text=True, check=False
    )
    assert (child.returncode, child.stderr) == (0, "")
    return child.stdout.strip()


class TestLoads:
    """Utilisation and PCIe traffic from NVML, each unknown by itself."""

    def test_answers_and_refusals(self, fake_nvml: FakeNvml, tmp_path: Path) -> None:
        """kB/s are GB/s to the device, mW are W; a refused question, or a lost or foreign GPU, costs only itself."""
        gpus = [
            FakeGpu(uuid="GPU-a", pci="00000000:1B:00.0", load=(87, 24_500_000), vram=(30, 80), power=612_300),
            FakeGpu(
                uuid="GPU-b",
                pci="00000000:1C:00.0",
                load=(0, 0),
                vram=(1, 2),
                power=1,
                fails={"throughput": 3, "vram": 3, "power": 999},
            ),
            FakeGpu(uuid="GPU-c", pci="00000000:1D:00.0"),
            FakeGpu(uuid="GPU-d", pci="00000000:1E:00.0", load=(1, 1), fails={"any": 15}),
            FakeGpu(uuid="GPU-e", pci="00000000:1F:00.0", load=(1, 1), fails={"handle": 15}),
        ]
        environ = fake_nvml.environment(tmp_path, render(gpus))
        told = _loads(environ, "GPU-a", "GPU-b", "GPU-c", "GPU-d", "GPU-e", "GPU-none")
        assert told == str(
            {
                "GPU-a": (0.87, 24.5, 30 * MIB, 80 * MIB, 612.3),
                "GPU-b": (0.0, None, None, None, None),
                "GPU-c": (None,) * 5,
            }
        )
        calls = (tmp_path / "calls").read_text().split()
        assert (calls.count("nvmlInitWithFlags"), calls[-1]) == (1, "nvmlShutdown")

    def test_nvml_that_does_not_start(self, fake_nvml: FakeNvml, tmp_path: Path) -> None:
        """A driver that refuses, and a machine without NVML, have no loads."""
        environ = fake_nvml.environment(tmp_path, render([], fails={"init": 18}))
        assert _loads(environ, "GPU-a") == "{}"


# --- the pace of a running job's loops over several samples ----------------------------------------------------------


def _pace(*loops: tuple[float, float, int], interval_s: float = 1.0) -> LoopPace:
    """Return the pace of rank 0, whose loop has these totals: waited, stepped, steps."""
    paces, found = LoopPaces(), {}
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
    paces = LoopPaces()
    assert paces.add(job(rank(loop=None))) == {}
    paces.add(job(rank(loop=loop(1.0, 50.0, 500))))
    assert paces.add(job(rank(loop=loop(0.0, 1.0, 10), pid=99)))[0].steps_per_s == 10.0
