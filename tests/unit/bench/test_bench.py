"""The benchmark harness: its arithmetic, its processes and their failures, the loader's cases, the table."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import time
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from rich.console import Console
from torch.utils.data import default_collate

from tests.unit.bench.seam import (
    CASES,
    Benchmark,
    BenchReport,
    Case,
    Column,
    Comparison,
    InMemory,
    Peer,
    Run,
    _warm_up,
    _window,
    bench_table,
    loader,
    loader_benchmark,
    process,
    require_intact,
    spin,
    summarize,
    verdict_of,
)
from tests.waiting import gone, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.unit.bench.seam import LoaderCase

OURS_AND_TORCH = Benchmark(
    name="loader",
    module="fake_child",
    cases=(Case(name="a", about="a case", peers=(Peer(name="torch", specs=()), Peer(name="ours", specs=()))),),
    comparisons=(Comparison(name="ratio", figure="rate", against="torch"),),
)
OPTIONS: dict[str, Any] = {"seconds": 1.0, "warm_up_s": 0.0, "num_batches": 1}

# A measuring process that does what its spec says.
FAKE_CHILD = """
import os, subprocess, sys, time
from io import StringIO
from pathlib import Path
from numapin.bench.process import serve

def measure(spec, harness):
    do = spec.get("do")
    if do == "raise":
        raise ValueError("no such thing")
    if do == "die":
        sys.stderr.write("last words\\n")
        sys.stderr.flush()
        os.kill(os.getpid(), 9)
    if do == "hang":
        started = subprocess.Popen(["sleep", "600"])
        Path(spec["pid_file"]).write_text(str(started.pid))
        time.sleep(600)
    print("noise on stdout")
    os.system("echo more noise")
    time.sleep(spec.get("warm_s", 0))
    warm = time.monotonic()
    harness.wait_for_start(lambda: time.sleep(0.001))
    start, turns = time.monotonic(), []
    Path("/dev/shm", f"torch_{os.getpid()}_left").touch()
    helper = subprocess.Popen(["sleep", "600"]).pid
    details = {"warm": warm, "start": start, "helper": helper, "pid": os.getpid()}
    harness.report({"rate": spec.get("rate", 1.0), "wait": 2.0}, details=details, idle=lambda: time.sleep(0.001))

if __name__ == "__main__":
    serve(measure)
"""


@pytest.fixture
def fake_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the module that measuring processes run, and put it on their path."""
    (tmp_path / "fake_child.py").write_text(FAKE_CHILD)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[3]}")


def measured(*peers: Peer, repeats: int = 1, timeout_s: float = 30, order: list[str] | None = None) -> list[Run]:
    """Run one case of the fake module with these peers."""
    benchmark = Benchmark(
        name="fake",
        module="fake_child",
        cases=(Case(name="a", about="a case", peers=peers),),
        summed=frozenset({"rate"}),
    )
    starts = [] if order is None else order
    return list(
        process.measure(
            benchmark,
            repeats=repeats,
            timeout_s=timeout_s,
            starts=lambda case, peer, repeat: starts.append(f"{case.name} {peer.name} {repeat}"),
        )
    )


def ends(pid: object) -> bool:
    """Return whether a process ends soon."""
    return wait_until(lambda: gone(int(str(pid))), limit_s=60)


def runs(peer: str, *rates: float | None) -> list[Run]:
    """Return runs of a peer with these rates; None is a failed repeat."""
    return [
        Run(case="a", peer=peer, repeat=i, skipped="failed: because")
        if rate is None
        else Run(case="a", peer=peer, repeat=i, figures={"rate": rate})
        for i, rate in enumerate(rates)
    ]


