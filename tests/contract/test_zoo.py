"""Batches of every kind equal torch's, whether they can travel in slots or not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.contract.datasets import Made
from tests.contract.describe import Described, assert_same_batches
from tests.contract.fuzzed import run_epoch
from tests.contract.seam import Miss
from tests.contract.watching import TORCH, LoaderClass, Seen, assert_same_seen, reused, watch
from tests.contract.zoo import KINDS, ROUNDS, TORCHS_WAY, from_zoo, of_each_kind

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

# Warnings of torch's kernels about new layouts, once per process.
pytestmark = [
    pytest.mark.filterwarnings("ignore:(?s).*ATen"),
    pytest.mark.filterwarnings("ignore:The given NumPy array is not writ"),
    pytest.mark.xdist_group("zoo"),  # so that one loader delivers all
]


@pytest.fixture(scope="module")
def ours(loader_class: LoaderClass) -> tuple[dict[str, list[Described]], DataLoader[Any]]:
    """Give the batches of the class under test by kind, and its loader."""
    return of_each_kind(loader_class)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_each_kind(
    ours: tuple[dict[str, list[Described]], DataLoader[Any]], torchs: dict[str, list[Described]], kind: str
) -> None:
    """Values, dtypes, strides, classes, identity and sharing of storages equal torch's for each batch."""
    assert_same_batches(ours[0][kind], torchs[kind])


@pytest.mark.usefixtures("own_class")
def test_they_travel_in_slots(ours: tuple[dict[str, list[Described]], Any]) -> None:
    """All but those that only torch can send, in slots that are used again."""
    loader = ours[1]
    shared = sum("shared" in kind for kind in TORCHS_WAY)
    others = len(TORCHS_WAY) - shared
    assert loader.stats().misses == {Miss.UNSUPPORTED: ROUNDS * others, Miss.SHARED: ROUNDS * shared}
    assert (reused(loader) or 0) > ROUNDS * len(KINDS) // 2


@pytest.mark.parametrize("method", [None, "spawn"])
def test_all_kinds_in_turn(loader_class: LoaderClass, method: str | None) -> None:
    """Spawned workers that persist carry all kinds, too, and so does a loader without workers."""

    def made(of: LoaderClass, context: str | None) -> Seen:
        workers: dict[str, Any] = {"multiprocessing_context": context, "num_workers": 1, "persistent_workers": True}
        dataset = Made(size=len(KINDS), pause_s=0.001)
        return watch(lambda: of(dataset, collate_fn=from_zoo, **(workers if context else {})), (20, None))

    assert_same_seen(made(loader_class, method), made(TORCH, "fork" if method else None))


def test_random_batches() -> None:
    """Batches of random parts arrive as they were made; `python -m tests.contract.fuzzed` checks more of them."""
    assert run_epoch(4, 0, 150) > 0
