"""`numapin job`: write scripts that start bound ranks under a resource manager. Edge.

Comes in: the job's requirements, a machine file, the script and its arguments. Goes out: a job script, on stdout or in
a file. Nothing is submitted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import click

from numapin.base import sizes
from numapin.base.suggest import did_you_mean
from numapin.cli import job_own
from numapin.cli.options import BINDING, FilePath, MachinePath, Parsed, topology_from, with_values
from numapin.cli.output import emit, warn, write
from numapin.errors import UsageError
from numapin.jobs import duration, kubernetes, scripts
from numapin.jobs.gpus import gpus_per_host, require_gpu_per_rank
from numapin.jobs.request import Form, JobRequest, KubernetesKind, Launch
from numapin.jobs.share import Share, require_present, share_of, tiles_per_gpu, vendor_of_ranks, why_whole_hosts
from numapin.launcher import preload
from numapin.plan.make import make_plan

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numapin.topology.model import Topology

_MEMORY_PART: Final = 0.9  # of a host's memory; the rest is left to the system

_SHAPE: Final = (
    click.Option(["--nodes"], type=int, default=1, metavar="N", help="Number of hosts (default: 1)."),
    click.Option(["--gpus-per-node"], type=int, metavar="N", help="GPUs per host (default: those of --machine)."),
    click.Option(
        ["--ranks-per-node", "--nproc-per-node", "ranks_per_node"],
        type=int,
        default=0,
        metavar="N",
        help="Ranks per host (default: one per GPU).",
    ),
    click.Option(
        ["--cpus-per-task"],
        type=int,
        metavar="N",
        help="CPUs per task: one task per host, or one per rank with --form task. Default: the GPUs' share of "
        "--machine.",
    ),
    click.Option(
        ["--machine"],
        type=MachinePath(),
        metavar="FILE",
        help="Machine file of the cluster's hosts (topo --save), or a built-in machine (example:dgx-a100). Used to "
        "size CPUs and memory; fails now if no plan is feasible.",
    ),
    click.Option(["--job-name"], default="", metavar="NAME", help="Name of the job (default: the script's name)."),
)
_PROGRAM: Final = (
    click.Option(["-m", "--module"], is_flag=True, help="Treat SCRIPT as a Python module."),
    click.Option(["--no-python"], is_flag=True, help="Treat SCRIPT as a program, not as Python."),
    click.Option(["--dataloader"], type=click.Choice(preload.CHOICES), default="torch", help="Same as in numapin run."),
    click.Option(["--output"], type=FilePath(), metavar="FILE", help="Write the script here (default: stdout)."),
)
_FORM: Final = click.Option(
    ["--form"],
    type=click.Choice([form.value for form in Form]),
    default=Form.NODE.value,
    help="node: one numapin run per host (default); task: one numapin exec per rank.",
)
_PLAN: Final = click.Option(
    ["--plan"],
    metavar="FILE",
    help="With --form task: a saved plan for all hosts (numapin plan --json), so that no task reads its machine.",
)
_SETUP: Final = click.Option(
    ["--setup"],
    multiple=True,
    metavar="LINE",
    help="Shell line to run first, e.g. 'module load cuda'; repeatable.",
)
_IMAGE: Final = click.Option(
    ["--container"], metavar="IMAGE", help="Container image to run in; it must contain numapin."
)
_HOSTFILE: Final = click.Option(["--hostfile"], metavar="FILE", help="Host file for mpirun.")
_TIME: Final = click.Option(
    ["--time"],
    type=Parsed("TIME", duration.parse, remedy="write 4:00:00, 1-12:00:00, 4h or 90m"),
    help="Time limit, e.g. 4:00:00, 1-12:00:00, 4h or 90m.",
)
_QUEUE: Final = click.Option(["--partition", "--queue", "queue"], metavar="NAME", help="Partition or queue.")
_KUEUE: Final = click.Option(
    ["--queue", "--partition", "queue"], metavar="NAME", help="Local queue of Kueue that admits the job, e.g. team."
)
_ACCOUNT: Final = click.Option(["--account"], metavar="NAME", help="Account or project to charge.")
_REQUEUE: Final = click.Option(
    ["--requeue"], is_flag=True, help="Restart the job after a preemption or the loss of a host."
)
_SIGNAL: Final = click.Option(
    ["--signal"],
    type=int,
    metavar="SECONDS",
    help="Send SIGUSR1 (Kubernetes: SIGTERM) to every rank this many seconds before the time limit, to save and exit. "
    "With --requeue the job is then queued again, if its manager supports that.",
)
_MEMORY: Final = click.Option(["--mem-per-node"], type=Parsed("SIZE", sizes.parse), help="Memory per host, e.g. 500G.")
_QUEUED: Final = (_TIME, _SIGNAL, _REQUEUE, _QUEUE)


@dataclass(frozen=True, slots=True, kw_only=True)
class _JobOptions(job_own.OwnOptions):
    """The parsed values of an engine's options, by click's names. Options that some engines lack have a default."""

    nodes: int
    gpus_per_node: int | None
    ranks_per_node: int
    cpus_per_task: int | None
    machine: Path | None
    job_name: str
    module: bool
    no_python: bool
    dataloader: str
    output: Path | None
    command: tuple[str, ...]
    form: str = Form.NODE.value
    plan: str | None = None
    setup: tuple[str, ...] = ()
    container: str | None = None
    hostfile: str | None = None
    time: int | None = None
    queue: str | None = None
    account: str | None = None
    requeue: bool = False
    signal: int | None = None
    mem_per_node: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Engine:
    """A resource manager.

    Attributes:
        about: Its name in help texts.
        submit: The command that submits a script.
        options: Its own options.
        build: The function that writes the script.
        example: Options for the example in the help text.
        further: Options for further examples.
        spare_cores: The number of cores per NUMA node that a machine file's share leaves to the system.
        memory_by_number: Whether even the memory of a whole host has to be requested in bytes.
        warnings: The function that returns the parts of a request that the manager cannot do.
    """

    about: str
    submit: str
    options: tuple[click.Option, ...]
    build: Callable[[JobRequest], str]
    example: str
    further: tuple[str, ...] = ()
    spare_cores: int = 0
    memory_by_number: bool = False
    warnings: Callable[[JobRequest], Sequence[str]] = lambda _: ()


_ENGINES: Final = {
    "slurm": _Engine(
        about="Slurm",
        submit="sbatch FILE",
        options=(_FORM, _PLAN, *_QUEUED, _ACCOUNT, _MEMORY, _IMAGE, _SETUP, *job_own.SLURM),
        build=scripts.slurm,
        example="--nodes 4 --gpus-per-node 8 --time 24:00:00 --partition gpu --requeue --signal 300",
        further=("--gpus-per-node 8 --array 0-99%4",),
        warnings=why_whole_hosts,
    ),
    "mpi": _Engine(
        about="Open MPI's mpirun",
        submit="bash FILE",
        options=(_FORM, _PLAN, _HOSTFILE, _IMAGE, _SETUP),
        build=scripts.mpi,
        example="--form task --nodes 2 --gpus-per-node 8 --hostfile hosts",
    ),
    "kubernetes": _Engine(
        about="Kubernetes",
        submit="kubectl apply -f FILE",
        options=(_TIME, _SIGNAL, _REQUEUE, _KUEUE, _MEMORY, _IMAGE, *job_own.KUBERNETES),
        build=kubernetes.build,
        example="--nodes 2 --machine dgx.json --container registry/image:tag --dataloader numapin",
        further=(
            "--form trainjob --machine dgx.json --container registry/image:tag --queue team",
            "--machine dgx.json --container registry/image:tag \\\n"
            "      --env NCCL_DEBUG=INFO --volume pvc/data:/data:ro --resource rdma/ib=8 --ipc-lock",
        ),
        memory_by_number=True,
        warnings=kubernetes.warnings,
        spare_cores=1,  # the static CPU manager requires CPUs that no pod owns
    ),
    "pbs": _Engine(
        about="PBS",
        submit="qsub FILE",
        options=(_FORM, _PLAN, *_QUEUED, _ACCOUNT, _MEMORY, _IMAGE, _SETUP),
        build=scripts.pbs,
        example="--nodes 2 --gpus-per-node 4 --cpus-per-task 64 --time 12h --queue gpu",
        memory_by_number=True,
        warnings=scripts.pbs_warnings,
    ),
    "lsf": _Engine(
        about="LSF",
        submit="bsub < FILE",
        options=(_FORM, _PLAN, *_QUEUED, _ACCOUNT, _MEMORY, _IMAGE, _SETUP),
        build=scripts.lsf,
        example="--nodes 2 --gpus-per-node 6 --time 12h --queue gpu",
        memory_by_number=True,
        warnings=why_whole_hosts,
    ),
}


class _Engines(click.Group):
    """The engine group; an unknown name lists the valid ones."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the engine."""
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            meant = did_you_mean(args[0], self.commands)
            raise UsageError(f"unknown engine {args[0]!r}{meant}", f"choose one of: {', '.join(_ENGINES)}")
        return super().resolve_command(ctx, args)


