"""Repeated cheap readings of a running job.

Threads and GPUs are read each time. Processes and pages, for which the kernel walks page tables, are read less often;
the interval grows with the cost.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from numapin.base.text import without_none
from numapin.observe.model import Thread
from numapin.observe.read import LIVE, observe
from numapin.observe.top import Sample
from numapin.steps.totals import find_waited, read_waited
from numapin.system.proc import activity

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from numapin.observe.find import RunningJob
    from numapin.observe.model import ObservedRank
    from numapin.topology.readings import GpuLoad

_PAGES_EVERY_S: Final = 10.0
_REST: Final = 250  # seconds between readings of the pages per second of CPU that one took: 0.4 % of a core


class Sampler:
    """Takes samples of one job; `loads` reads its GPUs."""

    def __init__(self, job: RunningJob, loads: Callable[[], Mapping[str, GpuLoad]]) -> None:
        self._pids, self._gone, self._loads = job.pids, job.gone, loads
        self._bound = frozenset(job.applied)
        self._starts = without_none(job.starts)
        self._read_pages()

    def _read_pages(self) -> None:
        """Read processes, pages, and where the loop times are; schedule the next reading by its cost."""
        began_s = time.process_time()
        self._observed = observe(self._pids, gone=self._gone)
        found = {rank: find_waited(pid) for rank, pid in self._pids.items() if rank not in self._gone}
        self._loops = {rank: descriptor for rank, descriptor in found.items() if descriptor is not None}
        took_s = time.process_time() - began_s
        self._next_pages_s = time.monotonic() + max(_PAGES_EVERY_S, _REST * took_s)

    def sample(self) -> Sample:
        """Read threads and GPUs, and the pages if they are due."""
        if time.monotonic() >= self._next_pages_s:
            self._read_pages()
        ticks_per_s, booted_s = os.sysconf("SC_CLK_TCK"), time.clock_gettime(time.CLOCK_BOOTTIME)
        ranks: dict[int, ObservedRank] = {}
        cpu_s: dict[int, dict[int, float]] = {}
        up_s: dict[int, float] = {}
        for rank in self._observed.ranks:
            number = rank.local_rank
            # Of a rank that is known to be gone, other processes may have the ids now.
            found = {} if number in self._gone else {pid: activity(pid) for pid in rank.pids}
            stat, _ = found.get(rank.pid, (None, {}))
            is_another = stat is not None and self._starts.setdefault(number, stat.start) != stat.start
            if is_another:
                self._gone |= {number}
                found = {}
            processes = []
            for process in rank.processes:
                names = {thread.tid: thread.name for thread in process.threads}  # a new one gets its process's
                cpus_of = found[process.pid][1] if found else {}
                threads = (
                    Thread(tid=tid, name=names.get(tid, process.name), cpus=cpus, last_cpu=None)
                    for tid, cpus in cpus_of.items()
                )
                processes.append(replace(process, threads=tuple(threads)))
            ranks[number] = replace(rank, processes=tuple(processes))
            cpu_s[number] = {pid: stat.own_ticks / ticks_per_s for pid, (stat, _) in found.items() if stat is not None}
            own, own_threads = found.get(rank.pid, (None, {}))
            if own is not None and own_threads:
                up_s[number] = max(booted_s - own.start / ticks_per_s, 0.0)
        loops = {rank: descriptor for rank, descriptor in self._loops.items() if rank not in self._gone}
        waited = {rank: read_waited(self._pids[rank], descriptor) for rank, descriptor in loops.items()}
        return Sample(
            at_s=time.monotonic(),
            ranks=ranks,
            bound=self._bound,
            gone=frozenset(ranks) - up_s.keys(),
            loads=self._loads(),
            swapped=read_swapped(),
            waited={rank: totals for rank, totals in waited.items() if totals is not None},
            cpu_s=cpu_s,
            up_s=up_s,
        )


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
