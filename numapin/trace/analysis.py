"""Where the time of a rank's steps went, and how its copies were made. Pure.

Comes in: a `Trace`. Goes out: an `Analysis`: shares of the steps' time that add up to one, and groups of equal copies.

Each moment of a step counts once, for the first of these that holds. With a GPU: a kernel ran (compute; NCCL's alone:
communication); a copy went on, or the host stood still for one (copy); the loop pinned (pin); the loop waited for its
DataLoader (wait); the rest (other: Python, launching, the GPU idle). So what is hidden behind compute costs nothing. On
the CPU the loop's waiting comes first: operators inside it make the batch.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from numapin.trace.intervals import Intervals, between, common, length, union, without
from numapin.trace.records import HOST_TO_DEVICE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numapin.trace.records import Copy, Trace

PARTS: Final = ("compute", "communication", "copy", "pin", "wait", "other")


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Copies of one direction between two kinds of memory, asked for by one operator for one shape.

    `overlapped_us` is how long kernels ran on the same device meanwhile; `exposed_us` how long none ran while a copy
    went on or the host stood still for it. `num_blocking` counts those that the host
    stood still for, None where no call is known; `same_stream` says whether kernels ran on the copies' own stream.
    """

    direction: str | None
    source: str | None
    target: str | None
    operator: str | None
    shapes: str | None
    count: int
    num_bytes: int | None
    busy_us: float
    overlapped_us: float
    exposed_us: float
    blocked_us: float
    num_blocking: int | None
    same_stream: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """What one rank's steps were spent on. `waited_us` is all of the loop's waiting, also what compute hid."""

    trace: Trace
    step_us: float
    parts_us: Mapping[str, float]
    steps_us: tuple[Mapping[str, float], ...]
    num_batches: int
    waited_us: float
    groups: tuple[Group, ...]

    @property
    def window_us(self) -> float:
        """Return how long the steps took together."""
        return self.step_us * len(self.trace.steps)

    def share(self, part: str) -> float:
        """Return a part's share of the time."""
        return self.parts_us[part] / self.window_us if self.window_us else 0.0


def analyse(trace: Trace) -> Analysis:
    """Return where the time of the trace's steps went."""
    window = union(step.pair for step in trace.steps)
    parts = _parts(trace)
    inside = [wait for wait in trace.waits if between(window, *wait.pair)]
    return Analysis(
        trace=trace,
        step_us=length(window) / len(trace.steps),
        parts_us=_cut(parts, window),
        steps_us=tuple(_cut(parts, (step.pair,)) for step in trace.steps),
        num_batches=len(inside),
        waited_us=length(common(union(wait.pair for wait in inside), window)),
        groups=_groups(trace, window),
    )


def _parts(trace: Trace) -> dict[str, Intervals]:
    """Return when each part had its time; no two at once."""
    waits, pins = union(span.pair for span in trace.waits), union(span.pair for span in trace.loop_pins)
    if not trace.on_gpu:
        return _exclusive(wait=waits, pin=pins, compute=union(span.pair for span in trace.operators))
    device_work = (copy.pair for copy in trace.copies if not _crosses(copy))
    return _exclusive(
        compute=union([*(kernel.pair for kernel in trace.kernels if not kernel.communicates), *device_work]),
        communication=union(kernel.pair for kernel in trace.kernels if kernel.communicates),
        copy=union(pair for copy in trace.copies if _crosses(copy) for pair in (copy.pair, *copy.blocked)),
        pin=pins,
        wait=waits,
    )


def _exclusive(**parts: Intervals) -> dict[str, Intervals]:
    """Leave each moment to the first part that has it."""
    left: dict[str, Intervals] = {}
    taken: Intervals = ()
    for name, intervals in parts.items():
        left[name] = without(intervals, taken)
        taken = union((*taken, *intervals))
    return left


def _cut(parts: Mapping[str, Intervals], window: Intervals) -> dict[str, float]:
    """Return how long each part has in the window; what no part has is other."""
    found = {name: sum(length(between(parts.get(name, ()), *pair)) for pair in window) for name in PARTS}
    return found | {"other": max(length(window) - sum(found.values()), 0.0)}


def _crosses(copy: Copy) -> bool:
    """Return whether the copy goes between host and GPU; one of unknown direction may."""
    return copy.direction in (None, HOST_TO_DEVICE, "DtoH")


def _groups(trace: Trace, window: Intervals) -> tuple[Group, ...]:
    """Put equal copies of the window together, those that took longest first."""
    kernels: dict[int | None, list[tuple[float, float]]] = defaultdict(list)
    streams = {(kernel.device, kernel.row) for kernel in trace.kernels}
    for kernel in trace.kernels:
        kernels[kernel.device].append(kernel.pair)
    busy = {device: union(pairs) for device, pairs in kernels.items()}
    alike: dict[tuple[str | None, ...], list[Copy]] = defaultdict(list)
    for copy in trace.copies:
        if between(window, *copy.pair):
            alike[copy.direction, copy.source, copy.target, copy.operator, copy.shapes].append(copy)
    groups = (_group(copies, busy, streams) for copies in alike.values())
    return tuple(sorted(groups, key=lambda group: -max(group.busy_us, group.blocked_us)))


def _group(
    copies: Sequence[Copy], busy: Mapping[int | None, Intervals], streams: set[tuple[int | None, int | None]]
) -> Group:
    first, known = copies[0], [copy.blocking for copy in copies if copy.blocking is not None]
    return Group(
        direction=first.direction,
        source=first.source,
        target=first.target,
        operator=first.operator,
        shapes=first.shapes,
        count=len(copies),
        num_bytes=_total(copy.num_bytes for copy in copies),
        busy_us=sum(copy.end - copy.start for copy in copies),
        overlapped_us=sum(length(between(busy.get(copy.device, ()), *copy.pair)) for copy in copies),
        exposed_us=sum(_exposed_us(copy, busy.get(copy.device, ())) for copy in copies),
        blocked_us=sum(length(union(copy.blocked)) for copy in copies),
        num_blocking=sum(known) if known else None,
        same_stream=any((copy.device, copy.stream) in streams for copy in copies),
    )


def _exposed_us(copy: Copy, busy: Intervals) -> float:
    taken = union((copy.pair, *copy.blocked))
    return length(taken) - sum(length(between(busy, *pair)) for pair in taken)


def _total(sizes: Iterable[int | None]) -> int | None:
    """Return the sum, None where one is unknown."""
    total = 0
    for size in sizes:
        if size is None:
            return None
        total += size
    return total
