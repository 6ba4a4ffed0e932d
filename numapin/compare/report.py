"""The report of `numapin compare` as data and JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Final

from numapin.base.stats import CONFIDENCE, FEWEST_FOR_VERDICT, MOST_ROUNDS, Verdict
from numapin.compare.notes import notes_on
from numapin.compare.ratio import StepRatio, compare_arms
from numapin.compare.results import VariantResult, result_of
from numapin.compare.variants import KNOWN, THREADS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numapin.compare.measure import ComparedRun
    from numapin.compare.variants import Variant

SCHEMA: Final = "numapin.compare/1"


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

    @property
    def steps_in_words(self) -> str:
        """How many runs and steps were measured: "8 runs of each variant, in turn; each measured 100 steps …"."""
        runs = [run for variant in self.measured for run in variant.runs]
        if not runs:
            return "no steps were measured"
        repeats = [variant.num_runs for variant in self.measured]
        are = "run" if max(repeats) == 1 else "runs"
        skip, skipped = self.settings.get("skip"), [run.num_skipped for run in runs]
        is_longer = isinstance(skip, int) and max(skipped) > skip
        why = f" (more than --skip {skip}: a loader had fetched their batches ahead)" if is_longer else ""
        return (
            f"{_range(repeats)} {are} of each variant, in turn; each measured "
            f"{_range([len(run.steps_s) for run in runs])} steps, {min(sum(run.steps_s) for run in runs):.2g} s or "
            f"more, after the first {_range(skipped)}{why}"
        )

    def to_json(self) -> dict[str, object]:
        """Return the JSON form."""
        return {"schema": SCHEMA, "confidence": CONFIDENCE, **asdict(self)}


def _range(values: Sequence[int]) -> str:
    return f"{min(values):,}" if min(values) == max(values) else f"{min(values):,} to {max(values):,}"


def make_report(
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
    results = [result_of(variant, made) for variant in variants]
    baseline = next((result for result in results if result.num_runs), None)
    threads = next((result for result in results if result.name == THREADS and result.num_runs), None)

    def ratio_to(base: VariantResult | None, own: VariantResult) -> StepRatio | None:
        """Compare two variants; None if they are the same one, or count different things as steps."""
        if base is None or base.name == own.name or base.step_unit != own.step_unit:
            return None
        return compare_arms(base.arm, own.arm, against=base.name, margin=margin)

    compared = []
    for result in results:
        is_numapins = KNOWN.get(result.name, "").startswith("numapin")
        to_threads = ratio_to(threads, result) if is_numapins else None
        compared.append(replace(result, ratio=ratio_to(baseline, result), ratio_to_threads=to_threads))
    name, num_cpus = baseline.name if baseline else None, machine.get("num_cpus")
    notes = notes_on(
        compared, baseline=name, num_cpus=num_cpus if isinstance(num_cpus, int) else None, settings=settings
    )
    return CompareReport(
        command=tuple(command),
        host=host,
        date=date,
        machine=machine,
        settings=settings,
        baseline=name,
        is_complete=is_complete,
        notes=tuple(notes),
        variants=tuple(compared),
    )


def verdict_lines(result: VariantResult) -> list[str]:
    """Return the outcome for one variant in words: against the baseline, and at equal numbers of threads."""
    if result.ratio is None:
        return [f"{result.name}: {'nothing to compare with' if result.num_runs else 'not measured'}"]
    to_threads = result.ratio_to_threads
    is_another = to_threads is not None and to_threads.against != result.ratio.against
    ratios = [result.ratio, to_threads] if to_threads is not None and is_another else [result.ratio]
    return [_verdict_line(result.name, ratio) for ratio in ratios]


def _verdict_line(name: str, ratio: StepRatio) -> str:
    times = f"{ratio.ratio:.2f}x"
    if ratio.low is not None and ratio.high is not None:
        times = f"{times} [{ratio.low:.2f}, {ratio.high:.2f}]"
        match ratio.verdict:
            case Verdict.FASTER | Verdict.SLOWER:
                return f"{name} is {ratio.verdict}: {times} as fast as {ratio.against}"
            case Verdict.NO_DIFFERENCE:
                excluded = max(1 - ratio.low, ratio.high - 1, 0.001)
                would = f"a difference of {excluded:.1%} or more would have shown"
                return f"{name}: no difference from {ratio.against}: {times}; {would}"
            case Verdict.UNSETTLED:
                return f"{name}: not settled: {times} as fast as {ratio.against}, but {ratio.doubt}"
    if ratio.num_rounds < FEWEST_FOR_VERDICT:
        more = f"a verdict takes at least {FEWEST_FOR_VERDICT} repeats"
    elif ratio.num_rounds_needed is None:
        more = f"the step times vary so much that more than {MOST_ROUNDS} repeats would be needed"
    else:
        more = f"about {ratio.num_rounds_needed} repeats would tell"
    return f"{name}: {Verdict.UNKNOWN}: {times} as fast as {ratio.against}; {more}"
