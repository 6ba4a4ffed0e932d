"""Random numbers: the loader's draws in the rank, and the seeds of workers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import get_worker_info

from tests.contract.datasets import ManyArgumentsError, Raise, Rows, Seeds
from tests.contract.describe import name_of
from tests.contract.watching import TORCH, Failure, LoaderClass, assert_as_torch, watch

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # three workers, two cores


def first_of(items: list[Any]) -> Any:
    """Collate to the only item."""
    return items[0]


def reseed(worker_id: int) -> None:
    """Seed everything with the worker's seed from torch, and record the call in the dataset."""
    info: Any = get_worker_info()
    assert info.id == worker_id
    assert info.seed == torch.initial_seed()
    torch.manual_seed(info.seed % 1000 + 1)
    random.seed(np.random.randint(1000))  # noqa: NPY002 - seeded already when this is called
    info.dataset.size -= worker_id  # the worker must see this change of the dataset


class Marked(Seeds):
    """Items that show what an init function changed in the dataset."""

    size = 1000

    def __getitem__(self, index: int) -> Any:
        """Return an item with the mark."""
        return super().__getitem__(index) | {"size": self.size}


def fail_in_worker_one(worker_id: int) -> None:
    """Raise in one worker only."""
    if worker_id == 1:
        raise OSError(5, "no such shard")


def own_generator() -> torch.Generator:
    """Return a generator that is used by one loader only."""
    return torch.Generator().manual_seed(3)


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
@pytest.mark.parametrize("own", [False, True])
def test_one_base_seed_per_iterator(loader_class: LoaderClass, workers: int, own: bool, persistent: bool) -> None:  # noqa: FBT001
    """Each iterator draws one 64-bit number, from the generator if there is one; a persistent one draws it once."""
    generator = own_generator() if own else torch.default_generator
    torch.manual_seed(3)
    expected = own_generator()
    loader = loader_class(
        Rows(8),
        batch_size=2,
        num_workers=workers,
        persistent_workers=persistent,
        generator=generator if own else None,
    )
    for epoch in range(3):
        iterator = iter(loader)
        if epoch == 0 or not persistent:
            torch.empty((), dtype=torch.int64).random_(generator=expected)
        assert torch.equal(generator.get_state(), expected.get_state())
        list(iterator)
        assert torch.equal(generator.get_state(), expected.get_state())


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


@pytest.mark.parametrize(
    "init",
    [
        fail_in_worker_one,
        Raise(ValueError),
        Raise(KeyError, ("shard",)),
        Raise(ManyArgumentsError, (1, 2)),
        "no function",
    ],
    ids=name_of,
)
def test_errors_of_worker_init_fn(loader_class: LoaderClass, init: Any) -> None:
    """Errors of the init function arrive as the worker's first batch, with torch's type and text, as do later ones."""
    arguments = {"dataset": Rows(12), "num_workers": 2, "worker_init_fn": init}
    theirs = assert_as_torch(loader_class, lambda: arguments)
    assert isinstance(theirs.epochs[0][1], Failure)


def test_worker_init_fn_and_collate_fn_set_after_init(loader_class: LoaderClass) -> None:
    """Frameworks set both, and the generator, on an existing loader; the next iterator uses them."""

    def made(kind: LoaderClass) -> Any:
        loader = kind(Marked(), num_workers=2)
        list(zip(range(2), loader, strict=False))
        loader.worker_init_fn, loader.collate_fn, loader.generator = reseed, first_of, own_generator()
        return loader

    assert watch(lambda: made(loader_class)) == watch(lambda: made(TORCH))
