"""The verdict of `bench offload`. Pure.

Comes in: the results of its cases. Goes out: a line for each case, and the verdict.

Each numapin peer is compared with the fastest torchrun that was measured, because a user could have tuned torchrun the
same way. Two peers differ if the ranges of their repeats are at least 2 % apart; otherwise there is no difference. For
two equal peers, noise alone separates the ranges with a probability of 2/20 at three repeats and 2/70 at four.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from numapin.base.plural import counted
from numapin.bench.cases.offload import BASELINE, TORCHRUNS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numapin.bench.model import CaseResult, Spread

FEWEST_REPEATS: Final = 3
_FIGURE: Final = "steps_per_s"
_MIN_GAP: Final = 1.02
_SAME: Final = "no difference"


def offload_verdict(cases: Iterable[CaseResult]) -> list[str]:
    """Return a line for each case in which both sides were measured, and the verdict as the last line."""
    measured = {case.name: _speeds(case) for case in cases}
    judged = {name: speeds for name, speeds in measured.items() if _sides(speeds)}
    if not judged:
        return ["verdict: cannot tell: torchrun and numapin were not both measured in any case"]
    fewest = min(len(spread.values) for speeds in judged.values() for spread in speeds.values())
    is_enough = fewest >= FEWEST_REPEATS
    lines = [_line(name, speeds, judge=is_enough) for name, speeds in judged.items()]
    return [*lines, _verdict(judged) if is_enough else f"verdict: cannot tell: {_too_few(fewest)}"]


def _too_few(num_repeats: int) -> str:
    are = "is" if num_repeats == 1 else "are"
    return f"{counted(num_repeats, 'repeat')} {are} too few; use --repeats {FEWEST_REPEATS} or more"


def _speeds(case: CaseResult) -> dict[str, Spread]:
    return {peer.name: peer.figures[_FIGURE] for peer in case.peers if _FIGURE in peer.figures}


def _sides(speeds: Mapping[str, Spread]) -> bool:
    """Return whether both launchers were measured."""
    return bool(speeds.keys() & TORCHRUNS) and bool(_own_ways(speeds))


def _own_ways(speeds: Mapping[str, Spread]) -> list[str]:
    return [name for name in speeds if name not in TORCHRUNS]


def _best_torchrun(speeds: Mapping[str, Spread]) -> str:
    return max((name for name in speeds if name in TORCHRUNS), key=lambda name: speeds[name].median)


def _line(case: str, speeds: Mapping[str, Spread], *, judge: bool) -> str:
    """Return how fast each numapin peer is in a case, compared with the best torchrun."""
    best = _best_torchrun(speeds)
    compared = [f"{name} {_in_words(speeds[name], speeds[best], judge=judge)}" for name in _own_ways(speeds)]
    tuned = ""
    if best != BASELINE and BASELINE in speeds:
        tuned = f" (itself {_in_words(speeds[best], speeds[BASELINE], judge=judge)}: {BASELINE})"
    return f"{case}: against {best}{tuned}: {', '.join(compared)}"


def _in_words(own: Spread, other: Spread, *, judge: bool) -> str:
    times = own.median / other.median
    if not judge:
        return f"{times:.2f}x"
    relation = _relation(own, other)
    return _SAME if relation == _SAME else f"{times:.2f}x ({relation})"


def _relation(own: Spread, other: Spread) -> str:
    if own.low > other.high * _MIN_GAP:
        return "faster"
    return "slower" if other.low > own.high * _MIN_GAP else _SAME


def _verdict(judged: Mapping[str, Mapping[str, Spread]]) -> str:
    """Return the verdict: where numapin is faster than the best torchrun, and the best way there."""
    gains = [found for name, speeds in judged.items() if (found := _gain(name, speeds))]
    threads = _of_threads(judged.values())
    if not gains:
        return f"verdict: {_SAME} between numapin and the best torchrun in any case{threads}"
    return f"verdict: numapin is faster than the best torchrun: {'; '.join(gains)}{threads}"


def _gain(case: str, speeds: Mapping[str, Spread]) -> str:
    """Return the best way in a case, if it is faster than the best torchrun."""
    best = speeds[_best_torchrun(speeds)]
    name = max(_own_ways(speeds), key=lambda name: speeds[name].median)
    is_faster = _relation(speeds[name], best) == "faster"
    return f"{case} {speeds[name].median / best.median:.2f}x ({name})" if is_faster else ""


def _of_threads(cases: Iterable[Mapping[str, Spread]]) -> str:
    """Return the gain over torchrun's default from the number of threads alone."""
    pairs = [(speeds[_best_torchrun(speeds)], speeds[BASELINE]) for speeds in cases if BASELINE in speeds]
    gains = [best.median / default.median for best, default in pairs if _relation(best, default) == "faster"]
    if not gains:
        return ""
    least, most = f"{min(gains):.2f}", f"{max(gains):.2f}"
    times = f"{least}x" if least == most else f"{least}x to {most}x"
    return f"; threads alone (OMP_NUM_THREADS) make torchrun {times} as fast"