class TestArithmetic:
    """Medians, spreads and ratios."""

    def test_ratio_is_the_median_of_the_ratios_within_each_repeat(self) -> None:
        """Ratios 3, 1 and 4 give 3; the ratio of the medians would be 1.5."""
        (case,) = summarize(OURS_AND_TORCH, [*runs("torch", 10, 20, 40), *runs("ours", 30, 20, 160)])
        torchs, ours = case.peers
        assert ours.figures["ratio"].values == (3.0, 1.0, 4.0)
        assert ours.figures["ratio"].median == 3.0
        assert (torchs.figures["ratio"].low, torchs.figures["ratio"].high) == (1.0, 1.0)
        assert (ours.figures["rate"].median, ours.figures["rate"].low, ours.figures["rate"].high) == (30, 20, 160)

    def test_a_repeat_without_the_baseline_is_not_compared(self) -> None:
        """If torch fails in the second repeat, the ratio comes from the first only, and torch has the reason."""
        (case,) = summarize(OURS_AND_TORCH, [*runs("torch", 10, None), *runs("ours", 30, 50)])
        torchs, ours = case.peers
        assert ours.figures["ratio"].values == (3.0,)
        assert ours.figures["rate"].values == (30, 50)
        assert (torchs.num_runs, torchs.skipped) == (1, "failed: because")

    def test_no_baseline_no_ratio(self) -> None:
        """Without torch there is no ratio; a peer that did not run is not in the result."""
        (case,) = summarize(OURS_AND_TORCH, runs("ours", 30))
        assert [peer.name for peer in case.peers] == ["ours"]
        assert "ratio" not in case.peers[0].figures

    def test_json(self) -> None:
        """The report names its schema, survives JSON, and keeps every value."""
        text = json.dumps(report([*runs("torch", 10, 20), *runs("ours", 30, 50)]).to_json())
        read = json.loads(text)
        assert read["schema"] == "numapin.bench/1"
        assert read["machine"]["num_cpus"] == 2
        ours = read["cases"][0]["peers"][1]
        assert ours["figures"]["rate"] == {"median": 40.0, "low": 30.0, "high": 50.0, "values": [30, 50]}
        assert ours["figures"]["ratio"]["values"] == [3.0, 2.5]


@pytest.mark.usefixtures("fake_child")
class TestProcesses:
    """Peers in their own processes."""

    def test_peers_take_turns(self) -> None:
        """Every repeat runs every peer once; other output on stdout is not mistaken for figures."""
        order: list[str] = []
        found = measured(Peer(name="x", specs=({"rate": 3},)), Peer(name="y", specs=({},)), repeats=2, order=order)
        assert order == ["a x 0", "a y 0", "a x 1", "a y 1"]
        assert [run.figures["rate"] for run in found] == [3, 1, 3, 1]
        assert len({run.details[0]["pid"] for run in found}) == 4

    def test_several_processes_begin_together(self) -> None:
        """No process measures before the slowest is warm; their rates are added."""
        (run,) = measured(Peer(name="x", specs=({"rate": 1}, {"rate": 2, "warm_s": 0.5})))
        assert run.figures == {"rate": 3, "wait": 2.0}
        slow = max(float(str(detail["warm"])) for detail in run.details)
        assert all(float(str(detail["start"])) >= slow for detail in run.details)

    def test_nothing_is_left(self) -> None:
        """A peer's children end with it, and a file that torch's worker would have unlinked is removed."""
        (run,) = measured(Peer(name="x", specs=({},)))
        assert ends(run.details[0]["helper"])
        assert not Path("/dev/shm", f"torch_{run.details[0]['pid']}_left").exists()  # noqa: S108 - torch's place

    @pytest.mark.parametrize(
        ("do", "why"),
        [
            ("raise", "failed: ValueError: no such thing"),
            ("die", "failed: exited with status -9: last words"),
        ],
    )
    def test_a_peer_that_cannot_run_says_why_and_is_left_out(self, do: str, why: str) -> None:
        """Its run has the reason; later repeats leave it out."""
        found = measured(Peer(name="x", specs=({"do": do},)), Peer(name="y", specs=({},)), repeats=2)
        assert [(run.peer, run.skipped) for run in found] == [("x", why), ("y", None), ("y", None)]

    def test_one_of_several_dies(self) -> None:
        """If one process fails, the run fails at once, and the others end, too, although they would wait for it."""
        (run,) = measured(Peer(name="x", specs=({}, {"do": "raise"})), timeout_s=10_000)  # the test has 300
        assert run.skipped == "failed: ValueError: no such thing"

    def test_timeout(self, tmp_path: Path) -> None:
        """A peer that hangs is ended after the timeout, with its children."""
        pid_file = tmp_path / "pid"
        (run,) = measured(Peer(name="x", specs=({"do": "hang", "pid_file": str(pid_file)},)), timeout_s=5)
        assert run.skipped == "failed: timed out; allow more time with --timeout"
        assert ends(pid_file.read_text())


def in_sessions(*sessions: tuple[str | None, Peer], repeats: int = 1) -> list[Run]:
    """Run a case of one peer for each session."""
    cases = tuple(
        Case(name=f"{i}", about="", session=session, peers=(peer,)) for i, (session, peer) in enumerate(sessions)
    )
    benchmark = Benchmark(name="fake", module="fake_child", cases=cases, summed=frozenset({"rate"}))
    return list(process.measure(benchmark, repeats=repeats, timeout_s=30, starts=lambda *_: None))


