"""Repeated cheap readings of a running job. Edge.

Comes in: a running job. Goes out: `Sample`s, which `top` compares. Threads and GPUs are read each time. Processes and
pages, for which the kernel walks page tables, are read less often; the interval grows with the cost.
"""

from __future__ import annotations

import os
import time
from itertools import chain
from typing import TYPE_CHECKING, Final

from numapin.base.not_none import without_none
from numapin.data.loop_times import find_waited, read_waited
from numapin.observe.read import LIVE, observe
from numapin.observe.top import Sample
from numapin.system.proc import activity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from numapin.base.cpu_set import CpuSet
    from numapin.data.loop_times import Waited
    from numapin.observe.find_job import RunningJob
    from numapin.observe.model import Observed, ObservedRank
    from numapin.system.proc import Stat
    from numapin.topology.readings import GpuLoad

    Activity = Mapping[int, tuple[Stat | None, tuple[CpuSet, ...]]]

_PAGES_EVERY_S: Final = 10.0
_REST: Final = 250  # seconds between readings of the pages per second of CPU that one took: 0.4 % of a core


class Sampler:
    """Takes samples of one job; `loads` reads its GPUs."""

    def __init__(self, job: RunningJob, loads: Callable[[], Mapping[str, GpuLoad]]) -> None:
        self._pids, self._gone, self._loads = job.pids, job.gone, loads
        self._observed = self._observe()

    def sample(self) -> Sample:
        """Read threads and GPUs, and the pages if they are due."""
        if time.monotonic() >= self._next_pages_s:
            self._observed = self._observe()
        ranks = self._observed.ranks
        now = {rank.local_rank: self._activity_of(rank) for rank in ranks}
        alive = [rank for rank in ranks if _has_threads(rank, now)]
        return Sample(
            at_s=time.monotonic(),
            threads={rank: _cpus_of_threads(found) for rank, found in now.items()},
            gone=_numbers(ranks) - _numbers(alive),
            memory={rank.local_rank: rank for rank in ranks},
            loads=self._loads(),
            swapped=read_swapped(),
            waited=self._waited(),
            cpu_s={rank: _cpu_s(found) for rank, found in now.items()},
            up_s={rank.local_rank: _up_s(now[rank.local_rank][rank.pid][0]) for rank in alive},
        )

    def _activity_of(self, rank: ObservedRank) -> Activity:
        """Return the activity of a rank's processes by their ids; nothing for a rank that is known to be gone."""
        return {} if rank.local_rank in self._gone else {pid: activity(pid) for pid in rank.pids}

    def _waited(self) -> dict[int, Waited]:
        """Return the loop times of the ranks that use `numapin.DataLoader`."""
        found = {rank: read_waited(self._pids[rank], descriptor) for rank, descriptor in self._loop_times.items()}
        return without_none(found)

    def _observe(self) -> Observed:
        """Read processes, pages, and where the loop times are; schedule the next reading by its cost."""
        began_s = time.process_time()
        observed = observe(self._pids, gone=self._gone)
        self._loop_times = self._find_loop_times()
        took_s = time.process_time() - began_s
        self._next_pages_s = time.monotonic() + max(_PAGES_EVERY_S, _REST * took_s)
        return observed

    def _find_loop_times(self) -> dict[int, int]:
        """Return the descriptors of the ranks' loop times."""
        found = {rank: find_waited(pid) for rank, pid in self._pids.items() if rank not in self._gone}
        return without_none(found)


def _has_threads(rank: ObservedRank, now: Mapping[int, Activity]) -> bool:
    """Return whether a rank's own process is alive."""
    return bool(now[rank.local_rank].get(rank.pid, (None, ()))[1])


def _numbers(ranks: Iterable[ObservedRank]) -> frozenset[int]:
    return frozenset(rank.local_rank for rank in ranks)


def _cpus_of_threads(found: Activity) -> tuple[CpuSet, ...]:
    """Return the CPUs of each thread of a rank's processes."""
    return tuple(chain.from_iterable(cpus for _, cpus in found.values()))


def _cpu_s(found: Activity) -> dict[int, float]:
    """Return the CPU time that each process used itself."""
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    return {pid: stat.own_ticks / ticks_per_s for pid, (stat, _) in found.items() if stat is not None}


def _up_s(stat: Stat | None) -> float:
    """Return the time since a process started."""
    started_s = 0.0 if stat is None else stat.start / os.sysconf("SC_CLK_TCK")
    return max(time.clock_gettime(time.CLOCK_BOOTTIME) - started_s, 0.0)


def read_swapped(*, root: Path = LIVE) -> tuple[int, int] | None:
    """Return the pages swapped in and out since the machine started; None if the kernel does not count them."""
    try:
        text = (root / "proc/vmstat").read_text(encoding="ascii")
    except FileNotFoundError:
        return None
    values = dict(line.split() for line in text.splitlines())
    if not values.keys() >= {"pswpin", "pswpout"}:  # a kernel without swap
        return None
    return int(values["pswpin"]), int(values["pswpout"])
