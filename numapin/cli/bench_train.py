"""`numapin bench train`: train models with each loader in turn. Edge.

Comes in: options. Goes out: a table or JSON (schema numapin.bench/1) and a verdict on stdout, and files.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from importlib.util import find_spec
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

import click

from numapin.bench.cases import train as train_cases
from numapin.bench.machine import read_machine
from numapin.cli.bench_run import BenchOptions, names_option, run, shared_options, with_quick
from numapin.cli.options import with_values
from numapin.cli.torch_import import require_torch
from numapin.errors import UsageError
from numapin.view import bench_layouts as layouts

if TYPE_CHECKING:
    from numapin.bench.machine import BenchMachine

_JPEG_MODULES: Final = ("PIL", "torchvision")


@dataclass(frozen=True, slots=True, kw_only=True)
class _BenchTrainOptions(BenchOptions):
    """The parsed values of the options of `train`, by click's names."""

    cases: tuple[str, ...]
    peers: tuple[str, ...]
    gpus: int | None
    workers: int | None
    prefetch: int
    batch_size: int | None
    seconds: float
    steps: int | None
    warm_up: float
    launcher: str


@click.command(short_help="Models in training, fed by DataLoaders.")
@names_option("--cases", train_cases.CASES, about="Models to train")
@names_option("--peers", train_cases.PEERS, about="Loaders to compare")
@click.option("--gpus", type=click.IntRange(1), metavar="N", help="Number of ranks, one per GPU (default: all GPUs).")
@click.option(
    "--workers", type=click.IntRange(1), help="Workers per rank (default: one per CPU of the rank, at most 12)."
)
@click.option(
    "--prefetch", type=click.IntRange(1), default=train_cases.PREFETCH, help="Batches that each worker prepares ahead."
)
@click.option(
    "--batch-size", type=click.IntRange(1), help="Samples per batch and rank (default: depends on the model)."
)
@click.option(
    "--seconds",
    type=click.FloatRange(0, min_open=True),
    default=4.0,
    help="Length of a model's first measuring window in seconds; its other windows have the same number of steps.",
)
@click.option("--steps", type=click.IntRange(1), help="Steps per window, instead of --seconds.")
@click.option(
    "--warm-up", type=click.FloatRange(0), metavar="S", default=2.0, help="Warm-up before each window in seconds."
)
@click.option(
    "--launcher",
    type=click.Choice(["torchrun", "numapin"]),
    default="torchrun",
    help="Launcher that starts the ranks.",
)
@shared_options(repeats=4, timeout_s=180)
@with_values(_BenchTrainOptions)
def train(options: _BenchTrainOptions) -> None:
    """Train models with numapin's DataLoader, torch's and others, and compare their speed.

    \b
    Models:
      resnet18, cnn3d, resnet50  float32 samples in memory
      vit-jpeg                   JPEG files that workers decode (needs Pillow or torchvision)
      lm                         token sequences, padded in collate_fn
      fsdp-offload               the same with FSDP2, and AdamW on the CPU

    The samples are random; nothing is downloaded. The ranks start once and train with each loader in turn, with the
    same number of workers and steps. The ceiling is the speed with all data already on the GPU.

    Duration: at least 45 s per model with the defaults; --quick takes half a minute for all models on two CPUs. If the
    GPU runs out of memory, choose a smaller --batch-size.

    \b
    Examples:
      numapin bench train --quick                            a smoke test, also without a GPU
      numapin bench train --cases resnet18,cnn3d,resnet50    does the loader matter? 3 to 5 min on an H200
      numapin bench train --cases cnn3d --gpus 1 --peers torch,numapin
      numapin bench train --output train.json --plot train.svg
      numapin bench train --cases vit-jpeg --workers 16      does decoding limit training?
    """
    require_torch("numapin bench train")
    options, machine = with_quick(options, seconds=0.5, warm_up=0.0, steps=train_cases.QUICK_STEPS), read_machine()
    num_ranks = _num_ranks(options.gpus, machine)
    with TemporaryDirectory(prefix="numapin-bench-") as folder:
        chosen = train_cases.TrainBenchOptions(
            cases=options.cases,
            peers=options.peers,
            num_ranks=num_ranks,
            num_workers=options.workers or _num_workers(machine, num_ranks, is_quick=options.quick),
            prefetch=options.prefetch,
            seconds=options.seconds,
            warm_up_s=options.warm_up,
            num_steps=options.steps,
            batch_size=options.batch_size,
            launcher=options.launcher,
            is_quick=options.quick,
            folder=folder,
        )
        has_jpeg = any(find_spec(name) is not None for name in _JPEG_MODULES)
        benchmark = train_cases.train_benchmark(chosen, on_gpu=bool(machine.gpus), has_jpeg=has_jpeg)
        settings = {**asdict(chosen), "folder": None, "peers_are": train_cases.PEERS}
        run(benchmark, machine, settings, options=options, layout=layouts.TRAIN)


def _num_ranks(gpus: int | None, machine: BenchMachine) -> int:
    """Return the number of ranks: one per GPU. Without a GPU, any number is allowed; the default is one."""
    found = len(machine.gpus)
    if gpus is not None and 0 < found < gpus:
        raise UsageError(f"--gpus {gpus}: torch sees only {found}", f"ask for at most {found}, or leave out --gpus")
    return gpus or found or 1


def _num_workers(machine: BenchMachine, num_ranks: int, *, is_quick: bool) -> int:
    most = 2 if is_quick else train_cases.MOST_WORKERS
    return max(1, min(most, machine.num_cpus // num_ranks))
