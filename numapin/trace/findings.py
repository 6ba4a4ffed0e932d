"""Findings about a trace, with their remedies. Pure.

Comes in: an `Analysis`. Goes out: findings, each with its cost, evidence and remedy; or one that says that nothing can
be gained.

What takes less than a hundredth of the step time is not reported.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from numapin.trace.analysis import COMMUNICATION
from numapin.trace.finding import FLOOR, TraceFinding, ms_per_step
from numapin.trace.host import idle, updating
from numapin.trace.loading import WAITING, epoch_costs, epochs, pins, waits
from numapin.trace.records import DEVICE_TO_HOST, HOST_TO_DEVICE
from numapin.trace.uneven import uneven_finding, uneven_steps, without_excess

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numapin.trace.analysis import Analysis, Group
    from numapin.trace.noted import ScriptNotes

# Shares of the step time.
_BUSY: Final = 0.9
_COMMUNICATING: Final = 0.1
_WAITING_FOR_RANKS: Final = "waiting for other ranks"
_THEY_WAIT: Final = ", which wait for the slowest rank and then transfer"
_TRANSFER_LESS: Final = (
    "transfer less (bfloat16, no_sync() while accumulating), or overlap it with compute (DDP's buckets, FSDP's "
    "prefetch)"
)
_OVERLAPPED: Final = 0.5  # of the time of the copies

_BUSY_US: Final = attrgetter("busy_us")
_OVERLAPPED_US: Final = attrgetter("overlapped_us")
_EXPOSED_US: Final = attrgetter("exposed_us")
_BLOCKED_US: Final = attrgetter("blocked_us")


def find(analysis: Analysis) -> tuple[TraceFinding, ...]:
    """Return the findings about a rank's steps; the most costly comes first."""
    uneven = uneven_steps(analysis)
    usual = without_excess(analysis, uneven)
    checked = (
        *(check(usual) for check in _CHECKS),
        idle(usual, uneven),
    )
    found = [finding for finding in checked if finding is not None]
    if uneven is not None:
        found = [*_without_part(found, usual, uneven.part), uneven_finding(analysis, uneven)]
    if not found:
        return _busy(analysis)
    return tuple(sorted(found, key=attrgetter("costs"), reverse=True))


def _without_part(found: Iterable[TraceFinding], usual: Analysis, part: str) -> list[TraceFinding]:
    """Return the findings; one about the part that makes steps slow costs at most what is left of that part."""
    left = usual.share(part)
    capped = (replace(one, costs=min(one.costs, left)) if one.part == part else one for one in found)
    return [one for one in capped if one.part != part or one.costs >= FLOOR]


def without_waiting(found: Iterable[TraceFinding], *, is_slowest: bool) -> tuple[TraceFinding, ...]:
    """Return a rank's findings without its waiting for the slowest rank. That rank's own communication is transfer."""
    kept = (_as_transfer(finding) if is_slowest else finding for finding in found)
    return tuple(finding for finding in kept if finding.what != _WAITING_FOR_RANKS)


def _as_transfer(finding: TraceFinding) -> TraceFinding:
    if finding.what != _WAITING_FOR_RANKS:
        return finding
    evidence = f"{finding.evidence.removesuffix(_THEY_WAIT)} on the slowest rank, too; it waits for no other"
    return replace(finding, what=COMMUNICATION, evidence=evidence, remedy=_TRANSFER_LESS)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copies:
    """Copies to the GPU from one kind of memory, or to the host; the groups that took longest come first."""

    analysis: Analysis
    which: str
    groups: Sequence[Group]

    @classmethod
    def of(cls, analysis: Analysis, memory: str) -> _Copies:
        to_device = (group for group in analysis.groups if group.direction == HOST_TO_DEVICE)
        groups = [group for group in to_device if group.source == memory]
        return cls(analysis=analysis, which=f"from {memory.lower()} memory", groups=groups)

    @classmethod
    def to_host(cls, analysis: Analysis) -> _Copies:
        groups = [group for group in analysis.groups if group.direction == DEVICE_TO_HOST]
        return cls(analysis=analysis, which="to the host", groups=groups)

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
        busy = f"{ms_per_step(self.analysis, self._total(_BUSY_US))} per step"
        blocked_us = self._total(_BLOCKED_US)
        blocked = f"; host blocked for {ms_per_step(self.analysis, blocked_us)} per step" if blocked_us else ""
        return f"{count} copies {self.which} ({self._size()}{busy}{self._origin()}{blocked})"

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
    if copies.costs < FLOOR:
        return None
    return TraceFinding(
        what="pageable copies",
        costs=copies.costs,
        evidence=f"{copies.described()}: the driver stages each copy and blocks the host",
        remedy=_pageable_remedy(analysis.trace.noted),
        part="copy",
    )


