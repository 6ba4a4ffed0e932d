"""`numapin compare`: is this script faster under another launcher?"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import click

from numapin.base.cpu_set import CpuSet
from numapin.base.files import make_own
from numapin.base.redact import without_secrets
from numapin.base.stderr import say
from numapin.base.text import counted
from numapin.cli.early_end import EarlyEnd
from numapin.cli.options import FilePath, Parsed, Seconds, topology_from
from numapin.cli.output import ReportWriter, clear_status, require_writable, show_status
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
    from pathlib import Path

    from numapin.compare.campaign import ComparedRun
    from numapin.compare.report import CompareReport
    from numapin.plan.model import Plan
    from numapin.topology.model import Topology

_HELP: Final = "numapin compare --help"
_NAMES: Final = Parsed("LIST", parse_names, words=KNOWN, many=True)


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
    type=Seconds(0, min_open=True),
    default=10.0,
    help="Measure fewer steps if --steps steps would take longer than this. A first run decides for all runs.",
)
@click.option(
    "--margin", type=Parsed("PERCENT", _percent), default="5%",
    help="The outcome is 'no difference' if the whole interval is within this distance of 1.",
)  # fmt: skip
@click.option("--timeout", type=Seconds(1), default=600.0, help="Time limit of one run in seconds.")
@click.option("--grace", type=Seconds(0), default=15.0, help="Seconds from SIGTERM to SIGKILL when a run is stopped.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option("--output", type=FilePath(), metavar="FILE", help="Also write the report to a file.")
@click.option("--logs", type=FilePath(), metavar="DIR", help="Keep the output of every run in this folder.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[--] SCRIPT [ARGUMENTS]...")
def compare(
    *,
    variants: tuple[str, ...] | None,
    own: tuple[str, ...],
    a: str | None,
    b: str | None,
    nproc_per_node: int | None,
    module: bool,
    repeats: int,
    steps: int,
    skip: int,
    seconds: float,
    margin: float,
    timeout: float,
    grace: float,
    as_json: bool,
    output: Path | None,
    logs: Path | None,
    command: tuple[str, ...],
) -> None:
    """Run an unmodified script under several launchers in turn, and report which is faster and how certain that is.

    Each run is stopped after --steps steps, or after fewer if --steps steps would take longer than --seconds; all runs
    measure the same number of steps. The outcome for each variant is one of: faster, slower, no difference, not settled
    (more steps are needed), not enough runs to tell.

    Duration: VARIANTS x REPEATS x (start-up + first steps + SECONDS). With the defaults and a script that starts in
    10 s, this is about 12 minutes. Progress shows the remaining time.

    \b
    Examples:
      numapin compare train.py --lr 0.1                   with torchrun: 12 min
      numapin compare --repeats 5 --seconds 5 train.py    a first look: 6 min
      numapin compare --variants torchrun,numapin --output report.json train.py
      numapin compare --variants torchrun --variant 'numapin --no-smt' train.py
      numapin compare --a 'python old.py' --b 'python new.py'
    """
    # Contradicting options are refused before anything is started.
    if (a is None) != (b is None):
        raise UsageError(
            "--a and --b must be given together", "numapin compare --a 'python old.py' --b 'python new.py'"
        )
    if a is not None:
        options = {"--variants": variants, "--variant": own, "--nproc-per-node": nproc_per_node, "--module": module}
        unused = [*(option for option, value in options.items() if value), *command]
        if unused:
            raise UsageError(f"--a and --b are complete commands; {unused[0]} belongs to neither", _HELP)
    if a is None and not command:
        raise UsageError("there is no script to run", _HELP)
    if a is None:
        from numapin.launcher.program import require_program

        otherwise = "run a module with -m, other programs with --a COMMAND --b COMMAND"
        require_program(command[0], module=module, no_python=False, run_path=False, otherwise=otherwise)
        require_torch("numapin compare with a script")
    require_writable(output, option="--output")

    from numapin.rank import hook_env  # --help needs neither this nor the plan

    if a is not None and b is not None:
        compared = [own_command(a, option="--a"), own_command(b, option="--b")]
    else:  # numapin's plan gives the number of ranks; some machines have no plan
        from numapin.plan.make import default_num_ranks, make_plan

        topology = topology_from(gpu_nodes=None)
        plan: Plan | None = None
        with suppress(PlanError):
            plan = make_plan(topology, Request(num_ranks=nproc_per_node or default_num_ranks(topology)))
        script = Script(
            words=command,
            is_module=module,
            num_ranks=nproc_per_node or (len(plan.ranks) if plan else 1),
            num_threads=min((rank.num_threads for rank in plan.ranks), default=1) if plan else 1,
        )
        names = default_names(topology, plan) if variants is None else variants
        compared = [known_variant(name, script) for name in names] + [own_variant(text, script) for text in own]
    require_different_names(compared)
    for variant in compared:
        reason = hook_env.refusal(variant.command)
        if reason:
            raise UsageError(f"{variant.name}: steps cannot be counted: {reason}", "leave that option out")

    from numapin.bench.machine import read_machine
    from numapin.compare.campaign import JobOptions, measure_all
    from numapin.compare.report import make_report
    from numapin.view.compare_table import compare_table

    writer = ReportWriter(as_json=as_json, output=output, table=compare_table)
    machine = read_machine().to_json()
    runs: list[ComparedRun] = []

    def report_now(*, is_complete: bool) -> CompareReport:
        return make_report(
            compared,
            runs,
            command=("numapin", *without_secrets(sys.argv[1:])),
            host=os.uname().nodename,
            date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            machine=machine,
            settings={
                "repeats": repeats,
                "steps": steps,
                "skip": skip,
                "seconds": seconds,
                "margin": margin,
                "timeout": timeout,
            },
            num_host_cpus=os.cpu_count(),
            margin=margin,
            is_complete=is_complete,
        )

    if logs is not None:
        try:
            make_own(str(logs.absolute()))
        except OSError as error:
            raise NumapinError(f"{logs} cannot be used: {error.strerror}", "choose another with --logs DIR") from None
    is_complete = False
    try:
        with EarlyEnd() as end:
            job_options = JobOptions(
                settings=StepSettings(folder="", skip=skip, steps=steps, seconds=seconds),
                timeout_s=timeout,
                grace_s=grace,
                logs=logs and logs.absolute(),
            )
            for made in measure_all(compared, job_options, num_rounds=repeats, progress=show_status):
                clear_status()
                say(_run_in_words(made))
                runs.append(made)
                with suppress(NumapinError):  # so that even a killed run leaves a file; the last write reports an error
                    writer.write(report_now(is_complete=False))
        is_complete = not end.came
    finally:
        if not is_complete:  # Ctrl-C, or an error, which decides the status: what was measured until now is shown
            clear_status()
            if any(run.round is not None for run in runs):
                writer.keep(report_now(is_complete=False))
    num_counted = sum(run.round is not None for run in runs)
    end.leave(f"the report covers the first {counted(num_counted, 'run')}" if num_counted else "nothing was measured")

    report = report_now(is_complete=True)
    writer.show(report)
    writer.write(report)
    if len(report.measured) < 2:
        what = "every variant failed"
        if report.measured:
            what = f"nothing could be compared: only {report.measured[0].name} was measured"
        raise NumapinError(what, "run the script by itself first; keep the output of every run with --logs DIR")


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


def _run_in_words(made: ComparedRun) -> str:
    """Return the outcome of a run, and the time that is left."""
    (name,) = without_secrets([made.variant])
    result = made.result
    if result.failure is not None:
        return f"{name} failed, and is left out: {result.failure.partition(chr(10))[0]}"
    times = f"{result.figures['step_s'] * 1000:.2f} ms per step, in {made.took_s:.0f} s{made.left}"
    which = "first run, not counted" if made.round is None else f"repeat {made.round + 1}"
    return f"{name}, {which}: {times}"
