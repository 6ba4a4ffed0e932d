"""Read again and again what a job does, at little cost. Edge.

Comes in: a running job. Goes out: `Sample`s, which `top` compares. Threads and GPUs are read each time; finding a job's
processes and reading where their pages are, for which the kernel walks their page tables, are paced by what they cost.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from numapin.data.loop_times import find_waited, read_waited
from numapin.observe.read import LIVE, observe
from numapin.observe.top import Sample
from numapin.system.proc import thread_cpus

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from numapin.data.loop_times import Waited
    from numapin.observe.find_job import RunningJob
    from numapin.observe.model import Observed
    from numapin.topology.readings import GpuLoad

_PAGES_EVERY_S: Final = 10.0
_REST: Final = 250  # after a reading of the pages that took a second of CPU, so many without: 0.4 % of a core


class Sampler:
    """Samples one job; `loads` reads its GPUs."""

    def __init__(self, job: RunningJob, loads: Callable[[], Mapping[str, GpuLoad]]) -> None:
        self._pids, self._gone, self._loads = job.pids, job.gone, loads
        self._observed = self._observe()

    def sample(self) -> Sample:
        """Read now what is cheap, and the pages if it is time for them."""
        if time.monotonic() >= self._next_pages_s:
            self._observed = self._observe()
        processes = {
            rank.local_rank: {rank.pid, *(process.pid for process in rank.processes)}
            for rank in self._observed.ranks
            if rank.local_rank not in self._gone
        }
        cpus = {pid: thread_cpus(pid) for pids in processes.values() for pid in pids}
        return Sample(
            at_s=time.monotonic(),
            threads={rank: tuple(one for pid in processes.get(rank, ()) for one in cpus[pid]) for rank in self._pids},
            gone=self._gone | {rank for rank, pid in self._pids.items() if not cpus.get(pid)},
            memory={rank.local_rank: rank for rank in self._observed.ranks},
            loads=self._loads(),
            swapped=read_swapped(),
            waited={rank: waited for rank in self._pids if (waited := self._waited(rank)) is not None},
        )

    def _waited(self, rank: int) -> Waited | None:
        descriptor = self._steps.get(rank)
        return None if descriptor is None else read_waited(self._pids[rank], descriptor)

    def _observe(self) -> Observed:
        began_s = time.process_time()
        observed = observe(self._pids, gone=self._gone)
        self._steps = {rank: find_waited(pid) for rank, pid in self._pids.items() if rank not in self._gone}
        took_s = time.process_time() - began_s
        self._next_pages_s = time.monotonic() + max(_PAGES_EVERY_S, _REST * took_s)
        return observed


def read_swapped(*, root: Path = LIVE) -> tuple[int, int] | None:
    """Return how many pages were swapped in and out since the machine started, None where the kernel does not say."""
    try:
        text = (root / "proc/vmstat").read_text(encoding="ascii")
    except FileNotFoundError:
        return None
    values = dict(line.split() for line in text.splitlines())
    if "pswpin" not in values or "pswpout" not in values:  # a kernel without swap
        return None
    return int(values["pswpin"]), int(values["pswpout"])
