"""The verdict of a benchmark: the answer to its question, in one line.

Two peers are compared by `base.stats.faster`, repeat by repeat. Where repeats share processes and memory, they lack the
variation between these, so a difference below 2 % is none.

The peer that counts is fixed by the question, because the best of several would be the one with the luckiest repeats.
The verdict names it.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from numapin.base.formats import size_label
from numapin.base.stats import FEWEST_FOR_VERDICT, Verdict, faster
from numapin.base.text import counted
from numapin.bench.model import BenchAnswer, BenchVerdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from numapin.bench.model import CaseResult, Question

_NEEDED: Final = f"a verdict needs {FEWEST_FOR_VERDICT}"
_MIN_GAIN: Final = 1.02
_NEGLIGIBLE: Final = 0.05
_MOST_NAMES: Final = 4
_OUTCOMES: Final = {
    Verdict.FASTER: "faster",
    Verdict.SLOWER: "slower",
    Verdict.NO_DIFFERENCE: "no difference",
    Verdict.UNKNOWN: "cannot tell",
}
"""The outcomes in the order in which a verdict names them, and their words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contrast:
    """Two peers in one case: `times` is how many times as fast the first one is. `doubt` explains UNKNOWN."""

    own: str
    times: float
    outcome: Verdict
    doubt: str = ""


def verdict_of(questions: Sequence[Question], cases: Sequence[CaseResult]) -> BenchVerdict | None:
    """Answer the first question whose peers were both measured; None for a benchmark without a question."""
    for question in questions:
        found = _contrasts(question, cases)
        if found:
            return answer(question, cases, found)
    if not questions:
        return None
    own, against = questions[0].own[0], questions[0].against
    subject = questions[0].subject.replace("{own}", own)
    text = f"{subject}: {BenchAnswer.UNKNOWN}: {own} and {against} were not both measured"
    return BenchVerdict(answer=BenchAnswer.UNKNOWN, text=text)


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
        return Contrast(own=first.own, times=times, outcome=Verdict.UNKNOWN, doubt="GPUs or nodes differ")
    doubts = dict.fromkeys(contrast.doubt for contrast in contrasts)
    return Contrast(own=first.own, times=times, outcome=first.outcome, doubt=", ".join(doubts))


def _contrast(question: Question, case: CaseResult) -> Contrast | None:
    """Compare the first of the question's own peers that was measured; None if one side is missing or may be zero."""
    measured = {peer.name: peer for peer in case.peers if question.figure in peer.figures}
    peers = {name: peer for name, peer in measured.items() if peer.figures[question.figure].low > 0}
    own = next(filter(peers.__contains__, question.own), None)
    if own is None or question.against not in peers:
        return None
    pair = peers[question.against], peers[own]
    # A peer that fails has no later repeat, so that equal positions are the same repeat.
    against_values, own_values = (dict(enumerate(peer.figures[question.figure].values)) for peer in pair)
    if question.less_is_better:
        found = faster(against_values, own_values, margin=_NEGLIGIBLE)
    else:  # `faster` takes times, and rates are the other way around
        found = faster(own_values, against_values, margin=_NEGLIGIBLE)
    if found is None:
        return None
    outcome, doubt = found.verdict, ""
    if outcome in (Verdict.FASTER, Verdict.SLOWER) and 1 / _MIN_GAIN < found.ratio < _MIN_GAIN:
        outcome = Verdict.NO_DIFFERENCE  # certain, but small: then the interval reaches to less than 5 %
    stopped = [peer for peer in pair if peer.skipped is not None and peer.num_runs < FEWEST_FOR_VERDICT]
    if stopped:
        doubt = f"{stopped[0].name} stopped after {counted(stopped[0].num_runs, 'repeat')}, {_NEEDED}"
    elif found.num_rounds < FEWEST_FOR_VERDICT:
        verb = "is" if found.num_rounds == 1 else "are"
        doubt = f"{counted(found.num_rounds, 'repeat')} {verb} too few, {_NEEDED} (--repeats)"
    elif outcome is Verdict.UNKNOWN:
        doubt = "the repeats differ too much"
    return Contrast(own=own, times=found.ratio, outcome=outcome, doubt=doubt)


def answer(question: Question, cases: Sequence[CaseResult], found: Mapping[str, Contrast]) -> BenchVerdict:
    """Answer a question from at least one contrast, each with the name of its case or its size."""
    owns = list(dict.fromkeys(contrast.own for contrast in found.values()))
    if len(owns) > 1:
        found = {f"{name} ({contrast.own})": contrast for name, contrast in found.items()}
    where = _sizes_in_words if _first_kind(cases) else _cases_in_words
    parts = [_part(question, names, found, where) for names in _alike(found)]
    outcomes = frozenset(contrast.outcome for contrast in found.values())
    is_faster, is_slower = Verdict.FASTER in outcomes, Verdict.SLOWER in outcomes
    if is_faster and is_slower:
        short = BenchAnswer.DEPENDS
    elif is_faster or is_slower:
        short = BenchAnswer.YES if is_faster else BenchAnswer.NO
    else:
        short = BenchAnswer.UNKNOWN if Verdict.UNKNOWN in outcomes else BenchAnswer.SAME
    begins_with_answer = not (is_faster or is_slower)  # "no difference", "cannot tell"
    between = "" if begins_with_answer else f"{short}, "
    subject = question.subject.replace("{own}", " or ".join(owns))
    return BenchVerdict(answer=short, text=f"{subject}: {between}{'; '.join(parts)}")


def _alike(found: Mapping[str, Contrast]) -> Iterator[list[str]]:
    """Yield the names of the contrasts of each outcome; those without one are apart by their doubts."""
    for outcome in _OUTCOMES:
        by_doubt: dict[str, list[str]] = defaultdict(list)
        for name, contrast in found.items():
            if contrast.outcome is outcome:
                by_doubt[contrast.doubt].append(name)
        yield from by_doubt.values()


def _part(
    question: Question,
    names: Sequence[str],
    found: Mapping[str, Contrast],
    where: Callable[[Sequence[str], Sequence[str]], str],
) -> str:
    """Return the outcome of these contrasts in words, with their cases or sizes."""
    outcome, doubt = found[names[0]].outcome, found[names[0]].doubt
    words, is_everywhere = _OUTCOMES[outcome], len(names) == len(found)
    is_faster = outcome is Verdict.FASTER
    is_ratio = is_faster or outcome is Verdict.SLOWER
    says_where = len(found) > 1 and (is_ratio or not is_everywhere)
    place = where(names, list(found)) if says_where else ""
    if is_ratio:
        times = [found[name].times for name in names]
        return f"{question.things} {_times(times if is_faster else [1 / each for each in times])} {words}{place}"
    return f"{words}{place}: {doubt}" if doubt else f"{words}{place}"


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
