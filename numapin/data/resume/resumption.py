"""Write and load the state of a loader, for `state_dict()` and `load_state_dict()`."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterDataPipe

from numapin.base.stderr import say
from numapin.data import torch_names
from numapin.data.arguments import require_number
from numapin.data.resume import randomness
from numapin.data.resume.order import Order
from numapin.data.resume.place import OrderPlace, Place, StateError, StreamPlace, read_place
from numapin.data.resume.track import Track
from numapin.data.torch_names import _DatasetKind
from numapin.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.utils.data import DataLoader


def _warn(text: str) -> None:
    say(f"warning: {text}")


class Resumption:
    """The state of a loader. It is an attribute of the loader; a copy of the loader begins with a new one."""

    def __init__(self, every: int, loader: DataLoader[Any] | None = None) -> None:
        """Take the number of batches of a worker after which it reports the state of its dataset."""
        hint = "give a whole number; 0 means that the dataset's state is not saved"
        require_number("snapshot_every_n_steps", every, unit="batches", hint=hint)
        self.every = every
        self._owner = None if loader is None else weakref.ref(loader)
        self._loaded: Place | None = None  # as it was loaded, until the next iterator
        self._next: Place | None = None  # where the next iterator begins
        self._track: Track | None = None

    def __reduce__(self) -> tuple[object, ...]:
        """Do not travel: a place belongs to one loader in one process."""
        return type(self), (self.every,)

    def is_of(self, loader: DataLoader[Any]) -> bool:
        """Return whether this belongs to the loader, and not to one of which it is a copy."""
        return self._owner is not None and self._owner() is loader

    def track(self, loader: DataLoader[Any], warn: Callable[[str], None]) -> Track:
        """Return the track of a new iterator, which begins where the loaded state ends."""
        self._track = Track(loader, self._next, every=self.every, warn=warn)
        self._loaded = self._next = None
        return self._track

    def state(self, loader: DataLoader[Any]) -> dict[str, Any]:
        """Return the state after the last batch that was yielded."""
        return self._place(loader).to_dict()

    def load(self, loader: DataLoader[Any], state: Mapping[str, Any]) -> None:
        """Let the next iterator begin where a state ends. Raises StateError."""
        if state == {}:  # as torchdata has it
            self._loaded = self._next = self._track = None
            self._stop(loader)
            return
        place = read_place(state)
        order = Order(loader, ())
        if not place.is_finished and not place.is_start:
            _require_same_data(loader, place, order)
        with randomness.preserved():
            _restore_order(loader, place, order)
        self._track, self._loaded = None, place
        self._next = _next_place(loader, place)
        self._stop(loader)

    @staticmethod
    def _stop(loader: DataLoader[Any]) -> None:
        """Give up persistent workers: their datasets do not begin at the state. They end with their iterator."""
        loader._iterator = None

    def _place(self, loader: DataLoader[Any]) -> Place:
        if self._track is not None:
            return self._track.place()
        if self._loaded is not None:
            return self._loaded
        streams = (StreamPlace(is_iterable=_is_iterable(loader)),) * max(1, loader.num_workers)
        return Place(num_workers=loader.num_workers, streams=streams)


def _restore_order(loader: DataLoader[Any], place: Place, order: Order) -> None:
    """Set the samplers' epochs; leave the samplers of an epoch that is over as that epoch has left them."""
    if not place.is_finished:
        order.restore_epochs(place.order)
    elif not place.order.is_start and not _is_iterable(loader):
        order.run_out(place.order)


def track_of(loader: DataLoader[Any], warn: Callable[[str], None] = _warn) -> Track | None:
    """Return the track of a new iterator; None if the loader has no state, as torch's own has none."""
    has_state = isinstance(getattr(loader, "_numapin_resumption", None), Resumption)
    return resumption_of(loader).track(loader, warn) if has_state else None


def resumption_of(loader: Any) -> Resumption:
    """Return the loader's own state; a copy of a loader gets a new one. Raises UsageError if the data path is off."""
    if torch_names.why_off():
        raise UsageError(f"the loader has no state: {torch_names.explained()}", "or use torchdata's StatefulDataLoader")
    found: Resumption = loader._numapin_resumption
    if not found.is_of(loader):
        found = loader._numapin_resumption = Resumption(found.every, loader)
    return found


def _is_iterable(loader: DataLoader[Any]) -> bool:
    return bool(loader._dataset_kind == _DatasetKind.Iterable)


def _next_place(loader: DataLoader[Any], place: Place) -> Place | None:
    """Return where the next iterator begins; None: as that of a new loader."""
    if place.is_finished:
        return _next_epoch(loader, place)
    return None if place.is_untouched else place


def _next_epoch(loader: DataLoader[Any], place: Place) -> Place:
    """Return the start of the epoch after a finished one. A dataset that is still there keeps its state."""
    num_streams = max(1, loader.num_workers)
    stays = loader.persistent_workers or not loader.num_workers
    if stays and len(place.streams) == num_streams:
        streams = tuple(StreamPlace(dataset=old.dataset, is_iterable=old.is_iterable) for old in place.streams)
    else:
        streams = (StreamPlace(is_iterable=_is_iterable(loader)),) * num_streams
    return Place(num_workers=loader.num_workers, streams=streams, order=OrderPlace())


def _require_same_data(loader: DataLoader[Any], place: Place, order: Order) -> None:
    if isinstance(loader.dataset, IterDataPipe):
        raise StateError(
            "load_state_dict(): torch's data pipes cannot be continued in the middle of an epoch",
            "use an IterableDataset",
        )
    if place.is_iterable != _is_iterable(loader):
        kinds = ("map-style", "iterable")
        raise StateError(
            f"load_state_dict(): the state is of a loader with {_article(kinds[place.is_iterable])} dataset, this "
            f"loader's is {kinds[_is_iterable(loader)]}",
            "load the state of a loader of the same kind",
        )
    _require_same_workers(loader, place)
    if not place.is_iterable:
        order.require_same(place.order)


def _require_same_workers(loader: DataLoader[Any], place: Place) -> None:
    has_streams = place.is_iterable or place.has_stateful_stream
    if has_streams and place.num_workers != loader.num_workers:
        what = "of an iterable dataset" if place.is_iterable else "of a dataset with its own state"
        raise StateError(
            f"load_state_dict(): the state {what} was taken with num_workers={place.num_workers}, this loader has "
            f"{loader.num_workers}: each worker continues its own part",
            f"use num_workers={place.num_workers} until the end of the epoch",
        )


def _article(kind: str) -> str:
    return f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"
