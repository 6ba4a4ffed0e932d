"""The two queues of torch's iterator, over `Channel`. Edge.

Comes in (rank): tasks for a worker; (worker): batches. Goes out: the same on the other side, batches as `Parcel`s that
the iterator opens when they are due.

They have the methods that torch's iterator and worker loop call: put, get, and Channel's cancel_join_thread and close.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from torch._utils import ExceptionWrapper
from torch.utils.data import get_worker_info
from torch.utils.data._utils.worker import _IterableDatasetStopIteration

from numapin.data.resume.streams import Report
from numapin.data.slots.handover import Handover
from numapin.data.wire.channel import Channel
from numapin.data.wire.grant import NO_GRANT, Grant, decode_grant
from numapin.data.wire.message import Head, decode, encode_plain
from numapin.data.wire.parcel import Parcel
from numapin.data.wire.tensors import pickled, unpickle
from numapin.data.worker import setup, state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

T = TypeVar("T")

_ENOUGH: Final = 4  # batches: more than are copied ahead
_RANK: Final = 0xFFFF  # the rank's own number as a writer; workers have theirs


class TaskQueue(Channel):
    """A queue from the rank to one worker: (number, indices) with a slot, and the beginning and end of epochs."""

    def __init__(self, grant: Callable[[Callable[[int, int], bool]], Grant] | None) -> None:
        """Take what chooses a slot for the next task; it gets a function that hands a descriptor over."""
        super().__init__()
        self._grant, self._handover = grant, Handover(child_sends=False)
        self._follows_task = False

    def __getstate__(self) -> tuple[Any, ...]:
        """Give the worker its ends."""
        return super().__getstate__(), self._handover

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """Take the worker's ends over."""
        super().__setstate__(state[0])
        self._grant, self._handover = None, state[1]
        self._follows_task = False

    def _offer(self, number: int, fd: int) -> bool:
        try:
            self._handover.send({number: fd}, waits=False)
        except OSError:  # no room, or the worker is gone
            return False
        return True

    def close(self) -> None:
        """Close all ends in this process."""
        super().close()
        self._handover.close()

    def put(self, task: object) -> None:
        """Send a task; never waits."""
        message = pickled(task)
        # Last: a task that cannot be sent must not take a slot with it.
        grant = self._grant(self._offer) if self._grant is not None and isinstance(task, tuple) else NO_GRANT
        self.send(grant.encode() + message)

    def get(self, timeout: float | None = None) -> object:
        """Return the next task; raises queue.Empty after `timeout` seconds."""
        grant, message = decode_grant(self.receive(timeout))
        # Every worker waits for the first task of an epoch, however slow it is.
        setup.accept(grant, self._handover, was_idle=self.has_waited and self._follows_task)
        task = unpickle(message)
        self._follows_task = isinstance(task, tuple)
        return task


class ResultQueue(Channel):
    """A queue from the workers to the rank: batches, errors, ends of iterable datasets."""

    _is_workers = False

    def __init__(self, accept: Callable[[Head, memoryview], Parcel]) -> None:
        super().__init__()
        self.number = _RANK
        self._accept = accept
        self._results: deque[tuple[object, object]] = deque()
        self._open: Callable[[Parcel], object] | None = None
        self._begin: Callable[[], None] | None = None
        self._report_to: Callable[[Report], None] | None = None

    def open_in_thread(self, begin: Callable[[], None], open_parcel: Callable[[Parcel], object]) -> None:
        """Open parcels in the thread that reads them, torch's pin thread, which first calls `begin` once."""
        self._begin, self._open = begin, open_parcel

    def report_to(self, arrived: Callable[[Report], None]) -> None:
        """Give the workers' reports to `arrived`, in the thread that reads them."""
        self._report_to = arrived

    def put(self, result: tuple[object, object]) -> None:
        """Send (number, batch) from a worker; never waits. A batch that cannot be pickled is sent as that error."""
        info, (number, data) = get_worker_info(), result
        if info is not None and not self._is_workers:
            self.number, self._is_workers = info.id, True
            self.stop_reading()
        report = state.report(number, data)
        if report is not None:
            self.send(encode_plain((report, None)))
        if info is None or not isinstance(number, int) or isinstance(data, _IterableDatasetStopIteration):
            setup.end_without_batch()
            self.send(encode_plain(result))
        else:
            self.send(setup.pack(number, data, where=f"in DataLoader worker process {info.id}"))

    def get(self, timeout: float | None = None) -> tuple[object, object]:
        """Return the next (number, parcel) or plain message in the rank; raises queue.Empty after `timeout` seconds."""
        if self._begin is not None:
            begin, self._begin = self._begin, None
            begin()
        while not self._results:
            self._accept_all([self.receive(timeout)])
        number, data = self._results.popleft()
        return number, self._opened(data) if isinstance(number, int) else data

    def look_ahead(self) -> None:
        """Accept batches that have arrived, so that copies start ahead of time; do nothing while enough wait."""
        if self._open is None and len(self._results) < _ENOUGH:
            self.fill()
            self._accept_all(self.arrived())

    def forget(self) -> None:
        """Drop the batches that arrived and were not asked for: they hold slots."""
        self._results.clear()

    def _accept_all(self, messages: Iterable[bytes]) -> None:
        for message in messages:
            result = self._decode(message)
            if not isinstance(result[0], Report):
                self._results.append(result)
            elif self._report_to is not None:
                self._report_to(result[0])

    def _decode(self, message: bytes) -> tuple[object, object]:
        head, body = decode(message)
        if head is None:
            return body  # type: ignore[no-any-return]
        return head.number, _or_error(partial(self._accept, head, body), where="while a batch was taken in")

    def _opened(self, data: object) -> object:
        if self._open is None or not isinstance(data, Parcel):  # an error, or the end of an iterable dataset
            return data
        return _or_error(partial(self._open, data), where="in pin memory thread")


def _or_error(work: Callable[[], T], *, where: str) -> T | ExceptionWrapper:
    """Return the result or the error, which torch raises when the batch is due: no other batch is lost."""
    try:
        return work()
    except Exception:  # noqa: BLE001 - a user's type may raise anything
        return ExceptionWrapper(where=where)
