"""The verdict of a benchmark: yes, no, no difference, or that it cannot tell, and why."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.bench.seam import BenchAnswer, Benchmark, Case, Peer, Question, Run, summarize, verdict_of

PIN = Question(subject="pin", things="copies are", figure="gbps", own=("pinned", "slot"), against="pageable")
START = Question(
    subject="{own} instead of torchrun",
    things="runs are",
    figure="total_s",
    own=("numapin",),
    against="torchrun",
    less_is_better=True,
)
Values = tuple[float, ...]
Figures = dict[str, dict[str, Values]]


def verdict(question: Question, figures: Figures) -> tuple[str, str]:
    """Judge figures by case and peer; for PIN, cases are named by a sweep and a number of bytes.

    A peer named "fails" fails after its values.
    """
    cases, runs = [], []
    for name, peers in figures.items():
        case = Case(name=name, about="", peers=tuple(Peer(name=peer, specs=()) for peer in peers))
        group, _, size = name.rpartition(" ")
        cases.append(replace(case, group=group, num_bytes=int(size)) if question is PIN else case)
        for peer, values in peers.items():
            runs += [Run(case=name, peer=peer, repeat=i, figures={question.figure: v}) for i, v in enumerate(values)]
            if peer.startswith("fails"):
                runs.append(Run(case=name, peer=peer, repeat=len(values), skipped="failed"))
    found = verdict_of((question,), summarize(Benchmark(name="x", module="", cases=tuple(cases)), runs))
    assert found is not None
    return found.answer, found.text


def times(factor: float) -> Values:
    """Return five repeats around a value."""
    return tuple(factor * noise for noise in (0.99, 1.0, 1.0, 1.0, 1.01))


def pair(factor: float) -> dict[str, Values]:
    """Return a pinned peer that is this many times as fast as a pageable one."""
    return {"pageable": times(10), "pinned": times(10 * factor)}


def runs_of(torchrun: Values, numapin: Values) -> dict[str, Values]:
    """Return the times of both launchers."""
    return {"torchrun": torchrun, "numapin": numapin}


WIDE = {"pageable": (5.0, 10.0, 10.0, 10.0, 15.0), "pinned": (18.0, 12.0, 12.0, 12.0, 6.0)}


@pytest.mark.parametrize(
    ("figures", "answer", "text"),
    [
        ({"h2d gpu0 1048576": pair(6.4)}, "yes", "pin: yes, copies are 6.4x faster"),
        (
            {"h2d gpu0 4096": pair(1), "h2d gpu0 1048576": pair(6.4), "h2d gpu0 67108864": pair(6.4)},
            "yes",
            "pin: yes, copies are 6.4x faster from 1 MiB on; no difference at 4 KiB",
        ),
        ({"h2d gpu0 1048576": pair(0.5)}, "no", "pin: no, copies are 2.0x slower"),
        (
            {"h2d gpu0 4096": pair(2), "h2d gpu0 8192": pair(0.5)},
            "depends",
            "pin: depends, copies are 2.0x faster at 4 KiB; copies are 2.0x slower at 8 KiB",
        ),
        ({"h2d gpu0 4096": pair(1), "h2d gpu0 8192": pair(1)}, "no difference", "pin: no difference"),
        (
            {"h2d gpu0 4096": WIDE},
            "cannot tell",
            "pin: cannot tell: the repeats differ too much",
        ),
        (
            {"h2d gpu0 4096": {"pageable": times(1)[:4], "pinned": times(9)[:4]}},
            "cannot tell",
            "pin: cannot tell: 4 repeats are too few, a verdict needs 5 (--repeats)",
        ),
        (
            {"h2d gpu0 4096": {"pageable": times(1)}},
            "cannot tell",
            "pin: cannot tell: pinned and pageable were not both measured",
        ),
        ({"h2d gpu0 4096": {"pageable": times(1), "slot": times(3)}}, "yes", "pin: yes, copies are 3.0x faster"),
        (
            {"h2d gpu0 4096": pair(2), "h2d gpu1 4096": pair(1)},
            "cannot tell",
            "pin: cannot tell: GPUs or nodes differ",
        ),
        ({"h2d gpu0 4096": pair(2), "d2h gpu0 4096": pair(0.5)}, "yes", "pin: yes, copies are 2.0x faster"),
        ({"h2d gpu0 4096": pair(1.09)}, "yes", "pin: yes, copies are 1.09x faster"),
        ({"h2d gpu0 4096": pair(1 / 1.09)}, "no", "pin: no, copies are 1.09x slower"),
        ({"h2d gpu0 4096": pair(1.999)}, "yes", "pin: yes, copies are 2.0x faster"),
        ({"h2d gpu0 4096": pair(12.0)}, "yes", "pin: yes, copies are 12x faster"),
    ],
)
def test_sweeps(figures: Figures, answer: str, text: str) -> None:
    """Sizes are named from the smallest one on; of several directions the first one counts.

    Ratios below 2 have two digits: a difference of a few percent does not read "1.0x faster".
    """
    assert verdict(PIN, figures) == (answer, text)


@pytest.mark.parametrize(
    ("figures", "answer", "text"),
    [
        (
            {"print": runs_of(times(2.0), times(0.25)), "all-reduce": runs_of(times(6.0), times(6.0))},
            "yes",
            "yes, runs are 8.0x faster in print; no difference in all-reduce",
        ),
        (  # each case has its own reason
            {
                "vit": runs_of(times(1.0), times(1.0)),
                "fsdp": runs_of(*WIDE.values()),
                "resnet": runs_of((5.8,), (12.6,)),
            },
            "cannot tell",
            "no difference in vit; cannot tell in fsdp: the repeats differ too much; "
            "cannot tell in resnet: 1 repeat is too few, a verdict needs 5 (--repeats)",
        ),
        (  # four cases are named, the others counted
            {f"case{i}": runs_of(times(2.0), times(1.0)) for i in range(7)},
            "yes",
            "yes, runs are 2.0x faster in case0, case1, case2, case3 and 3 more",
        ),
        # less than 2 % does not count, however often it appears
        ({"print": runs_of((1.0,) * 9, (0.985,) * 9)}, "no difference", "no difference"),
        # zero has no ratio
        (
            {"print": runs_of((1.0,) * 5, (0.0,) * 5)},
            "cannot tell",
            "cannot tell: numapin and torchrun were not both measured",
        ),
    ],
)
def test_times_and_cases(figures: Figures, answer: str, text: str) -> None:
    """Where a lower figure is better, the ratio is turned around; cases are named, and the peer in the subject."""
    assert verdict(START, figures) == (answer, f"numapin instead of torchrun: {text}")


def test_the_peer_is_fixed_and_named() -> None:
    """The first of the question's peers counts, not the fastest; if it did not run, the case names its substitute."""
    question = replace(START, own=("numapin", "numapin-agent"))
    both = {"torchrun": times(2.0), "numapin": times(2.0), "numapin-agent": times(1.0)}
    assert verdict(question, {"print": both})[1] == "numapin instead of torchrun: no difference"
    second = {"torchrun": times(2.0), "numapin-agent": times(1.0)}
    assert verdict(question, {"print": both, "all-reduce": second})[1] == (
        "numapin or numapin-agent instead of torchrun: yes, runs are 2.0x faster in all-reduce (numapin-agent); "
        "no difference in print (numapin)"
    )


def test_a_peer_that_stopped_is_the_reason() -> None:
    """More repeats are no remedy for a peer that failed."""
    question = replace(START, against="fails")
    assert verdict(question, {"a": {"fails": (2.0, 2.0), "numapin": times(1.0)}}) == (
        BenchAnswer.UNKNOWN,
        "numapin instead of torchrun: cannot tell: fails stopped after 2 repeats, a verdict needs 5",
    )


def test_without_a_question() -> None:
    """A benchmark without a question has no verdict."""
    assert verdict_of((), ()) is None
