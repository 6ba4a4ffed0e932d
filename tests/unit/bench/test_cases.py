"""The tables and verdicts of the benchmarks, as recorded; the results of runs; sizes and shares."""

from __future__ import annotations

from dataclasses import asdict, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from tests.recorded.screens import compare, compare_answers, rendered
from tests.unit.bench.seam import Run, alloc, bench_table, loader, model, overlap, parse_sizes, transfer, verdict_of

HERE = Path(__file__).parent
SHORT: dict[str, Any] = {"directions": ("h2d",), "peers": ("pinned",), "sizes": (4096,), "seconds": 0.1}
COPIES = SHORT | {"sizes": (4096, 1 << 20), "peers": tuple(transfer.PEERS), "directions": transfer.DIRECTIONS}
FEW = ("h2d gpu0 node0 4096", "h2d gpu0 node0 1048576", "alloc 4096", "balanced", "between", "154MB")
LOADING: dict[str, Any] = {"seconds": 1.0, "warm_up_s": 0.0, "num_batches": 1}
BENCHMARKS = {
    "transfer, one GPU": transfer.transfer_benchmark(**COPIES, gpu_nodes=[0], nodes=[0], no_gpu=None),
    "alloc, no GPU": alloc.alloc_benchmark(sizes=(4096,), peers=tuple(alloc.PEERS), num_samples=1, no_gpu="none"),
    "overlap, one GPU": overlap.overlap_benchmark(
        steps=tuple(overlap.STEPS), peers=tuple(overlap.PEERS), seconds=1, no_gpu=None
    ),
    "loader, four GPUs, one used": loader.loader_benchmark(**LOADING, num_gpus=4, no_gpu=None),
    "loader, no GPU": loader.loader_benchmark(**LOADING, num_gpus=0, no_gpu=None),
}


def test_all_gpus_at_once() -> None:
    """Each GPU copies alone from each node, then all at once from their own; a loader has a process for each GPU."""
    copies = transfer.transfer_benchmark(**SHORT, gpu_nodes=[1, None], nodes=[0, 1], no_gpu=None)
    places = [[(spec["gpu"], spec["node"]) for spec in case.peers[0].specs] for case in copies.cases]
    assert places == [[(0, 0)], [(0, 1)], [(1, 0)], [(1, 1)], [(0, 1), (1, None)]]
    loading = loader.loader_benchmark(
        **LOADING, cases=("38MB", "transport"), peers=("torch",), all_gpus=True, num_gpus=2, no_gpu=None
    )
    of_spec = itemgetter("gpu", "num_ranks", "num_workers")
    assert [list(map(of_spec, case.peers[0].specs)) for case in loading.cases] == [
        [(0, 2, 12), (1, 2, 12)],
        [(None, 1, 2)],
    ]


def test_tables_are_the_recorded_ones() -> None:
    """A table has the columns that were measured, medians with their spread, what was left out, and the verdict."""
    text = ""
    for title in ("transfer, one GPU", "alloc, no GPU", "overlap, one GPU", "loader, four GPUs, one used"):
        runs = [run for run in made_runs(BENCHMARKS[title]) if run.case in FEW]
        text += f"=== {title}\n{table(BENCHMARKS[title], runs)}"
    few = BENCHMARKS["loader, no GPU"]
    runs = [run for run in made_runs(few) if run.case == "transport" and run.peer != "torch"][:2]
    runs += [replace(run, peer="torch", repeat=2, figures={}, skipped="failed: because") for run in runs[:1]]
    runs += [replace(run, peer=run.peer, repeat=2, figures={}, skipped="failed: late") for run in runs[:1]]
    text += f"=== stopped early\n{table(few, runs, is_complete=False)}"
    compare(text, str(HERE / "tables.txt"))


def made_runs(benchmark: model.Benchmark) -> list[Run]:
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


def table(benchmark: model.Benchmark, runs: list[Run], *, is_complete: bool = True) -> str:
    cases = model.summarize(benchmark, runs)
    report = model.BenchReport(
        benchmark=benchmark.name,
        command=(),
        machine={"num_cpus": 2, "gpus": ["H200", "H200"], "versions": {"torch": "2.13"}},
        settings={},
        cases=cases,
        is_complete=is_complete,
        verdict=verdict_of(benchmark.questions, cases),
    )
    return rendered(bench_table(report, benchmark.columns, benchmark.legend), 100)


def test_ratios_are_those_within_each_repeat() -> None:
    """Ratios 3 and 4 give 3.5, the ratio of the medians would be 3; a repeat without the baseline has none."""
    peers = (model.Peer(name="torch", specs=()), model.Peer(name="ours", specs=()), model.Peer(name="absent", specs=()))
    benchmark = model.Benchmark(
        name="x",
        module="",
        cases=(model.Case(name="a", about="", peers=peers),),
        comparisons=(model.Comparison(name="ratio", figure="rate", against="torch"),),
    )
    rates = {"torch": (10, 40), "ours": (30, 160, 50)}
    runs = [
        Run(case="a", peer=peer, repeat=i, figures={"rate": value})
        for peer, own in rates.items()
        for i, value in enumerate(own)
    ]
    (case,) = model.summarize(benchmark, [*runs, Run(case="a", peer="torch", repeat=2, skipped="failed: because")])
    torchs, ours = case.peers
    assert asdict(ours.figures["ratio"]) == {"median": 3.5, "low": 3.0, "high": 4.0, "values": (3.0, 4.0)}
    assert asdict(ours.figures["rate"]) == {"median": 50, "low": 30, "high": 160, "values": (30, 160, 50)}
    assert (torchs.num_runs, torchs.skipped) == (2, "failed: because")
    (case,) = model.summarize(benchmark, [run for run in runs if run.peer == "ours"])
    assert case.peers[0].figures.keys() == {"rate"}


