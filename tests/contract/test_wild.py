"""Data as people have it: batches, and what users change in torch, work as with torch's loader."""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate
from torch.utils.data._utils import collate

from tests.contract.datasets import Made, Raise, row
from tests.contract.describe import assert_same_batches, describe
from tests.contract.seam import Miss
from tests.contract.watching import TORCH, LoaderClass, assert_as_torch
from tests.contract.zoo import pad, ragged
from tests.waiting import wait_until

NUM_BATCHES = 12  # more than there are slots, so that some travel in a free one
SHARED = row(5).share_memory_()
SMALL = SHARED[0, :9]


def fixed(index: int) -> tuple[torch.Tensor, ...]:
    return torch.full((64, 64), float(index), device="cpu"), torch.full((9,), float(index), device="cpu")


def refuse_slots(_worker: int) -> None:
    os.memfd_create = Raise(OSError, (errno.ENOMEM, "no memory"))  # in this worker only


def stats_of(loader: Any) -> Any:
    for _ in loader:
        pass
    return loader.stats()


def test_users_collate_function_for_tensors(own_class: LoaderClass, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's function for tensors is called, and not numapin's."""
    monkeypatch.setitem(collate.default_collate_fn_map, torch.Tensor, pad)
    theirs = assert_as_torch(own_class, lambda: {"dataset": Made(ragged), "batch_size": 2, "num_workers": 1})
    assert len(theirs.epochs[0]) == NUM_BATCHES
    assert "Failure" not in repr(theirs)


def test_users_collate_function_that_calls_torchs_own(own_class: LoaderClass, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that wraps torch's own still puts batches into slots."""
    torchs_own = collate.collate_tensor_fn

    def doubled(batch: Any, **options: Any) -> Any:
        return torchs_own(batch, **options).mul_(2)

    monkeypatch.setitem(collate.default_collate_fn_map, torch.Tensor, doubled)
    assert_as_torch(own_class, lambda: {"dataset": Made(row), "batch_size": 2, "num_workers": 1})
    assert stats_of(own_class(Made(row), batch_size=2, num_workers=1)).hits > 0


@pytest.mark.parametrize(
    ("make", "options", "reason"),
    [
        (lambda index: (row(index), SHARED), {}, Miss.SHARED),
        (lambda index: (row(index), row(index).requires_grad_()), {}, Miss.UNSUPPORTED),
        (row, {"pinned_budget": 0}, Miss.NO_SLOTS),
        # although torch's collation puts batches into shared memory
        (row, {"pinned_budget": 0, "collate_fn": default_collate}, Miss.NO_SLOTS),
        (row, {"worker_init_fn": refuse_slots, "collate_fn": default_collate}, Miss.NO_MEMORY),
        (lambda index: (row(index), SMALL, SMALL.clone().requires_grad_(), SMALL.to("meta")), {}, None),
    ],
)
def test_hits(own_class: LoaderClass, make: Any, options: dict[str, Any], reason: Miss | None) -> None:
    """`hits` counts only batches whose large tensors all traveled in slots; small tensors may travel otherwise."""
    stats = stats_of(own_class(Made(make), 2, num_workers=1, **{"collate_fn": list, **options}))
    assert stats.misses == ({reason: NUM_BATCHES} if reason else {})
    assert (stats.hits == 0) == (reason is not None)
    assert reason or stats.notes == ()


@pytest.mark.parametrize("collate_fn", [default_collate, list])
def test_another_default_device(own_class: LoaderClass, collate_fn: Any) -> None:
    """With another default device, in the rank and in its workers, batches made on the host stay there."""
    seen = []
    for kind in (own_class, TORCH):
        options: dict[str, Any] = {"num_workers": 1, "worker_init_fn": lambda _: torch.set_default_device("meta")}
        # torch's own __init__ of an iterator fails under "meta"
        iterator = iter(kind(Made(fixed), batch_size=2, collate_fn=collate_fn, **options))
        torch.set_default_device("meta")
        try:
            batches = list(iterator)
        finally:
            torch.set_default_device(None)
        seen.append([describe(batch) for batch in batches])
    assert len(seen[1]) == NUM_BATCHES
    assert_same_batches(*seen)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_a_loop_without_gradients(own_class: LoaderClass, mode: Any) -> None:
    """Inside inference_mode or no_grad, batches are what torch's are, and can be edited in place."""
    found: list[Any] = []
    for kind in (own_class, TORCH):
        with mode():
            batches = list(kind(Made(row), batch_size=2, num_workers=1))
            found.append([(batch.is_inference(), batch.mul_(2).sum().item()) for batch in batches])
    assert found[0] == found[1]


@pytest.mark.parametrize("when", ["before", "after", "properties"])
def test_attributes_of_a_subclass(own_class: LoaderClass, when: str) -> None:
    """Attributes with the names of numapin's stay the subclass's, set before or after init; properties, too."""
    names = ("_path", "_options", "_home", "stats", "close", "device", "node", "strict", "pinned_budget")
    theirs = {name: f"the user's {name}" for name in names}

    class Own(own_class):  # type: ignore[valid-type, misc]
        def __init__(self, dataset: Any, **rest: Any) -> None:
            for each in ("before", "after"):
                if each == "after":
                    super().__init__(dataset, **rest)
                for name in names if each == when else ():
                    setattr(self, name, theirs[name])

    if when == "properties":
        for name, value in theirs.items():
            setattr(Own, name, property(lambda _, value=value: value))  # type: ignore[misc]
    loader = Own(Made(row), batch_size=2, num_workers=1)
    assert_same_batches([describe(batch) for batch in loader], [describe(b) for b in TORCH(Made(row), 2)])
    assert {name: getattr(loader, name) for name in names} == theirs


def test_subclasses_that_compare_equal(own_class: LoaderClass) -> None:
    """Loaders that compare equal, and have no hash, have their own counts."""

    class Same(own_class):  # type: ignore[valid-type, misc]
        __hash__ = None  # type: ignore[assignment]

        def __eq__(self, other: object) -> bool:
            return True

    first, second = (Same(Made(row), batch_size=2, num_workers=1) for _ in range(2))
    assert len(list(first)) == NUM_BATCHES
    assert (first.stats().batches, second.stats().batches) == (NUM_BATCHES, 0)


def test_poison_spares_what_a_worker_keeps(own_class: LoaderClass, monkeypatch: pytest.MonkeyPatch) -> None:
    """With NUMAPIN_POISON=1, what a collate function keeps in its worker is not overwritten."""
    monkeypatch.setenv("NUMAPIN_POISON", "1")

    def sums(kind: LoaderClass) -> list[Any]:
        kept: list[torch.Tensor] = []

        def collate(samples: list[torch.Tensor]) -> tuple[torch.Tensor, list[float]]:
            kept.append(default_collate(samples))
            return kept[-1], [float(batch.sum()) for batch in kept]

        return [told for _, told in kind(Made(row), batch_size=2, num_workers=1, collate_fn=collate)]

    assert sums(own_class) == sums(TORCH)


def test_poison_overwrites_the_rest(own_class: LoaderClass, monkeypatch: pytest.MonkeyPatch) -> None:
    """With NUMAPIN_POISON=1, memory that is read after its release has other values."""
    monkeypatch.setenv("NUMAPIN_POISON", "1")
    iterator: Any = iter(own_class(Made(row), batch_size=2, num_workers=1))
    for _ in range(NUM_BATCHES - 2):
        next(iterator)
    last_but_one = next(iterator)
    first_byte = ctypes.c_ubyte.from_address(last_but_one.data_ptr())
    assert first_byte.value != 0xA5
    del last_but_one
    next(iterator)  # and the workers have nothing left to write
    assert wait_until(lambda: iterator._lane.reclaim() or first_byte.value == 0xA5, limit_s=60)
