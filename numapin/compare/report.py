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
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numapin.compare.measure import ComparedRun
    from numapin.compare.results import MeasuredRound
    from numapin.compare.variants import Variant

SCHEMA: Final = "numapin.compare/1"
_WITHOUT_RATIO: Final = "nothing to compare with"


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
        skip = self.settings.get("skip")
        lengths = _lengths(runs, skip if isinstance(skip, int) else None)
        return f"{_range(repeats)} {are} of each variant, in turn; each measured {lengths}"

    def to_json(self) -> dict[str, object]:
        """Return the JSON form."""
        return {"schema": SCHEMA, "confidence": CONFIDENCE, **asdict(self)}


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
    name = None if baseline is None else baseline.name
    compared = tuple(_with_ratios(results, baseline, margin))
    notes = notes_on(compared, baseline=name, num_cpus=_num_cpus(machine), settings=settings)
    return CompareReport(
        command=tuple(command),
        host=host,
        date=date,
        machine=machine,
        settings=settings,
        baseline=name,
        is_complete=is_complete,
        notes=tuple(notes),
        variants=compared,
    )


def _num_cpus(machine: Mapping[str, object]) -> int | None:
    number = machine.get("num_cpus")
    return number if isinstance(number, int) else None


def _with_ratios(
    results: Sequence[VariantResult], baseline: VariantResult | None, margin: float
) -> Iterator[VariantResult]:
    """Yield the results with their ratios to the baseline, and those of numapin to torchrun at equal threads."""
    threads = next(filter(_is_torchrun_with_threads, results), None)
    for result in results:
        to_threads = _ratio(threads, result, margin) if _is_numapins(result) else None
        yield replace(result, ratio=_ratio(baseline, result, margin), ratio_to_threads=to_threads)


def _is_torchrun_with_threads(result: VariantResult) -> bool:
    return result.name == THREADS and bool(result.num_runs)


def _is_numapins(result: VariantResult) -> bool:
    return KNOWN.get(result.name, "").startswith("numapin")


def _ratio(base: VariantResult | None, own: VariantResult, margin: float) -> StepRatio | None:
    """Compare two variants; None if they are the same one, or count different things as steps."""
    if base is None or base.name == own.name or base.step_unit != own.step_unit:
        return None
    return compare_arms(base.arm, own.arm, against=base.name, margin=margin)


def _range(values: Sequence[int]) -> str:
    return f"{min(values):,}" if min(values) == max(values) else f"{min(values):,} to {max(values):,}"


def _lengths(runs: Sequence[MeasuredRound], skip: int | None) -> str:
    """Return how many steps the runs measured, after how many others, and how long the shortest run took for them.

    More than `skip` are skipped if a loader fetches more batches ahead.
    """
    steps = _range([len(run.steps_s) for run in runs])
    skipped = _range([run.num_skipped for run in runs])
    shortest_s = min(sum(run.steps_s) for run in runs)
    is_longer = skip is not None and max(run.num_skipped for run in runs) > skip
    why = f" (more than --skip {skip}: a loader had fetched their batches ahead)" if is_longer else ""
    return f"{steps} steps, {shortest_s:.2g} s or more, after the first {skipped}{why}"


def verdict_lines(result: VariantResult) -> list[str]:
    """Return the outcome for one variant in words: against the baseline, and at equal numbers of threads."""
    if result.ratio is None:
        return [f"{result.name}: {_WITHOUT_RATIO if result.num_runs else 'not measured'}"]
    return [_verdict_line(result.name, ratio) for ratio in _ratios(result.ratio, result.ratio_to_threads)]


def _ratios(to_baseline: StepRatio, to_threads: StepRatio | None) -> list[StepRatio]:
    """Return the ratios to different variants."""
    if to_threads is None or to_threads.against == to_baseline.against:
        return [to_baseline]
    return [to_baseline, to_threads]


def _verdict_line(name: str, ratio: StepRatio) -> str:
    if ratio.low is None or ratio.high is None:
        return f"{name}: {Verdict.UNKNOWN}: {ratio.ratio:.2f}x as fast as {ratio.against}{_more(ratio)}"
    return _line_with_interval(name, ratio, ratio.low, ratio.high)


def _line_with_interval(name: str, ratio: StepRatio, low: float, high: float) -> str:
    times = f"{ratio.ratio:.2f}x [{low:.2f}, {high:.2f}]"
    match ratio.verdict:
        case Verdict.FASTER | Verdict.SLOWER:
            return f"{name} is {ratio.verdict}: {times} as fast as {ratio.against}"
        case Verdict.NO_DIFFERENCE:
            return f"{name}: no difference from {ratio.against}: {times}; {_excluded(low, high)}"
        case Verdict.UNSETTLED:
            return f"{name}: not settled: {times} as fast as {ratio.against}, but {ratio.doubt}"
        case _:
            return f"{name}: {Verdict.UNKNOWN}: {times} as fast as {ratio.against}{_more(ratio)}"


def _excluded(low: float, high: float) -> str:
    """Return the difference that the interval rules out."""
    largest = max(1 - low, high - 1, 0.0)
    return f"a difference of {max(largest, 0.001):.1%} or more would have shown"


def _more(ratio: StepRatio) -> str:
    """Return how many repeats would tell."""
    if ratio.num_rounds < FEWEST_FOR_VERDICT:
        return f"; a verdict takes at least {FEWEST_FOR_VERDICT} repeats"
    if ratio.num_rounds_needed is None:
        return f"; the step times vary so much that more than {MOST_ROUNDS} repeats would be needed"
    return f"; about {ratio.num_rounds_needed} repeats would tell"
