"""A process's record of which loaders took numapin's data path, for the launcher's line at the end.

Nothing is done per batch: the loaders' own counts are read when the record is written. That is at the end of the
process, and before that with the first loader and with each new reason, so that a process that is killed leaves a
record. Nothing changes the program's handling of signals.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from contextlib import suppress
from multiprocessing import util
from typing import TYPE_CHECKING, Any, Final

from numapin.base.records import to_json
from numapin.base.stderr import say
from numapin.data.message import Miss
from numapin.data.usage import SCHEMA, LoaderUsage, Shortfall
from numapin.errors import NumapinError
from numapin.rank import handover

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from numapin.data.path import DataPath
    from numapin.data.stats import Counts

NO_WORKERS: Final = "num_workers=0"
PINS_ELSEWHERE: Final = "pin_memory for an accelerator that is not an NVIDIA GPU"
_LAST: Final = -1000  # among the finalizers at exit, after those that end workers
_LIBRARIES: Final = {"torch", "torchdata", "numapin", "numapin_hook_parts"}
_INSTALLED: Final = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


class UsageLog:
    """The record of one process."""

    def __init__(self, folder: str, *, rank: int, restart: int) -> None:
        """Make an empty record in the run's folder, for the rank and restart that the process belongs to.

        A full disk still has room for it, and `--strict` refuses a record that stays empty.
        """
        self._folder, self._rank, self._restart = folder, rank, restart
        self._name = f"{handover.LOADERS}{rank}-{restart}-{os.getpid()}.json"
        self._lock = threading.RLock()  # a signal's handler may iterate, too
        self._counts: dict[int, Counts] = {}  # of all loaders on the path, by id; they stay when a loader is gone
        self._others: Counter[str] = Counter()
        self._is_writable = True
        self._save(handover.write_text, "")

    def note_path(self, path: DataPath) -> None:
        """Note an iterator that takes numapin's path, which is the same object for all iterators of a loader."""
        with self._lock:
            is_first = not self._counts
            self._counts[id(path.counts)] = path.counts
            if is_first:
                self.write()

    def note_other(self, loader: Any, reason: str) -> None:
        """Note an iterator that does not take it, unless its loader was noted before, which the loader remembers."""
        with self._lock:
            if getattr(loader, "_numapin_noted", None) == os.getpid():
                return
            with suppress(AttributeError):  # of a class with __slots__: each of its iterators counts as a loader
                loader._numapin_noted = os.getpid()
            frame = users_frame()
            if frame is not None:
                reason += f" ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"  # noqa: PTH119
            self._others[reason] += 1
            if self._others[reason] == 1:
                self.write()

    def write(self, *, is_complete: bool = False) -> None:
        """Write the record as it is now; `is_complete`: for the last time."""
        with self._lock:
            outside: Counter[Miss] = Counter()
            for counts in self._counts.values():
                outside.update(counts.misses)
            outside.pop(Miss.SHARED, None)  # memory that the dataset shares is not copied either
            usage = LoaderUsage(
                rank=self._rank,
                restart=self._restart,
                is_complete=is_complete,
                num_loaders=len(self._counts),
                num_batches=sum(counts.batches for counts in self._counts.values()),
                outside=tuple(Shortfall(number=number, reason=str(miss)) for miss, number in outside.items()),
                others=tuple(Shortfall(number=number, reason=reason) for reason, number in self._others.items()),
            )
            self._save(handover.write_json, {"schema": SCHEMA, **to_json(usage)})

    def _save(self, write: Callable[[str, str, Any], None], content: object) -> None:
        """Write the record. A folder that cannot be written is no reason to lose the job; it is reported once."""
        if not self._is_writable:
            return
        try:
            write(self._folder, self._name, content)
        except NumapinError as error:
            say(f"rank {self._rank}: no record of its DataLoaders: {error.message}")
            self._is_writable = False


def users_frame() -> FrameType | None:
    """Return the frame of the user's line that is running: the innermost one outside of installed libraries."""
    frame: FrameType | None = sys._getframe(1)
    in_other_library = None
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in _LIBRARIES:
            if not any(part in frame.f_code.co_filename for part in _INSTALLED):
                return frame
            in_other_library = in_other_library or frame
        frame = frame.f_back
    return in_other_library


_logs: dict[int, UsageLog | None] = {}


def _log() -> UsageLog | None:
    """Return this process's log; None if no launcher asks for one. A forked child begins its own."""
    pid, environ = os.getpid(), os.environ
    if pid in _logs:
        return _logs[pid]
    _logs.clear()  # the parent's, inherited
    folder, rank = environ.get("NUMAPIN_RUN_DIR"), environ.get("RANK", "")
    is_asked_for = environ.get("NUMAPIN_DATALOADER") in ("numapin", "numapin-balanced")
    if not is_asked_for or not folder or not rank.isdecimal():
        return _logs.setdefault(pid, None)
    restart = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    log = _logs[pid] = UsageLog(folder, rank=int(rank), restart=int(restart) if restart.isdecimal() else 0)
    # Runs at the end of the interpreter and of multiprocessing's children; atexit does not, in the latter.
    util.Finalize(None, log.write, kwargs={"is_complete": True}, exitpriority=_LAST)
    return log


def update() -> None:
    """Write the record with the batches until now, before something ends the process by a signal."""
    if log := _logs.get(os.getpid()):
        log.write()


def note_path(path: DataPath) -> None:
    """Note an iterator that takes numapin's path."""
    if log := _log():
        log.note_path(path)


def note_other(loader: object, reason: str) -> None:
    """Note an iterator that does not take numapin's path, with the reason."""
    if log := _log():
        log.note_other(loader, reason)
