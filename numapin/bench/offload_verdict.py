"""The verdict of `bench offload`. Pure.

Comes in: the results of its cases. Goes out: a line for each case, and the verdict.

Each numapin peer is compared with the fastest torchrun that was measured, because a user could have tuned torchrun the
same way. `verdict.judge` says whether two peers differ. The verdict is about numapin's fastest peer of each case; the
choice among several peers favors luck, so a gain in one of many cases is worth a second run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from numapin.bench.cases.offload import BASELINE, TORCHRUNS
from numapin.bench.model import BenchAnswer, BenchVerdict, Question
from numapin.bench.verdict import BenchOutcome, Contrast, answer, judge

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numapin.bench.model import CaseResult, Spread

_FIGURE: Final = "steps_per_s"
_SUBJECT: Final = "numapin instead of the best torchrun"
_QUESTION: Final = Question(subject=_SUBJECT, things="steps are", figure=_FIGURE, own=(), against=BASELINE)


def offload_lines(cases: Iterable[CaseResult]) -> list[str]:
    """Return a line for each case in which both sides were measured."""
    return [_line(name, speeds) for name, speeds in _judged(cases).items()]


def offload_verdict(cases: Sequence[CaseResult]) -> BenchVerdict:
    """Return whether numapin is faster than the best torchrun, and in which cases."""
    judged = _judged(cases)
    if not judged:
        text = f"{_SUBJECT}: {BenchAnswer.UNKNOWN}: torchrun and numapin were not both measured in any case"
        return BenchVerdict(answer=BenchAnswer.UNKNOWN, text=text)
    found = dict(_of_best(name, speeds) for name, speeds in judged.items())
    verdict = answer(_QUESTION, cases, found)
    return BenchVerdict(answer=verdict.answer, text=verdict.text + _of_threads(judged.values()))


def _judged(cases: Iterable[CaseResult]) -> dict[str, dict[str, Spread]]:
    """Return the speeds of each case in which both launchers were measured, by its name."""
    measured = {case.name: _speeds(case) for case in cases}
    return {name: speeds for name, speeds in measured.items() if _has_both(speeds)}


def _speeds(case: CaseResult) -> dict[str, Spread]:
    return {peer.name: peer.figures[_FIGURE] for peer in case.peers if _FIGURE in peer.figures}


def _has_both(speeds: Mapping[str, Spread]) -> bool:
    return bool(speeds.keys() & TORCHRUNS) and bool(_own_ways(speeds))


def _own_ways(speeds: Mapping[str, Spread]) -> list[str]:
    return [name for name in speeds if name not in TORCHRUNS]


def _best_torchrun(speeds: Mapping[str, Spread]) -> str:
    return max((name for name in speeds if name in TORCHRUNS), key=lambda name: speeds[name].median)


def _line(case: str, speeds: Mapping[str, Spread]) -> str:
    """Return how fast each numapin peer is in a case, compared with the best torchrun."""
    best = _best_torchrun(speeds)
    compared = [f"{name} {_in_words(speeds[name], speeds[best])}" for name in _own_ways(speeds)]
    tuned = ""
    if best != BASELINE and BASELINE in speeds:
        tuned = f" (itself {_in_words(speeds[best], speeds[BASELINE])}: {BASELINE})"
    return f"{case}: against {best}{tuned}: {', '.join(compared)}"


def _in_words(own: Spread, other: Spread) -> str:
    outcome, _ = judge(own, other)
    if outcome is BenchOutcome.SAME:
        return str(outcome)
    times = f"{own.median / other.median:.2f}x"
    return times if outcome is BenchOutcome.UNKNOWN else f"{times} ({outcome})"


def _of_best(case: str, speeds: Mapping[str, Spread]) -> tuple[str, Contrast]:
    """Return a case with numapin's fastest peer there, and how it compares with the best torchrun."""
    best = speeds[_best_torchrun(speeds)]
    name = max(_own_ways(speeds), key=lambda name: speeds[name].median)
    outcome, doubt = judge(speeds[name], best)
    contrast = Contrast(own=name, times=speeds[name].median / best.median, outcome=outcome, doubt=doubt)
    return f"{case} ({name})", contrast


def _of_threads(cases: Iterable[Mapping[str, Spread]]) -> str:
    """Return the gain over torchrun's default from the number of threads alone."""
    pairs = [(speeds[_best_torchrun(speeds)], speeds[BASELINE]) for speeds in cases if BASELINE in speeds]
    gains = [best.median / old.median for best, old in pairs if judge(best, old)[0] is BenchOutcome.FASTER]
    if not gains:
        return ""
    least, most = f"{min(gains):.2f}", f"{max(gains):.2f}"
    times = f"{least}x" if least == most else f"{least}x to {most}x"
    return f"; threads alone (OMP_NUM_THREADS) make torchrun {times} as fast"
