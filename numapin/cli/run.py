"""`numapin run`: start bound ranks."""

from __future__ import annotations

import os
import re
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import click

from numapin.base import formats
from numapin.base.plural import counted
from numapin.base.stderr import say
from numapin.cli import run_failure, run_reports
from numapin.cli.options import BINDING, BindingOptions, FilePath, topology_from
from numapin.cli.output import emit, show, warn, warn_or_refuse
from numapin.cli.run_decisions import decisions
from numapin.cli.run_hooks import hook_environment
from numapin.cli.torch_import import importing_torch, require_torch
from numapin.cli.torchrun_command import TorchrunCommand
from numapin.errors import UsageError
from numapin.launcher import options as torchruns
from numapin.launcher.lost_gpus import require_gpus
from numapin.launcher.program import keep_script, python, require_program
from numapin.launcher.rehearse import rehearse
from numapin.launcher.run_folder import run_directory
from numapin.launcher.store_server import torch_folder, why_not_served
from numapin.plan.gpus import settle_gpus
from numapin.plan.make import default_num_ranks, make_plan
from numapin.plan.nics import nic_variables, with_users_nics
from numapin.rank import hook_env
from numapin.rank.signals import open_mailbox
from numapin.system.openmp import binding_variables
from numapin.tasks.identify import explain_repeated, repeated_task
from numapin.topology.vendors import first_visible

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from numapin.launcher.options import Job
    from numapin.plan.model import Plan
    from numapin.plan.request import Request
    from numapin.rank.signals import Mailbox
    from numapin.topology.model import Topology
    from numapin.topology.readings import NvmlReadings

_DESCRIPTION = (
    "Run a training script with one rank per GPU, each bound to the CPUs and the memory of its GPU's NUMA node. "
    "Replaces torchrun, whose options all work. Options after SCRIPT belong to the script."
)
_EXAMPLES = """\
  numapin run train.py --lr 0.1                     one bound rank per visible GPU
  numapin run --bind exclusive --memory bind train.py
  numapin run --nnodes 2 --rdzv-backend c10d --rdzv-endpoint head:29500 train.py
  numapin run --dry-run train.py                    show the plan and each rank's command
  numapin run --report placement.json train.py      and check where threads and pages are"""