def test_sizes() -> None:
    """Sizes are in units of 1024, in any order; each counts once, and they rise. An error quotes what was typed."""

    def answer(line: str) -> str:
        try:
            return str(parse_sizes(line))
        except ValueError as error:
            return f"error: {error}"

    compare_answers(HERE / "sizes.txt", answer)


# --- the verdict: yes, no, no difference, or that it cannot tell, and why ---------------------------------------------


PIN = model.Question(subject="pin", things="copies are", figure="gbps", own=("pinned", "slot"), against="pageable")
START = model.Question(
    subject="{own} instead of torchrun",
    things="runs are",
    figure="total_s",
    own=("numapin", "numapin-agent"),
    against="torchrun",
    less_is_better=True,
)
Values = tuple[float, ...]
Figures = dict[str, dict[str, Values]]


def times(factor: float) -> Values:
    return tuple(factor * noise for noise in (0.99, 1.0, 1.0, 1.0, 1.01))


def pair(factor: float) -> dict[str, Values]:
    return {"pageable": times(10), "pinned": times(10 * factor)}


def starts(torchrun: Values, numapin: Values) -> dict[str, Values]:
    return {"torchrun": torchrun, "numapin": numapin}


WIDE: dict[str, Values] = {"pageable": (5.0, 10.0, 10.0, 10.0, 15.0), "pinned": (18.0, 12.0, 12.0, 12.0, 6.0)}
MIB, LARGE = "h2d gpu0 1048576", "h2d gpu0 67108864"
SWEEPS: dict[str, Figures] = {
    "faster": {MIB: pair(6.4)},
    "from a size on": {"h2d gpu0 4096": pair(1), MIB: pair(6.4), LARGE: pair(3.2)},
    "slower": {MIB: pair(0.5)},
    "it depends": {"h2d gpu0 4096": pair(2), "h2d gpu0 8192": pair(0.5)},
    "no difference": {"h2d gpu0 4096": pair(1), "h2d gpu0 8192": pair(1)},
    "repeats that differ": {MIB: WIDE},
    "four repeats": {MIB: {"pageable": times(1)[:4], "pinned": times(9)[:4]}},
    "one peer": {MIB: {"pageable": times(1)}},
    "the second peer": {MIB: {"pageable": times(1), "slot": times(3)}},
    "GPUs that differ": {"h2d gpu0 4096": pair(2), "h2d gpu1 4096": pair(1)},
    "GPUs that agree": {"h2d gpu0 4096": pair(2), "h2d gpu1 4096": pair(4)},
    "the first direction counts": {MIB: pair(2), "d2h gpu0 1048576": pair(0.5)},
    "two digits below 2": {MIB: pair(1.09)},
    "two digits, slower": {MIB: pair(1 / 1.09)},
    "rounded to 2": {MIB: pair(1.999)},
    "no digits from 10 on": {MIB: pair(12.0)},
}
CASES: dict[str, Figures] = {
    "times": {"print": starts(times(2.0), times(0.25)), "all-reduce": starts(times(6.0), times(6.0))},
    "each case has its own reason": {
        "vit": starts(times(1.0), times(1.0)),
        "fsdp": starts(*WIDE.values()),
        "resnet": starts((5.8,), (12.6,)),
    },
    "a certain difference below 2 %": {"print": starts((1.0,) * 9, (0.985,) * 9)},
    "zero has no ratio": {"print": starts((1.0,) * 5, (0.0,) * 5)},
    "not the fastest peer": {"print": starts(times(2.0), times(2.0)) | {"numapin-agent": times(1.0)}},
    "a substitute": {
        "print": starts(times(2.0), times(2.0)),
        "all-reduce": {"torchrun": times(2.0), "numapin-agent": times(1.0)},
    },
    "a peer that fails": {"print": starts((2.0, 2.0), times(1.0))},
}


def verdict(question: model.Question, figures: Figures, *, fails: str = "") -> str:
    """Judge figures by case and peer; for PIN, cases are named by a sweep and a number of bytes."""
    cases, runs = [], []
    for name, peers in figures.items():
        case = model.Case(name=name, about="", peers=tuple(model.Peer(name=peer, specs=()) for peer in peers))
        group, _, size = name.rpartition(" ")
        cases.append(replace(case, group=group, num_bytes=int(size)) if question is PIN else case)
        for peer, values in peers.items():
            runs += [Run(case=name, peer=peer, repeat=i, figures={question.figure: v}) for i, v in enumerate(values)]
            if peer == fails:
                runs.append(Run(case=name, peer=peer, repeat=len(values), skipped="failed"))
    found = verdict_of((question,), model.summarize(model.Benchmark(name="x", module="", cases=tuple(cases)), runs))
    return f"{found.answer} | {found.text}"


def test_verdicts_are_the_recorded_ones() -> None:
    """Sizes are named from the smallest one on, cases by name; where less is better, the ratio is turned around.

    The first of a question's peers that ran counts, not the fastest. More repeats are no remedy for one that failed.
    """
    lines = [f"{title}\n  {verdict(PIN, figures)}\n" for title, figures in SWEEPS.items()]
    for title, figures in CASES.items():
        lines.append(f"{title}\n  {verdict(START, figures, fails='torchrun' if 'fails' in title else '')}\n")
    compare("".join(lines), str(HERE / "verdicts.txt"))
