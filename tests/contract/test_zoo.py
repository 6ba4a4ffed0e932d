"""Batches of every kind equal torch's, whether they can travel in slots or not."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract.datasets import Paced
from tests.contract.describe import Described, assert_same_batches, describe
from tests.contract.watching import TORCH, LoaderClass, Seen, assert_same_seen, reused, watch
from tests.contract.zoo import KINDS, ROUNDS, TORCHS_WAY, from_zoo

# Warnings of torch's kernels about new layouts, once per process.
pytestmark = pytest.mark.filterwarnings("ignore:(?s).*ATen")


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_each_kind(loader_class: LoaderClass, torchs: dict[str, list[Described]], kind: str) -> None:
    """In slots, values, dtypes, strides, classes, identity and sharing of storages equal torch's for each batch."""
    indices = range(KINDS.index(kind), ROUNDS * len(KINDS), len(KINDS))
    dataset = Paced(ROUNDS * len(KINDS), 0.006)
    loader = loader_class(dataset, sampler=indices, collate_fn=from_zoo, num_workers=1)
    assert_same_batches([describe(batch) for batch in loader], torchs[kind])
    assert reused(loader) != 0 or kind in TORCHS_WAY, "no batch came in a slot"


@pytest.mark.parametrize("method", [None, "fork", "spawn"])
def test_all_kinds_in_turn(loader_class: LoaderClass, method: str | None) -> None:
    """One loader carries all kinds, over epochs of persistent workers, and without workers if the method is None."""

    def made(of: LoaderClass, context: str | None) -> Seen:
        workers: dict[str, Any] = {"multiprocessing_context": context, "num_workers": 1, "persistent_workers": True}
        dataset = Paced(2 * len(KINDS), 0.001)
        return watch(lambda: of(dataset, collate_fn=from_zoo, **(workers if context else {})), (20, None))

    assert_same_seen(made(loader_class, method), made(TORCH, "fork" if method else None))
