"""The parts of a rank's step times, and the kinds of its copies.

Each moment of a step counts once, for the first of these that applies. With a GPU: a kernel ran ("compute", or
"communication" if only NCCL's ran); a copy ran or blocked the host ("copy"); the loop pinned a batch ("pin"); the loop
waited for its DataLoader, at the border of an epoch ("epoch", with the start and end of the workers) or within one
("wait"); anything else ("other": Python, kernel launches, an idle GPU). So what compute hides costs nothing. On the
CPU, waiting comes first, because operators inside the wait make the batch; "communication" are collective operations.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Final, TypeAlias

from numapin.trace.intervals import Intervals, Lengths, common, length, union, without

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numapin.trace.noted import LoaderUse
    from numapin.trace.records import Copy, Kernel, Span, Trace

    _Busy: TypeAlias = Mapping[int | None, Lengths]  # when kernels ran, by device
    _Streams: TypeAlias = set[tuple[int | None, int | None]]  # device and stream of each kernel

COMMUNICATION: Final = "communication"
PARTS: Final = ("compute", COMMUNICATION, "copy", "pin", "epoch", "wait", "other")
_NEVER: Final = Lengths(())


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Copies with the same direction, kinds of memory, operator and shape.

    `overlapped_us` is the time that kernels ran on the same device during the copies. `exposed_us` is the time that no
    kernel ran while a copy ran or blocked the host. `num_blocking` counts the copies that blocked the host, None if no
    call is known. `same_stream` is true if kernels ran on the stream of the copies.
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
class EpochStart:
    """The start of an epoch within the steps: the start of the workers and the first wait, but nothing between them.

    `loader` is the number of the script's loader.
    """

    loader: int | None
    moments: Intervals
    time_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """The use of one rank's step time. `waited_us` is all of the loop's waiting, including what compute hid.

    `waited_within_us` is the part of it that is not at the border of an epoch.
    `other` are the moments of the part of that name. `updating` are those of them in which the optimizer ran on the CPU
    of a script that uses a GPU.
    """

    trace: Trace
    step_us: float
    parts_us: Mapping[str, float]
    steps_us: tuple[Mapping[str, float], ...]
    num_batches: int
    waited_us: float
    waited_within_us: float
    groups: tuple[Group, ...]
    other: Intervals
    updating: Intervals
    epoch_starts: tuple[EpochStart, ...]

    @property
    def updating_us(self) -> float:
        """The time of all steps in which the optimizer ran on the CPU while the GPU was idle."""
        return length(self.updating)

    @property
    def num_epochs(self) -> int:
        """The number of epochs that began within the steps."""
        return len(self.epoch_starts)

    @property
    def slowest_loader(self) -> LoaderUse | None:
        """The loader whose epoch began most slowly; None if no epoch began, or its loader is unknown."""
        slowest = max(self.epoch_starts, key=attrgetter("time_us"), default=None)
        loaders, number = self.trace.noted.loaders, slowest.loader if slowest else None
        return None if number is None or not 0 <= number < len(loaders) else loaders[number]

    @property
    def window_us(self) -> float:
        """The time of all steps together."""
        return self.step_us * len(self.trace.steps)

    def share(self, part: str) -> float:
        """Return the share of the step time that a part takes."""
        return self.parts_us[part] / self.window_us if self.window_us else 0.0


def analyze(trace: Trace) -> Analysis:
    """Attribute the time of the trace's steps to their parts."""
    window = _moments(trace.steps)
    in_window = Lengths(window)
    starts = _epoch_starts(trace, in_window)
    borders = _epoch_borders(trace, starts)
    moments = _gpu_parts(trace, borders) if trace.on_gpu else _cpu_parts(trace, borders)
    parts = _exclusive(moments)
    other = without(window, union(chain.from_iterable(moments.values())))
    inside = [wait for wait in trace.waits if in_window.between(*wait.pair)]
    waited = common(_moments(inside), window)
    return Analysis(
        trace=trace,
        step_us=length(window) / len(trace.steps),
        parts_us=_lengths(parts, window),
        steps_us=tuple(_lengths(parts, (step.pair,)) for step in trace.steps),
        num_batches=len(inside),
        waited_us=length(waited),
        waited_within_us=length(without(waited, borders)),
        groups=_groups(trace, in_window),
        other=other,
        updating=common(_moments(trace.updates), other) if _updates_on_cpu(trace) else (),
        epoch_starts=starts,
    )


def _updates_on_cpu(trace: Trace) -> bool:
    """Return whether a script that uses a GPU has its optimizer on the CPU."""
    on_cpu = trace.noted.updates_on_cpu
    return trace.on_gpu and (not trace.updates_launch if on_cpu is None else on_cpu)


def _epoch_starts(trace: Trace, in_window: Lengths) -> tuple[EpochStart, ...]:
    """Return the starts of epochs within the steps. The first wait of one that began earlier is not in the trace."""
    first_us = trace.steps[0].start
    starts = (_epoch_start(trace, epoch, in_window) for epoch in trace.noted.epochs if epoch.end >= first_us)
    return tuple(start for start in starts if start.time_us > 0)


