"""The verdict of a benchmark: the answer to its question, in one line.

Two peers are compared by `base.stats.faster`, repeat by repeat. Where repeats share processes and memory, they lack the
variation between these, so a difference below 2 % does not count.

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
    from collections.abc import Mapping, Sequence

    from numapin.bench.model import CaseResult, Question

_NEEDED: Final = f"a verdict needs {FEWEST_FOR_VERDICT}"
_MIN_GAIN: Final = 1.02
_NEGLIGIBLE: Final = 0.05
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


def verdict_of(questions: Sequence[Question], cases: Sequence[CaseResult]) -> BenchVerdict:
    """Answer the first question whose peers were both measured."""
    # Of several kinds of sweeps, such as directions of a copy, the first one counts, for each GPU and node.
    kinds = [case.group.partition(" ")[0] for case in cases if case.group is not None]
    if kinds:
        cases = [case for case in cases if case.group is not None and case.group.partition(" ")[0] == kinds[0]]
    cases = sorted(cases, key=lambda case: case.num_bytes or 0)
    for question in questions:
        found: dict[str, list[Contrast]] = defaultdict(list)  # by case, or by size with one for each GPU and node
        for case in cases:
            contrast = _contrast(question, case)
            if contrast is not None:
                found[case.name if case.num_bytes is None else size_label(case.num_bytes)].append(contrast)
        if found:
            joined = {name: _joined(contrasts) for name, contrasts in found.items()}
            return _answer(question, joined, is_sweep=bool(kinds))
    own, against = questions[0].own[0], questions[0].against
    subject = questions[0].subject.replace("{own}", own)
    text = f"{subject}: {BenchAnswer.UNKNOWN}: {own} and {against} were not both measured"
    return BenchVerdict(answer=BenchAnswer.UNKNOWN, text=text)


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


def _joined(contrasts: Sequence[Contrast]) -> Contrast:
    """Return one contrast for a size that several GPUs or nodes have."""
    first = contrasts[0]
    times = statistics.median(contrast.times for contrast in contrasts)
    if len({(contrast.own, contrast.outcome) for contrast in contrasts}) > 1:
        return Contrast(own=first.own, times=times, outcome=Verdict.UNKNOWN, doubt="GPUs or nodes differ")
    doubts = dict.fromkeys(contrast.doubt for contrast in contrasts)
    return Contrast(own=first.own, times=times, outcome=first.outcome, doubt=", ".join(doubts))


def _answer(question: Question, found: Mapping[str, Contrast], *, is_sweep: bool) -> BenchVerdict:
    """Answer a question from at least one contrast, each with the name of its case or its size."""
    parts = []
    for outcome, words in _OUTCOMES.items():
        alike = {name: contrast for name, contrast in found.items() if contrast.outcome is outcome}
        if not alike:
            continue
        place = f" {'at' if is_sweep else 'in'} {', '.join(alike)}" if len(found) > 1 else ""
        if outcome in (Verdict.FASTER, Verdict.SLOWER):
            times = [one.times if outcome is Verdict.FASTER else 1 / one.times for one in alike.values()]
            low, high = _ratio_text(min(times)), _ratio_text(max(times))
            span = f"{high}x" if low == high else f"{low} to {high}x"
            parts.append(f"{question.things} {span} {words}{place}")
        else:
            doubts = ", ".join(dict.fromkeys(one.doubt for one in alike.values() if one.doubt))
            parts.append(f"{words}{place}{f': {doubts}' if doubts else ''}")

    outcomes = {contrast.outcome for contrast in found.values()}
    if {Verdict.FASTER, Verdict.SLOWER} <= outcomes:
        short = BenchAnswer.DEPENDS
    elif Verdict.FASTER in outcomes:
        short = BenchAnswer.YES
    elif Verdict.SLOWER in outcomes:
        short = BenchAnswer.NO
    else:  # the only part, or the first one, says it
        short = BenchAnswer.UNKNOWN if Verdict.UNKNOWN in outcomes else BenchAnswer.SAME
    begins_with_answer = short in (BenchAnswer.UNKNOWN, BenchAnswer.SAME)
    between = "" if begins_with_answer else f"{short}, "
    subject = question.subject.replace("{own}", " or ".join(dict.fromkeys(one.own for one in found.values())))
    return BenchVerdict(answer=short, text=f"{subject}: {between}{'; '.join(parts)}")


def _ratio_text(times: float) -> str:
    """Return a ratio; below 2 with two digits, so that a small difference does not read "1.0x faster"."""
    if times < 1.995:
        return f"{times:.2f}"
    return f"{times:.1f}" if times < 10 else f"{times:,.0f}"