@click.group(cls=_Engines)
def job() -> None:
    """Write a job script that starts bound ranks under a resource manager. Submits nothing.

    \b
    Examples:
      numapin job slurm --nodes 4 --gpus-per-node 8 --time 24h train.py --lr 0.1 > job.sh; sbatch job.sh
      numapin job slurm --form task --machine dgx.json train.py     one task per GPU
      numapin job mpi --nodes 2 --gpus-per-node 8 --hostfile hosts train.py
      numapin job kubernetes --nodes 2 --machine dgx.json --container registry/image:tag train.py
      numapin job kubernetes --form trainjob --nodes 2 --machine dgx.json --container registry/image:tag train.py
    """


def _command(name: str, engine: _Engine) -> click.Command:
    """Return an engine's command."""

    @with_values(_JobOptions)
    def write_script(options: _JobOptions) -> None:
        request = _request(name, engine, options)
        text = engine.build(request)
        warn(engine.warnings(request))
        if options.output is None:
            emit(text)
        else:
            write(text, options.output, option="--output")

    return click.Command(
        name,
        callback=write_script,
        params=[
            *_SHAPE,
            *engine.options,
            *_PROGRAM,
            *BINDING,
            click.Argument(["command"], nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGS]..."),
        ],
        help=f"Write a script for {engine.about}. Binding options are passed to numapin run or exec.\n\n\b\nExample:\n"
        f"  numapin job {name} {engine.example} \\\n      --output FILE train.py --lr 0.1\n  {engine.submit}"
        + "".join(f"\n  numapin job {name} {options} train.py" for options in engine.further),
        short_help=f"For {engine.about}: {engine.submit}",
        context_settings={"allow_interspersed_args": False},
    )


