"""The activity of a running job between two samples. Pure.

Comes in: two `Sample`s of a job, and its plan. Goes out: `Top`, with an entry per rank and the machine's swap rates.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from numapin.observe.verify import JUDGED, LOCKED, elsewhere
from numapin.topology.readings import GpuLoad

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numapin.base.cpu_set import CpuSet
    from numapin.data.loop_times import Waited
    from numapin.observe.model import ObservedRank
    from numapin.plan.model import Plan, RankPlan

SCHEMA: Final = "numapin.top/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The readings of one moment, by local rank.

    Attributes:
        at_s: When the readings were taken, on the monotonic clock.
        threads: The CPUs of every thread of a rank and its descendants.
        gone: Ranks whose process has ended.
        memory: The pages; they may be older than the rest.
        loads: The GPUs' loads, by UUID.
        swapped: Pages swapped in and out since the machine started. None: unknown.
        waited: The loop times of the ranks that use `numapin.DataLoader`.
        cpu_s: The CPU time that each process of a rank has used, by process id.
        up_s: The time since each rank's process started.
    """

    at_s: float
    threads: Mapping[int, tuple[CpuSet, ...]]
    gone: frozenset[int]
    memory: Mapping[int, ObservedRank]
    loads: Mapping[str, GpuLoad]
    swapped: tuple[int, int] | None
    waited: Mapping[int, Waited] = field(default_factory=dict)
    cpu_s: Mapping[int, Mapping[int, float]] = field(default_factory=dict)
    up_s: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopRank:
    """One rank now; None is unknown.

    Attributes:
        plan: The rank's part of the plan.
        pid: The rank's process id.
        is_gone: Whether that process has ended.
        num_threads: The number of threads of the rank and its descendants.
        num_off_plan: How many of them may run on CPUs outside the plan.
        remote_share: The share of its pages on nodes outside the plan, the page cache of files left out.
        pinned_bytes: Its page-locked memory.
        wait_share: The share of its loops' time spent waiting for the next batch.
        load: The load of its GPU.
        cpu_share: The CPU time of its processes per second; 1.0 is one CPU that is never idle.
        up_s: The time since its process started.
        loop: The totals of its loops. None: it uses no `numapin.DataLoader`.
    """

    plan: RankPlan
    pid: int
    is_gone: bool
    num_threads: int
    num_off_plan: int
    remote_share: float | None
    pinned_bytes: int | None
    wait_share: float | None
    load: GpuLoad
    cpu_share: float | None = None
    up_s: float | None = None
    loop: Waited | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        planned = self.plan.to_json()
        return {
            **{name: planned[name] for name in ("local_rank", "gpu", "node", "cpus")},
            "pid": self.pid,
            "gone": self.is_gone,
            "threads": self.num_threads,
            "threads_off_plan": self.num_off_plan,
            "remote_share": self.remote_share,
            "pinned_bytes": self.pinned_bytes,
            "loader_wait_share": self.wait_share,
            "h2d_gbps": self.load.h2d_gbps,
            "gpu_busy_share": self.load.busy_share,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Top:
    """A job now. `swap_per_s` are the machine's pages in and out."""

    run: str
    interval_s: float
    ranks: tuple[TopRank, ...]
    swap_per_s: tuple[float, float] | None

    @property
    def has_ended(self) -> bool:
        """Return whether all ranks are gone."""
        return all(rank.is_gone for rank in self.ranks)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        swapped_in, swapped_out = self.swap_per_s or (None, None)
        return {
            "schema": SCHEMA,
            "run": self.run,
            "ended": self.has_ended,
            "interval_s": self.interval_s,
            "swap_in_pages_per_s": swapped_in,
            "swap_out_pages_per_s": swapped_out,
            "ranks": [rank.to_json() for rank in self.ranks],
        }


def top(run: str, plan: Plan, *, before: Sample, now: Sample) -> Top:
    """Return the activity of a job between two samples."""
    planned = {rank.local_rank: rank for rank in plan.ranks}
    ranks = tuple(_rank(planned[rank], memory, before, now) for rank, memory in sorted(now.memory.items()))
    return Top(run=run, interval_s=now.at_s - before.at_s, ranks=ranks, swap_per_s=_swap_per_s(before, now))


def _swap_per_s(before: Sample, now: Sample) -> tuple[float, float] | None:
    """Return the machine's pages swapped in and out per second; None if a sample has no counters."""
    interval_s = now.at_s - before.at_s
    if before.swapped is None or now.swapped is None or interval_s <= 0:
        return None
    (in_before, out_before), (in_now, out_now) = before.swapped, now.swapped
    return (in_now - in_before) / interval_s, (out_now - out_before) / interval_s


def _rank(plan: RankPlan, memory: ObservedRank, before: Sample, now: Sample) -> TopRank:
    threads = now.threads[plan.local_rank]
    return TopRank(
        plan=plan,
        pid=memory.pid,
        is_gone=plan.local_rank in now.gone,
        num_threads=len(threads),
        num_off_plan=sum(not cpus <= plan.cpus for cpus in threads),
        remote_share=_remote_share(plan, memory),
        pinned_bytes=memory.bytes_by_node(LOCKED).total() if memory.has_memory else None,
        wait_share=_wait_share(before.waited.get(plan.local_rank), now.waited.get(plan.local_rank)),
        load=_load(plan, now.loads),
        cpu_share=_cpu_share(plan.local_rank, before, now),
        up_s=now.up_s.get(plan.local_rank),
        loop=now.waited.get(plan.local_rank),
    )


def _cpu_share(rank: int, before: Sample, now: Sample) -> float | None:
    """Return the CPU time per second of the processes that are in both samples; None if the rank is in one only."""
    used, used_before = now.cpu_s.get(rank), before.cpu_s.get(rank)
    interval_s = now.at_s - before.at_s
    if not used or not used_before or interval_s <= 0:
        return None
    return sum(max(cpu_s - used_before[pid], 0.0) for pid, cpu_s in used.items() if pid in used_before) / interval_s


def _remote_share(plan: RankPlan, memory: ObservedRank) -> float | None:
    """Return the share of pages on nodes outside the plan; None if the pages or the planned nodes are unknown."""
    by_node = memory.bytes_by_node(JUDGED)
    if not (memory.has_memory and by_node and plan.nodes):
        return None
    return sum(elsewhere(plan, by_node).values()) / by_node.total()


def _load(plan: RankPlan, loads: Mapping[str, GpuLoad]) -> GpuLoad:
    """Return the load of the rank's GPU, all unknown if the GPU has no UUID or NVML did not answer."""
    uuid = plan.gpu.uuid if plan.gpu is not None else None
    return loads.get(uuid or "", GpuLoad())


def _wait_share(before: Waited | None, now: Waited | None) -> float | None:
    """Return the share between two samples; None without our loader, or if no step ended in between."""
    if before is None or now is None or now.stepped_s <= before.stepped_s:
        return None
    return (now.waited_s - before.waited_s) / (now.stepped_s - before.stepped_s)
