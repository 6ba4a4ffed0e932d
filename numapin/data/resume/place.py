"""A place in an epoch, written as a dict and read from one.

The keys are those of torchdata 0.11's StatefulDataLoader, which has one layout without workers and one with. Values
for which it has no key are below `_numapin`: it ignores that key, and its own states lack it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from numapin.base.plural import counted
from numapin.errors import UsageError

_SNAPSHOT: Final = "_snapshot"
_MAIN: Final = "_main_snapshot"
_WORKERS: Final = "_worker_snapshots"
_OURS: Final = "_numapin"
_FINISHED: Final = "_iterator_finished"
_SAMPLER: Final = "_index_sampler_state"
_SAMPLER_ITER: Final = "_sampler_iter_state"
_SAMPLER_YIELDED: Final = "_sampler_iter_yielded"
_NUM_YIELDED: Final = "_num_yielded"
_LEN_CALLED: Final = "_IterableDataset_len_called"
_SHARED_SEED: Final = "_shared_seed"
_STEP: Final = "_snapshot_step"
_SINCE: Final = "_steps_since_snapshot"
_LAST_WORKER: Final = "_last_yielded_worker_id"
_NUM_WORKERS: Final = "_num_workers"
_BASE_SEED: Final = "_base_seed"
_FETCHER: Final = "fetcher_state"
_DATASET: Final = "dataset_state"
_DATASET_ITER: Final = "dataset_iter_state"
_ENDED: Final = "fetcher_ended"
_WORKER: Final = "worker_id"

_MOST: Final = 1 << 62  # of anything that is counted
_MOST_UNFINISHED: Final = 1 << 20  # batches that are under way at once
_NOT_OURS: Final = "load a state that state_dict() of numapin.DataLoader or of torchdata's StatefulDataLoader returned"


class StateError(UsageError, ValueError):
    """A state is damaged, or another loader's."""


