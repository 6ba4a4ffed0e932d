"""The state of a loader with workers: nothing lost, nothing repeated, in the same order."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DistributedSampler

import numapin
from numapin.errors import UsageError
from tests.resuming import (
    BeginsAgain,
    BegunShards,
    CallCounter,
    CountingShards,
    Failing,
    Numbers,
    OwnIterator,
    PythonShuffled,
    Remembering,
    RememberingBatches,
    Shards,
    ShuffledShards,
    SlowStart,
    disturb,
    flat,
    interrupt,
    saved,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.resuming import Make

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # three workers, two cores

SIZE = 32

ORDERS: dict[str, Callable[[], dict[str, Any]]] = {
    "shuffle": lambda: {"shuffle": True, "batch_size": 3},
    "distributed": lambda: {"sampler": DistributedSampler(Numbers(SIZE), num_replicas=2, rank=1), "batch_size": 3},
    "python": lambda: {"batch_sampler": PythonShuffled(SIZE)},
    "remembering": lambda: {"sampler": Remembering(SIZE), "batch_size": 3},
    "remembering batches": lambda: {"batch_sampler": RememberingBatches(SIZE)},
}


def rest_after(make: Make, state: dict[str, Any]) -> tuple[list[int], numapin.DataLoader[Any]]:
    """Return the rest of the epoch from a new loader, and the loader."""
    loader = make()
    disturb()
    loader.load_state_dict(state)
    return flat(loader), loader


@pytest.mark.parametrize("name", ORDERS)
def test_rest_of_epoch(name: str) -> None:
    """With the batches that workers make ahead still under way, the state is that of the batch yielded.

    Another prefetch factor, another number of workers and persistent workers continue in the same order.
    """
    *_, rest, state = interrupt(lambda: numapin.DataLoader(Numbers(SIZE), num_workers=2, **ORDERS[name]()), 3)
    for options in ({"num_workers": 1, "prefetch_factor": 5}, {}):
        found, _ = rest_after(lambda o=options: numapin.DataLoader(Numbers(SIZE), **o, **ORDERS[name]()), state)  # type: ignore[misc]
        assert found == rest


def test_later_epochs_of_persistent_workers() -> None:
    """After a place in the second epoch of persistent workers, the third has the same order as without a break."""

    def make() -> numapin.DataLoader[Any]:
        generator = torch.Generator().manual_seed(2)
        options: dict[str, Any] = {"num_workers": 1, "persistent_workers": True}
        return numapin.DataLoader(Numbers(SIZE), 4, shuffle=True, generator=generator, **options)

    with make() as loader:
        epochs = [flat(loader) for _ in range(3)]
    for stop in (2, None):
        with make() as loader:
            flat(loader)
            iterator = iter(loader)
            first = flat(iterator) if stop is None else flat(next(iterator) for _ in range(stop))
            state = saved(loader.state_dict())
        with make() as loader:
            flat(loader)  # a live iterator must not go on
            loader.load_state_dict(state)
            rest = [] if stop is None else flat(loader)
            assert first + rest == epochs[1]
            assert flat(loader) == epochs[2]


def test_state_of_a_new_loader() -> None:
    """A state from before the first iterator changes nothing, not even the order that persistent workers begin with."""

    def make() -> numapin.DataLoader[Any]:
        return numapin.DataLoader(Numbers(SIZE), 3, True, num_workers=1, persistent_workers=True)

    with make() as plain, make() as loaded:
        loaded.load_state_dict(saved(plain.state_dict()))
        torch.manual_seed(6)
        expected = [flat(plain), flat(plain)]
        torch.manual_seed(6)
        assert [flat(loaded), flat(loaded)] == expected


def test_abandoned_epoch_of_persistent_workers() -> None:
    """After an epoch that was left early, each worker's place is that of the new epoch, from its first batch on."""
    options: dict[str, Any] = {"batch_size": 2, "num_workers": 2, "persistent_workers": True}
    with numapin.DataLoader(CountingShards(SIZE), **options) as loader:
        for stop in (0, 2):
            next(iter(loader))
            iterator = iter(loader)
            flat(next(iterator) for _ in range(stop))
            state, rest = saved(loader.state_dict()), flat(iterator)
            with numapin.DataLoader(CountingShards(SIZE), **options) as other:
                assert rest_after(lambda o=other: o, state)[0] == rest  # type: ignore[misc]


def test_iterator_of_persistent_workers_goes_on() -> None:
    """Loading a state does not end the loop that is running."""
    with numapin.DataLoader(Numbers(SIZE), 4, num_workers=1, persistent_workers=True) as loader:
        iterator = iter(loader)
        next(iterator)
        loader.load_state_dict(saved(loader.state_dict()))
        assert flat(iterator) == list(range(4, SIZE))
        assert flat(loader) == list(range(4, SIZE))


@pytest.mark.parametrize("kind", [Shards, ShuffledShards, CountingShards, BegunShards, OwnIterator, BeginsAgain])
@pytest.mark.parametrize("stop", [1, 10, 14])  # after 14 batches, the parts of two workers have ended
def test_iterable(kind: type[Shards], stop: int) -> None:
    """Each worker continues its own part, also after shorter parts have ended, and the workers take turns as before."""
    options: dict[str, Any] = {"batch_size": 2, "num_workers": 3}
    every = 1 if stop == 1 else 3  # batches since the last snapshot are read again

    def make() -> numapin.DataLoader[Any]:
        return numapin.DataLoader(kind(SIZE), snapshot_every_n_steps=every, **options)

    first, rest, state = interrupt(make, stop)
    assert sorted(first + rest) == list(range(SIZE))
    found, loader = rest_after(make, state)
    assert found == rest
    assert sorted(flat(loader)) == list(range(SIZE))


