"""The data path of a loader: which pool each of its iterators gets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest
from torch.utils.data import DataLoader

if TYPE_CHECKING:
    from tests.unit.data.seam import DataPath

LOADER: Final[DataLoader[int]] = DataLoader(range(4), num_workers=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("are_gone", [True, False])
def test_a_pool_is_used_again_if_its_workers_are_gone(path: DataPath, *, are_gone: bool) -> None:
    """One that lives may still write to its slots, so the next iterator gets others."""
    first = path.lane(LOADER, pins=False)
    pool = first.pool
    assert pool is not None
    first.end(workers_are_gone=are_gone)
    second = path.lane(LOADER, pins=False)
    assert (second.pool is pool) is are_gone
    second.end(workers_are_gone=True)
