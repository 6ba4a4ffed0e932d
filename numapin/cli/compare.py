"""`numapin compare`: is this script faster under another launcher?"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import click

from numapin.base.cpu_set import CpuSet
from numapin.base.files import make_own
from numapin.base.redact import without_secrets
from numapin.base.stderr import say
from numapin.base.text import counted
from numapin.cli.options import FilePath, Parsed, record_of, topology_from
from numapin.cli.output import (
    clear_status,
    emit,
    json_text,
    require_writable,
    say_error,
    show,
    show_status,
    write,
)
from numapin.cli.torch_import import require_torch
from numapin.compare.variants import (
    DEFAULT,
    KNOWN,
    SOCKET,
    Script,
    known_variant,
    own_command,
    own_variant,
    parse_names,
    require_different_names,
)
from numapin.errors import NumapinError, PlanError, UsageError
from numapin.plan.request import Bind, Request
from numapin.steps.record import MOST_STEPS, StepSettings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import FrameType

    from numapin.compare.measure import ComparedRun, RunProgress
    from numapin.compare.report import CompareReport
    from numapin.compare.variants import Variant
    from numapin.plan.model import Plan
    from numapin.topology.model import Topology

_HELP: Final = "numapin compare --help"
_OTHERWISE: Final = "run a module with -m, other programs with --a COMMAND --b COMMAND"
_NAMES: Final = Parsed("LIST", parse_names, words=KNOWN, many=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _CompareOptions:
    """The parsed values of the options of `compare`, by click's names."""

    variants: tuple[str, ...] | None
    own: tuple[str, ...]
    a: str | None
    b: str | None
    nproc_per_node: int | None
    module: bool
    repeats: int
    steps: int
    skip: int
    seconds: float
    margin: float
    timeout: float
    grace: float
    as_json: bool
    output: Path | None
    logs: Path | None
    command: tuple[str, ...]


def _percent(text: str) -> float:
    """Parse "5" or "5%"."""
    try:
        value = float(text.strip().removesuffix("%"))
    except ValueError:
        raise ValueError(f"{text!r} is not a percentage such as 5 or 5%") from None
    if not 0 < value <= 100:
        raise ValueError(f"{text!r} is not between 0 and 100 %")
    return value / 100


