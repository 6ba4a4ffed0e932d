"""Findings about a trace, with their remedies. Pure.

Comes in: an `Analysis`. Goes out: findings, each with its cost, evidence and remedy; one of them says that nothing can
be gained.

What takes less than a hundredth of the step time is not reported.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from numapin.trace.records import HOST_TO_DEVICE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numapin.trace.analysis import Analysis, Group

# Shares of the step time.
_FLOOR: Final = 0.01
_WAITING: Final = 0.05
_IDLE: Final = 0.2  # launching small kernels leaves gaps in any program
_BUSY: Final = 0.9
_OVERLAPPED: Final = 0.5  # of the time of the copies

_BUSY_US: Final = attrgetter("busy_us")
_OVERLAPPED_US: Final = attrgetter("overlapped_us")
_EXPOSED_US: Final = attrgetter("exposed_us")
_BLOCKED_US: Final = attrgetter("blocked_us")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFinding:
    """Something that costs time, or the statement that nothing does.

    `costs` is the share of the step time that the remedy can save at most; 0 if nothing can be gained.
    """

    what: str
    costs: float
    evidence: str
    remedy: str


def find(analysis: Analysis) -> tuple[TraceFinding, ...]:
    """Return the findings about a rank's steps; the most costly comes first."""
    checked = (check(analysis) for check in _CHECKS)
    found = [finding for finding in checked if finding is not None]
    return tuple(sorted(found, key=attrgetter("costs"), reverse=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copies:
    """Copies to the GPU from one kind of memory; the groups that took longest come first."""

    analysis: Analysis
    memory: str
    groups: Sequence[Group]

    @classmethod
    def of(cls, analysis: Analysis, memory: str) -> _Copies:
        to_device = (group for group in analysis.groups if group.direction == HOST_TO_DEVICE)
        return cls(analysis=analysis, memory=memory, groups=[group for group in to_device if group.source == memory])

    @property
    def blocking(self) -> _Copies:
        return replace(self, groups=[group for group in self.groups if group.num_blocking])

    @property
    def asynchronous(self) -> _Copies:
        return replace(self, groups=[group for group in self.groups if not group.num_blocking])

    @property
    def costs(self) -> float:
        """The share of the step time that no kernel hid. Copies that overlap each other cost all of it at most."""
        window_us = self.analysis.window_us
        return min(self._total(_EXPOSED_US) / window_us, 1.0) if window_us else 0.0

    @property
    def overlapped(self) -> float:
        """The share of the copies' own time during which kernels ran; 1 for copies that took no time."""
        busy_us = self._total(_BUSY_US)
        return self._total(_OVERLAPPED_US) / busy_us if busy_us else 1.0

    def _total(self, time_us: Callable[[Group], float]) -> float:
        return sum(map(time_us, self.groups))

    def described(self) -> str:
        """Return the number, size, time and origin of the copies."""
        count = sum(group.count for group in self.groups)
        busy = f"{_ms(self.analysis, self._total(_BUSY_US))} per step"
        blocked_us = self._total(_BLOCKED_US)
        blocked = f"; host blocked for {_ms(self.analysis, blocked_us)} per step" if blocked_us else ""
        return f"{count} copies from {self.memory.lower()} memory ({self._size()}{busy}{self._origin()}{blocked})"

    def _size(self) -> str:
        sizes = [group.num_bytes for group in self.groups if group.num_bytes is not None]
        return f"{sum(sizes) / 1e6:.1f} MB in total, " if len(sizes) == len(self.groups) else ""

    def _origin(self) -> str:
        """Return the operator and the shape that most of the time goes to."""
        longest = self.groups[0]
        if not longest.operator:
            return ""
        shape = f" of shape {longest.shapes}" if longest.shapes else ""
        return f", mostly {longest.operator}{shape}"


def _pageable(analysis: Analysis) -> TraceFinding | None:
    copies = _Copies.of(analysis, "Pageable")
    if copies.costs < _FLOOR:
        return None
    return TraceFinding(
        what="pageable copies",
        costs=copies.costs,
        evidence=f"{copies.described()}: the driver stages each copy and blocks the host",
        remedy="use DataLoader(…, pin_memory=True) and .to(device, non_blocking=True), or numapin.DataLoader(…, "
        'device="cuda"); without changing the script: numapin run --dataloader=numapin',
    )


def _blocking(analysis: Analysis) -> TraceFinding | None:
    copies = _Copies.of(analysis, "Pinned").blocking
    if copies.costs < _FLOOR:
        return None
    return TraceFinding(
        what="pinned, but blocking",
        costs=copies.costs,
        evidence=f"{copies.described()}: the host waited for each copy to finish",
        remedy="use .to(device, non_blocking=True)",
    )


def _not_overlapped(analysis: Analysis) -> TraceFinding | None:
    """Find asynchronous copies that are issued too late: the next kernel on their stream needs them."""
    copies = _Copies.of(analysis, "Pinned").asynchronous
    if copies.overlapped >= _OVERLAPPED or copies.costs < _FLOOR:
        return None
    stream = " on the stream of the kernels" if any(group.same_stream for group in copies.groups) else ""
    return TraceFinding(
        what="asynchronous, but not overlapped",
        costs=copies.costs,
        evidence=f"{copies.described()}{stream}: kernels ran during {copies.overlapped:.0%} of that time",
        remedy='copy one batch ahead on a separate stream, as numapin.DataLoader(…, device="cuda") does',
    )


def _waits(analysis: Analysis) -> TraceFinding | None:
    costs = analysis.share("wait")
    if costs < _WAITING:
        return None
    loop_loads = any("SingleProcess" in wait.name for wait in analysis.trace.waits)
    return TraceFinding(
        what="waiting for data",
        costs=costs,
        evidence=f"the loop waited in next() on its DataLoader for {_ms(analysis, analysis.waited_us)} per step, "
        f"{_ms(analysis, analysis.parts_us['wait'])} of it while nothing computed",
        remedy="the loop loads its own batches: use worker processes, DataLoader(…, num_workers=N)"
        if loop_loads
        else "use more workers, a cheaper __getitem__, or numapin.DataLoader: numapin run --dataloader=numapin",
    )


def _pins(analysis: Analysis) -> TraceFinding | None:
    costs = analysis.share("pin")
    if costs < _FLOOR:
        return None
    return TraceFinding(
        what="pinning in the loop",
        costs=costs,
        evidence=f".pin_memory() takes {_ms(analysis, analysis.parts_us['pin'])} per step in the loop's own thread",
        remedy="use DataLoader(…, pin_memory=True), which pins in a separate thread, or numapin.DataLoader",
    )


def _busy(analysis: Analysis) -> TraceFinding | None:
    busy = analysis.share("compute") + analysis.share("communication")
    if busy < _BUSY:
        return None
    device = "GPU" if analysis.trace.on_gpu else "CPU"
    return TraceFinding(
        what="bound by compute",
        costs=0.0,
        evidence=f"the {device} computed or communicated for {busy:.0%} of the time",
        remedy="nothing: loading and copying are already hidden",
    )


def _idle(analysis: Analysis) -> TraceFinding | None:
    costs = analysis.share("other")
    if not analysis.trace.on_gpu or costs < _IDLE:
        return None
    return TraceFinding(
        what="GPU idle",
        costs=costs,
        evidence=f"for {_ms(analysis, analysis.parts_us['other'])} per step no kernel and no copy ran, and the loop "
        "was not waiting for data",
        remedy="find what the host does in these gaps in the Chrome trace: .item(), logging, or launching small "
        "kernels (larger batches, torch.compile or CUDA graphs help)",
    )


_CHECKS: Final[tuple[Callable[[Analysis], TraceFinding | None], ...]] = (
    _pageable,
    _blocking,
    _not_overlapped,
    _waits,
    _pins,
    _busy,
    _idle,
)


def _ms(analysis: Analysis, time_us: float) -> str:
    """Return a time of all steps as milliseconds per step."""
    return f"{time_us / len(analysis.trace.steps) / 1000:.2f} ms"
