"""`numapin bench`: measure this machine."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import click

from numapin.bench.cases import alloc as alloc_cases
from numapin.bench.cases import loader as loader_cases
from numapin.bench.cases import overlap as overlap_cases
from numapin.bench.cases import transfer as transfer_cases
from numapin.bench.machine import read_machine
from numapin.cli.bench_run import SIZES, BenchOptions, names_option, run, shared_options, with_quick
from numapin.cli.options import record_of, topology_from
from numapin.cli.torch_import import require_torch
from numapin.view import bench_layouts as layouts

if TYPE_CHECKING:
    from numapin.topology.model import Topology


@click.group(context_settings={"show_default": True})
def bench() -> None:
    """Measure this machine. Each benchmark answers one question and ends with a one-line verdict.

    \b
    Command   Question                                              Typical duration
    alloc     Is it worth reusing memory, or pinning it once?         10 s without a GPU
    transfer  Is copying pinned memory faster, and from what size?  at least 36 s per GPU and NUMA node
    overlap   Does pinning make a loop faster, and which loop?      at least 98 s
    loader    Is another DataLoader faster?                         1 to 2 min per case with two peers

    Start with `numapin bench transfer --quick` on a machine with a GPU, and with `numapin bench alloc` on others.
    --quick measures once, which only shows that everything runs. A verdict needs at least four repeats.

    The variants (peers) take turns, so that all run under the same conditions. On a terminal, the last line shows the
    progress and the remaining time. Ctrl-C, SIGTERM and SIGHUP end a benchmark early: the results so far are shown and
    written, marked as partial.

    \b
    Examples:
      numapin bench alloc                                what memory costs: 10 s
      numapin bench transfer --quick                     does pinning pay? a smoke test
      numapin bench loader --cases 38MB --peers torch,numapin-device
      numapin bench overlap --output overlap.json
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class _BenchTransferOptions(BenchOptions):
    """The parsed values of the options of `transfer`, by click's names."""

    sizes: tuple[int, ...]
    peers: tuple[str, ...]
    directions: tuple[str, ...]
    gpus: str
    seconds: float


@bench.command(short_help="Copies between host and GPU.")
@click.option(
    "--sizes",
    type=SIZES,
    default=transfer_cases.SIZES,
    show_default="4K to 1G",
    help="Sizes of the copies, e.g. 4K,64M,1G.",
)
@names_option("--peers", transfer_cases.MEMORIES, about="Kinds of memory")
@names_option("--directions", list(transfer_cases.Direction), about="To the GPU (h2d), back (d2h), or both at once")
@click.option("--gpus", type=click.Choice(["one", "all"]), default="all", help="all: also all GPUs at once.")
@click.option(
    "--seconds", type=click.FloatRange(0, min_open=True), default=0.1, help="Length of a measuring window in seconds."
)
@shared_options(repeats=5, timeout_s=120)
def transfer(**values: object) -> None:
    """Measure copies between host and GPU: each kind of memory, from each NUMA node to each GPU.

    Duration: with the defaults at least 36 s (360 windows of 0.1 s) per pair of GPU and NUMA node; --quick: 1 s.

    \b
    Examples:
      numapin bench transfer --quick                   a smoke test
      numapin bench transfer --output transfer.json    all sizes, and all figures in a file
      numapin bench transfer --sizes 64M --directions h2d --repeats 9
    """
    options = record_of(_BenchTransferOptions, values)
    require_torch("numapin bench transfer")
    options = with_quick(options, seconds=0.02, sizes=transfer_cases.QUICK_SIZES)
    machine, topology = read_machine(), topology_from(gpu_nodes=None)
    chosen = transfer_cases.TransferBenchOptions(
        sizes=options.sizes, memories=options.peers, directions=options.directions, seconds=options.seconds
    )
    nodes = sorted({node.id for node in topology.cpu_nodes} & topology.allowed.nodes)
    num_gpus = len(machine.gpus) if options.gpus == "all" else min(1, len(machine.gpus))
    gpu_nodes = _gpu_nodes(topology, num_gpus)
    benchmark = transfer_cases.transfer_benchmark(chosen, gpu_nodes=gpu_nodes, nodes=nodes, no_gpu=machine.no_gpu)
    settings = {**asdict(chosen), "peers_are": transfer_cases.MEMORIES, "nodes": nodes, "gpu_nodes": gpu_nodes}
    run(benchmark, machine, settings, options=options, layout=layouts.TRANSFER)


