"""The verdict of a benchmark: the answer to its question, in one line.

Two peers differ if the ranges of their repeats are at least 2 % apart. Of two equal peers with four repeats each, noise
alone separates the ranges in 2 of C(8, 4) = 70 orders, or 2.9 %; with three repeats it would be 10 %, which is why
fewer than four are too few to tell. There is no difference if no repeat of one is more than 5 % from any of the other.

The peer that counts is fixed by the question, because the best of several would be the one with the luckiest repeats.
The verdict names it.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from numapin.base.formats import size_label
from numapin.base.text import counted
from numapin.bench.model import BenchAnswer, BenchVerdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from numapin.bench.model import CaseResult, Question, Spread

FEWEST_REPEATS: Final = 4
_NEEDED: Final = f"a verdict needs {FEWEST_REPEATS}"
_MIN_GAIN: Final = 1.02  # repeats share memory and processes, so their range lacks the variation between these
_NEGLIGIBLE: Final = 1.05
_MOST_NAMES: Final = 4


class BenchOutcome(StrEnum):
    """The outcome of one contrast, in the order in which a verdict names them."""

    FASTER = "faster"
    SLOWER = "slower"
    SAME = "no difference"
    UNKNOWN = "cannot tell"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contrast:
    """Two peers in one case: `times` is how many times as fast the first one is. `doubt` explains UNKNOWN."""

    own: str
    times: float
    outcome: BenchOutcome
    doubt: str = ""


def verdict_of(questions: Sequence[Question], cases: Sequence[CaseResult]) -> BenchVerdict | None:
    """Answer the first question whose peers were both measured; None for a benchmark without a question."""
    for question in questions:
        found = _contrasts(question, cases)
        if found:
            return answer(question, cases, found)
    return _not_measured(questions[0]) if questions else None


def _not_measured(question: Question) -> BenchVerdict:
    own, against = question.own[0], question.against
    text = f"{_subject(question, own)}: {BenchAnswer.UNKNOWN}: {own} and {against} were not both measured"
    return BenchVerdict(answer=BenchAnswer.UNKNOWN, text=text)


def _subject(question: Question, own: str) -> str:
    return question.subject.replace("{own}", own)


def _contrasts(question: Question, cases: Sequence[CaseResult]) -> dict[str, Contrast]:
    """Return the contrasts by the name of their case, or by their size if the cases are a sweep."""
    sweep = _first_kind(cases)
    if sweep:
        return _by_size(question, sweep)
    found = {case.name: _contrast(question, case) for case in cases}
    return {name: contrast for name, contrast in found.items() if contrast is not None}


def _by_size(question: Question, sweep: Sequence[CaseResult]) -> dict[str, Contrast]:
    """Return a contrast for each size, in rising order."""
    by_size: dict[int, list[Contrast]] = defaultdict(list)
    for case in sweep:
        contrast = _contrast(question, case)
        if contrast is not None:
            by_size[case.num_bytes or 0].append(contrast)
    return {size_label(size): _joined(by_size[size]) for size in sorted(by_size)}


def _first_kind(cases: Iterable[CaseResult]) -> list[CaseResult]:
    """Return the sweeps of the first kind: those of the same direction, for each GPU and node."""
    sweeps = [case for case in cases if case.group is not None]
    kinds = [(case.group or "").partition(" ")[0] for case in sweeps]
    return [case for case, kind in zip(sweeps, kinds, strict=True) if kind == kinds[0]]


def _joined(contrasts: Sequence[Contrast]) -> Contrast:
    """Return one contrast for a size that several GPUs or nodes have."""
    first = contrasts[0]
    times = statistics.median(contrast.times for contrast in contrasts)
    if len({(contrast.own, contrast.outcome) for contrast in contrasts}) > 1:
        return Contrast(own=first.own, times=times, outcome=BenchOutcome.UNKNOWN, doubt="GPUs or nodes differ")
    doubts = dict.fromkeys(contrast.doubt for contrast in contrasts)
    return Contrast(own=first.own, times=times, outcome=first.outcome, doubt=", ".join(doubts))


def _contrast(question: Question, case: CaseResult) -> Contrast | None:
    """Compare the first of the question's own peers that was measured; None if one side is missing."""
    spreads = _comparable(case, question.figure)
    own = next(filter(spreads.__contains__, question.own), None)
    if own is None or question.against not in spreads:
        return None
    return contrast_of(case, spreads, own=own, against=question.against, less_is_better=question.less_is_better)


def contrast_of(
    case: CaseResult, spreads: Mapping[str, Spread], *, own: str, against: str, less_is_better: bool = False
) -> Contrast:
    """Compare two peers of a case by a figure's spreads."""
    pair = spreads[own], spreads[against]
    more, less = reversed(pair) if less_is_better else pair
    outcome, doubt = judge(more, less)
    doubt = _stopped(case, (own, against)) or doubt
    return Contrast(own=own, times=more.median / less.median, outcome=outcome, doubt=doubt)


def _stopped(case: CaseResult, names: Sequence[str]) -> str:
    """Return which of these peers stopped too early for a verdict; "" if none did."""
    ended = [peer for peer in case.peers if peer.name in names and peer.skipped is not None]
    early = [peer for peer in ended if peer.num_runs < FEWEST_REPEATS]
    return f"{early[0].name} stopped after {counted(early[0].num_runs, 'repeat')}, {_NEEDED}" if early else ""


