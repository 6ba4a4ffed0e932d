"""Each batch belongs to its holder: the loader never writes to it, and nothing else sees the holder's writes."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from tests.contract.datasets import Made, Rows, row
from tests.contract.watching import TORCH, LoaderClass, pass_first_batches, reused

SIZE = 240  # rows; they make many more batches than a loop holds at a time
DATASET = Rows(SIZE, delay_s=0.0005)


def through_slots(loader: Any) -> Iterator[tuple[int, Any]]:
    """Yield the numbers and batches of an epoch, from the first one that came in a slot."""
    iterator = iter(loader)
    skipped = len(pass_first_batches(loader, iterator, num_hits=1))
    yield from enumerate(iterator, skipped)


def expected(number: int) -> torch.Tensor:
    return torch.stack([row(4 * number + i) for i in range(4)])


def tensor_over(array: Any, _index: int) -> torch.Tensor:
    return torch.from_numpy(array)


def test_samples_over_one_array_edited_in_place(loader_class: LoaderClass) -> None:
    """Two tensors made of one array are two, as with torch: a sample may be in a batch twice and be edited."""
    edited = []
    for kind in (loader_class, TORCH):
        dataset = Made(partial(tensor_over, np.zeros(5000)), 8)
        loader = kind(dataset, batch_size=2, num_workers=1, collate_fn=list)
        edited.append([[float(sample.add_(1).sum()) for sample in batch] for batch in loader])
    assert edited[0] == edited[1]


class Cycle:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.me = tensor, self


class Saved:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.weight = torch.ones(4, 64, 64, requires_grad=True)
        self.sum = (self.weight * tensor).sum()

    def values(self) -> torch.Tensor:
        self.sum.backward(retain_graph=True)
        gradient = self.weight.grad
        assert gradient is not None
        self.weight.grad = None
        return gradient


KEPT: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "tensor": (lambda tensor: tensor, lambda kept: kept),
    "numpy-view": (lambda tensor: tensor.numpy()[1:, ::2].T, torch.from_numpy),
    "memoryview": (lambda tensor: tensor.numpy().data, lambda kept: torch.frombuffer(kept, dtype=torch.float32)),
    "row": (lambda tensor: tensor[2, 5:], lambda kept: kept),
    "storage": (
        lambda tensor: (tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()),
        lambda kept: torch.empty(0).set_(*kept),
    ),
    "dlpack": (torch.utils.dlpack.from_dlpack, lambda kept: kept),
    "saved-for-backward": (Saved, Saved.values),
    "cycle": (Cycle, lambda kept: kept.tensor),
    "unbound": (lambda tensor: tensor.unbind()[3], lambda kept: kept),
}


def test_whatever_keeps_a_batch(loader_class: LoaderClass) -> None:
    """A batch lives as long as anything refers to its memory; all others are dropped while the epoch continues."""
    dataset = Rows(4 * 4 * 4 * len(KEPT), delay_s=0.0002)
    held: dict[str, list[tuple[int, Any]]] = {way: [] for way in KEPT}
    loader = loader_class(dataset, batch_size=4, num_workers=2)
    for number, batch in through_slots(loader):
        if number % 4 == 3:
            way = list(KEPT)[number // 4 % len(KEPT)]
            held[way].append((number, KEPT[way][0](batch["x"])))
        del batch
    gc.collect()
    through = reused(loader)
    assert through is None or through > 4 * len(KEPT), loader.stats()  # type: ignore[attr-defined]
    for way, (keep, values) in KEPT.items():
        assert len(held[way]) >= 3
        for number, kept in held[way]:
            assert torch.equal(values(kept), values(keep(expected(number)))), (way, number)


@pytest.mark.parametrize("persistent", [False, True])
def test_batches_outlive_everything(loader_class: LoaderClass, persistent: bool) -> None:  # noqa: FBT001
    """Batches stay correct during later epochs and after iterator and loader are gone; an edit is in one batch only."""
    loader: Any = loader_class(DATASET, batch_size=4, num_workers=2, persistent_workers=persistent)
    held = dict(itertools.islice(through_slots(loader), 20))
    list(loader)
    numpys = {number: batch["x"].numpy() for number, batch in through_slots(loader)}
    if hasattr(loader, "close"):
        loader.close()
    del loader
    gc.collect()
    again = list(loader_class(DATASET, batch_size=4, num_workers=2))
    for number, batch in held.items():
        assert torch.equal(batch["x"], expected(number)), number
        batch["x"].add_(number)
    for number, batch in held.items():
        assert torch.equal(batch["x"], expected(number) + number), number
    for number, array in numpys.items():
        assert torch.equal(torch.from_numpy(array), expected(number)), number
    assert len(again) == SIZE // 4


def test_what_is_made_of_a_batch(loader_class: LoaderClass) -> None:
    """Copies, pickles and files of a tensor contain only its own bytes, as with torch; flags and methods work too."""
    sizes: dict[str, tuple[int, ...]] = {}
    for name, kind in (("ours", loader_class), ("torch's", TORCH)):
        number, batch = list(through_slots(kind(DATASET, batch_size=4, num_workers=1)))[20]
        tensor = batch["x"]
        file = io.BytesIO()
        torch.save(tensor, file)
        copies = (copy.deepcopy(tensor), pickle.loads(pickle.dumps(tensor)), torch.load(io.BytesIO(file.getvalue())))  # noqa: S301
        assert all(torch.equal(made, expected(number)) for made in copies)
        sizes[name] = tensor.untyped_storage().nbytes(), len(file.getvalue()) >> 10, len(pickle.dumps(tensor)) >> 10
        assert tensor.requires_grad_().sum().backward() is None
        assert tensor.grad.shape == tensor.shape
        assert tensor.detach().resize_(2, 5).shape == (2, 5)
        assert torch.equal(tensor.detach().share_memory_()[1], expected(number)[1])
    assert sizes["ours"] == sizes["torch's"]
