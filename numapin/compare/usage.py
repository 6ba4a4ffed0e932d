"""CPU time, memory and GPU load of a job's processes. Edge.

Comes in: the process id of a launcher, the ranks, and their planned nodes. Goes out: readings with their times, of the
whole tree of processes. One reading takes a look at all processes of the host: some 20 us each.
"""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from numapin.observe.model import MemoryKind
from numapin.observe.read import observe
from numapin.system import proc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from numapin.base.cpu_set import CpuSet
    from numapin.compare.record import RankSteps
    from numapin.topology.readings import GpuLoad

_KINDS = frozenset(MemoryKind) - {MemoryKind.FILE}  # the page cache is where the first reader's CPU was


@dataclass(slots=True)
class JobReadings:
    """Readings of one job. `cpu_s` and `busy` are pairs of a time (CLOCK_MONOTONIC) and a value."""

    leader: int
    loads: Callable[[], Mapping[str, GpuLoad]]
    cpu_s: list[tuple[float, float]] = field(default_factory=list)
    busy: list[tuple[float, float]] = field(default_factory=list)
    seen: dict[int, int] = field(default_factory=dict)
    """Every process of the job so far: process id -> start time."""

    def read(self) -> None:
        """Take a reading of the CPU time and of the GPUs."""
        processes = dict(proc.processes())
        children: dict[int, list[int]] = {}
        for pid, found in processes.items():
            children.setdefault(found.parent, []).append(pid)
        tree = [pid for pid in (self.leader, *proc.descendants(self.leader, children)) if pid in processes]
        self.seen.update((pid, processes[pid].start) for pid in tree)
        ticks = sum(processes[pid].cpu_ticks for pid in tree)
        self.cpu_s.append((time.monotonic(), ticks / os.sysconf("SC_CLK_TCK")))
        shares = [load.busy_share for load in self.loads().values() if load.busy_share is not None]
        if shares:
            self.busy.append((time.monotonic(), statistics.fmean(shares)))

    def left(self) -> list[int]:
        """Return the processes of the job that are still running."""
        return [pid for pid, start in self.seen.items() if proc.is_running(pid, start)]

    def memory_bytes(self) -> int | None:
        """Return the memory of the job: each page once, shared ones in parts (PSS). None: the kernel refuses."""
        sizes = [size for size in map(_pss_bytes, self.left()) if size is not None]
        return sum(sizes) if sizes else None


def peak_bytes(ranks: Iterable[RankSteps]) -> int | None:
    """Return the most resident memory that a rank's own process ever had; None if no rank is left."""
    sizes = [size for rank in ranks if (size := proc.size_bytes(rank.pid, "status", "VmHWM:")) is not None]
    return max(sizes, default=None)


def _pss_bytes(pid: int) -> int | None:
    return proc.size_bytes(pid, "smaps_rollup", "Pss:")


def remote_share(ranks: Iterable[RankSteps], nodes: Mapping[int, CpuSet]) -> float | None:
    """Return the share of the ranks' memory on other nodes than planned; `nodes` are those of each local rank.

    None if the machine has one node, where no memory is remote, or if nothing could be read.
    """
    observed = observe({rank.local_rank: rank.pid for rank in ranks if rank.local_rank in nodes})
    if len(observed.nodes) < 2:
        return None
    counts = {rank.local_rank: rank.bytes_by_node(_KINDS) for rank in observed.ranks}
    total = sum(count.total() for count in counts.values())
    near = sum(size for rank, count in counts.items() for node, size in count.items() if node in nodes[rank])
    return 1 - near / total if total else None


def between(readings: Sequence[tuple[float, float]], at_s: float) -> float | None:
    """Return the value at a time, between the two readings around it; None outside of them."""
    for (before_s, before), (after_s, after) in pairwise(readings):
        if before_s <= at_s <= after_s:
            return before + (after - before) * (at_s - before_s) / max(after_s - before_s, 1e-9)
    return None