def _comparable(case: CaseResult, figure: str) -> dict[str, Spread]:
    """Return a figure of each peer that has it; one that may be zero has no ratio."""
    spreads = {peer.name: peer.figures[figure] for peer in case.peers if figure in peer.figures}
    return {name: spread for name, spread in spreads.items() if spread.low > 0}


def judge(a: Spread, b: Spread) -> tuple[BenchOutcome, str]:
    """Return whether `a` is higher than `b`, and why if that is unknown."""
    num_repeats = min(len(a.values), len(b.values))
    if num_repeats < FEWEST_REPEATS:
        verb = "is" if num_repeats == 1 else "are"
        return BenchOutcome.UNKNOWN, f"{counted(num_repeats, 'repeat')} {verb} too few, {_NEEDED} (--repeats)"
    if a.low > _MIN_GAIN * b.high:
        return BenchOutcome.FASTER, ""
    if b.low > _MIN_GAIN * a.high:
        return BenchOutcome.SLOWER, ""
    if max(a.high / b.low, b.high / a.low) <= _NEGLIGIBLE:
        return BenchOutcome.SAME, ""
    return BenchOutcome.UNKNOWN, "the ranges of the repeats overlap"


def answer(question: Question, cases: Sequence[CaseResult], found: Mapping[str, Contrast]) -> BenchVerdict:
    """Answer a question from at least one contrast, each with the name of its case or its size."""
    owns = list(dict.fromkeys(contrast.own for contrast in found.values()))
    if len(owns) > 1:
        found = {f"{name} ({contrast.own})": contrast for name, contrast in found.items()}
    where = _sizes_in_words if _first_kind(cases) else _cases_in_words
    parts = [_part(question, names, found, where) for names in _alike(found)]
    outcomes = frozenset(contrast.outcome for contrast in found.values())
    short = _ANSWERS[outcomes]
    begins_with_answer = not outcomes & _RATIOS.keys()  # "no difference", "cannot tell"
    between = "" if begins_with_answer else f"{short}, "
    return BenchVerdict(answer=short, text=f"{_subject(question, ' or '.join(owns))}: {between}{'; '.join(parts)}")


def _alike(found: Mapping[str, Contrast]) -> Iterator[list[str]]:
    """Yield the names of the contrasts of each outcome; those without one are apart by their doubts."""
    for outcome in BenchOutcome:
        by_doubt: dict[str, list[str]] = defaultdict(list)
        for name, contrast in found.items():
            if contrast.outcome is outcome:
                by_doubt[contrast.doubt].append(name)
        yield from by_doubt.values()


def _answers() -> dict[frozenset[BenchOutcome], BenchAnswer]:
    """Return the answer for each set of outcomes."""
    faster, slower, same, unknown = BenchOutcome
    rest = [frozenset(outcomes) for outcomes in ((), (same,), (unknown,), (same, unknown))]
    return {
        **{others | {faster}: BenchAnswer.YES for others in rest},
        **{others | {slower}: BenchAnswer.NO for others in rest},
        **{others | {faster, slower}: BenchAnswer.DEPENDS for others in rest},
        **{others | {unknown}: BenchAnswer.UNKNOWN for others in rest},
        frozenset({same}): BenchAnswer.SAME,
    }


_ANSWERS: Final = _answers()
_RATIOS: Final[dict[BenchOutcome, Callable[[float], float]]] = {
    BenchOutcome.FASTER: lambda times: times,
    BenchOutcome.SLOWER: lambda times: 1 / times,
}
"""The outcomes that have a ratio, in words."""


def _part(
    question: Question,
    names: Sequence[str],
    found: Mapping[str, Contrast],
    where: Callable[[Sequence[str], Sequence[str]], str],
) -> str:
    """Return the outcome of these contrasts in words, with their cases or sizes."""
    outcome, doubt = found[names[0]].outcome, found[names[0]].doubt
    is_ratio, is_everywhere = outcome in _RATIOS, len(names) == len(found)
    says_where = len(found) > 1 and (is_ratio or not is_everywhere)
    place = where(names, list(found)) if says_where else ""
    if is_ratio:
        times = [_RATIOS[outcome](found[name].times) for name in names]
        return f"{question.things} {_times(times)} {outcome}{place}"
    return f"{outcome}{place}: {doubt}" if doubt else f"{outcome}{place}"


def _times(times: Sequence[float]) -> str:
    """Return "6.4x", or "2.1 to 6.4x"."""
    low, high = _ratio(min(times)), _ratio(max(times))
    return f"{high}x" if low == high else f"{low} to {high}x"


def _ratio(times: float) -> str:
    """Return a ratio; below 2 with two digits, so that a small difference does not read "1.0x faster"."""
    if times < 1.995:
        return f"{times:.2f}"
    return f"{times:.1f}" if times < 10 else f"{times:,.0f}"


def _sizes_in_words(names: Sequence[str], all_sizes: Sequence[str]) -> str:
    """Return " from 1 MiB on" if these are the largest sizes, else their list."""
    are_largest = list(names) == list(all_sizes[-len(names) :])
    return f" from {names[0]} on" if are_largest and len(names) > 1 else f" at {_list(names)}"


def _cases_in_words(names: Sequence[str], _all_cases: Sequence[str]) -> str:
    return f" in {_list(names)}"


def _list(names: Sequence[str]) -> str:
    left = len(names) - _MOST_NAMES
    more = f" and {left} more" if left > 0 else ""
    return ", ".join(names[:_MOST_NAMES]) + more
