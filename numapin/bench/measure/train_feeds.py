"""The loaders of `bench train`, each feeding a rank's training loop with batches on its device. Edge.

Comes in: a `Trainer`, and the number of workers and of batches ahead. Goes out: a `Feed`. Samples are read in order, so
that no loader pays for shuffling. Every loader has the same number of workers, processes or threads.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

import numapin
from numapin.bench.cases.train import BASELINE, CEILING, NUM_IMAGES, OURS
from numapin.bench.measure.train_data import map_parts, to_device

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from numapin.bench.measure.train_data import TrainBatch, TrainSet
    from numapin.bench.measure.train_step import Trainer
    from numapin.data.stats import Stats


@dataclass(frozen=True, slots=True, kw_only=True)
class Feed:
    """A running loader: `take` returns a batch on the device; `stats` returns numapin's statistics, else None.

    `check` raises ValueError if a batch is not what the dataset holds.
    """

    take: Callable[[], TrainBatch]
    check: Callable[[TrainBatch], None]
    stats: Callable[[], Stats | None] = lambda: None


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """The workers of each rank, and the batches that each of them prepares ahead."""

    number: int
    prefetch: int

    @property
    def num_ahead(self) -> int:
        """The batches ahead in all."""
        return self.number * self.prefetch


@contextmanager
def _ceiling(trainer: Trainer, _workers: Workers) -> Iterator[Feed]:
    """Feed the distinct batches, already on the device, again and again."""
    yield Feed(take=cycle(trainer.batches).__next__, check=trainer.samples.require_intact)


@contextmanager
def _torch(trainer: Trainer, workers: Workers) -> Iterator[Feed]:
    """Feed the batches of torch's loader: its thread pins them, the loop copies them with non_blocking=True."""
    device = trainer.device
    batches = iter(DataLoader(**_arguments(trainer, workers), pin_memory=device.type == "cuda"))
    try:
        yield Feed(take=lambda: to_device(next(batches), device), check=trainer.samples.require_intact)
    finally:
        batches._shutdown_workers()  # type: ignore[attr-defined] # noqa: SLF001 - torch has no public method


@contextmanager
def _numapin(trainer: Trainer, workers: Workers) -> Iterator[Feed]:
    """Feed the batches of numapin's loader, which are already on the device."""
    with numapin.DataLoader(**_arguments(trainer, workers), device=trainer.device) as loader:
        yield Feed(take=iter(loader).__next__, check=trainer.samples.require_intact, stats=loader.stats)


def _arguments(trainer: Trainer, workers: Workers) -> dict[str, Any]:
    """Return the arguments that torch's loader and ours share."""
    return {
        "dataset": trainer.samples,
        "collate_fn": trainer.samples.collate,
        "batch_size": trainer.case.batch_size,
        "num_workers": workers.number,
        "prefetch_factor": workers.prefetch,
        "persistent_workers": True,  # numapin's close() ends them; a measurement uses only one iterator
        "multiprocessing_context": "fork",  # workers inherit the samples
    }


class _MakeBatch:
    """A function that makes a batch from a list of indices, as a worker does."""

    def __init__(self, samples: TrainSet) -> None:
        self._samples, self._collate = samples, samples.collate

    def __call__(self, indices: Sequence[int]) -> TrainBatch:
        """Collate the samples."""
        return self._collate([self._samples[index] for index in indices])


@contextmanager
def _spdl(trainer: Trainer, workers: Workers) -> Iterator[Feed]:
    """Feed the batches of SPDL's pipeline: threads make them, one more thread pins and copies them."""
    builder = import_module("spdl.pipeline").PipelineBuilder()
    indices = BatchSampler(SequentialSampler(trainer.samples), trainer.case.batch_size, drop_last=True)
    builder = builder.add_source(indices).pipe(_MakeBatch(trainer.samples), concurrency=workers.number)
    with ExitStack() as stack:
        if trainer.device.type == "cuda":
            builder = builder.pipe(_on_own_stream(trainer.device), concurrency=1)
        built = builder.add_sink(workers.num_ahead).build(num_threads=workers.number + 1)
        stack.enter_context(built.auto_stop())
        yield Feed(take=built.get_iterator().__next__, check=trainer.samples.require_intact)


def _on_own_stream(device: torch.device) -> Callable[[TrainBatch], TrainBatch]:
    consumer, stream = torch.cuda.current_stream(device), torch.cuda.Stream(device)

    def transfer(batch: TrainBatch) -> TrainBatch:
        with torch.cuda.stream(stream):
            moved = to_device(map_parts(batch, torch.Tensor.pin_memory), device)
        stream.synchronize()
        map_parts(moved, lambda part: _recorded(part, consumer))
        return moved

    return transfer


def _recorded(part: torch.Tensor, stream: torch.cuda.Stream) -> torch.Tensor:
    """Tell the allocator that a stream other than the one that made the tensor uses it."""
    part.record_stream(stream)
    return part


@contextmanager
def _dali(trainer: Trainer, workers: Workers) -> Iterator[Feed]:
    """Feed the batches of DALI's pipeline: it reads the same files, and decodes and crops them on the GPU."""
    fn, types = import_module("nvidia.dali.fn"), import_module("nvidia.dali.types")
    pipeline = import_module("nvidia.dali.pipeline").Pipeline(
        batch_size=trainer.case.batch_size,
        num_threads=workers.number,
        device_id=trainer.device.index,
        prefetch_queue_depth=workers.prefetch,
    )
    on_gpu = trainer.device.type == "cuda"
    with pipeline:
        folder, (_, height, width) = Path(trainer.samples.folder), trainer.case.shape
        files = [str(folder / f"{number}.jpg") for number in range(NUM_IMAGES)]
        encoded, numbers = fn.readers.file(files=files, labels=list(range(NUM_IMAGES)), name="files")
        images = fn.decoders.image(encoded, device="mixed" if on_gpu else "cpu", output_type=types.RGB)
        images = fn.crop_mirror_normalize(
            images, dtype=types.UINT8, output_layout="CHW", crop=(height, width), mean=[0.0], std=[1.0]
        )
        pipeline.set_outputs(images, numbers)
    iterator = import_module("nvidia.dali.plugin.pytorch").DALIGenericIterator([pipeline], ["images", "numbers"])

    def take() -> TrainBatch:
        (batch,) = next(iterator)
        numbers = batch["numbers"].flatten().long()
        return [batch["images"].to(trainer.device), numbers.to(trainer.device, non_blocking=True)]

    yield Feed(take=take, check=trainer.samples.require_shape)  # its decoder rounds differently


FEEDS: Final[dict[str, Callable[[Trainer, Workers], AbstractContextManager[Feed]]]] = {
    BASELINE: _torch,
    OURS: _numapin,
    "spdl": _spdl,
    "dali": _dali,
    CEILING: _ceiling,
}
"""The loaders by name."""
