"""`numapin bench`: measure on this machine. Edge.

Comes in: which benchmark, with which options. Goes out: a table or JSON (schema numapin.bench/1) on stdout, and files.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click

from numapin.base.files import write_text_to
from numapin.base.stderr import say
from numapin.base.strict_json import encode
from numapin.bench.cases import alloc as alloc_cases
from numapin.bench.cases import exec as exec_cases
from numapin.bench.cases import launch as launch_cases
from numapin.bench.cases import loader as loader_cases
from numapin.bench.cases import overlap as overlap_cases
from numapin.bench.cases import transfer as transfer_cases
from numapin.bench.machine import read_machine
from numapin.cli.bench_run import SIZES, names_of, run, shared_options, with_quick
from numapin.cli.options import FilePath, topology_from
from numapin.cli.output import json_text, write
from numapin.view import bench_layouts as layouts

if TYPE_CHECKING:
    from numapin.bench.model import BenchReport
    from numapin.topology.model import Topology


def _names(kind: str, known: Any, given: str = "") -> dict[str, Any]:  # noqa: ANN401 - an enum or a dict
    return {"type": names_of(kind, known), "default": given or ",".join(known), "show_default": False}


@click.group(context_settings={"show_default": True})
def bench() -> None:
    """Measure this machine, with the peers alternating in the same run."""


@bench.command()
@click.option(
    "--sizes",
    type=SIZES,
    default=transfer_cases.SIZES,
    show_default="4K to 1G",
    help="Sizes of the copies, e.g. 4K,64M,1G.",
)
@click.option("--peers", **_names("peer", transfer_cases.MEMORIES), help="Kinds of memory (default: all).")
@click.option("--directions", **_names("direction", transfer_cases.Direction), help="h2d, d2h, both (default: all).")
@click.option("--gpus", type=click.Choice(["one", "all"]), default="all", help="all: also all GPUs at once.")
@click.option(
    "--seconds", type=click.FloatRange(0, min_open=True), default=0.1, help="Length of a measuring window in seconds."
)
@shared_options(repeats=5, timeout_s=120)
@click.option(
    "--save", type=FilePath(), metavar="FILE",
    help="Write a machine file in which each GPU of unknown node is on the node that measured fastest.",
)  # fmt: skip
def transfer(**given: Any) -> None:  # noqa: ANN401 - click passes options by name
    """Copies between host and GPU: each kind of memory, from each NUMA node to each GPU.

    \b
    Examples:
      numapin bench transfer --quick                   a smoke test
      numapin bench transfer --plot transfer.svg       all sizes, and a picture
      numapin bench transfer --sizes 64M --directions h2d --repeats 9
      numapin bench transfer --save measured.json      find the nodes of GPUs that report none
      numapin plan --machine measured.json
    """  # noqa: D301 - \b is click's mark for a paragraph that is kept as it is
    given = with_quick(given, seconds=0.02, sizes=transfer_cases.QUICK_SIZES)
    machine, topology = read_machine(), topology_from(gpu_nodes=None)
    options = transfer_cases.TransferBenchOptions(
        sizes=given["sizes"], memories=given["peers"], directions=given["directions"], seconds=given["seconds"]
    )
    nodes = sorted({node.id for node in topology.cpu_nodes} & topology.allowed.nodes)
    gpu_nodes = _gpu_nodes(topology, len(machine.gpus) if given["gpus"] == "all" else min(1, len(machine.gpus)))
    benchmark = transfer_cases.transfer_benchmark(options, gpu_nodes=gpu_nodes, nodes=nodes, no_gpu=machine.no_gpu)
    settings = {**asdict(options), "peers_are": transfer_cases.MEMORIES, "nodes": nodes, "gpu_nodes": gpu_nodes}
    report = run(benchmark, machine, settings, given=given, layout=layouts.TRANSFER)
    if given["save"] is not None:
        _save_measured(report, topology, nodes, num_gpus=len(gpu_nodes), path=given["save"])


def _gpu_nodes(topology: Topology, num_gpus: int) -> list[int | None]:
    """Return the nodes of the first GPUs in torch's order, None where it is unknown."""
    nodes = {gpu.cuda_index: gpu.node for gpu in topology.gpus}
    return [nodes.get(index) for index in range(num_gpus)]


