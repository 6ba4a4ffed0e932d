"""Remarks on a comparison that its ratios do not show."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Final

from numapin.compare.figures import STEP

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numapin.compare.results import VariantResult

_UNEVEN: Final = 1.5
_HIDDEN: Final = 0.1
_SAME_SAMPLES: Final = 1.02
_BUSY: Final = 0.05  # of the CPUs
_SHORT: Final = 0.25  # of --seconds


def notes_on(
    results: Sequence[VariantResult], *, baseline: str | None, num_cpus: int | None, settings: Mapping[str, object]
) -> Iterator[str]:
    """Yield the notes on these results, the first of which was to be the baseline."""
    measured = [result for result in results if result.num_runs]
    if baseline not in (None, results[0].name) and len(measured) > 1:
        yield f"{results[0].name} was not measured, so the others are compared with {baseline}"

    # Differences between the variants' work.
    work = "the variants do not do the same work, because their {} differ ({})"
    samples = {result.name: size for result in measured if (size := result.samples_per_step) is not None}
    if samples and max(samples.values()) <= min(samples.values()) * _SAME_SAMPLES:
        samples = {}  # by a batch here and there only
    differing = {
        work.format("ranks", "{}"): {result.name: str(result.num_ranks) for result in measured},
        work.format("steps", "{}"): {result.name: str(result.step_unit) for result in measured},
        work.format("samples per step", "{}"): {name: f"{size:.0f}" for name, size in samples.items()},
        "the numbers of steps differ ({}); each ratio uses the same number of steps from both": {
            result.name: str(result.num_steps) for result in measured
        },
    }
    for sentence, values in differing.items():
        if len(set(values.values())) > 1:
            yield sentence.format(", ".join(f"{name}: {value}" for name, value in values.items()))

    # Steps whose mean is far above their median, and loaders that may be too slow without a wait in these steps.
    uneven = [
        result.name
        for result in measured
        if statistics.median(run.figures[STEP] / run.figures["step_median_s"] for run in result.runs) > _UNEVEN
    ]
    if uneven:
        yield f"steps are uneven in {', '.join(uneven)}: a few take most of the time; choose --steps to span an epoch"
    for result in measured:
        arm = result.arm
        if arm.hidden_share > _HIDDEN:
            yield (
                f"{result.name} fetches {arm.num_ahead} batches ahead, so {arm.num_steps} steps do not show a loader "
                f"that is up to {arm.hidden_share:.0%} too slow; measure more (--steps, --seconds)"
            )

    shares = [result.figures["other_cpus"].median for result in measured if "other_cpus" in result.figures]
    if shares and num_cpus and max(shares) > _BUSY * num_cpus:
        yield f"other programs used up to {max(shares):.1f} of {num_cpus} CPUs during the measured steps"

    # All runs measured few steps in little time, because the steps of the first run took longer.
    steps, seconds = settings.get("steps"), settings.get("seconds")
    runs = [run for result in measured for run in result.runs]
    is_explained = any(result.notes for result in measured)
    if is_explained or not runs or not isinstance(steps, int) or not isinstance(seconds, float):
        return
    longest_s, most = max(sum(run.steps_s) for run in runs), max(len(run.steps_s) for run in runs)
    if most < steps and longest_s < _SHORT * seconds:
        yield (
            f"the runs measured only {most} of {steps} steps, in {longest_s:.2g} s or less of --seconds {seconds:g}, "
            "because no more fitted in the run before, whose steps took longer; choose a larger --seconds or --skip"
        )
