"""Follow an epoch through its sampler, and continue in the middle of one.

A sampler with `state_dict` gives its own state. Any other is drawn from again, from the epoch's start on, with the
generators as they were then; nothing is fetched meanwhile. A user's sampler may draw from generators that the loop uses
too, and so other indices than before: a checksum of the indices shows that.
"""

from __future__ import annotations

import copy
from collections import deque
from dataclasses import replace
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import torch
from torch.utils.data import BatchSampler, RandomSampler

from numapin.base.plural import counted
from numapin.data.resume import randomness
from numapin.data.resume.checksum import extended
from numapin.data.resume.kinds import kind_of, length_of, words_for
from numapin.data.resume.place import OrderPlace, StateError
from numapin.data.resume.samplers import Draws, Samplers, drawn, is_stateful, load_own, state_or_none

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch.utils.data import DataLoader


_KEEP_THE_ORDER: Final = (
    "until the end of the epoch use the same dataset, sampler, batch_size, drop_last and number of ranks"
)


class Batches:
    """The iterator of a plain BatchSampler, with torchdata's state: of the inner sampler and of its iterator."""

    def __init__(self, batches: BatchSampler, state: Mapping[str, Any]) -> None:
        """Begin at a place, or at the start if the state is empty."""
        self._batches = batches
        self._samples = state.get("samples_yielded", 0)
        sampler: Any = batches.sampler
        if "sampler_state" in state and is_stateful(sampler):
            sampler.load_state_dict(state["sampler_state"])
        self._inner: Any = iter(sampler)
        self._left = _grouped(self._inner, batches)  # first, because it calls `iter`, as torch does
        if "sampler_iter_state" in state and is_stateful(self._inner):
            self._inner.load_state_dict(state["sampler_iter_state"])

    @property
    def is_stateful(self) -> bool:
        """Return whether the sampler inside, or its iterator, has a state of its own."""
        return is_stateful(self._batches.sampler) or is_stateful(self._inner)

    def __iter__(self) -> Self:
        """Return itself."""
        return self

    def __next__(self) -> list[Any]:
        """Return the next batch of indices."""
        left, self._left = self._left, iter(())  # an error ends it, as it ends torch's generator
        batch = list(next(left))
        self._left = left
        self._samples += len(batch)
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the place, as torchdata writes it."""
        state: dict[str, Any] = {"samples_yielded": self._samples}
        for key, value in (("sampler_state", self._batches.sampler), ("sampler_iter_state", self._inner)):
            if is_stateful(value):
                state[key] = state_or_none(value)
        return state


def _grouped(indices: Iterator[Any], batches: BatchSampler) -> Iterator[Any]:
    """Return an iterator of batches, which calls `iter` and `next` as torch's BatchSampler does."""
    if batches.drop_last:
        return zip(*[indices] * batches.batch_size, strict=False)
    return iter(lambda: list(islice(indices, batches.batch_size)), [])


class _Lazy:
    """An iterator that the order follows from its first draw on."""

    def __init__(self, order: Order, iterator: Any) -> None:
        self._order: Order | None = order
        self._iterator = iterator

    def __next__(self) -> Any:
        if self._order is not None:
            order, self._order = self._order, None
            iterator, self._iterator = self._iterator, iter(())  # an error ends it, as it ends torch's generator
            self._iterator = order.follow(iterator)
        return next(self._iterator)


class _Recorded:
    """An iterator whose own state is noted after each draw."""

    def __init__(self, order: Order, iterator: Any) -> None:
        self._order, self._iterator = order, iterator
        order.note_state(iterator)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        index = next(self._iterator)
        self._order.note_state(self._iterator)
        return index


class _Summed:
    """An iterator over indices whose checksum is noted after each draw."""

    def __init__(self, order: Order, iterator: Any, checksum: int) -> None:
        """Take the checksum of the indices that were drawn before."""
        self._order, self._iterator, self._checksum = order, iterator, checksum
        order.note_checksum(checksum)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        index = next(self._iterator)
        self._checksum = extended(self._checksum, index)
        self._order.note_checksum(self._checksum)
        return index


