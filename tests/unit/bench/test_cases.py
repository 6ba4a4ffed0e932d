"""The cases and tables of the benchmarks, as recorded; the results of runs; sizes and shares."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console

from tests.recorded.screens import compare, compare_answers
from tests.unit.bench.seam import (
    Benchmark,
    BenchReport,
    Case,
    Comparison,
    Peer,
    Run,
    alloc,
    bench_table,
    loader,
    overlap,
    parse_sizes,
    summarize,
    transfer,
    verdict_of,
)

HERE = Path(__file__).parent
SHORT: dict[str, Any] = {"directions": ("h2d",), "peers": ("pinned",), "sizes": (4096,), "seconds": 0.1}
COPIES = SHORT | {"sizes": (4096, 1 << 20), "peers": tuple(transfer.PEERS), "directions": tuple(transfer.Direction)}
FEW = ("h2d gpu0 node0 4096", "h2d gpu0 node0 1048576", "alloc 4096", "balanced", "between", "154MB")
LOADING: dict[str, Any] = {"seconds": 1.0, "warm_up_s": 0.0, "num_batches": 1}
BENCHMARKS = {
    "transfer, one GPU": transfer.transfer_benchmark(**COPIES, gpu_nodes=[0], nodes=[0], no_gpu=None),
    "transfer, two GPUs, two nodes": transfer.transfer_benchmark(
        **SHORT, gpu_nodes=[1, None], nodes=[0, 1], no_gpu=None
    ),
    "transfer, no GPU": transfer.transfer_benchmark(**COPIES, gpu_nodes=[], nodes=[0, 1], no_gpu="none"),
    "alloc, one GPU": alloc.alloc_benchmark(sizes=(4096, 8192), peers=tuple(alloc.PEERS), num_samples=5, no_gpu=None),
    "alloc, no GPU": alloc.alloc_benchmark(sizes=(4096,), peers=tuple(alloc.PEERS), num_samples=1, no_gpu="none"),
    "alloc, no GPU, nothing else": alloc.alloc_benchmark(sizes=(1,), peers=("numapin",), num_samples=1, no_gpu="none"),
    "overlap, one GPU": overlap.overlap_benchmark(
        steps=tuple(overlap.STEPS), peers=tuple(overlap.PEERS), seconds=1, no_gpu=None
    ),
    "overlap, no GPU": overlap.overlap_benchmark(steps=("between",), peers=("pinned",), seconds=1, no_gpu="none"),
    "loader, four GPUs, one used": loader.loader_benchmark(**LOADING, num_gpus=4, no_gpu=None),
    "loader, four GPUs at once": loader.loader_benchmark(
        **LOADING, cases=("38MB",), peers=("torch",), all_gpus=True, num_gpus=4, no_gpu=None
    ),
    "loader, three workers each": loader.loader_benchmark(
        **LOADING, cases=("38MB",), peers=("torch",), num_workers=3, prefetch=5, all_gpus=True, num_gpus=2, no_gpu=None
    ),
    "loader, no GPU": loader.loader_benchmark(**LOADING, num_gpus=0, no_gpu=None),
}


def test_cases_are_the_recorded_ones() -> None:
    """Each benchmark has these cases and peers; the specs of the first peer are shown for all."""
    lines = []
    for title, benchmark in BENCHMARKS.items():
        rules = {name: value for name, value in asdict(benchmark).items() if name not in ("cases", "columns", "legend")}
        lines += [f"=== {title}", json.dumps(rules | {"summed": sorted(benchmark.summed)})]
        for case in benchmark.cases:
            place = (
                f"{case.group} {case.num_bytes} in session {case.session}" if case.group else f"session {case.session}"
            )
            lines += [f"{case.name}: {case.about}", f"  {case.skipped or place}"]
            if case.peers:
                lines += [f"  {', '.join(peer.name for peer in case.peers)}", f"  {json.dumps(case.peers[0].specs)}"]
    compare("\n".join(lines) + "\n", str(HERE / "cases.txt"))


def test_tables_are_the_recorded_ones() -> None:
    """A table has the columns that were measured, medians with their spread, what was left out, and the verdict."""
    text = ""
    for title in ("transfer, one GPU", "alloc, no GPU", "overlap, one GPU", "loader, four GPUs, one used"):
        runs = [run for run in made_runs(BENCHMARKS[title]) if run.case in FEW]
        text += f"=== {title}\n{rendered(BENCHMARKS[title], runs)}"
    few = BENCHMARKS["loader, no GPU"]
    runs = [run for run in made_runs(few) if run.case == "transport" and run.peer != "torch"][:2]
    runs += [replace(run, peer="torch", repeat=2, figures={}, skipped="failed: because") for run in runs[:1]]
    runs += [replace(run, peer=run.peer, repeat=2, figures={}, skipped="failed: late") for run in runs[:1]]
    text += f"=== stopped early\n{rendered(few, runs, is_complete=False)}"
    compare(text, str(HERE / "tables.txt"))


def made_runs(benchmark: Benchmark) -> list[Run]:
    """Return five repeats of each peer; a figure depends on its column, its peer and the repeat."""
    compared = {comparison.name for comparison in benchmark.comparisons}
    figures = [column.figure for column in benchmark.columns if column.figure not in compared]
    return [
        Run(
            case=case.name,
            peer=peer.name,
            repeat=repeat,
            figures={name: (i + 1) * 1234.5 * (j + 1) * (1 + repeat / 100) for j, name in enumerate(figures)},
        )
        for case in benchmark.cases
        for i, peer in enumerate(case.peers)
        for repeat in range(5)
    ]


def rendered(benchmark: Benchmark, runs: list[Run], *, is_complete: bool = True) -> str:
    """Return the report's table on a terminal of 100 columns, without trailing blanks."""
    cases = summarize(benchmark, runs)
    report = BenchReport(
        benchmark=benchmark.name,
        command=(),
        machine={"num_cpus": 2, "gpus": ["H200", "H200"], "versions": {"torch": "2.13"}},
        settings={},
        cases=cases,
        is_complete=is_complete,
        verdict=verdict_of(benchmark.questions, cases),
    )
    console = Console(width=100, highlight=False, emoji=False, markup=False, file=StringIO())
    with console.capture() as text:
        console.print(bench_table(report, benchmark.columns, benchmark.legend))
    return "".join(f"{line.rstrip()}\n" for line in text.get().splitlines())


