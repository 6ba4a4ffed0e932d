"""The two queues of torch's iterator, over `Channel`. Edge.

Comes in (rank): tasks for a worker; (worker): batches. Goes out: the same on the other side, batches as `Parcel`s that
the iterator opens when they are due.

They answer to what torch's iterator and worker loop call: put, get, and Channel's cancel_join_thread and close.
"""

from __future__ import annotations

import pickle
from collections import deque
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, Final

from torch._utils import ExceptionWrapper
from torch.utils.data import get_worker_info
from torch.utils.data._utils.worker import _IterableDatasetStopIteration

from numapin.data.wire.channel import Channel
from numapin.data.wire.parcel import Head, decode, encode_plain
from numapin.data.worker import setup

if TYPE_CHECKING:
    from collections.abc import Callable

    from numapin.data.opening.host import Parcel

_ENOUGH: Final = 4  # batches: more than are copied ahead
_RANK: Final = 0xFFFF  # the rank's own number as a writer; workers have theirs


class TaskQueue(Channel):
    """From the rank to one worker: (number, indices), and how an epoch begins and ends."""

    def put(self, task: object) -> None:
        """Send a task; never waits."""
        try:
            message = pickle.dumps(task)
        except (pickle.PicklingError, TypeError, AttributeError):  # indices of a kind that only processes can hand over
            message = bytes(ForkingPickler.dumps(task))
        self.send(message)

    def get(self, timeout: float | None = None) -> Any:  # noqa: ANN401 - torch's tasks
        """Return the next task; raises queue.Empty after `timeout` seconds."""
        return pickle.loads(self.receive(timeout))  # noqa: S301 - from our own rank


class ResultQueue(Channel):
    """From the workers to the rank: batches, errors, ends of iterable datasets."""

    _is_workers = False

    def __init__(self, accept: Callable[[Head, memoryview], Parcel]) -> None:
        super().__init__()
        self.number = _RANK
        self._accept = accept
        self._results: deque[tuple[Any, Any]] = deque()
        self._open: Callable[[Parcel], Any] | None = None
        self._begin: Callable[[], None] | None = None

    def open_in_thread(self, begin: Callable[[], None], open_parcel: Callable[[Parcel], Any]) -> None:
        """Let whichever thread reads open the parcels itself, after it has called `begin` once: torch's pin thread."""
        self._begin, self._open = begin, open_parcel

    def put(self, result: tuple[Any, Any]) -> None:
        """Send (number, batch) from a worker; never waits. A batch that cannot be pickled goes as that error."""
        info, (number, data) = get_worker_info(), result
        if info is not None and not self._is_workers:
            self.number, self._is_workers = info.id, True
            self.stop_reading()
        if info is None or not isinstance(number, int) or isinstance(data, _IterableDatasetStopIteration):
            self.send(encode_plain(result))
        else:
            self.send(setup.pack(number, data, where=f"in DataLoader worker process {info.id}"))

    def get(self, timeout: float | None = None) -> tuple[Any, Any]:
        """Return the next (number, parcel) or plain message in the rank; raises queue.Empty after `timeout` seconds."""
        if self._begin is not None:
            begin, self._begin = self._begin, None
            begin()
        if not self._results:
            self._results.append(self._decode(self.receive(timeout)))
        number, data = self._results.popleft()
        return number, self._opened(data) if isinstance(number, int) else data

    def look_ahead(self) -> None:
        """Take in what has arrived, so that what can be done ahead of time is begun; nothing while enough is there."""
        if self._open is None and len(self._results) < _ENOUGH:
            self.fill()
            self._results.extend(self._decode(message) for message in self.arrived())

    def forget(self) -> None:
        """Drop what has arrived and was not asked for: it holds slots."""
        self._results.clear()

    def _decode(self, message: bytes) -> tuple[Any, Any]:
        head, body = decode(message)
        if head is None:
            return body  # type: ignore[no-any-return]
        try:
            return head.number, self._accept(head, body)
        except Exception:  # noqa: BLE001 - whatever it is, it comes at this batch's turn, and no other batch is lost
            return head.number, ExceptionWrapper(where="while a batch was taken in")

    def _opened(self, data: Any) -> Any:  # noqa: ANN401 - a parcel, or torch's end of a dataset
        if self._open is None or isinstance(data, _IterableDatasetStopIteration | ExceptionWrapper):
            return data
        try:
            return self._open(data)
        except Exception:  # noqa: BLE001 - whatever a user's type raises: in its own turn, not in this thread
            return ExceptionWrapper(where="in pin memory thread")
