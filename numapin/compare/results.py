"""The results of one variant over its runs, as data."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from numapin.base.redact import HIDDEN, is_secret, without_secrets
from numapin.bench.model import Spread
from numapin.compare.figures import STEP
from numapin.compare.ratio import Arm

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numapin.compare.measure import ComparedRun
    from numapin.compare.ratio import StepRatio
    from numapin.compare.variants import Variant


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRound:
    """One run: its figures, and the time of each measured step of the slowest rank, after `num_skipped` others.

    `order` is the place of the run among all runs.
    """

    round: int
    order: int
    took_s: float
    figures: Mapping[str, float]
    num_skipped: int
    steps_s: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantResult:
    """A variant with its figures over the runs. `ratio` is None for the baseline, and without a common round.

    `ratio_to_threads` compares numapin with torchrun and as many threads, if that was measured. `num_ahead` is the most
    batches that a loader fetches ahead. `num_ranks` and `step_unit` are the same in all runs; None without a run.
    """

    name: str
    command: tuple[str, ...]
    variables: Mapping[str, str]
    num_runs: int
    num_ranks: int | None
    step_unit: str | None
    num_ahead: int | None
    figures: Mapping[str, Spread]
    ratio: StepRatio | None
    ratio_to_threads: StepRatio | None
    failure: str | None
    notes: tuple[str, ...]
    runs: tuple[MeasuredRound, ...]

    @property
    def num_steps(self) -> int:
        """The fewest steps that a run has measured."""
        return min((len(run.steps_s) for run in self.runs), default=0)

    @property
    def samples_per_step(self) -> float | None:
        """The median number of samples of all ranks in a step; None: unknown."""
        known = [run.figures for run in self.runs if "samples_per_s" in run.figures]
        return statistics.median(one["samples_per_s"] * one[STEP] for one in known) if known else None

    @property
    def arm(self) -> Arm:
        """Its runs, to be compared with another variant's."""
        return Arm(
            steps_s={run.round: run.steps_s for run in self.runs},
            num_steps=min((run.num_skipped + len(run.steps_s) for run in self.runs), default=0),
            num_ahead=self.num_ahead or 0,
            wait_share=self.figures["wait_share"].median if "wait_share" in self.figures else 0.0,
        )


def result_of(variant: Variant, runs: Iterable[ComparedRun]) -> VariantResult:
    """Return the results of a variant, whose own texts are shown without secrets; its ratios are not there yet."""
    own = [run for run in runs if run.variant == variant.name]
    counted = [run for run in own if run.round is not None and STEP in run.result.figures]
    results = [run.result for run in counted]
    names = dict.fromkeys(name for result in results for name in result.figures)
    (shown_name,) = without_secrets([variant.name])
    return VariantResult(
        name=shown_name,
        command=tuple(without_secrets(variant.shown)),
        variables={
            name: HIDDEN if is_secret(name) else without_secrets([value])[0]
            for name, value in variant.variables.items()
        },
        num_runs=len(counted),
        num_ranks=results[0].num_ranks if results else None,
        step_unit=results[0].unit if results else None,
        num_ahead=max((result.num_ahead for result in results), default=None),
        figures={
            name: Spread.of([result.figures[name] for result in results if name in result.figures]) for name in names
        },
        ratio=None,
        ratio_to_threads=None,
        failure=next((run.result.failure for run in own if run.result.failure is not None), None),
        notes=tuple(dict.fromkeys(note for result in results for note in result.notes)),
        runs=tuple(
            MeasuredRound(
                round=run.round or 0,
                order=run.order,
                took_s=run.took_s,
                figures=dict(run.result.figures),
                num_skipped=run.result.num_skipped,
                steps_s=run.result.steps_s,
            )
            for run in counted
        ),
    )
