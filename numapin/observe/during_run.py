"""Reports on a run: its verification while it is active (--verify, --report), and which loaders took our path.

A thread of the launcher reads /proc at a low rate. The ranks never wait for it.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from numapin.base.files import is_special, is_writable, write_text_to
from numapin.base.records import read_record
from numapin.base.strict_json import decode, encode
from numapin.data.usage import SCHEMA, JobUsage, LoaderUsage
from numapin.errors import BindingRefused, MachineFileError, NumapinError, Stopped
from numapin.observe.find import read_run
from numapin.observe.read import verify_running
from numapin.observe.verify import VerifyReport, unobserved
from numapin.rank import handover

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from numapin.observe.find import RunningJob

_AGAIN_S: Final = 60.0  # between later looks: each walks the page tables of all ranks
_RETRY_S: Final = 0.5
_GONE_S: Final = 5.0  # ranks end one after the other; a rank that is gone for longer than this is reported
_ANOTHER_FILE: Final = "choose another file with --report FILE"
_ACCEPT: Final = "to accept torch's own data path, run without --strict"
_PROBLEMS: Final = (NumapinError, OSError, ValueError, MemoryError)  # none of these may end the job
_PATIENCE_S: Final = 5.0  # how long a look waits for the reader of a pipe: the job's end may not wait for longer
_JOIN_S: Final = 2.0  # how long the job's end waits for a look that has not finished


@dataclass(frozen=True, slots=True, kw_only=True)
class Watching:
    """The settings of a verification. `outcome_of` returns the report's fields about the error that ended a run."""

    after_s: float  # from the start of all ranks to the first look
    report: Path | None  # the report file
    tell: Callable[[VerifyReport, float], None]  # called with a report and the seconds since it was made
    warn: Callable[[str], None]
    launcher: Mapping[str, str] = field(default_factory=dict[str, str])  # what starts the ranks, and why
    outcome_of: Callable[[BaseException], Mapping[str, object]] = lambda _: {}


@contextmanager
def watching(run_dir: str, num_ranks: int, what: Watching) -> Iterator[None]:
    """Verify the run while the body is running, and report the last look at the end unless it was the first.

    The end itself cannot be observed: when a launcher learns that ranks have ended, their memory is gone. So the last
    look is up to a minute old, and a job that ends by itself before the first look is reported as not verified.

    Raises NumapinError at the end if the report could not be written. If the body failed, that is only a warning.
    """
    watch = _RunWatch(Path(run_dir), num_ranks, what)
    watch.start()
    try:
        yield
    except BaseException as error:
        unwritten = watch.finish(what.outcome_of(error), is_stopped=isinstance(error, Stopped))
        if unwritten is not None:
            what.warn(str(unwritten))
        raise
    unwritten = watch.finish()
    if unwritten is not None:
        raise unwritten