def _epoch_start(trace: Trace, epoch: Span, in_window: Lengths) -> EpochStart:
    first = bisect_left(trace.waits, epoch.end, key=attrgetter("start"))
    moments = union((epoch.pair, *(wait.pair for wait in trace.waits[first : first + 1])))
    return EpochStart(loader=epoch.row, moments=moments, time_us=in_window.within(moments))


def _epoch_borders(trace: Trace, starts: Iterable[EpochStart]) -> Intervals:
    """Return the starts of epochs and their ends, when workers are ended that would be started again."""
    starting = chain.from_iterable(start.moments for start in starts)
    return union((*starting, *(end.pair for end in trace.noted.ends)))


def _moments(spans: Iterable[Span | Copy]) -> Intervals:
    return union(span.pair for span in spans)


def _cpu_parts(trace: Trace, borders: Intervals) -> dict[str, Intervals]:
    """Return the moments of each part, the first to count first."""
    return {
        "epoch": borders,
        "wait": _moments(trace.waits),
        "pin": _moments(trace.loop_pins),
        "compute": _moments(trace.operators),
        "communication": _moments(trace.exchanges),
    }


def _gpu_parts(trace: Trace, borders: Intervals) -> dict[str, Intervals]:
    """Return the moments of each part, the first to count first. Copies within GPUs count as compute."""
    computing = (kernel for kernel in trace.kernels if not kernel.communicates)
    communicating = (kernel for kernel in trace.kernels if kernel.communicates)
    within_gpus = (copy for copy in trace.copies if not copy.crosses)
    return {
        "compute": _moments(chain(computing, within_gpus)),
        "communication": _moments(communicating),
        "copy": union(chain.from_iterable(copy.occupied for copy in trace.copies if copy.crosses)),
        "pin": without(_moments(trace.loop_pins), _moments(trace.waits)),  # a loader without workers pins in next()
        "epoch": borders,
        "wait": _moments(trace.waits),
    }


def _exclusive(parts: Mapping[str, Intervals]) -> dict[str, Lengths]:
    """Leave each moment to the first part that has it."""
    exclusive: dict[str, Lengths] = {}
    taken: Intervals = ()
    for name, intervals in parts.items():
        exclusive[name] = Lengths(without(intervals, taken))
        taken = union((*taken, *intervals))
    return exclusive


def _lengths(parts: Mapping[str, Lengths], window: Intervals) -> dict[str, float]:
    """Return the time of each part within the window; the rest is "other"."""
    lengths = dict.fromkeys(PARTS, 0.0) | {name: part.within(window) for name, part in parts.items()}
    return lengths | {"other": max(length(window) - sum(lengths.values()), 0.0)}


def _groups(trace: Trace, in_window: Lengths) -> tuple[Group, ...]:
    """Group equal copies within the window; the groups that took longest come first."""
    alike: dict[tuple[str | None, ...], list[Copy]] = defaultdict(list)
    for copy in trace.copies:
        if in_window.between(*copy.pair):
            alike[copy.direction, copy.source, copy.target, copy.operator, copy.shapes].append(copy)
    busy, streams = _busy(trace.kernels), {(kernel.device, kernel.row) for kernel in trace.kernels}
    groups = (_group(copies, busy, streams) for copies in alike.values())
    return tuple(sorted(groups, key=lambda group: -max(group.busy_us, group.blocked_us)))


def _busy(kernels: Iterable[Kernel]) -> _Busy:
    by_device: dict[int | None, list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        by_device[kernel.device].append(kernel)
    return {device: Lengths(_moments(own)) for device, own in by_device.items()}


def _group(copies: Sequence[Copy], busy: _Busy, streams: _Streams) -> Group:
    first = copies[0]
    kernels = [busy.get(copy.device, _NEVER) for copy in copies]
    return Group(
        direction=first.direction,
        source=first.source,
        target=first.target,
        operator=first.operator,
        shapes=first.shapes,
        count=len(copies),
        num_bytes=_total([copy.num_bytes for copy in copies]),
        busy_us=sum(copy.duration_us for copy in copies),
        overlapped_us=sum(map(_overlapped_us, copies, kernels)),
        exposed_us=sum(map(_exposed_us, copies, kernels)),
        blocked_us=sum(length(union(copy.blocked)) for copy in copies),
        num_blocking=_num_blocking(copies),
        same_stream=any((copy.device, copy.stream) in streams for copy in copies),
    )


def _overlapped_us(copy: Copy, kernels: Lengths) -> float:
    return kernels.between(*copy.pair)


def _exposed_us(copy: Copy, kernels: Lengths) -> float:
    occupied = union(copy.occupied)
    return length(occupied) - kernels.within(occupied)


def _num_blocking(copies: Iterable[Copy]) -> int | None:
    known = [copy.blocking for copy in copies if copy.blocking is not None]
    return sum(known) if known else None


def _total(sizes: Sequence[int | None]) -> int | None:
    """Return the sum, None if a size is unknown."""
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None
