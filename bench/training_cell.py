"""One cell of `bench.training` in one rank: a network trained with batches from one loader. Edge.

Comes in: a `Trainer` and the name of a loader. Goes out: a `Run`. All ranks must measure the same cells in the same
order: DistributedDataParallel makes every step a common one, and the ranks agree on the number of steps.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, default_collate

import numapin
from numapin.bench.model import Run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from bench.models import Workload
    from numapin.data.stats import Stats

_ENDLESS: Final = 1 << 30  # samples, so that no epoch ends within a cell
_NUM_CODES: Final = 128  # the first element of a sample is its label modulo this
_PATIENCE_S: Final = 15.0  # at most, for a warm-up that does not become steady
_MIN_STRETCHES: Final = 2  # of a warm-up; the first takes batches that were already prepared
_EMPTY_HOST_CACHE: Final = ("_host_emptyCache", "_accelerator_emptyHostCache")  # by version of torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The workers of each rank, and the length of a measurement: `num_steps`, or as many as take about `seconds`."""

    num_workers: int
    prefetch: int
    warm_up_s: float
    seconds: float
    num_steps: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Feed:
    """A running loader: `take` returns a batch on the device; `stats` returns numapin's statistics, else None."""

    take: Callable[[], list[torch.Tensor]]
    stats: Callable[[], Stats | None] = lambda: None


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Consecutive steps, timed; `wait_s` is this rank's time in `take`."""

    num_steps: int
    wall_s: float
    wait_s: float

    @property
    def steps_per_s(self) -> float:
        """The number of steps per second."""
        return self.num_steps / self.wall_s


class Samples(Dataset[Any]):
    """Random samples, allocated once in this rank; workers inherit them by fork. An item is a view and a label."""

    def __init__(self, workload: Workload, *, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._samples = torch.randn(workload.num_samples, *workload.shape, generator=generator)
        self._labels = [index % workload.num_classes for index in range(workload.num_samples)]
        self._samples.flatten(1)[:, 0] = _codes(torch.tensor(self._labels))

    def __len__(self) -> int:
        """Return more samples than any cell takes."""
        return _ENDLESS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        """Return a view of a sample, which costs the worker nothing, and its label."""
        index %= len(self._labels)
        return self._samples[index], self._labels[index]


class Trainer:
    """A network on this rank's device, with its samples, trained by SGD with momentum."""

    def __init__(self, workload: Workload, device: torch.device, *, compiled: bool) -> None:
        self.workload, self.device = workload, device
        self.samples = Samples(workload, seed=dist.get_rank())
        torch.manual_seed(0)
        self._format = torch.channels_last if workload.channels_last else torch.contiguous_format
        network = workload.build(workload.num_classes).to(device)
        if workload.channels_last:
            network.to(memory_format=self._format)  # type: ignore[call-overload] # torch's types lack it
        if compiled:
            network.compile()
        self._model = DistributedDataParallel(network, device_ids=None if device.type == "cpu" else [device])
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3, momentum=0.9)

    def step(self, batch: list[torch.Tensor]) -> None:
        """Train on one batch."""
        samples, labels = batch
        if self.workload.channels_last:
            samples = samples.to(memory_format=self._format)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.workload.bf16):
            loss = nn.functional.cross_entropy(self._model(samples), labels)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()

    def batch(self) -> list[torch.Tensor]:
        """Return one batch on the device."""
        batch = default_collate([self.samples[index] for index in range(self.workload.batch_size)])
        return _on_device(batch, self.device)


def measure(trainer: Trainer, loader: str, *, repeat: int, timing: Timing) -> Run:
    """Start a loader, warm up, measure, and stop it with all of its workers.

    Raises:
        RuntimeError: A batch differs from the dataset, or a worker is left over.
    """
    started = time.perf_counter()
    with LOADERS[loader](trainer, timing) as feed:
        _require_intact(feed.take(), trainer.workload)
        first_s = time.perf_counter() - started
        warm = _warm_up(trainer, feed, timing)
        before = feed.stats()
        window = _window(trainer, feed, timing.num_steps or max(1, round(timing.seconds * warm.steps_per_s)))
        after = feed.stats()
        _require_intact(feed.take(), trainer.workload)
        measured = time.perf_counter()
    _require_no_workers(loader)
    _free_caches(trainer.device)
    details = {
        "num_steps": window.num_steps,
        "wall_s": window.wall_s,
        "until_measured_s": measured - started,
        "closing_s": time.perf_counter() - measured,
        "stats": after and dataclasses.asdict(after),
    }
    return Run(
        case=trainer.workload.name,
        peer=loader,
        repeat=repeat,
        figures={
            "samples_per_s": window.steps_per_s * trainer.workload.batch_size * dist.get_world_size(),
            "wait_share": _mean(trainer.device, window.wait_s / window.wall_s),
            "first_batch_s": first_s,
            **_misses(before, after),
        },
        details=(details,),
    )


def largest(device: torch.device, value: float) -> float:
    """Return the largest of the ranks' values, once all ranks have called this."""
    return _reduced(device, value, dist.ReduceOp.MAX)


