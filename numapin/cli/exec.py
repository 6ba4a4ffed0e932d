"""`numapin exec`: bind one rank that something else started. Edge.

Comes in: the environment that a launcher gave this process, binding options or a plan, and a command. Goes out: the
command, in the same process, bound. With a plan that is there, and no binding options, `entry` does the same sooner.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import click

from numapin.base.bounds import MAX_RANKS
from numapin.cli.options import BINDING, BindingOptions, FilePath, topology_from
from numapin.errors import UsageError
from numapin.plan.gpus import settle_gpus
from numapin.tasks.enter import enter, find_slice
from numapin.tasks.identify import cpus_of_job, find_task
from numapin.tasks.launcher import launcher_cpus
from numapin.tasks.plan import has_own_cpus, plan_task

if TYPE_CHECKING:
    from numapin.tasks.identify import Task
    from numapin.tasks.slice import Slice

_TASK: Final = "Number of this task on its host, from 0."
_TASKS: Final = f"Number of tasks on this host, at most {MAX_RANKS}."
_DECIDES: Final = [option.name for option in BINDING if option.name != "strict"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _ExecOptions(BindingOptions):
    """The parsed values of this command's options, by click's names."""

    plan: str | None
    local_rank: int | None
    local_size: int | None
    verbose: bool
    command: tuple[str, ...]


@click.command(name="exec", params=list(BINDING), context_settings={"allow_interspersed_args": False})
@click.option(
    "--plan",
    type=FilePath(path_type=str),
    metavar="FILE",
    help="Use this task's slice of a saved plan (numapin plan --json) instead of reading the machine. "
    "Default: what `numapin run` gave this rank, else plan.json in NUMAPIN_RUN_DIR, else a plan is made.",
)
@click.option("--local-rank", type=click.IntRange(0, MAX_RANKS - 1), metavar="N", help=_TASK)
@click.option("--local-size", type=click.IntRange(1, MAX_RANKS), metavar="N", help=_TASKS)
@click.option("--verbose", is_flag=True, help="Report on stderr what was found, planned and bound.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_context
def exec(ctx: click.Context, /, **given: Any) -> None:  # noqa: A001, ANN401 - the command's name; click passes options by name
    """Bind this process as one rank of its host, then exec COMMAND.

    For ranks that something else starts: srun, mpirun, torchrun --no-python, accelerate launch --no_python,
    deepspeed --no_python. The local rank is the launcher's; docs/exec.md has a table of the variables that are asked.
    The command needs no change, and may be any program.

    \b
    Examples:
      srun --cpu-bind=none numapin exec -- python train.py
      mpirun --bind-to none -np 8 numapin exec --bind exclusive -- python train.py
      torchrun --nproc-per-node 8 --no-python numapin exec -- python train.py
      numapin plan --json > plan.json; srun numapin exec --plan plan.json -- python train.py
      numapin exec --local-rank 1 --local-size 4 --verbose -- true     what would rank 1 of 4 get?
    """  # noqa: D301 - \b is click's mark for a paragraph that is kept as it is
    options = _ExecOptions(**given)
    task = find_task(os.environ, rank=options.local_rank, size=options.local_size)
    decides = [name for name in _DECIDES if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE]
    if options.plan is not None and decides:
        raise UsageError(
            f"--plan {options.plan} has decided what --{decides[0].replace('_', '-')} says",
            "give that option to: numapin plan --json",
        )
    part = None if decides else find_slice(task, os.environ, file=options.plan)
    planned = part or _planned(task, options)
    enter(planned, task, options.command, strict=options.strict, verbose=options.verbose)


def _planned(task: Task, options: BindingOptions) -> Slice:
    """Read the machine as this task may use it, and plan."""
    topology = topology_from(gpu_nodes=options.gpu_nodes)
    request, shown = settle_gpus(topology, options.request(num_ranks=None))
    own_cpus = has_own_cpus(
        topology.allowed.cpus, launcher=launcher_cpus(task), limit=cpus_of_job(os.environ), size=task.size
    )
    part = plan_task(topology, request, task, own_cpus=own_cpus)
    os.environ.update(shown)
    return part
