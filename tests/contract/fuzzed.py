"""Random batches, checked when they arrive: `python -m tests.contract.fuzzed --batches 100000 --seed 1`.

A batch is made from its number alone, in the worker and once more in the rank, which compares the two: containers,
values, dtypes, shapes, strides, and which tensors share memory. An epoch has random numbers of workers and of batches
ahead, keeps a few batches and compares them again later, and may end early.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np
import torch

import numapin
from tests.contract.datasets import Made
from tests.contract.describe import assert_same, describe
from tests.contract.zoo import Pair

_DTYPES: Final = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
)
_SIZES: Final = (0, 1, 3, 64, 1000, 1024, 4096, 20_000, 100_000)
"""Numbers of elements: on both sides of the size from which tensors travel in slots, and of a page."""
_VALUES: Final = torch.arange(max(_SIZES) + 100) % 101
_LAYOUTS: Final[tuple[Callable[[torch.Tensor], torch.Tensor], ...]] = (
    *(lambda tensor: tensor, lambda tensor: tensor),
    lambda tensor: _as_matrix(tensor),  # noqa: PLW0108 - defined below
    lambda tensor: _as_matrix(tensor).t(),
    lambda tensor: tensor[::3],
    lambda tensor: tensor[1:],
)
_MAX_DEPTH: Final = 3
_EPOCH: Final = 400


class Batch:
    """The random batch of a number. What it has made before may come again, whole or as a view of the same memory."""

    def __init__(self, seed: int, number: int) -> None:
        self._random = random.Random(seed << 40 | number)  # noqa: S311 - no secret
        self._made: list[torch.Tensor] = []

    def part(self, depth: int = 0) -> Any:
        choices: list[Callable[[], Any]] = [self._tensor] * 4 + [self._again, self._array, self._plain]
        if depth < _MAX_DEPTH:
            choices += [partial(self._container, depth)] * 6
        return self._random.choice(choices)()

    def _container(self, depth: int) -> Any:
        parts = [self.part(depth + 1) for _ in range(self._random.choice((0, 1, 2, 2, 3, 5)))]
        named = {f"k{index}": each for index, each in enumerate(parts)}
        return self._random.choice(
            (
                lambda: parts,
                lambda: tuple(parts),
                lambda: named,
                lambda: OrderedDict(named),
                lambda: Pair(parts, self.part(depth + 1)),
                lambda: dict(enumerate(parts)),
            )
        )()

    def _tensor(self) -> torch.Tensor:
        size, dtype = self._random.choice(_SIZES), self._random.choice(_DTYPES)
        start = self._random.randrange(100)
        tensor = _VALUES[start : start + size].to(dtype, copy=True)
        tensor = self._random.choice(_LAYOUTS)(tensor)
        self._made.append(tensor)
        return tensor

    def _again(self) -> torch.Tensor:
        if not self._made:
            return self._tensor()
        tensor = self._random.choice(self._made)
        if self._random.random() < 0.5 or tensor.dim() == 0 or len(tensor) < 2:
            return tensor
        return tensor[self._random.randrange(len(tensor)) :]

    def _array(self) -> np.ndarray[Any, Any]:
        size = self._random.choice(_SIZES[1:])
        return np.arange(size, dtype=self._random.choice(("<f4", "<i8", "u1", "<c8")))

    def _plain(self) -> Any:
        return self._random.choice((None, True, 7, 2.5, "text", "ä" * 300, b"bytes" * 50, 1 << 70, float("inf")))


def _as_matrix(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1, 4) if tensor.numel() % 4 == 0 else tensor


def make(seed: int, number: int) -> Any:
    """Return a batch, which is the same in every process."""
    return Batch(seed, number).part()


def run_epoch(seed: int, first: int, most: int) -> int:
    choose = random.Random(seed << 40 | first)  # noqa: S311 - no secret
    length = min(most, choose.choice((1, 20, _EPOCH)))
    loader = numapin.DataLoader(
        Made(partial(_from, seed, first), length),
        batch_size=None,
        collate_fn=_same,
        num_workers=choose.choice((1, 2, 3)),
        prefetch_factor=choose.choice((1, 2, 4)),
    )
    end = length if choose.random() < 0.7 else choose.randrange(1, length + 1)
    kept: deque[tuple[int, Any]] = deque(maxlen=choose.choice((1, 1, 3, 10)))
    num_batches = 0
    for number, batch in enumerate(loader, first):
        expected = describe(make(seed, number))
        assert_same(describe(batch), expected, f"batch {number}")
        kept.append((number, batch))
        num_batches += 1
        if num_batches == end:
            break
    for number, batch in kept:
        assert_same(describe(batch), describe(make(seed, number)), f"batch {number}, later")
    return num_batches


def _from(seed: int, first: int, index: int) -> Any:
    return make(seed, first + index)


def _same(batch: Any) -> Any:
    return batch


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--batches", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "This DataLoader will create")  # more workers than CPUs
    num_batches, num_epochs, began = 0, 0, time.monotonic()
    while num_batches < options.batches:
        num_batches += run_epoch(options.seed, num_batches, options.batches - num_batches)
        num_epochs += 1
    seconds = time.monotonic() - began
    sys.stdout.write(
        f"{num_batches:,} batches in {num_epochs} epochs, seed {options.seed}: all right, {seconds:.0f} s\n"
    )


if __name__ == "__main__":
    main()