@contextmanager
def _ceiling(trainer: Trainer, _timing: Timing) -> Iterator[Feed]:
    """Feed the same batch, already on the device, again and again."""
    batch = trainer.batch()
    yield Feed(take=lambda: batch)


@contextmanager
def _torch(trainer: Trainer, timing: Timing) -> Iterator[Feed]:
    """Feed the batches of torch's loader: its thread pins them, the loop copies them with non_blocking=True."""
    device = trainer.device
    batches = iter(DataLoader(trainer.samples, **_arguments(trainer, timing), pin_memory=device.type == "cuda"))
    try:
        yield Feed(take=lambda: _on_device(next(batches), device))
    finally:
        batches._shutdown_workers()  # type: ignore[attr-defined] # noqa: SLF001 - torch has no public method


@contextmanager
def _numapin(trainer: Trainer, timing: Timing) -> Iterator[Feed]:
    """Feed the batches of numapin's loader, which are already on the device."""
    with numapin.DataLoader(trainer.samples, **_arguments(trainer, timing), device=trainer.device) as loader:
        yield Feed(take=iter(loader).__next__, stats=loader.stats)


LOADERS: Final[dict[str, Callable[[Trainer, Timing], AbstractContextManager[Feed]]]] = {
    "ceiling": _ceiling,
    "torch": _torch,
    "numapin": _numapin,
}
"""The loaders by name. Samples are read in order, so that no loader pays for shuffling."""


def _arguments(trainer: Trainer, timing: Timing) -> dict[str, Any]:
    """Return the arguments that both loaders share."""
    return {
        "batch_size": trainer.workload.batch_size,
        "num_workers": timing.num_workers,
        "prefetch_factor": timing.prefetch,
        "persistent_workers": True,  # numapin's close() ends them; a cell uses only one iterator
    }


def _warm_up(trainer: Trainer, feed: Feed, timing: Timing) -> Window:
    """Train for the warm-up time, and until all batches travel in numapin's slots; return the last stretch.

    A stretch has as many steps as batches are prefetched.
    """
    start, num_stretches = time.perf_counter(), 0
    while True:
        before = feed.stats()
        last = _window(trainer, feed, timing.num_workers * timing.prefetch)
        num_stretches += 1
        spent_s = time.perf_counter() - start
        is_ready = spent_s >= timing.warm_up_s and _is_steady(before, feed.stats())
        is_ready = (is_ready and num_stretches >= _MIN_STRETCHES) or spent_s > _PATIENCE_S
        if largest(trainer.device, float(not is_ready)) == 0:
            return last


def _window(trainer: Trainer, feed: Feed, num_steps: int) -> Window:
    """Train for some steps. The clock starts when all ranks are ready and stops when the last GPU is done."""
    waited_s = 0.0
    largest(trainer.device, 0.0)
    start = time.perf_counter()
    for _ in range(num_steps):
        asked = time.perf_counter()
        batch = feed.take()
        waited_s += time.perf_counter() - asked
        trainer.step(batch)
    _synchronize(trainer.device)
    wall_s = largest(trainer.device, time.perf_counter() - start)
    return Window(num_steps=num_steps, wall_s=wall_s, wait_s=waited_s)


def _is_steady(before: Stats | None, after: Stats | None) -> bool:
    """Return whether no slot was made or pinned in a stretch, and all batches used one; unknown loaders always are."""
    if before is None or after is None:
        return True
    is_memory_the_same = (before.slots_made, before.pinned_bytes) == (after.slots_made, after.pinned_bytes)
    return is_memory_the_same and not _misses(before, after)["misses"]


def _misses(before: Stats | None, after: Stats | None) -> dict[str, float]:
    """Return how many of this rank's batches traveled outside the slots in between; empty for other loaders."""
    if before is None or after is None:
        return {}
    return {"misses": float(sum(after.misses.values()) - sum(before.misses.values()))}


def _require_intact(batch: list[torch.Tensor], workload: Workload) -> None:
    samples, labels = batch
    expected = (workload.batch_size, *workload.shape)
    if samples.shape != expected or not torch.equal(samples.flatten(1)[:, 0], _codes(labels)):
        raise RuntimeError(f"{workload.name}: a batch of shape {tuple(samples.shape)} differs from the dataset")


def _codes(labels: torch.Tensor) -> torch.Tensor:
    """Return the first element of samples with these labels."""
    return (labels % _NUM_CODES).float()


def _require_no_workers(loader: str) -> None:
    left = multiprocessing.active_children()
    if left:
        raise RuntimeError(f"{loader}: {len(left)} workers are left over after closing the loader: {left}")


def _free_caches(device: torch.device) -> None:
    """Free the GPU and pinned memory that torch caches, so that no loader starts with another's."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        for name in _EMPTY_HOST_CACHE:
            getattr(torch._C, name, lambda: None)()  # noqa: SLF001 - torch has no public function


def _on_device(batch: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    return [tensor.to(device, non_blocking=True) for tensor in batch]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _mean(device: torch.device, value: float) -> float:
    return _reduced(device, value, dist.ReduceOp.SUM) / dist.get_world_size()


def _reduced(device: torch.device, value: float, operation: dist.ReduceOp.RedOpType) -> float:
    reduced = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(reduced, op=operation)
    return reduced.item()