class _RunWatch(threading.Thread):
    """The thread that looks at the ranks; `_last` is its last report, and when that was made."""

    def __init__(self, run_dir: Path, num_ranks: int, what: Watching) -> None:
        super().__init__(name="numapin-verify", daemon=True)
        self._run_dir, self._num_ranks, self._what = run_dir, num_ranks, what
        self._end = threading.Event()
        self._last: tuple[VerifyReport, float] | None = None
        self._looks = 0
        self._has_tried = False
        self._gone: frozenset[int] = frozenset()
        self._gone_since = 0.0
        self._problem = "no rank had started"
        self._unwritten: NumapinError | None = None
        self._added: dict[str, object] = {}  # at the end; a look that outlasts it must not write a file without it
        self._empty = VerifyReport(run=run_dir.name, ranks=())

    def run(self) -> None:
        """Wait for the ranks, look, and look again, until the end."""
        self._write(self._empty)  # replaces the report of an earlier run
        while not self._end.wait(_RETRY_S) and self._job() is None:
            pass
        pause_s = self._what.after_s
        while not self._end.wait(pause_s):
            pause_s = self._look_if_settled()

    def finish(self, outcome: Mapping[str, object] | None = None, *, is_stopped: bool = False) -> NumapinError | None:
        """End the thread, which may be in the middle of a look, and report its last look.

        `outcome` are fields about the error that ended the run, which the report file gets. A run that a signal
        stopped gets no warning that there was no look.

        Returns the error of the last attempt to write the report, None if it was written or none was requested.
        """
        added: dict[str, object] = {**(outcome or {})}
        self._end.set()
        self.join(timeout=_JOIN_S)  # a read of /proc can block for as long as a rank hangs in the kernel
        if self.is_alive():
            self._problem = f"reading its ranks did not end within {_JOIN_S:g} s"
        elif self._last is None:
            if not self._has_tried:
                self._job()
            with suppress(*_PROBLEMS):  # the ranks of a run that ended before they were looked at
                job = read_run(self._run_dir)
                added["ranks"] = [
                    unobserved(rank, job.pids.get(rank.local_rank), job.applied.get(rank.local_rank))
                    for rank in job.plan.ranks
                ]
        if self._last is None and not is_stopped:
            self._what.warn(f"the run was not verified: {self._problem}")
        elif self._last is not None and self._looks > 1:  # the first look was reported when it was made
            report, made_s = self._last
            self._what.tell(report, time.monotonic() - made_s)
        self._added = added
        if added:
            self._write(self._last[0] if self._last else self._empty)
        return self._unwritten

    def _job(self) -> RunningJob | None:
        """Return the job, None as long as ranks' records are missing or cannot be read."""
        try:
            job = read_run(self._run_dir)
        except _PROBLEMS as error:
            self._problem = str(error)
            return None
        if len(job.pids) < self._num_ranks:
            self._problem = "not all of its ranks had started"
            return None
        self._problem = (
            f"it ended within {self._what.after_s:g} s, before it was looked at; look earlier: --verify-after"
        )
        return job

    def _look_if_settled(self) -> float:
        """Look, unless ranks are starting or ending; return the seconds until the next time.

        Finding out whether ranks are running costs a small file each. Pages are read once a minute at most.
        """
        job, now_s = self._job(), time.monotonic()
        self._has_tried = True
        if job is None:
            return _AGAIN_S if self._looks else _RETRY_S
        if job.gone != self._gone:
            self._gone, self._gone_since = job.gone, now_s
        if len(job.gone) == len(job.pids):
            self._problem = "its ranks were starting or ending"
            return _RETRY_S
        if job.gone and now_s - self._gone_since < _GONE_S:  # a restart or an end takes less
            return _RETRY_S
        try:
            report = verify_running(job)
        except _PROBLEMS as error:
            self._problem = str(error)
            return _AGAIN_S
        # The result is kept and reported before it is written, so that a full disk does not lose it.
        self._last, self._looks = (report, time.monotonic()), self._looks + 1
        if self._looks == 1:
            self._what.tell(report, 0)
        self._write(report)
        return _AGAIN_S

    def _write(self, report: VerifyReport) -> None:
        """Write the report file, if one was requested. A pipe or a device gets reports of ranks only."""
        path = self._what.report
        if path is None or (not report.ranks and not self._added and is_special(str(path))):
            return
        launcher = {"launcher": {**self._what.launcher}} if self._what.launcher else {}
        try:
            text = encode(report.to_json() | launcher | self._added) + "\n"
            write_text_to(str(path), text, remedy=_ANOTHER_FILE, patience_s=_PATIENCE_S)
        except NumapinError as error:
            self._unwritten = error
        except _PROBLEMS as error:
            self._unwritten = NumapinError(f"--report: {error}", _ANOTHER_FILE)
        else:
            self._unwritten = None


# --- loaders ----------------------------------------------------------------------------------------------------------


@contextmanager
def reporting_loaders(run_dir: str, *, strict: bool, report: Callable[[str], None]) -> Iterator[None]:
    """Report the loaders of a run when the body, which runs it, has ended in any way.

    Nothing is reported if no rank has started, or if the body raised before any loader was recorded.

    Raises BindingRefused under `strict` if the body succeeded and a loader did not take numapin's path, or if that is
    unknown.
    """
    try:
        yield
    except BaseException:
        _report(run_dir, report, succeeded=False)
        raise
    shortfall = _report(run_dir, report, succeeded=True)
    if strict and shortfall:
        raise BindingRefused(f"--strict: {shortfall}", _ACCEPT)


def _report(run_dir: str, report: Callable[[str], None], *, succeeded: bool) -> str:
    """Report the loaders of a run; return what `--strict` does not accept, or an empty text."""
    try:
        usage = read_loaders(run_dir)
    except OSError as error:
        unknown = f"which loaders used numapin's data path is unknown: {run_dir}: {error.strerror}"
        report(unknown)
        return unknown
    if not usage.ranks or not (succeeded or usage.usages or usage.unread):
        return ""
    report(usage.line())
    return "" if usage.all_took_it else f"--dataloader numapin did not reach every batch: {usage.line()}"


def read_loaders(run_dir: str) -> JobUsage:
    """Read the records of a run. Raises OSError if its folder cannot be read."""
    usages, unread = [], []
    for path in sorted(handover.records(run_dir, handover.LOADERS)):
        try:
            text = handover.read_text(path)
            usages.append(read_record(LoaderUsage, text, source=path, hint="", schema=SCHEMA))
        except (OSError, MachineFileError) as error:
            unread.append(f"{Path(path).name} cannot be read: {error}")
    if not is_writable(str(Path(run_dir) / handover.LOADERS)):
        unread.append(f"records are missing: {run_dir} cannot be written")
    ranks = []  # that have started
    for path in handover.records(run_dir):
        with suppress(OSError, ValueError):
            record = decode(handover.read_text(path))
            rank = record.get("rank") if isinstance(record, dict) else None
            ranks += [rank] if isinstance(rank, int) else []
    return JobUsage(usages=tuple(usages), ranks=frozenset(ranks), unread=tuple(unread))
