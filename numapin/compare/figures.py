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
    begin_s, end_s, window_s = slowest.begin_s, slowest.end_ns / 1e9, slowest.window_s
    steps_s = sorted(step / 1e9 for step in slowest.step_ns)
    last_first_step_s = max((rank.first_ns or 0) / 1e9 for rank in ranks)
    found: dict[str, float | None] = {
        STEP: window_s / len(steps_s),
        "step_median_s": statistics.median(steps_s),
        "step_p95_s": steps_s[min(int(0.95 * len(steps_s)), len(steps_s) - 1)],
        "startup_s": last_first_step_s - readings.started_s,
        "memory_bytes": readings.memory_bytes,
        "peak_bytes": readings.peak_bytes,
        "gpu_memory_bytes": max(filter(None, (rank.gpu_memory_bytes for rank in ranks)), default=None),
        "remote_share": readings.remote_share,
    }
    rates = [rank.num_samples / rank.window_s for rank in ranks if rank.num_samples]
    if len(rates) == len(ranks):
        found["samples_per_s"] = sum(rates)
    if any(rank.num_batches for rank in ranks):  # without a DataLoader of torch the loop may wait elsewhere
        found["wait_share"] = statistics.fmean(rank.waited_ns / 1e9 / rank.window_s for rank in ranks)

    # A job may use fewer GPUs than the machine has; those that were never busy do not count.
    within = [shares for at_s, shares in readings.busy if begin_s < at_s <= end_s]
    if within:
        means = [statistics.fmean(shares.get(gpu, 0.0) for shares in within) for gpu in within[0]]
        found["gpu_busy_share"] = statistics.fmean(filter(None, means)) if any(means) else 0.0

    # The CPU time of the job, and of other programs; unknown in a short window, or if a process has ended unseen.
    own_s = _used_s(readings.cpu_at, begin_s, end_s)
    if own_s is not None:
        all_s = _used_s(readings.host_cpu_at, begin_s, end_s)
        found["cpu_s_per_step"] = own_s / len(steps_s)
        found["other_cpus"] = None if all_s is None else max(all_s - own_s, 0.0) / window_s
    return {name: float(value) for name, value in without_none(found).items()}


def _used_s(cpu_at: Callable[[float], float | None], begin_s: float, end_s: float) -> float | None:
    begin, end = cpu_at(begin_s), cpu_at(end_s)
    if begin is None or end is None or end_s - begin_s < _SHORTEST_S or end < begin:
        return None
    return end - begin