def pids(found: list[Run]) -> list[object]:
    """Return the ids of the measuring processes."""
    return [detail["pid"] for run in found for detail in run.details]


@pytest.mark.usefixtures("fake_child")
class TestSessions:
    """Cases that share their processes."""

    def test_one_process_measures_all_of_a_session(self) -> None:
        """Each spec gets its own figures; each session, and each case without one, has its own process."""
        specs = [Peer(name="x", specs=({"rate": rate},)) for rate in (1, 2, 3, 4)]
        found = in_sessions(("a", specs[0]), ("a", specs[1]), ("b", specs[2]), (None, specs[3]), repeats=2)
        assert [run.figures["rate"] for run in found] == [1, 1, 2, 2, 3, 3, 4, 4]
        processes = pids(found)
        assert len(set(processes[:4])) == 1
        assert len(set(processes)) == 4
        assert all(ends(run.details[0]["helper"]) for run in found)

    def test_more_processes_join(self) -> None:
        """A case with two specs adds a process to the session; a case with one spec reuses the first."""
        one, two = Peer(name="x", specs=({},)), Peer(name="x", specs=({"rate": 2}, {"rate": 3}))
        found = in_sessions(("a", one), ("a", two), ("a", one))
        assert [run.figures["rate"] for run in found] == [1, 5, 1]
        first, second, third, last = pids(found)
        assert first == second == last
        assert third != first

    @pytest.mark.parametrize("do", ["raise", "die"])
    def test_after_a_failure_the_session_goes_on_afresh(self, do: str) -> None:
        """After a failure the next case has a new process."""
        good, bad = Peer(name="x", specs=({},)), Peer(name="x", specs=({"do": do},))
        found = in_sessions(("a", good), ("a", bad), ("a", good))
        assert [run.skipped is None for run in found] == [True, False, True]
        before, after = pids(found)
        assert before != after
        assert not list(Path("/dev/shm").glob(f"torch_{before}_*"))  # noqa: S108 - torch's place


class TestCases:
    """The cases of `bench loader`."""

    def test_sizes_are_those_of_the_table(self) -> None:
        """154, 38.5 and 1 MB."""
        megabytes = {name: round(case.batch_bytes / 1e6, 1) for name, case in CASES.items()}
        assert megabytes == {
            "154MB": 154.1,
            "38MB": 38.5,
            "1MB": 1.0,
            "gil-38MB": 38.5,
            "gil-transport": 1.0,
            "transport": 38.5,
        }

    def test_without_a_gpu(self) -> None:
        """Cases that need a GPU are skipped with a reason; the others run the peers that need no GPU."""
        benchmark = loader_benchmark(**OPTIONS, num_gpus=0, no_gpu="torch is built without CUDA")
        skipped = {case.name: case.skipped for case in benchmark.cases}
        assert [skipped.pop("transport"), skipped.pop("gil-transport")] == [None, None]
        assert set(skipped.values()) == {"torch is built without CUDA"}
        names = {peer.name for peer in benchmark.cases[-1].peers}
        assert names == {"torch", "numapin-transport", "numapin-balanced"}

    def test_one_gpu(self) -> None:
        """There is one process, on GPU 0, with the case's own workers; pure transport is not a peer."""
        (case,) = loader_benchmark(**OPTIONS, cases=("38MB",), num_gpus=4, no_gpu=None).cases
        assert {len(peer.specs) for peer in case.peers} == {1}
        assert {"numapin-device", "pinned-peak"} <= {peer.name for peer in case.peers}
        assert "numapin-transport" not in {peer.name for peer in case.peers}
        assert "8 workers" in case.about

    def test_peers_that_cannot_run_a_case(self) -> None:
        """Only float32 is cast."""
        cases = loader_benchmark(**OPTIONS, cases=("154MB", "38MB"), num_gpus=1, no_gpu=None).cases
        assert ["numapin-bf16" in {peer.name for peer in case.peers} for case in cases] == [True, False]

    @pytest.mark.parametrize(
        ("own", "text"),
        [
            ({"numapin-device": 3.0, "numapin-balanced": 9.0}, "numapin-device {}: yes, batches are 3.0x faster"),
            ({"numapin-balanced": 9.0}, "numapin-balanced {}: yes, batches are 9.0x faster"),
        ],
    )
    def test_the_verdict_is_about_a_fixed_loader(self, own: dict[str, float], text: str) -> None:
        """It is about numapin-device, even if a faster one of numapin's loaders ran, too; else about that one."""
        rates = {"torch": 1.0, **own}
        benchmark = loader_benchmark(**OPTIONS, cases=("38MB",), num_gpus=1, no_gpu=None)
        made = [
            Run(case="38MB", peer=name, repeat=i, figures={"batches_per_s": rate})
            for name, rate in rates.items()
            for i in range(5)
        ]
        found = verdict_of(benchmark.questions, summarize(benchmark, made))
        assert found is not None
        assert found.text == text.format("instead of torch's loader")

    def test_all_gpus(self) -> None:
        """There is one process per GPU, with 12 workers each by default."""
        everywhere: dict[str, Any] = {**OPTIONS, "cases": ("38MB",), "peers": ("torch",), "all_gpus": True}
        (case,) = loader_benchmark(**everywhere, num_gpus=4, no_gpu=None).cases
        assert [spec["gpu"] for spec in case.peers[0].specs] == [0, 1, 2, 3]
        assert "12 workers" in case.about
        (case,) = loader_benchmark(**everywhere, num_workers=3, num_gpus=4, no_gpu=None).cases
        assert "3 workers" in case.about

    def test_work_under_the_gil(self) -> None:
        """The work takes 0.1 ms of CPU time."""
        found_s = []
        for _ in range(5):  # the least: a host takes CPU time away from a virtual machine, which counts as the thread's
            start_s = time.thread_time()
            for _ in range(100):
                spin(100_000)
            found_s.append(time.thread_time() - start_s)
        assert 0.01 <= min(found_s) < 0.02