def _request(name: str, engine: _Engine, options: _JobOptions) -> JobRequest:
    """Return the request of the options and the machine file. Raises UsageError, and the errors of a plan."""
    form = Form(options.form)
    options.request(num_ranks=None)  # raises for invalid binding options
    topology = _machine(options)
    gpus = gpus_per_host(options.gpus_per_node, topology, named=options.gpus)
    request = JobRequest(
        command=options.command,
        launch=_launch(options),
        form=form,
        name=options.job_name,
        nodes=options.nodes,
        gpus_per_node=gpus,
        ranks_per_node=options.ranks_per_node,
        cpus_per_task=options.cpus_per_task,
        memory_bytes=options.mem_per_node,
        whole_nodes=topology is None and options.cpus_per_task is None,
        smt=options.smt,
        time_s=options.time,
        signal_s=options.signal,
        requeue=options.requeue,
        queue=options.queue,
        account=options.account,
        container=options.container,
        hostfile=options.hostfile,
        options=_options(options, form),
        dataloader=None if options.dataloader == "torch" else options.dataloader,
        setup=options.setup,
        kind=KubernetesKind(options.kind),
        sys_nice=options.sys_nice,
        pod=options.pod_options(),
        array=options.array,
        vendor=vendor_of_ranks(topology),
        tiles_per_gpu=tiles_per_gpu(topology),
        engine=name,
    )
    require_gpu_per_rank(options.gpus, num_ranks=request.num_ranks)
    return request if topology is None else _sized(request, topology, engine, options)


