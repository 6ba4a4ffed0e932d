"""`top`: the comparison of two samples, its table, and the readers behind it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from numapin import Bind, Memory, Plan, RankPlan
from numapin.errors import UsageError
from tests.nvml.fake import FakeGpu, render
from tests.unit import watched
from tests.unit.observe.seam import (
    CpuSet,
    GpuLoad,
    GpuRef,
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
    thread_cpus,
    top,
    top_table,
)
from tests.unit.planned import MIB, PLANNED, PREFER

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.nvml.fake import FakeNvml


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


def _shown(seen: Top, *, width: int = 80) -> list[str]:
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(top_table(seen, {}, width=width))
    return captured.get().splitlines()


class TestRows:
    """The comparison of samples."""

    def test_swap_is_a_rate(self) -> None:
        """Pages in and out are divided by the time between the samples; without counters they are unknown."""
        now = replace(SAMPLE, at_s=104.0, swapped=(1400, 5000))
        assert _top(now).swap_per_s == (100.0, 0.0)
        assert _top(now).interval_s == 4.0
        assert _top(replace(now, swapped=None)).swap_per_s is None
        assert _top(now, before=replace(SAMPLE, swapped=None)).swap_per_s is None

    def test_threads_off_the_plan(self) -> None:
        """A thread that may leave the planned CPUs counts, one that a library pinned to some of them does not."""
        (rank,) = _top(replace(SAMPLE, ranks={0: _rank(threads=("4-7", "4,8", "0", "5"))})).ranks
        assert (rank.num_off_plan, rank.num_threads) == (2, 4)

    def test_squeezed_rank(self) -> None:
        """A main thread on fewer CPUs than planned counts, unless another launcher gave the rank these CPUs."""
        narrow = replace(SAMPLE, ranks={0: _rank(threads=("4", "4"))})
        assert _top(narrow).ranks[0].num_off_plan == 1
        assert _top(replace(narrow, bound=frozenset())).ranks[0].num_off_plan == 0

    def test_memory(self) -> None:
        """The remote share leaves files out, and slots and page-locked memory are pinned bytes."""
        pages = (
            _pages(MemoryKind.HEAP, 10, 50),
            _pages(MemoryKind.FILE, 900, 0),
            _pages(MemoryKind.SLOT, 0, 30),
            _pages(MemoryKind.PINNED, 10, 0),
        )
        (rank,) = _top(replace(SAMPLE, ranks={0: _rank(*pages)})).ranks
        assert rank.remote_share == pytest.approx(0.2)
        assert rank.pinned_bytes == 40 * MIB

    def test_unknown_memory(self) -> None:
        """Unreadable memory is unknown, as is pinned memory on AMD; without planned nodes only pinned bytes count."""
        (hidden,) = _top(replace(SAMPLE, ranks={0: _rank(unreadable="no")})).ranks
        assert (hidden.remote_share, hidden.pinned_bytes) == (None, None)
        (seen,) = _rank(_pages(MemoryKind.HEAP, 0, 10)).processes
        of_amd = ObservedRank(local_rank=0, pid=10, processes=(replace(seen, hides_pinned=True),))
        assert _top(replace(SAMPLE, ranks={0: of_amd})).ranks[0].pinned_bytes is None
        slots = replace(SAMPLE, ranks={0: _rank(_pages(MemoryKind.SLOT, 5))})
        (free,) = _top(slots, plan=replace(PLANNED, nodes=CpuSet(), memory=Memory.NONE)).ranks
        assert (free.remote_share, free.pinned_bytes) == (None, 5 * MIB)

    @pytest.mark.parametrize("gpu", [None, GpuRef(index=1, uuid=None, pci=None), GpuRef(index=1, uuid="X", pci=None)])
    def test_gpu_without_an_answer(self, gpu: GpuRef | None) -> None:
        """A rank without a GPU, and a GPU without a UUID or an answer from NVML, have no load."""
        (rank,) = _top(SAMPLE, plan=replace(PLANNED, gpu=gpu)).ranks
        assert rank.load == GpuLoad()

    def test_wait_share(self) -> None:
        """The share of time in steps that was spent waiting; unknown without a loader or a step."""
        before = replace(SAMPLE, waited={0: Waited(waited_s=1.0, stepped_s=10.0)})
        now = replace(SAMPLE, waited={0: Waited(waited_s=1.5, stepped_s=12.0)})
        assert _top(now, before=before).ranks[0].wait_share == 0.25
        assert _top(before, before=before).ranks[0].wait_share is None
        assert _top(now).ranks[0].wait_share is None
        assert _top(SAMPLE, before=before).ranks[0].wait_share is None

    def test_cpu_share(self) -> None:
        """CPU time is counted for processes in both samples: a worker that was just noticed has used it before."""
        before = replace(SAMPLE, cpu_s={0: {10: 5.0, 11: 2.0}})
        now = replace(SAMPLE, at_s=102.0, cpu_s={0: {10: 7.0, 11: 3.0, 12: 50.0}})
        assert _top(now, before=before).ranks[0].cpu_share == 1.5
        assert _top(now).ranks[0].cpu_share is None

    def test_job_that_ended(self) -> None:
        """A job has ended when all of its ranks are gone."""
        assert not _top(SAMPLE).has_ended
        assert _top(replace(SAMPLE, gone=frozenset({0}), ranks={0: _rank(threads=())})).has_ended


class TestTable:
    """The table."""

    def test_row(self) -> None:
        """A row has GPU, node, CPUs, threads off them, remote share, MiB, GB/s and percent."""
        _, swap, head, row, *_ = _shown(_top(replace(SAMPLE, at_s=101.0, swapped=(1010, 5000))))
        names = ("rank", "GPU", "node", "CPUs", "off", "remote", "pinned", "steps/s", "wait", "CPU", "H2D", "busy")
        assert head.split() == list(names)
        assert row.split() == ["0", "1", "81:00.0", "1", "4-7", "0/2", "0.0%", "0.0", "-", "-", "-", "24.0", "87%"]
        assert swap.endswith("swap: 10 pages/s in, 0 out (whole machine)")

    def test_unknown_is_a_dash(self) -> None:
        """What is unknown is a dash, never a zero."""
        blind = replace(SAMPLE, loads={}, ranks={0: _rank(unreadable="no")}, swapped=None)
        _, swap, _, row, *_ = _shown(_top(blind))
        assert row.split()[-7:] == ["-"] * 7
        assert swap.endswith("swap: unknown")

    def test_gone(self) -> None:
        """A rank that is gone has no numbers."""
        _, _, _, row, *_ = _shown(_top(replace(SAMPLE, gone=frozenset({0}), ranks={0: _rank(threads=())})))
        assert row.split()[-1] == "gone"

    def test_width(self) -> None:
        """A rank on every second of 512 CPUs, three digits of everything else: 80 columns, and no line is broken."""
        plan = replace(PLANNED, local_rank=15, cpus=CpuSet(range(0, 512, 2)))
        rank = replace(_rank(_pages(MemoryKind.SLOT, 65536, 65536), threads=("1",) * 4000), local_rank=15)
        seen = _top(replace(SAMPLE, ranks={15: rank}), plan=plan)
        lines = _shown(seen)
        assert len(lines) == 6
        assert max(map(len, lines)) <= 80
        assert "…" in lines[3]
        assert lines[3].endswith("24.0   87%")

    @pytest.mark.parametrize("width", [1, 20, 40, 80, 120, 200])
    def test_any_width(self, width: int) -> None:
        """Less important columns are left out before a line is cut, and the ranks stay."""
        lines = _shown(replace(_top(SAMPLE), run="x" * 300), width=width)
        assert len(lines) == 6
        assert max(map(len, lines)) <= width

    @pytest.mark.parametrize(
        ("facts", "is_red"),
        [({}, False), ({"num_off_plan": 1}, True), ({"remote_share": 0.06}, True), ({"is_gone": True}, True)],
    )
    def test_what_needs_attention_is_red(self, facts: dict[str, object], is_red: bool) -> None:  # noqa: FBT001 - a parameter
        """The row of a rank that is gone, off its plan or far from its memory is red; other rows are not."""
        console = Console(width=200, color_system="standard", force_terminal=True)
        with console.capture() as captured:
            console.print(top_table(watched.job(watched.rank(0), watched.rank(1, **facts)), {}, width=200))
        _, _, _, healthy, other, *_ = captured.get().splitlines()
        assert ("\x1b[1;31m" in healthy, "\x1b[1;31m" in other) == (False, is_red)

    def test_shared_gpu(self) -> None:
        """The power of a GPU that two ranks share counts once."""
        both = watched.rank(0), watched.rank(1, plan=replace(watched.planned(0), local_rank=1))
        assert "GPU power 612 W" in _shown(watched.job(*both))[1]


class TestReaders:
    """Threads, swap counters and NVML."""

    def test_threads_of_this_process(self) -> None:
        """Each thread is read with the CPUs that it may use, even if it has narrowed them."""
        cpu = min(os.sched_getaffinity(0))
        ready, end = threading.Event(), threading.Event()

        def narrow() -> None:
            os.sched_setaffinity(0, {cpu})
            ready.set()
            end.wait()

        thread = threading.Thread(target=narrow, daemon=True)
        thread.start()
        ready.wait()
        found, tasks = thread_cpus(os.getpid()), list(Path("/proc/self/task").iterdir())  # OpenMP's threads, too
        end.set()
        thread.join()
        assert len(found) == len(tasks)
        assert frozenset({cpu}) in found
        assert frozenset(os.sched_getaffinity(0)) in found

    def test_process_that_ended(self) -> None:
        """Neither a missing process nor a zombie has threads."""
        child = subprocess.Popen([sys.executable, "-c", ""])
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        zombie = thread_cpus(child.pid)
        child.wait()
        assert (zombie, thread_cpus(child.pid)) == ((), ())

    @pytest.mark.parametrize(
        ("text", "told"),
        [
            ("nr_free_pages 5\npswpin 12\npswpout 34\n", (12, 34)),
            ("nr_free_pages 5\n", None),
            (None, None),
        ],
    )
    def test_swap_counters(self, tmp_path: Path, text: str | None, told: tuple[int, int] | None) -> None:
        """Both counters are read; without swap, or without the file, they are unknown."""
        (tmp_path / "proc").mkdir()
        if text is not None:
            (tmp_path / "proc/vmstat").write_text(text)
        assert read_swapped(root=tmp_path) == told


@contextmanager
def _processes(num: int) -> Iterator[list[int]]:
    """Start processes that wait; yield their ids."""
    with ExitStack() as stack:
        started = [stack.enter_context(subprocess.Popen(["cat"], stdin=subprocess.PIPE)) for _ in range(num)]
        yield [process.pid for process in started]


def _job(pids: dict[int, int], *, gone: frozenset[int] = frozenset()) -> RunningJob:
    ranks = tuple(replace(PLANNED, local_rank=rank) for rank in pids)
    plan = Plan(bind=Bind.NODE, memory=PLANNED.memory, ranks=ranks)
    return RunningJob(name="run-1", plan=plan, pids=pids, applied={}, gone=gone)


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
        sample = Sampler(_job({0: os.getpid()}, gone=frozenset({0})), dict).sample()
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
