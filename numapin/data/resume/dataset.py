"""Read the state of a dataset, and continue in it.

An iterable dataset without a state of its own is read again up to its place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from numapin.data.resume import randomness
from numapin.data.resume.place import StreamPlace
from numapin.data.resume.samplers import drawn, is_stateful, load_own, state_or_none

if TYPE_CHECKING:
    from collections.abc import Iterator


def has_state(fetcher: Any) -> bool:
    """Return whether the fetcher's dataset, or its iterator, has a state of its own."""
    return is_stateful(fetcher.dataset) or is_stateful(getattr(fetcher, "dataset_iter", None))


def place_in(fetcher: Any, *, has_ended: bool = False) -> StreamPlace:
    """Return the place after the batches fetched so far."""
    iterator = getattr(fetcher, "dataset_iter", None)
    if iterator is None:
        return StreamPlace(dataset=state_or_none(fetcher.dataset))
    return StreamPlace(
        dataset=None if iterator is fetcher.dataset else state_or_none(fetcher.dataset),
        dataset_iter=state_or_none(iterator),
        is_iterable=True,
        has_ended=has_ended or fetcher.ended,
    )


def restore_dataset(dataset: Any, place: StreamPlace) -> None:
    """Load the dataset's own state, before `iter(dataset)`."""
    if place.random is not None:
        randomness.set_process(place.random)
    load_own(dataset, place.dataset)


def restore_iterator(fetcher: Any, place: StreamPlace, *, batch_size: int | None) -> None:
    """Load the own state of the dataset's iterator, or read up to the place."""
    found: Any = fetcher
    if not place.is_iterable:
        return
    if place.has_ended:
        found.ended = True
        return
    load_own(found.dataset_iter, place.dataset_iter)
    wanted = place.skip * (batch_size or 1)
    if _skip(found.dataset_iter, wanted) < wanted:
        found.ended = True


def _skip(samples: Iterator[Any], number: int) -> int:
    """Read samples; return how many there were, at most this number."""
    return sum(1 for _ in drawn(samples, number))
