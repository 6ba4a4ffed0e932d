"""`numapin run`: the main job. Edge.

Comes in: a torchrun command line with binding options. Goes out: bound ranks, run to their end; torchrun's exit status.
"""

from __future__ import annotations

import os
import shlex
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from numapin import rundir
from numapin.bind import rehearse
from numapin.cli.options import BINDING, request_from, topology_from
from numapin.cli.output import show, warn
from numapin.errors import UsageError
from numapin.plan import make_plan
from numapin.topology.build import find_gpu

if TYPE_CHECKING:
    from argparse import ArgumentParser

    from numapin.launch import Job
    from numapin.plan import Plan
    from numapin.request import Request
    from numapin.topology.model import Topology

_DESCRIPTION = (
    "Run a training script with one rank per GPU, each bound to the CPUs and the memory of its GPU's NUMA node."
)
_EPILOG = """examples:
  numapin run train.py --lr 0.1                     one bound rank per visible GPU
  numapin run --bind exclusive --memory bind train.py
  numapin run --nnodes 2 --rdzv-backend c10d --rdzv-endpoint head:29500 train.py
  numapin run --dry-run train.py                    show the plan and each rank's command"""

_OWN = (
    *BINDING,
    click.Option(["--dry-run"], is_flag=True, help="Show the plan and the command of each rank, and start nothing."),
    click.Option(["--quiet"], is_flag=True, help="Do not show the table of bindings at the start."),
)


class _RunCommand(click.Command):
    """A command whose options torch's parser reads.

    Completion knows ours and files only: importing torch for torchrun's would take a second at each key.
    """

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete our options and file names."""
        del ctx
        names = [(name, option.help) for option in _OWN for name in (*option.opts, *option.secondary_opts)]
        if incomplete.startswith("-"):
            return [CompletionItem(name, help=text) for name, text in names if name.startswith(incomplete)]
        return [CompletionItem(incomplete, type="file")]


@click.command(
    cls=_RunCommand,
    short_help="Run a training script, one bound rank per GPU.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False, "help_option_names": []},
    add_help_option=False,
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(arguments: tuple[str, ...]) -> None:
    """Run a training script, one bound rank per GPU. Replaces torchrun."""
    job, options = _parse(arguments)
    request = request_from(options, num_ranks=job.num_ranks, numa_binding=job.numa_binding)

    topology = topology_from(options)
    plan = rehearse(make_plan(topology, request), strict=options["strict"])
    _announce(plan, topology, quiet=options["quiet"] and not options["dry_run"])
    _export_gpus(topology, request)
    (_print_commands if options["dry_run"] else _launch)(plan, job)


def make_run_parser() -> ArgumentParser:
    """Return the installed torch's torchrun parser, with the binding options added."""
    from numapin.launch import OwnOption, make_parser

    own = [
        OwnOption(
            names=(*option.opts, *option.secondary_opts),
            takes_value=not option.is_flag,
            metavar=option.metavar or "|".join(getattr(option.type, "choices", ())) or option.type.name,
            help=option.help or "",
        )
        for option in _OWN
    ]
    return make_parser(own, description=_DESCRIPTION, epilog=_EPILOG)


def _parse(arguments: tuple[str, ...]) -> tuple[Job, dict[str, Any]]:
    """Let torch's parser read the line; what is ours in it goes through click, as in `numapin plan`."""
    from numapin.launch import parse

    job = parse(arguments, make_run_parser())
    return job, click.Command("run", params=list(_OWN)).make_context("numapin run", list(job.own)).params


def _export_gpus(topology: Topology, request: Request) -> None:
    """Show CUDA the GPUs that --gpus named, by UUID, in the order of the ranks."""
    if request.gpus is None:
        return
    uuids = [find_gpu(topology, key, option="--gpus").uuid for key in request.gpus]
    if None in uuids:
        raise UsageError(
            "--gpus needs the UUIDs of the GPUs, which only NVML tells", "see what is missing with: numapin topo"
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(uuid for uuid in uuids if uuid)


def _announce(plan: Plan, topology: Topology, *, quiet: bool) -> None:
    if not quiet:
        from numapin.view.plan_table import plan_table

        show(plan_table(plan), err=True)
        if len(topology.nodes) == 1:
            click.echo("numapin: this machine has one NUMA node: all memory is local, whatever is bound", err=True)
    warn(plan.warnings)


def _print_commands(plan: Plan, job: Job) -> None:
    from numapin.launch import command_of

    words = command_of(job)
    for rank in plan.ranks:
        line = shlex.join(word.replace("${local_rank}", str(rank.local_rank)) for word in words)
        click.echo(
            f"rank {rank.local_rank}: OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', rank.num_threads)} {line}"
        )


def _launch(plan: Plan, job: Job) -> None:
    from numapin.launch import launch

    run_dir = rundir.create(os.environ)
    kept = "NUMAPIN_RUN_DIR" in os.environ  # a folder that the user named is the user's
    try:
        launch(plan, job, run_dir)
    finally:
        if not kept:
            rundir.remove(run_dir)
