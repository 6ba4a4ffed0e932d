"""`numapin bench`: measure this machine."""

from __future__ import annotations

import sys
import time
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from numapin.base import formats
from numapin.base.redact import without_secrets
from numapin.base.text import counted
from numapin.bench import alloc as alloc_bench
from numapin.bench import loader as loader_bench
from numapin.bench import overlap as overlap_bench
from numapin.bench import transfer as transfer_bench
from numapin.bench.machine import read_machine
from numapin.bench.model import BenchReport, summarize
from numapin.bench.verdict import verdict_of
from numapin.cli.early_end import EarlyEnd
from numapin.cli.options import FilePath, Parsed, Seconds, topology_from
from numapin.cli.output import ReportWriter, clear_status, require_writable, show_status
from numapin.cli.torch_import import require_torch
from numapin.errors import NumapinError
from numapin.view.bench_table import bench_table

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

    from numapin.bench.machine import BenchMachine
    from numapin.bench.model import Benchmark, Case, Peer, Run

F = TypeVar("F", bound="Callable[..., None]")

_WRITE_EVERY_S: Final = 5.0
_MAX_SIZE: Final = 1 << 40


def _names_option(option: str, known: Collection[str], *, about: str) -> Callable[[F], F]:
    """Return the decorator of an option that takes known names, separated by commas. Its default is all of them."""
    kind = option.strip("-").removesuffix("s")

    def parse(text: str) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
        for name in names:
            if name not in known:
                raise ValueError(f"{kind} {name!r} is not one of {', '.join(known)}")
        return names

    return click.option(
        option,
        type=Parsed("LIST", parse, words=known, many=True),
        default=",".join(known),
        show_default=False,
        help=f"{about}: {', '.join(known)}  [default: all]",
    )


def parse_sizes(text: str) -> tuple[int, ...]:
    """Parse sizes, separated by commas: 4K,64M,1G. Return their bytes in rising order. Raises ValueError."""
    words = {formats.parse_size(word): word for word in text.split(",")}
    largest = max(words)
    if largest > _MAX_SIZE:
        raise ValueError(f"{words[largest]!r} is more than {formats.render_size(_MAX_SIZE)}")
    return tuple(sorted(words))


_SIZES: Final = Parsed("LIST", parse_sizes)


