"""The place of one iterator, which reports each batch that it yields."""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext
from itertools import islice
from typing import TYPE_CHECKING, Any

from numapin.data.resume import randomness
from numapin.data.resume.dataset import place_in, restore_dataset, restore_iterator
from numapin.data.resume.order import Order
from numapin.data.resume.place import Place, StreamPlace
from numapin.data.resume.samplers import is_stateful
from numapin.data.resume.streams import Streams
from numapin.data.resume.worker_state import DatasetStart
from numapin.data.torch_names import _DatasetKind

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from torch.utils.data import DataLoader


class Yielded:
    """The batches of an order that were yielded: all before a number, and some after it."""

    def __init__(self, num: int, ahead: tuple[int, ...]) -> None:
        """Continue after the first `num` batches and those `ahead`."""
        self.num, self.ahead = num, set(ahead)
        self._numbers = [number for number in range(num, max(ahead, default=num)) if number not in self.ahead]
        self._after = max(ahead, default=num - 1) + 1 - len(self._numbers)

    def note(self, task: int) -> None:
        """Note the batch of a task: tasks are numbered in the order of the batches that were missing at first."""
        number = self._numbers[task] if task < len(self._numbers) else task + self._after
        if number != self.num:
            self.ahead.add(number)
            return
        self.num += 1
        while self.num in self.ahead:
            self.ahead.discard(self.num)
            self.num += 1


