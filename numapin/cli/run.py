"""`numapin run`: start bound ranks. Edge.

Comes in: a torchrun command line with binding options. Goes out: bound ranks, run to their end; torchrun's exit status.
"""

from __future__ import annotations

import os
import time
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import click
from click.shell_completion import CompletionItem

from numapin.base import quoting
from numapin.base.plural import counted
from numapin.base.stderr import say
from numapin.cli.options import BINDING, BindingOptions, FilePath, topology_from
from numapin.cli.output import emit, require_writable, show, warn
from numapin.cli.torch_import import importing_torch
from numapin.errors import BindingRefused, UsageError
from numapin.launcher import preload
from numapin.launcher.lost_gpus import require_gpus
from numapin.launcher.rehearse import rehearse
from numapin.launcher.run_folder import run_directory
from numapin.plan.gpus import settle_gpus
from numapin.plan.make import default_num_ranks, make_plan
from numapin.plan.nics import nic_variables, with_users_nics
from numapin.rank.signals import open_mailbox
from numapin.system import oom
from numapin.topology.readings import OTHERS
from numapin.topology.sources.vendors.table import first_visible

if TYPE_CHECKING:
    from argparse import ArgumentParser
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from numapin.launcher.torchrun import Job, OwnOption
    from numapin.observe.during_run import Watching
    from numapin.observe.report import VerifyReport
    from numapin.plan.model import Plan
    from numapin.plan.request import Request
    from numapin.rank.signals import Mailbox
    from numapin.topology.model import Topology
    from numapin.topology.readings import NvmlReadings

_DESCRIPTION = (
    "Run a training script with one rank per GPU, each bound to the CPUs and the memory of its GPU's NUMA node."
)
_EPILOG = """examples:
  numapin run train.py --lr 0.1                     one bound rank per visible GPU
  numapin run --bind exclusive --memory bind train.py
  numapin run --nnodes 2 --rdzv-backend c10d --rdzv-endpoint head:29500 train.py
  numapin run --dry-run train.py                    show the plan and each rank's command
  numapin run --report placement.json train.py      and check where threads and pages are"""

