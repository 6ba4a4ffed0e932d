"""The report of `numapin compare` as data, JSON and sentences: the figures of a run, of a variant, and the ratios.

Two doubts turn a verdict into NOT SETTLED. Over the second half of the steps the ratio may be another one: the first
steps lived on batches that were fetched ahead, or the steps reach an epoch border once. And a loader that fetches many
batches ahead may hide for the whole window that it is too slow.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from numapin.base.redact import HIDDEN, is_secret, without_secrets
from numapin.base.stats import CONFIDENCE, FEWEST_FOR_VERDICT, MOST_ROUNDS, Faster, Verdict, faster
from numapin.base.text import counted, without_none
from numapin.bench.model import Spread
from numapin.compare.variants import KNOWN, THREADS
from numapin.steps.record import MOST_STEPS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from numapin.compare.campaign import ComparedRun
    from numapin.compare.variants import Variant
    from numapin.steps.record import RankSteps

SCHEMA: Final = "numapin.compare/1"
STEP: Final = "step_s"
"""The figure that is compared: the window's length by its steps, of the slowest rank."""
_SHORTEST_S: Final = 1.0  # CPU time is read every second, and counted in hundredths of one
_UNEVEN: Final = 1.5
_SAME_SAMPLES: Final = 1.02
_BUSY: Final = 0.05  # of the CPUs
_SHORT: Final = 0.25  # of --seconds
_WAITS: Final = 0.05  # a loop that waits longer than this share has used up what was fetched ahead


# --- the figures of one run -------------------------------------------------------------------------------------------


def slowest_of(ranks: Sequence[RankSteps]) -> RankSteps:
    """Return the rank with the longest steps."""
    return max(ranks, key=lambda rank: rank.window_s / len(rank.step_ns))


def figures_of(
    ranks: Sequence[RankSteps],
    *,
    started_s: float,
    cpu_at: Callable[[float], float | None],
    host_cpu_at: Callable[[float], float | None],
) -> dict[str, float]:
    """Return the known figures of a run in which each of these ranks has measured steps (times: CLOCK_MONOTONIC)."""
    slowest = slowest_of(ranks)
    begin_s, window_s = (slowest.begin_ns or 0) / 1e9, slowest.window_s
    end_s = begin_s + window_s
    steps_s = sorted(step / 1e9 for step in slowest.step_ns)
    last_first_step_s = max((rank.first_ns or 0) / 1e9 for rank in ranks)
    found: dict[str, float | None] = {
        STEP: window_s / len(steps_s),
        "step_median_s": statistics.median(steps_s),
        "step_p95_s": steps_s[min(int(0.95 * len(steps_s)), len(steps_s) - 1)],
        "startup_s": last_first_step_s - started_s,
    }
    rates = [rank.num_samples / rank.window_s for rank in ranks if rank.num_samples]
    if len(rates) == len(ranks):
        found["samples_per_s"] = sum(rates)
    if any(rank.num_batches for rank in ranks):  # without a DataLoader of torch the loop may wait elsewhere
        found["wait_share"] = statistics.fmean(rank.waited_ns / 1e9 / rank.window_s for rank in ranks)

    # The CPU time of the job, and of other programs; unknown in a short window, or if a process has ended unseen.
    own_s = _used_s(cpu_at, begin_s, end_s)
    if own_s is not None:
        all_s = _used_s(host_cpu_at, begin_s, end_s)
        found["cpu_s_per_step"] = own_s / len(steps_s)
        found["other_cpus"] = None if all_s is None else max(all_s - own_s, 0.0) / window_s
    return {name: float(value) for name, value in without_none(found).items()}


def _used_s(cpu_at: Callable[[float], float | None], begin_s: float, end_s: float) -> float | None:
    begin, end = cpu_at(begin_s), cpu_at(end_s)
    if begin is None or end is None or end_s - begin_s < _SHORTEST_S or end < begin:
        return None
    return end - begin


# --- the ratio of two variants ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRatio(Faster):
    """The speed of a variant relative to `against`.

    `late` is the ratio over the second half of the measured steps, and `doubt` is why a difference, or that there is
    none, is not believed although the interval says so.
    """

    against: str
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


# --- the results of one variant ---------------------------------------------------------------------------------------


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
    runs: tuple[ComparedRun, ...]

    @property
    def num_steps(self) -> int:
        """The fewest steps that a run has measured."""
        return min((len(run.result.steps_s) for run in self.runs), default=0)

    @property
    def arm(self) -> Arm:
        """Its runs, to be compared with another variant's."""
        return Arm(
            steps_s={run.round or 0: run.result.steps_s for run in self.runs},
            num_steps=min((run.result.num_skipped + len(run.result.steps_s) for run in self.runs), default=0),
            num_ahead=self.num_ahead or 0,
            wait_share=self.figures["wait_share"].median if "wait_share" in self.figures else 0.0,
        )


def result_of(variant: Variant, runs: Iterable[ComparedRun]) -> VariantResult:
    """Return the results of a variant, whose own texts are shown without secrets; its ratios are not there yet."""
    own = [run for run in runs if run.variant == variant.name]
    kept = [run for run in own if run.round is not None and STEP in run.result.figures]
    results = [run.result for run in kept]
    names = dict.fromkeys(name for result in results for name in result.figures)
    (shown_name,) = without_secrets([variant.name])
    return VariantResult(
        name=shown_name,
        command=tuple(without_secrets(variant.shown)),
        variables={
            name: HIDDEN if is_secret(name) else without_secrets([value])[0]
            for name, value in variant.variables.items()
        },
        num_runs=len(kept),
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
        runs=tuple(kept),
    )