def _gpu_nodes(topology: Topology, num_gpus: int) -> list[int | None]:
    """Return the nodes of the first GPUs in torch's order. None: the node is unknown."""
    nodes = {gpu.cuda_index: gpu.node for gpu in topology.gpus}
    return [nodes.get(index) for index in range(num_gpus)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _BenchAllocOptions(BenchOptions):
    """The parsed values of the options of `alloc`, by click's names."""

    sizes: tuple[int, ...]
    peers: tuple[str, ...]
    samples: int


@bench.command(short_help="Allocation, writes and copies of memory.")
@click.option("--sizes", type=SIZES, default=alloc_cases.SIZES, show_default="4K to 128M", help="Sizes, e.g. 4K,64M.")
@names_option("--peers", alloc_cases.PEERS, about="Ways to allocate")
@click.option("--samples", type=click.IntRange(1), default=7, help="Allocations per repeat; the median is reported.")
@shared_options(repeats=5, timeout_s=120)
def alloc(**values: object) -> None:
    """Measure the cost of memory: allocation, first write, second write, copy to the GPU.

    Duration: 10 s without a GPU, --quick 3 s (two CPUs). Without a GPU, only ordinary memory is measured.

    \b
    Examples:
      numapin bench alloc                              every way, 4 KiB to 128 MiB
      numapin bench alloc --peers pin-cold,pin-pool    the time of one pin_memory() call
      numapin bench alloc --sizes 1M --repeats 21 --json
    """
    options = record_of(_BenchAllocOptions, values)
    require_torch("numapin bench alloc")
    options, machine = with_quick(options, samples=3, sizes=alloc_cases.QUICK_SIZES), read_machine()
    benchmark = alloc_cases.alloc_benchmark(
        options.sizes, options.peers, num_samples=options.samples, no_gpu=machine.no_gpu
    )
    settings = {"sizes": options.sizes, "num_samples": options.samples, "peers_are": alloc_cases.PEERS}
    run(benchmark, machine, settings, options=options, layout=layouts.ALLOC)


@dataclass(frozen=True, slots=True, kw_only=True)
class _BenchOverlapOptions(BenchOptions):
    """The parsed values of the options of `overlap`, by click's names."""

    cases: tuple[str, ...]
    peers: tuple[str, ...]
    seconds: float


@bench.command(short_help="Loops that load, copy and compute.")
@names_option("--cases", overlap_cases.STEPS, about="Kinds of steps")
@names_option("--peers", overlap_cases.PEERS, about="Ways to copy")
@click.option(
    "--seconds", type=click.FloatRange(0, min_open=True), default=0.7, help="Length of a measuring window in seconds."
)
@shared_options(repeats=5, timeout_s=120)
def overlap(**values: object) -> None:
    """Measure a loop that loads, copies and computes: does pinning help, and is the copy hidden?

    Duration: with the defaults at least 98 s (140 windows of 0.7 s); --quick: 3 s. Needs a GPU.

    \b
    Examples:
      numapin bench overlap                            every kind of step
      numapin bench overlap --cases transfer-bound,compute-bound
      numapin bench overlap --output overlap.json
    """
    options = record_of(_BenchOverlapOptions, values)
    require_torch("numapin bench overlap")
    options, machine = with_quick(options, seconds=0.1), read_machine()
    benchmark = overlap_cases.overlap_benchmark(
        options.cases, options.peers, seconds=options.seconds, no_gpu=machine.no_gpu
    )
    settings = {"seconds": options.seconds, "peers_are": overlap_cases.PEERS}
    run(benchmark, machine, settings, options=options, layout=layouts.OVERLAP)


@dataclass(frozen=True, slots=True, kw_only=True)
class _BenchLoaderOptions(BenchOptions):
    """The parsed values of the options of `loader`, by click's names."""

    cases: tuple[str, ...]
    peers: tuple[str, ...]
    seconds: float
    warm_up: float
    batches: int
    workers: int | None
    prefetch: int
    gpus: str


@bench.command(short_help="Batches per second of DataLoaders.")
@names_option("--cases", loader_cases.CASES, about="Kinds of batches; those with transport need no GPU")
@names_option("--peers", loader_cases.PEERS, about="Loaders to compare")
@click.option(
    "--seconds", type=click.FloatRange(0, min_open=True), default=3.0, help="Length of a measuring window in seconds."
)
@click.option(
    "--warm-up", type=click.FloatRange(0), metavar="S", default=2.0, help="Warm-up before each window in seconds."
)
@click.option("--batches", type=click.IntRange(1), default=10, help="Minimum number of batches per window.")
@click.option("--workers", type=click.IntRange(1), help="Workers per loader (default: depends on the case).")
@click.option(
    "--prefetch", type=click.IntRange(1), default=loader_cases.PREFETCH, help="Batches that each worker prepares ahead."
)
@click.option("--gpus", type=click.Choice(["one", "all"]), default="one", help="all: one process per GPU, all at once.")
@shared_options(repeats=5, timeout_s=180)
def loader(**values: object) -> None:
    """Measure batches per second of numapin.DataLoader and torch's, each in fresh processes.

    Duration: at least 5 s (warm-up and window) for each case, peer and repeat, and the start of its workers. One case
    with two peers takes a minute or two, all cases with all peers more than half an hour.

    \b
    Examples:
      numapin bench loader --quick                    a smoke test
      numapin bench loader --cases 38MB,1MB           two kinds of batches
      numapin bench loader --peers torch,numapin-device --repeats 9
      numapin bench loader --gpus all --cases 38MB    one process per GPU, all at once
      numapin bench loader --output loader.json       all figures, for later
    """
    options = record_of(_BenchLoaderOptions, values)
    require_torch("numapin bench loader")
    options, machine = with_quick(options, seconds=0.5, warm_up=0.5), read_machine()
    chosen = loader_cases.LoaderBenchOptions(
        cases=options.cases,
        peers=options.peers,
        num_workers=options.workers,
        prefetch=options.prefetch,
        seconds=options.seconds,
        warm_up_s=options.warm_up,
        num_batches=options.batches,
        all_gpus=options.gpus == "all",
    )
    benchmark = loader_cases.loader_benchmark(chosen, num_gpus=len(machine.gpus), no_gpu=machine.no_gpu)
    settings = {**asdict(chosen), "peers_are": loader_cases.PEERS}
    run(benchmark, machine, settings, options=options, layout=layouts.LOADER)
