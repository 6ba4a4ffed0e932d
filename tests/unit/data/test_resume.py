"""The state of a loader without workers, and what it is made of: places as dicts, generators, samplers."""

from __future__ import annotations

import copy
import pickle
import random
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, Sampler

import numapin
from numapin.errors import UsageError
from tests.resuming import (
    Begun,
    BegunStream,
    Chunks,
    Counting,
    Numbers,
    Owning,
    PythonShuffled,
    Remembering,
    RememberingBatches,
    ShuffledAgain,
    Stream,
    disturb,
    flat,
    interrupt,
    saved,
)
from tests.unit.data import seam
from tests.unit.data.seam import OrderPlace, Place, StreamPlace, Yielded, extended, randomness, read_place

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.resuming import Make


def assert_continues(make: Make, stop: int) -> numapin.DataLoader[Any]:
    """A new loader with the state yields exactly the rest, and leaves the process's generators as they are."""
    _, rest, state = interrupt(make, stop)
    loader = make()
    disturb()
    before = randomness.process_states()
    loader.load_state_dict(state)
    iterator = iter(loader)
    found = flat([next(iterator)]) if rest else []
    assert randomness.are_same(before, randomness.process_states())
    assert found + flat(iterator) == rest
    return loader


SAMPLERS: dict[str, Callable[[], dict[str, Any]]] = {
    "in order": dict,
    "shuffle": lambda: {"shuffle": True},
    "generator": lambda: {"shuffle": True, "generator": torch.Generator().manual_seed(5)},
    "replacement": lambda: {"sampler": RandomSampler(range(20), replacement=True, num_samples=77)},
    "weighted": lambda: {"sampler": torch.utils.data.WeightedRandomSampler([1.0] * 20, 20)},
    "distributed": lambda: {"sampler": DistributedSampler(Numbers(20), num_replicas=2, rank=1)},
    "python": lambda: {"batch_sampler": PythonShuffled(20)},
    "owning": lambda: {"batch_sampler": Owning(20, random.randrange(1000))},  # noqa: S311 - not a secret
    "remembering": lambda: {"sampler": Remembering(20)},
    "remembering batches": lambda: {"batch_sampler": RememberingBatches(20)},
    "stateful iterator": lambda: {"sampler": Begun(20)},
    "list": lambda: {"sampler": list(range(19, -1, -1))},
    "own iterator": lambda: {"sampler": ShuffledAgain(20), "batch_size": None},
    "own iterator in batches": lambda: {"sampler": ShuffledAgain(20), "batch_size": 4, "drop_last": True},
}


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("stop", [0, 1, 4])
def test_rest_of_epoch(name: str, stop: int) -> None:
    """The rest of an epoch comes in its order, whatever decides that order, and nothing else is read."""
    loader = assert_continues(lambda: numapin.DataLoader(Numbers(20), **SAMPLERS[name]()), stop)
    assert isinstance(loader.dataset, Numbers)
    if name != "replacement":
        assert loader.dataset.num_read <= 20 - stop


@pytest.mark.parametrize("name", ["generator", "owning", "distributed"])
@pytest.mark.parametrize("stop", [2, None])
def test_later_epochs(name: str, stop: int | None) -> None:
    """The epochs after the interrupted one are those of an uninterrupted run if the generators are the loader's own.

    A state from the end of an epoch begins the next one.
    """
    random.seed(1)
    options = SAMPLERS[name]()

    def make() -> numapin.DataLoader[Any]:
        return numapin.DataLoader(Numbers(20), **copy.deepcopy(options))

    loader = make()
    epochs = [flat(loader) for _ in range(3)]
    second = make()
    flat(second)
    iterator = iter(second)
    first = flat(iterator) if stop is None else flat(next(iterator) for _ in range(stop))
    third = make()
    third.load_state_dict(saved(second.state_dict()))
    rest = [] if stop is None else flat(third)
    assert first + rest == epochs[1]
    assert flat(third) == epochs[2]


