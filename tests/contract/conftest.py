"""The class under test: numapin.DataLoader, or the one that CONTRACT_LOADER names as module:class.

With CONTRACT_LOADER=torch.utils.data:DataLoader all tests but those of what only ours can do must pass: it is torch's
own contract.
"""

from __future__ import annotations

import os
import pkgutil

import pytest
from torch.utils.data import DataLoader

from tests.contract.watching import LoaderClass


@pytest.fixture(scope="session")
def loader_class() -> LoaderClass:
    """Give the class under test."""
    found: LoaderClass = pkgutil.resolve_name(os.environ.get("CONTRACT_LOADER", "numapin:DataLoader"))
    return found


@pytest.fixture(scope="session")
def own_class(loader_class: LoaderClass) -> LoaderClass:
    """Give the class under test to tests of what torch's cannot do."""
    if loader_class is DataLoader:
        pytest.skip("torch's own loader does less")
    return loader_class