class Track:
    """The place of one iterator.

    Attributes:
        streams: The places of its workers' streams of samples, which take the workers' reports.
        base_seed: The seed from which the workers' seeds are made; None before it was drawn.
    """

    def __init__(
        self, loader: DataLoader[Any], place: Place | None, *, every: int, warn: Callable[[str], None]
    ) -> None:
        """Take the place at which to continue; None: at the start of an epoch."""
        self._num_workers, self._every, self._warn = loader.num_workers, every, warn
        self._batch_size = loader.batch_size
        self._is_iterable = loader._dataset_kind == _DatasetKind.Iterable
        self._place = place
        self._begun = place if place is not None else Place()
        start = (StreamPlace(is_iterable=self._is_iterable),) * max(1, self._num_workers)
        streams = start if place is None or len(place.streams) != len(start) else place.streams
        self.streams = Streams(streams, last_worker=-1 if place is None else place.last_worker)
        self._order: Order  # from `before` on
        self._has_begun = self._is_renewed = False
        self._yielded = Yielded(0, ())
        self._num_noted = 0
        self._fetcher: Any = None
        self._before_seed = self._states_before_seed(loader)
        self.base_seed: int | None = None
        self._len_called: int | None = None
        self._is_finished = False

    @property
    def dataset_start(self) -> DatasetStart:
        """Return where the workers' datasets begin."""
        places = () if self._place is None or len(self._place.streams) != self._num_workers else self._place.streams
        return DatasetStart(places=places, every=self._every, batch_size=self._batch_size)

    def seed(self, drawn: int) -> int:
        """Return the seed of the workers: from the epoch that is continued, or the one that torch has drawn."""
        known = self._begun.base_seed
        self.base_seed = drawn if known is None else known
        return self.base_seed

    def preserved(self) -> AbstractContextManager[None]:
        """Keep the process's generators as they are, if this iterator continues in the middle of an epoch."""
        return randomness.preserved() if self._is_resumed else nullcontext()

    def before(self, loader: DataLoader[Any]) -> None:
        """Note the state that decides the next epoch's order, before torch calls `iter(sampler)`."""
        self._is_renewed = self._has_begun and self._place is None  # persistent workers
        if self._is_renewed:
            self._begun = Place()
            self.streams.renew()
        self._undo_seed_draw(loader)
        self._num_noted, self._is_finished = 0, False
        self._order, self._has_begun = Order(loader, self._libraries(loader)), True
        self._len_called = loader._IterableDataset_len_called
        if self._is_resumed:
            self._restore_epochs()
        if not self._num_workers:
            self._restore_here(loader)

    def _restore_here(self, loader: DataLoader[Any]) -> None:
        """Set the generators and the dataset of a loader without workers."""
        if self._is_resumed:
            self._order.set_early(self._begun.order)
        if self._place is not None:
            restore_dataset(loader.dataset, self._place.streams[0])

    def start(self, iterator: Any) -> None:
        """Give torch's iterator its order, and its place in it, before the first draw."""
        place, is_resumed = self._begun, self._is_resumed
        if self._is_renewed:  # again, because batches of an abandoned epoch have arrived since, with their reports
            self.streams.renew()
        self._yielded = Yielded(place.order.yielded, place.order.ahead)
        if is_resumed and not self._is_iterable:
            iterator._sampler_iter = self._order.resume(place.order)
        elif self._num_workers:
            iterator._sampler_iter = self._order.follow(iterator._sampler_iter)
        elif is_resumed:
            self._order.set_late(place.order)
        else:
            iterator._sampler_iter = self._order.lazily(iterator._sampler_iter)
        iterator._num_yielded = place.num_yielded
        self._restore_streams(iterator)
        self._place = None

    def note(self, worker: int, task: int | None = None) -> None:
        """Count a batch that is yielded; `task`: its number, if batches are not yielded in order."""
        self.streams.note(worker)
        if task is None and not self._yielded.ahead:
            self._yielded.num += 1
        else:
            self._yielded.note(self._num_noted if task is None else task)
        self._num_noted += 1
        if self._order.is_noting:
            self._order.forget(self._yielded.num)

    def finish(self) -> None:
        """Note the end of the epoch."""
        self._is_finished = True

    def place(self) -> Place:
        """Return the place after the last batch that was yielded."""
        if not self._has_begun:
            return self._begun  # the iterator could not be made
        streams = self.streams.places()
        if self._fetcher is not None:
            streams = (self._alone(streams[0]),)
        order = self._order.place(self._yielded.num, self._yielded.ahead)
        return Place(
            num_yielded=self._begun.num_yielded + self._num_noted,
            order=order,
            streams=streams,
            num_workers=self._num_workers,
            last_worker=self.streams.last_worker,
            base_seed=self.base_seed,
            len_called=self._len_called,
            is_finished=self._is_finished,
        )

    @property
    def _is_resumed(self) -> bool:
        return self._place is not None and not self._place.order.is_start

    def _alone(self, counted: StreamPlace) -> StreamPlace:
        """Return the place in the dataset of a loader without workers."""
        found = place_in(self._fetcher)
        return found if found.is_stateful or not found.is_iterable else counted

    def _libraries(self, loader: DataLoader[Any]) -> tuple[str, ...] | None:
        """Return the libraries whose global generators decide the order; None: those that the samplers use."""
        if not self._is_iterable:
            return None
        return () if self._num_workers or is_stateful(loader.dataset) else randomness.ALL

    def _states_before_seed(self, loader: DataLoader[Any]) -> tuple[Any, Any] | None:
        """Return the generators' states, if torch now draws a seed that an uninterrupted run would not draw."""
        if self._place is None or not (loader.persistent_workers or not self._place.order.is_start):
            return None
        own = loader.generator
        return randomness.process_states(randomness.TORCH_ONLY), None if own is None else own.get_state()

    def _undo_seed_draw(self, loader: DataLoader[Any]) -> None:
        before, self._before_seed = self._before_seed, None
        if before is not None and self._num_workers:
            randomness.set_process(before[0])
            if before[1] is not None:
                loader.generator.set_state(before[1])

    def _restore_epochs(self) -> None:
        for name, had, wanted in self._order.restore_epochs(self._begun.order):
            self._warn(
                f"{name}: set_epoch({had}) was called, but the loaded state is in the middle of epoch {wanted}, which "
                f"continues in its own order; call set_epoch({wanted}) before this loop"
            )

    def _restore_streams(self, iterator: Any) -> None:
        place = self._place
        if not self._num_workers:
            self._fetcher = iterator._dataset_fetcher
            if place is not None:
                restore_iterator(self._fetcher, place.streams[0], batch_size=self._batch_size)
        elif place is not None and place.num_workers == self._num_workers:
            deque(islice(iterator._worker_queue_idx_cycle, place.last_worker + 1), maxlen=0)
        self._warn_if_read_again()

    def _warn_if_read_again(self) -> None:
        if self._place is not None and self._place.is_read_again:
            self._warn(
                "the iterable dataset has no state of its own, so its samples up to the loaded state are read again; "
                "give it, or its iterator, state_dict() and load_state_dict()"
            )