class Drawing:
    """A sampler that draws each index when it is asked for it."""

    def __iter__(self) -> Iterator[int]:
        """Return a generator."""
        yield from (random.randrange(1000) for _ in range(20))  # noqa: S311 - not a secret


def test_indices_drawn_one_by_one() -> None:
    """With the loop's random numbers restored, no number is drawn for two batches."""

    def make() -> numapin.DataLoader[Any]:
        return numapin.DataLoader(Numbers(1000), sampler=Drawing())

    loader = make()
    iterator = iter(loader)
    flat(next(iterator) for _ in range(3))
    state, generators = saved(loader.state_dict()), randomness.process_states()
    rest, loader = flat(iterator), make()
    randomness.set_process(generators)
    loader.load_state_dict(state)
    assert flat(loader) == rest


def interrupt_chunks(num_workers: int, stop: int, generator: random.Random | None = None) -> tuple[Make, list[int]]:
    """Interrupt a loop that draws random numbers itself; return what continues its loader, and what it had."""

    def make() -> numapin.DataLoader[Any]:
        return numapin.DataLoader(Numbers(32), 2, sampler=Chunks(32, copy.copy(generator)), num_workers=num_workers)

    def make_and_load() -> numapin.DataLoader[Any]:
        again = make()
        again.load_state_dict(state)
        return again

    random.seed(1)
    loader, found = make(), list[int]()
    iterator = iter(loader)
    for _ in range(stop):
        found += flat([next(iterator)])
        random.random()  # noqa: S311 - not a secret
    state = saved(loader.state_dict())
    return make_and_load, found


@pytest.mark.parametrize(("num_workers", "stop"), [(0, 6), (1, 12)])
def test_other_indices_are_refused(num_workers: int, stop: int) -> None:
    """A sampler that draws while the loop draws from the same generator is refused: samples would be lost."""
    loader = interrupt_chunks(num_workers, stop)[0]()
    with pytest.raises(UsageError, match="the sampler drew other indices than before") as caught:
        iter(loader)
    assert "a generator of its own" in (caught.value.hint or "")
    iter(loader)  # an epoch from its start


def test_indices_of_another_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state of another rank, whose sampler draws others by intention, is accepted: Accelerate gives it to all."""
    loader = interrupt_chunks(0, 6)[0]()
    monkeypatch.setattr(seam.order, "_rank", lambda: 1)
    assert len(flat(loader)) == 32 - 12


@pytest.mark.parametrize("stop", [0, 4, 6])
def test_indices_of_an_own_generator(stop: int) -> None:
    """The same sampler with a generator of its own continues, and so it does after a second interruption."""
    resumed, found = interrupt_chunks(0, stop, random.Random(3))  # noqa: S311 - not a secret
    loader = resumed()
    iterator = iter(loader)
    found += flat([next(iterator)])
    state = saved(loader.state_dict())
    loader = resumed()
    loader.load_state_dict(state)
    assert sorted(found + flat(loader)) == list(range(32))


def test_other_indices_do_not_matter_at_the_end() -> None:
    """After the last batch nothing can be lost: the next epoch begins."""
    loader = numapin.DataLoader(Numbers(16), sampler=Chunks(16))
    for _ in loader:
        random.random()  # noqa: S311 - not a secret
    again = numapin.DataLoader(Numbers(16), sampler=Chunks(16))
    again.load_state_dict(saved(loader.state_dict()))
    assert sorted(flat(again)) == list(range(16))


def test_checksums_are_those_of_yielded_batches() -> None:
    """A checksum is kept for each batch under way only, and none for torch's samplers."""
    loader = numapin.DataLoader(Numbers(64), sampler=Chunks(64))
    iterator: Any = iter(loader)
    for number in range(1, 40):
        next(iterator)
        assert loader.state_dict()["_numapin"]["checksum"][0] == number
    assert len(iterator._track._order._notes) == 1
    for name in ("in order", "shuffle", "distributed", "list"):
        loader = numapin.DataLoader(Numbers(20), **SAMPLERS[name]())
        iterator = iter(loader)
        next(iterator)
        assert loader.state_dict()["_numapin"]["checksum"] is None
        assert not iterator._track._order._notes