def batch_of(case: LoaderCase, *indices: int) -> list[torch.Tensor]:
    """Return the batch that a worker makes of these samples."""
    dataset = InMemory(case)
    batch: list[torch.Tensor] = default_collate([dataset[index] for index in indices])
    return batch


@pytest.mark.parametrize("name", ["1MB", "38MB"])
class TestData:
    """The dataset that peers read."""

    def test_an_intact_batch(self, name: str) -> None:
        """A batch of the dataset passes the check and has the case's size.

        The samples repeat after 512.
        """
        case = replace(CASES[name], batch_size=3)
        batch = batch_of(case, 5, 510, 515)
        require_intact(batch, case)
        assert batch[0].nbytes == case.batch_bytes

    def test_a_wrong_sample_is_detected(self, name: str) -> None:
        """A row that begins or ends with another sample's code is an error."""
        case = replace(CASES[name], batch_size=3)
        for row in (0, -1):
            batch = batch_of(case, 1, 2, 3)
            batch[0][1].view(-1)[row] += 1
            with pytest.raises(ValueError, match="a batch differs from the dataset"):
                require_intact(batch, case)

    def test_pickles_small(self, name: str) -> None:
        """The pickle has only the arguments; a spawned worker makes its own samples."""
        dataset = InMemory(replace(CASES[name], batch_size=2))
        pickled = pickle.dumps(dataset)
        assert len(pickled) < 1000
        again = pickle.loads(pickled)  # noqa: S301 - our own
        assert torch.equal(dataset[7][0], again[7][0])


@dataclass
class FakeStats:
    """The counts of a loader."""

    hits: int = 0
    slots_made: int = 0
    pinned_bytes: int = 0
    misses: dict[str, int] = field(default_factory=dict)


