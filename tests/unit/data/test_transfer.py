"""The positions of a batch's tensors after its slot was copied as a whole, without a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.loopback import make_head
from tests.unit.data.seam import _Copy, small_runs

if TYPE_CHECKING:
    from collections.abc import Sequence


BATCH_BYTES: Final = 4 << 20
LARGE_BYTES: Final = 256 << 10  # what is larger is not small
BYTES: Final = torch.randint(0, 256, (BATCH_BYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(7))


def runs_of(storages: Sequence[tuple[int, int]], num_bytes: int = BATCH_BYTES) -> tuple[tuple[int, int], ...]:
    """Return the runs of small tensors of a batch whose storages are (start, length) in its slot."""
    return small_runs(make_head(slot=1, slot_bytes=num_bytes, storages=tuple(storages)))


def check(storages: Sequence[tuple[int, int]]) -> None:
    """Assert that every storage has its own bytes after the copy."""
    runs = runs_of(storages)
    small = torch.cat([BYTES[first:last] for first, last in runs]) if runs else None
    event: Any = None
    copy = _Copy(BYTES, BYTES.untyped_storage(), event, small, runs)
    for start, size in storages:
        storage, begin = copy.place(start, size)
        assert begin + size <= storage.nbytes(), (start, size)
        found = torch.empty(0, dtype=torch.uint8).set_(storage, begin, (size,), (1,))
        assert torch.equal(found, BYTES[start : start + size]), (start, size)


def test_runs_of_small_tensors() -> None:
    """Neighbors are one run, in multiples of 256 bytes within the batch; a batch below 2 MiB has none."""
    first = 3 << 20
    storages = [(0, first), (first, 100), (first + 256, 1000), (first + 4096, 8)]
    assert runs_of(storages) == ((first, first + 1280), (first + 4096, first + 4352))
    assert runs_of([(0, 100)], (2 << 20) - 1) == ()
    assert runs_of([(0, 100)], 2 << 20) == ((0, 256),)
    assert runs_of([(BATCH_BYTES - 100, 100)]) == ((BATCH_BYTES - 100, BATCH_BYTES),)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 1000)), max_size=12))
def test_every_storage_has_its_bytes(sizes: list[tuple[bool, int]]) -> None:
    """Every storage has its bytes, for any sequence of large and small ones."""
    storages, end = [], 0
    for is_large, size in sizes:
        length = LARGE_BYTES + size if is_large else size
        if end + length <= BATCH_BYTES:
            storages.append((end, length))
            end = -(-(end + length) // 256) * 256
    check(storages)


@pytest.mark.parametrize(
    "storages",
    [[(0, 240), (200, 200)], [(0, 40), (0, 4 << 20)], [(1000, 40), (1000, 3 << 20)]],
    ids=["overlapping views", "a view and its base", "a view and a longer one"],
)
def test_views_of_what_was_collated_may_overlap(storages: list[tuple[int, int]]) -> None:
    """Overlapping storages keep their positions: each has its own bytes."""
    check(storages)
