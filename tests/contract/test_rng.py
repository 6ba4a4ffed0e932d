"""Random numbers: the loader's draws in the rank, and the seeds of workers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import get_worker_info

from tests.contract.datasets import Seeds
from tests.contract.watching import TORCH, Failure, LoaderClass, assert_as_torch, watch

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # three workers, two cores


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
