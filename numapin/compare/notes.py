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
) -> list[str]:
    """Return the notes on these results, the first of which was to be the baseline."""
    measured = [result for result in results if result.num_runs]
    is_replaced = baseline not in (None, results[0].name) and len(measured) > 1
    notes = [_other_baseline(results[0].name, baseline)] if is_replaced else []
    return [
        *notes,
        *_unequal(measured),
        *_uneven(measured),
        *_hidden(measured),
        *_beside(measured, num_cpus),
        *_short(measured, settings),
    ]


def _other_baseline(first: str, baseline: str | None) -> str:
    return f"{first} was not measured, so the others are compared with {baseline}"


def _unequal(results: Sequence[VariantResult]) -> Iterator[str]:
    """Yield the differences between the variants' work."""
    work = "the variants do not do the same work, because their {} differ ({})"
    ranks = {result.name: str(result.num_ranks) for result in results}
    units = {result.name: str(result.step_unit) for result in results}
    lengths = {result.name: str(result.num_steps) for result in results}
    yield from _differ(ranks, work.format("ranks", "{}"))
    yield from _differ(units, work.format("steps", "{}"))
    yield from _differ(_sample_counts(results), work.format("samples per step", "{}"))
    yield from _differ(lengths, "the numbers of steps differ ({}); each ratio uses the same number of steps from both")


def _differ(values: Mapping[str, str], sentence: str) -> Iterator[str]:
    """Yield the sentence with the value of each variant, if they are not all the same."""
    if len(set(values.values())) > 1:
        yield sentence.format(", ".join(f"{name}: {value}" for name, value in values.items()))


def _sample_counts(results: Sequence[VariantResult]) -> dict[str, str]:
    """Return the samples per step of each variant that has them; none if they differ by a batch here and there only."""
    sizes = {result.name: size for result in results if (size := result.samples_per_step) is not None}
    is_same = max(sizes.values(), default=0) <= min(sizes.values(), default=0) * _SAME_SAMPLES
    return {} if is_same else {name: f"{size:.0f}" for name, size in sizes.items()}


def _uneven(results: Sequence[VariantResult]) -> Iterator[str]:
    """Yield a note if the mean of a variant's steps is far above their median."""
    uneven = [result.name for result in results if _is_uneven(result)]
    if uneven:
        yield f"steps are uneven in {', '.join(uneven)}: a few take most of the time; choose --steps to span an epoch"


def _is_uneven(result: VariantResult) -> bool:
    return statistics.median([run.figures[STEP] / run.figures["step_median_s"] for run in result.runs]) > _UNEVEN


def _hidden(results: Sequence[VariantResult]) -> Iterator[str]:
    """Yield a note for each variant whose loader may be too slow without a wait in the measured steps."""
    for result in results:
        arm = result.arm
        if arm.hidden_share > _HIDDEN:
            yield (
                f"{result.name} fetches {arm.num_ahead} batches ahead, so {arm.num_steps} steps do not show a loader "
                f"that is up to {arm.hidden_share:.0%} too slow; measure more (--steps, --seconds)"
            )


def _beside(results: Sequence[VariantResult], num_cpus: int | None) -> Iterator[str]:
    """Yield a note if other programs used the CPUs."""
    shares = [result.figures["other_cpus"].median for result in results if "other_cpus" in result.figures]
    if shares and num_cpus and max(shares) > _BUSY * num_cpus:
        yield f"other programs used up to {max(shares):.1f} of {num_cpus} CPUs during the measured steps"


def _short(results: Sequence[VariantResult], settings: Mapping[str, object]) -> Iterator[str]:
    """Yield a note if all runs measured few steps in little time, because the steps of the first run took longer."""
    steps, seconds = settings.get("steps"), settings.get("seconds")
    runs = [run for result in results for run in result.runs]
    is_explained = any(result.notes for result in results)
    if is_explained or not runs or not isinstance(steps, int) or not isinstance(seconds, float):
        return
    longest_s, most = max(sum(run.steps_s) for run in runs), max(len(run.steps_s) for run in runs)
    if most < steps and longest_s < _SHORT * seconds:
        yield (
            f"the runs measured only {most} of {steps} steps, in {longest_s:.2g} s or less of --seconds {seconds:g}, "
            "because no more fitted in the run before, whose steps took longer; choose a larger --seconds or --skip"
        )
