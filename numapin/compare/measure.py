"""All runs of a comparison, in turn.

A first run that is not counted fills the page cache, and finds the number of steps that all others measure; if not all
steps fit into the time, a second one finds it, because the first may have been slow. A variant that fails is left out
of the later rounds.
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Final

from numapin.base.redact import without_secrets
from numapin.compare.job import JobOptions, JobResult, run_job
from numapin.steps.record import FEWEST_STEPS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numapin.compare.variants import Variant
    from numapin.steps.record import StepSettings

_PATIENCE: Final = 4  # times the wanted seconds: a variant may be so much slower than the first one
_SEED: Final = 17  # a comparison can be repeated in the same order


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """One run of a variant in one round. Round None is the first run, which does not count.

    `order` is its place among all runs; `left_s` is the time for the rest of them.
    """

    variant: str
    round: int | None
    order: int
    took_s: float
    result: JobResult
    left_s: float | None = None


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


@dataclass(slots=True)
class Estimate:
    """The durations of the runs so far, by variant."""

    durations_s: dict[str, list[float]] = field(default_factory=dict)

    def note(self, name: str, duration_s: float) -> None:
        """Note that a run has ended."""
        self.durations_s.setdefault(name, []).append(duration_s)

    def left_s(self, names: Sequence[str]) -> float | None:
        """Return the time that runs of these variants will take; None before the first run has ended."""
        if not self.durations_s:
            return None
        any_s = statistics.median(chain.from_iterable(self.durations_s.values()))
        return sum(statistics.median(self.durations_s.get(name) or [any_s]) for name in names)


def duration(seconds: float) -> str:
    """Return a duration as people say it: "40 s", "12 min", "1 h 05 min"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def turns(names: Sequence[str], num_rounds: int) -> Iterator[tuple[int, str]]:
    """Yield round and variant.

    Each pair of rounds has an order of its own, drawn at random, and its second round runs backwards: ABBA, BAAB. So a
    machine that slows down, and neighbors in the order, favor none.
    """
    chance = random.Random(_SEED)  # noqa: S311 - an order, no secret
    order = list(names)
    for number in range(num_rounds):
        if number % 2 == 0:
            chance.shuffle(order)
        for name in order if number % 2 == 0 else reversed(order):
            yield number, name


def measure_all(
    variants: Sequence[Variant], options: JobOptions, *, num_rounds: int, progress: Callable[[RunProgress], None]
) -> Iterator[ComparedRun]:
    """Yield each run when it has ended; `progress` is called several times per second.

    The first run does not count. It finds out how many steps fit into the time; all others measure that number. If
    these are not all steps, a second run finds out. If it fails, the next variant has the first run. It ends early if
    fewer than two variants are left.
    """
    by_name = {variant.name: variant for variant in variants}
    rounds: list[tuple[int | None, str]] = [*turns(list(by_name), num_rounds)]
    failed: set[str] = set()
    for name in by_name:
        campaign = _Campaign(by_name, [(None, name), *rounds], failed, progress)
        first = campaign.run(0, options)
        yield first
        if name not in failed:
            settings = with_equal_steps(options.settings, first.result.steps_s)
            if settings.steps < options.settings.steps:
                first = campaign.run(0, options, is_again=True)
                yield first
        if name not in failed:
            break
    else:
        return
    counted = replace(options, settings=with_equal_steps(options.settings, first.result.steps_s))
    for number, (_, name) in enumerate(rounds, 1):
        is_over = len(by_name) - len(failed) < 2 and number > len(by_name)  # each had its first turn
        if name not in failed and not is_over:
            yield campaign.run(number, counted)


@dataclass(slots=True)
class _Campaign:
    """The runs that are planned, number 0 of which does not count, and the time that the earlier ones took."""

    variants: dict[str, Variant]
    plan: Sequence[tuple[int | None, str]]
    failed: set[str]
    progress: Callable[[RunProgress], None]
    estimate: Estimate = field(default_factory=Estimate)

    def run(self, number: int, options: JobOptions, *, is_again: bool = False) -> ComparedRun:
        """Make run `number` of the plan; `is_again`: for the second time."""
        round_number, name = self.plan[number]
        began_s = time.monotonic()

        def report(doing: str) -> None:
            elapsed_s = time.monotonic() - began_s
            own_s, rest_s = self.estimate.left_s([name]), self._rest_s(number)
            left_s = None if own_s is None or rest_s is None else max(own_s - elapsed_s, 0.0) + rest_s
            self.progress(
                RunProgress(
                    number=number,
                    total=len(self.plan) - 1,
                    variant=name,
                    round=round_number,
                    doing=doing,
                    elapsed_s=elapsed_s,
                    left_s=left_s,
                )
            )

        (shown,) = without_secrets([f"{name}-again" if is_again else name])
        file_name = "".join(char if char.isalnum() or char in ".-_" else "_" for char in shown)[:80]
        result = run_job(self.variants[name], options, log_name=f"{number:03d}-{file_name}", report=report)
        took_s = time.monotonic() - began_s
        if result.failure is None:
            self.estimate.note(name, took_s)
        else:
            self.failed.add(name)
        return ComparedRun(
            variant=name, round=round_number, order=number, took_s=took_s, result=result, left_s=self._rest_s(number)
        )

    def _rest_s(self, number: int) -> float | None:
        """Return the time that the runs after run `number` will take."""
        return self.estimate.left_s([name for _, name in self.plan[number + 1 :] if name not in self.failed])


def with_equal_steps(settings: StepSettings, first_s: Sequence[float]) -> StepSettings:
    """Return the settings of the runs that count: each measures as many steps as fit into the time.

    `first_s` are the steps of the first run, the earlier of which may have waited for a cold disk, so the second half
    counts; their mean, because a few may take most of the time. A run that needs several times as long is cut short.
    """
    settled_s = statistics.fmean(first_s[len(first_s) // 2 :])
    fitting = int(settings.seconds / max(settled_s, 1e-9))
    steps = min(settings.steps, max(fitting, FEWEST_STEPS))
    return replace(settings, steps=steps, seconds=settings.seconds * _PATIENCE)
