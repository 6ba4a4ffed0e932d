"""Should you pin? Pure.

Comes in: how large a batch is, how many a loader has under way, and how much memory can be page-locked here. Goes out:
a verdict with its numbers, and what to lower first where it does not fit.

A loader has `workers x prefetch_factor` batches under way, and one without workers has one. What is locked can neither
be swapped nor reclaimed, so what does not fit is taken from others.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from numapin.base import sizes

if TYPE_CHECKING:
    from numapin.data.budget import LockRoom


class PinVerdict(StrEnum):
    """Whether to pin."""

    PIN = "pin"
    LOWER = "lower"
    """Lower something first, as the advice says."""
    USELESS = "useless"
    """There is no GPU that a copy would go to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loader:
    """A rank's DataLoader, and how many such ranks share the host."""

    num_workers: int
    prefetch_factor: int
    batch_bytes: int
    num_ranks: int

    @property
    def num_batches(self) -> int:
        """Return how many batches are under way at once."""
        return max(1, self.num_workers * self.prefetch_factor)

    @property
    def footprint_bytes(self) -> int:
        """Return what a rank's batches take."""
        return self.num_batches * self.batch_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The verdict, None where nothing was asked or nothing is known, with numbers a rank and what to do."""

    verdict: PinVerdict | None
    footprint_bytes: int | None
    room_bytes: int | None
    reason: str
    remedy: str | None = None

    def to_json(self) -> dict[str, object]:
        """Return the JSON form."""
        rest = {name: getattr(self, name) for name in ("footprint_bytes", "room_bytes", "reason", "remedy")}
        return {"verdict": self.verdict.value if self.verdict else None, **rest}


def advise(loader: Loader | None, room: LockRoom, *, num_gpus: int, shm_free_bytes: int | None) -> Advice:
    """Compare what a rank's loader would lock with the rank's share of what can be locked."""
    bound = "nobody knows how much" if room.num_bytes is None else f"up to {sizes.render(room.num_bytes)} a rank"
    limit = f"{bound} can be pinned ({room.reason})"
    if loader is None:
        ask = "numapin doctor --workers N --batch-bytes SIZE says whether a loader fits"
        return Advice(verdict=None, footprint_bytes=None, room_bytes=room.num_bytes, reason=limit, remedy=ask)
    verdict, remedy = _verdict(loader, room.num_bytes, num_gpus=num_gpus)
    return Advice(
        verdict=verdict,
        footprint_bytes=loader.footprint_bytes,
        room_bytes=room.num_bytes,
        reason=f"{_sum(loader)}; {limit}{_shared_memory(loader, shm_free_bytes)}",
        remedy=remedy,
    )


def _sum(loader: Loader) -> str:
    batches = f"{loader.num_workers} workers x {loader.prefetch_factor}" if loader.num_workers else "1 batch"
    total = f"{batches} x {sizes.render(loader.batch_bytes)} = {sizes.render(loader.footprint_bytes)} a rank"
    all_ranks = f", {sizes.render(loader.num_ranks * loader.footprint_bytes)} for {loader.num_ranks} of them"
    return total + (all_ranks if loader.num_ranks > 1 else "")


def _verdict(loader: Loader, room_bytes: int | None, *, num_gpus: int) -> tuple[PinVerdict | None, str | None]:
    if num_gpus == 0:
        return PinVerdict.USELESS, "DataLoader(…, pin_memory=False): there is no GPU to copy to"
    if room_bytes is None:
        return None, None
    if loader.footprint_bytes <= room_bytes:
        return PinVerdict.PIN, "DataLoader(…, pin_memory=True); what it gains here is measured by: numapin bench loader"
    return PinVerdict.LOWER, _lower(loader, room_bytes)


def _lower(loader: Loader, room_bytes: int) -> str:
    """Return the largest values that fit: less prefetching first, then fewer workers, then smaller batches."""
    prefetch_factor = room_bytes // (loader.num_workers * loader.batch_bytes) if loader.num_workers else 0
    num_workers = room_bytes // loader.batch_bytes if loader.num_workers else 0
    if prefetch_factor:
        return f"DataLoader(…, prefetch_factor={prefetch_factor})"
    if num_workers:
        return f"DataLoader(…, prefetch_factor=1, num_workers={num_workers})"
    size = sizes.render(room_bytes)
    return f"a batch of at most {size}, one at a time; last, where that cannot be: DataLoader(…, pin_memory=False)"


def _shared_memory(loader: Loader, free_bytes: int | None) -> str:
    """Tell where torch's workers would not get their batches through /dev/shm, whether pinned or not."""
    if free_bytes is None or not loader.num_workers or loader.num_ranks * loader.footprint_bytes <= free_bytes:
        return ""
    return f"; /dev/shm has {sizes.render(free_bytes)} free, too little for torch's loader (numapin's does not use it)"
