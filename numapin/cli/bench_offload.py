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
from numapin.cli.options import Parsed, topology_from, with_values
from numapin.cli.torch_import import require_torch
from numapin.errors import PlanError, UsageError
from numapin.plan.make import make_plan
from numapin.plan.request import Bind, CoresFor, Request, parse_cores_for
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
    workers: int | None
    seconds: float
    cores_for: CoresFor | None


@click.command(short_help="CPU optimizers and FSDP2 with CPU offload.")
@names_option("--cases", offload_cases.CASES, about="Optimizers, each alone and beside a busy loader")
@names_option("--peers", offload_cases.PEERS, about="Launchers and settings")
@click.option("--ranks", type=click.IntRange(1, MAX_RANKS), help="Number of ranks (default: one per GPU, or 1).")
@click.option(
    "--workers", type=click.IntRange(1), help="Loader workers per rank (default: the loader's cores in --cores-for)."
)
@click.option(
    "--cores-for",
    type=Parsed("ROLE=N,...", parse_cores_for, words=[f"{role}=" for role in CoresFor._fields], many=True),
    help="Cores of each role in the peer `roles` (default: a quarter of a rank's cores for the loader, an eighth for "
    "the main thread, the rest for the optimizer).",
)
@click.option(
    "--seconds", type=click.FloatRange(0, min_open=True), default=0.5, help="Length of a measuring window in seconds."
)
@shared_options(repeats=4, timeout_s=120)
@with_values(_BenchOffloadOptions)
def offload(options: _BenchOffloadOptions) -> None:
    """Measure optimizers on the CPU under several launchers: does binding help, or only the number of threads?

    adamw is a fused AdamW step on the CPU. fsdp is a training step of FSDP2 with CPU offload. The -loader cases run
    the same beside a busy DataLoader. The peer `roles` is `numapin run --cores-for`. To tell the effect of binding from
    the effect of threads, torchrun also runs with the same number of threads as numapin (torchrun-threads,
    torchrun-fewer). Every repeat starts each launcher once.

    \b
    Examples:
      numapin bench offload --quick                    a smoke test
      numapin bench offload                            every launcher, one rank per GPU
      numapin bench offload --cases fsdp-loader --peers torchrun-threads,torchrun-fewer,roles --repeats 5
      numapin bench offload --cores-for loader=4,optimizer=10 --workers 8 --output offload.json
    """
    require_torch("numapin bench offload")
    options = with_quick(options, seconds=0.1)
    machine, topology = read_machine(), topology_from(gpu_nodes=None)
    chosen = _chosen(options, machine, topology)
    peers_are = {name: offload_cases.PEERS[name] for name in options.peers}
    settings = {**asdict(chosen), "cores_for": str(chosen.cores_for or ""), "peers_are": peers_are}
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
    cores_for = options.cores_for or _default_cores(topology, request)
    size = offload_cases.ON_GPUS if on_gpu else offload_cases.ON_CPUS
    return offload_cases.OffloadBenchOptions(
        cases=options.cases,
        peers=options.peers,
        num_ranks=num_ranks,
        num_workers=options.workers or (cores_for.loader if cores_for else 0) or 1,
        seconds=options.seconds,
        size=offload_cases.QUICK if options.quick else size,
        on_gpu=on_gpu,
        num_threads=make_plan(topology, request).ranks[0].num_threads,
        cores_for=cores_for,
        num_role_threads=_num_role_threads(topology, request, cores_for),
    )


def _num_role_threads(topology: Topology, request: Request, cores_for: CoresFor | None) -> int:
    """Return the number of threads of a rank with roles; 1 without roles."""
    if cores_for is None:
        return 1
    plan = make_plan(topology, replace(request, bind=Bind.EXCLUSIVE, cores_for=cores_for))
    return plan.ranks[0].num_threads


def _default_cores(topology: Topology, request: Request) -> CoresFor | None:
    """Return the default cores of roles; None if an exclusive rank has fewer than two cores."""
    try:
        ranks = make_plan(topology, replace(request, bind=Bind.EXCLUSIVE)).ranks
    except PlanError:
        return None
    return offload_cases.default_cores(min(rank.num_threads for rank in ranks))
