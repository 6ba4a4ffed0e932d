"""Training speed with torch's DataLoader, with numapin's, and with the data already on the GPU.

    python -m bench.training                    one rank per GPU, NCCL: about 7 minutes
    python -m bench.training --quick            smoke test: tiny sizes, also without a GPU (gloo)

Starts all ranks once, under one launcher (torchrun, or `--launcher numapin`), and measures every loader in them, so
that only the loader differs. Each rank holds float32 samples in memory. Its forked workers stack them into batches in
order; nothing is decoded or shuffled. Networks train under DistributedDataParallel with SGD; `bench/models.py` has the
sizes and the precision. `ceiling` trains on one batch that is already on the GPU; `torch` is torch's DataLoader with
pin_memory=True and non_blocking copies; `numapin` is numapin.DataLoader(device="cuda"). Both loaders have the same
workers and prefetching.

Each repeat measures each loader on each network, every second repeat in reverse order. Samples per second
count all ranks: the clock starts when all are warm and stops when the last GPU is done. Prints a table, and writes JSON
(schema numapin.bench/1 plus `runs`) after each measurement, so that an interrupted benchmark keeps its results.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist
from rich.console import Console

from bench.models import WORKLOADS, Workload
from bench.training_cell import LOADERS, Timing, Trainer, largest, measure
from numapin.base.files import write_text_to
from numapin.bench.machine import read_machine
from numapin.bench.model import Benchmark, BenchReport, Case, Comparison, Peer, Run, summarize
from numapin.view.bench_table import Column, Layout, bench_table

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_LAUNCHERS: Final = {"torchrun": ("-m", "torch.distributed.run"), "numapin": ("-m", "numapin", "run", "--quiet")}
_SHOWN_VARIABLES: Final = ("CUDA_", "NCCL_", "NUMAPIN_", "OMP_", "TORCH_")
_NUM_FIRST_STEPS: Final = 3  # cuDNN chooses its algorithms, torch.compile compiles
_TIMEOUT: Final = timedelta(minutes=4)  # for a collective, which may wait for a rank that compiles
_LAYOUT: Final = Layout(
    legend="samples/s of all ranks: median [lowest, highest]; wait: share of the time spent in next();\n"
    "first s: until the first batch; misses: batches outside numapin's slots while measured, on rank 0",
    columns=(
        Column(figure="samples_per_s", heading="samples/s", form=",.0f", spread=True),
        Column(figure="x_torch", heading="x torch", form=".2f", spread=True),
        Column(figure="of_ceiling", heading="of ceiling", form=".0%"),
        Column(figure="wait_share", heading="wait", form=".0%"),
        Column(figure="first_batch_s", heading="first s", form=".2f"),
        Column(figure="misses", heading="misses", form=",.0f"),
    ),
    plotted=(),
)
_COMPARISONS: Final = (
    Comparison(name="x_torch", figure="samples_per_s", against="torch"),
    Comparison(name="of_ceiling", figure="samples_per_s", against="ceiling"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The options of the command line."""

    models: tuple[str, ...]
    loaders: tuple[str, ...]
    repeats: int
    timing: Timing
    limit_s: float
    launcher: str
    compiled: bool
    quick: bool
    json: str | None

    @property
    def workloads(self) -> tuple[Workload, ...]:
        """The networks to train, in order."""
        chosen = tuple(WORKLOADS[name] for name in self.models)
        return tuple(workload.quick() for workload in chosen) if self.quick else chosen


def main(arguments: Sequence[str]) -> None:
    """Start the ranks; in a rank, measure."""
    given = _parser().parse_args(arguments)
    if "LOCAL_RANK" in os.environ:
        _measure_all(_settings(given))
        return
    if not torch.cuda.is_available() and not given.quick:
        sys.exit("bench.training: torch sees no GPU; only --quick runs without one")
    num_ranks = given.ranks or max(1, torch.cuda.device_count())
    launcher = (*_LAUNCHERS[given.launcher], "--standalone", "--nproc-per-node", str(num_ranks))
    os.execv(sys.executable, [sys.executable, *launcher, "-m", "bench.training", *arguments])  # noqa: S606 - no shell


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.training", description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default=",".join(WORKLOADS), type=_names(WORKLOADS), help="networks to train")
    parser.add_argument("--loaders", default=",".join(LOADERS), type=_names(LOADERS), help="loaders to compare")
    parser.add_argument("--repeats", default=3, type=int, help="measurements of each loader on each network")
    parser.add_argument("--seconds", default=6.0, type=float, help="measured time of each, after the warm-up")
    parser.add_argument("--steps", type=int, help="measured steps of each, instead of --seconds")
    parser.add_argument("--warm-up", default=3.0, type=float, help="least seconds of warm-up")
    parser.add_argument("--workers", default=12, type=int, help="workers per rank")
    parser.add_argument("--prefetch", default=2, type=int, help="batches that each worker prepares")
    parser.add_argument("--limit", default=480.0, type=float, help="start no measurement after this many seconds")
    parser.add_argument("--ranks", type=int, help="number of ranks (default: one per GPU)")
    parser.add_argument("--launcher", default="torchrun", choices=_LAUNCHERS, help="starts the ranks of all loaders")
    parser.add_argument("--compile", action="store_true", help="train with torch.compile")
    parser.add_argument("--quick", action="store_true", help="smoke test: small samples, two workers, a few steps")
    parser.add_argument("--json", metavar="FILE", help="write the results here")
    return parser


def _names(known: Mapping[str, object]) -> _Names:
    return _Names(tuple(known))