class _Note(NamedTuple):
    """The record of one draw: the states of the sampler and of its iterator, or the checksum of the indices."""

    sampler: Any = None
    sampler_iter: Any = None
    checksum: int | None = None


class Order:
    """One epoch's order: made before torch calls `iter(sampler)`."""

    def __init__(self, loader: DataLoader[Any], libraries: tuple[str, ...] | None) -> None:
        """Note the state that decides the order; `iter(sampler)` may draw at once. `libraries`: see Samplers."""
        self._sampler: Any = loader._index_sampler
        self._samplers = Samplers(self._sampler, loader.generator, libraries)
        self._own = state_or_none(self._sampler)  # before `iter`
        self._random = None if libraries else _random_in(self._sampler)
        self._generator: torch.Tensor | None = None  # of a RandomSampler, when it drew the order
        self._early = self._samplers.draws()
        self._start: dict[str, Any] = {
            "epochs": self._samplers.epochs,
            "samplers": self._samplers.states,
            "length": length_of(self._sampler),
            "order": kind_of(self._samplers),
        }
        self._notes: deque[_Note] = deque()  # of the last batch that was yielded, and of those after it
        self._num_forgotten = 0
        self._has_drawn = self._is_stateful = False
        self._checksum = 0  # of the indices that were drawn again

    @property
    def is_noting(self) -> bool:
        """Return whether each draw is noted, so that `forget` has something to drop."""
        return bool(self._notes)

    def lazily(self, iterator: Any) -> Any:
        """Return an iterator like torch's, which the order follows from its first draw on."""
        return _Lazy(self, iterator)

    def follow(self, iterator: Any) -> Any:
        """Return the iterator to use instead of torch's, right before the first draw."""
        self._note_draws()
        self._has_drawn = True
        if _is_plain_with_custom(self._sampler):
            iterator = Batches(self._sampler, {})
        return self._recorded(iterator)

    def resume(self, place: OrderPlace) -> Any:
        """Return an iterator over the rest of an epoch. The caller preserves global generators."""
        if place.start is not None:
            self._start = dict(place.start)
        self._num_forgotten, self._has_drawn = place.yielded, True
        self._generator = _generator_state(place) if self._random is not None else None
        iterator = self._loaded(place)
        if iterator is None:
            iterator = self._drawn_again(place) if self._generator is None else self._shuffled_again(self._generator)
            self._skip(iterator, place)
        iterator = _without(self._recorded(iterator), place)
        if place.yielded:  # what comes next is drawn when it is due, with the generators as the loop then has them
            return iterator
        first = list(islice(iterator, 1))  # now, because a sampler may draw its order at its first batch
        return chain(first, iterator)

    def restore_epochs(self, place: OrderPlace) -> list[tuple[str, int, int]]:
        """Set the samplers' epochs; return those that had another one: the class, the epoch it had, the new one."""
        return self._samplers.set_epochs((place.start or {}).get("epochs", []))

    def set_early(self, place: OrderPlace) -> None:
        """Set all generators as they were before the epoch's iterators were made."""
        start = place.start or {}
        draws = start.get("early") or start.get("late")
        if draws is not None:
            self._samplers.set_draws(Draws(*draws))

    def set_late(self, place: OrderPlace) -> None:
        """Set all generators as they were before the first draw, and note them for the next state."""
        self._start, self._has_drawn = dict(place.start or self._start), True
        if self._start.get("late") is not None:
            self._samplers.set_draws(Draws(*self._start["late"]))

    def run_out(self, place: OrderPlace) -> None:
        """Leave the samplers as the epoch that ended at this place has left them.

        An epoch that was set before stays: it is the one that begins. A sampler that counts by itself has its own.
        """
        had = self._samplers.epochs
        self.restore_epochs(place)
        ended = self._samplers.epochs
        deque(self.resume(replace(place, checksum=None)), maxlen=0)  # no batch is left that could be a wrong one
        left = self._samplers.epochs
        self._samplers.set_epochs([old if now == end else None for old, end, now in zip(had, ended, left, strict=True)])

    def require_same(self, place: OrderPlace) -> None:
        """Raise StateError if the state was taken with another order, so that samples would be lost or repeated."""
        if place.sampler is not None:  # it knows its place by itself
            return
        start, length, kind = place.start or {}, self._start["length"], self._start["order"]
        had, had_kind = start.get("length"), start.get("order", kind)
        if had is not None and length is not None and had != length:
            raise _refusal(f"an epoch had {counted(had, 'batch')}, this loader's has {length}")
        if had_kind != kind:
            raise _refusal(f"the state was taken with {words_for(had_kind)}; this loader has {words_for(kind)}")
        is_exact = length is not None and not self._samplers.has_custom  # the length of a user's may be an estimate
        if is_exact and place.yielded > length:
            taken = counted(place.yielded, "batch")
            raise _refusal(f"the state was taken after {taken}, an epoch of this loader has {length}")

    def note_state(self, iterator: object) -> None:
        """Note the sampler's own state after a draw."""
        # The state of Batches is loaded when it is made, so it has no load_state_dict, and state_or_none would skip it.
        own = iterator.state_dict() if isinstance(iterator, Batches) else state_or_none(iterator)
        self._notes.append(_Note(state_or_none(self._sampler), own))

    def note_checksum(self, checksum: int) -> None:
        """Note the checksum of all indices up to a draw."""
        self._notes.append(_Note(checksum=checksum))

    def forget(self, yielded: int) -> None:
        """Drop the notes before that of the first `yielded` batches."""
        while self._num_forgotten < yielded and len(self._notes) > 1:
            self._notes.popleft()
            self._num_forgotten += 1

    def place(self, yielded: int, ahead: Iterable[int]) -> OrderPlace:
        """Return the place after the first `yielded` batches, and those `ahead`."""
        if not self._has_drawn:
            self._note_draws()
        self.forget(yielded)
        note = self._notes[0] if self._notes else _Note(None if self._has_drawn else self._own)
        return OrderPlace(
            yielded=yielded,
            ahead=tuple(sorted(ahead)),
            sampler=note.sampler,
            sampler_iter=note.sampler_iter if self._is_stateful else self._plain_state(yielded),
            start=self._start,
            checksum=None if note.checksum is None else (self._num_forgotten, _rank(), note.checksum),
        )

    def _note_draws(self) -> None:
        late = self._samplers.draws()
        if self._random is not None:
            given = self._random.generator
            is_own = given is not None
            self._generator = given.get_state() if is_own else randomness.seeded_by(late.process["torch"])
            return
        self._start["late"] = list(late)
        self._start["early"] = None if randomness.are_same(list(self._early), list(late)) else list(self._early)

    def _recorded(self, iterator: Any) -> Any:
        own = iterator.is_stateful if isinstance(iterator, Batches) else is_stateful(iterator)
        self._is_stateful = own or is_stateful(self._sampler)
        if self._is_stateful:
            return _Recorded(self, iterator)
        return _Summed(self, iterator, self._checksum) if self._samplers.has_custom else iterator

    def _loaded(self, place: OrderPlace) -> Any:
        """Return the iterator if it continues by its own state; None if it has none."""
        state = place.sampler_iter
        if _is_plain_with_custom(self._sampler):
            return self._loaded_batches(state)
        load_own(self._sampler, place.sampler)
        if place.sampler is None and state is None:
            return None
        iterator = iter(self._sampler)
        continues = load_own(iterator, state) or is_stateful(self._sampler)
        return iterator if continues else None

    def _loaded_batches(self, state: Any) -> Batches | None:
        """Return the batches of a sampler that continues by its own state; None if it has none."""
        has_own = isinstance(state, dict) and ("sampler_state" in state or "sampler_iter_state" in state)
        if has_own and state.get("samples_yielded", 0) % self._sampler.batch_size:
            return None  # the last batch was short: the sampler has ended, and its state may be that of the next epoch
        batches = Batches(self._sampler, state) if has_own else None
        return batches if batches is not None and batches.is_stateful else None

    def _shuffled_again(self, generator: torch.Tensor) -> Any:
        """Return the iterator of a RandomSampler from the start, with its generator in this state."""
        sampler: Any = self._random
        if sampler.generator is None:
            sampler = copy.copy(sampler)
            sampler.generator = torch.Generator()
        randomness.set_state(sampler.generator, generator)
        outer = self._sampler
        return iter(BatchSampler(sampler, outer.batch_size, outer.drop_last) if outer is not self._random else sampler)

    def _drawn_again(self, place: OrderPlace) -> Any:
        """Return the iterator from the start of the epoch, with all generators as they were then."""
        self._samplers.set_states((place.start or {}).get("samplers") or [])
        self.set_early(place)
        iterator = iter(self._sampler)
        self.set_late(place)
        return Batches(self._sampler, {}) if _is_plain_with_custom(self._sampler) else iterator

    def _skip(self, iterator: Any, place: OrderPlace) -> None:
        """Drop the batches before the place. Raises StateError if they are others than those that were yielded."""
        skipped = drawn(iterator, place.yielded)
        if not self._samplers.has_custom:
            deque(skipped, maxlen=0)
            return
        for index in skipped:
            self._checksum = extended(self._checksum, index)
        # Accelerate gives all ranks the main process's state, and may change its place, but not our checksum.
        num, rank, expected = place.checksum or (None, None, None)
        if (num, rank) == (place.yielded, _rank()) and expected != self._checksum:
            raise StateError(
                "load_state_dict(): the sampler drew other indices than before, so samples would be lost and repeated",
                "give it a generator of its own in an attribute (self.generator = ...), or state_dict() and "
                "load_state_dict()",
            )

    def _plain_state(self, yielded: int) -> Any:
        """Return what torchdata writes for samplers of torch."""
        inner = None if self._generator is None else {"yielded": yielded, "generator": self._generator}
        if type(self._sampler) is not BatchSampler:
            return inner
        samples = yielded * self._sampler.batch_size
        length = length_of(self._sampler.sampler)
        samples = samples if length is None else min(samples, length)
        if inner is None:
            return {"samples_yielded": samples}
        return {"samples_yielded": samples, "sampler_iter_state": inner | {"yielded": samples}}


