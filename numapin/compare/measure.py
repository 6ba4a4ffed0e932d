"""All runs of a comparison, in turn. Edge.

Comes in: variants, and what to measure. Goes out: one run after another. A first run that is not counted fills the page
cache, and finds the number of steps that all others measure; if not all steps fit into the time, a second one finds it,
because the first may have been slow. A variant that fails is left out of the later rounds.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from numapin.base.redact import without_secrets
from numapin.compare.job import JobOptions, JobResult, run_job
from numapin.compare.schedule import Estimate, turns
from numapin.compare.window import FEWEST_STEPS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numapin.compare.settings import StepSettings
    from numapin.compare.variants import Variant

_PATIENCE: Final = 4  # times the wanted seconds: a variant may be so much slower than the first one


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """One run of a variant in one round. Round None is the first run, which does not count."""

    variant: str
    round: int | None
    order: int  # among all runs
    took_s: float
    result: JobResult
    left_s: float | None = None  # for the rest of the runs


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """The progress of a comparison: run `number` of `total`; `left_s` is None until the first run has ended."""

    number: int
    total: int
    variant: str
    round: int | None
    doing: str
    elapsed_s: float
    left_s: float | None


@dataclass(slots=True, kw_only=True)
class _Campaign:
    """The runs that are planned, and the time that the earlier ones took."""

    plan: Sequence[tuple[int | None, str]]
    progress: Callable[[RunProgress], None]
    estimate: Estimate = field(default_factory=Estimate)
    failed: set[str] = field(default_factory=set)

    def run(self, number: int, variant: Variant, options: JobOptions, *, is_again: bool = False) -> ComparedRun:
        """Make run `number` of the plan; `is_again`: for the second time."""
        round_number, name = self.plan[number]
        began_s = time.monotonic()
        result = run_job(
            variant,
            options,
            log_name=_log_name(number, f"{name}-again" if is_again else name),
            report=lambda doing: self._report(number, doing, time.monotonic() - began_s),
        )
        took_s = time.monotonic() - began_s
        if result.failure is None:
            self.estimate.note(name, took_s)
        else:
            self.failed.add(name)
        left_s = self.estimate.left_s(self._later(number))
        return ComparedRun(variant=name, round=round_number, order=number, took_s=took_s, result=result, left_s=left_s)

    def _later(self, number: int) -> list[str]:
        """Return the variants of the runs after run `number`."""
        return [name for _, name in self.plan[number + 1 :] if name not in self.failed]

    def _report(self, number: int, doing: str, elapsed_s: float) -> None:
        round_number, name = self.plan[number]
        own_s, rest_s = self.estimate.left_s([name]), self.estimate.left_s(self._later(number))
        self.progress(
            RunProgress(
                number=number,
                total=len(self.plan) - 1,
                variant=name,
                round=round_number,
                doing=doing,
                elapsed_s=elapsed_s,
                left_s=None if own_s is None or rest_s is None else max(own_s - elapsed_s, 0.0) + rest_s,
            )
        )


def measure_all(
    variants: Sequence[Variant], options: JobOptions, *, num_rounds: int, progress: Callable[[RunProgress], None]
) -> Iterator[ComparedRun]:
    """Yield each run when it has ended; `progress` is called several times per second.

    The first run does not count. It finds out how many steps fit into the time; all others measure that number. If
    these are not all steps, a second run finds out. If it fails, the next variant has the first run. It ends early if
    fewer than two variants are left.
    """
    by_name = {variant.name: variant for variant in variants}
    rounds = list(turns(list(by_name), num_rounds))
    failed: set[str] = set()
    for name, variant in by_name.items():
        campaign = _Campaign(plan=[(None, name), *rounds], progress=progress, failed=failed)
        for first in _uncounted_runs(campaign, variant, options):
            yield first
        if name not in failed:
            break
    else:
        return
    settings = with_equal_steps(options.settings, first.result.steps_s)
    yield from _counted_runs(campaign, by_name, replace(options, settings=settings))


def _uncounted_runs(campaign: _Campaign, variant: Variant, options: JobOptions) -> Iterator[ComparedRun]:
    """Yield the first run, and a second one if fewer than the wanted steps fit into the time by the first."""
    first = campaign.run(0, variant, options)
    yield first
    if first.result.failure is None:
        fitting = with_equal_steps(options.settings, first.result.steps_s).steps
        if fitting < options.settings.steps:
            yield campaign.run(0, variant, options, is_again=True)


def _counted_runs(campaign: _Campaign, variants: Mapping[str, Variant], options: JobOptions) -> Iterator[ComparedRun]:
    for number, (_, name) in enumerate(campaign.plan[1:], 1):
        is_over = len(variants) - len(campaign.failed) < 2 and number > len(variants)  # each had its first turn
        if name not in campaign.failed and not is_over:
            yield campaign.run(number, variants[name], options)


def with_equal_steps(settings: StepSettings, first_s: Sequence[float]) -> StepSettings:
    """Return the settings of the runs that count: each measures as many steps as fit into the time.

    `first_s` are the steps of the first run, the earlier of which may have waited for a cold disk, so the second half
    counts; their mean, because a few may take most of the time. A run that needs several times as long is cut short.
    """
    settled_s = statistics.fmean(first_s[len(first_s) // 2 :])
    fitting = int(settings.seconds / max(settled_s, 1e-9))
    steps = min(settings.steps, max(fitting, FEWEST_STEPS))
    return replace(settings, steps=steps, seconds=settings.seconds * _PATIENCE)


def _log_name(number: int, name: str) -> str:
    (shown,) = without_secrets([name])
    return f"{number:03d}-{''.join(char if char.isalnum() or char in '.-_' else '_' for char in shown)[:80]}"
