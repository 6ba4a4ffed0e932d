"""What a running job does, from one sample to the next. Pure.

Comes in: two `Sample`s of a job and its plan. Goes out: `Top`: a row a rank, and what the machine swaps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from numapin.observe.model import Role
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
    """What was read at one time, by local rank.

    `threads` are the CPUs of every thread of a rank and its descendants; `gone` are ranks whose process ended. `memory`
    may be older than the rest. `loads` are by the GPU's UUID. `swapped` are pages in and out since the machine started.
    `waited` has the ranks that use `numapin.DataLoader`.
    """

    at_s: float
    threads: Mapping[int, tuple[CpuSet, ...]]
    gone: frozenset[int]
    memory: Mapping[int, ObservedRank]
    loads: Mapping[str, GpuLoad]
    swapped: tuple[int, int] | None
    waited: Mapping[int, Waited] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopRank:
    """One rank now. `remote_share` is of its pages, without those of files, the part on nodes outside the plan.

    `wait_share` is of the time that its loops took from batch to batch, the part in which they waited for the next.
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
        """Return whether no rank is there any more."""
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
    """Return what the job did between two samples."""
    planned = {rank.local_rank: rank for rank in plan.ranks}
    interval_s = now.at_s - before.at_s
    swap_per_s = None
    if before.swapped is not None and now.swapped is not None and interval_s > 0:
        (in_before, out_before), (in_now, out_now) = before.swapped, now.swapped
        swap_per_s = ((in_now - in_before) / interval_s, (out_now - out_before) / interval_s)
    ranks = tuple(_rank(planned[rank], memory, before, now) for rank, memory in sorted(now.memory.items()))
    return Top(run=run, interval_s=interval_s, ranks=ranks, swap_per_s=swap_per_s)


def _rank(plan: RankPlan, memory: ObservedRank, before: Sample, now: Sample) -> TopRank:
    threads = now.threads[plan.local_rank]
    by_node = memory.bytes_by_node(JUDGED)
    total = sum(by_node.values())
    is_read = any(process.role is Role.RANK and process.pages is not None for process in memory.processes)
    away = sum(elsewhere(plan, by_node).values())
    uuid = plan.gpu.uuid if plan.gpu is not None else None
    return TopRank(
        plan=plan,
        pid=memory.pid,
        is_gone=plan.local_rank in now.gone,
        num_threads=len(threads),
        num_off_plan=sum(not cpus <= plan.cpus for cpus in threads),
        remote_share=away / total if is_read and total and plan.nodes else None,
        pinned_bytes=sum(memory.bytes_by_node(LOCKED).values()) if is_read else None,
        wait_share=_wait_share(before.waited.get(plan.local_rank), now.waited.get(plan.local_rank)),
        load=now.loads.get(uuid or "", GpuLoad()),
    )


def _wait_share(before: Waited | None, now: Waited | None) -> float | None:
    """Return the share between two samples; None without a loader of ours, or where no step ended meanwhile."""
    if before is None or now is None or now.stepped_s <= before.stepped_s:
        return None
    return (now.waited_s - before.waited_s) / (now.stepped_s - before.stepped_s)
