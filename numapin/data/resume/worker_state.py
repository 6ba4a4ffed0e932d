"""Report a dataset's state from its worker, and restore it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch.utils.data import get_worker_info

from numapin.data.resume import randomness
from numapin.data.resume.dataset import has_state, place_in, restore_dataset, restore_iterator
from numapin.data.resume.place import StreamPlace
from numapin.data.resume.streams import Report, packed
from numapin.data.torch_names import ExceptionWrapper, _DatasetKind, _IterableDatasetStopIteration, _ResumeIteration

if TYPE_CHECKING:
    from collections.abc import Callable

_watch: DatasetWatch | None = None  # this worker's


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetStart:
    """The places from which the workers' datasets begin.

    Attributes:
        places: Each worker's place in its dataset. Empty: all begin at the start.
        every: The number of batches of a worker between two reports of the state; 0: never. Map-style: after each.
        batch_size: The samples in a batch. None: the dataset gives whole batches.
    """

    places: tuple[StreamPlace, ...]
    every: int
    batch_size: int | None


class DatasetWatch:
    """Watches the dataset of this worker through the fetcher that torch makes for it."""

    def __init__(self, start: DatasetStart, *, worker: int) -> None:
        self._start, self._worker = start, worker
        self._place = start.places[worker] if start.places else StreamPlace()
        self._fetcher: Any = None
        self._is_reporting = False
        self._num_made = 0

    def install(self) -> None:
        """Make torch's loop create its fetchers through this watch."""
        torchs_own: Callable[..., Any] = _DatasetKind.create_fetcher

        def create_fetcher(kind: int, dataset: object, *rest: object) -> object:
            info = get_worker_info()
            if info is None or dataset is not info.dataset:
                return torchs_own(kind, dataset, *rest)  # a loader inside the dataset
            place, self._place = self._place, StreamPlace()
            restore_dataset(dataset, place)
            fetcher = torchs_own(kind, dataset, *rest)
            restore_iterator(fetcher, place, batch_size=self._start.batch_size)
            self._begin(fetcher)
            return fetcher

        _DatasetKind.create_fetcher = staticmethod(create_fetcher)  # type: ignore[method-assign]

    def report(self, number: object, data: object) -> Report | None:
        """Return the report to send before a result of torch's loop; None if there is nothing to report."""
        if self._fetcher is None:
            return None
        if isinstance(number, _ResumeIteration):
            return self._packed(self._next_epoch, num_made=0)
        if isinstance(data, _IterableDatasetStopIteration):
            return self._packed(self._end, num_made=self._num_made)
        self._num_made += 1
        if self._is_reporting and self._num_made % self._every == 0:
            return self._packed(lambda: place_in(self._fetcher), num_made=self._num_made)
        return None

    @property
    def _is_iterable(self) -> bool:
        return hasattr(self._fetcher, "dataset_iter")

    @property
    def _every(self) -> int:
        return self._start.every if self._is_iterable else 1

    def _begin(self, fetcher: object) -> None:
        self._fetcher, self._num_made = fetcher, 0
        self._is_reporting = self._start.every > 0 and has_state(fetcher)

    def _end(self) -> StreamPlace:
        if self._is_reporting:
            return place_in(self._fetcher, has_ended=True)
        return StreamPlace(is_iterable=True, has_ended=True)

    def _next_epoch(self) -> StreamPlace:
        """Return the place before the first batch of the epoch that is about to begin."""
        place = replace(place_in(self._fetcher), dataset_iter=None, has_ended=False)
        return replace(place, random=randomness.process_states()) if self._is_iterable else place

    def _packed(self, place: Callable[[], StreamPlace], *, num_made: int) -> Report:
        try:
            found: object = place()
        except Exception:  # the user's state_dict may raise anything; state_dict() of the loader raises it
            found = ExceptionWrapper(where=f"in the dataset of DataLoader worker process {self._worker}")
        return Report(self._worker, num_made, packed(found))


def begin(start: DatasetStart | None, worker: int) -> None:
    """Watch this worker's dataset."""
    global _watch  # noqa: PLW0603 - one per process
    if start is not None:
        _watch = DatasetWatch(start, worker=worker)
        _watch.install()


def report(number: object, data: object) -> Report | None:
    """Return the report to send before a result; None if there is nothing to report."""
    return None if _watch is None else _watch.report(number, data)
