"""The comparisons of these tests have teeth: whatever a user could notice makes them fail."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.contract.datasets import row
from tests.contract.describe import assert_same, describe
from tests.contract.watching import TORCH, Failure, assert_same_seen, watch
from tests.contract.zoo import Pair, Tagged

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