class Unknown:
    """An index whose text differs between objects."""


@pytest.mark.parametrize(
    ("one", "same", "other"),
    [
        ([1, 2], [np.int64(1), torch.tensor(2)], [2, 1]),
        (torch.tensor([1, 2]), torch.tensor([1, 2]), torch.tensor([1, 3])),
        (np.array(["a", "b"], object), ["a", "b"], ["a", "c"]),
        ([(1, 224), (2, 224)], [[1, 224], [2, 224]], [(1, 224), (2, 192)]),
        ({"a": 2**70}, {"a": 2**70}, {"a": 2**71}),
        ([Unknown()], [Unknown()], [None]),
        (7, np.int64(7), 8),
    ],
)
def test_checksum(one: Any, same: Any, other: Any) -> None:
    """Equal indices of any type have one checksum, others another; of unknown types only the name counts."""
    assert extended(5, one) == extended(5, same) != extended(5, other)


def test_checksum_does_not_consume() -> None:
    """Indices that can be read once only are still there."""
    indices = iter([1, 2])
    extended(0, indices)
    assert list(indices) == [1, 2]


def test_epoch_that_was_set_before() -> None:
    """The state of a finished epoch does not undo the `set_epoch` of the next one."""

    def make(epoch: int) -> numapin.DataLoader[Any]:
        sampler = DistributedSampler[int](Numbers(20), num_replicas=2, rank=1)
        sampler.set_epoch(epoch)
        return numapin.DataLoader(Numbers(20), sampler=sampler)

    first, second = make(0), make(1)
    flat(first)
    expected = flat(make(1))
    second.load_state_dict(saved(first.state_dict()))
    assert flat(second) == expected


def test_copy_of_a_copy() -> None:
    """A loader that a framework makes again from a copy's class and arguments, or a subclass of it, has a state."""
    device = numapin.DataLoader(Numbers(20)).pin_memory_device
    copied = torch.utils.data.DataLoader(Numbers(20), pin_memory_device=device)
    for cls in (type(copied), type("Sub", (type(copied),), {})):
        again: Any = cls(Numbers(20), pin_memory_device=device)
        next(iter(again))
        state = saved(again.state_dict())
        again = cls(Numbers(20), pin_memory_device=device)
        again.load_state_dict(state)
        assert flat(again) == list(range(1, 20))


@pytest.mark.parametrize("name", ["shuffle", "python", "remembering", "stateful iterator"])
def test_two_interruptions(name: str) -> None:
    """A loader that continues an epoch can be interrupted again, before its first batch and after some."""
    loader = numapin.DataLoader(Numbers(20), **SAMPLERS[name]())
    iterator = iter(loader)
    found = flat([next(iterator)])
    for _ in range(2):
        state = saved(loader.state_dict())
        loader = numapin.DataLoader(Numbers(20), **SAMPLERS[name]())
        loader.load_state_dict(state)
        assert saved(loader.state_dict()).keys() == state.keys()
        iterator = iter(loader)
        disturb()
        found += flat([next(iterator)])
    assert sorted(found + flat(iterator))[-20:] == list(range(20))


@pytest.mark.parametrize(
    "dataset",
    [Stream(20), Stream(20, shuffles=True), Counting(20), BegunStream()],
    ids=["plain", "shuffled", "counting", "begun"],
)
@pytest.mark.parametrize("batch_size", [3, None])
@pytest.mark.parametrize("stop", [0, 1, 5])
def test_iterable(dataset: Any, batch_size: int | None, stop: int) -> None:
    """An iterable dataset continues: by its state, by that of its iterator, or read again as it was shuffled."""

    def make() -> numapin.DataLoader[Any]:
        return numapin.DataLoader(copy.deepcopy(dataset), batch_size)

    if stop or not getattr(dataset, "shuffles", True):
        loader = assert_continues(make, stop)
    else:  # nothing was drawn yet
        loader = make()
        loader.load_state_dict(interrupt(make, 0)[2])
        assert sorted(flat(loader)) == list(range(20))
    assert sorted(flat(loader)) == list(range(20))  # the next epoch is whole