@pytest.mark.parametrize("kind", [ShuffledShards, CountingShards])
def test_iterable_in_persistent_workers(kind: type[Shards]) -> None:
    """A place in a later epoch of persistent workers is found again, with the random numbers of that epoch.

    The end of an epoch begins the next one.
    """
    options: dict[str, Any] = {"batch_size": 2, "num_workers": 2, "persistent_workers": True}
    with numapin.DataLoader(kind(SIZE), **options) as loader:
        assert len(flat(loader)) == SIZE
        at_end = saved(loader.state_dict())
        iterator = iter(loader)
        flat(next(iterator) for _ in range(3))
        state, rest = saved(loader.state_dict()), flat(iterator)
    with numapin.DataLoader(kind(SIZE), **options) as loader:
        loader.load_state_dict(state)
        assert flat(loader) == rest
        loader.load_state_dict(at_end)
        assert sorted(flat(loader)) == list(range(SIZE))


@pytest.mark.parametrize("kind", [SlowStart, CountingShards])
def test_out_of_order(kind: Any) -> None:
    """With in_order=False exactly the batches that were not yielded come, whichever worker was faster."""

    def make(*, in_order: bool = False) -> numapin.DataLoader[Any]:
        return numapin.DataLoader(kind(SIZE), 2, num_workers=2, in_order=in_order)

    first, _, state = interrupt(make, 3)
    assert kind is not SlowStart or 0 not in first
    for in_order in (False, True):
        found, _ = rest_after(lambda i=in_order: make(in_order=i), state)  # type: ignore[misc]
        assert sorted(first + found) == list(range(SIZE))


def test_stateful_map_style() -> None:
    """Each worker's copy of a map-style dataset with a state has it again, in the epoch and in the next one."""
    options: dict[str, Any] = {"batch_size": 2, "num_workers": 2, "snapshot_every_n_steps": 3}  # for iterable ones only

    def make() -> numapin.DataLoader[Any]:
        return numapin.DataLoader(CallCounter(SIZE), persistent_workers=True, **options)

    with make() as loader:
        epochs = [flat(loader), flat(loader)]
    _, rest, state = interrupt(make, 5)
    found, loader = rest_after(make, state)
    with loader:
        assert [found, flat(loader)] == [rest, epochs[1]]
    with pytest.raises(UsageError, match="taken with num_workers=2, this loader has 1"):
        numapin.DataLoader(CallCounter(SIZE), 2, num_workers=1).load_state_dict(state)


def test_unreadable_state_of_a_dataset() -> None:
    """A dataset whose state cannot be read delivers its batches; asking for the state raises its error."""
    loader = numapin.DataLoader(Failing(4), num_workers=1)
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(LookupError, match="the shard index is gone"):
        loader.state_dict()
    assert len(list(iterator)) == 3


def test_iterable_with_other_workers_is_refused() -> None:
    """The parts of an iterable dataset belong to its workers: another number is refused, with the number to use."""
    *_, state = interrupt(lambda: numapin.DataLoader(Shards(SIZE), 2, num_workers=2), 3)
    for other in (0, 1):
        with pytest.raises(UsageError, match=f"num_workers=2, this loader has {other}") as caught:
            numapin.DataLoader(Shards(SIZE), 2, num_workers=other).load_state_dict(state)
        assert "use num_workers=2" in str(caught.value.hint)


def test_seeds_of_workers_are_kept() -> None:
    """Workers that continue an epoch have the seeds that they had, and the process's generators stay as they were."""
    loader = numapin.DataLoader(Numbers(8), num_workers=1, collate_fn=_seed)
    iterator = iter(loader)
    seed, state = next(iterator), saved(loader.state_dict())
    loader = numapin.DataLoader(Numbers(8), num_workers=1, collate_fn=_seed)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    loader.load_state_dict(state)
    assert set(loader) == {seed}
    assert torch.equal(before, torch.get_rng_state())


def _seed(_: list[int]) -> int:
    return int(torch.initial_seed())


@pytest.mark.filterwarnings("ignore:.set_vital. is deprecated")  # torchdata calls it
@pytest.mark.skipif(find_spec("torchdata") is None, reason="no torchdata; type: pip install torchdata==0.11.0")
@pytest.mark.parametrize("kind", [Numbers, Shards, CountingShards])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_states_of_torchdata(kind: Any, num_workers: int) -> None:
    """A state of torchdata's loader continues in ours, and one of ours in torchdata's."""
    theirs_class: Any = import_module("torchdata.stateful_dataloader").StatefulDataLoader
    options: dict[str, Any] = {"batch_size": 2, "num_workers": num_workers}
    options |= {"shuffle": True} if kind is Numbers else {}
    classes = (theirs_class, numapin.DataLoader)
    for theirs, ours in (classes, classes[::-1]):
        *_, rest, state = interrupt(lambda c=theirs: c(kind(SIZE), **options), 3)  # type: ignore[misc]
        loader = ours(kind(SIZE), **options)
        loader.load_state_dict(state)
        assert flat(loader) == rest
