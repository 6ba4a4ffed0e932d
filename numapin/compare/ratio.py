"""The ratio of two variants' step times, and doubts about it.

Two doubts turn a verdict into NOT SETTLED. Over the second half of the steps the ratio may be another one: the first
steps lived on batches that were fetched ahead, or the steps reach an epoch border once. And a loader that fetches many
batches ahead may hide for the whole window that it is too slow.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Final

from numapin.base.stats import Faster, Verdict, faster
from numapin.compare.record import MOST_STEPS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_WAITS: Final = 0.05  # a loop that waits longer than this share has used up what was fetched ahead


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRatio:
    """The speed of a variant relative to `against`, as in `Faster`.

    `late` is the ratio over the second half of the measured steps, and `doubt` is why a difference, or that there is
    none, is not believed although the interval says so.
    """

    against: str
    ratio: float
    low: float | None
    high: float | None
    num_rounds: int
    verdict: Verdict
    num_rounds_needed: int | None
    late: float | None = None
    doubt: str | None = None


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
    means: tuple[dict[int, float], dict[int, float]] = {}, {}
    late_means: tuple[dict[int, float], dict[int, float]] = {}, {}
    for number in sorted(base.steps_s.keys() & own.steps_s.keys()):
        pair = base.steps_s[number], own.steps_s[number]
        length = min(map(len, pair))
        for side, steps_s in enumerate(pair):
            means[side][number] = statistics.fmean(steps_s[:length])
            late_means[side][number] = statistics.fmean(steps_s[length // 2 : length])
    ratio, late = faster(*means, margin=margin), faster(*late_means, margin=margin)
    # The ratio of the two ratios: how much faster the variant is over all steps than over the second half.
    speedups, late_speedups = ({n: a[n] / b[n] for n in a} for a, b in (means, late_means))
    change = faster(late_speedups, speedups, margin=margin)
    if ratio is None or late is None or change is None:
        return None
    doubt = _drift(ratio, late, change, margin) or _hidden(ratio, base, own)
    found = StepRatio(against=against, **asdict(ratio), late=late.ratio)
    return found if doubt is None else replace(found, verdict=Verdict.UNSETTLED, doubt=doubt)


def _drift(ratio: Faster, late: Faster, change: Faster, margin: float) -> str | None:
    """Return the doubt if the second half of the steps shows a smaller difference, or a new one."""
    if ratio.verdict is Verdict.UNKNOWN or change.verdict not in (Verdict.FASTER, Verdict.SLOWER):
        return None  # chance explains it
    is_large = abs(math.log(change.ratio)) > math.log1p(margin)
    says_otherwise = late.verdict is not ratio.verdict
    if ratio.verdict is Verdict.NO_DIFFERENCE:
        is_doubtful = says_otherwise and is_large
    else:
        shrinks = (ratio.ratio > 1) != (change.ratio > 1)
        is_doubtful = shrinks and (is_large or says_otherwise)
    doubt = f"over the second half of the steps it is {late.ratio:.2f}x; measure more of them (--steps, --seconds)"
    return doubt if is_doubtful else None


def _hidden(ratio: Faster, base: Arm, own: Arm) -> str | None:
    """Return the doubt if the faster variant fetches more ahead, and this may hide that it is no faster."""
    if ratio.verdict not in (Verdict.FASTER, Verdict.SLOWER):
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