def test_iterable_without_state_is_reported(capfd: pytest.CaptureFixture[str]) -> None:
    """A dataset that has to be read again is reported, with what would avoid it."""
    assert_continues(lambda: numapin.DataLoader(Stream(9)), 2)
    assert "give it, or its iterator, state_dict() and load_state_dict()" in capfd.readouterr().err


@given(
    size=st.integers(1, 40),
    batch_size=st.integers(1, 7),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
    own=st.booleans(),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_no_sample_lost_or_repeated(
    size: int, batch_size: int, *, drop_last: bool, shuffle: bool, own: bool, data: st.DataObject
) -> None:
    """Whatever the sizes and the place, both parts together are the epoch, and the next epoch is whole."""

    def make() -> numapin.DataLoader[Any]:
        generator = torch.Generator().manual_seed(size) if own else None
        return numapin.DataLoader(Numbers(size), batch_size, shuffle, drop_last=drop_last, generator=generator)

    whole = len(make())
    stop = data.draw(st.integers(0, whole))
    loader = assert_continues(make, stop)
    assert len(list(loader)) == whole


@given(base=st.integers(0, 5), ahead=st.sets(st.integers(0, 9)), data=st.data())
def test_yielded_out_of_order(base: int, ahead: set[int], data: st.DataObject) -> None:
    """Batches yielded in any order are counted once each, from any place on."""
    known = {base + 1 + number for number in ahead}
    missing = [number for number in range(base, base + 30) if number not in known]
    order = data.draw(st.permutations(range(12)))
    taken = data.draw(st.integers(0, 12))
    yielded = Yielded(base, tuple(known))
    for task in order[:taken]:
        yielded.note(task)
    found = set(range(yielded.num)) | yielded.ahead
    assert found == set(range(base)) | known | {missing[task] for task in order[:taken]}
    assert yielded.num not in yielded.ahead


@given(
    num_workers=st.integers(0, 3),
    yielded=st.integers(0, 50),
    ahead=st.sets(st.integers(51, 60)),
    is_finished=st.booleans(),
    data=st.data(),
)
def test_places_as_dicts(
    num_workers: int, yielded: int, ahead: set[int], *, is_finished: bool, data: st.DataObject
) -> None:
    """A place is read back as it was written, in either layout."""
    count = max(1, num_workers)
    place = Place(
        num_yielded=yielded,
        order=OrderPlace(
            yielded=yielded, ahead=tuple(sorted(ahead)), start={"epochs": [None]}, checksum=(yielded, 3, 2**32 - 1)
        ),
        streams=tuple(StreamPlace(dataset=data.draw(st.none() | st.integers())) for _ in range(count)),
        num_workers=num_workers,
        last_worker=data.draw(st.integers(0, num_workers - 1)) if num_workers else -1,
        base_seed=5 if num_workers else None,
        is_finished=is_finished,
    )
    assert read_place(saved(place.to_dict())) == place


def test_keys_of_torchdata() -> None:
    """The keys are those of torchdata 0.11, in its two layouts, and one of our own."""
    alone, two = Place().to_dict(), Place(num_workers=2, streams=(StreamPlace(),) * 2).to_dict()
    assert alone.keys() - {"_numapin"} == {
        *("_index_sampler_state", "_sampler_iter_state", "_sampler_iter_yielded", "_num_yielded"),
        *("_IterableDataset_len_called", "_shared_seed", "fetcher_state", "dataset_state", "_iterator_finished"),
    }
    assert two.keys() >= {"_snapshot", "_steps_since_snapshot", "_iterator_finished"}
    assert two["_snapshot"].keys() == {
        *("_snapshot_step", "_last_yielded_worker_id", "_main_snapshot", "_worker_snapshots")
    }
    assert two["_snapshot"]["_worker_snapshots"]["worker_1"] == {
        "worker_id": 1,
        "dataset_state": None,
        "fetcher_state": None,
    }


def test_a_state_of_torchdata() -> None:
    """A shuffled epoch of torchdata's loader is continued: its state holds the generator that drew the order."""
    drawn = torch.Generator().manual_seed(8)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(8)).tolist()
    inner = {"yielded": 6, "generator": drawn.get_state()}
    state = {
        "_index_sampler_state": None,
        "_sampler_iter_state": {"samples_yielded": 6, "sampler_iter_state": inner},
        "_sampler_iter_yielded": 2,
        "_num_yielded": 2,
        "_IterableDataset_len_called": None,
        "_shared_seed": None,
        "fetcher_state": None,
        "dataset_state": None,
        "_iterator_finished": False,
    }
    loader = numapin.DataLoader(Numbers(20), 3, shuffle=True)
    loader.load_state_dict(state)
    assert flat(loader) == order[6:]