def _save_measured(report: BenchReport, topology: Topology, nodes: list[int], *, num_gpus: int, path: Path) -> None:
    """Write the machine with what was measured; raise NumapinError, and write nothing, where that adds nothing."""
    from numapin.bench.cases.nearest import nearest_nodes, with_measured

    verdicts = nearest_nodes(report.cases, num_gpus=num_gpus, nodes=nodes)
    measured = with_measured(topology, verdicts)
    write(json_text(measured.to_json()), path, option="--save")
    for verdict in verdicts:
        say(f"cuda:{verdict.gpu}: {verdict.reason}")
    pairs = ",".join(f"{gpu.index}={gpu.node}" for gpu in measured.gpus if gpu.node_source == "measured")
    say(f"plan with it: numapin plan --machine {path}; run with it: numapin run --gpu-nodes {pairs}")


@bench.command()
@click.option("--sizes", type=SIZES, default=alloc_cases.SIZES, show_default="4K to 128M", help="Sizes, e.g. 4K,64M.")
@click.option("--peers", **_names("peer", alloc_cases.PEERS), help="Ways to allocate (default: all).")
@click.option("--samples", type=click.IntRange(1), default=7, help="Allocations per repeat; their median counts.")
@shared_options(repeats=5, timeout_s=120)
def alloc(**given: Any) -> None:  # noqa: ANN401 - click passes options by name
    """What memory costs: allocation, first write, second write, copy to the GPU, timed apart.

    \b
    Examples:
      numapin bench alloc                              every way, 4 KiB to 128 MiB
      numapin bench alloc --peers pin-cold,pin-pool    what one pin_memory() call takes
      numapin bench alloc --sizes 1M --repeats 21 --json
    """  # noqa: D301 - \b is click's mark for a paragraph that is kept as it is
    given, machine = with_quick(given, samples=3, sizes=alloc_cases.QUICK_SIZES), read_machine()
    benchmark = alloc_cases.alloc_benchmark(
        given["sizes"],
        given["peers"],
        num_samples=given["samples"],
        no_gpu=machine.no_gpu,
    )
    settings = {"sizes": given["sizes"], "num_samples": given["samples"], "peers_are": alloc_cases.PEERS}
    run(benchmark, machine, settings, given=given, layout=layouts.ALLOC)


@bench.command()
@click.option("--cases", **_names("case", overlap_cases.STEPS), help="Kinds of steps (default: all).")
@click.option("--peers", **_names("peer", overlap_cases.PEERS), help="Ways to copy (default: all).")
@click.option(
    "--seconds", type=click.FloatRange(0, min_open=True), default=0.7, help="Length of a measuring window in seconds."
)
@shared_options(repeats=5, timeout_s=120)
def overlap(**given: Any) -> None:  # noqa: ANN401 - click passes options by name
    """A loop that loads, copies and computes: does pinning help it, and is the copy hidden?

    \b
    Examples:
      numapin bench overlap                            every kind of step
      numapin bench overlap --cases transfer-bound,compute-bound
      numapin bench overlap --plot overlap.svg --output overlap.json
    """  # noqa: D301 - \b is click's mark for a paragraph that is kept as it is
    given, machine = with_quick(given, seconds=0.1), read_machine()
    benchmark = overlap_cases.overlap_benchmark(
        given["cases"],
        given["peers"],
        seconds=given["seconds"],
        no_gpu=machine.no_gpu,
    )
    settings = {"seconds": given["seconds"], "peers_are": overlap_cases.PEERS}
    run(benchmark, machine, settings, given=given, layout=layouts.OVERLAP)


