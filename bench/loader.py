"""Batches per second of numapin.DataLoader and torch's, on batches of several kinds; see --help.

Whether another loader makes a script of yours faster, `numapin compare --variants torchrun,numapin-loader` answers.
"""

from __future__ import annotations

from typing import Any

import click

from bench import loading
from numapin.bench.machine import read_machine
from numapin.cli.bench import measure, names_option, shared_options
from numapin.cli.main import fail
from numapin.cli.output import prepare_streams
from numapin.cli.torch_import import require_torch
from numapin.errors import NumapinError


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@names_option("--cases", loading.CASES, about="Kinds of batches; those with transport need no GPU")
@names_option("--peers", loading.PEERS, about="Loaders to compare")
@click.option(
    "--seconds", type=click.FloatRange(0, min_open=True), default=3.0, help="Length of a measuring window in seconds."
)
@click.option(
    "--warm-up", type=click.FloatRange(0), metavar="S", default=2.0, help="Warm-up before each window in seconds."
)
@click.option("--batches", type=click.IntRange(1), default=10, help="Minimum number of batches per window.")
@click.option("--workers", type=click.IntRange(1), help="Workers per loader (default: depends on the case).")
@click.option(
    "--prefetch", type=click.IntRange(1), default=loading.PREFETCH, help="Batches that each worker prepares ahead."
)
@click.option("--gpus", type=click.Choice(["one", "all"]), default="one", help="all: one process per GPU, all at once.")
@shared_options(timeout_s=180, seconds=0.5, warm_up=0.5)
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
    **shared: Any,  # noqa: ANN401 - as `measure` takes them
) -> None:
    r"""Measure batches per second of numapin.DataLoader and torch's, each in fresh processes.

    Duration: at least 5 s (warm-up and window) for each case, peer and repeat, and the start of its workers. One case
    with two peers takes a minute or two, all cases with all peers more than half an hour.

    \b
    Examples:
      python -m bench.loader --quick                    a smoke test
      python -m bench.loader --cases 38MB,1MB           two kinds of batches
      python -m bench.loader --peers torch,numapin-device --repeats 9
      python -m bench.loader --gpus all --cases 38MB    one process per GPU, all at once
      python -m bench.loader --output loader.json       all figures, for later
    """
    require_torch("bench.loader")
    machine = read_machine()
    benchmark = loading.loader_benchmark(
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
    measure(benchmark, machine, **shared, program="bench.loader")


if __name__ == "__main__":
    prepare_streams()
    try:
        loader.main(prog_name="python -m bench.loader")
    except NumapinError as error:
        fail(error)