def _require(is_sound: object, key: str, value: object) -> None:
    """Raise StateError unless a value can come from a loader: what does not would be followed for hours, or forever."""
    if not is_sound:
        raise StateError(f"load_state_dict(): the state is damaged: {key} is {value!r:.60}", _NOT_OURS)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPlace:
    """A place in the batches of one worker, or of the process itself with num_workers=0.

    Attributes:
        skip: The batches that were yielded after the dataset had this state.
        dataset: The dataset's own state. None: it has none.
        dataset_iter: The own state of the dataset's iterator. None: it has none.
        is_iterable: Whether the batches are those of an iterable dataset.
        has_ended: Whether the iterable dataset has ended.
        random: The generators of the process before `iter(dataset)`. None: as its seed set them.
    """

    skip: int = 0
    dataset: Any = None
    dataset_iter: Any = None
    is_iterable: bool = False
    has_ended: bool = False
    random: Any = None

    def __post_init__(self) -> None:
        """Refuse a `random` that is not a mapping."""
        _require(self.random is None or isinstance(self.random, Mapping), "random", self.random)

    @property
    def is_stateful(self) -> bool:
        """Return whether the dataset or its iterator has a state of its own."""
        return self.dataset is not None or self.dataset_iter is not None

    @property
    def is_read_again(self) -> bool:
        """Return whether the samples before the place have to be read once more."""
        return self.skip > 0 and not self.is_stateful

    def after(self, num_batches: int) -> StreamPlace:
        """Return the place `num_batches` later."""
        is_counted = self.is_iterable and not self.has_ended
        return replace(self, skip=self.skip + num_batches) if num_batches and is_counted else self

    def to_dict(self) -> dict[str, Any]:
        """Return torchdata's part."""
        fetcher = {_DATASET_ITER: self.dataset_iter, _ENDED: self.has_ended} if self.is_iterable else None
        return {_FETCHER: fetcher, _DATASET: self.dataset}

    @classmethod
    def of(cls, state: Any, *, skip: int = 0, random: Any = None) -> StreamPlace:
        """Return the place of `to_dict`. Raises StateError."""
        fetcher = _get(state, _FETCHER)
        return cls(
            skip=skip,
            dataset=_get(state, _DATASET),
            dataset_iter=None if fetcher is None else _get(fetcher, _DATASET_ITER),
            is_iterable=fetcher is not None,
            has_ended=fetcher is not None and bool(_get(fetcher, _ENDED)),
            random=random,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderPlace:
    """A place in the order of a sampler.

    Attributes:
        yielded: The batches from the sampler's start on of which all were yielded.
        ahead: The numbers of later batches that were yielded too, because of `in_order=False`.
        sampler: The sampler's own state at this place. None: it has none.
        sampler_iter: Its iterator's own state at this place, in torchdata's form. None: it has none.
        start: The state that decides the order, from the start of the epoch: see `Order`. None: unknown.
        checksum: A number of batches, the rank, and the checksum of their indices. None: unknown, or torch's samplers.
    """

    yielded: int = 0
    ahead: tuple[int, ...] = ()
    sampler: Any = None
    sampler_iter: Any = None
    start: Any = None
    checksum: tuple[int, int, int] | None = None

    @property
    def is_start(self) -> bool:
        """Return whether it is the start of an order that is not drawn yet."""
        return self == OrderPlace()


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A place in an epoch of a loader.

    Attributes:
        num_yielded: The batches that were yielded.
        order: The place in the sampler.
        streams: The places of the workers' batches; a single one with num_workers=0.
        num_workers: The number of workers.
        last_worker: The worker whose batch was yielded last; -1: none yet.
        base_seed: The seed from which the workers' seeds are made. None: unknown.
        len_called: The length that an iterable dataset reported. None: it was not asked.
        is_finished: Whether the epoch is over.
    """

    num_yielded: int = 0
    order: OrderPlace = OrderPlace()
    streams: tuple[StreamPlace, ...] = (StreamPlace(),)
    num_workers: int = 0
    last_worker: int = -1
    base_seed: int | None = None
    len_called: int | None = None
    is_finished: bool = False

    @property
    def is_iterable(self) -> bool:
        """Return whether it is a place in an iterable dataset."""
        return any(stream.is_iterable for stream in self.streams)

    @property
    def is_start(self) -> bool:
        """Return whether nothing has been yielded, nor decided about the order."""
        return not self.num_yielded and self.order.is_start

    @property
    def is_untouched(self) -> bool:
        """Whether it is the place of a loader that was never iterated. The end of an epoch can look the same."""
        return self.is_start and not self.has_stateful_stream

    @property
    def is_read_again(self) -> bool:
        """Whether samples before the place have to be read once more."""
        return any(stream.is_read_again for stream in self.streams)

    @property
    def has_ended_stream(self) -> bool:
        """Whether a worker's part of the dataset has ended."""
        return any(stream.has_ended for stream in self.streams)

    @property
    def has_stateful_stream(self) -> bool:
        """Whether the dataset has a state of its own."""
        return any(stream.is_stateful for stream in self.streams)

    def to_dict(self) -> dict[str, Any]:
        """Return it as a state dict."""
        order = self.order
        main = {
            _SAMPLER: order.sampler,
            _SAMPLER_ITER: order.sampler_iter,
            _SAMPLER_YIELDED: order.yielded,
            _LEN_CALLED: self.len_called,
            _SHARED_SEED: None,
        }
        ours = {
            "start": order.start,
            "checksum": order.checksum,
            "ahead": list(order.ahead),
            "skip": [stream.skip for stream in self.streams],
            "random": [stream.random for stream in self.streams],
        }
        if not self.num_workers:
            alone = self.streams[0].to_dict()
            return main | {_NUM_YIELDED: self.num_yielded, **alone, _FINISHED: self.is_finished, _OURS: ours}
        last = self.num_workers - 1 if self.last_worker < 0 else self.last_worker
        workers = {f"worker_{n}": {_WORKER: n, **stream.to_dict()} for n, stream in enumerate(self.streams)}
        snapshot = {
            _STEP: self.num_yielded,
            _LAST_WORKER: last,
            _MAIN: {_NUM_WORKERS: self.num_workers, **main, _BASE_SEED: self.base_seed},
            _WORKERS: workers,
        }
        # Accelerate's dispatcher reads ahead, and takes what it read from these two numbers.
        totals = {_SAMPLER_YIELDED: order.yielded, _NUM_YIELDED: self.num_yielded}
        return {_SNAPSHOT: snapshot, _SINCE: 0, _FINISHED: self.is_finished, **totals, _OURS: ours}


def read_place(state: Mapping[str, Any]) -> Place:
    """Return the place of a state dict, ours or torchdata's. Raises StateError for anything else."""
    if not isinstance(state, Mapping):
        raise StateError(f"load_state_dict(): a state is a dict, not {type(state).__name__}", _NOT_OURS)
    return _with_workers(state) if _SNAPSHOT in state else _without_workers(state)


def _without_workers(state: Mapping[str, Any]) -> Place:
    ours = state.get(_OURS)
    num_yielded = _number(state, _NUM_YIELDED)
    stream = StreamPlace.of(state)
    if stream.is_iterable:
        # Not from our own key: Accelerate changes torchdata's.
        random = _part(ours, "random", 0)
        is_stateful = stream.is_stateful and not stream.has_ended
        stream = replace(stream, skip=0 if is_stateful else num_yielded, random=random)
    return Place(
        num_yielded=num_yielded,
        order=_order(state, ours),
        streams=(stream,),
        len_called=_get(state, _LEN_CALLED),
        is_finished=bool(_get(state, _FINISHED)),
    )


def _with_workers(state: Mapping[str, Any]) -> Place:
    ours, snapshot = state.get(_OURS), _get(state, _SNAPSHOT)
    main, workers = _get(snapshot, _MAIN), _get(snapshot, _WORKERS)
    num_workers, last_worker = _number(main, _NUM_WORKERS), _number(snapshot, _LAST_WORKER)
    num_since, seed = _number(state, _SINCE), main.get(_BASE_SEED)
    _require(num_workers > 0, _NUM_WORKERS, num_workers)
    _require(last_worker < num_workers, _LAST_WORKER, last_worker)
    _require(seed is None or (type(seed) is int and abs(seed) < 1 << 63), _BASE_SEED, seed)
    _require(ours is None or not num_since, _SINCE, num_since)  # in ours it is always 0
    place = Place(
        num_yielded=_number(snapshot, _STEP),
        order=_order(main, ours),
        streams=tuple(
            StreamPlace.of(
                _get(workers, f"worker_{number}"),
                skip=_count(_part(ours, "skip", number) or 0, "skip"),
                random=_part(ours, "random", number),
            )
            for number in range(num_workers)
        ),
        num_workers=num_workers,
        last_worker=last_worker,
        base_seed=seed,
        len_called=main.get(_LEN_CALLED),
        is_finished=bool(_get(state, _FINISHED)),
    )
    if ours is None:
        return _torchdatas(place, num_since=num_since)
    return _earlier(place, place.num_yielded - _number(state, _NUM_YIELDED))


def _earlier(place: Place, num_batches: int) -> Place:
    """Return the place `num_batches` earlier."""
    if place.is_finished or not num_batches:
        return place
    _require(0 < num_batches <= place.order.yielded, _NUM_YIELDED, place.num_yielded - num_batches)
    order = replace(place.order, yielded=place.order.yielded - num_batches)
    skips, last = _turns_taken_back(place, num_batches)
    if min(skips) < 0 or not _can_go_back(place):
        raise StateError(
            f"load_state_dict(): the state was set {counted(num_batches, 'batch')} back, which cannot be done with a "
            "dataset or sampler that has its own state, nor once a worker's part has ended",
            "under Accelerate, use dispatch_batches=False",
        )
    streams = _with_skips(place.streams, skips)
    return replace(place, num_yielded=place.num_yielded - num_batches, order=order, streams=streams, last_worker=last)


def _can_go_back(place: Place) -> bool:
    """Return whether an earlier place is known: of its streams and of its sampler."""
    has_known_order = place.order.sampler is None and not place.order.ahead
    return has_known_order and not place.has_ended_stream


def _with_skips(streams: Sequence[StreamPlace], skips: Sequence[int]) -> tuple[StreamPlace, ...]:
    return tuple(replace(stream, skip=skip) for stream, skip in zip(streams, skips, strict=True))


def _turns_taken_back(place: Place, num_batches: int) -> tuple[list[int], int]:
    """Return the batches that each worker skips, and the last worker, `num_batches` turns earlier."""
    skips, last, num_workers = [stream.skip for stream in place.streams], place.last_worker, place.num_workers
    if not place.is_iterable:
        return skips, last
    first = (last - num_batches + 1) % num_workers
    turns = _turns(first, num_batches, num_workers=num_workers)
    return [skip - taken for skip, taken in zip(skips, turns, strict=True)], (first - 1) % num_workers


def _torchdatas(place: Place, *, num_since: int) -> Place:
    """Return a place of torchdata's, with the batches that torchdata would repeat and drop.

    Its workers take turns. It does not write how many batches each has given: this can be computed until one has ended.
    """
    if place.is_finished:
        return place
    is_stateful = place.has_stateful_stream
    if not place.is_iterable and is_stateful and num_since:
        raise StateError(
            f"load_state_dict(): torchdata's state is {counted(num_since, 'batch')} behind, for a dataset with its own "
            "state",
            "take it with snapshot_every_n_steps=1",
        )
    order = replace(place.order, yielded=place.order.yielded + num_since)
    later = replace(place, num_yielded=place.num_yielded + num_since, order=order)
    return _turns_added(place, later, num_since, is_stateful=is_stateful) if place.is_iterable else later


def _turns_added(place: Place, later: Place, num_since: int, *, is_stateful: bool) -> Place:
    """Return the later place with the batches that each worker skips. Raises StateError if that is not known."""
    after_last = (place.last_worker + 1) % place.num_workers
    first, num_skipped = (after_last, num_since) if is_stateful else (0, later.num_yielded)
    last = (first + num_skipped - 1) % place.num_workers
    is_regular = is_stateful or (place.num_yielded - 1) % place.num_workers == place.last_worker
    if (num_skipped and place.has_ended_stream) or not is_regular:
        raise StateError(
            "load_state_dict(): torchdata's state does not say how many batches each worker gave, and one had ended",
            "give the dataset state_dict() and load_state_dict(), or start the epoch again",
        )
    streams = _with_skips(place.streams, _turns(first, num_skipped, num_workers=place.num_workers))
    return replace(later, streams=streams, last_worker=last)


def _turns(first: int, num_turns: int, *, num_workers: int) -> list[int]:
    """Return how many of the turns each worker has, if worker `first` has the first one."""
    each, more = divmod(num_turns, num_workers)
    return [each + ((worker - first) % num_workers < more) for worker in range(num_workers)]


def _order(state: Mapping[str, Any], ours: Mapping[str, Any] | None) -> OrderPlace:
    yielded, sampler_iter = _number(state, _SAMPLER_YIELDED), _get(state, _SAMPLER_ITER)
    if isinstance(sampler_iter, Mapping):
        _count(sampler_iter.get("samples_yielded", 0), "samples_yielded")
    ahead, start, checksum = (
        ([], None, None) if ours is None else (_get(ours, "ahead"), _get(ours, "start"), ours.get("checksum"))
    )
    _require(_are_counts(ahead), "ahead", ahead)
    _require(all(yielded < number <= yielded + len(ahead) + _MOST_UNFINISHED for number in ahead), "ahead", ahead)
    _require(start is None or _is_start(start), "start", start)
    _require(checksum is None or (_are_counts(checksum) and len(checksum) == 3), "checksum", checksum)
    return OrderPlace(
        yielded=yielded,
        ahead=tuple(ahead),
        sampler=_get(state, _SAMPLER),
        sampler_iter=sampler_iter,
        start=start,
        checksum=checksum,
    )


def _is_start(start: object) -> bool:
    """Return whether this has the form of what `Order` notes at the start of an epoch."""
    if not isinstance(start, Mapping):
        return False
    epochs, samplers, length = start.get("epochs", []), start.get("samplers", []), start.get("length")
    draws = [start[key] for key in ("early", "late") if start.get(key) is not None]
    return (
        isinstance(epochs, list)
        and all(epoch is None or type(epoch) is int for epoch in epochs)
        and isinstance(samplers, list)
        and (length is None or _are_counts([length]))
        and all(_are_draws(each) for each in draws)
    )


def _are_draws(draws: object) -> bool:
    if not isinstance(draws, list | tuple) or len(draws) != 2:
        return False
    return isinstance(draws[0], Mapping) and isinstance(draws[1], list)


def _part(ours: Mapping[str, Any] | None, key: str, number: int) -> Any:
    if ours is None:
        return None
    values = _get(ours, key)
    return values[number] if isinstance(values, list) and number < len(values) else None


def _number(state: Any, key: str) -> int:
    return _count(_get(state, key), key)


def _count(value: Any, key: str) -> int:
    """Return a value if it can be a number of batches, samples or workers. Raises StateError."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise StateError(f"load_state_dict(): {key} is {value!r:.60}, not a number", _NOT_OURS)
    if value < 0:
        raise StateError(f"load_state_dict(): {key} is a negative number: {value}", _NOT_OURS)
    _require(value <= _MOST, key, value)
    return value


def _are_counts(values: object) -> bool:
    return isinstance(values, list | tuple) and all(type(value) is int and 0 <= value <= _MOST for value in values)


def _get(state: Any, key: str) -> Any:
    if not isinstance(state, Mapping) or key not in state:
        raise StateError(f"load_state_dict(): the state has no {key!r}", _NOT_OURS)
    return state[key]
