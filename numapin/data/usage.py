"""Which loaders took numapin's data path, which did not, and why: each process's record, and the job's line.

Nothing is done per batch: the loaders' own counts are read when the record is written. That is at the end of the
process, and before that with the first loader and with each new reason, so that a process that is killed leaves a
record. Nothing changes the program's handling of signals.
"""

# Annotations are needed at run time by base/records.py, so nothing in them is imported for types only.
import os
import sys
import threading
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Final

from numapin.base.records import AtMost, to_json
from numapin.base.stderr import say
from numapin.base.strict_json import encode
from numapin.base.text import counted, listed
from numapin.errors import NumapinError
from numapin.rank import handover

if TYPE_CHECKING:
    from numapin.data.path import DataPath
    from numapin.data.stats import Counts

SCHEMA: Final = "numapin.loaders/2"
NO_WORKERS: Final = "num_workers=0"
PINS_ELSEWHERE: Final = "pin_memory for an accelerator that is not an NVIDIA GPU"
_MAX_ENTRIES: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortfall:
    """The number of loaders that did not take numapin's path, or of batches outside its slots, for one reason."""

    number: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderUsage:
    """The loaders of one process."""

    rank: int  # that the process belongs to
    restart: int  # restarts of the job before the process started
    is_complete: bool  # written at the process's end; else later loaders and batches are missing
    num_loaders: int  # that took numapin's path
    num_batches: int  # that these yielded
    outside: Annotated[tuple[Shortfall, ...], AtMost(_MAX_ENTRIES)]  # batches that were not in slots as a whole
    others: Annotated[tuple[Shortfall, ...], AtMost(_MAX_ENTRIES)]  # loaders; e.g. "num_workers=0 (train.py:12)"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobUsage:
    """The loaders of a job on one host, from all its processes and restarts."""

    usages: tuple[LoaderUsage, ...]  # the records of the processes
    ranks: frozenset[int]  # that ran on the host; those without a record iterated no loader, or could not write one
    unread: tuple[str, ...] = ()  # what kept records from being written or read

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
            others.update({entry.reason: entry.number for entry in usage.others})
            outside.update({entry.reason: entry.number for entry in usage.outside})
        without = self.ranks - {usage.rank for usage in self.usages}
        ended = {usage.rank for usage in self.usages if not usage.is_complete}
        if num_loaders:
            of_ranks = f" in {len(ranks)} ranks" if len(ranks) > 1 else ""
            counts = [counted(num_loaders, "loader"), counted(num_batches, "batch")]
            if ended:  # a killed process wrote its record with its first loader, before most of its batches
                counts[1:] = [f"at least {counts[1]}"] if num_batches else []
            parts = [f"{', '.join(counts)} by numapin{of_ranks}"]
        else:
            nothing = "no record of a DataLoader can be read" if self.unread else "no process recorded a DataLoader"
            parts = ["no loader by numapin" if others else nothing]
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
    """Return the three most frequent reasons, with their numbers if there are several."""
    if len(counts) == 1:
        return next(iter(counts))
    top = counts.most_common(3)
    shown = [f"{number:,} {reason}" for reason, number in top]
    num_more = counts.total() - sum(number for _, number in top)
    return ", ".join([*shown, f"{num_more:,} for other reasons"] if num_more else shown)