def _rank() -> int:
    """Return the rank of this process, 0 without others."""
    is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if is_distributed else 0


def _refusal(problem: str) -> StateError:
    return StateError(f"load_state_dict(): {problem}", _KEEP_THE_ORDER)


def _random_in(sampler: Any) -> Any:
    """Return torch's RandomSampler if that is what decides the order; None otherwise."""
    inner = sampler.sampler if type(sampler) is BatchSampler else sampler
    return inner if type(inner) is RandomSampler else None


def _generator_state(place: OrderPlace) -> Any:
    """Return the generator's state in torchdata's form; None if it is not there."""
    state = place.sampler_iter
    inner = state.get("sampler_iter_state", state) if isinstance(state, dict) else None
    return inner.get("generator") if isinstance(inner, dict) else None


def _is_plain_with_custom(sampler: Any) -> bool:
    """Return whether it is torch's BatchSampler over a sampler that is not torch's."""
    return type(sampler) is BatchSampler and not type(sampler.sampler).__module__.startswith("torch.utils.data.")


def _without(iterator: Any, place: OrderPlace) -> Any:
    """Return the iterator without the batches that were yielded ahead of their turn."""
    if not place.ahead:
        return iterator
    ahead, numbered = frozenset(place.ahead), enumerate(iterator, place.yielded)
    return (index for number, index in numbered if number not in ahead)
