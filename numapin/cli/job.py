"""`numapin job`: write scripts that start bound ranks under a resource manager. Nothing is submitted."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import click

from numapin import __version__
from numapin.base import formats
from numapin.base.formats import did_you_mean
from numapin.base.redact import without_secrets
from numapin.cli.options import BINDING, BindingOptions, FilePath, MachinePath, Parsed, record_of, topology_from
from numapin.cli.output import warn, write
from numapin.errors import UsageError
from numapin.jobs import kubernetes, pod_options, scripts
from numapin.jobs.notation import parse_time
from numapin.jobs.pod_options import PodOptions, PodSecurity
from numapin.jobs.request import (
    Form,
    JobRequest,
    KubernetesKind,
    gpus_per_host,
    require_gpu_per_rank,
    sized,
    why_whole_hosts,
)
from numapin.plan.make import make_plan
from numapin.rank import hook_env
from numapin.topology.vendors import GpuVendor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

_NOT_TEXT: Final = re.compile("[\0\ud800-\udfff]")  # undecodable bytes of arguments are lone surrogates
_WRITTEN_BY: Final = "numapin.job.written_by"
_SHAPE: Final = (
    click.Option(["--nodes"], type=int, default=1, metavar="N", help="Number of hosts (default: 1)."),
    click.Option(
        ["--gpus-per-node"],
        type=Parsed("[TYPE:]N", scripts.parse_gpus),
        help="GPUs per host (default: those of --machine); with Slurm and LSF also a type, e.g. a100:8.",
    ),
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
        help="Machine file of the cluster's hosts (topo --save), or a built-in machine (example:dgx-a100). Used to "
        "size CPUs and memory; fails now if no plan is feasible.",
    ),
    click.Option(
        ["--job-name", "name"], default="", metavar="NAME", help="Name of the job (default: the script's name)."
    ),
)
_PROGRAM: Final = (
    click.Option(["-m", "--module"], is_flag=True, help="Treat SCRIPT as a Python module."),
    click.Option(["--no-python"], is_flag=True, help="Treat SCRIPT as a program, not as Python."),
    click.Option(
        ["--dataloader"], type=click.Choice(hook_env.CHOICES), default="torch", help="Same as in numapin run."
    ),
    click.Option(["--output"], type=FilePath(), help="Write the script here (default: stdout)."),
)
_FORM: Final = click.Option(
    ["--form"],
    type=click.Choice([form.value for form in Form]),
    callback=lambda _context, _option, value: Form(value),
    default=Form.NODE.value,
    help="node: one numapin run per host (default); task: one numapin exec per rank.",
)
_PLAN: Final = click.Option(
    ["--plan"],
    metavar="FILE",
    help="With --form task: a saved plan for all hosts (numapin plan --json), so that no task reads its machine.",
)
_SETUP: Final = click.Option(
    ["--setup"], multiple=True, metavar="LINE", help="Shell line to run first, e.g. 'module load cuda'; repeatable."
)
_IMAGE: Final = click.Option(
    ["--container"], metavar="IMAGE", help="Container image to run in; it must contain numapin."
)
_HOSTFILE: Final = click.Option(["--hostfile"], metavar="FILE", help="Host file for mpirun.")
_TIME: Final = click.Option(
    ["--time", "time_s"],
    type=Parsed("TIME", parse_time, remedy="write 4:00:00, 1-12:00:00, 4h or 90m"),
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
    ["--signal", "signal_s"],
    type=int,
    metavar="SECONDS",
    help="Send SIGUSR1 (Kubernetes: SIGTERM) to every rank this many seconds before the time limit, to save and exit. "
    "With --requeue the job is then queued again, if its manager supports that.",
)
_MEMORY: Final = click.Option(
    ["--mem-per-node", "memory_bytes"], type=Parsed("SIZE", formats.parse_size), help="Memory per host, e.g. 500G."
)
_QUEUED: Final = (_TIME, _SIGNAL, _REQUEUE, _QUEUE)


def _repeatable(option: str, metavar: str, parse: Callable[[str], object], text: str, name: str = "") -> click.Option:
    """Return an option that may be given several times; each value is parsed."""
    names = [option, name] if name else [option]
    return click.Option(names, multiple=True, type=Parsed(metavar, parse), metavar=metavar, help=f"{text} Repeatable.")


_KUBERNETES: Final = (
    click.Option(
        ["--form", "kind"],
        type=click.Choice([kind.value for kind in KubernetesKind]),
        callback=lambda _context, _option, value: KubernetesKind(value),
        default=KubernetesKind.JOB.value,
        help="job: an Indexed Job with its Service (default). jobset: a JobSet. trainjob: Kubeflow Trainer v2. "
        "leaderworkerset: servers, which run until deleted.",
    ),
    _repeatable(
        "--env",
        "NAME=VALUE",
        partial(pod_options.pair, form="NAME=VALUE, such as NCCL_DEBUG=INFO"),
        "Variable of the pods, e.g. NCCL_DEBUG=INFO.",
    ),
    _repeatable(
        "--env-from",
        "secret/NAME",
        pod_options.variables_of,
        "Secret (secret/NAME) or config map (configmap/NAME) whose keys become variables, e.g. secret/wandb.",
    ),
    _repeatable(
        "--volume",
        "SOURCE:PATH[:ro]",
        pod_options.volume,
        "Volume to mount: pvc/NAME, secret/NAME, configmap/NAME, emptydir, or a path of the host, e.g. "
        "pvc/datasets:/data:ro.",
        "volumes",
    ),
    _repeatable("--resource", "NAME=N", pod_options.resource, "Another resource per pod, e.g. rdma/ib=1.", "resources"),
    _repeatable(
        "--node-selector",
        "LABEL=VALUE",
        partial(pod_options.pair, form="LABEL=VALUE, such as node.kubernetes.io/instance-type=p5.48xlarge"),
        "Label that nodes must have, e.g. pool=gpu.",
    ),
    _repeatable(
        "--toleration",
        "KEY[=VALUE][:EFFECT]",
        pod_options.toleration,
        "Taint that pods tolerate, e.g. nvidia.com/gpu:NoSchedule.",
        "tolerations",
    ),
    _repeatable("--pull-secret", "NAME", pod_options.word, "Secret for the image's registry.", "pull_secrets"),
    click.Option(["--service-account"], type=Parsed("NAME", pod_options.word), help="Service account of the pods."),
    _repeatable(
        "--annotation",
        "NAME=VALUE",
        partial(pod_options.pair, form="NAME=VALUE, such as k8s.v1.cni.cncf.io/networks=ib0"),
        "Annotation of the job and its pods, e.g. k8s.v1.cni.cncf.io/networks=ib0.",
        "annotations",
    ),
    click.Option(
        ["--scheduler"], type=Parsed("NAME", pod_options.word), help="Scheduler of the pods (default: the cluster's)."
    ),
    _repeatable(
        "--device-class",
        "CLASS",
        pod_options.word,
        "Claim the GPUs by DRA from this device class, e.g. gpu.nvidia.com; each further class adds a device per GPU.",
        "device_classes",
    ),
    click.Option(
        ["--match-attribute"],
        type=Parsed("NAME", pod_options.word),
        help="Attribute that each GPU shares with its devices (with one class: that all GPUs of a pod share), e.g. "
        "resource.kubernetes.io/pcieRoot.",
    ),
    click.Option(
        ["--ttl", "ttl_s"],
        type=Parsed("TIME", parse_time, remedy="write 24h or 90m"),
        help="Delete the job this long after its end, e.g. 24h.",
    ),
    click.Option(
        ["--pod-security"],
        type=click.Choice([level.value for level in PodSecurity]),
        callback=lambda _context, _option, value: PodSecurity(value),
        default=PodSecurity.PRIVILEGED.value,
        help="Level that the namespace enforces. privileged (default): pods get the capability SYS_NICE, by which they "
        "set memory policies. baseline, restricted: no capability.",
    ),
    click.Option(
        ["--seccomp-profile"],
        type=Parsed("FILE", pod_options.word),
        help="Seccomp profile of the nodes that allows set_mempolicy, get_mempolicy and mbind; instead of SYS_NICE.",
    ),
    click.Option(
        ["--ipc-lock/--no-ipc-lock"],
        default=False,
        help="Let pods lock memory without limit, for RDMA (capability IPC_LOCK; default: no).",
    ),
)

_ARRAY: Final = click.Option(
    ["--array"],
    type=Parsed("INDICES", scripts.parse_array),
    help="Submit a job array, e.g. 0-9 or 0-99%4; programs read SLURM_ARRAY_TASK_ID or PBS_ARRAY_INDEX.",
)
_DIRECTIVE: Final = click.Option(
    ["--directive", "directives"],
    multiple=True,
    metavar="LINE",
    help="Another option for the manager, e.g. --directive=--constraint=ib for Slurm; repeatable.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Engine:
    """A resource manager."""

    about: str  # its name in help texts
    submit: str  # the command that submits a script
    options: tuple[click.Option, ...]  # its own
    build: Callable[[JobRequest], str]
    example: str  # options for the example in the help text
    further: tuple[str, ...] = ()  # options for further examples
    spare_cores: int = 0  # per NUMA node, which a machine file's share leaves to the system
    instead_of_type: str = ""  # the remedy if it requests no types of GPUs
    memory_by_number: bool = False  # whether even the memory of a whole host has to be requested in bytes
    warnings: Callable[[JobRequest], Sequence[str]] = lambda _: ()  # the parts of a request that it cannot do


_ENGINES: Final = {
    "slurm": _Engine(
        about="Slurm",
        submit="sbatch FILE",
        options=(_FORM, _PLAN, *_QUEUED, _ACCOUNT, _MEMORY, _IMAGE, _SETUP, _ARRAY, _DIRECTIVE),
        build=scripts.slurm,
        example="--nodes 4 --gpus-per-node 8 --time 24h --partition gpu \\\n      --requeue --signal 300",
        further=("--gpus-per-node 8 --array 0-99%4",),
        warnings=why_whole_hosts,
    ),
    "mpi": _Engine(
        about="Open MPI's mpirun",
        submit="bash FILE",
        options=(_FORM, _PLAN, _HOSTFILE, _IMAGE, _SETUP),
        build=scripts.mpi,
        instead_of_type="give their number alone",
        example="--form task --nodes 2 --gpus-per-node 8 --hostfile hosts",
    ),
    "kubernetes": _Engine(
        about="Kubernetes",
        submit="kubectl apply -f FILE",
        options=(_TIME, _SIGNAL, _REQUEUE, _KUEUE, _MEMORY, _IMAGE, *_KUBERNETES),
        build=kubernetes.build,
        instead_of_type="choose nodes by a label, e.g. --node-selector nvidia.com/gpu.product=NVIDIA-A100-SXM4-80GB",
        example="--nodes 2 --machine dgx.json \\\n      --container registry/image:tag --dataloader numapin",
        further=(
            "--form trainjob --machine dgx.json \\\n      --container registry/image:tag --queue team",
            "--machine dgx.json --container registry/image:tag \\\n"
            "      --env NCCL_DEBUG=INFO --volume pvc/data:/data:ro \\\n"
            "      --resource rdma/ib=8 --ipc-lock",
        ),
        memory_by_number=True,
        warnings=kubernetes.warnings,
        spare_cores=1,  # the static CPU manager requires CPUs that no pod owns
    ),
    "pbs": _Engine(
        about="PBS",
        submit="qsub FILE",
        options=(_FORM, _PLAN, *_QUEUED, _ACCOUNT, _MEMORY, _IMAGE, _SETUP, _ARRAY, _DIRECTIVE),
        build=scripts.pbs,
        instead_of_type="choose a queue of such hosts: --queue",
        example="--nodes 2 --gpus-per-node 4 --cpus-per-task 64 \\\n      --time 12h --queue gpu",
        memory_by_number=True,
        warnings=scripts.pbs_warnings,
    ),
    "lsf": _Engine(
        about="LSF",
        submit="bsub < FILE",
        options=(_FORM, _PLAN, *_QUEUED, _ACCOUNT, _MEMORY, _IMAGE, _SETUP, _DIRECTIVE),
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
      numapin job slurm --nodes 4 --gpus-per-node 8 --time 24h train.py > job.sh
      sbatch job.sh
      numapin job slurm --form task --machine dgx.json train.py  one task per GPU
      numapin job mpi --nodes 2 --gpus-per-node 8 --hostfile hosts train.py
      numapin job kubernetes --nodes 2 --machine dgx.json \\
          --container registry/image:tag train.py
      numapin job kubernetes --form trainjob --nodes 2 --machine dgx.json \\
          --container registry/image:tag train.py
    """


