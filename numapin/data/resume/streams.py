"""Count each worker's batches, and keep the reports of its dataset.

Reports arrive with the batches that a worker makes ahead of time, so each waits until its batch has been yielded. It
stays packed until the state is asked for.
"""

from __future__ import annotations

import pickle
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from numapin.data.resume.place import StreamPlace
from numapin.data.torch_names import ExceptionWrapper

if TYPE_CHECKING:
    from collections.abc import Sequence


class Report(NamedTuple):
    """A worker's report about its dataset.

    Attributes:
        worker: The worker.
        num_made: The number of batches that it had made then, in this epoch and this process.
        packed: The pickle of a StreamPlace, or of an ExceptionWrapper if the dataset's `state_dict()` failed.
    """

    worker: int
    num_made: int
    packed: bytes


class _Stream:
    """One worker's batches."""

    def __init__(self, place: StreamPlace) -> None:
        self._place: StreamPlace | Report = place
        self._start = StreamPlace(is_iterable=place.is_iterable)
        self.num_yielded = 0
        self.waiting: deque[Report] = deque()

    def catch_up(self) -> None:
        """Take over the reports about batches that have been yielded."""
        while self.waiting and self.waiting[0].num_made <= self.num_yielded:
            self._place = self.waiting.popleft()

    def renew(self) -> None:
        """Begin the next epoch, with the last report: the worker's own about its beginning."""
        report = self.waiting[-1] if self.waiting else None
        self._place = self._start if report is None else report._replace(num_made=0)
        self.num_yielded = 0
        self.waiting.clear()

    def place(self) -> StreamPlace:
        """Return the place after the batches that were yielded. Raises what the dataset's `state_dict()` raised."""
        self.catch_up()
        if isinstance(self._place, StreamPlace):
            return self._place.after(self.num_yielded)
        place = pickle.loads(self._place.packed)  # noqa: S301 - from our own worker
        if isinstance(place, ExceptionWrapper):
            place.reraise()
        found: StreamPlace = place
        return found.after(self.num_yielded - self._place.num_made)


class Streams:
    """The batches of all workers."""

    def __init__(self, places: Sequence[StreamPlace], *, last_worker: int) -> None:
        """Continue at these places."""
        self._streams = [_Stream(place) for place in places]
        self.last_worker = last_worker

    def note(self, worker: int) -> None:
        """Count a batch that is yielded."""
        stream = self._streams[worker]
        stream.num_yielded += 1
        self.last_worker = worker
        if stream.waiting:
            stream.catch_up()

    def arrived(self, report: Report) -> None:
        """Keep a report until its batch has been yielded."""
        self._streams[report.worker].waiting.append(report)

    def renew(self) -> None:
        """Begin the next epoch of persistent workers."""
        self.last_worker = -1
        for stream in self._streams:
            stream.renew()

    def places(self) -> tuple[StreamPlace, ...]:
        """Return each worker's place."""
        return tuple(stream.place() for stream in self._streams)


def packed(place: Any) -> bytes:
    """Return a report's body. An error that cannot be pickled becomes a RuntimeError."""
    try:
        return pickle.dumps(place)
    except Exception as error:
        if isinstance(place, ExceptionWrapper):  # its class cannot be pickled; its text has the name and the traceback
            place.exc_type = RuntimeError
            return pickle.dumps(place)
        wrapped = ExceptionWrapper(where="in the state of a dataset in a worker")
        wrapped.exc_type, wrapped.exc_msg = RuntimeError, f"{type(error).__name__}: {wrapped.exc_msg}"
        return pickle.dumps(wrapped)
