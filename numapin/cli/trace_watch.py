"""The watch of `numapin trace` over its job: report, or end the job, as soon as the steps are recorded."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from numapin.cli.trace_reading import records_of
from numapin.errors import NumapinError, Stopped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path
    from types import FrameType

_EVERY_S: Final = 0.3
_REST_WAIT_S: Final = 30.0  # for other ranks, once one has recorded its steps


@dataclass(slots=True)
class TraceWatch:
    """A thread that waits for the ranks' records. `report` is called in it, unless the job is to stop.

    `has_reported` and `has_stopped` say what it did. `problem` is why the report failed.
    """

    folder: Path
    report: Callable[[], None]
    stops: bool
    has_reported: bool = False
    has_stopped: bool = False
    problem: str = ""
    reported: int = 0
    ended: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def during(self) -> Iterator[None]:
        """Watch during the block; the job's end by `stops` is no error."""
        own = signal.signal(signal.SIGTERM, self._late) if self.stops else None
        thread = threading.Thread(target=self._run, daemon=True, name="numapin trace watch")
        thread.start()
        try:
            yield
        except Stopped as error:
            if not self.has_stopped or error.__cause__ is not None:
                raise
        finally:
            with self.lock:
                self.ended.set()
            thread.join()
            if own is not None:
                signal.signal(signal.SIGTERM, own)

    def _late(self, number: int, _frame: FrameType | None) -> None:
        """Handle SIGTERM while no launcher does: ours came after the job had ended, another ends this process."""
        if not self.has_stopped:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _run(self) -> None:
        first_s: float | None = None
        while not self.ended.wait(_EVERY_S):
            records = records_of(self.folder)
            if not any(record.get("trace") for record in records):
                continue
            first_s = time.monotonic() if first_s is None else first_s
            if are_all_recorded(records) or time.monotonic() - first_s > _REST_WAIT_S:
                self._act(sum(bool(record.get("trace")) for record in records))
                return

    def _act(self, num_traces: int) -> None:
        if not self.stops:
            try:
                self.report()
            except (NumapinError, OSError) as error:
                self.problem = str(error)  # the report at the end of the job says it again
            else:
                self.has_reported, self.reported = True, num_traces
            return
        with self.lock:
            if not self.ended.is_set():
                self.has_stopped = True
                os.kill(os.getpid(), signal.SIGTERM)

    @property
    def is_report_complete(self) -> bool:
        """True if no rank has recorded steps since the report."""
        traces = sum(bool(record.get("trace")) for record in records_of(self.folder))
        return self.has_reported and self.reported == traces


def are_all_recorded(records: Sequence[Mapping[str, object]]) -> bool:
    """Return whether every rank of this host has recorded its steps, or given up."""
    wanted = max((_count(record.get("num_local_ranks")) for record in records), default=1)
    return all(record.get("done") is True for record in records) and len({r.get("rank") for r in records}) >= wanted


def _count(value: object) -> int:
    return value if isinstance(value, int) else 1