@click.command(
    short_help="Is this script faster under another launcher?",
    context_settings={"allow_interspersed_args": False, "show_default": True},
)
@click.option(
    "--variants",
    type=_NAMES,
    help=f"Launchers to compare; each is compared with the first one: {', '.join(KNOWN)}.  "
    f"[default: {','.join(DEFAULT)}; with {SOCKET} where numapin's plan leaves CPUs idle that --bind socket uses]",
)
@click.option(
    "--variant",
    "own",
    multiple=True,
    metavar="TEXT",
    help="Also compare a launcher with options, such as 'numapin --bind socket --no-smt' or "
    "'OMP_NUM_THREADS=8 torchrun'. May be repeated.",
)
@click.option("--a", metavar="COMMAND", help="Compare two complete commands instead of launchers: the first command.")
@click.option(
    "--b", metavar="COMMAND", help="The second command. Both run without a shell; VAR=value may precede them."
)
@click.option(
    "--nproc-per-node",
    type=click.IntRange(1),
    metavar="N",
    help="Number of ranks in every variant (default: one per GPU).",
)
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a Python module.")
@click.option(
    "--repeats",
    type=click.IntRange(1),
    default=8,
    help="Runs of each variant; variants take turns. A verdict needs at least 5.",
)
@click.option("--steps", type=click.IntRange(2, MOST_STEPS), default=100, help="Steps to measure in each run.")
@click.option(
    "--skip", type=click.IntRange(1, MOST_STEPS), default=10, help="Number of steps at the start that are not measured."
)
@click.option(
    "--seconds",
    type=click.FloatRange(0, min_open=True),
    default=10.0,
    help="Measure fewer steps if --steps steps would take longer than this. A first run decides for all runs.",
)
@click.option(
    "--margin", type=Parsed("PERCENT", _percent), default="5%",
    help="The outcome is 'no difference' if the whole interval is within this distance of 1.",
)  # fmt: skip
@click.option("--timeout", type=click.FloatRange(1), default=600.0, help="Time limit of one run in seconds.")
@click.option(
    "--grace", type=click.FloatRange(0), default=15.0, help="Seconds from SIGTERM to SIGKILL when a run is stopped."
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option("--output", type=FilePath(), metavar="FILE", help="Also write the report to a file.")
@click.option("--logs", type=FilePath(), metavar="DIR", help="Keep the output of every run in this folder.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[--] SCRIPT [ARGUMENTS]...")
def compare(**values: object) -> None:
    """Run an unmodified script under several launchers in turn, and report which is faster and how certain that is.

    Each run is stopped after --steps steps, or after fewer if --steps steps would take longer than --seconds; all runs
    measure the same number of steps. The outcome for each variant is one of: faster, slower, no difference, not settled
    (more steps are needed), not enough runs to tell.

    Duration: VARIANTS x REPEATS x (start-up + first steps + SECONDS). With the defaults and a script that starts in
    10 s, this is about 12 minutes. Progress shows the remaining time.

    \b
    Examples:
      numapin compare train.py --lr 0.1                   torchrun and numapin: 12 minutes
      numapin compare --repeats 5 --seconds 5 train.py    a first look: 6 minutes
      numapin compare --variants torchrun,numapin --output report.json train.py
      numapin compare --variants torchrun --variant 'numapin --bind exclusive' train.py
      numapin compare --a 'python old.py' --b 'python new.py'
    """
    options = record_of(_CompareOptions, values)
    _check(options)
    from numapin.plan.make import default_num_ranks, make_plan  # --help needs neither
    from numapin.rank import hook_env

    topology = topology_from(gpu_nodes=None)
    # numapin's plan gives the number of ranks and their nodes; some machines have no plan.
    plan: Plan | None = None
    with suppress(PlanError):
        plan = make_plan(topology, Request(num_ranks=options.nproc_per_node or default_num_ranks(topology)))
    variants = _variants(options, plan, topology)
    require_different_names(variants)
    for variant in variants:
        reason = hook_env.refusal(variant.command)
        if reason:
            raise UsageError(f"{variant.name}: steps cannot be counted: {reason}", "leave that option out")
    with _exiting_on_sigterm():
        _compare(options, variants, topology, plan)


def _check(options: _CompareOptions) -> None:
    """Raise UsageError for options that contradict each other, before anything is started."""
    if (options.a is None) != (options.b is None):
        raise UsageError(
            "--a and --b must be given together", "numapin compare --a 'python old.py' --b 'python new.py'"
        )
    if options.a is not None and options.command:
        raise UsageError(f"--a and --b are complete commands; {options.command[0]} belongs to neither", _HELP)
    if options.a is None and not options.command:
        raise UsageError("there is no script to run", _HELP)
    if options.a is None:
        from numapin.launcher.program import require_program

        require_program(
            options.command[0], module=options.module, no_python=False, run_path=False, otherwise=_OTHERWISE
        )
        require_torch("numapin compare with a script")
    require_writable(options.output, option="--output")


def _variants(options: _CompareOptions, plan: Plan | None, topology: Topology) -> list[Variant]:
    if options.a is not None and options.b is not None:
        return [own_command(options.a, option="--a"), own_command(options.b, option="--b")]
    script = Script(
        words=options.command,
        is_module=options.module,
        num_ranks=options.nproc_per_node or (len(plan.ranks) if plan else 1),
        num_threads=min((rank.num_threads for rank in plan.ranks), default=1) if plan else 1,
    )
    names = default_names(topology, plan) if options.variants is None else options.variants
    named = [known_variant(name, script) for name in names]
    return [*named, *(own_variant(text, script) for text in options.own)]


def default_names(topology: Topology, plan: Plan | None) -> tuple[str, ...]:
    """Return the default variants, with `--bind socket` if it uses CPUs that the plan leaves idle."""
    if plan is None:
        return DEFAULT
    from numapin.plan.make import make_plan

    wider = make_plan(topology, Request(num_ranks=len(plan.ranks), bind=Bind.SOCKET))
    used, usable = (CpuSet().union(*(rank.cpus for rank in one.ranks)) for one in (plan, wider))
    if usable <= used:
        return DEFAULT
    idle = counted(len(usable - used), "CPU")
    say(f"{SOCKET} is compared, too: it uses {idle} that stay idle under the other variants of numapin")
    return (*DEFAULT, SOCKET)


@contextmanager
def _exiting_on_sigterm() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into an exit, so that the job that runs is stopped and the report is written."""

    def leave(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    kept = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def _compare(options: _CompareOptions, variants: list[Variant], topology: Topology, plan: Plan | None) -> None:
    """Make all runs, and show the report. Raises NumapinError if there was nothing to compare."""
    from numapin.bench.machine import read_machine
    from numapin.compare.job import JobOptions
    from numapin.compare.measure import measure_all
    from numapin.compare.report import make_report
    from numapin.topology.sources.nvml import open_loads

    machine = read_machine().to_json()
    runs: list[ComparedRun] = []

    def report_now(*, is_complete: bool) -> CompareReport:
        names = ("repeats", "steps", "skip", "seconds", "margin", "timeout")
        return make_report(
            variants,
            runs,
            command=("numapin", *without_secrets(sys.argv[1:])),
            host=os.uname().nodename,
            date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            machine=machine,
            settings={name: getattr(options, name) for name in names},
            margin=options.margin,
            is_complete=is_complete,
        )

    logs = options.logs and options.logs.absolute()
    if logs is not None:
        try:
            make_own(str(logs))
        except OSError as error:
            problem = f"{options.logs} cannot be used: {error.strerror}"
            raise NumapinError(problem, "choose another with --logs DIR") from None
    nodes = {rank.local_rank: rank.nodes for rank in plan.ranks} if plan else {}
    uuids = [gpu.uuid for gpu in topology.visible_gpus if gpu.uuid is not None]
    settings = StepSettings(folder="", skip=options.skip, steps=options.steps, seconds=options.seconds)
    try:
        with open_loads(uuids) as loads:
            job_options = JobOptions(
                settings=settings,
                timeout_s=options.timeout,
                grace_s=options.grace,
                nodes=nodes,
                loads=loads,
                logs=logs,
            )
            for made in measure_all(
                variants, job_options, num_rounds=options.repeats, progress=lambda run: show_status(progress_text(run))
            ):
                clear_status()
                say(_run_in_words(made, is_first=not runs or runs[-1].variant != made.variant))
                runs.append(made)
                if options.output is not None:  # so that even a killed comparison leaves what it measured
                    with suppress(NumapinError):  # the last write reports it
                        _write(report_now(is_complete=False), options)
    except BaseException:  # Ctrl-C: show what was measured until now; an error of that does not decide the status
        clear_status()
        if any(run.round is not None for run in runs):
            try:
                _show(report_now(is_complete=False), options)
            except NumapinError as error:
                say_error(error.message, error.hint)
        raise
    report = report_now(is_complete=True)
    if report.measured:
        _show(report, options)
    if len(report.measured) < 2:  # why was said when each variant failed
        what = _all_failed(report)
        if report.measured:
            what = f"nothing could be compared: only {report.measured[0].name} was measured"
        raise NumapinError(what, "run the script by itself first; keep the output of every run with --logs DIR")


def _show(report: CompareReport, options: _CompareOptions) -> None:
    if options.as_json:
        emit(json_text(report.to_json()))
    else:
        from numapin.view.compare_table import compare_table

        show(compare_table(report))
    _write(report, options)


def _write(report: CompareReport, options: _CompareOptions) -> None:
    if options.output is not None:
        write(json_text(report.to_json()), options.output, option="--output")


def _run_in_words(made: ComparedRun, *, is_first: bool) -> str:
    """Return the outcome of a run, and the time that is left; `is_first`: of the uncounted runs of a variant."""
    (name,) = without_secrets([made.variant])
    result = made.result
    if result.failure is not None:
        return f"{name} failed, and is left out: {result.failure.partition(chr(10))[0]}"
    from numapin.compare.measure import duration

    left = f"; {duration(made.left_s)} left" if made.left_s else ""
    times = f"{result.figures['step_s'] * 1000:.2f} ms per step, in {made.took_s:.0f} s{left}"
    uncounted = f"{'first' if is_first else 'second'} run, not counted"
    return f"{name}, {uncounted if made.round is None else f'repeat {made.round + 1}'}: {times}"


def _all_failed(report: CompareReport) -> str:
    """Return the message that every variant failed, with the last lines of each one's output; equal outputs once."""
    names: dict[str, list[str]] = {}
    for variant in report.variants:
        lines = (variant.failure or "").partition("\n")[2]
        names.setdefault(lines, []).append(variant.name)
    shown = [f"    output of {' and '.join(names)}:\n{lines}" for lines, names in names.items() if lines]
    return "\n".join(["every variant failed" + ("; the last lines of what they wrote:" if shown else ""), *shown])


def progress_text(progress: RunProgress) -> str:
    """Return the current run, and how long it and the rest will take."""
    from numapin.compare.measure import duration

    left_s = progress.left_s
    when = "" if left_s is None else f"; {duration(left_s)} left"
    run = "first run, not counted" if progress.round is None else f"run {progress.number}/{progress.total}"
    return f"{run}: {progress.variant}, {progress.doing}, {duration(progress.elapsed_s)}{when}"