@bench.command()
@click.option("--scripts", **_names("script", launch_cases.SCRIPTS, "print"), help="print, all-reduce.")
@click.option("--peers", **_names("peer", launch_cases.PEERS, "torchrun,numapin"), help="Which launchers.")
@click.option("--ranks", type=click.IntRange(1), default=4, help="How many a launcher starts.")
@shared_options(repeats=7, timeout_s=300)
def launch(**given: Any) -> None:  # noqa: ANN401 - click passes options by name
    """Start-up time and memory of `numapin run` and of torchrun.

    \b
    Examples:
      numapin bench launch                             until every rank has printed a line
      numapin bench launch --scripts all-reduce --ranks 2
      numapin bench launch --peers torchrun,torchrun-numa,numapin
    """  # noqa: D301 - \b is click's mark for a paragraph that is kept as it is
    given = with_quick(given)
    benchmark = launch_cases.launch_benchmark(given["scripts"], given["peers"], num_ranks=given["ranks"])
    settings = {
        "num_ranks": given["ranks"],
        "peers_are": {name: launch_cases.PEERS[name][1:] for name in given["peers"]},
    }
    run(benchmark, read_machine(), settings, given=given, layout=layouts.LAUNCH)


@bench.command(name="exec")
@click.option("--peers", **_names("peer", exec_cases.PEERS), help="What stands before the command; by default all.")
@click.option("--samples", type=click.IntRange(1), default=21, help="Pairs of starts that a repeat is the median of.")
@shared_options(repeats=5, timeout_s=120)
def exec_(**given: Any) -> None:  # noqa: ANN401 - click passes options by name
    """What `numapin exec` adds to the start of a command, with a plan that is there and without.

    \b
    Examples:
      numapin bench exec
      numapin bench exec --peers numapin-plan --repeats 9 --json
    """  # noqa: D301 - \b is click's mark for a paragraph that is kept as it is
    from numapin.plan.make import make_plan
    from numapin.plan.request import Request

    given = with_quick(given, samples=3)
    plan = make_plan(topology_from(gpu_nodes=None), Request(num_ranks=1))
    with TemporaryDirectory() as folder:
        path = Path(folder, "plan.json")
        write_text_to(str(path), encode(plan.to_json()), remedy="make room, or set TMPDIR")
        benchmark = exec_cases.exec_benchmark(given["peers"], plan=str(path), num_samples=given["samples"])
        settings = {"num_samples": given["samples"], "peers_are": {n: exec_cases.PEERS[n][1:] for n in given["peers"]}}
        run(benchmark, read_machine(), settings, given=given, layout=layouts.EXEC)


@bench.command()
@click.option("--cases", **_names("case", loader_cases.CASES), help="Kinds of batches (default: all).")
@click.option("--peers", **_names("peer", loader_cases.PEERS), help="Loaders to compare (default: all).")
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
def loader(**given: Any) -> None:  # noqa: ANN401 - click passes options by name
    """Batches per second of numapin.DataLoader, torch's and others', each in fresh processes.

    \b
    Examples:
      numapin bench loader --quick                    a smoke test
      numapin bench loader --cases 38MB,1MB           two kinds of batches
      numapin bench loader --peers torch,numapin-device --repeats 9
      numapin bench loader --gpus all --cases 38MB    one process a GPU, at once
      numapin bench loader --output loader.json       all figures, for later
    """  # noqa: D301 - \b is click's mark for a paragraph that is kept as it is
    given, machine = with_quick(given, seconds=0.5, warm_up=0.5), read_machine()
    options = loader_cases.LoaderBenchOptions(
        cases=given["cases"],
        peers=given["peers"],
        num_workers=given["workers"],
        prefetch=given["prefetch"],
        seconds=given["seconds"],
        warm_up_s=given["warm_up"],
        num_batches=given["batches"],
        all_gpus=given["gpus"] == "all",
    )
    benchmark = loader_cases.loader_benchmark(options, num_gpus=len(machine.gpus), no_gpu=machine.no_gpu)
    settings = {**asdict(options), "peers_are": loader_cases.PEERS}
    run(benchmark, machine, settings, given=given, layout=layouts.LOADER)
