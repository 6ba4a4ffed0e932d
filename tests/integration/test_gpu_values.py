"""On a GPU: batches of every kind with device="cuda", compared with torch's loader and .to()."""

from __future__ import annotations

import io
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import numapin
from tests.contract.datasets import Made
from tests.contract.describe import describe
from tests.contract.zoo import ZOO
from tests.integration.gpu_loading import uses_gpu

pytestmark = [
    *uses_gpu,
    pytest.mark.filterwarnings("ignore"),  # torch warns about new layouts, and about gradients that are not sent
]

NOT_MOVED = frozenset({"meta", "storage", "packed-sequence"})  # the last kind has its own test
MOVED = tuple(kind for kind in ZOO if kind not in NOT_MOVED)
# Containers that torch's pin_memory supports, and others that cannot travel in slots.
CONTAINERS = (
    *("tuple", "named-tuple", "ordered-dict", "default-dict", "user-dict", "odd-keys"),
    *("numpy-of-tensor", "numpy", "text", "bytes", "none", "sparse", "leaf-with-gradient", "subclass"),
    *("expanded", "transposed", "every-other", "bfloat16", "complex64", "bool", "sixty-tensors", "zero-size"),
)
CUSTOM = ("dataclass", "frozen-dataclass", "remade")
assert ZOO.keys() >= {*CONTAINERS, *CUSTOM}  # noticed where there is no GPU, too
looked_into = pytest.mark.xfail(
    strict=True, reason="without workers only containers are looked into, with workers every type"
)


def with_lazy_views(numbers: list[float]) -> list[torch.Tensor]:
    """Return a tensor and views of it whose values are computed when they are read; collate another one, too."""
    base = torch.full((1000,), complex(numbers[0], 2))
    torch.utils.data.default_collate([base] * 3)
    return [base, base.conj(), base.conj().imag]


class OfKinds:
    def __init__(self, kinds: tuple[str, ...]) -> None:
        self.kinds = kinds

    def __call__(self, indices: list[int]) -> Any:
        return ZOO[self.kinds[indices[0] % len(self.kinds)]](indices[0])


class _TensorsApart(pickle.Pickler):
    """A pickler that takes the tensors out of a batch and collects each once in `tensors`."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors: dict[int, torch.Tensor] = {}

    def persistent_id(self, thing: object) -> int | None:
        if not isinstance(thing, torch.Tensor):
            return None
        self.tensors[id(thing)] = thing
        return id(thing)


class _TensorsBack(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: dict[int, torch.Tensor]) -> None:
        super().__init__(file)
        self.tensors = tensors

    def persistent_load(self, name: int) -> torch.Tensor:
        return self.tensors[name]


def mapped(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a batch with every tensor mapped, also inside a user's containers and types."""
    file = io.BytesIO()
    apart = _TensorsApart(file)
    apart.dump(batch)
    file.seek(0)
    return _TensorsBack(file, {name: change(tensor) for name, tensor in apart.tensors.items()}).load()


def from_device(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.device == torch.device("cuda", 0), f"{type(tensor)} of {tensor.shape} is on {tensor.device}"
    return tensor.cpu()


def different_kinds(ours: list[Any], theirs: list[Any], kinds: tuple[str, ...]) -> list[str]:
    """Return the kinds of batches that differ from torch's batches after .to("cuda"), tensor by tensor."""
    moved = [describe(mapped(mapped(batch, lambda tensor: tensor.to("cuda")), from_device)) for batch in theirs]
    pairs = zip(ours, moved, itertools.cycle(kinds), strict=False)
    assert len(ours) == len(moved)
    return [kind for batch, other, kind in pairs if describe(mapped(batch, from_device)) != other]


class TestBatchesOnTheDevice:
    """device="cuda" compared with torch's loader and .to() of each tensor."""

    def test_every_kind_kept_for_ever(self) -> None:
        """Values, dtypes and containers of three epochs, all kept, equal torch's; host arrays do not change."""
        arguments: dict[str, Any] = {"num_workers": 2, "collate_fn": OfKinds(MOVED)}
        theirs = list(torch.utils.data.DataLoader(Made(size=2 * len(MOVED), pause_s=0.001), **arguments))
        with numapin.DataLoader(Made(size=2 * len(MOVED), pause_s=0.001), device="cuda", **arguments) as loader:
            epochs = [list(loader) for _ in range(3)]
            assert loader.stats().hits >= len(MOVED), loader.stats()
        for epoch in epochs:
            assert different_kinds(epoch, theirs, MOVED) == []

    @pytest.mark.parametrize("kind", [*CONTAINERS, *(pytest.param(kind, marks=looked_into) for kind in CUSTOM)])
    def test_without_workers(self, kind: str) -> None:
        """Without workers, containers and tensors of all kinds are moved, too."""
        arguments: dict[str, Any] = {"collate_fn": OfKinds((kind,))}
        theirs = list(torch.utils.data.DataLoader(Made(size=3, pause_s=0.0), **arguments))
        ours = list(numapin.DataLoader(Made(size=3, pause_s=0.0), device="cuda", **arguments))
        assert different_kinds(ours, theirs, (kind,)) == []

    def test_conjugated_and_negated_views(self) -> None:
        """They keep their values and share memory on the device, with a batch that was collated and dropped beside."""
        numbers: Any = [1.0, 2.0, 3.0]
        with numapin.DataLoader(numbers, device="cuda", num_workers=1, collate_fn=with_lazy_views) as loader:
            for number, (base, conjugate, negated) in enumerate(loader, 1):
                assert set(base.tolist()) == {complex(number, 2)}
                assert set(conjugate.tolist()) == {complex(number, -2)}
                assert set(negated.tolist()) == {-2.0}
                base.zero_()
                assert not conjugate.any()
                assert not negated.any()
            assert loader.stats().bytes == 3 * base.nbytes

    def test_packed_sequences(self) -> None:
        """A PackedSequence is moved as by its own .to(): batch_sizes stay on the host."""
        arguments: dict[str, Any] = {"num_workers": 1, "collate_fn": OfKinds(("packed-sequence",))}
        for ours, theirs in zip(
            numapin.DataLoader(Made(size=30, pause_s=0.001), device="cuda", **arguments),
            torch.utils.data.DataLoader(Made(size=30, pause_s=0.001), **arguments),
            strict=True,
        ):
            assert ours.data.is_cuda
            assert torch.equal(ours.batch_sizes, theirs.batch_sizes)
            assert torch.equal(ours.data.cpu(), theirs.data)