def _shared_options(*, timeout_s: int = 120, **quick: object) -> Callable[[F], F]:
    """Return the decorator of every benchmark's options. --quick changes defaults: one repeat, and those in `quick`."""

    def set_defaults(ctx: click.Context, _: click.Parameter, is_quick: bool) -> None:  # noqa: FBT001 - click's order
        if is_quick:
            ctx.default_map = {"repeats": 1, **quick}

    options = (
        click.option(
            "--repeats", type=click.IntRange(1), default=5, help="Number of repeats, alternating between the peers."
        ),
        click.option("--timeout", type=Seconds(1), default=timeout_s, help="Time limit of one measurement in seconds."),
        click.option(
            "--quick",
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=set_defaults,
            help="Smoke test: one short repeat.",
        ),
        click.option("--json", "as_json", is_flag=True, help="Print the report as JSON."),
        click.option("--output", type=FilePath(), help="Also write the report to a file."),
    )

    def add(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return add


@click.group(context_settings={"show_default": True})
def bench() -> None:
    """Measure this machine. Each benchmark answers one question and ends with a one-line verdict.

    \b
    Command   Question                                     Typical duration
    alloc     Is it worth reusing or pinning memory?       10 s without a GPU
    transfer  Are copies of pinned memory faster?          24 s per GPU and node
    overlap   Does pinning make a loop faster, and which?  at least 98 s
    loader    Is another DataLoader faster?                1 to 2 min per case

    Start with `numapin bench transfer --quick` on a machine with a GPU, and with `numapin bench alloc` on others.
    --quick measures once, which only shows that everything runs. A verdict needs at least five repeats.

    The variants (peers) take turns, so that all run under the same conditions. On a terminal, the last line shows the
    progress and the remaining time. Ctrl-C, SIGTERM and SIGHUP end a benchmark early: the results so far are shown and
    written, marked as partial.

    \b
    Examples:
      numapin bench alloc                                what memory costs: 10 s
      numapin bench transfer --quick                     a smoke test
      numapin bench loader --cases 38MB --peers torch,numapin-device
      numapin bench overlap --output overlap.json
    """


@bench.command(short_help="Copies between host and GPU.")
@click.option(
    "--sizes",
    type=_SIZES,
    default=transfer_bench.SIZES,
    show_default="4K to 1G",
    help="Sizes of the copies, e.g. 4K,64M,1G.",
)
@_names_option("--peers", transfer_bench.PEERS, about="Kinds of memory")
@_names_option("--directions", transfer_bench.DIRECTIONS, about="To the GPU (h2d), or back (d2h)")
@click.option("--gpus", type=click.Choice(["one", "all"]), default="all", help="all: also all GPUs at once.")
@click.option("--seconds", type=Seconds(0, min_open=True), default=0.1, help="Length of a measuring window in seconds.")
@_shared_options(seconds=0.02, sizes=transfer_bench.QUICK_SIZES)
def transfer(
    *,
    sizes: tuple[int, ...],
    peers: tuple[str, ...],
    directions: tuple[str, ...],
    gpus: str,
    seconds: float,
    **shared: Any,  # noqa: ANN401 - as _measure takes them
) -> None:
    """Measure copies between host and GPU: each kind of memory, from each NUMA node to each GPU.

    Duration: with the defaults at least 24 s (240 windows of 0.1 s) per pair of GPU and NUMA node; --quick: 1 s.

    \b
    Examples:
      numapin bench transfer --quick                   a smoke test
      numapin bench transfer --output transfer.json    all figures, in a file
      numapin bench transfer --sizes 64M --directions h2d --repeats 9
    """
    require_torch("numapin bench transfer")
    machine, topology = read_machine(), topology_from(gpu_nodes=None)
    num_gpus = len(machine.gpus) if gpus == "all" else min(1, len(machine.gpus))
    node_of = {gpu.cuda_index: gpu.node for gpu in topology.gpus}
    benchmark = transfer_bench.transfer_benchmark(
        sizes=sizes,
        peers=peers,
        directions=directions,
        seconds=seconds,
        gpu_nodes=[node_of.get(index) for index in range(num_gpus)],  # in torch's order
        nodes=sorted({node.id for node in topology.cpu_nodes} & topology.allowed.nodes),
        no_gpu=machine.no_gpu,
    )
    _measure(benchmark, machine, **shared)


@bench.command(short_help="Allocation, writes and copies of memory.")
@click.option("--sizes", type=_SIZES, default=alloc_bench.SIZES, show_default="4K to 128M", help="Sizes, e.g. 4K,64M.")
@_names_option("--peers", alloc_bench.PEERS, about="Ways to allocate")
@click.option("--samples", type=click.IntRange(1), default=7, help="Allocations per repeat; the median is reported.")
@_shared_options(samples=3, sizes=alloc_bench.QUICK_SIZES)
def alloc(
    *,
    sizes: tuple[int, ...],
    peers: tuple[str, ...],
    samples: int,
    **shared: Any,  # noqa: ANN401 - as _measure takes them
) -> None:
    """Measure the cost of memory: allocation, first write, second write, copy to the GPU.

    Duration: 10 s without a GPU, --quick 3 s (two CPUs). Without a GPU, only ordinary memory is measured.

    \b
    Examples:
      numapin bench alloc                              every way, 4 KiB to 128 MiB
      numapin bench alloc --peers pin-cold,pin-pool    one pin_memory() call
      numapin bench alloc --sizes 1M --repeats 21 --json
    """
    require_torch("numapin bench alloc")
    machine = read_machine()
    benchmark = alloc_bench.alloc_benchmark(sizes=sizes, peers=peers, num_samples=samples, no_gpu=machine.no_gpu)
    _measure(benchmark, machine, **shared)


@bench.command(short_help="Loops that load, copy and compute.")
@_names_option("--cases", overlap_bench.STEPS, about="Kinds of steps")
@_names_option("--peers", overlap_bench.PEERS, about="Ways to copy")
@click.option("--seconds", type=Seconds(0, min_open=True), default=0.7, help="Length of a measuring window in seconds.")
@_shared_options(seconds=0.1)
def overlap(
    *,
    cases: tuple[str, ...],
    peers: tuple[str, ...],
    seconds: float,
    **shared: Any,  # noqa: ANN401 - as _measure takes them
) -> None:
    """Measure a loop that loads, copies and computes: does pinning help, and is the copy hidden?

    Duration: with the defaults at least 98 s (140 windows of 0.7 s); --quick: 3 s. Needs a GPU.

    \b
    Examples:
      numapin bench overlap                            every kind of step
      numapin bench overlap --cases transfer-bound,compute-bound
      numapin bench overlap --output overlap.json
    """
    require_torch("numapin bench overlap")
    machine = read_machine()
    benchmark = overlap_bench.overlap_benchmark(steps=cases, peers=peers, seconds=seconds, no_gpu=machine.no_gpu)
    _measure(benchmark, machine, **shared)


@bench.command(short_help="Batches per second of DataLoaders.")
@_names_option("--cases", loader_bench.CASES, about="Kinds of batches; those with transport need no GPU")
@_names_option("--peers", loader_bench.PEERS, about="Loaders to compare")
@click.option("--seconds", type=Seconds(0, min_open=True), default=3.0, help="Length of a measuring window in seconds.")
@click.option("--warm-up", type=Seconds(0), metavar="S", default=2.0, help="Warm-up before each window in seconds.")
@click.option("--batches", type=click.IntRange(1), default=10, help="Minimum number of batches per window.")
@click.option("--workers", type=click.IntRange(1), help="Workers per loader (default: depends on the case).")
@click.option(
    "--prefetch", type=click.IntRange(1), default=loader_bench.PREFETCH, help="Batches that each worker prepares ahead."
)
@click.option("--gpus", type=click.Choice(["one", "all"]), default="one", help="all: one process per GPU, all at once.")
@_shared_options(timeout_s=180, seconds=0.5, warm_up=0.5)
def loader(
    *,
    cases: tuple[str, ...],
    peers: tuple[str, ...],
    seconds: float,
    warm_up: float,
    batches: int,
    workers: int | None,
    prefetch: int,
    gpus: str,
    **shared: Any,  # noqa: ANN401 - as _measure takes them
) -> None:
    """Measure batches per second of numapin.DataLoader and torch's, each in fresh processes.

    Duration: at least 5 s (warm-up and window) for each case, peer and repeat, and the start of its workers. One case
    with two peers takes a minute or two, all cases with all peers more than half an hour.

    \b
    Examples:
      numapin bench loader --quick                    a smoke test
      numapin bench loader --cases 38MB,1MB           two kinds of batches
      numapin bench loader --peers torch,numapin-device --repeats 9
      numapin bench loader --gpus all --cases 38MB    a process for each GPU
      numapin bench loader --output loader.json       all figures, for later
    """
    require_torch("numapin bench loader")
    machine = read_machine()
    benchmark = loader_bench.loader_benchmark(
        cases=cases,
        peers=peers,
        num_workers=workers,
        prefetch=prefetch,
        seconds=seconds,
        warm_up_s=warm_up,
        num_batches=batches,
        all_gpus=gpus == "all",
        num_gpus=len(machine.gpus),
        no_gpu=machine.no_gpu,
    )
    _measure(benchmark, machine, **shared)


def _measure(
    benchmark: Benchmark, machine: BenchMachine, *, repeats: int, timeout: float, as_json: bool, output: Path | None
) -> None:
    """Measure, show the report and write the file.

    Raises NumapinError if nothing was measured, and Stopped, with a partial report, if a signal ended the measurement.
    """
    from numapin.bench import process

    require_writable(output, option="--output")
    runs: list[Run] = []
    num_started, num_planned = 0, repeats * sum(len(case.peers) for case in benchmark.cases)
    began_s = written_s = time.monotonic()

    def report_now(*, is_complete: bool) -> BenchReport:
        cases = summarize(benchmark, runs)
        return BenchReport(
            benchmark=benchmark.name,
            command=("numapin", *without_secrets(sys.argv[1:])),
            machine=machine.to_json(),
            settings={**benchmark.settings, "repeats": repeats, "timeout_s": timeout},
            cases=cases,
            is_complete=is_complete,
            verdict=verdict_of(benchmark.questions, cases),
        )

    writer = ReportWriter(
        as_json=as_json, output=output, table=lambda report: bench_table(report, benchmark.columns, benchmark.legend)
    )

    def show_start(case: Case, peer: Peer, repeat: int) -> None:
        nonlocal num_started
        left = f"  {formats.left_in_words(num_started, num_planned, time.monotonic() - began_s)}"
        num_started += 1
        show_status(f"{num_started}/{num_planned}  {case.name}  {peer.name}  repeat {repeat + 1}" + left.rstrip())

    with EarlyEnd() as end:
        made = process.measure(benchmark, repeats=repeats, timeout_s=timeout, starts=show_start)
        with closing(made):  # at once, also if a signal ends this: it ends the measuring processes
            for one in made:
                runs.append(one)
                if one.skipped is not None:  # then the peer has no later repeats in this case
                    num_planned -= repeats - one.repeat - 1
                # The file is written every few seconds, so that even a killed run leaves what it measured.
                if time.monotonic() - written_s >= _WRITE_EVERY_S:
                    with suppress(NumapinError):  # the last write reports it
                        writer.write(report_now(is_complete=False))
                    written_s = time.monotonic()
    clear_status()

    report = report_now(is_complete=not end.came)
    has_figures = any(peer.num_runs for case in report.cases for peer in case.peers)
    if end.came:
        if has_figures:
            writer.keep(report)
        num_measured = sum(run.skipped is None for run in runs)
        covered = f"the report covers the first {counted(num_measured, 'measurement')}, and the workers have ended"
        end.leave(covered if num_measured else "nothing was measured")
    writer.show(report)
    writer.write(report)  # shown first, because writing may fail
    if has_figures:
        return
    reasons = [peer.skipped for case in report.cases for peer in case.peers] + [case.skipped for case in report.cases]
    reason = next(filter(None, reasons), "none of these peers fits these cases")
    is_about_gpus = not reason.startswith("failed") and ("GPU" in reason or "CUDA" in reason)
    if is_about_gpus:
        remedy = "these run without a GPU: numapin bench alloc, bench loader --cases transport"
    else:
        remedy = f"numapin bench {benchmark.name} --help lists what else can be measured"
    raise NumapinError(f"nothing was measured: {reason}", remedy)
