"""The watch of `numapin trace` over its job: report, or end the job, as soon as the steps are recorded."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import contextmanager, suppress
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

    `num_reported` is the number of traces in the report, None without one; `has_stopped`: it has ended the job.
    """

    folder: Path
    report: Callable[[], None]
    stops: bool
    num_reported: int | None = None
    has_stopped: bool = False
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
            if not _num_traces(records):
                continue
            first_s = time.monotonic() if first_s is None else first_s
            if not are_all_recorded(records) and time.monotonic() - first_s <= _REST_WAIT_S:
                continue
            if not self.stops:
                with suppress(NumapinError, OSError):  # the report at the end of the job says it again
                    self.report()
                    self.num_reported = _num_traces(records)
                return
            with self.lock:
                if not self.ended.is_set():
                    self.has_stopped = True
                    os.kill(os.getpid(), signal.SIGTERM)
            return

    @property
    def is_report_complete(self) -> bool:
        """True if no rank has recorded steps since the report."""
        return self.num_reported == _num_traces(records_of(self.folder))


def _num_traces(records: Sequence[Mapping[str, object]]) -> int:
    return sum(bool(record.get("trace")) for record in records)


def are_all_recorded(records: Sequence[Mapping[str, object]]) -> bool:
    """Return whether every rank of this host has recorded its steps, or given up."""
    numbers = (record.get("num_local_ranks") for record in records)
    wanted = max((number for number in numbers if isinstance(number, int)), default=1)
    return all(record.get("done") is True for record in records) and len({r.get("rank") for r in records}) >= wanted
