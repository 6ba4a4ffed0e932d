"""Batches of every kind equal torch's, whether they can travel in slots or not; and the comparisons have teeth."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.contract.datasets import Made, row
from tests.contract.describe import assert_same, describe
from tests.contract.fuzzed import run_epoch
from tests.contract.seam import Miss
from tests.contract.watching import TORCH, Failure, LoaderClass, Seen, assert_same_seen, reused, watch
from tests.contract.zoo import KINDS, ROUNDS, TORCHS_WAY, Pair, Tagged, from_zoo, of_each_kind

# Warnings of torch's kernels about new layouts, once per process.
pytestmark = [
    pytest.mark.filterwarnings("ignore:(?s).*ATen"),
    pytest.mark.filterwarnings("ignore:The given NumPy array is not writ"),
]


def test_a_batch_of_each_kind(loader_class: LoaderClass) -> None:
    """Values, types, identity and sharing equal torch's; all but what only torch can send is in slots used again."""
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


X = row(1)
OTHERS: dict[str, tuple[Any, Any]] = {
    "a value": (X, X + 1),
    "a dtype": (X, X.double()),
    "a shape": (X, X.view(-1)),
    "strides": (X.t(), X.t().contiguous()),
    "a gradient": (X, X.clone().requires_grad_()),
    "a class": (X, X.clone().as_subclass(Tagged)),
    "a container": ((X, 1), [X, 1]),
    "a named tuple": (Pair(X, 1), (X, 1)),
    "the order of keys": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "identity": ([X, X], [X, X.clone()]),
    "a shared storage": ([X, X[3:]], [X, X[3:].clone()]),
    "an overlap": ([X.clone(), X.clone()], [X[:3], X[2:5]]),
    "an array that may be written": (np.zeros(3), np.broadcast_to(np.zeros(1), 3)),
}


@pytest.mark.parametrize("what", OTHERS)
def test_another_batch_is_noticed(what: str) -> None:
    """A batch that differs in one way is not the same."""
    theirs, ours = map(describe, OTHERS[what])
    assert_same(theirs, theirs)
    with pytest.raises(AssertionError):
        assert_same(ours, theirs)


def test_other_epochs_are_noticed() -> None:
    """Epochs that differ in their batches, their order, errors, warnings or random draws are not the same."""
    seen = watch(lambda: TORCH(range(6), batch_size=2))  # type: ignore[arg-type]
    assert_same_seen(seen, seen)
    (batches,) = seen.epochs
    failure = Failure(kind=ValueError, text="an error")
    others: list[dict[str, Any]] = [
        {"epochs": (batches[:-1],)},
        {"epochs": (batches[::-1],)},
        {"epochs": ((failure, *batches[1:]),)},
        {"epochs": (batches, batches)},
        {"warnings": ("UserWarning: this loader is fast",)},
        {"random_states": seen.random_states[::-1]},
    ]
    for other in others:
        with pytest.raises((AssertionError, ValueError)):
            assert_same_seen(replace(seen, **other), seen)
