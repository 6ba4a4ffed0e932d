"""`numapin bench offload`: measure CPU optimizers and FSDP2 with CPU offload under launchers. Edge.

Comes in: parsed options. Goes out: a table or JSON on stdout, with the verdict.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import click

from numapin.base.bounds import MAX_RANKS
from numapin.base.plural import counted
from numapin.bench.cases import offload as offload_cases
from numapin.bench.machine import read_machine
from numapin.bench.offload_verdict import offload_verdict
from numapin.cli.bench_run import BenchOptions, names_option, run, shared_options, with_quick
from numapin.cli.options import topology_from, with_values
from numapin.cli.torch_import import require_torch
from numapin.errors import UsageError
from numapin.plan.make import make_plan
from numapin.plan.request import Request
from numapin.view import bench_layouts as layouts

if TYPE_CHECKING:
    from numapin.bench.machine import BenchMachine
    from numapin.topology.model import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class _BenchOffloadOptions(BenchOptions):
    """The parsed values of the options of `offload`, by click's names."""

    cases: tuple[str, ...]
    peers: tuple[str, ...]
    ranks: int | None
    workers: int
    seconds: float


@click.command(short_help="CPU optimizers and FSDP2 with CPU offload.")
@names_option("--cases", offload_cases.CASES, about="Optimizers, each alone and beside a busy loader")
@names_option("--peers", offload_cases.PEERS, about="Launchers and settings")
@click.option("--ranks", type=click.IntRange(1, MAX_RANKS), help="Number of ranks (default: one per GPU, or 1).")
@click.option("--workers", type=click.IntRange(1), default=1, help="Loader workers per rank.")
@click.option(
    "--seconds", type=click.FloatRange(0, min_open=True), default=0.5, help="Length of a measuring window in seconds."
)
@shared_options(repeats=4, timeout_s=120)
@with_values(_BenchOffloadOptions)
def offload(options: _BenchOffloadOptions) -> None:
    """Measure optimizers on the CPU under several launchers: does binding help, or only the number of threads?

    adamw is a fused AdamW step on the CPU. fsdp is a training step of FSDP2 with CPU offload. The -loader cases run
    the same beside a busy DataLoader. To tell the effect of binding from the effect of threads, torchrun also runs
    with the same number of threads as numapin (torchrun-threads). Every repeat starts each launcher once.

    \b
    Examples:
      numapin bench offload --quick                    a smoke test
      numapin bench offload                            every launcher, one rank per GPU
      numapin bench offload --cases fsdp-loader --peers torchrun-threads,exclusive --repeats 5
      numapin bench offload --workers 8 --output offload.json
    """
    require_torch("numapin bench offload")
    options = with_quick(options, seconds=0.1)
    machine, topology = read_machine(), topology_from(gpu_nodes=None)
    chosen = _chosen(options, machine, topology)
    peers_are = {name: offload_cases.PEERS[name] for name in options.peers}
    settings = {**asdict(chosen), "peers_are": peers_are}
    with TemporaryDirectory(prefix="numapin-bench-") as folder:
        benchmark = offload_cases.offload_benchmark(chosen, folder=folder)
        judged = replace(benchmark, judge=offload_verdict)
        run(judged, machine, settings, options=options, layout=layouts.OFFLOAD)


def _chosen(
    options: _BenchOffloadOptions, machine: BenchMachine, topology: Topology
) -> offload_cases.OffloadBenchOptions:
    """Return the options of the benchmark: its sizes, and what numapin plans for its ranks."""
    num_gpus = len(machine.gpus)
    num_ranks = options.ranks or max(1, num_gpus)
    on_gpu = num_gpus > 0
    if on_gpu and num_ranks > num_gpus:
        raise UsageError(
            f"--ranks {num_ranks}: this machine has {counted(num_gpus, 'GPU')}",
            "to measure without GPUs, set CUDA_VISIBLE_DEVICES=",
        )
    request = Request(num_ranks=num_ranks)
    size = offload_cases.ON_GPUS if on_gpu else offload_cases.ON_CPUS
    return offload_cases.OffloadBenchOptions(
        cases=options.cases,
        peers=options.peers,
        num_ranks=num_ranks,
        num_workers=options.workers,
        seconds=options.seconds,
        size=offload_cases.QUICK if options.quick else size,
        on_gpu=on_gpu,
        num_threads=make_plan(topology, request).ranks[0].num_threads,
    )
