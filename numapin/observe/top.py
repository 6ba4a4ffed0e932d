"""The activity of a running job between two samples, and the pace of its loops over the last ones.

What is unknown is None.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from numapin.observe.model import MemoryKind
from numapin.observe.verify import JUDGED, LOCKED, elsewhere, off_plan
from numapin.topology.readings import GpuLoad

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numapin.observe.model import ObservedRank
    from numapin.plan.model import Plan, RankPlan
    from numapin.steps.totals import Waited

_WINDOW: Final = 10  # intervals that a pace covers, so that steps may be longer than an interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The readings of one moment on the monotonic clock, by local rank."""

    at_s: float
    ranks: Mapping[int, ObservedRank]  # the threads now; the pages, and which processes there are, may be older
    bound: frozenset[int]  # ranks that numapin bound
    gone: frozenset[int]  # ranks whose process has ended
    loads: Mapping[str, GpuLoad]  # by UUID
    swapped: tuple[int, int] | None  # pages in and out since the machine started
    waited: Mapping[int, Waited] = field(default_factory=dict)  # of the ranks whose loops are counted
    cpu_s: Mapping[int, Mapping[int, float]] = field(default_factory=dict)  # the CPU time used, by rank and process id
    up_s: Mapping[int, float] = field(default_factory=dict)  # since each rank's process started


@dataclass(frozen=True, slots=True, kw_only=True)
class TopRank:
    """One rank now."""

    plan: RankPlan
    pid: int
    is_gone: bool
    num_threads: int
    num_off_plan: int  # threads, see `off_plan`
    remote_share: float | None  # of its pages on nodes outside the plan, the page cache of files left out
    pinned_bytes: int | None
    wait_share: float | None  # of its loops' time, spent waiting for the next batch
    load: GpuLoad
    cpu_share: float | None = None  # CPU time of its processes per second; 1.0 is one CPU that is never idle
    up_s: float | None = None
    loop: Waited | None = None  # the totals of its loops

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
            "gpu_used_bytes": self.load.used_bytes,
            "gpu_memory_bytes": self.load.memory_bytes,
            "gpu_power_w": self.load.power_w,
            "cpu_share": self.cpu_share,
            "up_s": self.up_s,
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
        """Whether all ranks are gone."""
        return all(rank.is_gone for rank in self.ranks)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form (schema numapin.top/1)."""
        swapped_in, swapped_out = self.swap_per_s or (None, None)
        rates = {rank: pace.steps_per_s for rank, pace in LoopPaces().add(self).items()}
        return {
            "schema": "numapin.top/1",
            "run": self.run,
            "ended": self.has_ended,
            "interval_s": self.interval_s,
            "swap_in_pages_per_s": swapped_in,
            "swap_out_pages_per_s": swapped_out,
            "ranks": [{**rank.to_json(), "steps_per_s": rates.get(rank.plan.local_rank)} for rank in self.ranks],
        }


def top(run: str, plan: Plan, *, before: Sample, now: Sample) -> Top:
    """Return the activity of a job between two samples."""
    planned = {rank.local_rank: rank for rank in plan.ranks}
    interval_s = now.at_s - before.at_s
    swap_per_s = None
    if before.swapped is not None and now.swapped is not None and interval_s > 0:
        (in_before, out_before), (in_now, out_now) = before.swapped, now.swapped
        swap_per_s = ((in_now - in_before) / interval_s, (out_now - out_before) / interval_s)
    off = off_plan(plan, now.ranks.values(), bound=now.bound)
    ranks = tuple(
        _rank(planned[rank], seen, off[rank].num_threads, before, now) for rank, seen in sorted(now.ranks.items())
    )
    return Top(run=run, interval_s=interval_s, ranks=ranks, swap_per_s=swap_per_s)


def _rank(plan: RankPlan, seen: ObservedRank, num_off_plan: int, before: Sample, now: Sample) -> TopRank:
    rank, interval_s = plan.local_rank, now.at_s - before.at_s
    by_node = seen.bytes_by_node(JUDGED)
    remote_share = None
    if seen.has_memory and by_node and plan.nodes:
        remote_share = sum(elsewhere(plan, by_node).values()) / by_node.total()
    used, used_before = now.cpu_s.get(rank), before.cpu_s.get(rank)
    locked = LOCKED if plan.gpu is not None else frozenset({MemoryKind.PINNED})  # without a GPU no slot is pinned
    cpu_share = None
    if used and used_before and interval_s > 0:  # of processes in both samples: a new one has used time before
        grown = (cpu_s - used_before[pid] for pid, cpu_s in used.items() if pid in used_before)
        cpu_share = sum(max(cpu_s, 0.0) for cpu_s in grown) / interval_s
    return TopRank(
        plan=plan,
        pid=seen.pid,
        is_gone=rank in now.gone,
        num_threads=len(list(seen.threads)),
        num_off_plan=num_off_plan,
        remote_share=remote_share,
        pinned_bytes=None if seen.hides_pinned or not seen.has_memory else seen.bytes_by_node(locked).total(),
        wait_share=_wait_share(before.waited.get(rank), now.waited.get(rank)),
        load=now.loads.get((plan.gpu and plan.gpu.uuid) or "", GpuLoad()),
        cpu_share=cpu_share,
        up_s=now.up_s.get(rank),
        loop=now.waited.get(rank),
    )


def _wait_share(before: Waited | None, now: Waited | None) -> float | None:
    """Return the share between two totals; None if one is missing, or if no step ended in between."""
    if before is None or now is None or now.stepped_s <= before.stepped_s:
        return None
    return min(max((now.waited_s - before.waited_s) / (now.stepped_s - before.stepped_s), 0.0), 1.0)


class LoopPace(NamedTuple):
    """The steps of one rank lately: how many per second, and the share of their time spent waiting for a batch."""

    steps_per_s: float | None = None
    wait_share: float | None = None


class LoopPaces:
    """The paces of all ranks over the last intervals. A rank that was restarted begins anew."""

    def __init__(self) -> None:
        self._at_s = 0.0
        self._totals: dict[int, deque[tuple[float, int, Waited]]] = {}

    def add(self, seen: Top) -> dict[int, LoopPace]:
        """Add an interval; return the pace of each rank whose steps are counted."""
        self._at_s += seen.interval_s
        paces = {}
        for rank in seen.ranks:
            number = rank.plan.local_rank
            totals = self._totals.setdefault(number, deque(maxlen=_WINDOW + 1))
            if rank.loop is None or (totals and totals[-1][1] != rank.pid):
                totals.clear()
            if rank.loop is None:
                continue
            totals.append((self._at_s, rank.pid, rank.loop))
            first_s, _, first = totals[0]
            num_steps, passed_s = rank.loop.num_steps - first.num_steps, self._at_s - first_s
            if len(totals) == 1:  # since its loops began
                num_steps, passed_s = rank.loop.num_steps, rank.loop.stepped_s
            is_counted = rank.loop.num_steps > 0 and passed_s > 0
            paces[number] = LoopPace(
                steps_per_s=max(num_steps, 0) / passed_s if is_counted else None,
                wait_share=_wait_share(first, rank.loop) if len(totals) > 1 else rank.wait_share,
            )
        return paces
