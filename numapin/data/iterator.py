"""torch's multi-process iterator with our queues, workers and slots.

Our parts are those that it calls: the context that makes its queues and processes, the worker_init_fn, and the opening
of a batch when it is due.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
import weakref
from functools import cache, partial
from multiprocessing import util
from typing import TYPE_CHECKING, Any, cast

import torch.multiprocessing
from torch.autograd import profiler

from numapin.data import forking, usage
from numapin.data.balance import Balance
from numapin.data.casting import collate_and_cast
from numapin.data.message import Parcel
from numapin.data.opening import Pinner
from numapin.data.path import path_of
from numapin.data.pool import unused_slots_hidden
from numapin.data.queues import ResultQueue
from numapin.data.torch_names import (
    MP_STATUS_CHECK_INTERVAL,
    ExceptionWrapper,
    _DatasetKind,
    _MultiProcessingDataLoaderIter,
    _remove_worker_pids,
    _set_worker_pids,
    _SingleProcessDataLoaderIter,
)
from numapin.data.transform import Transform, move_and_transform
from numapin.errors import NumapinError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.utils.data import DataLoader

    from numapin.data.path import DataPath, PathOptions
    from numapin.data.torch_names import _BaseDataLoaderIter

    _TorchsIterator = _MultiProcessingDataLoaderIter
else:
    _TorchsIterator = object


class Changed:
    """A loader with some attributes changed, for torch's iterator to read. The user's loader stays as it is."""

    def __init__(self, loader: DataLoader[Any], **changes: object) -> None:
        self._loader = loader
        self.__dict__.update(changes)

    def __getattr__(self, name: str) -> object:
        """Return an attribute of the loader that was not changed."""
        return getattr(self._loader, name)


class LaneIterator(_TorchsIterator):
    """The parts of an iterator through a lane; torch's multi-process iterator comes after it among the bases."""

    torchs_name = _MultiProcessingDataLoaderIter.__name__
    """The name of torch's class, which profilers show."""

    publishes_steps = True
    """The data path publishes them, with the bytes that its loader moves."""

    result_queue = ResultQueue

    _transform: Transform | None = None
    is_cut_short = False
    """Whether the loader was closed in the middle of this epoch."""

    _num_failed = 0
    """The batches of this epoch that were due and came as an error."""

    @staticmethod
    def apply(function: Callable[[Any], object], opened: Any) -> object:
        """Apply a function of a batch to what the opener returns."""
        return function(opened)

    def __init__(self, loader: DataLoader[Any], path: DataPath, *state: object) -> None:
        """Start the workers. `state` is for torchdata's iterator. Raises what torch's iterator raises."""
        moves = path.options.cuda_device is not None
        pins = not moves and loader.pin_memory and torch.cuda.is_available()
        self._path, self._lane = path, path.lane(loader, pins=pins, result_queue=self.result_queue)
        self._lane.balance = _balance_of(loader, path, has_turns_in_state=bool(state))
        if path.options.device_transform is not None:
            self._transform = Transform(path.options.device_transform, self._lane.opener, self.apply, path.notices.warn)
        self._last_s: float | None = None
        pins_in_loop = isinstance(self._lane.opener, Pinner)
        if pins and not pins_in_loop:  # batches are copied, by torch's pin thread, beside the loop
            self._lane.results.open_in_thread(path.bind_this_thread, self._lane.opener.open)
        base = loader.multiprocessing_context or torch.multiprocessing
        self._context = forking.Context(base, self._lane.queues(), self._lane.slots_of, num_workers=loader.num_workers)
        changed = Changed(
            loader,
            multiprocessing_context=self._context,
            worker_init_fn=path.worker_start(self._lane, loader, pins=pins or moves),
            pin_memory=loader.pin_memory and not moves and not pins_in_loop,
        )
        with unused_slots_hidden():
            super().__init__(changed, *state)
        self._profile_name = f"enumerate(DataLoader)#{self.torchs_name}.__next__"  # of the range that profilers show
        util.Finalize(self, _end_at_exit, (weakref.ref(self),), exitpriority=10)

    def _reset(self, loader: DataLoader[Any], *arguments: object, **options: object) -> None:
        self._last_s, self._num_failed = None, 0
        self._lane.reclaim()  # what was dropped since the last batch serves the first tasks
        super()._reset(loader, *arguments, **options)
        if self._transform is not None:
            self._transform.restart()

    def __next__(self) -> object:
        """Return the next batch. torch's range for profilers costs 8 us, so it is left out while none runs."""
        if profiler._is_profiler_enabled or self._dataset_kind == _DatasetKind.Iterable:
            return super().__next__()
        data = self._next_data()
        self._num_yielded += 1
        return data

    def _next_data(self) -> Any:
        began_s = time.perf_counter()
        self._path.notices.check()
        self._lane.reclaim()
        try:
            data: object = super()._next_data()  # type: ignore[no-untyped-call]
        except StopIteration:
            if self.is_cut_short:
                raise NumapinError(
                    "the loader was closed in the middle of this epoch", "close it after its last batch"
                ) from None
            raise
        self._lane.results.look_ahead()
        if self._transform is not None:
            self._transform.prepare(self._next_arrived(), self._num_yielded + self._num_failed + 1)
        now_s = time.perf_counter()
        stepped_s = None if self._last_s is None else now_s - self._last_s
        self._path.note_step(waited_s=now_s - began_s, stepped_s=stepped_s)
        self._last_s = now_s
        return data

    def _try_get_data(self, timeout: float = MP_STATUS_CHECK_INTERVAL) -> tuple[bool, object]:
        """Return whether a result came, and the result. Look for hung workers after every second without one.

        torch asks once for the whole of a user's timeout, which is waited for in such pieces.
        """
        while True:
            wait_s = min(timeout, forking.LOOK_S)
            found: tuple[bool, object] = super()._try_get_data(wait_s)  # type: ignore[no-untyped-call]
            if not found[0]:
                self._restart_hung()
            timeout -= wait_s
            if found[0] or timeout <= 0:
                return found

    def _restart_hung(self) -> None:
        hung = self._context.hung(self._workers)
        if not hung:
            return
        self._unwatch()
        for number in hung:
            with unused_slots_hidden():
                warning = self._context.start_again(self._workers, number)
            if warning:
                self._path.notices.warn(warning)
        _set_worker_pids(id(self), tuple(process.pid or 0 for process in self._workers))  # the SIGCHLD handler raises
        self._worker_pids_set = True

    def end_unstarted(self) -> None:
        """End workers that may hang: torch, and multiprocessing at exit, would wait for them even after SIGTERM."""
        for number in self._context.unstarted(self._workers):
            self._unwatch()
            self._context.end(self._workers[number], number)

    def _unwatch(self) -> None:
        """Keep torch's handler of SIGCHLD from raising for workers that we kill."""
        if self._worker_pids_set:
            _remove_worker_pids(id(self))
            self._worker_pids_set = False

    def _try_put_index(self) -> None:
        """Send the next task, if there is one; with `balance`, not to torch's next worker."""
        balance = self._lane.balance
        if balance is None:
            super()._try_put_index()
            return
        self._lane.results.look_ahead()  # what has arrived is no load any more
        worker, before = balance.choose(self._workers_status), self._send_idx
        self._worker_queue_idx_cycle = itertools.cycle((worker,))
        balance.note_sent(worker)  # first, because another thread may take in the batch
        super()._try_put_index()
        if self._send_idx == before:
            balance.take_back(worker)

    def _process_data(self, data: object, worker_idx: int) -> object:
        try:
            # Before the batch is opened, so that an error does not lose a task.
            data = self._opened(super()._process_data(data, worker_idx))  # type: ignore[no-untyped-call]
            if isinstance(data, ExceptionWrapper):
                data.reraise()
        except BaseException:  # Ctrl-C, too
            self._num_failed += 1
            raise
        return data

    def _opened(self, data: object) -> object:
        """Return the batch of a parcel, or of torch's pin thread, as the loop gets it."""
        if self._transform is None:
            return self._lane.opener.open(data) if isinstance(data, Parcel) else data
        return self._transform.open(data, self._num_yielded + self._num_failed)

    def _next_arrived(self) -> object:
        """Return what is due next if it has arrived, such as a parcel; None if it has not."""
        found = self._task_info.get(self._rcvd_idx, ())
        if len(found) == 2:  # torchdata keeps it with the worker and its state
            return found[1][0] if isinstance(found[1], tuple) else found[1]
        return self._lane.results.peek(self._rcvd_idx if self._in_order else None)

    # A default, because a finalizer may run when this module's own names are gone.
    def _shutdown_workers(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """End the workers and give the pool back, even if the iterator failed before it had workers.

        Nothing is left to do when Python ends: the workers have been ended before, and the kernel takes the rest.
        """
        if _is_finalizing():
            return
        if "_lane" not in self.__dict__ or self._path.pid != os.getpid():
            return  # a child that the user forked inherits the iterator, but not its workers
        workers = self.__dict__.get("_workers")
        try:
            if workers is not None:
                self.__dict__.setdefault("_workers_status", [True] * len(workers))
                try:
                    self.end_unstarted()
                finally:
                    super()._shutdown_workers()
        finally:
            if workers is None or self._shutdown:  # torch leaves it False when Python ends
                are_gone = not any(process.is_alive() for process in workers or ())
                self._task_info = {}
                if self._transform is not None:
                    self._transform.forget()
                self._lane.end(workers_are_gone=are_gone)

    def _mark_worker_as_unavailable(self, worker_id: int, shutdown: bool = False) -> None:  # noqa: FBT001, FBT002
        super()._mark_worker_as_unavailable(worker_id, shutdown)
        if shutdown and self._lane.pool is not None:
            self._lane.pool.arrivals.discard()  # a worker waits if the socket has no room for its new slot


def _balance_of(loader: DataLoader[Any], path: DataPath, *, has_turns_in_state: bool) -> Balance | None:
    """Return what chooses the workers; None: torch's own turns.

    With in_order=False torch itself skips workers that have enough tasks. The workers of an iterable dataset have their
    own shares: another order would change which samples a loop sees that ends early, and would not end sooner.
    torchdata's iterators restore a state by the turns of the workers, and raise an error if these were others.
    """
    if not path.options.balance or not loader.in_order:
        return None
    if loader._dataset_kind == _DatasetKind.Iterable or has_turns_in_state:
        path.notices.warn(
            "balance=True changes nothing for an iterable dataset, whose workers have their own shares of the samples, "
            "or for a StatefulDataLoader, whose state depends on the turns of its workers; to take batches as they "
            "come, use in_order=False"
        )
        return None
    return Balance(loader.num_workers)


class SlotIterator(LaneIterator, _MultiProcessingDataLoaderIter):
    """An iterator over a loader's batches, through a lane."""


def _end_at_exit(reference: weakref.ref[LaneIterator]) -> None:
    """End torch's pin thread, and workers that may hang, before multiprocessing waits for these.

    Python aborts if a thread is in C++ when the interpreter ends.
    """
    iterator = reference()
    if iterator is None:
        return
    thread = iterator.__dict__.get("_pin_memory_thread")
    if thread is not None and thread.is_alive():  # else its queue is closed
        iterator._pin_memory_thread_done_event.set()
        iterator._lane.results.put((None, None))  # wakes it
        thread.join(2)  # not for ever: it may wait for a user's type
    iterator.end_unstarted()


class _Moving:
    """The part of an iterator without slots that puts batches on the device and transforms them, in this process."""

    _num_yielded: int

    def __init__(self, loader: DataLoader[Any], options: PathOptions, *state: object) -> None:
        self._options, self._num_failed = options, 0
        super().__init__(loader, *state)  # type: ignore[call-arg] # torch's or torchdata's

    def _reset(self, *arguments: object, **options: object) -> None:
        self._num_failed = 0
        super()._reset(*arguments, **options)  # type: ignore[misc]

    def _next_data(self) -> Any:
        try:
            data = super()._next_data()  # type: ignore[misc]
            return move_and_transform(self._options, data, self._num_yielded + self._num_failed)
        except BaseException as error:  # Ctrl-C, too
            self._num_failed += not isinstance(error, StopIteration)
            raise


@cache
def _moving_class(theirs: type) -> Callable[..., Any]:
    return type(theirs.__name__, (_Moving, theirs), {})  # by their name, which profilers show


def iterator_without_slots(theirs: type, loader: Any, options: PathOptions, *state: object) -> Any:
    """Return an iterator of torch's or torchdata's class that casts, moves and transforms as the options say."""
    if options.casts:
        loader = Changed(loader, collate_fn=partial(collate_and_cast, loader.collate_fn, dict(options.casts)))
    if options.cuda_device is not None:
        loader = Changed(loader, pin_memory=False)
    if options.cuda_device is None and options.device_transform is None:
        return theirs(loader, *state)
    return _moving_class(theirs)(loader, options, *state)


def iterator_of(loader: DataLoader[Any], options: PathOptions) -> _BaseDataLoaderIter:
    """Return a new iterator over any torch DataLoader, by our data path."""
    if loader.num_workers and not pins_elsewhere(loader):
        loader.check_worker_number_rationality()
        path = path_of(loader, options)
        usage.note_path(path)
        return SlotIterator(loader, path)
    usage.note_other(loader, usage.PINS_ELSEWHERE if loader.num_workers else usage.NO_WORKERS)
    theirs = _MultiProcessingDataLoaderIter if loader.num_workers else _SingleProcessDataLoaderIter
    return cast("_BaseDataLoaderIter", iterator_without_slots(theirs, loader, options))


def pins_elsewhere(loader: DataLoader[Any]) -> bool:
    """Return whether batches are to be pinned for an accelerator that is not an NVIDIA GPU."""
    accelerator = torch.accelerator.current_accelerator() if loader.pin_memory else None
    return accelerator is not None and accelerator.type != "cuda" and torch.accelerator.is_available()
