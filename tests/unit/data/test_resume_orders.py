"""States of loaders whose samplers are not those of the loader that takes them, or have odd lengths."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from torch.utils.data import DistributedSampler, RandomSampler, Sampler

import numapin
from numapin.errors import UsageError
from tests.resuming import Numbers, interrupt

if TYPE_CHECKING:
    from collections.abc import Iterator


class Pairs(Sampler[list[int]]):
    """Batches of two samples, over another sampler, with a length that is only an estimate."""

    def __init__(self, inner: Sampler[int], length: int) -> None:
        self.inner, self.length = inner, length

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches."""
        indices = list(iter(self.inner))  # list(inner) would ask for its length
        return iter([indices[n : n + 2] for n in range(0, len(indices), 2)])

    def __len__(self) -> int:
        """Return the estimate."""
        return self.length


class WithoutLength(Sampler[int]):
    """Ten samples; whoever asks for the length gets an error."""

    def __iter__(self) -> Iterator[int]:
        """Yield the indices."""
        return iter(range(10))

    def __len__(self) -> int:
        """Fail."""
        raise RuntimeError("who asks?")


def distributed(num_samples: int = 10, num_replicas: int = 2, rank: int = 0, **order: Any) -> numapin.DataLoader[Any]:
    """Return a loader of one rank's share."""
    numbers = Numbers(num_samples)
    sampler = DistributedSampler[Any](numbers, num_replicas=num_replicas, rank=rank, **order)
    return numapin.DataLoader(numbers, 2, sampler=sampler)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_samples": 9}, "samples=9"),
        ({"num_replicas": 1, "num_samples": 5}, "num_replicas=1"),
        ({"shuffle": False}, "shuffle=False"),
        ({"seed": 7}, "seed=7"),
    ],
)
def test_another_distributed_order(changes: dict[str, Any], words: str) -> None:
    """One that draws as many batches in another order is refused. The rank may be another."""
    *_, state = interrupt(distributed, 1)
    with pytest.raises(UsageError, match=rf"; this loader has DistributedSampler\(.*{words}"):
        distributed(**changes).load_state_dict(state)
    distributed(rank=1).load_state_dict(state)


def test_replacement() -> None:
    """Samples drawn with and without replacement are other samples."""

    def loader(*, replacement: bool) -> numapin.DataLoader[Any]:
        numbers = Numbers(8)
        return numapin.DataLoader(numbers, 2, sampler=RandomSampler(numbers, replacement=replacement))

    *_, state = interrupt(lambda: loader(replacement=True), 1)
    with pytest.raises(UsageError, match=r"replacement=True\); this loader has .*replacement=False"):
        loader(replacement=False).load_state_dict(state)


def test_from_torchs_sampler_to_the_users_own() -> None:
    """And back: both draw five batches, but not the same ones."""
    *_, torchs = interrupt(lambda: numapin.DataLoader(Numbers(10), 2), 1)
    *_, users = interrupt(lambda: numapin.DataLoader(Numbers(10), batch_sampler=Pairs(WithoutLength(), 5)), 1)
    with pytest.raises(UsageError, match=r"with SequentialSampler\(.*; this loader has a sampler of your own"):
        numapin.DataLoader(Numbers(10), batch_sampler=Pairs(WithoutLength(), 5)).load_state_dict(torchs)
    with pytest.raises(UsageError, match=r"with a sampler of your own; this loader has SequentialSampler\("):
        numapin.DataLoader(Numbers(10), 2).load_state_dict(users)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_estimated_length(num_workers: int) -> None:
    """The length of a user's sampler may be too small: a state from beyond it is continued. No inner one counts."""

    def make() -> numapin.DataLoader[Any]:
        return numapin.DataLoader(Numbers(10), batch_sampler=Pairs(WithoutLength(), 3), num_workers=num_workers)

    first, rest, state = interrupt(make, 4)
    loader = make()
    loader.load_state_dict(state)
    assert [number for batch in loader for number in batch.tolist()] == rest == [8, 9]
    assert len(first) == 8