def test_ratios_are_those_within_each_repeat() -> None:
    """Ratios 3 and 4 give 3.5, the ratio of the medians would be 3; a repeat without the baseline has none."""
    peers = (Peer(name="torch", specs=()), Peer(name="ours", specs=()), Peer(name="absent", specs=()))
    benchmark = Benchmark(
        name="x",
        module="",
        cases=(Case(name="a", about="", peers=peers),),
        comparisons=(Comparison(name="ratio", figure="rate", against="torch"),),
    )
    rates = {"torch": (10, 40), "ours": (30, 160, 50)}
    runs = [
        Run(case="a", peer=peer, repeat=i, figures={"rate": value})
        for peer, own in rates.items()
        for i, value in enumerate(own)
    ]
    (case,) = summarize(benchmark, [*runs, Run(case="a", peer="torch", repeat=2, skipped="failed: because")])
    torchs, ours = case.peers
    assert asdict(ours.figures["ratio"]) == {"median": 3.5, "low": 3.0, "high": 4.0, "values": (3.0, 4.0)}
    assert asdict(ours.figures["rate"]) == {"median": 50, "low": 30, "high": 160, "values": (30, 160, 50)}
    assert (torchs.num_runs, torchs.skipped) == (2, "failed: because")
    (case,) = summarize(benchmark, [run for run in runs if run.peer == "ours"])
    assert case.peers[0].figures.keys() == {"rate"}


def test_sizes() -> None:
    """Sizes are in units of 1024, in any order; each counts once, and they rise. An error quotes what was typed."""

    def answer(line: str) -> str:
        try:
            return str(parse_sizes(line))
        except ValueError as error:
            return f"error: {error}"

    compare_answers(HERE / "sizes.txt", answer)
