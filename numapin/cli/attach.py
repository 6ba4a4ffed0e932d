"""`numapin attach`: bind running processes.

Status 0; 2: no such process, or its GPU is unknown; 3: it is another user's, or cannot be read; 4: no feasible plan; 5:
with --strict, something could not be done exactly.
"""

from __future__ import annotations

import os
from typing import Final

import click

from numapin.attach.bind import attach as attach_to
from numapin.attach.targets import AttachOptions, aim_at_processes, aim_at_run
from numapin.base.cpu_set import CpuSet
from numapin.base.formats import render_size
from numapin.cli.options import GPU_NODES, PIDS, Parsed, json_option, record_of, run_names
from numapin.cli.output import clear_status, emit, json_text, show, show_status, warn
from numapin.errors import BindingRefused, UsageError
from numapin.plan.request import Bind, parse_gpus

_MODES: Final = [mode.value for mode in Bind if mode is not Bind.NONE]


@click.command(params=[PIDS, GPU_NODES])
@click.option(
    "--job",
    metavar="RUN",
    shell_complete=run_names(are_live=True),
    help="An active numapin run: its folder, its name, the end of its name, or @last. Its own plan is applied again.",
)
@click.option(
    "--gpu",
    "gpus",
    type=Parsed("LIST", parse_gpus),
    help="The GPU of the processes given by --pid: index as "
    "in numapin topo, UUID or PCI address. Give one for all processes, or one for each.",
)
@click.option(
    "--bind",
    type=click.Choice(_MODES),
    help="CPUs of each process: all of its GPU's node (default), all of "
    "the socket, an exclusive share of the node, or one L3 group of the node.",
)
@click.option(
    "--cpus-per-rank",
    type=click.IntRange(min=1),
    metavar="N",
    help="At most N logical CPUs per rank, shared with no other rank.",
)
@click.option("--smt/--no-smt", default=True, help="Use all hardware threads of each core (default), or one.")
@click.option("--reserve-cpus", type=Parsed("LIST", CpuSet.parse), help="Keep these CPUs free, e.g. 0-1.")
@click.option(
    "--widen",
    is_flag=True,
    help="Also widen threads that are bound to only some of the planned CPUs. "
    "By default these are left alone: a library may have pinned them.",
)
@click.option(
    "--migrate",
    is_flag=True,
    help="Move memory to the planned node, except file pages, shared memory and memory that a driver has pinned.",
)
@click.option("--dry-run", is_flag=True, help="Show what would change, without changing anything.")
@click.option("--strict", is_flag=True, help="Exit with status 5 if something could not be done exactly.")
@json_option("numapin.attach/1")
def attach(*, pids: tuple[int, ...] | None, job: str | None, strict: bool, as_json: bool, **values: object) -> None:
    """Bind running processes to the CPUs of their GPU's node.

    All threads are bound, and threads that start later inherit the binding. numapin asks the driver on which GPU a
    process computes; if the driver does not know, it uses LOCAL_RANK and CUDA_VISIBLE_DEVICES from the environment of
    the process. The process id of a launcher stands for the ranks that it started. Only your own processes are changed.

    The memory policy of a running process cannot be changed. By default, new pages go to the node of the CPU that first
    touches them. Existing pages move only with --migrate.

    \b
    Examples:
      numapin attach --pid 4711 --dry-run        show what would change
      numapin attach --pid 4711                  bind a rank, or those of torchrun
      numapin attach --pid 4711 --migrate        also move its memory
      numapin attach --pid 4711,4712 --gpu 0,1   if numapin cannot find the GPUs
      numapin attach --job @last                 bind the newest run again

    The report ends with the commands that undo it.
    """
    options = record_of(AttachOptions, values)
    if pids is not None and job is not None:
        raise UsageError("--pid and --job both name a job", "give one of them")
    if job is not None and options.gpus is not None:
        raise UsageError("--gpu works only with --pid; a run has a plan of its GPUs", "leave out --gpu")
    if job is not None and options.decides:
        raise UsageError(
            "binding options work only with --pid; a run has a plan of its own", f"numapin attach --job {job}"
        )
    if job is not None:
        aim = aim_at_run(job, os.environ)
    elif pids is not None:
        aim = aim_at_processes(pids, options, os.environ)
    else:
        raise UsageError(
            "neither --pid nor --job is given",
            "name what to bind: numapin attach --pid PID,... or numapin attach --job @last",
        )

    def show_progress(pid: int, done: int, total: int) -> None:
        show_status(f"process {pid}: {render_size(done)} of {render_size(total)} on other nodes done")

    done = attach_to(aim, options, progress=show_progress)
    if options.migrate:
        clear_status()
    if as_json:
        emit(json_text(done.to_json()))
    else:
        from numapin.view.attach_table import attach_table

        warn(done.warnings)
        show(attach_table(done))
    if done.interrupted:
        raise click.Abort
    if strict and not done.exact:
        raise BindingRefused(
            "--strict: not everything could be done exactly",
            "the report lists the differences; without --strict, the status is 0",
        )