def test_fresh_and_empty_states() -> None:
    """A state from before the first iterator, and an empty one, begin an epoch."""
    loader = numapin.DataLoader(Numbers(6), 2)
    for state in (saved(loader.state_dict()), {}):
        next(iter(loader))
        loader.load_state_dict(state)
        assert flat(loader) == list(range(6))


def test_a_loaded_state_can_be_read_again() -> None:
    """`state_dict()` right after `load_state_dict()` returns the same place."""
    *_, state = interrupt(lambda: numapin.DataLoader(Numbers(9), 2, shuffle=True), 2)
    loader = numapin.DataLoader(Numbers(9), 2, shuffle=True)
    loader.load_state_dict(state)
    again = saved(loader.state_dict())
    assert read_place(again).order.yielded == 2
    assert randomness.are_same(again, state)


def test_state_after_leaving_the_loop() -> None:
    """The state stays when the loop is left, and is that of the newest of several iterators."""
    loader = numapin.DataLoader(Numbers(20), 2)
    for batch in loader:
        if 5 in batch:
            break
    assert loader.state_dict()["_num_yielded"] == 3
    old, new = iter(loader), iter(loader)
    next(old)
    assert loader.state_dict()["_num_yielded"] == 0
    next(new)
    assert loader.state_dict()["_num_yielded"] == 1


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))])  # noqa: S301
def test_copies_begin_anew(copied: Callable[[Any], Any]) -> None:
    """A copy of a loader has no part in its place."""
    loader = numapin.DataLoader(Numbers(6), 2)
    next(iter(loader))
    other = copied(loader)
    assert other.state_dict()["_num_yielded"] == 0
    next(iter(other))
    next(iter(other))
    assert loader.state_dict()["_num_yielded"] == 1


def test_epoch_of_the_state_wins(capfd: pytest.CaptureFixture[str]) -> None:
    """A loop that calls set_epoch with another number gets the rest of the saved epoch, and a warning."""

    def make() -> tuple[DistributedSampler[int], numapin.DataLoader[int]]:
        sampler: DistributedSampler[int] = DistributedSampler(Numbers(12), num_replicas=2, rank=0)
        return sampler, numapin.DataLoader(Numbers(12), sampler=sampler)

    sampler, loader = make()
    sampler.set_epoch(3)
    iterator = iter(loader)
    next(iterator)
    state, rest = saved(loader.state_dict()), flat(iterator)
    sampler, loader = make()
    loader.load_state_dict(state)
    assert sampler.epoch == 3
    sampler.set_epoch(0)
    assert flat(loader) == rest
    assert "call set_epoch(3) before this loop" in capfd.readouterr().err


