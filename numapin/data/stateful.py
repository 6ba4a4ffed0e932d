"""torchdata's iterators on our data path. Importing this needs torchdata.

torchdata decides on the contents of the state, and when it is taken.

torchdata's workers send (number, (batch, worker, state)). Our queue sends the batch and its state as one message: the
batch through the slots, the state as bytes of its own, so that no tensor of it is in a slot, pinned, or moved to a
device. The iterator opens both when the batch is due, and hands torchdata the three values that it expects.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from numapin.data import usage
from numapin.data.iterator import LaneIterator, iterator_without_slots, pins_elsewhere
from numapin.data.message import pickled
from numapin.data.path import path_of
from numapin.data.queues import ResultQueue
from numapin.data.torch_names import (
    MP_STATUS_CHECK_INTERVAL,
    ExceptionWrapper,
    _IterableDatasetStopIteration,
    _StatefulMultiProcessingDataLoaderIter,
    _StatefulSingleProcessDataLoaderIter,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from numapin.data.path import PathOptions


def iterator_of(loader: Any, options: PathOptions) -> Any:
    """Return a new iterator over torchdata's loader or ours, which takes over the state that was loaded."""
    state = loader.next_iter_state
    if loader.num_workers and not pins_elsewhere(loader):
        loader.check_worker_number_rationality()
        path = path_of(loader, options)
        usage.note_path(path)
        iterator: Any = StatefulLaneIterator(loader, path, state)
    else:
        usage.note_other(loader, usage.PINS_ELSEWHERE if loader.num_workers else usage.NO_WORKERS)
        several, alone = _StatefulMultiProcessingDataLoaderIter, _StatefulSingleProcessDataLoaderIter
        iterator = iterator_without_slots(several if loader.num_workers else alone, loader, options, state)
    loader.next_iter_state = None
    return iterator


@dataclass(frozen=True)
class _Ending(_IterableDatasetStopIteration):
    """The end of a worker's iterable dataset, which our queue sends as torch's, with the final state."""

    state: bytes


class _StatefulResults(ResultQueue):
    """The queue of results: in a worker, it takes the results that torchdata puts."""

    def put(self, result: tuple[Any, Any]) -> None:
        """Send a result."""
        number, data = result
        if isinstance(number, int):
            batch, worker, state = data
            sealed = pickled(state)
            is_end = isinstance(batch, _IterableDatasetStopIteration)
            data = _Ending(worker, sealed) if is_end else (batch, sealed)
        super().put((number, data))


class StatefulLaneIterator(LaneIterator, _StatefulMultiProcessingDataLoaderIter):  # type: ignore[misc] # no types
    """torchdata's iterator through a lane."""

    torchs_name = _StatefulMultiProcessingDataLoaderIter.__name__
    result_queue = _StatefulResults

    @staticmethod
    def apply(function: Callable[[Any], object], opened: Any) -> object:
        """Apply a function of a batch to a batch with its state: a tuple, or a list that torch's pin thread made."""
        batch, sealed = opened
        return function(batch), sealed

    def __next__(self) -> object:
        """Return the next batch."""
        try:
            return super().__next__()
        except StopIteration:
            self._finished = True
            raise

    def _try_get_data(self, timeout: float = MP_STATUS_CHECK_INTERVAL) -> tuple[bool, object]:
        """Return whether a result came, and the result in torchdata's form."""
        result: Any
        found, result = super()._try_get_data(timeout)
        number, data = result if found else (None, None)
        if not isinstance(number, int):
            return found, result
        if isinstance(data, _Ending):
            ending = _IterableDatasetStopIteration(data.worker_id)
            state = pickle.loads(data.state)  # noqa: S301 - from our own worker
            return True, (number, (ending, data.worker_id, state))
        worker = self._task_info.get(number, (0,))[0]  # of an abandoned epoch, nothing is known, and it is dropped
        return True, (number, (data, worker, None))

    def _process_data(self, data: Any, worker_id: int, state: object) -> object:  # type: ignore[override]
        """Open a batch and its state, and let torchdata keep the state."""
        try:
            data = self._opened(data)
        except Exception:  # noqa: BLE001 - a user's type may raise anything
            # torchdata raises it once it has counted the task as done.
            data = ExceptionWrapper(where="while a batch was opened")
        if not isinstance(data, ExceptionWrapper):
            data, sealed = data  # a tuple, or a list, which torch's pin thread may make of it
            state = pickle.loads(sealed)  # noqa: S301 - from our own worker
        try:
            follow = super(LaneIterator, self)._process_data
            return follow(data, worker_id, state)  # type: ignore[call-arg, no-untyped-call]
        except BaseException:  # Ctrl-C, too
            self._num_failed += 1
            raise