class _EngineCommand(click.Command):
    """A command that knows the words of its command line, which the script names."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Note the words, then parse them. Raises UsageError for one that no script or manifest can contain."""
        not_text = next(filter(_NOT_TEXT.search, args), None)
        if not_text is not None and not ctx.resilient_parsing:  # a line that is being completed needs no script
            raise UsageError(f"{not_text!r} is not text that a script can contain", "write it in UTF-8")
        words = without_secrets(["numapin", "job", ctx.info_name or "", *args])
        ctx.meta[_WRITTEN_BY] = f"Written by numapin {__version__}: {formats.quote_all(words)}"
        return super().parse_args(ctx, args)


def _command(name: str, engine: _Engine) -> click.Command:
    """Return an engine's command."""

    def write_script(*, output: Path | None, **given: Any) -> None:  # noqa: ANN401 - values of click
        request = _request(name, engine, **given, written_by=click.get_current_context().meta[_WRITTEN_BY])
        text = engine.build(request)
        warn(engine.warnings(request))
        write(text, output, option="--output")

    return _EngineCommand(
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


def _request(
    engine_name: str,
    engine: _Engine,
    *,
    gpus_per_node: tuple[str | None, int] | None,
    machine: Path | None,
    plan: str | None = None,
    **given: object,
) -> JobRequest:
    """Return the request of the options and the machine file. Raises UsageError, and the errors of a plan."""
    if given["module"] and given["no_python"]:
        raise UsageError("--module and --no-python exclude each other", "use one of them")
    gpu_type, num_gpus = gpus_per_node or (None, None)
    if gpu_type and engine.instead_of_type:
        raise UsageError(
            f"--gpus-per-node {gpu_type}:{num_gpus}: {engine.about} requests no types of GPUs", engine.instead_of_type
        )
    binding = record_of(BindingOptions, given)
    binding.request(num_ranks=None)  # raises for invalid binding options
    topology = None if machine is None else topology_from(gpu_nodes=binding.gpu_nodes, machine=machine)
    strict = ["--strict"] if binding.strict else []
    values = {
        "bind": binding.bind,
        "memory": binding.memory,
        "cpus-per-rank": binding.cpus_per_rank,
        "reserve-cpus": binding.reserve_cpus,
        "gpus": ",".join(binding.gpus or ()),
        "gpu-nodes": ",".join(f"{gpu}={node}" for gpu, node in binding.gpu_nodes or ()),
        "nic-env": ",".join(binding.nic_env or ()),
    }
    options = [f"--{name}={value}" for name, value in values.items() if value]
    options += [*([] if binding.smt else ["--no-smt"]), *strict]
    if plan is not None:
        if given["form"] is Form.NODE:
            raise UsageError(f"--plan {plan} with --form node: numapin run makes its own plan", "use --form task")
        if options != strict:
            raise UsageError(f"--plan {plan} already decides {options[0]}", "give that option to: numapin plan --json")
        options = [f"--plan={plan}", *strict]
    gpus = topology.vendor_gpus if topology else ()
    tiles = [gpu.pci for gpu in gpus if gpu.vendor is GpuVendor.INTEL and gpu.partition is not None]
    loader = given.pop("dataloader")
    request = record_of(
        JobRequest,
        given,
        gpus_per_node=gpus_per_host(num_gpus, topology),
        gpu_type=gpu_type,
        whole_nodes=topology is None and given["cpus_per_task"] is None,
        options=tuple(options),
        dataloader=None if loader == "torch" else loader,
        pod=record_of(PodOptions, given),
        vendor=next((gpu.vendor for gpu in gpus if gpu.vendor), GpuVendor.NVIDIA),
        tiles_per_gpu=len(tiles) // len(set(tiles)) if tiles else 1,
        engine=engine_name,
    )
    require_gpu_per_rank(binding.gpus, num_ranks=request.num_ranks)
    if topology is None:
        return request

    # Check the machine's plan and its size, so that errors come before the queue.
    made = make_plan(topology, binding.request(num_ranks=request.num_ranks))
    if binding.strict:
        made.require_exact()
    share = sized(request, topology, spare_cores=engine.spare_cores, memory_by_number=engine.memory_by_number)
    if request.gpus_per_node in (0, len(gpus)):  # the plan is for the whole host
        warn(made.warnings)
    return share


for _name, _engine in _ENGINES.items():
    job.add_command(_command(_name, _engine))