def test_errors_count_as_yielded() -> None:
    """A batch that raised is not repeated, as it is not when the loop goes on."""

    class Broken(Numbers):
        def __getitem__(self, index: int) -> int:
            if index == 1:
                raise ValueError("no such sample")
            return index

    loader = numapin.DataLoader(Broken(4))
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(ValueError, match="no such sample"):
        next(iterator)
    other = numapin.DataLoader(Broken(4))
    other.load_state_dict(saved(loader.state_dict()))
    assert flat(other) == [2, 3]


def _without(state: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name != key}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: [state], "a state is a dict, not list"),
        (lambda _: None, "a state is a dict, not NoneType"),  # of a checkpoint without one: not the start of an epoch
        (lambda state: _without(state, "_num_yielded"), "the state has no '_num_yielded'"),
        (lambda state: state | {"_num_yielded": "two"}, "_num_yielded is 'two', not a number"),
        (lambda state: state | {"_sampler_iter_yielded": -1}, "_sampler_iter_yielded is a negative number: -1"),
        (lambda state: {"_snapshot": {}} | state, "the state has no '_main_snapshot'"),
        (lambda _: interrupt(lambda: numapin.DataLoader(Stream(9)), 2)[2], "a loader with an iterable dataset"),
        (lambda _: interrupt(lambda: numapin.DataLoader(Numbers(9)), 2)[2], "an epoch had 9 batches, .* has 5"),
        (lambda state: state | {"_sampler_iter_yielded": 6}, "taken after 6 batches, an epoch of this loader has 5"),
        (
            lambda _: interrupt(lambda: numapin.DataLoader(Numbers(10), 2), 2)[2],
            r"with SequentialSampler\(samples=10, .*; this .* SequentialSampler\(samples=9, ",
        ),
        (
            lambda _: interrupt(lambda: numapin.DataLoader(Numbers(9), 2, True), 2)[2],
            r"with RandomSampler\(samples=9, ",
        ),
        (
            lambda _: interrupt(lambda: numapin.DataLoader(Numbers(9), 2, sampler=Begun(9)), 2)[2],
            "a sampler of your own",
        ),
    ],
)
def test_refused_states(change: Callable[[Any], Any], message: str) -> None:
    """A value that is not a state, or a state that does not fit, is refused with the problem and the remedy."""
    loader = numapin.DataLoader(Numbers(9), 2)
    next(iter(loader))
    with pytest.raises(UsageError, match=message) as caught:
        loader.load_state_dict(change(loader.state_dict()))
    assert caught.value.hint


def test_another_batch_size_with_as_many_batches() -> None:
    """A batch size that gives the same number of batches is refused, too: samples would be lost."""
    *_, state = interrupt(lambda: numapin.DataLoader(Numbers(9), 5, num_workers=1), 1)
    with pytest.raises(
        UsageError, match=r"batch_size=5\); this loader has SequentialSampler\(samples=9, drawn=9, batch_size=6\)"
    ):
        numapin.DataLoader(Numbers(9), 6).load_state_dict(state)


def test_an_accelerator_whose_loader_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch's own iterator pins the batches, a state is refused instead of ignored; an empty one is not."""
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    *_, state = interrupt(lambda: numapin.DataLoader(Numbers(9), pin_memory=False), 2)
    loader = numapin.DataLoader(Numbers(9), num_workers=1, pin_memory=True)
    copied: Any = torch.utils.data.DataLoader(
        Numbers(9), num_workers=1, pin_memory=True, pin_memory_device=loader.pin_memory_device
    )
    for there in (loader, copied):
        with pytest.raises(UsageError, match="torch's own iterator is used, which has no state") as caught:
            there.load_state_dict(state)
        assert caught.value.hint == "use pin_memory=False"
        there.load_state_dict({})
    numapin.DataLoader(Numbers(9), num_workers=1).load_state_dict(state)


