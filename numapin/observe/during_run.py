"""Verify a run while it goes on: `numapin run --verify`, `--report`. Edge.

Comes in: a run directory, and where to tell. Goes out: what `verify` finds, told once after the start and once at the
end, and a report file. A thread of the launcher reads /proc at a low rate; the ranks notice nothing and wait for
nothing.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from numapin.base.files import is_special, write_text_to
from numapin.base.strict_json import encode
from numapin.errors import NumapinError
from numapin.observe.find_job import read_run
from numapin.observe.read import observe
from numapin.observe.report import VerifyReport
from numapin.observe.verify import verify

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numapin.observe.find_job import RunningJob

_AGAIN_S: Final = 60.0  # between later looks: one walks the page tables of all ranks
_RETRY_S: Final = 0.5
_GONE_S: Final = 5.0  # ranks end one after the other; one that is gone for longer than this is told
_REMEDY: Final = "name another file with --report FILE"
_PROBLEMS: Final = (NumapinError, OSError, ValueError, MemoryError)  # the job goes on, whatever becomes of this
_JOIN_S: Final = 2.0  # for a look that goes on at the end: the job's end waits for no more


@dataclass(frozen=True, slots=True, kw_only=True)
class Watching:
    """What to do: look `after_s` after all ranks have started, write `report` (None: nowhere), `warn` of errors.

    `tell` is given a report and the seconds since it was made.
    """

    after_s: float
    report: Path | None
    tell: Callable[[VerifyReport, float], None]
    warn: Callable[[str], None]


@contextmanager
def watching(run_dir: str, num_ranks: int, what: Watching) -> Iterator[None]:
    """Verify the run beside the body, and tell the last look at the end if there was one after the first.

    The end itself cannot be seen: when a launcher hears that ranks have ended, their memory is gone. So the last look
    is up to a minute old, and a job that ends before the first one is told to be unverified.

    Raises NumapinError at the end where the report could not be written. Where the body failed, it is a warning.
    """
    watch = _RunWatch(Path(run_dir), num_ranks, what)
    watch.start()
    try:
        yield
    except BaseException:
        if (unwritten := watch.finish()) is not None:
            what.warn(str(unwritten))
        raise
    if (unwritten := watch.finish()) is not None:
        raise unwritten


class _RunWatch(threading.Thread):
    """The thread that looks; `_last` is what it saw last, and when."""

    def __init__(self, run_dir: Path, num_ranks: int, what: Watching) -> None:
        super().__init__(name="numapin-verify", daemon=True)
        self._run_dir, self._num_ranks, self._what = run_dir, num_ranks, what
        self._end = threading.Event()
        self._last: tuple[VerifyReport, float] | None = None
        self._looks = 0
        self._gone: frozenset[int] = frozenset()
        self._gone_since = 0.0
        self._problem = "no rank had started"
        self._unwritten: NumapinError | None = None

    def run(self) -> None:
        """Wait for the ranks, look, and look again, until the end."""
        self._write(
            VerifyReport(run=self._run_dir.name, ranks=())
        )  # one of an earlier run must not be taken for this one's
        while not self._end.wait(_RETRY_S) and self._job() is None:
            pass
        pause_s = self._what.after_s
        while not self._end.wait(pause_s):
            pause_s = self._look_if_settled()

    def finish(self) -> NumapinError | None:
        """End the thread, which may be in the middle of a look, and tell what it saw last.

        Returns why the report was not written when it was last tried; None where it was, or where none was asked for.
        """
        self._end.set()
        self.join(timeout=_JOIN_S)  # a read of /proc can block for as long as a rank hangs in the kernel
        if self.is_alive():
            self._problem = f"a look at it did not end within {_JOIN_S:g} s"
        if self._last is not None and self._looks > 1:
            report, seen = self._last
            self._what.tell(report, time.monotonic() - seen)
        if self._last is None:
            self._what.warn(f"the run was not verified: {self._problem}")
        return self._unwritten

    def _job(self) -> RunningJob | None:
        """Return the job, None while not all ranks have written their records, or where none can."""
        try:
            job = read_run(self._run_dir)
        except _PROBLEMS as error:
            self._problem = str(error)
            return None
        if len(job.pids) < self._num_ranks:
            self._problem = "not all of its ranks had started"
            return None
        self._problem = f"it ended within {self._what.after_s:g} s; look earlier with --verify-after"
        return job

    def _look_if_settled(self) -> float:
        """Look, unless ranks come or go just now; return the seconds until the next time.

        Whether ranks live costs a small file each; where their pages are is asked once a minute, whatever comes of it.
        """
        job = self._job()
        if job is None:
            return _AGAIN_S if self._looks else _RETRY_S
        if not self._is_settled(job):
            return _RETRY_S
        try:
            self._look(job)
        except _PROBLEMS as error:
            self._problem = str(error)
        return _AGAIN_S

    def _is_settled(self, job: RunningJob) -> bool:
        """Return whether all ranks live, or the same ones are gone for longer than a restart or the job's end takes."""
        gone, now = job.gone, time.monotonic()
        if gone != self._gone:
            self._gone, self._gone_since = gone, now
        if len(gone) == len(job.pids):
            self._problem = "its ranks came and went"
            return False
        return not gone or now - self._gone_since >= _GONE_S

    def _look(self, job: RunningJob) -> None:
        """Verify once; the verdict is kept and told before it is written, so that a full disk does not lose it."""
        report = verify(job.plan, observe(job.pids, gone=job.gone), applied=job.applied, run=job.name)
        self._last, self._looks = (report, time.monotonic()), self._looks + 1
        if self._looks == 1:
            self._what.tell(report, 0)
        self._write(report)

    def _write(self, report: VerifyReport) -> None:
        """Write the report file, if one was asked for; what a pipe or a device gets is a verdict only."""
        path = self._what.report
        if path is None or (not report.ranks and is_special(str(path))):
            return
        try:
            write_text_to(str(path), encode(report.to_json()) + "\n", remedy=_REMEDY)
        except _PROBLEMS as error:
            self._unwritten = error if isinstance(error, NumapinError) else NumapinError(f"--report: {error}", _REMEDY)
        else:
            self._unwritten = None
