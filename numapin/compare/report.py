"""The report of `numapin compare` as data and JSON. Pure.

Comes in: variants, and the runs that were made. Goes out: a `CompareReport` (schema numapin.compare/1).
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from itertools import chain
from typing import TYPE_CHECKING, Final

from numapin.bench.model import Spread
from numapin.compare.figures import STEP
from numapin.compare.ratio import CONFIDENCE, StepRatio, Verdict, step_ratio

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numapin.compare.measure import ComparedRun
    from numapin.compare.variants import Variant

SCHEMA: Final = "numapin.compare/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRound:
    """One run: its figures, and the time of each measured step of the slowest rank."""

    round: int
    took_s: float
    figures: Mapping[str, float]
    steps_s: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantResult:
    """A variant with its figures over the runs. `ratio` is None for the baseline, and without a common round."""

    name: str
    command: tuple[str, ...]
    variables: Mapping[str, str]
    num_runs: int
    num_ranks: int | None
    step_unit: str | None
    figures: Mapping[str, Spread]
    ratio: StepRatio | None
    failure: str | None
    notes: tuple[str, ...]
    runs: tuple[MeasuredRound, ...]

    @property
    def step_s(self) -> float | None:
        """The median step time over the runs."""
        return self.figures[STEP].median if STEP in self.figures else None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareReport:
    """Variants compared with the `baseline`, the first one that could be measured; None: there is none.

    `date` is when the report was made, in UTC (ISO 8601). `is_complete` is False if the comparison was stopped early.
    """

    command: tuple[str, ...]
    host: str
    date: str
    machine: Mapping[str, object]
    settings: Mapping[str, object]
    baseline: str | None
    is_complete: bool
    notes: tuple[str, ...]
    variants: tuple[VariantResult, ...]

    @property
    def measured(self) -> tuple[VariantResult, ...]:
        """The variants that have figures."""
        return tuple(variant for variant in self.variants if variant.num_runs)

    def to_json(self) -> dict[str, object]:
        """Return the JSON form."""
        return {"schema": SCHEMA, "confidence": CONFIDENCE, **asdict(self)}


def make_report(  # noqa: PLR0913 - what a report is made of
    variants: Sequence[Variant],
    runs: Iterable[ComparedRun],
    *,
    command: Sequence[str],
    host: str,
    date: str,
    machine: Mapping[str, object],
    settings: Mapping[str, object],
    margin: float,
    is_complete: bool,
) -> CompareReport:
    """Return the report on the runs until now."""
    made = tuple(runs)
    own = {variant.name: [run for run in made if run.variant == variant.name] for variant in variants}
    by_round = {name: _step_s(own[name]) for name in own}
    baseline = next((variant.name for variant in variants if by_round[variant.name]), None)

    def ratio_of(name: str) -> StepRatio | None:
        if baseline is None or name == baseline:
            return None
        return step_ratio(by_round[baseline], by_round[name], against=baseline, margin=margin)

    results = tuple(_variant_result(variant, own[variant.name], ratio_of(variant.name)) for variant in variants)
    return CompareReport(
        command=tuple(command),
        host=host,
        date=date,
        machine=machine,
        settings=settings,
        baseline=baseline,
        is_complete=is_complete,
        notes=tuple(_notes(results, baseline, variants[0].name)),
        variants=results,
    )


def _step_s(runs: Sequence[ComparedRun]) -> dict[int, float]:
    """Return the step time of each counted round."""
    figures = {run.round: run.result.figures for run in runs if run.round is not None}
    return {number: found[STEP] for number, found in figures.items() if found.get(STEP)}


def _variant_result(variant: Variant, runs: Sequence[ComparedRun], ratio: StepRatio | None) -> VariantResult:
    rounds = tuple(
        MeasuredRound(round=run.round, took_s=run.took_s, figures=dict(run.result.figures), steps_s=run.result.steps_s)
        for run in runs
        if run.round is not None and STEP in run.result.figures
    )
    counted_runs = [run.result for run in runs if run.round is not None and STEP in run.result.figures]
    names = dict.fromkeys(chain.from_iterable(one.figures for one in rounds))
    return VariantResult(
        name=variant.name,
        command=variant.shown,
        variables=dict(variant.variables),
        num_runs=len(rounds),
        num_ranks=counted_runs[0].num_ranks if counted_runs else None,
        step_unit=counted_runs[0].unit if counted_runs else None,
        figures={name: Spread.of([one.figures[name] for one in rounds if name in one.figures]) for name in names},
        ratio=ratio,
        failure=next((run.result.failure for run in runs if run.result.failure is not None), None),
        notes=tuple(dict.fromkeys(chain.from_iterable(result.notes for result in counted_runs))),
        runs=rounds,
    )


def _notes(results: Sequence[VariantResult], baseline: str | None, first: str) -> list[str]:
    """Return what a reader of the ratios has to know."""
    notes = []
    if baseline not in (None, first):
        notes.append(f"{first} was not measured, so {baseline} is what the others are compared with")
    measured = [result for result in results if result.num_runs]
    for what, values in (
        ("ranks", {result.num_ranks for result in measured}),
        ("steps", {result.step_unit for result in measured}),
    ):
        if len(values) > 1:
            named = ", ".join(f"{r.name}: {r.num_ranks if what == 'ranks' else r.step_unit}" for r in measured)
            notes.append(f"the variants do not do the same work, because their {what} differ ({named})")
    notes += _uneven(measured)
    return notes


def _uneven(results: Sequence[VariantResult]) -> list[str]:
    """Return a note if the mean of a variant's steps is far above their median."""
    uneven = [
        result.name
        for result in results
        if statistics.median([run.figures[STEP] / run.figures["step_median_s"] for run in result.runs]) > 1.5
    ]
    if not uneven:
        return []
    return [f"steps are uneven in {', '.join(uneven)}: a few take most of the time; --steps should span an epoch"]


def verdict_line(result: VariantResult) -> str:
    """Return the outcome for one variant in words."""
    ratio = result.ratio
    if ratio is None:
        return f"{result.name}: {'nothing to compare with' if result.num_runs else 'not measured'}"
    if ratio.low is None or ratio.high is None:
        return f"{result.name}: {Verdict.UNKNOWN}: an interval takes three repeats, and five are few"
    times = f"{ratio.ratio:.2f}x [{ratio.low:.2f}, {ratio.high:.2f}]"
    match ratio.verdict:
        case Verdict.FASTER:
            return f"{result.name} is faster: {times} as fast as {ratio.against}"
        case Verdict.SLOWER:
            return f"{result.name} is slower: {times} as fast as {ratio.against}"
        case Verdict.NO_DIFFERENCE:
            return f"{result.name}: no difference from {ratio.against}: {times}; {_excluded(ratio.low, ratio.high)}"
        case _:
            return f"{result.name}: not enough runs to tell: {times} as fast as {ratio.against}{_more(ratio)}"


def _excluded(low: float, high: float) -> str:
    """Return the difference that the interval rules out."""
    largest = max(1 - low, high - 1, 0.0)
    return f"a difference of {max(largest, 0.001):.1%} or more would have shown"


def _more(ratio: StepRatio) -> str:
    if ratio.num_rounds_needed is None:
        return "; the step times vary too much from run to run"
    return f"; about {ratio.num_rounds_needed} repeats would tell"