def test_negative_interval() -> None:
    """A negative interval of snapshots is refused, and one that is not a whole number."""
    for wrong in (-1, 1.5, "2"):
        with pytest.raises(UsageError, match=f"snapshot_every_n_steps='?{wrong}"):
            numapin.DataLoader(Numbers(1), snapshot_every_n_steps=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"pinned_budget": "1GB"}, {"worker_threads": 1.5}, {"worker_threads": "2"}])
def test_options_that_are_not_numbers(options: dict[str, Any]) -> None:
    """They are refused when the loader is made, with a hint; a number of bytes may be a float."""
    with pytest.raises(UsageError, match="is not a number of") as caught:
        numapin.DataLoader(Numbers(1), **options)
    assert caught.value.hint
    numapin.DataLoader(Numbers(1), pinned_budget=8e9)  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "key"), [(Remembering, "sampler_state"), (Begun, "sampler_iter_state")])
def test_own_state_of_a_sampler_in_batches(kind: Any, key: str) -> None:
    """It is in the state, as torchdata writes it, and nothing is drawn again: the epoch's start is not needed."""
    loader = numapin.DataLoader(Numbers(20), 3, sampler=kind(20))
    iterator = iter(loader)
    first, state = flat([next(iterator), next(iterator)]), saved(loader.state_dict())
    assert state["_sampler_iter_state"].keys() == {"samples_yielded", key}
    del state["_numapin"]
    disturb()
    other = numapin.DataLoader(Numbers(20), 3, sampler=kind(20))
    other.load_state_dict(state)
    rest = flat(other)
    assert rest == flat(iterator)
    assert sorted(first + rest) == list(range(20))


def test_after_a_short_last_batch_nothing_is_left() -> None:
    """The sampler's own state is then that of its next epoch, which does not belong to this one."""
    first, rest, state = interrupt(lambda: numapin.DataLoader(Numbers(20), 3, sampler=Remembering(20)), 7)
    loader = numapin.DataLoader(Numbers(20), 3, sampler=Remembering(20))
    loader.load_state_dict(state)
    assert (sorted(first), rest, flat(loader)) == (list(range(20)), [], [])


def test_plain_batch_sampler_is_torchs() -> None:
    """Batches of a custom sampler are those that torch's BatchSampler makes, with and without the last one."""
    for drop_last in (False, True):
        random.seed(4)
        loader = numapin.DataLoader(Numbers(20), 3, sampler=Begun(20), drop_last=drop_last)
        ours = [batch.tolist() for batch in loader]
        random.seed(4)
        assert ours == list(BatchSampler(Begun(20), 3, drop_last))


