"""What an analysis means, and what to change. Pure.

Comes in: an `Analysis`. Goes out: findings, each with its evidence and remedy; where nothing is to be gained, that.

A finding costs the reader's time, so each has a floor: what takes less than a hundredth of the steps is no finding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from numapin.trace.records import HOST_TO_DEVICE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numapin.trace.analysis import Analysis, Group

_FLOOR: Final = 0.01  # of the steps' time
_WAITING: Final = 0.05
_BUSY: Final = 0.9
_OVERLAPPED: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFinding:
    """What was found. `costs` is a share of the steps' time, at most what the remedy can win; 0 where nothing can."""

    what: str
    costs: float
    evidence: str
    remedy: str


def find(analysis: Analysis) -> tuple[TraceFinding, ...]:
    """Return what is worth knowing about a rank's steps, the dearest first."""
    found = [finding for check in _CHECKS if (finding := check(analysis)) is not None]
    return tuple(sorted(found, key=lambda finding: -finding.costs))


def _pageable(analysis: Analysis) -> TraceFinding | None:
    groups = _to_device(analysis, "Pageable")
    costs = _share(analysis, sum(group.exposed_us for group in groups))
    if costs < _FLOOR:
        return None
    return TraceFinding(
        what="pageable copies",
        costs=costs,
        evidence=f"{_described(groups, analysis)} from pageable memory; the host stages each and stands still",
        remedy="DataLoader(…, pin_memory=True) and .to(device, non_blocking=True), or numapin.DataLoader(…, "
        'device="cuda"); without a change to the script: numapin run --dataloader=numapin',
    )


def _blocking(analysis: Analysis) -> TraceFinding | None:
    groups = [group for group in _to_device(analysis, "Pinned") if group.num_blocking]
    costs = _share(analysis, sum(group.exposed_us for group in groups))
    if costs < _FLOOR:
        return None
    return TraceFinding(
        what="pinned, but blocking",
        costs=costs,
        evidence=f"{_described(groups, analysis)} from pinned memory, and the host waited for each to end",
        remedy=".to(device, non_blocking=True)",
    )


def _not_overlapped(analysis: Analysis) -> TraceFinding | None:
    """Find copies that do everything right but come too late: the next kernel on their stream needs them."""
    groups = [group for group in _to_device(analysis, "Pinned") if not group.num_blocking]
    busy_us, hidden_us = sum(group.busy_us for group in groups), sum(group.overlapped_us for group in groups)
    exposed = _share(analysis, sum(group.exposed_us for group in groups))
    if not busy_us or hidden_us / busy_us >= _OVERLAPPED or exposed < _FLOOR:
        return None
    where = " on the stream of the kernels" if any(group.same_stream for group in groups) else ""
    return TraceFinding(
        what="asynchronous, but not overlapped",
        costs=exposed,
        evidence=f"{_described(groups, analysis)} from pinned memory{where}; kernels ran during "
        f"{hidden_us / busy_us:.0%} of that time",
        remedy='copy a batch ahead on a stream of its own: numapin.DataLoader(…, device="cuda") does',
    )


def _waits(analysis: Analysis) -> TraceFinding | None:
    costs = analysis.share("wait")
    if costs < _WAITING:
        return None
    alone = any("SingleProcess" in wait.name for wait in analysis.trace.waits)
    return TraceFinding(
        what="waiting for data",
        costs=costs,
        evidence=f"the loop stood in next() on its DataLoader for {_ms(analysis, analysis.parts_us['wait'])} a step "
        f"in which nothing was computed ({_ms(analysis, analysis.waited_us)} in all)",
        remedy="the loop loads its batches itself: DataLoader(…, num_workers=N)"
        if alone
        else "more workers, a cheaper __getitem__, or numapin.DataLoader: numapin run --dataloader=numapin",
    )


def _pins(analysis: Analysis) -> TraceFinding | None:
    costs = analysis.share("pin")
    if costs < _FLOOR:
        return None
    return TraceFinding(
        what="pinning in the loop",
        costs=costs,
        evidence=f".pin_memory() in the loop's own thread takes {_ms(analysis, analysis.parts_us['pin'])} a step",
        remedy="DataLoader(…, pin_memory=True), which pins in a thread of its own, or numapin.DataLoader",
    )


def _busy(analysis: Analysis) -> TraceFinding | None:
    busy = analysis.share("compute") + analysis.share("communication")
    if busy < _BUSY:
        return None
    device = "the GPU" if analysis.trace.on_gpu else "the CPU"
    return TraceFinding(
        what="bound by compute",
        costs=0.0,
        evidence=f"{device} computed or communicated for {busy:.0%} of the time",
        remedy="nothing: loading and copying are hidden already",
    )


def _idle(analysis: Analysis) -> TraceFinding | None:
    costs = analysis.share("other")
    if not analysis.trace.on_gpu or costs < 0.2:  # launching small kernels leaves gaps in any program
        return None
    return TraceFinding(
        what="GPU idle",
        costs=costs,
        evidence=f"nothing ran on the GPU, nothing was copied, and no data was waited for during "
        f"{_ms(analysis, analysis.parts_us['other'])} a step",
        remedy="look at the host in the Chrome trace: .item(), logging, or small kernels "
        "(larger batches, torch.compile, CUDA graphs)",
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


def _to_device(analysis: Analysis, memory: str) -> list[Group]:
    return [group for group in analysis.groups if group.direction == HOST_TO_DEVICE and group.source == memory]


def _share(analysis: Analysis, time_us: float) -> float:
    """Return a share of the steps' time; copies that go on at once are no more than all of it."""
    return min(time_us / analysis.window_us, 1.0) if analysis.window_us else 0.0


def _ms(analysis: Analysis, time_us: float) -> str:
    return f"{time_us / len(analysis.trace.steps) / 1000:.2f} ms"


def _described(groups: Sequence[Group], analysis: Analysis) -> str:
    """Say how many copies there are, of how much, how long they take, and what most of the time goes to."""
    sizes = [group.num_bytes for group in groups if group.num_bytes is not None]
    size = f" of {sum(sizes) / 1e6:.1f} MB" if len(sizes) == len(groups) else ""
    largest = groups[0]
    shape = f" of shape {largest.shapes}" if largest.shapes else ""
    by = f", most in {largest.operator}{shape}" if largest.operator else ""
    blocked_us = sum(group.blocked_us for group in groups)
    blocked = f", the host {_ms(analysis, blocked_us)}" if blocked_us else ""
    busy = _ms(analysis, sum(group.busy_us for group in groups))
    return f"{sum(group.count for group in groups)} copies{size} ({busy} a step{blocked}{by})"
