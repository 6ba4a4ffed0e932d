"""`numapin bench`: measure on this machine. Edge.

Comes in: which benchmark, with which options. Goes out: a table or JSON (schema numapin.bench/1) on stdout, and a file.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from numapin.bench.loader import CASES, PEERS, Options, loader_benchmark
from numapin.bench.model import Report, summarise
from numapin.cli.output import show
from numapin.errors import NumapinError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from numapin.bench.machine import Machine
    from numapin.bench.model import Benchmark, Case, Peer, Run

_QUICK = {"repeats": 1, "seconds": 0.5, "warm_up": 0.5}
_NORMAL = {"repeats": 5, "seconds": 3.0, "warm_up": 2.0}


# click.ParamType takes a type argument since click 8.2 only; hence the ignore.
class Names(click.ParamType):  # type: ignore[type-arg]
    """Names out of a known list, separated by commas."""

    name = "LIST"

    def __init__(self, kind: str, known: Collection[str]) -> None:
        """Remember what the names are of."""
        self._kind, self._known = kind, tuple(known)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:  # noqa: ANN401
        """Split the list, or fail with the names that are known."""
        if isinstance(value, tuple):
            return value
        names = tuple(dict.fromkeys(name.strip() for name in value.split(",")))
        for name in names:
            if name not in self._known:
                self.fail(f"{self._kind} {name!r} is not one of {', '.join(self._known)}", param, ctx)
        return names


@click.group()
def bench() -> None:
    """Measure on this machine, against peers in the same run."""


@bench.command()
@click.option("--cases", type=Names("case", CASES), default=",".join(CASES), help="Which batches; by default all.")
@click.option("--peers", type=Names("peer", PEERS), default=",".join(PEERS), help="Whom to run; by default all.")
@click.option("--repeats", type=click.IntRange(1), help="How often each peer runs, in turn. [default: 5]")
@click.option("--seconds", type=click.FloatRange(0, min_open=True), help="Length of a window. [default: 3]")
@click.option("--warm-up", type=click.FloatRange(0), metavar="S", help="Seconds before the window. [default: 2]")
@click.option("--batches", type=click.IntRange(1), default=10, show_default=True, help="At least so many a window.")
@click.option("--workers", type=click.IntRange(1), help="Workers of every loader; by default as each case says.")
@click.option("--gpus", type=click.Choice(["one", "all"]), default="one", show_default=True, help="All: all at once.")
@click.option("--timeout", type=click.FloatRange(1), default=180, show_default=True, help="Seconds for one peer once.")
@click.option("--quick", is_flag=True, help="One repeat with short windows: to see that everything runs.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option("--output", type=click.Path(path_type=Path), metavar="FILE", help="Write the report to a file as well.")
def loader(**given: Any) -> None:  # noqa: ANN401 - click passes options by name
    """Batches per second of numapin.DataLoader, torch's and others', each in fresh processes.

    \b
    Examples:
      numapin bench loader --quick                    does everything run?
      numapin bench loader --cases 38MB,1MB           two kinds of batches
      numapin bench loader --peers torch,numapin-device --repeats 9
      numapin bench loader --gpus all --cases 38MB    one process a GPU, at once
      numapin bench loader --output loader.json       all figures, for later
    """  # noqa: D301 - \b is click's mark for a paragraph that is kept as it is
    from numapin.bench.machine import read_machine
    from numapin.view.bench_table import LOADER_COLUMNS, LOADER_LEGEND, bench_table

    defaults = _QUICK if given["quick"] else _NORMAL
    given |= {name: value for name, value in defaults.items() if given[name] is None}
    options = Options(
        cases=given["cases"],
        peers=given["peers"],
        num_workers=given["workers"],
        seconds=given["seconds"],
        warm_up_s=given["warm_up"],
        num_batches=given["batches"],
        all_gpus=given["gpus"] == "all",
    )
    machine = read_machine()
    benchmark = loader_benchmark(options, num_gpus=len(machine.gpus), no_gpu=machine.no_gpu)
    settings = {**asdict(options), "repeats": given["repeats"], "timeout_s": given["timeout"], "peers_are": PEERS}
    report = _measure(benchmark, machine, settings, given["output"])
    if given["as_json"]:
        click.echo(_text(report), nl=False)
    else:
        show(bench_table(report, LOADER_COLUMNS, legend=LOADER_LEGEND))
    _require_figures(report)


def _measure(benchmark: Benchmark, machine: Machine, settings: dict[str, Any], output: Path | None) -> Report:
    """Run the benchmark. The file is written after every run, so that one that is cut short leaves what it has."""
    from numapin.bench import harness

    def report() -> Report:
        return Report(
            benchmark=benchmark.name,
            command=("numapin", *sys.argv[1:]),
            machine=machine.to_json(),
            settings=settings,
            cases=summarise(benchmark, runs),
        )

    runs: list[Run] = []
    if output is not None:
        _save(report(), output)  # a file that cannot be written is told before the time is spent
    starts = _progress(benchmark, settings["repeats"])
    for run in harness.measure(benchmark, repeats=settings["repeats"], timeout_s=settings["timeout_s"], starts=starts):
        runs.append(run)
        if output is not None:
            _save(report(), output)
    _clear()
    return report()


def _progress(benchmark: Benchmark, repeats: int) -> Callable[[Case, Peer, int], None]:
    """Return what shows, on a terminal, which run is on; a line that the next one overwrites."""
    total = repeats * sum(len(case.peers) for case in benchmark.cases)
    done = 0

    def starts(case: Case, peer: Peer, repeat: int) -> None:
        nonlocal done
        done += 1
        _clear()
        if sys.stderr.isatty():
            click.echo(f"{done}/{total}  {case.name}  {peer.name}  repeat {repeat + 1}", err=True, nl=False)

    return starts


def _clear() -> None:
    if sys.stderr.isatty():
        click.echo("\r\033[K", err=True, nl=False)


def _require_figures(report: Report) -> None:
    """Raise NumapinError where nothing at all could be measured."""
    if any(peer.num_runs for case in report.cases for peer in case.peers):
        return
    cases = [case.skipped for case in report.cases]
    peers = [peer.skipped for case in report.cases for peer in case.peers]
    why = next((reason for reason in (*peers, *cases) if reason), "none of these peers fits these cases")
    raise NumapinError(
        f"nothing was measured: {why}", "what runs without a GPU: numapin bench loader --cases transport"
    )


def _text(report: Report) -> str:
    return json.dumps(report.to_json(), indent=1, ensure_ascii=False) + "\n"


def _save(report: Report, path: Path) -> None:
    try:
        temporary = path.with_name(f".{path.name}.new")
        temporary.write_text(_text(report), encoding="utf-8")
        temporary.replace(path)
    except (OSError, ValueError) as error:  # with_name takes no path that ends in no name
        raise NumapinError(f"{path} cannot be written: {error}", "choose another file for --output") from None