class CountingEpochs(Sampler[Any]):
    """Batches in another order in each epoch, which the sampler counts by itself."""

    def __init__(self, size: int) -> None:
        self.size, self.num_begun = size, 0

    def __iter__(self) -> Iterator[list[int]]:
        """Return the batches of the next epoch."""
        self.num_begun += 1
        order = random.Random(self.num_begun).sample(range(self.size), self.size)  # noqa: S311
        return iter([order[begin : begin + 2] for begin in range(0, self.size, 2)])

    def state_dict(self) -> dict[str, int]:
        """Return the epoch."""
        return {"begun": self.num_begun}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take over the epoch."""
        self.num_begun = state["begun"]


@pytest.mark.parametrize("name", ["batch_sampler", "sampler"])
def test_a_state_before_the_first_batch_has_that_of_its_sampler(name: str) -> None:
    """A sampler with a state continues in the epoch that has begun, not in its first one, without workers, too."""

    def make() -> numapin.DataLoader[Any]:
        options: dict[str, Any] = {name: CountingEpochs(8)} | ({"batch_size": None} if name == "sampler" else {})
        return numapin.DataLoader(Whole(8), **options)

    loader = make()
    for _ in range(3):
        flat(loader)
    iterator = iter(loader)
    state = saved(loader.state_dict())
    epochs = [flat(iterator), flat(loader)]
    other = make()
    other.load_state_dict(state)
    assert [flat(other), flat(other)] == epochs


class Whole(Numbers):
    """A dataset of numbers that also gives several at once."""

    def __getitem__(self, index: Any) -> Any:
        """Return the numbers themselves."""
        return index


JUNK: Final[tuple[Any, ...]] = (None, -1, -(10**10), 10**10, 10**30, 1.5, True, "x", b"", ["x", "x"], [], {}, [10**12])


def state_of(kind: str) -> dict[str, Any]:
    """Return a state in the middle of an epoch."""
    loader = numapin.DataLoader(*LOADERS[kind]())
    iterator = iter(loader)
    flat([next(iterator), next(iterator)])
    return saved(loader.state_dict())


LOADERS: Final[dict[str, Callable[[], tuple[Any, ...]]]] = {
    "shuffled": lambda: (Numbers(9), 2, True),
    "iterable": lambda: (Stream(9), 2),
    "workers": lambda: (Numbers(9), 2, True, None, None, 2),
    "iterable, workers": lambda: (Stream(9), 2, None, None, None, 2),
}


@cache
def states() -> dict[str, dict[str, Any]]:
    """Return a state of each kind of loader, and the same without what torchdata does not write."""
    whole = {kind: state_of(kind) for kind in LOADERS}
    return whole | {f"torchdata's, {kind}": _without(state, "_numapin") for kind, state in whole.items()}


def places(state: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each place in a state where a value is: the dict or list, and the key or index."""
    if isinstance(state, dict | list):
        for key in state if isinstance(state, dict) else range(min(len(state), 3)):
            yield state, key
            yield from places(state[key])


DAMAGE: Final = st.lists(st.tuples(st.integers(0, 10_000), st.sampled_from(range(len(JUNK)))), min_size=1, max_size=2)


@pytest.mark.timeout(120)
@given(number=st.integers(0, 7), damage=DAMAGE)
@settings(max_examples=100, deadline=None)
def test_damaged_states(number: int, damage: list[tuple[int, int]]) -> None:
    """A state with values that cannot be is refused, or continues an epoch that ends; nothing hangs."""
    kind = sorted(states())[number]
    state = copy.deepcopy(states()[kind])
    for at, junk in damage:
        found = list(places(state))
        where, key = found[at % len(found)]
        where[key] = copy.deepcopy(JUNK[junk])
    arguments = LOADERS[kind.removeprefix("torchdata's, ")]()
    loader = numapin.DataLoader(*arguments)
    with suppress(ValueError):
        loader.load_state_dict(state)
        if not loader.num_workers or not isinstance(loader.dataset, Stream):  # its state needs workers
            assert len(flat(loader if not loader.num_workers else in_this_process(*arguments[:3], state=state))) <= 9


def in_this_process(*arguments: Any, state: dict[str, Any]) -> numapin.DataLoader[Any]:
    """Return a loader without workers that continues a state."""
    loader = numapin.DataLoader(*arguments)
    loader.load_state_dict(state)
    return loader


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"_num_yielded": -(10**10)}, "_num_yielded is a negative number"),
        ({"_num_yielded": 10**10}, "_num_yielded is 10000000000"),
        ({"_steps_since_snapshot": 10**10}, "_steps_since_snapshot is 10000000000"),
        ({"_numapin": {"skip": ["x", "x"]}}, "skip is 'x', not a number"),
        ({"_numapin": {"ahead": [10**12]}}, "ahead is"),
    ],
)
def test_a_damaged_state_is_refused(change: dict[str, Any], text: str) -> None:
    """It is a ValueError with what is wrong, and with what to do."""
    state = copy.deepcopy(states()["workers"])
    state |= change if "_numapin" not in change else {"_numapin": state["_numapin"] | change["_numapin"]}
    with pytest.raises(ValueError, match=text) as caught:
        numapin.DataLoader(*LOADERS["workers"]()).load_state_dict(state)
    assert isinstance(caught.value, UsageError)
    assert caught.value.hint