OPTIONS = (
    *BINDING,
    click.Option(
        ["--dataloader"],
        type=click.Choice(preload.CHOICES),
        default="torch",
        help="Data path of the script's DataLoaders: torch's (default) or numapin's; numapin-balanced also gives each "
        "batch to the worker that is ready first. The script needs no change.",
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
        help="Write the requested, applied and actual binding of each rank as JSON; implies --verify.",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions(BindingOptions):
    """The parsed values of `OPTIONS`, by click's names."""

    dataloader: str
    dry_run: bool
    quiet: bool
    verify: bool
    verify_after: float | None
    report: Path | None


_Options = TypeVar("_Options", bound=RunOptions)


class _RunCommand(click.Command):
    """A command whose options torch's parser reads.

    Completion offers numapin's own options and files only: torchrun's would need torch, a second per key press.
    """

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete numapin's own options, and file names."""
        del ctx
        if not incomplete.startswith("-"):
            return [CompletionItem(incomplete, type="file")]
        names = {name: option.help for option in OPTIONS for name in (*option.opts, *option.secondary_opts)}
        return [CompletionItem(name, help=text) for name, text in names.items() if name.startswith(incomplete)]


@click.command(
    cls=_RunCommand,
    short_help="Run a training script, one bound rank per GPU.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False, "help_option_names": []},
    add_help_option=False,
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(arguments: tuple[str, ...]) -> None:
    """Run a training script, one bound rank per GPU. Replaces torchrun."""
    mailbox = open_mailbox()  # before torch is imported, which takes a second
    start(*parse(arguments, RunOptions), mailbox)


def start(job: Job, options: RunOptions, mailbox: Mailbox, *, trace: str = "") -> None:
    """Read the machine, make the plan, and run the job to its end; `trace` configures the tracing hook in the ranks."""
    watch = _watching(options)
    topology = topology_from(gpu_nodes=options.gpu_nodes)
    request, gpu_variables = _request(job, options, topology)
    environment = {**gpu_variables, **_hook_environment(job, options, trace)}
    plan = rehearse(with_users_nics(make_plan(topology, request), os.environ), strict=options.strict)

    _announce(plan, topology, quiet=options.quiet and not options.dry_run)
    if options.dry_run:
        _print_commands(plan, job, environment)
    else:
        observed = partial(_observed, job=job, num_ranks=len(plan.ranks), watch=watch, options=options)
        looks = _gpu_readings if any(gpu.vendor not in OTHERS for gpu in topology.visible_gpus) else tuple
        _launch(plan, job, environment, mailbox=mailbox, observed=observed, looks=looks)


def make_run_parser(
    options: Sequence[click.Option] = (), *, command: str = "run", about: str = _DESCRIPTION, epilog: str = _EPILOG
) -> ArgumentParser:
    """Return the installed torch's torchrun parser with numapin's options and another command's `options` added."""
    from numapin.launcher.torchrun import make_parser

    parser = make_parser([_own_option(option) for option in (*OPTIONS, *options)], description=about, epilog=epilog)
    parser.prog = f"numapin {command}"
    return parser


def _own_option(option: click.Option) -> OwnOption:
    """Return a click option as torchrun's parser takes it."""
    from numapin.launcher.torchrun import OwnOption

    return OwnOption(
        names=(*option.opts, *option.secondary_opts),
        takes_value=not option.is_flag,
        metavar=option.metavar or "|".join(getattr(option.type, "choices", ())) or option.type.name,
        help=option.help or "",
    )


def parse(
    arguments: tuple[str, ...], kind: type[_Options], options: Sequence[click.Option] = (), **command: str
) -> tuple[Job, _Options]:
    """Parse a command line with torch's parser; numapin's own options then go through click, as in `numapin plan`.

    `kind` has a field for each of `OPTIONS` and of another command's `options`.

    Importing torch starts OpenMP, which rebinds this thread if OMP_PROC_BIND or GOMP_CPU_AFFINITY is set. The plan is
    for the launcher's original CPUs, so its affinity is restored.
    """
    affinity = os.sched_getaffinity(0)
    with importing_torch():
        from numapin.launcher import torchrun

    os.sched_setaffinity(0, affinity)
    torchrun.keep_log_visible()
    parser = make_run_parser(options, **command)
    job = torchrun.parse(arguments, parser)
    own = click.Command("run", params=[*OPTIONS, *options]).make_context(parser.prog, list(job.own))
    return job, kind(**own.params)


def _request(job: Job, options: RunOptions, topology: Topology) -> tuple[Request, dict[str, str]]:
    """Return the request of the options, including torchrun's, and the variables that show CUDA the GPUs of --gpus."""
    asked = options.request(num_ranks=_num_ranks(job, topology), numa_binding=job.numa_binding)
    request, gpu_variables = settle_gpus(topology, asked, os.environ)
    if job.arguments.virtual_local_rank:
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
    from numapin.launcher.torchrun import number_of_ranks

    wanted, usable = job.nproc_per_node, topology.has_usable_gpu
    if wanted is None:
        return default_num_ranks(topology)
    if wanted == "gpu" and not usable:
        raise UsageError("--nproc-per-node gpu: CUDA shows no GPU", "see why with: numapin doctor")
    if wanted in ("gpu", "auto") and usable:
        return None
    return number_of_ranks(wanted)


def _hook_environment(job: Job, options: RunOptions, trace: str) -> dict[str, str]:
    """Return the variables that give the ranks the chosen data path and the tracing hook."""
    if trace:
        _check_trace_hook(job.command)
    elif options.dataloader != "torch":
        _check_dataloader_hook(job.command, strict=options.strict)
    return preload.environment(options.dataloader, os.environ, trace=trace)


def _check_trace_hook(command: Sequence[str]) -> None:
    """Raise UsageError if the hook cannot run in this command."""
    reason = preload.refusal(command)
    if reason:
        raise UsageError(f"numapin trace cannot work: {reason}", preload.TRACE_REMEDY)
    _note_other_program("numapin trace", command)


def _check_dataloader_hook(command: Sequence[str], *, strict: bool) -> None:
    """Warn if the hook cannot run in this command. Raises BindingRefused instead if `strict`."""
    reason = preload.refusal(command)
    if reason and strict:
        raise BindingRefused(f"--strict: --dataloader numapin cannot work: {reason}", preload.REMEDY)
    if reason:
        warn([f"--dataloader numapin cannot work: {reason}; {preload.REMEDY}"])
    else:
        _note_other_program("--dataloader numapin", command)


def _note_other_program(feature: str, command: Sequence[str]) -> None:
    if not preload.is_python(command):
        say(f"{feature} applies to the Python processes that {command[0]} starts, if any")


def _gpus_of_virtual_ranks(topology: Topology, environ: Mapping[str, str]) -> tuple[int | None, ...]:
    """Return the only GPU that each rank sees: torch gives rank n entry n of CUDA_VISIBLE_DEVICES, or n."""
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    entries = [str(n) for n in range(len(topology.vendor_gpus))] if listed is None else listed.split(",")
    return tuple(first_visible(topology.gpus, {**environ, "CUDA_VISIBLE_DEVICES": entry.strip()}) for entry in entries)


def _announce(plan: Plan, topology: Topology, *, quiet: bool) -> None:
    if not quiet:
        from numapin.view.plan_table import plan_table

        show(plan_table(plan), err=True)
        if len(topology.nodes) == 1:
            say("this machine has one NUMA node: all memory is local, with or without binding")
    warn(plan.warnings)


def _print_commands(plan: Plan, job: Job, environment: dict[str, str]) -> None:
    """Print each rank's command, with the variables that it gets, in shell syntax."""
    for rank in plan.ranks:
        threads = os.environ.get("OMP_NUM_THREADS", str(rank.num_threads))
        variables = {**environment, "OMP_NUM_THREADS": threads, **nic_variables(rank)}
        assignments = " ".join(f"{name}={quoting.quote(value)}" for name, value in variables.items())
        command = quoting.join(job.command_of(rank.local_rank))
        emit(f"rank {rank.local_rank}: {assignments} {command}\n")


def _launch(  # noqa: PLR0913 - the results of the steps before
    plan: Plan,
    job: Job,
    environment: dict[str, str],
    *,
    mailbox: Mailbox,
    observed: Callable[[str], AbstractContextManager[None]],
    looks: Callable[[], Iterable[NvmlReadings]],
) -> None:
    """Run the job; `looks` returns readings of NVML by which lost GPUs are noticed before a restart."""
    with importing_torch():
        from numapin.launch import launch

    os.environ.update(environment)
    mailbox.leave(job.signals)
    with run_directory(os.environ) as run_dir, observed(run_dir):
        launch(plan, job, run_dir, mailbox, lambda: require_gpus(plan, looks()))


@contextmanager
def _observed(run_dir: str, *, job: Job, num_ranks: int, watch: Watching | None, options: RunOptions) -> Iterator[None]:
    """Report, during and after a run, what its options ask for."""
    with (
        _loaders_reported(run_dir, job, options),
        _watched(run_dir, num_ranks, watch),
        oom.reporting_oom_kills(say),
    ):
        yield


def _loaders_reported(run_dir: str, job: Job, options: RunOptions) -> AbstractContextManager[None]:
    """Report at the end which loaders took numapin's path. Each host has its launcher, and so its line."""
    if options.dataloader == "torch":
        return nullcontext()
    from numapin.observe.loaders import reporting_loaders

    title = "dataloader" if job.is_single_host else f"dataloader on {os.uname().nodename}"
    return reporting_loaders(run_dir, strict=options.strict, report=lambda text: say(f"{title}: {text}"))


def _gpu_readings() -> Iterator[NvmlReadings]:
    """Query NVML a few times, because a GPU may not answer for a moment, e.g. during a reset."""
    from numapin.topology.sources.nvml import read_nvml

    for pause_s in (0, 1, 2, 2):
        time.sleep(pause_s)
        yield read_nvml()


def _watching(options: RunOptions) -> Watching | None:
    """Return the checks that --verify, --verify-after and --report ask for. Raises UsageError for an unusable file."""
    after_s, report = options.verify_after, options.report
    if not options.verify and after_s is None and report is None:
        return None
    from numapin.observe.during_run import Watching

    require_writable(report, option="--report")
    return Watching(
        after_s=10 if after_s is None else after_s, report=report, tell=_print_report, warn=lambda text: warn([text])
    )


def _watched(run_dir: str, num_ranks: int, watch: Watching | None) -> AbstractContextManager[None]:
    if watch is None:
        return nullcontext()
    from numapin.observe.during_run import watching

    return watching(run_dir, num_ranks, watch)


def _print_report(report: VerifyReport, age_s: float) -> None:
    """Print a check's summary line and its findings."""
    from numapin.view.verify_table import findings_of, summary

    when = f" {age_s:.0f} s ago" if age_s else ""
    say(f"verified{when}: {summary(report)}")
    for finding in findings_of(report, notes=False):
        show(finding, err=True)