@dataclass(frozen=True, slots=True)
class _Names:
    """An argparse type for comma-separated names."""

    known: tuple[str, ...]

    def __call__(self, text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        for name in names:
            if name not in self.known:
                raise argparse.ArgumentTypeError(f"{name!r} is unknown; choose from {', '.join(self.known)}")
        return names


def _settings(given: argparse.Namespace) -> Settings:
    quick = given.quick
    timing = Timing(
        num_workers=2 if quick else given.workers,
        prefetch=given.prefetch,
        warm_up_s=0.0 if quick else given.warm_up,
        seconds=given.seconds,
        num_steps=given.steps or (3 if quick else None),
    )
    return Settings(
        models=given.models,
        loaders=given.loaders,
        repeats=given.repeats,
        timing=timing,
        limit_s=given.limit,
        launcher=given.launcher,
        compiled=given.compile,
        quick=quick,
        json=given.json,
    )


def _measure_all(settings: Settings) -> None:
    """Measure all loaders on all networks; rank 0 reports."""
    started = time.monotonic()
    device = _device()
    reports = Reports(settings) if int(os.environ["RANK"]) == 0 else None
    _join(device)
    trainers = {workload.name: _trainer(workload, device, settings) for workload in settings.workloads}
    for number, (repeat, model, loader) in enumerate(cells(settings)):
        if largest(device, time.monotonic() - started) > settings.limit_s:
            break
        run = measure(trainers[model], loader, repeat=repeat, timing=settings.timing)
        if reports is not None:
            reports.add(run, number + 1, time.monotonic() - started)
        gc.collect()
    if reports is not None:
        reports.show()
    dist.destroy_process_group()


def _join(device: torch.device) -> None:
    """Join the process group: NCCL on a GPU, else gloo."""
    if device.type == "cuda":
        dist.init_process_group("nccl", timeout=_TIMEOUT, device_id=device)
    else:
        dist.init_process_group("gloo", timeout=_TIMEOUT)


def cells(settings: Settings) -> Iterator[tuple[int, str, str]]:
    """Yield (repeat, network, loader): all networks in each repeat, with reversed loaders in every second one."""
    for repeat in range(settings.repeats):
        for model in settings.models:
            for loader in settings.loaders[:: -1 if repeat % 2 else 1]:
                yield repeat, model, loader


def _device() -> torch.device:
    """Select and return this rank's GPU, or the CPU if there is no GPU."""
    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # ranks and workers share the CPUs
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.backends.cudnn.benchmark = True
    return device


def _trainer(workload: Workload, device: torch.device, settings: Settings) -> Trainer:
    """Build a network and train it for some steps, so that no measurement includes its start-up."""
    start = time.monotonic()
    trainer = Trainer(workload, device, compiled=settings.compiled)
    batch = trainer.batch()
    for _ in range(_NUM_FIRST_STEPS):
        trainer.step(batch)
    spent_s = largest(device, time.monotonic() - start)
    if dist.get_rank() == 0:
        print(f"{workload.name}: ready after {spent_s:.1f} s", flush=True)
    return trainer


class Reports:
    """Rank 0's results: a line and the JSON file after each measurement, the table at the end."""

    def __init__(self, settings: Settings) -> None:
        self._settings, self._runs = settings, list[Run]()
        self._machine = {
            **read_machine().to_json(),
            "cudnn": torch.backends.cudnn.version() if torch.cuda.is_available() else None,
            "nccl": list(torch.cuda.nccl.version()) if torch.cuda.is_available() else None,
            "environment": {
                name: value for name, value in sorted(os.environ.items()) if name.startswith(_SHOWN_VARIABLES)
            },
        }

    def add(self, run: Run, number: int, elapsed_s: float) -> None:
        """Add a run, print its line and write the JSON file."""
        self._runs.append(run)
        (details,) = run.details
        total = len(list(cells(self._settings)))
        what = f"{number}/{total} repeat {run.repeat} {run.case:9} {run.peer:8}"
        rate = f"{run.figures['samples_per_s']:10,.0f} samples/s, {details['num_steps']} steps"
        print(f"{what} {rate} in {details['wall_s']:.2f} s, {elapsed_s:.0f} s after the start", flush=True)
        if self._settings.json is not None:
            text = json.dumps({**self.report.to_json(), "runs": [asdict(run) for run in self._runs]}, indent=1)
            write_text_to(self._settings.json, text + "\n", remedy="name another file with --json")

    def show(self) -> None:
        """Print the table, and the number of missing measurements."""
        Console(width=None if sys.stdout.isatty() else 120).print(bench_table(self.report, _LAYOUT))
        missing = len(list(cells(self._settings))) - len(self._runs)
        if missing > 0:
            print(f"{missing} measurements did not start within {self._settings.limit_s:.0f} s (--limit)")

    @property
    def report(self) -> BenchReport:
        """The figures so far."""
        return BenchReport(
            benchmark="training",
            command=("python", "-m", "bench.training", *sys.argv[1:]),
            machine=self._machine,
            settings={**asdict(self._settings), "num_ranks": int(os.environ["WORLD_SIZE"])},
            cases=summarize(benchmark(self._settings), self._runs),
        )


def benchmark(settings: Settings) -> Benchmark:
    """Return a case for each network, with the loaders as its peers."""
    peers = tuple(Peer(name=name, specs=()) for name in settings.loaders)
    cases = tuple(Case(name=workload.name, about=workload.about, peers=peers) for workload in settings.workloads)
    return Benchmark(name="training", module=__name__, cases=cases, comparisons=_COMPARISONS)


if __name__ == "__main__":
    main(sys.argv[1:])
