"""`numapin exec`: bind one rank that another launcher started.

With an existing plan and no binding options `entry` does the same faster.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import click
from click.core import ParameterSource

from numapin.base.bounds import MAX_RANKS
from numapin.cli.options import BINDING, BindingOptions, FilePath, record_of, topology_from
from numapin.errors import NumapinError, UsageError
from numapin.plan.gpus import settle_gpus
from numapin.tasks.enter import enter, find_slice
from numapin.tasks.identify import cpus_of_job, find_task
from numapin.tasks.launcher import launcher_cpus
from numapin.tasks.plan import has_own_cpus, plan_task

if TYPE_CHECKING:
    from typing import NoReturn

    from numapin.tasks.identify import Task
    from numapin.tasks.slice import Slice

_RANK: Final = "Number of this rank on its host, from 0 (default: from the launcher's variables)."
_SIZE: Final = f"Number of ranks on this host, at most {MAX_RANKS} (default: from the launcher's variables)."
_OF_ONE_RANK: Final = "it describes one rank, and --children binds several processes"
_DECIDED_BY_PLAN: Final = [option.name for option in BINDING if option.name != "strict"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _ExecOptions(BindingOptions):
    """The parsed values of this command's options, by click's names."""

    plan: str | None
    local_rank: int | None
    local_size: int | None
    children: bool
    verbose: bool
    command: tuple[str, ...]


@click.command(name="exec", params=list(BINDING), context_settings={"allow_interspersed_args": False})
@click.option(
    "--plan",
    type=FilePath(path_type=str),
    metavar="FILE",
    help="Use this rank's slice of a saved plan (numapin plan --json), or of a run's plan (@last: the newest run), "
    "instead of reading the machine. "
    "Default: the slice that `numapin run` gave this rank, else plan.json in NUMAPIN_RUN_DIR, else a new plan.",
)
@click.option("--local-rank", type=click.IntRange(0, MAX_RANKS - 1), metavar="N", help=_RANK)
@click.option(
    "--local-size", "--nproc-per-node", "local_size", type=click.IntRange(1, MAX_RANKS), metavar="N", help=_SIZE
)
@click.option(
    "--children",
    is_flag=True,
    help="Bind the Python processes that COMMAND starts, such as workers of vLLM or SGLang, Ray actors or "
    "multiprocessing children, each as soon as its GPU is known. COMMAND itself is bound only if it uses a GPU.",
)
@click.option("--verbose", is_flag=True, help="Report on stderr what was found, planned and bound.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def exec(**values: object) -> None:  # noqa: A001 - the command's name
    """Bind this process as one rank of its host, then exec COMMAND.

    For ranks that another launcher starts: srun, mpirun, torchrun --no-python, accelerate launch --no_python,
    deepspeed --no_python. The local rank comes from that launcher's environment variables; docs/exec.md lists them.
    COMMAND may be any program and needs no change.

    \b
    Examples:
      srun --cpu-bind=none numapin exec -- python train.py
      mpirun --bind-to none -np 8 numapin exec --bind exclusive -- python train.py
      torchrun --nproc-per-node 8 --no-python numapin exec -- python train.py
      numapin plan --json > plan.json; srun numapin exec --plan plan.json -- python train.py
      numapin exec --children -- vllm serve MODEL -tp 8
      numapin exec --local-rank 1 --local-size 4 --verbose -- true     show what rank 1 of 4 would get
    """
    options = record_of(_ExecOptions, values)
    if options.children:
        _bind_children(options)
    task = find_task(os.environ, rank=options.local_rank, size=options.local_size)
    typed = _typed_binding_options()
    if options.plan is not None and typed:
        raise UsageError(
            f"--plan {options.plan} already decides --{typed[0]}", "give that option to: numapin plan --json"
        )
    part = None if typed else find_slice(task, os.environ, file=options.plan)
    part = part or _plan_here(task, options)
    enter(part, task, options.command, strict=options.strict, verbose=options.verbose)


def _bind_children(options: _ExecOptions) -> NoReturn:
    """Run the command, have each GPU process below it bind itself, and exit with the command's status."""
    _require_no_rank(options)
    try:
        status = _status_of_command(options)
    except NumapinError as error:
        error.use_hint_for_fixed_ranks()  # --children does not take --nproc-per-node
        raise
    if status < 0:
        _die_of(-status)
    sys.exit(status)


def _status_of_command(options: _ExecOptions) -> int:
    """Plan for all visible GPUs, run the command, and return its status, -n after signal n."""
    from numapin.children.command import run_with_children  # a plain `exec` does not need it

    topology = topology_from(gpu_nodes=options.gpu_nodes)
    request, shown = settle_gpus(topology, options.request(num_ranks=None), os.environ)
    return run_with_children(
        topology,
        request,
        options.command,
        {**os.environ, **shown},
        strict=options.strict,
        verbose=options.verbose,
    )


def _require_no_rank(options: _ExecOptions) -> None:
    """Raise UsageError for an option that --children cannot follow."""
    refused = (
        ("--plan", options.plan, "--children makes a plan for all visible GPUs itself"),
        ("--local-rank", options.local_rank, _OF_ONE_RANK),
        ("--local-size (--nproc-per-node)", options.local_size, _OF_ONE_RANK),
        (
            "--nic-env",
            options.nic_env,
            "its variables must be set before a process starts, and its GPU may be known later",
        ),
    )
    for name, value, why in refused:
        if value is not None:
            raise UsageError(f"--children and {name} cannot be combined: {why}", "leave one out")


def _die_of(number: int) -> None:
    """End by the command's signal, so that a shell loop stops on Ctrl-C; if that fails, exit with 128 + `number`."""
    resource.setrlimit(
        resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1])
    )  # the command left its own
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    sys.stderr.flush()
    os.kill(os.getpid(), number)
    sys.exit(128 + number)


def _typed_binding_options() -> list[str]:
    """Return the binding options on the command line that decide what a plan decides."""
    context = click.get_current_context()
    source = context.get_parameter_source
    names = [name for name in _DECIDED_BY_PLAN if name and source(name) is ParameterSource.COMMANDLINE]
    typed_smt = "smt" if context.params["smt"] else "no-smt"
    return [typed_smt if name == "smt" else name.replace("_", "-") for name in names]


def _plan_here(task: Task, options: BindingOptions) -> Slice:
    """Read the machine as this task may use it, and plan for this task."""
    topology = topology_from(gpu_nodes=options.gpu_nodes)
    request, shown = settle_gpus(topology, options.request(num_ranks=None), os.environ)
    own_cpus = has_own_cpus(
        topology.allowed.cpus, launcher=launcher_cpus(task), limit=cpus_of_job(os.environ), size=task.size
    )
    part = plan_task(topology, request, task, own_cpus=own_cpus)
    os.environ.update(shown)
    return part
