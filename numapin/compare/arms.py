"""The ratio of two variants from the steps of their runs, and the doubts about it. Pure.

Comes in: the measured steps of two variants by round. Goes out: a `StepRatio`, in each round over as many steps
of the one as of the other.

Two doubts turn a verdict into NOT SETTLED. Over the second half of the steps the ratio may be another one: the first
steps lived on batches that were fetched ahead, or the steps reach an epoch border once. And a loader that fetches many
batches ahead may hide for the whole window that it is too slow.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from numapin.compare.ratio import StepRatio, Verdict, step_ratio
from numapin.compare.record import MOST_STEPS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import TypeAlias

    _Pairs: TypeAlias = Mapping[int, tuple[Sequence[float], Sequence[float]]]

_DIFFERENCES: Final = (Verdict.FASTER, Verdict.SLOWER)
_WAITS: Final = 0.05  # a loop that waits longer than this share has used up what was fetched ahead


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """The runs of a variant by round: the steps in seconds.

    `num_steps` is the number of steps from the start of the script to the end of the window; `num_ahead`, of batches
    that its loader fetches ahead; `wait_share`, the share of the time that it waits for batches.
    """

    steps_s: Mapping[int, Sequence[float]]
    num_steps: int
    num_ahead: int
    wait_share: float

    @property
    def hidden_share(self) -> float:
        """The share by which its loader may be too slow without a wait in the window."""
        if self.wait_share > _WAITS or not self.num_ahead:
            return 0.0
        return min(self.num_ahead / max(self.num_steps, 1), 1.0)


def compare_arms(base: Arm, own: Arm, *, against: str, margin: float) -> StepRatio | None:
    """Compare the variants over the same number of steps in each round; None if no round has both."""
    pairs = _pairs_of(base, own)
    ratio = _ratio(pairs, against=against, margin=margin)
    late = _ratio(_second_halves(pairs), against=against, margin=margin)
    if ratio is None or late is None:
        return None
    ratio = replace(ratio, late=late.ratio)
    doubt = _drift(ratio, late, pairs, margin) or _hidden(ratio, base, own)
    return ratio if doubt is None else replace(ratio, verdict=Verdict.UNSETTLED, doubt=doubt)


def _pairs_of(base: Arm, own: Arm) -> _Pairs:
    """Return the steps of both by round, for the rounds that both have."""
    rounds = sorted(base.steps_s.keys() & own.steps_s.keys())
    return {number: _equally_long(base.steps_s[number], own.steps_s[number]) for number in rounds}


def _equally_long(a: Sequence[float], b: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    number = min(len(a), len(b))
    return a[:number], b[:number]


def _second_halves(pairs: _Pairs) -> _Pairs:
    return {number: (_second_half(a), _second_half(b)) for number, (a, b) in pairs.items()}


def _second_half(steps: Sequence[float]) -> Sequence[float]:
    return steps[len(steps) // 2 :]


def _ratio(pairs: _Pairs, *, against: str, margin: float) -> StepRatio | None:
    base = {number: statistics.fmean(a) for number, (a, _) in pairs.items()}
    own = {number: statistics.fmean(b) for number, (_, b) in pairs.items()}
    return step_ratio(base, own, against=against, margin=margin)


def _drift(ratio: StepRatio, late: StepRatio, pairs: _Pairs, margin: float) -> str | None:
    """Return the doubt if the second half of the steps shows a smaller difference, or a new one."""
    if ratio.verdict is Verdict.UNKNOWN:
        return None
    change = step_ratio(_speedups(_second_halves(pairs)), _speedups(pairs), against="", margin=margin)
    if change is None or change.verdict not in _DIFFERENCES:
        return None  # chance explains it
    doubt = f"over the second half of the steps it is {late.ratio:.2f}x; measure more of them (--steps, --seconds)"
    return doubt if _is_doubtful(ratio, late, change, margin) else None


def _is_doubtful(ratio: StepRatio, late: StepRatio, change: StepRatio, margin: float) -> bool:
    """Return whether a change of the ratio matters for its verdict."""
    is_large = abs(math.log(change.ratio)) > math.log1p(margin)
    says_otherwise = late.verdict is not ratio.verdict
    if ratio.verdict is Verdict.NO_DIFFERENCE:
        return says_otherwise and is_large
    shrinks = (ratio.ratio > 1) != (change.ratio > 1)
    return shrinks and (is_large or says_otherwise)


def _speedups(pairs: _Pairs) -> dict[int, float]:
    return {number: statistics.fmean(a) / statistics.fmean(b) for number, (a, b) in pairs.items()}


def _hidden(ratio: StepRatio, base: Arm, own: Arm) -> str | None:
    """Return the doubt if the faster variant fetches more ahead, and this may hide that it is no faster."""
    if ratio.verdict not in _DIFFERENCES:
        return None
    fast, slow = (own, base) if ratio.verdict is Verdict.FASTER else (base, own)
    gain = max(ratio.ratio, 1 / ratio.ratio)
    if fast.num_ahead <= slow.num_ahead or gain * (1 - fast.hidden_share) > 1:
        return None
    needed = min(math.ceil(fast.num_ahead / (1 - 1 / gain)), MOST_STEPS)
    return (
        f"the faster one fetches {fast.num_ahead} batches ahead, and only {fast.num_steps} steps were made, so it may "
        f"not have had to wait yet; measure more: --steps {needed} --seconds 60"
    )
