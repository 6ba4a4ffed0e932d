"""Fixtures for the tests of the loader's parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tests.data.loopback import ANYWHERE
from tests.unit.data.seam import DataPath, PathOptions

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="package", autouse=True)
def _one_thread() -> Iterator[None]:
    """Let torch use one thread, as in workers: its others spin, which takes long beside other tests."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch) -> Iterator[DataPath]:
    """Give a new loader's data path, on an unknown machine."""
    made = DataPath(PathOptions())
    monkeypatch.setattr(made.home, "_locality", ANYWHERE)
    yield made
    made.close()