class TestWindow:
    """The warm-up and the measured window."""

    @pytest.mark.parametrize(
        "stats",
        [
            lambda taken: FakeStats(hits=taken, slots_made=min(taken, 10)),
            lambda taken: FakeStats(hits=taken, pinned_bytes=min(taken, 10)),
            lambda taken: FakeStats(hits=max(0, taken - 10), misses={"no memory": min(taken, 10)}),
        ],
        ids=["made", "pinned", "missed"],
    )
    def test_warm_up_lasts_until_slots_are_only_reused(self, stats: Callable[[int], FakeStats]) -> None:
        """The warm-up takes the rounds in which slots are made or pinned or missed, and one more."""
        taken = 0

        def take() -> None:
            nonlocal taken
            taken += 1

        _warm_up(take, lambda: stats(taken), seconds=0, num_outstanding=4)  # type: ignore[arg-type, return-value]
        assert taken == 16

    def test_warm_up_of_a_peer_without_stats(self) -> None:
        """A peer without statistics is warm after one round of outstanding batches."""
        count = iter(range(100))
        _warm_up(lambda: void(next(count)), lambda: None, seconds=0, num_outstanding=4)
        assert next(count) == 4

    def test_window_is_long_enough_in_both_ways(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The window has at least the batches and the seconds; the time of `end` counts."""
        now_s = 0.0

        def last(seconds: float) -> None:
            nonlocal now_s
            now_s += seconds

        clock = SimpleNamespace(perf_counter=lambda: now_s, thread_time=lambda: now_s / 4)
        monkeypatch.setattr(loader, "time", clock)
        window = _window(lambda: last(0.125), seconds=0, num_batches=7, end=lambda: last(2))
        assert (window.num_batches, window.wall_s, window.cpu_s) == (7, 2.875, 2.875 / 4)
        window = _window(lambda: last(0.125), seconds=1, num_batches=1)
        assert (window.num_batches, window.wall_s) == (8, 1)


def void(_: object) -> None:
    """Take a value and return nothing."""


def report(made: list[Run], *, skipped: str | None = None) -> BenchReport:
    """Return a report of these runs on a machine with two CPUs."""
    cases = tuple(replace(result, skipped=skipped) for result in summarize(OURS_AND_TORCH, made))
    machine = {"num_cpus": 2, "gpus": ["H200", "H200"], "versions": {"torch": "2.13"}}
    return BenchReport(benchmark="loader", command=("numapin",), machine=machine, settings={}, cases=cases)


COLUMNS = (
    Column(figure="rate", heading="batches/s", form=",.1f", spread=True),
    Column(figure="ratio", heading="x torch", form=".2f", spread=True),
    Column(figure="main_cpu_ms", heading="CPU ms", form=".3f", meaning="of the loop's thread per batch"),
)


def rendered(shown: BenchReport, columns: tuple[Column, ...] = COLUMNS) -> list[str]:
    """Return the table's lines on a terminal of 120 columns."""
    console = Console(width=120, highlight=False, emoji=False, markup=False, file=StringIO())
    with console.capture() as text:
        console.print(bench_table(shown, columns, "legend"))
    return text.get().splitlines()


class TestTable:
    """The printed table."""

    def test_rows(self) -> None:
        """Each peer has a row with median and spread; columns without figures are left out; the machine comes first."""
        lines = rendered(report([*runs("torch", 10, 20, 40), *runs("ours", 30, 20, 160)]))
        assert lines[0] == "2 CPUs, 2 H200; torch 2.13"
        assert lines[1] == "legend"
        assert lines[3].split() == ["a", "a", "case"]
        assert lines[4].split() == ["peer", "batches/s", "x", "torch"]
        assert lines[6].split() == ["ours", "30.0", "[20.0,", "160.0]", "3.00", "[1.00,", "4.00]"]

    def test_the_legend_explains_the_columns_that_are_there(self) -> None:
        """A column that no peer has is not in the legend; one that only a later case has is."""
        shown = report(runs("ours", 30))
        columns = (
            Column(figure="rate", heading="rate", meaning="per second"),
            Column(figure="share", heading="of peak", meaning="share of the peak"),
        )
        assert rendered(shown, columns)[1] == "legend; rate: per second"
        (case,) = summarize(OURS_AND_TORCH, [Run(case="a", peer="ours", repeat=0, figures={"share": 0.5})])
        shown = replace(shown, cases=(*shown.cases, case))
        assert rendered(shown, columns)[1] == "legend; rate: per second; of peak: share of the peak"

    def test_one_repeat_has_no_spread(self) -> None:
        """With one repeat there is only the value."""
        assert rendered(report(runs("ours", 30)))[5].split() == ["ours", "30.0"]

    def test_skipped_peers(self) -> None:
        """Peers that never ran or stopped running are listed below the table with the reason."""
        lines = rendered(report([*runs("torch", 10, None), *runs("ours", None)]))
        assert lines[5].split() == ["torch", "10.0", "1.00"]
        assert lines[6:] == ["  torch: stopped after 1 run: failed: because", "", "skipped: ours: failed: because"]

    def test_skipped_case(self) -> None:
        """A skipped case is named with its reason at the end, and has no table."""
        assert rendered(report([], skipped="torch sees no GPU"))[3:] == ["skipped: a (a case): torch sees no GPU"]


@pytest.fixture(autouse=True)
def _threads_of_torch() -> Iterator[None]:
    """Restore torch's number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_process_names_that_are_not_utf8(tmp_path: Path) -> None:
    """The processes of a session are found even if a process has a name that is not UTF-8."""
    program = tmp_path / os.fsdecode(b"\x9b")
    program.symlink_to(shutil.which("sleep") or "")
    with subprocess.Popen([program, "600"], start_new_session=True) as odd:
        try:
            assert process._session(odd.pid) == [odd.pid]
        finally:
            odd.kill()
