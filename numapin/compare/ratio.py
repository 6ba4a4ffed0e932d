"""Ratios of two variants' step times with intervals, what may be concluded, and doubts about it.

A run is one observation: the steps within a run share its placement and its neighbors, so they say little about the
next run. Both variants run in every round, and a round's ratio is free of what changed from round to round. The
estimate is the Hodges-Lehmann one (the median of the means of all pairs) of the logarithms of these ratios, which one
bad round moves little. Its standard error is that of a bootstrap over the rounds, enlarged by sqrt(n / (n - 1)); the
interval is Student's, 99 %. In 500 simulated comparisons of identical variants each, with 5 and 8 rounds and normal,
heavy-tailed, skewed and two-speed noise, 1 to 6 of the intervals missed the truth; 5 are to be expected.

Two doubts turn a verdict into NOT SETTLED. Over the second half of the steps the ratio may be another one: the first
steps lived on batches that were fetched ahead, or the steps reach an epoch border once. And a loader that fetches many
batches ahead may hide for the whole window that it is too slow.
"""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from numapin.compare.record import MOST_STEPS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

CONFIDENCE: Final = 0.99
NEGLIGIBLE: Final = 0.01
"""A difference below this share is no difference, however certain it is."""
_NUM_SAMPLES: Final = 1000
_SEED: Final = 17  # the same runs give the same interval
_FEWEST_ROUNDS: Final = 3  # two rounds that happen to agree would give a narrow interval
FEWEST_FOR_VERDICT: Final = 5
"""Rounds that a verdict takes. If each run falls on one of two speeds by chance, as when nothing binds a job to a node,
three rounds show a difference that does not exist in 3 % of comparisons, and five in 0.2 %."""
MOST_ROUNDS: Final = 50
"""The most rounds that are advised."""
_WAITS: Final = 0.05  # a loop that waits longer than this share has used up what was fetched ahead


class Verdict(StrEnum):
    """The verdict that an interval gives."""

    FASTER = "faster"
    SLOWER = "slower"
    NO_DIFFERENCE = "no difference"
    UNSETTLED = "not settled"
    UNKNOWN = "not enough runs to tell"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRatio:
    """The speed of a variant relative to `against`, with the interval from `low` to `high`.

    `low` and `high` are None if there are fewer than three rounds. `num_rounds_needed` is a guess of the number of
    rounds after which the verdict would be another one than UNKNOWN; None: it is known, or more than 50. `late` is the
    ratio over the second half of the measured steps, and `doubt` is why a difference, or that there is none, is not
    believed although the interval says so.
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


def step_ratio(
    base_s: Mapping[int, float], own_s: Mapping[int, float], *, against: str, margin: float
) -> StepRatio | None:
    """Compare step times by round; None if no round has both.

    `margin` is the share, 0.05 for 5 %, up to which an interval around 1 is narrow enough for "no difference".
    """
    logs = [math.log(base_s[number] / own_s[number]) for number in sorted(base_s.keys() & own_s.keys())]
    if not logs:
        return None
    number, center = len(logs), _hodges_lehmann(logs)
    if number < _FEWEST_ROUNDS:
        ratio = math.exp(center)
        return StepRatio(
            against=against,
            ratio=ratio,
            low=None,
            high=None,
            num_rounds=number,
            verdict=Verdict.UNKNOWN,
            num_rounds_needed=None,
        )
    chance = random.Random(_SEED)  # noqa: S311 - resampling, no secret
    centers = [_hodges_lehmann(chance.choices(logs, k=number)) for _ in range(_NUM_SAMPLES)]
    error = statistics.pstdev(centers) * math.sqrt(number / (number - 1))
    half = student_t(CONFIDENCE, number - 1) * error
    verdict = Verdict.UNKNOWN
    if number >= FEWEST_FOR_VERDICT and abs(center) > half and abs(center) > math.log1p(NEGLIGIBLE):
        verdict = Verdict.FASTER if center > 0 else Verdict.SLOWER
    elif number >= FEWEST_FOR_VERDICT and abs(center) + half <= math.log1p(margin):
        verdict = Verdict.NO_DIFFERENCE
    needed = None
    if verdict is Verdict.UNKNOWN:  # how many rounds would be narrow enough, if the noise stays the same
        is_likely = abs(center) > half / 2  # otherwise the estimate may be noise, which more rounds do not confirm
        wanted = max(math.log1p(margin) - abs(center), abs(center) if is_likely else 0.0)
        more = range(max(number + 1, FEWEST_FOR_VERDICT), MOST_ROUNDS + 1)
        spread = error * math.sqrt(number)
        needed = next((n for n in more if student_t(CONFIDENCE, n - 1) * spread / math.sqrt(n) < wanted), None)
    return StepRatio(
        against=against,
        ratio=math.exp(center),
        low=math.exp(center - half),
        high=math.exp(center + half),
        num_rounds=number,
        verdict=verdict,
        num_rounds_needed=needed,
    )


def _hodges_lehmann(values: Sequence[float]) -> float:
    """Return the median of the means of all pairs, each value with itself included."""
    return statistics.median([(a + b) / 2 for i, a in enumerate(values) for b in values[i:]])


def compare_arms(base: Arm, own: Arm, *, against: str, margin: float) -> StepRatio | None:
    """Compare the variants over the same number of steps in each round; None if no round has both."""
    pairs = {}
    for number in sorted(base.steps_s.keys() & own.steps_s.keys()):
        a, b = base.steps_s[number], own.steps_s[number]
        length = min(len(a), len(b))
        pairs[number] = a[:length], b[:length]
    halves = {number: (a[len(a) // 2 :], b[len(b) // 2 :]) for number, (a, b) in pairs.items()}
    means, late_means = _means(pairs), _means(halves)
    ratio = step_ratio(*means, against=against, margin=margin)
    late = step_ratio(*late_means, against=against, margin=margin)
    # The ratio of the two ratios: how much faster the variant is over all steps than over the second half.
    speedups, late_speedups = ({n: a[n] / b[n] for n in a} for a, b in (means, late_means))
    change = step_ratio(late_speedups, speedups, against="", margin=margin)
    if ratio is None or late is None or change is None:
        return None
    doubt = _drift(ratio, late, change, margin) or _hidden(ratio, base, own)
    ratio = replace(ratio, late=late.ratio)
    return ratio if doubt is None else replace(ratio, verdict=Verdict.UNSETTLED, doubt=doubt)


def _means(
    pairs: Mapping[int, tuple[Sequence[float], Sequence[float]]],
) -> tuple[dict[int, float], dict[int, float]]:
    """Return the mean step of each variant by round."""
    base = {number: statistics.fmean(a) for number, (a, _) in pairs.items()}
    return base, {number: statistics.fmean(b) for number, (_, b) in pairs.items()}


def _drift(ratio: StepRatio, late: StepRatio, change: StepRatio, margin: float) -> str | None:
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


def _hidden(ratio: StepRatio, base: Arm, own: Arm) -> str | None:
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


def student_t(confidence: float, freedom: int) -> float:
    """Return how many standard errors a two-sided interval reaches to each side, with `freedom` degrees of freedom.

    Exact for one and two degrees; from three on by Cornish and Fisher's series, which is at most 1 % too small.
    """
    probability = (1 + confidence) / 2
    if freedom == 1:
        return math.tan(math.pi * (probability - 0.5))
    if freedom == 2:
        return (2 * probability - 1) / math.sqrt(2 * probability * (1 - probability))
    z = statistics.NormalDist().inv_cdf(probability)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / float(freedom) ** power for power, term in enumerate(terms))