class UsageLog:
    """The record of one process."""

    def __init__(self, folder: str, *, rank: int, restart: int) -> None:
        """Prepare a record in the run's folder, for the rank and restart that the process belongs to."""
        self._folder, self._rank, self._restart = folder, rank, restart
        self.lock = threading.RLock()  # a signal's handler may iterate, too
        self.counts: dict[int, Counts] = {}  # of all loaders on the path, by id; they stay when a loader is gone
        self.others: Counter[str] = Counter()
        self._is_begun, self._is_writable = False, True

    def write(self, *, is_complete: bool = False) -> None:
        """Write the record as it is now; `is_complete`: for the last time."""
        from numapin.data.message import Miss  # with torch, which the launcher does without

        with self.lock:
            if not self._is_begun:  # a full disk still has room for an empty record, which `--strict` refuses
                self._is_begun = True
                self._save("")
            outside: Counter[str] = Counter()
            for counts in self.counts.values():
                outside.update(counts.misses)
            outside.pop(Miss.SHARED, None)  # memory that the dataset shares is not copied either
            usage = LoaderUsage(
                rank=self._rank,
                restart=self._restart,
                is_complete=is_complete,
                num_loaders=len(self.counts),
                num_batches=sum(counts.batches for counts in self.counts.values()),
                outside=tuple(Shortfall(number=number, reason=str(miss)) for miss, number in outside.items()),
                others=tuple(Shortfall(number=number, reason=reason) for reason, number in self.others.items()),
            )
            self._save(encode({"schema": SCHEMA, **to_json(usage)}) + "\n")

    def _save(self, text: str) -> None:
        """Write the record. A folder that cannot be written is no reason to lose the job; it is reported once."""
        if not self._is_writable:
            return
        try:
            name = f"{handover.LOADERS}{self._rank}-{self._restart}-{os.getpid()}.json"
            handover.write_text(self._folder, name, text)
        except NumapinError as error:
            say(f"rank {self._rank}: no record of its DataLoaders: {error.message}")
            self._is_writable = False


_logs: dict[int, UsageLog | None] = {}


def _log() -> UsageLog | None:
    """Return this process's log; None if no launcher asks for one. A forked child begins its own."""
    pid, environ = os.getpid(), os.environ
    if pid in _logs:
        return _logs[pid]
    for inherited in _logs.keys() - {pid}:  # the parent's
        _logs.pop(inherited, None)
    folder, rank = environ.get("NUMAPIN_RUN_DIR"), environ.get("RANK", "")
    is_asked_for = environ.get("NUMAPIN_DATALOADER") in ("numapin", "numapin-balanced")
    if not is_asked_for or not folder or not rank.isdecimal():
        return _logs.setdefault(pid, None)
    from multiprocessing import util  # which the launcher does without

    restart = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    made = UsageLog(folder, rank=int(rank), restart=int(restart) if restart.isdecimal() else 0)
    log = _logs.setdefault(pid, made)
    if log is made:  # else another thread was faster
        # Also at the end of multiprocessing's children, where atexit does not run; after workers' ends.
        util.Finalize(None, made.write, kwargs={"is_complete": True}, exitpriority=-1000)
    return log


def note_path(path: "DataPath") -> None:
    """Note an iterator that takes numapin's path, which is the same object for all iterators of a loader."""
    if log := _log():
        with log.lock:
            is_first = not log.counts
            log.counts[id(path.counts)] = path.counts
            if is_first:
                log.write()


def note_other(loader: Any, reason: str) -> None:
    """Note an iterator that does not take it, unless its loader was noted before, which the loader remembers."""
    if not (log := _log()):
        return
    with log.lock:
        if getattr(loader, "_numapin_noted", None) == os.getpid():
            return
        with suppress(AttributeError):  # of a class with __slots__: each of its iterators counts as a loader
            loader._numapin_noted = os.getpid()
        frame = users_frame()
        if frame is not None:
            reason += f" ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"  # noqa: PTH119
        log.others[reason] += 1
        if log.others[reason] == 1:
            log.write()


def update() -> None:
    """Write the record with the batches until now, before something ends the process by a signal."""
    if log := _logs.get(os.getpid()):
        log.write()


def users_frame() -> FrameType | None:
    """Return the frame of the user's line that is running: the innermost one outside of installed libraries."""
    frame: FrameType | None = sys._getframe(1)
    in_other_library = None
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in ("torch", "torchdata", "numapin", "numapin_hook_parts"):
            if not any(f"{os.sep}{part}-packages{os.sep}" in frame.f_code.co_filename for part in ("site", "dist")):
                return frame
            in_other_library = in_other_library or frame
        frame = frame.f_back
    return in_other_library
