"""The figures of one run."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from numapin.base.text import without_none

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numapin.steps.record import RankSteps

STEP: Final = "step_s"
"""The figure that is compared: the window's length by its steps, of the slowest rank."""
_SHORTEST_S: Final = 1.0  # CPU time is read every second, and counted in hundredths of one


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReadings:
    """Readings beside the ranks' own measurements. Times are of CLOCK_MONOTONIC; None: unknown."""

    started_s: float
    cpu_at: Callable[[float], float | None]
    host_cpu_at: Callable[[float], float | None]
    busy: Sequence[tuple[float, Mapping[str, float]]]
    memory_bytes: int | None
    peak_bytes: int | None
    remote_share: float | None


def slowest_of(ranks: Sequence[RankSteps]) -> RankSteps:
    """Return the rank with the longest steps."""
    return max(ranks, key=lambda rank: rank.window_s / len(rank.step_ns))


def figures_of(ranks: Sequence[RankSteps], readings: RunReadings) -> dict[str, float]:
    """Return the figures of a run in which each of these ranks has measured steps."""
    slowest = slowest_of(ranks)
    steps_s = sorted(step / 1e9 for step in slowest.step_ns)
    found: Mapping[str, float | None] = {
        STEP: slowest.window_s / len(slowest.step_ns),
        "step_median_s": statistics.median(steps_s),
        "step_p95_s": steps_s[min(int(0.95 * len(steps_s)), len(steps_s) - 1)],
        "samples_per_s": _samples_per_s(ranks),
        "wait_share": _wait_share(ranks),
        "startup_s": _last_first_step_s(ranks) - readings.started_s,
        "memory_bytes": readings.memory_bytes,
        "peak_bytes": readings.peak_bytes,
        "gpu_memory_bytes": max(filter(None, (rank.gpu_memory_bytes for rank in ranks)), default=None),
        "remote_share": readings.remote_share,
        "gpu_busy_share": _busy_share(slowest, readings),
    }
    known = without_none({**found, **_cpu(slowest, readings)})
    return {name: float(value) for name, value in known.items()}


def _last_first_step_s(ranks: Sequence[RankSteps]) -> float:
    """Return the time at which the last rank ended its first step."""
    return max((rank.first_ns or 0) / 1e9 for rank in ranks)


def _samples_per_s(ranks: Sequence[RankSteps]) -> float | None:
    rates = [rank.num_samples / rank.window_s for rank in ranks if rank.num_samples]
    return sum(rates) if len(rates) == len(ranks) else None


def _wait_share(ranks: Sequence[RankSteps]) -> float | None:
    """Return the mean over the ranks; None without a DataLoader of torch, because the loop may wait elsewhere."""
    if not any(rank.num_batches for rank in ranks):
        return None
    return statistics.fmean(rank.waited_ns / 1e9 / rank.window_s for rank in ranks)


def _cpu(rank: RankSteps, readings: RunReadings) -> Mapping[str, float | None]:
    """Return the CPU time of the job, and of other programs, during the window."""
    own_s, all_s = _used_s(rank, readings.cpu_at), _used_s(rank, readings.host_cpu_at)
    if own_s is None:
        return {}
    others = None if all_s is None else max(all_s - own_s, 0.0) / rank.window_s
    return {"cpu_s_per_step": own_s / len(rank.step_ns), "other_cpus": others}


def _used_s(rank: RankSteps, cpu_at: Callable[[float], float | None]) -> float | None:
    """Return the CPU time used during the window; None if that is too short, or a process has ended unseen."""
    begin, end = cpu_at(rank.begin_s), cpu_at(rank.end_ns / 1e9)
    if begin is None or end is None or rank.window_s < _SHORTEST_S:
        return None
    return end - begin if end >= begin else None


def _busy_share(rank: RankSteps, readings: RunReadings) -> float | None:
    """Return the mean over the GPUs that were ever busy; a job may use fewer than the machine has."""
    within = _busy_within(rank, readings)
    if not within:
        return None
    means = [statistics.fmean(shares.get(gpu, 0.0) for shares in within) for gpu in within[0]]
    return statistics.fmean(filter(None, means)) if any(means) else 0.0


def _busy_within(rank: RankSteps, readings: RunReadings) -> list[Mapping[str, float]]:
    """Return the readings of the GPUs during the window."""
    end_s = rank.end_ns / 1e9
    return [shares for at_s, shares in readings.busy if rank.begin_s < at_s <= end_s]
