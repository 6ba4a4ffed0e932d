"""cast=: floating-point tensors arrive narrower, with the values that torch's loader and `.to` give."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_map
from torch.utils.data import default_collate

import numapin
from tests.contract.datasets import Made
from tests.contract.watching import TORCH

BF16 = torch.bfloat16
LARGE = (1 << 20) + 3  # two of them are stacked on threads


def sample(index: int, length: int = 1000) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(index)
    bits = torch.randint(-(2**31), 2**31 - 1, (length,), dtype=torch.int32, generator=generator)
    return {"x": bits.view(torch.float32), "y": index / 3, "n": index}


VALUES = Made(sample, 8)


def listed(samples: Sequence[Any]) -> Any:
    whole = torch.stack([sample["x"] for sample in samples])
    return [sample["x"] for sample in samples], whole, whole[1:], whole.T, np.ones((600, 2), np.float32)


def unusual(samples: Sequence[Any]) -> Any:
    whole = torch.stack([sample["x"] for sample in samples]).nan_to_num(0, 0, 0)
    return torch.nn.Parameter(whole), whole.relu().to_sparse(), whole[:0], whole.clone().requires_grad_()


class Named(torch.Tensor):
    """A subclass, whose tensors are cast one by one."""


def subclassed(samples: Sequence[Any]) -> Any:
    return [(sample["x"] * factor).as_subclass(Named) for sample in samples for factor in (1, 2, 4)]


def buffered(samples: Sequence[Any]) -> Any:
    narrow = numapin.batch_buffer((len(samples), 1000), BF16)
    wide = numapin.batch_buffer((len(samples), 1000))
    for number, sample in enumerate(samples):
        narrow[number], wide[number] = sample["x"], sample["x"]
    return narrow, wide


def each(samples: list[Any]) -> Any:
    return [collate(samples) for collate in (default_collate, listed, unusual, subclassed, buffered)]


def bits(thing: Any) -> Any:
    """Return a part of a batch, but a bfloat16 tensor as integers, since NaN differs from itself."""
    if not isinstance(thing, torch.Tensor):
        return thing
    dense = thing.detach().to_dense()
    plain = dense.view(torch.int16) if dense.dtype is BF16 else dense
    return [thing.layout is torch.strided, thing.requires_grad, plain]


def narrowed(thing: Any) -> Any:
    is_cast = isinstance(thing, torch.Tensor) and thing.dtype in (torch.float32, torch.float64)
    return thing.detach().to(BF16).requires_grad_(thing.requires_grad) if is_cast else thing


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's own, for every sparse tensor that it sends
@pytest.mark.parametrize("options", [{}, {"num_workers": 0}, {"pinned_budget": 0}], ids=["", "no-workers", "no-slots"])
def test_values(own_class: Any, options: dict[str, Any]) -> None:
    """Every tensor has the bits that `.to(torch.bfloat16)` gives; integers and numpy arrays stay as they are."""
    arguments: dict[str, Any] = {"dataset": VALUES, "batch_size": 2, "num_workers": 1, "collate_fn": each}
    theirs = tree_map(lambda part: bits(narrowed(part)), list(TORCH(**arguments | {"num_workers": 0})))
    ours = tree_map(bits, list(own_class(**arguments | options, cast=BF16)))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_large_batches_are_cast_while_they_are_stacked(own_class: Any) -> None:
    """A batch that is stacked on threads has no copy in float32."""
    forbid = partial(setattr, torch, "stack")  # to the worker's id, which cannot be called
    loader = own_class(Made(partial(sample, length=LARGE), 4), 2, num_workers=1, cast=BF16, worker_init_fn=forbid)
    for number, batch in enumerate(loader):
        expected = sample(2 * number + 1, LARGE)["x"].to(BF16)
        assert torch.equal(batch["x"][1].view(torch.int16), expected.view(torch.int16))


def test_a_mapping_with_a_target_that_is_a_source(own_class: Any) -> None:
    """Each tensor is cast once: float64 to float32, although float32 itself becomes bfloat16."""
    casts = {torch.float64: torch.float32, torch.float32: BF16}
    thirds = torch.arange(2000, dtype=torch.float64).reshape(2, 1000) / 3
    data = torch.utils.data.TensorDataset(thirds.float(), thirds)
    for options in ({"num_workers": 1}, {"num_workers": 1, "pinned_budget": 0}, {"num_workers": 0}):
        narrow, wide = next(iter(own_class(data, 2, cast=casts, **options)))
        assert torch.equal(narrow, thirds.float().to(BF16))
        assert torch.equal(wide, thirds.float())
