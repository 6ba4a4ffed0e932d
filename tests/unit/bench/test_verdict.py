"""The verdict of a benchmark: yes, no, no difference, or that it cannot tell, and why."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.unit.bench.seam import BenchAnswer, Benchmark, BenchVerdict, Case, Peer, Question, Run, summarize, verdict_of

if TYPE_CHECKING:
    from collections.abc import Mapping

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


def verdict(question: Question, figures: Mapping[str, Mapping[str, Values]], *, sizes: bool = False) -> BenchVerdict:
    """Judge figures by case and peer; with `sizes`, cases are named by a sweep and a number of bytes."""
    cases, runs = [], []
    for name, peers in figures.items():
        group, _, size = name.rpartition(" ")
        sweep = {"group": group, "num_bytes": int(size)} if sizes else {}
        cases.append(Case(name=name, about="", peers=tuple(Peer(name=p, specs=()) for p in peers), **sweep))  # type: ignore[arg-type]
        runs += [
            Run(case=name, peer=peer, repeat=i, figures={question.figure: value})
            for peer, values in peers.items()
            for i, value in enumerate(values)
        ]
    found = verdict_of((question,), summarize(Benchmark(name="x", module="", cases=tuple(cases)), runs))
    assert found is not None
    return found


def times(factor: float) -> Values:
    """Return five repeats around a value."""
    return tuple(factor * noise for noise in (0.99, 1.0, 1.0, 1.0, 1.01))


def pair(factor: float) -> dict[str, Values]:
    """Return a pinned peer that is this many times as fast as a pageable one."""
    return {"pageable": times(10), "pinned": times(10 * factor)}


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
        ({"h2d gpu0 4096": WIDE}, "cannot tell", "pin: cannot tell: the repeats differ too much"),
        (
            {"h2d gpu0 4096": {"pageable": (1.0,), "pinned": (9.0,)}},
            "cannot tell",
            "pin: cannot tell: 1 repeat is too few, a verdict needs 5 (--repeats)",
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
    ],
)
def test_sweeps(figures: dict[str, dict[str, Values]], answer: str, text: str) -> None:
    """Sizes are named from the smallest one on; of several directions the first one counts."""
    found = verdict(PIN, figures, sizes=True)
    assert (found.answer, found.text) == (answer, text)


def test_times_and_cases() -> None:
    """Where a lower figure is better, the ratio is turned around; cases are named, and the peer in the subject."""
    figures = {
        "print": {"torchrun": times(2.0), "numapin": times(0.25)},
        "all-reduce": {"torchrun": times(6.0), "numapin": times(6.0)},
    }
    found = verdict(START, figures)
    assert found.answer is BenchAnswer.YES
    assert found.text == "numapin instead of torchrun: yes, runs are 8.0x faster in print; no difference in all-reduce"


def test_each_case_has_its_own_reason() -> None:
    """Cases that are unclear for different reasons are not explained by that of the first one."""
    figures: dict[str, dict[str, Values]] = {
        "vit": {"torchrun": times(1.0), "numapin": times(1.0)},
        "fsdp": {"torchrun": WIDE["pageable"], "numapin": WIDE["pinned"]},
        "resnet": {"torchrun": (5.8,), "numapin": (12.6,)},
    }
    assert verdict(START, figures).text == (
        "numapin instead of torchrun: no difference in vit; cannot tell in fsdp: the repeats differ too much; "
        "cannot tell in resnet: 1 repeat is too few, a verdict needs 5 (--repeats)"
    )


def test_the_peer_is_fixed_and_named() -> None:
    """The first of the question's peers counts, not the fastest; if it did not run, the case names its substitute."""
    question = replace(START, own=("numapin", "numapin-agent"))
    both = {"torchrun": times(2.0), "numapin": times(2.0), "numapin-agent": times(1.0)}
    assert verdict(question, {"print": both}).text == "numapin instead of torchrun: no difference"
    second = {"torchrun": times(2.0), "numapin-agent": times(1.0)}
    assert verdict(question, {"print": both, "all-reduce": second}).text == (
        "numapin or numapin-agent instead of torchrun: yes, runs are 2.0x faster in all-reduce (numapin-agent); "
        "no difference in print (numapin)"
    )


def test_a_peer_that_stopped_is_the_reason() -> None:
    """More repeats are no remedy for a peer that failed."""
    made = [Run(case="a", peer="torchrun", repeat=i, figures={"total_s": 2.0}) for i in range(2)]
    made += [Run(case="a", peer="torchrun", repeat=2, skipped="failed")]
    made += [Run(case="a", peer="numapin", repeat=i, figures={"total_s": 1.0}) for i in range(5)]
    case = Case(name="a", about="", peers=tuple(Peer(name=name, specs=()) for name in ("torchrun", "numapin")))
    found = verdict_of((START,), summarize(Benchmark(name="x", module="", cases=(case,)), made))
    assert found is not None
    assert found.text == (
        "numapin instead of torchrun: cannot tell: torchrun stopped after 2 repeats, a verdict needs 5"
    )


def test_many_cases_stay_one_line() -> None:
    """Four cases are named, the others counted."""
    figures = {f"case{i}": {"torchrun": times(2.0), "numapin": times(1.0)} for i in range(7)}
    assert verdict(START, figures).text.endswith("2.0x faster in case0, case1, case2, case3 and 3 more")


def test_equal_peers_are_never_told_apart_by_small_noise() -> None:
    """A difference of less than 2 % does not count, however often it appears."""
    figures = {"print": {"torchrun": (1.0,) * 9, "numapin": (0.985,) * 9}}
    assert verdict(START, figures).answer is BenchAnswer.SAME


@pytest.mark.parametrize(
    ("factor", "text"),
    [
        (1.09, "pin: yes, copies are 1.09x faster"),
        (1 / 1.09, "pin: no, copies are 1.09x slower"),
        (1.999, "pin: yes, copies are 2.0x faster"),
        (12.0, "pin: yes, copies are 12x faster"),
    ],
)
def test_small_ratios_have_two_digits(factor: float, text: str) -> None:
    """A difference of a few percent does not read "1.0x faster"."""
    assert verdict(PIN, {"h2d gpu0 4096": pair(factor)}, sizes=True).text == text


def test_zero_is_not_compared() -> None:
    """A figure of zero has no ratio."""
    figures = {"print": {"torchrun": (1.0,) * 5, "numapin": (0.0,) * 5}}
    assert verdict(START, figures).answer is BenchAnswer.UNKNOWN


def test_without_a_question() -> None:
    """A benchmark without a question has no verdict."""
    assert verdict_of((), ()) is None
