"""Training with each DataLoader in turn, against the ceiling: batches that are already on the GPU.

    torchrun --standalone --nproc-per-node 4 -m bench.train --output train.json
    numapin run --nproc-per-node 4 -m bench.train --models cnn3d
    python -m bench.train --quick                               smoke test with one rank, also without a GPU

Each rank trains a network under DistributedDataParallel on random float32 samples in memory, so loading means collating
and copying. All loaders train the same network in the same ranks, with the same numbers of workers and steps; the steps
are set by the first window of a model. Every repeat runs each loader once, after a warm-up that lasts until numapin
makes and pins no more slots. Rank 0 prints a table with a verdict; --output has every run (schema numapin.bench/1).
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import shutil
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import cycle
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import numapin
from numapin.base.files import write_text_to
from numapin.base.strict_json import encode
from numapin.base.text import counted
from numapin.bench.loader import start_costs
from numapin.bench.machine import read_machine
from numapin.bench.model import Benchmark, BenchReport, Case, Column, Comparison, Peer, Question, Run, summarize
from numapin.bench.verdict import verdict_of
from numapin.view.bench_table import bench_table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numapin.data.stats import Stats

TORCH: Final = "torch"
OURS: Final = "numapin"
CEILING: Final = "ceiling"
LOADERS: Final = {
    TORCH: "torch.utils.data.DataLoader, pin_memory=True, persistent_workers=True and .to(non_blocking=True)",
    OURS: "numapin.DataLoader(device=…), persistent_workers=True",
    CEILING: "batches that are already on the GPU: the upper bound",
}
_ENDLESS: Final = 1 << 30  # samples, so that no epoch ends within a window
_NUM_CODES: Final = 128  # the first element of a sample is its number modulo this
_NUM_FIRST_STEPS: Final = 3  # cuDNN chooses its algorithms
_PATIENCE_S: Final = 15.0  # for a warm-up that does not become steady

Batch = list[torch.Tensor]


class Residual(nn.Module):
    """A residual block: `relu(branch(x) + shortcut(x))`."""

    def __init__(self, branch: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.branch, self.shortcut, self.relu = branch, shortcut, nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add both paths."""
        added: torch.Tensor = self.relu(self.branch(x) + self.shortcut(x))
        return added