def _pageable_remedy(noted: ScriptNotes) -> str:
    """Return how to copy from pinned memory, with the loader that is in use."""
    loader = noted.loader
    if loader is not None and loader.delivers_on_gpu:
        return (
            "these copies are the script's own, beside numapin's loader: pin that memory (numapin.pinned), and copy "
            "with non_blocking=True"
        )
    if noted.uses_numapin:
        return (
            'numapin\'s loader is in use: let it deliver on the GPU, numapin.DataLoader(…, device="cuda"), or pin, '
            "pin_memory=True with .to(device, non_blocking=True)"
        )
    has_no_workers = loader is not None and not loader.num_workers  # --dataloader=numapin changes nothing then
    launched = "" if has_no_workers else "; without changing the script: numapin run --dataloader=numapin"
    return (
        "use DataLoader(…, pin_memory=True) and .to(device, non_blocking=True), or numapin.DataLoader(…, "
        f'device="cuda"){launched}'
    )


def _blocking(analysis: Analysis) -> TraceFinding | None:
    copies = _Copies.of(analysis, "Pinned").blocking
    if copies.costs < FLOOR:
        return None
    return TraceFinding(
        what="pinned, but blocking",
        costs=copies.costs,
        evidence=f"{copies.described()}: the host waited for each copy to finish",
        remedy="use .to(device, non_blocking=True)",
        part="copy",
    )


def _not_overlapped(analysis: Analysis) -> TraceFinding | None:
    """Find asynchronous copies that are issued too late: the next kernel on their stream needs them."""
    copies = _Copies.of(analysis, "Pinned").asynchronous
    if copies.overlapped >= _OVERLAPPED or copies.costs < FLOOR:
        return None
    stream = " on the stream of the kernels" if any(group.same_stream for group in copies.groups) else ""
    return TraceFinding(
        what="asynchronous, but not overlapped",
        costs=copies.costs,
        evidence=f"{copies.described()}{stream}: kernels ran during {copies.overlapped:.0%} of that time",
        remedy=_ahead_remedy(analysis.trace.noted),
        part="copy",
    )


def _to_host(analysis: Analysis) -> TraceFinding | None:
    copies = _Copies.to_host(analysis)
    if copies.costs < FLOOR:
        return None
    return TraceFinding(
        what="copies to the host",
        costs=copies.costs,
        evidence=f"{copies.described()}: kernels ran during {copies.overlapped:.0%} of that time",
        remedy="copy less often (.item(), .cpu(), logging, checkpoints), or into pinned memory with non_blocking=True",
        part="copy",
    )


def _ahead_remedy(noted: ScriptNotes) -> str:
    loader = noted.loader
    if loader is not None and loader.delivers_on_gpu:
        return "prefetch the script's own copies by one step, on a separate stream"
    return 'copy one batch ahead on a separate stream, as numapin.DataLoader(…, device="cuda") does'


def _busy(analysis: Analysis) -> tuple[TraceFinding, ...]:
    """Report that only the computing itself is left, if there is no other finding."""
    busy = analysis.share("compute") + analysis.share(COMMUNICATION)
    if busy < _BUSY or analysis.share("wait") + epoch_costs(analysis) >= WAITING:
        return ()
    device = "GPU" if analysis.trace.on_gpu else "CPU"
    bound = TraceFinding(
        what="bound by compute",
        costs=0.0,
        evidence=f"the {device} computed or communicated for {busy:.0%} of the time",
        remedy="nothing in loading or copying: a faster model, or more or faster devices",
    )
    return (bound,)


def _communicating(analysis: Analysis) -> TraceFinding | None:
    costs = analysis.share(COMMUNICATION)
    if costs < _COMMUNICATING:
        return None
    time = ms_per_step(analysis, analysis.parts_us[COMMUNICATION])
    return TraceFinding(
        what=_WAITING_FOR_RANKS,
        costs=costs,
        evidence=f"for {time} per step only collective operations ran{_THEY_WAIT}",
        remedy=f"make ranks equally fast; {_TRANSFER_LESS}",
    )


_CHECKS: Final[tuple[Callable[[Analysis], TraceFinding | None], ...]] = (
    _pageable,
    _blocking,
    _not_overlapped,
    _to_host,
    waits,
    epochs,
    pins,
    _communicating,
    updating,
)
