"""Which loaders took numapin's data path, which did not, and why."""

# Annotations are needed at run time by base/records.py, so nothing here is imported for types only.
from collections import Counter
from dataclasses import dataclass
from typing import Annotated, Final

from numapin.base.records import AtMost
from numapin.base.text import counted, listed

SCHEMA: Final = "numapin.loaders/2"
_MAX_ENTRIES: Final = 1000
_SHOWN: Final = 3  # reasons in the line


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortfall:
    """The number of loaders that did not take numapin's path, or of batches outside its slots, for one reason."""

    number: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderUsage:
    """The loaders of one process.

    Attributes:
        rank: The rank that the process belongs to.
        restart: The number of restarts of the job before the process started.
        is_complete: Whether the process wrote this at its end. Else later loaders and batches are missing.
        num_loaders: Loaders that took numapin's path.
        num_batches: The batches that these yielded.
        outside: The batches among them that did not travel in slots as a whole.
        others: The loaders that did not take the path; a reason names the line, e.g. "num_workers=0 (train.py:12)".
    """

    rank: int
    restart: int
    is_complete: bool
    num_loaders: int
    num_batches: int
    outside: Annotated[tuple[Shortfall, ...], AtMost(_MAX_ENTRIES)]
    others: Annotated[tuple[Shortfall, ...], AtMost(_MAX_ENTRIES)]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobUsage:
    """The loaders of a job on one host, from all its processes and restarts.

    Attributes:
        usages: The records of the processes.
        ranks: All ranks that ran on the host. Those without a record iterated no loader, or could not write one.
        unread: What kept records from being written or read.
    """

    usages: tuple[LoaderUsage, ...]
    ranks: frozenset[int]
    unread: tuple[str, ...] = ()

    @property
    def all_took_it(self) -> bool:
        """Return whether there were loaders and all of them, with all of their batches, took numapin's path.

        Batches that were not counted are accepted only before a restart, which ends processes by signals.
        """
        last = max((usage.restart for usage in self.usages), default=0)
        is_counted = all(usage.is_complete for usage in self.usages if usage.restart == last)
        is_used = any(usage.num_loaders for usage in self.usages)
        has_others = any(usage.others or usage.outside for usage in self.usages)
        return is_used and is_counted and not has_others and not self.unread

    def line(self) -> str:
        """Return the line for the end of the job.

        For example "2 loaders, 1,203 batches by numapin; 1 loader not: num_workers=0 (train.py:12)".
        """
        num_loaders = sum(usage.num_loaders for usage in self.usages)
        num_batches = sum(usage.num_batches for usage in self.usages)
        ranks = {usage.rank for usage in self.usages if usage.num_loaders}
        others, outside = Counter[str](), Counter[str]()
        for usage in self.usages:
            for entry in usage.others:
                others[entry.reason] += entry.number
            for entry in usage.outside:
                outside[entry.reason] += entry.number
        without = self.ranks - {usage.rank for usage in self.usages}
        ended = {usage.rank for usage in self.usages if not usage.is_complete}
        if num_loaders:
            of_ranks = f" in {len(ranks)} ranks" if len(ranks) > 1 else ""
            counts = [counted(num_loaders, "loader"), counted(num_batches, "batch")]
            if ended:  # a killed process wrote its record with its first loader, before most of its batches
                counts[1:] = [f"at least {counts[1]}"] if num_batches else []
            parts = [f"{', '.join(counts)} by numapin{of_ranks}"]
        else:
            parts = ["no loader by numapin" if others else "no process recorded a DataLoader"]
        if others:
            parts.append(f"{counted(others.total(), 'loader')} not: {_shown(others)}")
        if outside:
            parts.append(f"{counted(outside.total(), 'batch')} outside the slots: {_shown(outside)}")
        if without and self.usages:
            parts.append(f"{listed('rank', without)} left no record of a loader")
        if ended:
            subject = "it" if len(ended) == 1 else "they"
            how = f"{subject} ended without Python's exit handlers (killed, or os._exit)"
            parts.append(f"the last counts of {listed('rank', ended)} are missing: {how}")
        return "; ".join([*parts, *self.unread])


def _shown(counts: Counter[str]) -> str:
    """Return the most frequent reasons, with their numbers if there are several."""
    if len(counts) == 1:
        return next(iter(counts))
    shown = [f"{number:,} {reason}" for reason, number in counts.most_common(_SHOWN)]
    num_more = counts.total() - sum(number for _, number in counts.most_common(_SHOWN))
    return ", ".join([*shown, f"{num_more:,} for other reasons"] if num_more else shown)
