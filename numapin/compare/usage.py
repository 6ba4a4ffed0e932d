"""CPU time, memory and GPU load of a job's processes.

One reading takes a look at all processes of the host: some 20 us each.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from numapin.base.text import not_none, without_none
from numapin.observe.model import MemoryKind
from numapin.observe.read import observe
from numapin.rank.hook_env import STEPS_VARIABLE
from numapin.system import proc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from numapin.base.cpu_set import CpuSet
    from numapin.compare.record import RankSteps
    from numapin.observe.model import ObservedRank
    from numapin.topology.readings import GpuLoad

_KINDS = frozenset(MemoryKind) - {MemoryKind.FILE}  # the page cache is where the first reader's CPU was


@dataclass(slots=True)
class JobReadings:
    """Readings of one job. The lists are of pairs of a time (CLOCK_MONOTONIC) and a value.

    `mark` is the value of NUMAPIN_STEPS that only this job's processes have.
    """

    leader: int
    loads: Callable[[], Mapping[str, GpuLoad]]
    mark: str
    cpu_s: list[tuple[float, float]] = field(default_factory=list)
    host_cpu_s: list[tuple[float, float]] = field(default_factory=list)
    """CPU time of all programs on the host."""
    busy: list[tuple[float, Mapping[str, float]]] = field(default_factory=list)
    """The share of the time in which a kernel ran, by GPU."""
    seen: dict[int, int] = field(default_factory=dict)
    """Every process of the job so far: process id -> start time."""

    def read(self) -> None:
        """Take a reading of the CPU time and of the GPUs."""
        processes = dict(proc.processes())
        children: dict[int, list[int]] = {}
        for pid, found in processes.items():
            children.setdefault(found.parent, []).append(pid)
        tree = processes.keys() & {self.leader, *proc.descendants(self.leader, children)}
        self.seen.update((pid, processes[pid].start) for pid in tree)
        ticks = sum(processes[pid].cpu_ticks for pid in tree)
        now_s, per_second = time.monotonic(), os.sysconf("SC_CLK_TCK")
        self.cpu_s.append((now_s, ticks / per_second))
        self.host_cpu_s.append((now_s, _host_ticks() / per_second))
        self._read_gpus()

    def _read_gpus(self) -> None:
        shares = without_none({uuid: load.busy_share for uuid, load in self.loads().items()})
        if shares:
            self.busy.append((time.monotonic(), shares))

    def left(self) -> list[int]:
        """Return the processes of the job that are still running, also those whose parent has ended."""
        seen = {pid for pid, start in self.seen.items() if proc.is_running(pid, start)}
        return sorted(seen.union(pid for pid, _ in proc.processes() if self._is_marked(pid)))

    def _is_marked(self, pid: int) -> bool:
        return (proc.environment_of(pid) or {}).get(STEPS_VARIABLE) == self.mark

    def memory_bytes(self) -> int | None:
        """Return the memory of the job: each page once, shared ones in parts (PSS). None: a process refuses."""
        sizes = {pid: _pss_bytes(pid) for pid in self.left()}
        if any(size is None and proc.is_running(pid) for pid, size in sizes.items()):
            return None
        return sum(not_none(sizes.values())) or None


def peak_bytes(ranks: Iterable[RankSteps]) -> int | None:
    """Return the most resident memory that a rank's own process ever had; None if no rank is left."""
    return max(not_none(proc.size_bytes(rank.pid, "status", "VmHWM:") for rank in ranks), default=None)


def _host_ticks() -> int:
    """Return the CPU time of all programs on the host since boot: user, nice, system, irq, softirq (proc_stat(5))."""
    user, nice, system, _idle, _iowait, irq, softirq = proc.read("/proc/stat").split(maxsplit=8)[1:8]
    return sum(map(int, (user, nice, system, irq, softirq)))


def _pss_bytes(pid: int) -> int | None:
    return proc.size_bytes(pid, "smaps_rollup", "Pss:")


def remote_share(ranks: Iterable[RankSteps], nodes: Mapping[int, CpuSet]) -> float | None:
    """Return the share of the ranks' memory on other nodes than planned; `nodes` are those of each local rank.

    None if the machine has one node, where no memory is remote, or if a process's pages cannot be read.
    """
    observed = observe({rank.local_rank: rank.pid for rank in ranks if rank.local_rank in nodes})
    if len(observed.nodes) < 2 or not all(map(_is_verified, observed.ranks)):
        return None
    return _share_elsewhere(observed.ranks, nodes)


def _share_elsewhere(ranks: Iterable[ObservedRank], nodes: Mapping[int, CpuSet]) -> float | None:
    counts = {rank.local_rank: rank.bytes_by_node(_KINDS) for rank in ranks}
    total = sum(count.total() for count in counts.values())
    near = sum(_bytes_on(nodes[rank], count) for rank, count in counts.items())
    return 1 - near / total if total else None


def _is_verified(rank: ObservedRank) -> bool:
    return all(process.pages is not None for process in rank.processes)


def _bytes_on(nodes: CpuSet, bytes_by_node: Mapping[int, int]) -> int:
    return sum(size for node, size in bytes_by_node.items() if node in nodes)


def between(readings: Sequence[tuple[float, float]], at_s: float) -> float | None:
    """Return the value at a time, between the two readings around it; None outside of them."""
    for (before_s, before), (after_s, after) in pairwise(readings):
        if before_s <= at_s <= after_s:
            return before + (after - before) * (at_s - before_s) / max(after_s - before_s, 1e-9)
    return None
