"""Batches of every kind equal torch's, whether they can travel in slots or not."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract.datasets import Made
from tests.contract.describe import assert_same
from tests.contract.fuzzed import run_epoch
from tests.contract.seam import Miss
from tests.contract.watching import TORCH, LoaderClass, Seen, assert_same_seen, reused, watch
from tests.contract.zoo import KINDS, ROUNDS, TORCHS_WAY, from_zoo, of_each_kind

# Warnings of torch's kernels about new layouts, once per process.
pytestmark = [
    pytest.mark.filterwarnings("ignore:(?s).*ATen"),
    pytest.mark.filterwarnings("ignore:The given NumPy array is not writ"),
]


def test_a_batch_of_each_kind(loader_class: LoaderClass) -> None:
    """Values, dtypes, strides, classes, identity and sharing of storages equal torch's for each batch.

    They travel in slots that are used again, but for those that only torch can send.
    """
    theirs, _ = of_each_kind(TORCH)
    ours, loader = of_each_kind(loader_class)
    for kind in KINDS:
        for mine, torchs in zip(ours[kind], theirs[kind], strict=True):
            assert_same(mine, torchs, kind)
    if (found := reused(loader)) is None:
        return
    assert found > ROUNDS * len(KINDS) // 2
    shared = sum("shared" in kind for kind in TORCHS_WAY)
    others = len(TORCHS_WAY) - shared
    stats = loader.stats()  # type: ignore[attr-defined]
    assert stats.misses == {Miss.UNSUPPORTED: ROUNDS * others, Miss.SHARED: ROUNDS * shared}


@pytest.mark.xdist_group("fork server")
@pytest.mark.parametrize("method", [None, "forkserver"])
def test_all_kinds_in_turn(loader_class: LoaderClass, method: str | None) -> None:
    """Workers that are not forked and persist carry all kinds, too, and so does a loader without workers."""

    def made(of: LoaderClass, context: str | None) -> Seen:
        workers: dict[str, Any] = {"multiprocessing_context": context, "num_workers": 1, "persistent_workers": True}
        dataset = Made(size=len(KINDS), pause_s=0.001)
        return watch(lambda: of(dataset, collate_fn=from_zoo, **(workers if context else {})), (20, None))

    assert_same_seen(made(loader_class, method), made(TORCH, "fork" if method else None))


def test_random_batches() -> None:
    """Batches of random parts arrive as they were made; `python -m tests.contract.fuzzed` checks more of them."""
    assert run_epoch(4, 0, 150) > 0