# --- the comparison ---------------------------------------------------------------------------------------------------


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
        """What was measured and how often: "8 runs of each variant, in turn; each measured 100 steps …"."""
        runs = [run.result for variant in self.measured for run in variant.runs]
        repeats = [variant.num_runs for variant in self.measured]
        are = "run" if max(repeats) == 1 else "runs"
        return (
            f"{_range(repeats)} {are} of each variant, in turn; each measured "
            f"{_range([len(run.steps_s) for run in runs])} steps, {min(sum(run.steps_s) for run in runs):.2g} s or "
            f"more, after the first {_range([run.num_skipped for run in runs])}"
        )

    def to_json(self) -> dict[str, object]:
        """Return the JSON form."""
        content: dict[str, Any] = {"schema": SCHEMA, "confidence": CONFIDENCE, **asdict(self)}
        for variant in content["variants"]:
            for run in variant["runs"]:
                result = run.pop("result")
                del run["variant"], run["left"]
                run |= {name: result[name] for name in ("figures", "num_skipped", "steps_s")}
        return content


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
    num_host_cpus: int | None,
    margin: float,
    is_complete: bool,
) -> CompareReport:
    """Return the report on the runs until now. Other programs may use all `num_host_cpus`, not only our CPUs."""
    made = tuple(runs)
    results = [result_of(variant, made) for variant in variants]
    baseline = next((result for result in results if result.num_runs), None)
    threads = next((result for result in results if result.name == THREADS and result.num_runs), None)

    def ratio_to(base: VariantResult | None, own: VariantResult) -> StepRatio | None:
        """Compare two variants; None if they are the same one, or count different things as steps."""
        if base is None or base is own or base.step_unit != own.step_unit:
            return None
        return compare_arms(base.arm, own.arm, against=base.name, margin=margin)

    compared = []
    for result in results:
        is_numapins = KNOWN.get(result.name, "").startswith("numapin")
        to_threads = ratio_to(threads, result) if is_numapins else None
        compared.append(replace(result, ratio=ratio_to(baseline, result), ratio_to_threads=to_threads))
    name = baseline.name if baseline else None
    notes = _notes_on(compared, baseline=name, num_host_cpus=num_host_cpus, settings=settings)
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


def _notes_on(
    results: Sequence[VariantResult], *, baseline: str | None, num_host_cpus: int | None, settings: Mapping[str, object]
) -> Iterator[str]:
    """Yield the notes on these results, the first of which was to be the baseline."""
    measured = [result for result in results if result.num_runs]
    if baseline not in (None, results[0].name) and len(measured) > 1:
        yield f"{results[0].name} was not measured, so the others are compared with {baseline}"

    # Differences between the variants' work.
    work = "the variants do not do the same work, because their {} differ ({})"
    samples = {}  # of all ranks in a step
    for result in measured:
        known = [run.result.figures for run in result.runs if "samples_per_s" in run.result.figures]
        if known:
            samples[result.name] = statistics.median(one["samples_per_s"] * one[STEP] for one in known)
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

    # Steps whose mean is far above their median.
    uneven = []
    for result in measured:
        every = [run.result.figures for run in result.runs]
        if statistics.median(one[STEP] / one["step_median_s"] for one in every) > _UNEVEN:
            uneven.append(result.name)
    if uneven:
        yield f"steps are uneven in {', '.join(uneven)}: a few take most of the time; choose --steps to span an epoch"

    shares = [result.figures["other_cpus"].median for result in measured if "other_cpus" in result.figures]
    if shares and num_host_cpus and max(shares) > _BUSY * num_host_cpus:
        all_cpus = counted(num_host_cpus, "CPU")
        yield f"other programs used up to {max(shares):.1f} of {all_cpus} during the measured steps"

    # All runs measured few steps in little time, because the steps of the first run took longer.
    steps, seconds = settings.get("steps"), settings.get("seconds")
    runs = [run.result for result in measured for run in result.runs]
    is_explained = any(result.notes for result in measured)
    if is_explained or not runs or not isinstance(steps, int) or not isinstance(seconds, float):
        return
    longest_s, most = max(sum(run.steps_s) for run in runs), max(len(run.steps_s) for run in runs)
    if most < steps and longest_s < _SHORT * seconds:
        yield (
            f"the runs measured only {most} of {steps} steps, in {longest_s:.2g} s or less of --seconds {seconds:g}, "
            "because no more fitted in the first run, whose steps took longer; choose a larger --seconds or --skip"
        )


def verdict_lines(result: VariantResult) -> list[str]:
    """Return the outcome for one variant in words: against the baseline, and at equal numbers of threads."""
    ratios, to_threads = [result.ratio], result.ratio_to_threads
    if result.ratio is not None and to_threads is not None and to_threads.against != result.ratio.against:
        ratios.append(to_threads)
    return [_verdict_line(result.name, ratio) for ratio in ratios if ratio is not None]


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
