"""The results of one variant over its runs, as data."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from numapin.base.redact import HIDDEN, is_secret, without_secrets
from numapin.bench.model import Spread
from numapin.compare.figures import STEP
from numapin.compare.ratio import Arm

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numapin.compare.job import JobResult
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
    batches that a loader fetches ahead.
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
    def step_s(self) -> float | None:
        """The median step time over the runs."""
        return self._median(STEP)

    def _median(self, figure: str) -> float | None:
        return self.figures[figure].median if figure in self.figures else None

    @property
    def num_steps(self) -> int:
        """The fewest steps that a run has measured."""
        return min((len(run.steps_s) for run in self.runs), default=0)

    @property
    def samples_per_step(self) -> float | None:
        """The median number of samples of all ranks in a step; None: unknown."""
        if "samples_per_s" not in self.figures:
            return None
        return statistics.median(
            run.figures["samples_per_s"] * run.figures[STEP] for run in self.runs if "samples_per_s" in run.figures
        )

    @property
    def arm(self) -> Arm:
        """Its runs, to be compared with another variant's."""
        return Arm(
            steps_s={run.round: run.steps_s for run in self.runs},
            num_steps=min((run.num_skipped + len(run.steps_s) for run in self.runs), default=0),
            num_ahead=self.num_ahead or 0,
            wait_share=self._median("wait_share") or 0.0,
        )


def result_of(variant: Variant, runs: Iterable[ComparedRun]) -> VariantResult:
    """Return the results of a variant; its ratios are not there yet."""
    own = [run for run in runs if run.variant == variant.name]
    counted = list(filter(_counts, own))
    results = [run.result for run in counted]
    num_ranks, unit = _ranks_and_unit(results)
    return VariantResult(
        name=shown_name(variant),
        command=tuple(without_secrets(variant.shown)),
        variables=_shown_variables(variant.variables),
        num_runs=len(counted),
        num_ranks=num_ranks,
        step_unit=unit,
        num_ahead=max((result.num_ahead for result in results), default=None),
        figures=_spreads(results),
        ratio=None,
        ratio_to_threads=None,
        failure=_failure(own),
        notes=_different_notes(results),
        runs=tuple(map(_round_of, counted)),
    )


def _counts(run: ComparedRun) -> bool:
    return run.round is not None and STEP in run.result.figures


def _ranks_and_unit(results: Sequence[JobResult]) -> tuple[int | None, str | None]:
    """Return the number of ranks and the unit of steps, which all runs of a variant share; None without a run."""
    return (results[0].num_ranks, results[0].unit) if results else (None, None)


def _different_notes(results: Sequence[JobResult]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(chain.from_iterable(result.notes for result in results)))


def _failure(runs: Iterable[ComparedRun]) -> str | None:
    return next((run.result.failure for run in runs if run.result.failure is not None), None)


def _shown_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables; a secret one has no value."""
    shown = {name: without_secrets([value])[0] for name, value in variables.items()}
    return shown | dict.fromkeys(filter(is_secret, variables), HIDDEN)


def shown_name(variant: Variant) -> str:
    """Return the name of a variant, which may be a text of the user's, without secrets."""
    return without_secrets([variant.name])[0]


def _round_of(run: ComparedRun) -> MeasuredRound:
    return MeasuredRound(
        round=run.round or 0,
        order=run.order,
        took_s=run.took_s,
        figures=dict(run.result.figures),
        num_skipped=run.result.num_skipped,
        steps_s=run.result.steps_s,
    )


def _spreads(results: Sequence[JobResult]) -> dict[str, Spread]:
    """Return every figure over the runs that have it."""
    names = dict.fromkeys(chain.from_iterable(result.figures for result in results))
    return {name: _spread(results, name) for name in names}


def _spread(results: Sequence[JobResult], name: str) -> Spread:
    return Spread.of([result.figures[name] for result in results if name in result.figures])
