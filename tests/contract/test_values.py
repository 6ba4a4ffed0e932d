"""The same batches, order, random draws and warnings as torch's, for a grid of arguments and datasets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils.data import ChainDataset, DistributedSampler, TensorDataset, WeightedRandomSampler
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.map import SequenceWrapper

from tests.contract.datasets import CountingSampler, ListedRows, Made, Rows, Stream, row
from tests.contract.watching import TORCH, LoaderClass, assert_as_torch

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # three workers, two cores


@dataclass(frozen=True, slots=True)
class Fresh:
    """An argument that has state and is therefore made anew for each loader."""

    make: Callable[[], object]


def case(**arguments: Any) -> dict[str, Any]:
    return {"epochs": (None,), "ordered": True, **arguments}


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def summed(rows: list[Any]) -> tuple[torch.Tensor, int]:
    return torch.stack([item["x"] for item in rows]).sum(dim=0), len(rows)


def growing(index: int) -> torch.Tensor:
    return row(index, (1024 * (1 + index // 8 % 6),))


SLOW = Rows(delay_s=0.002)  # slow enough for slots to be reused before the end
CASES = {
    # large enough for several threads; one sample has fewer elements than there are threads
    **{
        f"large-by-{n}": case(
            dataset=[torch.full((1 << 20,), float(i)) for i in range(6)] * 3, batch_size=n, num_workers=1
        )
        for n in (1, 5)
    },
    "zero-tensors": case(
        dataset=[torch.ones(1 << 20), torch._efficientzerotensor(1 << 20)] * 9,
        batch_size=2,
        num_workers=1,
        multiprocessing_context="fork",  # the default of Python 3.14 pickles the dataset, and torch crashes
    ),
    **{f"plain-{n}": case(dataset=SLOW, batch_size=5, num_workers=n) for n in (0, 3)},
    "drop-last": case(dataset=Rows(), batch_size=5, drop_last=True, num_workers=2),
    "shuffle": case(dataset=Rows(), batch_size=4, shuffle=True, num_workers=2),
    "shuffle-generator": case(
        dataset=SLOW, batch_size=4, shuffle=True, generator=Fresh(seeded), num_workers=3, epochs=(None, None)
    ),
    "prefetch": case(dataset=SLOW, batch_size=3, prefetch_factor=4, num_workers=1, timeout=30),
    **{f"unbatched-{n}": case(dataset=SLOW, batch_size=None, num_workers=n) for n in (0, 2)},
    **{f"stream-{n}": case(dataset=Stream(21, 4, 11), batch_size=4, num_workers=n) for n in (0, 3)},
    "stream-drop-last": case(dataset=Stream(21, 4), batch_size=4, drop_last=True, num_workers=2),
    "stream-unbatched": case(dataset=Stream(9, 0, 5), batch_size=None, num_workers=3),
    "stream-length-true": case(dataset=Stream(20, 20, claims=40), batch_size=4, num_workers=2),
    **{f"stream-length-false-{n}": case(dataset=Stream(9, 9, claims=6), batch_size=2, num_workers=n) for n in (0, 2)},
    "batch-sampler": case(dataset=SLOW, batch_sampler=[[0, 1], [5], [7, 6, 5, 4], [2] * 9] * 4, num_workers=2),
    "sampler-weighted": case(
        dataset=SLOW,
        batch_size=4,
        sampler=Fresh(lambda: WeightedRandomSampler([0.1, 0.9] * 24, 40, generator=seeded())),
        num_workers=2,
    ),
    "sampler-distributed": case(
        dataset=SLOW,
        batch_size=4,
        sampler=Fresh(lambda: DistributedSampler(SLOW, 2, 1)),
        num_workers=2,
        epochs=(None, None),
    ),
    "getitems": case(dataset=ListedRows(delay_s=0.001), batch_size=4, num_workers=2),
    "collate": case(dataset=SLOW, batch_size=4, collate_fn=summed, num_workers=2),
    "growing-shuffled": case(
        dataset=Made(growing, 96, 0.004), batch_size=1, shuffle=True, generator=Fresh(seeded), num_workers=2
    ),
    "tensors": case(dataset=TensorDataset(torch.rand(40, 32, 64), torch.arange(40)), batch_size=6, num_workers=2),
    "chain": case(dataset=ChainDataset([Stream(3, 4), Stream(5, 2)]), batch_size=3, num_workers=2),
    "empty": case(dataset=Rows(0), batch_size=2, num_workers=2),
    "pin-memory": case(dataset=SLOW, batch_size=4, num_workers=2, pin_memory=True),
    "abandoned": case(dataset=SLOW, batch_size=2, num_workers=2, shuffle=True, epochs=(3, None, 0, None)),
    "persistent": case(
        dataset=SLOW, batch_size=3, shuffle=True, num_workers=2, persistent_workers=True, epochs=(None, 4, None)
    ),
    "persistent-stream": case(
        dataset=Stream(21, 4), batch_size=3, num_workers=2, persistent_workers=True, epochs=(None, 2, None)
    ),
    "any-order": case(dataset=SLOW, batch_size=3, num_workers=3, in_order=False, ordered=False),
    "any-order-stream": case(dataset=Stream(21, 4), batch_size=3, num_workers=2, in_order=False, ordered=False),
    "datapipe-iterable": case(
        dataset=Fresh(lambda: IterableWrapper([row(i) for i in range(40)]).shuffle().sharding_filter()),
        batch_size=3,
        shuffle=True,
        num_workers=2,
        epochs=(None, None),
    ),
    "datapipe-map": case(
        dataset=Fresh(lambda: SequenceWrapper([row(i) for i in range(20)])), batch_size=3, num_workers=2
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_same_batches_as_torch(loader_class: LoaderClass, name: str) -> None:
    """Batches, their order and number, warnings, and the state of every generator after each step equal torch's."""
    chosen = dict(CASES[name])
    epochs, ordered = chosen.pop("epochs"), chosen.pop("ordered")

    def arguments() -> dict[str, Any]:
        return {key: value.make() if isinstance(value, Fresh) else value for key, value in chosen.items()}

    theirs = assert_as_torch(loader_class, arguments, epochs, ordered=ordered)
    assert any(theirs.epochs) or name == "empty", "this case compares nothing"
    assert ("was reported to be 6" in repr(theirs.warnings)) == ("length-false" in name)


@pytest.mark.parametrize(("prefetch", "workers"), [(1, 2), (3, 2), (2, 3)])
def test_the_same_number_of_batches_ahead(loader_class: LoaderClass, prefetch: int, workers: int) -> None:
    """The sampler is asked for prefetch_factor * num_workers batches at once, then for one per batch taken."""

    def asked(kind: LoaderClass) -> list[int]:
        sampler = CountingSampler(40)
        loader = kind(Rows(), batch_size=2, sampler=sampler, num_workers=workers, prefetch_factor=prefetch)
        return [sampler.drawn for _ in loader]

    ours, theirs = asked(loader_class), asked(TORCH)
    assert ours == theirs
    assert ours[0] == 2 * (prefetch * workers + 1)
