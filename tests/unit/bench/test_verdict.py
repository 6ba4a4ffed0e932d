"""The verdict of a benchmark, as recorded: yes, no, no difference, or that it cannot tell, and why."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.recorded.screens import compare
from tests.unit.bench.seam import Benchmark, Case, Peer, Question, Run, summarize, verdict_of

PIN = Question(subject="pin", things="copies are", figure="gbps", own=("pinned", "slot"), against="pageable")
START = Question(
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
    """Return five repeats around a value."""
    return tuple(factor * noise for noise in (0.99, 1.0, 1.0, 1.0, 1.01))


def pair(factor: float) -> dict[str, Values]:
    """Return a pinned peer that is this many times as fast as a pageable one."""
    return {"pageable": times(10), "pinned": times(10 * factor)}


def starts(torchrun: Values, numapin: Values) -> dict[str, Values]:
    """Return the times of both launchers."""
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
    "many cases": {f"case{i}": starts(times(2.0), times(1.0)) for i in range(7)},
    "a certain difference below 2 %": {"print": starts((1.0,) * 9, (0.985,) * 9)},
    "zero has no ratio": {"print": starts((1.0,) * 5, (0.0,) * 5)},
    "not the fastest peer": {"print": starts(times(2.0), times(2.0)) | {"numapin-agent": times(1.0)}},
    "a substitute": {
        "print": starts(times(2.0), times(2.0)),
        "all-reduce": {"torchrun": times(2.0), "numapin-agent": times(1.0)},
    },
    "a peer that fails": {"print": starts((2.0, 2.0), times(1.0))},
}


def verdict(question: Question, figures: Figures, *, fails: str = "") -> str:
    """Judge figures by case and peer; for PIN, cases are named by a sweep and a number of bytes."""
    cases, runs = [], []
    for name, peers in figures.items():
        case = Case(name=name, about="", peers=tuple(Peer(name=peer, specs=()) for peer in peers))
        group, _, size = name.rpartition(" ")
        cases.append(replace(case, group=group, num_bytes=int(size)) if question is PIN else case)
        for peer, values in peers.items():
            runs += [Run(case=name, peer=peer, repeat=i, figures={question.figure: v}) for i, v in enumerate(values)]
            if peer == fails:
                runs.append(Run(case=name, peer=peer, repeat=len(values), skipped="failed"))
    found = verdict_of((question,), summarize(Benchmark(name="x", module="", cases=tuple(cases)), runs))
    assert found is not None
    return f"{found.answer} | {found.text}"


def test_verdicts_are_the_recorded_ones() -> None:
    """Sizes are named from the smallest one on, cases by name; where less is better, the ratio is turned around.

    The first of a question's peers that ran counts, not the fastest. More repeats are no remedy for one that failed.
    """
    lines = [f"{title}\n  {verdict(PIN, figures)}\n" for title, figures in SWEEPS.items()]
    for title, figures in CASES.items():
        lines.append(f"{title}\n  {verdict(START, figures, fails='torchrun' if 'fails' in title else '')}\n")
    compare("".join(lines), str(Path(__file__).with_name("verdicts.txt")))


def test_without_a_question() -> None:
    """A benchmark without a question has no verdict."""
    assert verdict_of((), ()) is None