_OF_LAUNCHERS: Final = frozenset(
    (
        *("--nproc-per-node", "--nnodes", "--node-rank", "--standalone", "--max-restarts", "--numa-binding"),
        *("--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf", "--bind", "--cpus-per-rank"),
        *("--no-smt", "--reserve-cpus", "--gpu-nodes", "--nic-env", "--dataloader"),
    )
)
"""Options that few scripts have, unlike --gpus, --verbose or --log-dir."""
_SHOWN_CHARS: Final = 60  # of a variable's value in a message
OPTIONS = (
    *BINDING,
    click.Option(
        ["--dataloader"],
        type=click.Choice(hook_env.CHOICES),
        default="torch",
        help="Data path of the script's DataLoaders: torch's (default) or numapin's; numapin-balanced also gives each "
        "batch to the worker that is ready first. The script needs no change.",
    ),
    click.Option(
        ["--verbose"],
        is_flag=True,
        help="Also report the run's folder and why it starts as it does.",
    ),
    click.Option(["--dry-run"], is_flag=True, help="Show the plan and the command of each rank. Starts nothing."),
    click.Option(["--quiet"], is_flag=True, help="Do not print the table of bindings."),
    click.Option(
        ["--verify"], is_flag=True, help="Check where threads and pages are, soon after the start and near the end."
    ),
    click.Option(
        ["--verify-after"],
        type=click.FloatRange(min=0),
        metavar="SECONDS",
        help="Seconds from the start of the ranks to the first check (default: 10); implies --verify.",
    ),
    click.Option(
        ["--report"],
        type=FilePath(dir_okay=False),
        metavar="FILE",
        help="Write the requested, applied and actual binding of each rank, and how a failed job ended, as JSON; "
        "implies --verify.",
    ),
    click.Option(
        ["--traceback"],
        is_flag=True,
        help="After a failure, print all frames of the rank that failed first.",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions(BindingOptions):
    """The parsed values of `OPTIONS`, by click's names."""

    dataloader: str
    verbose: bool
    dry_run: bool
    quiet: bool
    verify: bool
    verify_after: float | None
    report: Path | None
    traceback: bool


_Options = TypeVar("_Options", bound=RunOptions)


def _run(arguments: tuple[str, ...]) -> None:
    mailbox = open_mailbox()  # before torch is imported, which takes a second
    start(*parse(arguments, RunOptions), mailbox)


def sections_of_run() -> dict[str, list[click.Option]]:
    """Return numapin's own options by the headings of the help page."""
    others = [option for option in OPTIONS if option not in BINDING]
    return {"Binding": list(BINDING), "Start, data path and checks": others}


run = TorchrunCommand(
    "run",
    _run,
    about=_DESCRIPTION,
    examples=_EXAMPLES,
    short_help="Run a training script, one bound rank per GPU.",
    sections=sections_of_run(),
)


def start(job: Job, options: RunOptions, mailbox: Mailbox, *, trace: str = "") -> None:
    """Read the machine, make the plan, and run the job to its end; `trace` configures the tracing hook in the ranks."""
    with run_failure.shown(wanted=options.traceback):
        _start(job, options, mailbox, trace)


def _start(job: Job, options: RunOptions, mailbox: Mailbox, trace: str) -> None:
    if job.is_single_host:
        _require_one_launcher(strict=options.strict)
    _require_unbound_threads(strict=options.strict)
    _warn_of_options_after(job)
    watch = run_reports.watching_of(options, run_reports.launcher_of(job))
    topology = topology_from(gpu_nodes=options.gpu_nodes)
    request, gpu_variables = _request(job, options, topology)
    environment = {**gpu_variables, **hook_environment(job.command, options, trace)}
    plan = rehearse(with_users_nics(make_plan(topology, request), os.environ), strict=options.strict)

    _announce(plan, topology, quiet=options.quiet and not options.dry_run)
    tell = say if options.verbose else _ignore
    _explain(job, plan, options, tell)
    if options.dry_run:
        _print_commands(plan, job, environment)
    else:
        observed = partial(run_reports.observed, job=job, num_ranks=len(plan.ranks), watch=watch, options=options)
        looks = _gpu_readings if any(gpu.is_nvidia for gpu in topology.visible_gpus) else tuple
        _launch(plan, job, environment, mailbox=mailbox, observed=observed, looks=looks, tell=tell)


def _explain(job: Job, plan: Plan, options: RunOptions, tell: Callable[[str], None]) -> None:
    """Report the launcher of the ranks and the decisions made for them."""
    if options.dry_run or options.verbose:
        _say_launcher(job)
    for line in decisions(job, plan, os.environ):
        tell(line)


def _require_one_launcher(*, strict: bool) -> None:
    """Warn if srun or mpirun started several launchers on this host. Raises BindingRefused instead if `strict`."""
    task = repeated_task(os.environ)
    if task is not None and (strict or task.rank == 0):
        warn_or_refuse(*explain_repeated(task), strict=strict)


def _require_unbound_threads(*, strict: bool) -> None:
    """Warn of variables that make OpenMP bind the ranks' threads. Raises BindingRefused instead if `strict`."""
    binding = binding_variables(os.environ)
    if binding:
        settings = " ".join(f"{name}={value[:_SHOWN_CHARS]}" for name, value in binding.items())
        warn_or_refuse(
            f"{settings}: OpenMP binds the main thread of each rank to part of the rank's CPUs when torch is imported, "
            "and DataLoader workers inherit that",
            f"unset {' '.join(binding)}",
            strict=strict and binding.keys() != {"KMP_AFFINITY"},  # which torch's wheels with GNU's OpenMP ignore
        )


def _warn_of_options_after(job: Job) -> None:
    """Warn of the launcher's options that follow the script, unless the script's own text has their names.

    Only for Python files: programs in a bin folder, modules and archives have their options elsewhere.
    """
    words = takewhile(lambda word: word != "--", job.command[3:])  # after the interpreter, -u and the script
    found = _OF_LAUNCHERS.intersection(word.partition("=")[0].replace("_", "-") for word in words)
    script = Path(job.program)
    if not found or script.suffix != ".py" or not script.is_file() or job.no_python or job.run_path:
        return
    try:
        text = script.read_text(errors="replace").replace("_", "-")
    except OSError:
        return  # the rank reports it
    if lost := [name for name in sorted(found) if not re.search(rf"\b{name[2:]}\b", text)]:
        warn([f"{script} gets {', '.join(lost)}; numapin's own options come before the script"])


def parse(
    arguments: tuple[str, ...], kind: type[_Options], options: Sequence[click.Option] = (), *, command: str = "run"
) -> tuple[Job, _Options]:
    """Parse a command line as torchrun does; numapin's own options then go through click, as in `numapin plan`.

    `kind` has a field for each of `OPTIONS` and of another command's `options`.
    """
    prog, all_own = f"numapin {command}", [*OPTIONS, *options]
    own = {name: not option.is_flag for option in all_own for name in (*option.opts, *option.secondary_opts)}
    job = torchruns.parse(arguments, own, os.environ, python=python(), prog=prog)
    values = kind(**click.Command("run", params=[*all_own]).make_context(prog, list(job.own)).params)
    require_program(job.program, module=job.module, no_python=job.no_python, run_path=job.run_path)
    problem = why_not_served(torch_folder()) if job.is_single_host else f"--nnodes {job.min_max_nodes[1]}"
    if problem:
        require_torch(f"{prog} with torch's store ({problem})")
    return replace(job, why_torch=problem or ""), values


def _request(job: Job, options: RunOptions, topology: Topology) -> tuple[Request, dict[str, str]]:
    """Return the request of the options, including torchrun's, and the variables that show CUDA the GPUs of --gpus."""
    asked = options.request(num_ranks=_num_ranks(job, topology), numa_binding=job.numa_binding)
    request, gpu_variables = settle_gpus(topology, asked, os.environ)
    if job.virtual_local_rank:
        gpus = _gpus_of_virtual_ranks(topology, {**os.environ, **gpu_variables})
        _require_gpu_per_rank(request.num_ranks, len(gpus))
        request = replace(request, rank_gpus=gpus)
    return request, gpu_variables


def _require_gpu_per_rank(num_ranks: int | None, num_gpus: int) -> None:
    if num_ranks is not None and 0 < num_gpus < num_ranks:
        raise UsageError(
            f"--virtual-local-rank shows each rank one GPU; there are {counted(num_ranks, 'rank')} and "
            f"{counted(num_gpus, 'GPU')}",
            "start fewer ranks with --nproc-per-node",
        )


def _num_ranks(job: Job, topology: Topology) -> int | None:
    """Return the number of ranks. None: one per GPU."""
    wanted = job.nproc_per_node
    if wanted is None:
        return default_num_ranks(topology)
    if wanted in ("gpu", "auto") and topology.has_usable_gpu:
        return None
    if wanted == "gpu":
        raise UsageError("--nproc-per-node gpu: CUDA shows no GPU", "see why with: numapin doctor")
    if wanted.isascii() and wanted.isdecimal():
        return int(wanted)
    require_torch(f"--nproc-per-node {wanted}")
    from numapin.launcher.hosts import count_devices

    try:
        with importing_torch():  # it knows other devices, and counts CPUs
            return count_devices(wanted)
    except ValueError as error:
        raise UsageError(f"--nproc-per-node {wanted}: {error}", "give a number, or gpu, cpu or auto") from None


def _gpus_of_virtual_ranks(topology: Topology, environ: Mapping[str, str]) -> tuple[int | None, ...]:
    """Return the only GPU that each rank sees: torch gives rank n entry n of CUDA_VISIBLE_DEVICES, or n."""
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    entries = [str(n) for n in range(len(topology.vendor_gpus))] if listed is None else listed.split(",")
    return tuple(first_visible(topology.gpus, {**environ, "CUDA_VISIBLE_DEVICES": entry.strip()}) for entry in entries)


def _ignore(_: str) -> None:
    """Take what is said with --verbose only."""


def _announce(plan: Plan, topology: Topology, *, quiet: bool) -> None:
    if not quiet:
        from numapin.view.plan_table import plan_table

        show(plan_table(plan), err=True)
        if len(topology.nodes) == 1:
            say("this machine has one NUMA node: all memory is local, with or without binding")
    warn(plan.warnings)


def _say_launcher(job: Job) -> None:
    """Say what starts the ranks, and why."""
    launcher = run_reports.launcher_of(job)
    names = {"direct": "direct, without torch", "agent": "with torch's store"}
    say(f"launcher: {names[launcher['name']]}: {launcher['reason']}")


def _print_commands(plan: Plan, job: Job, environment: dict[str, str]) -> None:
    """Print each rank's command, with the variables that it gets, in shell syntax."""
    for rank in plan.ranks:
        threads = os.environ.get("OMP_NUM_THREADS", str(rank.num_threads))
        variables = {**environment, "OMP_NUM_THREADS": threads, **nic_variables(rank)}
        assignments = " ".join(f"{name}={formats.quote(value)}" for name, value in variables.items())
        command = formats.quote_all(job.command_of(rank.local_rank))
        emit(f"rank {rank.local_rank}: {assignments} {command}\n", encoding=sys.getfilesystemencoding())


def _launch(
    plan: Plan,
    job: Job,
    environment: dict[str, str],
    *,
    mailbox: Mailbox,
    observed: Callable[[str], AbstractContextManager[None]],
    looks: Callable[[], Iterable[NvmlReadings]],
    tell: Callable[[str], None],
) -> None:
    """Run the job; `looks` returns readings of NVML by which lost GPUs are noticed before a restart."""
    from numapin.launch import launch

    if job.why_torch:
        from numapin.launcher.hosts import import_torch

        affinity = os.sched_getaffinity(0)
        with importing_torch():
            import_torch()
        # Importing torch starts OpenMP, which rebinds this thread if OMP_PROC_BIND or GOMP_CPU_AFFINITY is set.
        os.sched_setaffinity(0, affinity)
    keep_script(job.command)
    os.environ.update(environment)
    mailbox.leave(job.signals)
    mailbox.wrapper = None if hook_env.is_python(job.command) else job.command[0]
    with run_directory(os.environ, tell) as run_dir, observed(run_dir), run_failure.accounted(run_dir):
        tell(f"files of this run: {run_dir}")
        launch(plan, job, run_dir, mailbox, lambda: require_gpus(plan, looks()))


def _gpu_readings() -> Iterator[NvmlReadings]:
    """Query NVML a few times, because a GPU may not answer for a moment, e.g. during a reset."""
    from numapin.topology.sources.nvml import read_nvml

    for pause_s in (0, 1, 2, 2):
        time.sleep(pause_s)
        yield read_nvml()
