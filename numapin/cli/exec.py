"""`numapin exec`: bind one rank that another launcher started. With a plan and no options, `entry` does it faster."""

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
from numapin.errors import UsageError
from numapin.plan.gpus import settle_gpus
from numapin.tasks.enter import enter, find_slice, launcher_cpus
from numapin.tasks.identify import cpus_of_job, find_task
from numapin.tasks.slice import has_own_cpus, plan_task

if TYPE_CHECKING:
    from typing import NoReturn

_RANK: Final = "Number of this rank on its host, from 0 (default: from the launcher's variables)."
_SIZE: Final = f"Number of ranks on this host, at most {MAX_RANKS} (default: from the launcher's variables)."


@dataclass(frozen=True, slots=True, kw_only=True)
class _ExecOptions(BindingOptions):
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
      numapin plan --json > plan.json
      srun numapin exec --plan plan.json -- python train.py
      numapin exec --children -- vllm serve MODEL -tp 8
      numapin exec --local-rank 1 --local-size 4 --verbose -- true
                                       show what rank 1 of 4 would get
    """
    options = record_of(_ExecOptions, values)
    if options.children:
        _bind_children(options)
    task = find_task(os.environ, rank=options.local_rank, size=options.local_size)

    # A plan decides what the binding options on the command line decide, so these ask for a new one.
    context = click.get_current_context()
    decided = [option.name for option in BINDING if option.name not in (None, "strict")]
    typed = [name for name in decided if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    if not typed:
        part = find_slice(task, os.environ, file=options.plan)
        if part is not None:
            enter(part, task, options.command, strict=options.strict, verbose=options.verbose)
    elif options.plan is not None:
        name = typed[0].replace("_", "-")
        if name == "smt" and not context.params["smt"]:
            name = "no-smt"
        raise UsageError(f"--plan {options.plan} already decides --{name}", "give that option to: numapin plan --json")

    topology = topology_from(gpu_nodes=options.gpu_nodes)
    request, shown = settle_gpus(topology, options.request(num_ranks=None), os.environ)
    own_cpus = has_own_cpus(
        topology.allowed.cpus, launcher=launcher_cpus(task), limit=cpus_of_job(os.environ), size=task.size
    )
    part = plan_task(topology, request, task, own_cpus=own_cpus)
    os.environ.update(shown)
    enter(part, task, options.command, strict=options.strict, verbose=options.verbose)


def _bind_children(options: _ExecOptions) -> NoReturn:
    """Run the command, have each GPU process below it bind itself, and end with the command's status or signal."""
    of_one_rank = "it describes one rank, and --children binds several processes"
    at_start = "its variables must be set before a process starts, and its GPU may be known later"
    for name, value, why in (
        ("--plan", options.plan, "--children makes a plan for all visible GPUs itself"),
        ("--local-rank", options.local_rank, of_one_rank),
        ("--local-size (--nproc-per-node)", options.local_size, of_one_rank),
        ("--nic-env", options.nic_env, at_start),
    ):
        if value is not None:
            raise UsageError(f"--children and {name} cannot be combined: {why}", "leave one out")

    from numapin.children.command import run_with_children  # a plain `exec` does not need it

    topology = topology_from(gpu_nodes=options.gpu_nodes)
    request, shown = settle_gpus(topology, options.request(num_ranks=None), os.environ)
    environ = {**os.environ, **shown}
    status = run_with_children(
        topology, request, options.command, environ, strict=options.strict, verbose=options.verbose
    )
    if status < 0:
        # End by the command's signal, so that a shell loop stops on Ctrl-C, but without another core file.
        number = -status
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
        sys.stderr.flush()
        os.kill(os.getpid(), number)
        status = 128 + number  # if that failed
    sys.exit(status)