def _sized(request: JobRequest, topology: Topology, engine: _Engine, options: _JobOptions) -> JobRequest:
    """Fill in CPUs and memory from the machine, and check its plan, so that errors come before the queue."""
    plan = make_plan(topology, options.request(num_ranks=request.num_ranks))
    if options.strict:
        plan.require_exact()
    require_present(topology, cpus=request.cpus_per_node, memory_bytes=request.memory_bytes)
    share = share_of(topology, gpus=request.gpus_per_node, smt=request.smt, spare_cores_per_node=engine.spare_cores)
    if share.is_whole:
        warn(plan.warnings)
    return replace(
        request,
        cpus_per_task=request.cpus_per_task or share.cpus_of(request.tasks_per_node),
        memory_bytes=request.memory_bytes or _memory_bytes(share, engine),
        whole_nodes=share.is_whole and options.cpus_per_task is None,
    )


def _memory_bytes(share: Share, engine: _Engine) -> int | None:
    """Return the memory to request for a share. None: it is unknown, or the manager gives a whole host's by itself."""
    is_implied = share.is_whole and not engine.memory_by_number
    return None if is_implied or share.memory_bytes is None else int(share.memory_bytes * _MEMORY_PART)


def _machine(options: _JobOptions) -> Topology | None:
    path = options.machine
    return None if path is None else topology_from(gpu_nodes=options.gpu_nodes, machine=path)


def _launch(options: _JobOptions) -> Launch:
    if options.module and options.no_python:
        raise UsageError("--module and --no-python exclude each other", "use one of them")
    if options.module:
        return Launch.MODULE
    return Launch.PROGRAM if options.no_python else Launch.SCRIPT


def _options(options: _JobOptions, form: Form) -> tuple[str, ...]:
    """Return the options of numapin run or exec. Raises UsageError if they do not fit --plan."""
    plan, binding = options.plan, _binding_options(options)
    strict = ["--strict"] if options.strict else []
    if plan is None:
        return (*binding, *strict)
    if form is Form.NODE:
        raise UsageError(f"--plan {plan} with --form node: numapin run makes its own plan", "use --form task")
    if binding:
        raise UsageError(f"--plan {plan} already decides {binding[0]}", "give that option to: numapin plan --json")
    return (f"--plan={plan}", *strict)


def _binding_options(options: _JobOptions) -> list[str]:
    """Return the binding options that were given, as numapin run and exec take them."""
    values = {
        "bind": options.bind,
        "memory": options.memory,
        "cpus-per-rank": options.cpus_per_rank,
        "reserve-cpus": options.reserve_cpus,
        "gpus": ",".join(options.gpus or ()),
        "gpu-nodes": ",".join(f"{gpu}={node}" for gpu, node in options.gpu_nodes or ()),
        "nic-env": ",".join(options.nic_env or ()),
    }
    given = [f"--{name}={value}" for name, value in values.items() if value]
    return given if options.smt else [*given, "--no-smt"]


for _name, _engine in _ENGINES.items():
    job.add_command(_command(_name, _engine))