def resnet(depths: Sequence[int], *, has_bottlenecks: bool) -> nn.Module:
    """Build a ResNet (He et al., 2015); with bottlenecks v1.5, whose stride is in the 3x3 convolution."""

    def conv(before: int, after: int, kernel: int, stride: int) -> nn.Module:
        convolution = nn.Conv2d(before, after, kernel, stride, kernel // 2, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(after))

    layers: list[nn.Module] = [conv(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    before = 64
    for stage, depth in enumerate(depths):
        width = 64 << stage
        after = width * 4 if has_bottlenecks else width
        for block in range(depth):
            stride = 2 if stage and not block else 1
            if has_bottlenecks:
                parts = [conv(before, width, 1, 1), conv(width, width, 3, stride), conv(width, after, 1, 1)]
            else:
                parts = [conv(before, width, 3, stride), conv(width, after, 3, 1)]
            between = [layer for part in parts[:-1] for layer in (part, nn.ReLU(inplace=True))]
            has_identity = (before, stride) == (after, 1)
            shortcut = nn.Identity() if has_identity else conv(before, after, 1, stride)
            layers.append(Residual(nn.Sequential(*between, parts[-1]), shortcut))
            before = after
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 1000))


def cnn3d() -> nn.Module:
    """Build a small 3D CNN for volumes with one channel: four convolutions of stride 2, 16 to 128 channels."""
    layers: list[nn.Module] = []
    for before, after in ((1, 16), (16, 32), (32, 64), (64, 128)):
        layers += [nn.Conv3d(before, after, 3, 2, 1, bias=False), nn.BatchNorm3d(after), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(128, 10))


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A network, and its samples of shape `shape`; each rank has `num_samples` of them.

    `num_classes` is the number of its outputs. `bf16` trains under bfloat16 autocast, in the channels_last format.
    """

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batch_size: int
    num_samples: int
    num_classes: int
    bf16: bool

    @property
    def about(self) -> str:
        """The model in one line."""
        size = "x".join(map(str, self.shape))
        return f"{self.batch_size} x {size} float32 per rank; {'bf16 autocast' if self.bf16 else 'float32'}"


_RESNET18: Final = Model(
    build=lambda: resnet((2, 2, 2, 2), has_bottlenecks=False),
    shape=(3, 224, 224),
    batch_size=256,
    num_samples=512,
    num_classes=1000,
    bf16=True,
)
MODELS: Final = {
    "resnet18": _RESNET18,
    "cnn3d": Model(build=cnn3d, shape=(1, 96, 96, 96), batch_size=32, num_samples=128, num_classes=10, bf16=False),
    "resnet50": replace(_RESNET18, build=lambda: resnet((3, 4, 6, 3), has_bottlenecks=True)),
}


class Samples(Dataset[Any]):
    """Random samples of one rank, each with its number as the target and as its first element."""

    def __init__(self, model: Model) -> None:
        self._model = model
        generator = torch.Generator().manual_seed(dist.get_rank())
        self._samples = torch.randn(model.num_samples, *model.shape, generator=generator)
        self._samples.flatten(1)[:, 0] = (torch.arange(model.num_samples) % _NUM_CODES).float()

    def __len__(self) -> int:
        """Return more samples than any window takes."""
        return _ENDLESS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        """Return a view, which costs a worker nothing."""
        number = index % self._model.num_samples
        return self._samples[number], number

    def batch(self, number: int) -> Batch:
        """Return a batch as a loader makes it."""
        first = number * self._model.batch_size
        numbers = torch.arange(first, first + self._model.batch_size) % self._model.num_samples
        return [self._samples[numbers], numbers]

    def require_intact(self, batch: Batch) -> None:
        """Require every sample of a batch to begin and end as in the dataset. Raises ValueError."""
        inputs, numbers = (part.cpu() for part in batch)
        wanted = self._samples[numbers].flatten(1)
        found = inputs.flatten(1)
        if found.shape != wanted.shape or not found[:, [0, -1]].equal(wanted[:, [0, -1]]):
            raise ValueError("a batch differs from the dataset")


class Trainer:
    """A network on this rank's device, with its samples. It has made its first steps, which take longer."""

    def __init__(self, model: Model, device: torch.device) -> None:
        self.model, self.device = model, device
        self.samples = Samples(model)
        self.batches = [
            self.to_device(self.samples.batch(number)) for number in range(model.num_samples // model.batch_size)
        ]
        torch.manual_seed(0)
        network = model.build().to(device)
        if model.bf16:
            network.to(memory_format=torch.channels_last)  # type: ignore[call-overload] # torch's types lack it
        self._network = DistributedDataParallel(network, device_ids=[device] if device.type == "cuda" else None)
        self._optimizer = torch.optim.SGD(self._network.parameters(), lr=1e-3, momentum=0.9)
        for _ in range(_NUM_FIRST_STEPS):
            self.step(self.batches[0])

    def to_device(self, batch: Batch) -> Batch:
        """Copy a batch to the device, asynchronously if it is pinned."""
        return [part.to(self.device, non_blocking=True) for part in batch]

    def step(self, batch: Batch) -> None:
        """Train on one batch."""
        inputs, numbers = batch
        if self.model.bf16:
            inputs = inputs.to(memory_format=torch.channels_last)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.model.bf16):
            loss = nn.functional.cross_entropy(self._network(inputs), numbers % self.model.num_classes)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()

    def window(self, take: Callable[[], Batch], num_steps: int) -> tuple[float, float]:
        """Train for some steps; return the seconds of all ranks, and this rank's seconds in `take`.

        The clock starts when all ranks are ready and stops when the last GPU is done.
        """
        waited_s = 0.0
        self.largest(0.0)
        self._synchronize()
        start_s = time.perf_counter()
        for _ in range(num_steps):
            asked_s = time.perf_counter()
            batch = take()
            waited_s += time.perf_counter() - asked_s
            self.step(batch)
        self._synchronize()
        return self.largest(time.perf_counter() - start_s), waited_s

    def largest(self, value: float) -> float:
        """Return the largest of the ranks' values, once all ranks have called this."""
        reduced = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(reduced, op=dist.ReduceOp.MAX)
        return reduced.item()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Feed:
    """A running loader: `take` returns a batch on the device; `stats` returns numapin's statistics, else None."""

    take: Callable[[], Batch]
    stats: Callable[[], Stats | None] = lambda: None


@contextmanager
def running(loader: str, trainer: Trainer, options: argparse.Namespace) -> Iterator[Feed]:
    """Start a loader, and stop it with all of its workers. Raises RuntimeError if a worker is left over."""
    arguments: dict[str, Any] = {
        "dataset": trainer.samples,
        "batch_size": trainer.model.batch_size,
        "num_workers": options.workers,
        "prefetch_factor": options.prefetch,
        "persistent_workers": True,
        "multiprocessing_context": "fork",  # workers inherit the samples
    }
    if loader == TORCH:
        batches = iter(DataLoader(**arguments, pin_memory=trainer.device.type == "cuda"))
        try:
            yield Feed(take=lambda: trainer.to_device(next(batches)))
        finally:
            batches._shutdown_workers()  # type: ignore[attr-defined] # noqa: SLF001 - torch has no public method
    elif loader == OURS:
        with numapin.DataLoader(**arguments, device=trainer.device) as ours:
            yield Feed(take=iter(ours).__next__, stats=ours.stats)
    else:
        yield Feed(take=cycle(trainer.batches).__next__)
    left = multiprocessing.active_children()
    if left:
        raise RuntimeError(f"{loader}: {len(left)} workers are left over after closing the loader: {left}")


def measure(
    loader: str, trainer: Trainer, options: argparse.Namespace, num_steps: int | None
) -> tuple[dict[str, float], int]:
    """Train with one loader; return the figures of all ranks, and the number of steps of the window."""
    model, started_s = trainer.model, time.perf_counter()
    with running(loader, trainer, options) as feed:
        trainer.samples.require_intact(feed.take())
        first_s = time.perf_counter() - started_s
        steps_per_s = _warm_up(trainer, feed, options)
        if num_steps is None:
            num_steps = options.steps or max(1, round(options.seconds * steps_per_s))
        before = feed.stats()
        wall_s, waited_s = trainer.window(feed.take, num_steps)
        after = feed.stats()
        trainer.samples.require_intact(feed.take())
    if trainer.device.type == "cuda":
        torch.cuda.empty_cache()  # so that no loader starts with another's memory
    figures = {
        "samples_per_s": num_steps * model.batch_size * dist.get_world_size() / wall_s,
        "wait_share": trainer.largest(waited_s / wall_s),
        "first_batch_s": trainer.largest(first_s),
    }
    if before is not None and after is not None:
        figures["misses"] = trainer.largest(float(sum(after.misses.values()) - sum(before.misses.values())))
    return figures, num_steps


def _warm_up(trainer: Trainer, feed: Feed, options: argparse.Namespace) -> float:
    """Train until the loader is steady on all ranks; return the steps per second of the last stretch.

    First come the batches that were prepared while the loader started. A stretch is half as long as its queue.
    """
    num_ahead: int = options.workers * options.prefetch
    num_steps = -(-num_ahead // 2)
    start_s = time.perf_counter()
    trainer.window(feed.take, num_ahead)
    while True:
        before = feed.stats()
        wall_s, _ = trainer.window(feed.take, num_steps)
        after = feed.stats()
        spent_s = time.perf_counter() - start_s
        is_steady = before is None or after is None or start_costs(before) == start_costs(after)
        is_ready = spent_s > _PATIENCE_S or (spent_s >= options.warm_up and is_steady)
        if trainer.largest(float(not is_ready)) == 0:
            return num_steps / wall_s


def _options() -> argparse.Namespace:
    about, _, description = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m bench.train",
        description=f"{about}\n\n{description}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    own = parser.add_argument
    own("--models", type=_names_of(MODELS), default=[*MODELS], help=f"default: {','.join(MODELS)}")
    own("--loaders", type=_names_of(LOADERS), default=[*LOADERS], help=f"default: {','.join(LOADERS)}")
    own("--repeats", type=int, default=5, help="windows of each loader and model; a verdict needs 5 (default: 5)")
    own("--workers", type=int, help="workers per rank (default: its share of the CPUs, at most 12)")
    own("--prefetch", type=int, default=2, help="batches that each worker prepares ahead (default: 2)")
    own("--seconds", type=float, default=4.0, help="length of a model's first window (default: 4)")
    own("--steps", type=int, help="steps per window, instead of --seconds")
    own("--warm-up", type=float, default=2.0, help="least seconds of a warm-up (default: 2)")
    own("--quick", action="store_true", help="smoke test: one short window with small samples")
    own("--output", type=Path, help="file for the report as JSON; written after each model")
    options = parser.parse_args()
    if options.quick:
        options.repeats, options.warm_up, options.steps, options.workers = 1, 0.0, 6, 2
    return options


def _names_of(known: Sequence[str] | dict[str, Any]) -> Callable[[str], list[str]]:
    """Return the parser of a list of these names, separated by commas."""

    def names(text: str) -> list[str]:
        found = text.split(",")
        if not set(found) <= set(known):
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of {', '.join(known)}")
        return found

    return names


def _joined() -> torch.device:
    """Select this rank's device and join the process group, alone if no launcher started this; return the device."""
    torch.set_num_threads(1)  # ranks and workers share the CPUs
    torch.backends.cudnn.benchmark = True
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    alone: dict[str, Any] = {}
    if "RANK" not in os.environ:
        store = dist.HashStore()  # type: ignore[attr-defined] # torch does not list it
        alone = {"store": store, "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None, **alone)
    return device


def _sized(model: Model, options: argparse.Namespace) -> Model:
    """Return the model, small for a smoke test; CPUs emulate bfloat16, so that does without."""
    if options.quick:
        shape = (model.shape[0], *[32 if len(model.shape) == 3 else 16] * (len(model.shape) - 1))
        return replace(model, shape=shape, batch_size=4, num_samples=16, bf16=False)
    return model


def _require_room(model: Model, options: argparse.Namespace) -> None:
    """Exit if the batches of torch's workers do not fit into /dev/shm, where they would die of SIGBUS."""
    ahead = options.workers * options.prefetch * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    needed, free = model.batch_size * prod(model.shape) * 4 * ahead, shutil.disk_usage("/dev/shm").free  # noqa: S108
    if TORCH in options.loaders and needed > free:
        gigabytes = 2 * needed // 10**9 + 1
        sys.exit(f"torch's loader needs {needed / 1e9:.1f} GB in /dev/shm: mount -o remount,size={gigabytes}G /dev/shm")


def report_of(models: dict[str, Model], runs: Sequence[Run], options: argparse.Namespace) -> BenchReport:
    """Return the report on the runs until now."""
    peers = tuple(Peer(name=name, specs=()) for name in options.loaders)
    question = Question(
        subject="numapin instead of torch's loader",
        things="training steps are",
        figure="samples_per_s",
        own=(OURS,),
        against=TORCH,
    )
    benchmark = Benchmark(
        name="train",
        module="bench.train",
        cases=tuple(
            Case(name=name, about=f"{model.about}; {counted(dist.get_world_size(), 'rank')}", peers=peers)
            for name, model in models.items()
        ),
        comparisons=(
            Comparison(name="ratio", figure="samples_per_s", against=TORCH),
            Comparison(name="of_ceiling", figure="samples_per_s", against=CEILING),
        ),
    )
    cases = summarize(benchmark, runs)
    return BenchReport(
        benchmark="train",
        command=tuple(sys.argv),
        machine=read_machine().to_json(),
        settings={**vars(options), "output": None, "num_ranks": dist.get_world_size(), "peers_are": LOADERS},
        cases=cases,
        is_complete=len(runs) == len(models) * options.repeats * len(options.loaders),
        verdict=verdict_of((question,), cases),
    )


COLUMNS: Final = (
    Column(figure="samples_per_s", heading="samples/s", form=",.0f"),
    Column(figure="ratio", heading="x torch", form=".2f", spread=True),
    Column(figure="of_ceiling", heading="of ceiling", form=".0%", meaning="share of the ceiling's speed"),
    Column(figure="wait_share", heading="wait", form=".0%", meaning="share of the time in next(), slowest rank"),
    Column(figure="first_batch_s", heading="first s", form=".2f", meaning="time to the first batch"),
    Column(figure="misses", heading="misses", form=",.0f", meaning="batches outside of numapin's slots"),
)


def main() -> None:
    """Train each model with each loader in turn, and report on rank 0."""
    options = _options()
    device = _joined()
    if options.workers is None:
        num_cpus, num_ranks = os.cpu_count() or 1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        options.workers = max(1, min(12, num_cpus // num_ranks))  # the same under any launcher and binding
    models = {name: _sized(MODELS[name], options) for name in options.models}
    runs: list[Run] = []
    for name, model in models.items():
        _require_room(model, options)
        trainer, num_steps = Trainer(model, device), None
        for repeat in range(options.repeats):
            for loader in options.loaders:
                figures, num_steps = measure(loader, trainer, options, num_steps)
                runs.append(Run(case=name, peer=loader, repeat=repeat, figures=figures))
        del trainer
        gc.collect()
        if dist.get_rank() == 0:
            report = report_of(models, runs, options)
            if options.output is not None:
                write_text_to(str(options.output), encode(report.to_json()), remedy="choose another --output")
            if report.is_complete:
                Console(width=100).print(bench_table(report, COLUMNS, "median [lowest, highest]"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
