"""A process's record of which loaders took numapin's data path, for the launcher's line at the end.

Nothing is done per batch: the loaders' own counts are read when the record is written. That is at the end of the
process, and before that with the first loader and with each new reason, so that a process that is killed leaves a
record. Nothing changes the program's handling of signals.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections import Counter, deque
from contextlib import suppress
from functools import partial
from multiprocessing import util
from typing import TYPE_CHECKING, Any, Final

from numapin.base.records import to_json
from numapin.base.stderr import say
from numapin.data.message import Miss
from numapin.data.stats import Counts
from numapin.data.usage import SCHEMA, LoaderUsage, OffPath, OutsideSlots
from numapin.errors import NumapinError
from numapin.rank import handover

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import FrameType

    from numapin.data.path import DataPath

NO_WORKERS: Final = "num_workers=0"
PINS_ELSEWHERE: Final = "pin_memory for an accelerator that is not an NVIDIA GPU"
_LAST: Final = -1000  # among the finalizers at exit, after those that end workers
_ON_PATH: Final = {Miss.SHARED}
"""Not counted as outside the slots: a new slot, and memory that the dataset shares, which is not copied either."""
_LIBRARIES: Final = {"torch", "torchdata", "numapin", "numapin_hook_parts"}
_INSTALLED: Final = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


class UsageLog:
    """The record of one process."""

    def __init__(self, folder: str, *, rank: int, restart: int) -> None:
        """Take the run's folder, and the rank and restart that the process belongs to."""
        self._folder, self._rank, self._restart = folder, rank, restart
        self._name = f"{handover.LOADERS}{rank}-{restart}-{os.getpid()}.json"
        self._lock = threading.RLock()  # a signal's handler may iterate, too
        self._paths: weakref.WeakSet[DataPath] = weakref.WeakSet()
        self._ended: deque[Counts] = deque()  # of paths that are gone
        self._past = Counts()
        self._others: Counter[tuple[str, str]] = Counter()
        self._num_paths = 0
        self._is_writable = True

    def begin(self) -> None:
        """Make an empty record, for which a full disk still has room: `--strict` refuses it if it stays empty."""
        self._attempt(partial(handover.write_text, self._folder, self._name, ""))

    def note_path(self, path: DataPath) -> None:
        """Note an iterator that takes numapin's path, which is the same object for all iterators of a loader."""
        with self._lock:
            if path in self._paths:
                return
            self._paths.add(path)
            weakref.finalize(path, self._ended.append, path.counts).atexit = False
            self._num_paths += 1
            if self._num_paths == 1:
                self._write(is_complete=False)

    def note_other(self, loader: Any, reason: str) -> None:
        """Note an iterator that does not take it, unless its loader was noted before, which the loader remembers."""
        with self._lock:
            if getattr(loader, "_numapin_noted", None) == os.getpid():
                return
            with suppress(AttributeError):  # of a class with __slots__: each of its iterators counts as a loader
                loader._numapin_noted = os.getpid()
            place = (reason, _where())
            self._others[place] += 1
            if self._others[place] == 1:
                self._write(is_complete=False)

    def update(self) -> None:
        """Write the record as it is now."""
        with self._lock:
            self._write(is_complete=False)

    def end(self) -> None:
        """Write the record for the last time."""
        with self._lock:
            self._write(is_complete=True)

    def _write(self, *, is_complete: bool) -> None:
        content = {"schema": SCHEMA, **to_json(self._usage(is_complete=is_complete))}
        self._attempt(partial(handover.write_json, self._folder, self._name, content))

    def _attempt(self, write: partial[None]) -> None:
        """Write something. A folder that cannot be written is no reason to lose the job; it is reported once."""
        if not self._is_writable:
            return
        try:
            write()
        except NumapinError as error:
            say(f"rank {self._rank}: no record of its DataLoaders: {error.message}")
            self._is_writable = False

    def _usage(self, *, is_complete: bool) -> LoaderUsage:
        while self._ended:
            _add(self._past, self._ended.popleft())
        total = Counts()
        for counts in (self._past, *(path.counts for path in self._paths)):
            _add(total, counts)
        outside = {miss: number for miss, number in total.misses.items() if miss not in _ON_PATH}
        return LoaderUsage(
            rank=self._rank,
            restart=self._restart,
            is_complete=is_complete,
            num_loaders=self._num_paths,
            num_batches=total.batches,
            outside=tuple(OutsideSlots(num_batches=number, reason=str(miss)) for miss, number in outside.items()),
            others=tuple(OffPath(num_loaders=n, reason=why, where=at) for (why, at), n in self._others.items()),
        )


def _add(total: Counts, counts: Counts) -> None:
    total.batches += counts.batches
    total.misses.update(counts.misses)


def users_frame() -> FrameType | None:
    """Return the frame of the user's line that is running: the innermost one outside of installed libraries."""
    frames = [frame for frame in _frames(sys._getframe(1)) if _package(frame) not in _LIBRARIES]
    own = [frame for frame in frames if not any(part in frame.f_code.co_filename for part in _INSTALLED)]
    return next(iter(own or frames), None)


def _where() -> str:
    """Return the user's line that is running, as "train.py:12"."""
    frame = users_frame()
    return "" if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"  # noqa: PTH119


def _frames(frame: FrameType | None) -> list[FrameType]:
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


_logs: dict[int, UsageLog | None] = {}


def _log() -> UsageLog | None:
    """Return this process's log; None if no launcher asks for one. A forked child begins its own."""
    pid = os.getpid()
    if pid not in _logs:
        _logs.clear()  # the parent's, inherited
        _logs[pid] = _begin(os.environ)
    return _logs[pid]


def _begin(environ: Mapping[str, str]) -> UsageLog | None:
    folder, rank = environ.get("NUMAPIN_RUN_DIR"), environ.get("RANK", "")
    is_asked_for = environ.get("NUMAPIN_DATALOADER") in ("numapin", "numapin-balanced")
    if not is_asked_for or not folder or not rank.isdecimal():
        return None
    restart = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    log = UsageLog(folder, rank=int(rank), restart=int(restart) if restart.isdecimal() else 0)
    log.begin()
    # Runs at the end of the interpreter and of multiprocessing's children; atexit does not, in the latter.
    util.Finalize(None, log.end, exitpriority=_LAST)
    return log


def update() -> None:
    """Write the record with the batches until now, before something ends the process by a signal."""
    log = _logs.get(os.getpid())
    if log is not None:
        log.update()


def note_path(path: DataPath) -> None:
    """Note an iterator that takes numapin's path."""
    log = _log()
    if log is not None:
        log.note_path(path)


def note_other(loader: object, reason: str) -> None:
    """Note an iterator that does not take numapin's path, with the reason."""
    log = _log()
    if log is not None:
        log.note_other(loader, reason)
