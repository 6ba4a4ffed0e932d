"""Advice on pinned memory. Pure.

Comes in: the size of a batch, the number of batches under way, and how much memory can be pinned. Goes out: a verdict
with its numbers, and what to reduce first if the batches do not fit.

A loader has `workers x prefetch_factor` batches under way; without workers, it has one. Pinned memory can be neither
swapped nor reclaimed, so a loader that pins too much takes memory from other processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from numapin.base import sizes
from numapin.base.plural import counted

if TYPE_CHECKING:
    from numapin.data.budget import LockRoom

_DO_NOT_PIN: Final = "DataLoader(…, pin_memory=False)"


class PinVerdict(StrEnum):
    """Whether to pin a loader's batches."""

    PIN = "pin"
    LOWER = "lower"
    """Reduce something first; the advice says what."""
    USELESS = "useless"
    """The host has no GPU to copy to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loader:
    """One rank's DataLoader, and the number of such ranks on the host."""

    num_workers: int
    prefetch_factor: int
    batch_bytes: int
    num_ranks: int

    @property
    def num_batches(self) -> int:
        """The number of batches under way at once."""
        return max(1, self.num_workers * self.prefetch_factor)

    @property
    def footprint_bytes(self) -> int:
        """The memory of one rank's batches."""
        return self.num_batches * self.batch_bytes

    @property
    def total_bytes(self) -> int:
        """The memory of all ranks' batches."""
        return self.num_ranks * self.footprint_bytes

    def __str__(self) -> str:
        """Return the memory of the batches as a calculation."""
        workers, ahead = counted(self.num_workers, "worker"), counted(self.prefetch_factor, "batch")
        batches = f"{workers} x {ahead}" if self.num_workers else "1 batch"
        per_rank = f"{batches} x {sizes.render(self.batch_bytes)} = {sizes.render(self.footprint_bytes)} per rank"
        if self.num_ranks == 1:
            return per_rank
        return f"{per_rank}, {sizes.render(self.total_bytes)} for {self.num_ranks} ranks"


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The verdict, with sizes per rank and what to do. `verdict` is None without a loader or a known room."""

    verdict: PinVerdict | None
    footprint_bytes: int | None
    room_bytes: int | None
    reason: str
    remedy: str | None = None


def advise(loader: Loader | None, room: LockRoom, *, num_gpus: int, shm_free_bytes: int | None) -> Advice:
    """Compare the memory that a rank's loader would pin with the rank's share of the memory that can be pinned."""
    limit = f"{_limit(room.num_bytes)} ({room.reason})"
    if loader is None:
        ask = "to check a loader: numapin doctor --workers N --batch-bytes SIZE"
        return Advice(verdict=None, footprint_bytes=None, room_bytes=room.num_bytes, reason=limit, remedy=ask)
    verdict, remedy = _verdict(loader, room.num_bytes, num_gpus=num_gpus)
    return Advice(
        verdict=verdict,
        footprint_bytes=loader.footprint_bytes,
        room_bytes=room.num_bytes,
        reason=f"{loader}; {limit}{_shm_shortage(loader, shm_free_bytes)}",
        remedy=remedy,
    )


def _limit(num_bytes: int | None) -> str:
    if num_bytes is None:
        return "the amount that can be pinned is unknown"
    return f"up to {sizes.render(num_bytes)} per rank can be pinned"


def _verdict(loader: Loader, room_bytes: int | None, *, num_gpus: int) -> tuple[PinVerdict | None, str | None]:
    """Return the verdict and what to do."""
    if num_gpus == 0:
        return PinVerdict.USELESS, f"{_DO_NOT_PIN}: there is no GPU to copy to"
    if room_bytes is None:
        return None, None
    if loader.footprint_bytes <= room_bytes:
        return PinVerdict.PIN, "DataLoader(…, pin_memory=True); to measure the gain: numapin bench loader"
    return PinVerdict.LOWER, _reduced(loader, room_bytes)


def _reduced(loader: Loader, room_bytes: int) -> str:
    """Return the largest values that fit: less prefetching first, then fewer workers, then smaller batches."""
    num_batches = room_bytes // loader.batch_bytes
    if loader.num_workers and num_batches >= loader.num_workers:
        return f"DataLoader(…, prefetch_factor={num_batches // loader.num_workers})"
    if loader.num_workers and num_batches:
        return f"DataLoader(…, prefetch_factor=1, num_workers={num_batches})"
    return f"batches of at most {sizes.render(room_bytes)}, one at a time; if that is not possible: {_DO_NOT_PIN}"


def _shm_shortage(loader: Loader, free_bytes: int | None) -> str:
    """Return a note if the batches of torch's workers do not fit into /dev/shm; pinned or not, they pass through it."""
    if not loader.num_workers or free_bytes is None or loader.total_bytes <= free_bytes:
        return ""
    return f"; /dev/shm has {sizes.render(free_bytes)} free, too little for torch's loader (numapin's does not use it)"
