"""The parts of a loader that user code and frameworks use, other than its batches; its random draws and seeds."""

from __future__ import annotations

import copy
import inspect
import multiprocessing
import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import RandomSampler, get_worker_info

import numapin
from tests.contract.datasets import Rows, Seeds, Stream
from tests.contract.describe import assert_same_batches, describe
from tests.contract.seam import install, iterator
from tests.contract.watching import TORCH, Failure, LoaderClass, assert_as_torch, pass_first_batches, watch

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # three workers, two cores
OWN = ("device", "pinned_budget", "node", "strict")
GIVEN: dict[str, Any] = {
    "dataset": Rows(20),
    "batch_size": 3,
    "sampler": RandomSampler(range(20)),
    "num_workers": 1,
    "collate_fn": torch.utils.data.default_collate,
    "pin_memory": False,
    "drop_last": True,
    "timeout": 7,
    "worker_init_fn": print,
    "generator": torch.Generator(),
    "prefetch_factor": 3,
    "persistent_workers": True,
    "in_order": False,
    "multiprocessing_context": multiprocessing.get_context("fork"),
}


def test_signature(loader_class: LoaderClass) -> None:
    """Torch's parameters come first, in its order and with its defaults; numapin's follow, keyword-only."""
    ours, theirs = (list(inspect.signature(kind).parameters.values()) for kind in (loader_class, TORCH))
    facts = [[(p.name, p.kind, p.default) for p in parameters] for parameters in (ours[: len(theirs)], theirs)]
    assert facts[0] == facts[1]
    assert {p.kind for p in ours[len(theirs) :]} <= {inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize("given", [{"dataset": Rows(4)}, GIVEN, {"dataset": Stream(3), "batch_size": None}], ids=len)
def test_attributes(loader_class: LoaderClass, given: dict[str, Any]) -> None:
    """Every argument that torch keeps is an attribute with the same name, and is the object that was passed."""
    ours, theirs = loader_class(**given), TORCH(**given)
    for name, value in vars(theirs).items():
        mine = getattr(ours, name)
        assert mine is value or mine == value or type(mine) is type(value), name
    for name, value in given.items():
        assert getattr(ours, name) is value or getattr(ours, name) == value, name
    assert vars(theirs).keys() <= vars(ours).keys()  # Lightning reads vars()


def test_class(loader_class: LoaderClass) -> None:
    """The class is a torch DataLoader with that name, can be subscripted with a type, and returns torch's iterators."""
    assert issubclass(loader_class, TORCH)
    assert loader_class.__name__ == "DataLoader"
    loader = loader_class[int](Rows(), num_workers=1)  # type: ignore[index]
    assert isinstance(loader, loader_class)
    iterator = iter(loader)
    assert isinstance(iterator, torch.utils.data.dataloader._MultiProcessingDataLoaderIter)
    assert iter(iterator) is iterator
    assert len(iterator) == 48
    with pytest.raises(NotImplementedError):
        pickle.dumps(iterator)


@pytest.mark.parametrize("workers", [0, 1])
def test_profiler_range(loader_class: LoaderClass, workers: int) -> None:
    """The profiler shows the wait for a batch under torch's name, which tools search for."""

    def ranges(kind: LoaderClass) -> set[str]:
        loader = kind(Rows(4), num_workers=workers)
        with torch.autograd.profiler.profile() as profile:
            list(loader)
        return {event.name for event in profile.function_events if "DataLoader" in event.name}

    names = ranges(loader_class)
    assert names == ranges(TORCH)
    assert len(names) == 1


def test_copies(loader_class: LoaderClass) -> None:
    """A shallow, deep or pickled copy after an epoch is frozen too and yields the same batches."""
    loader = loader_class(Rows(12), batch_size=2, num_workers=1, shuffle=True)
    list(loader)
    for same in (copy.copy(loader), copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):  # noqa: S301
        assert type(same) is loader_class
        assert watch(lambda same=same: same) == watch(lambda: loader)  # type: ignore[misc]
        with pytest.raises(ValueError, match="should not be set after"):
            same.batch_size = 9


@pytest.mark.parametrize("accelerator", ["cuda", "xpu"])
def test_another_makers_accelerator(accelerator: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """With pin_memory for one that is no NVIDIA GPU torch makes the batches, and no line says otherwise."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(accelerator))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(iterator, "SlotIterator", lambda *_: "slots")
    monkeypatch.setattr(iterator, "iterator_without_slots", lambda *_: "torch's")
    mark = numapin.DataLoader(Rows()).pin_memory_device
    install._say_once.cache_clear()
    made: Any = TORCH(Rows(), num_workers=1, pin_memory=True, pin_memory_device=mark)._get_iterator()
    is_nvidia = accelerator == "cuda"
    assert made == ("slots" if is_nvidia else "torch's")
    assert ("uses numapin's data path" in capsys.readouterr().err) == is_nvidia


def test_two_iterators_at_once(loader_class: LoaderClass) -> None:
    """Two iterators over one loader each see the whole epoch, in step or one ahead of the other."""
    loader = loader_class(Rows(200, delay_s=0.001), batch_size=2, num_workers=1)
    expected = [describe(batch) for batch in TORCH(Rows(200), batch_size=2)]
    first, second = iter(loader), iter(loader)
    ahead = [describe(batch) for batch in pass_first_batches(loader, first)]
    pairs = [(describe(a), describe(b)) for a, b in zip(first, second, strict=False)]
    assert_same_batches([*ahead, *(a for a, _ in pairs)], expected)
    assert_same_batches([*(b for _, b in pairs), *map(describe, second)], expected)


def test_a_persistent_iterator_is_one(loader_class: LoaderClass) -> None:
    """With persistent workers a second iter() restarts the same iterator, and no old batch arrives."""
    loader = loader_class(Seeds(), num_workers=2, persistent_workers=True)
    first = iter(loader)
    next(first)
    assert iter(loader) is first
    assert [batch["index"].item() for batch in first] == list(range(24))


def first_of(items: list[Any]) -> Any:
    return items[0]


def reseed(worker_id: int) -> None:
    info: Any = get_worker_info()
    assert info.id == worker_id
    assert info.seed == torch.initial_seed()
    torch.manual_seed(info.seed % 1000 + 1)
    random.seed(np.random.randint(1000))  # noqa: NPY002 - seeded already when this is called
    info.dataset.size -= worker_id  # the worker must see this change of the dataset


class Marked(Seeds):
    size = 1000

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) | {"size": self.size}


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_workers_have_torchs_seeds(loader_class: LoaderClass, workers: int) -> None:
    """The draws of torch, random and NumPy in each worker, its worker info and its thread count equal torch's."""
    arguments = {"dataset": Seeds(), "num_workers": workers, "batch_size": 1, "collate_fn": first_of}
    assert_as_torch(loader_class, lambda: arguments, (None, 2, None))


@pytest.mark.xdist_group("fork server")
def test_workers_started_anew_have_torchs_seeds(loader_class: LoaderClass) -> None:
    """Spawned workers have torch's seeds too, with an init function, over two epochs of persistent workers."""
    arguments: dict[str, Any] = {"num_workers": 1, "worker_init_fn": reseed, "persistent_workers": True}
    arguments |= {"collate_fn": first_of}
    ours = watch(lambda: loader_class(Marked(), multiprocessing_context="forkserver", **arguments), (None, None))
    assert ours == watch(lambda: TORCH(Marked(), multiprocessing_context="fork", **arguments), (None, None))
    assert not [event for event in ours.epochs[0] if isinstance(event, Failure)]


def test_worker_init_fn_and_collate_fn_set_after_init(loader_class: LoaderClass) -> None:
    """Frameworks set both, and the generator, on an existing loader; the next iterator uses them."""

    def made(kind: LoaderClass) -> Any:
        loader = kind(Marked(), num_workers=2)
        list(zip(range(2), loader, strict=False))
        loader.worker_init_fn, loader.collate_fn = reseed, first_of
        loader.generator = torch.Generator().manual_seed(3)
        return loader

    assert watch(lambda: made(loader_class)) == watch(lambda: made(TORCH))
