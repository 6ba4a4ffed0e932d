"""All runs of a comparison, in turn. Edge.

Comes in: variants, and what to measure. Goes out: one run after another. A first run that is not counted fills the page
cache. A variant that fails is left out of the later rounds.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from numapin.compare.job import JobOptions, JobResult, run_job
from numapin.compare.schedule import Estimate, turns

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from numapin.compare.variants import Variant


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """One run of a variant in one round. Round None is the one that only fills the page cache."""

    variant: str
    round: int | None
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

    def run(self, number: int, variant: Variant, options: JobOptions) -> ComparedRun:
        """Make run `number` of the plan."""
        round_number, name = self.plan[number]
        began_s = time.monotonic()
        result = run_job(
            variant,
            _options_of(round_number, options),
            log_name=_log_name(number, name),
            report=lambda doing: self._report(number, doing, time.monotonic() - began_s),
        )
        took_s = time.monotonic() - began_s
        if round_number is not None:
            self.estimate.note(name, took_s)
        if result.failure is not None:
            self.failed.add(name)
        left_s = self.estimate.left_s(self._later(number))
        return ComparedRun(variant=name, round=round_number, took_s=took_s, result=result, left_s=left_s)

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

    It ends early if fewer than two variants are left. A variant that failed in the first run, which is not counted, has
    its failure in that run.
    """
    by_name = {variant.name: variant for variant in variants}
    campaign = _Campaign(plan=[(None, variants[0].name), *turns(list(by_name), num_rounds)], progress=progress)
    for number, (_, name) in enumerate(campaign.plan):
        if name in campaign.failed or _can_only_fail(len(by_name), campaign.failed, number):
            continue
        yield campaign.run(number, by_name[name], options)


def _can_only_fail(num_variants: int, failed: Collection[str], number: int) -> bool:
    """Return whether too few variants are left for a comparison, once each had its first turn."""
    return num_variants - len(failed) < 2 and number > num_variants


def _options_of(round_number: int | None, options: JobOptions) -> JobOptions:
    """Return the options; the first run needs a few steps only."""
    if round_number is not None:
        return options
    return replace(options, settings=replace(options.settings, skip=1, steps=2))


def _log_name(number: int, name: str) -> str:
    return f"{number:03d}-{''.join(char if char.isalnum() or char in '.-_' else '_' for char in name)[:80]}"
