"""The verdict of `bench offload`. Pure.

Comes in: the results of its cases. Goes out: a line for each case, and the verdict.

Each numapin peer is compared with the fastest torchrun that was measured, because a user could have tuned torchrun the
same way. `verdict.judge` says whether two peers differ. The verdict is about one numapin peer: the first of `PEERS`
that was measured in the case. Of equal torchruns the luckiest is the fastest, which favors torchrun: with three, chance
alone makes an equal numapin slower in up to 3 of 70 orders instead of 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from numapin.bench.cases.offload import BASELINE, PEERS, TORCHRUNS
from numapin.bench.model import BenchAnswer, BenchVerdict, Question
from numapin.bench.verdict import BenchOutcome, answer, contrast_of, judge

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numapin.bench.model import CaseResult, Spread
    from numapin.bench.verdict import Contrast

_FIGURE: Final = "steps_per_s"
_OWN: Final = tuple(name for name in PEERS if name not in TORCHRUNS)


def offload_lines(cases: Iterable[CaseResult]) -> list[str]:
    """Return a line for each case in which both sides were measured."""
    return [_line(name, speeds) for name, speeds in _judged(cases).items()]


def offload_verdict(cases: Sequence[CaseResult]) -> BenchVerdict:
    """Return whether numapin is faster than the best torchrun, and in which cases."""
    judged = _judged(cases)
    if not judged:
        text = f"numapin instead of torchrun: {BenchAnswer.UNKNOWN}: they were not both measured in any case"
        return BenchVerdict(answer=BenchAnswer.UNKNOWN, text=text)
    found = {case.name: _contrast(case, judged[case.name]) for case in cases if case.name in judged}
    verdict = answer(_question(judged.values()), cases, found)
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


def _question(cases: Iterable[Mapping[str, Spread]]) -> Question:
    """Return the question, which names the torchruns if there was one only, and else their number."""
    torchruns = {name for speeds in cases for name in speeds if name in TORCHRUNS}
    against = f"the best of {len(torchruns)} torchruns" if len(torchruns) > 1 else next(iter(torchruns))
    return Question(
        subject=f"numapin ({{own}}) instead of {against}",
        things="steps are",
        figure=_FIGURE,
        own=_OWN,
        against=BASELINE,
    )


def _contrast(case: CaseResult, speeds: Mapping[str, Spread]) -> Contrast:
    """Compare the first of numapin's peers that was measured with the best torchrun."""
    own = next(filter(speeds.__contains__, _OWN))
    return contrast_of(case, speeds, own=own, against=_best_torchrun(speeds))


def _of_threads(cases: Iterable[Mapping[str, Spread]]) -> str:
    """Return the gain over torchrun's default from the number of threads alone."""
    pairs = [(speeds[_best_torchrun(speeds)], speeds[BASELINE]) for speeds in cases if BASELINE in speeds]
    gains = [best.median / old.median for best, old in pairs if judge(best, old)[0] is BenchOutcome.FASTER]
    if not gains:
        return ""
    least, most = f"{min(gains):.2f}", f"{max(gains):.2f}"
    times = f"{least}x" if least == most else f"{least}x to {most}x"
    return f"; threads alone (OMP_NUM_THREADS) make torchrun {times} as fast"
