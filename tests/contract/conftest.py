"""The class under test: numapin.DataLoader, or the one that CONTRACT_LOADER names as module:class.

With CONTRACT_LOADER=torch.utils.data:DataLoader all tests must pass, except those of features that only numapin has:
this is torch's own contract.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pkgutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

if TYPE_CHECKING:
    from tests.contract.watching import LoaderClass


@pytest.fixture(scope="module", autouse=True)
def _collections_are_quick(modules_are_no_garbage: None) -> None:
    """Use this fixture for all tests of the folder."""


@pytest.fixture(autouse=True)
def _no_iterator_lives_on() -> Iterator[None]:
    """End iterators of a failed test: in a reference cycle, torch's take five seconds per worker to be collected."""
    yield
    if multiprocessing.active_children():
        for thing in gc.get_objects():
            if issubclass(type(thing), _MultiProcessingDataLoaderIter):
                thing._shutdown_workers()


@pytest.fixture(scope="session")
def loader_class() -> LoaderClass:
    found: LoaderClass = pkgutil.resolve_name(os.environ.get("CONTRACT_LOADER", "numapin:DataLoader"))
    return found


@pytest.fixture(scope="session")
def own_class(loader_class: LoaderClass) -> LoaderClass:
    if loader_class is DataLoader:
        pytest.skip("torch's own loader does less")
    return loader_class
