"""`numapin run`: start bound ranks."""

from __future__ import annotations

import os
import re
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import click

from numapin.base import formats
from numapin.base.stderr import say
from numapin.base.text import counted
from numapin.cli.options import BINDING, BindingOptions, FilePath, Seconds, topology_from
from numapin.cli.output import emit, require_writable, show, show_frames, warn, warn_or_refuse
from numapin.cli.torch_import import importing_torch, require_torch
from numapin.cli.torchrun_command import TorchrunCommand
from numapin.errors import NumapinError, RankError, Stopped, UsageError
from numapin.launcher import hosts
from numapin.launcher import options as torchruns
from numapin.launcher.program import python, require_program
from numapin.launcher.rehearse import rehearse, require_gpus
from numapin.launcher.run_folder import run_directory
from numapin.plan.gpus import settle_gpus
from numapin.plan.make import default_num_ranks, make_plan
from numapin.plan.nics import nic_variables, with_users_nics
from numapin.rank import handover, hook_env
from numapin.rank.inherited import forget_outer_rank, raise_open_files
from numapin.rank.signals import open_mailbox
from numapin.system.libraries import binding_variables
from numapin.tasks.hosts import JOB_IDS, OwnHost, job_ids_of, with_found_hosts
from numapin.topology.vendors import first_visible

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from numapin.launcher.failure import JobFailure
    from numapin.launcher.options import Job
    from numapin.observe.during_run import Watching
    from numapin.observe.verify import VerifyReport
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
  numapin run train.py --lr 0.1                     one bound rank per GPU
  numapin run --bind exclusive --memory bind train.py
  srun --ntasks-per-node=1 numapin run train.py     one launcher per host
  numapin run --dry-run train.py                    show plan and commands
  numapin run --report placement.json train.py      also check the placement"""

_OF_LAUNCHERS: Final = frozenset(  # options that few scripts have, unlike --gpus, --verbose or --log-dir
    (
        *("--nproc-per-node", "--nnodes", "--node-rank", "--standalone", "--max-restarts", "--numa-binding"),
        *("--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf", "--bind", "--cpus-per-rank"),
        *("--no-smt", "--reserve-cpus", "--gpu-nodes", "--nic-env", "--dataloader"),
    )
)
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
    click.Option(["--verbose"], is_flag=True, help="Also report the run's folder and why it starts as it does."),
    click.Option(["--dry-run"], is_flag=True, help="Show the plan and the command of each rank. Starts nothing."),
    click.Option(["--quiet"], is_flag=True, help="Do not print the table of bindings."),
    click.Option(
        ["--verify"], is_flag=True, help="Check where threads and pages are, soon after the start and near the end."
    ),
    click.Option(
        ["--verify-after"],
        type=Seconds(min=0),
        metavar="SECONDS",
        help="Seconds from the start of the ranks to the first check (default: 10); implies --verify.",
    ),
    click.Option(
        ["--report"],
        type=FilePath(dir_okay=False),
        help="Write the requested, applied and actual binding of each rank, and how a failed job ended, as JSON; "
        "implies --verify.",
    ),
    click.Option(
        ["--traceback"], is_flag=True, help="After a failure, print all frames of the rank that failed first."
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


SECTIONS: Final = {  # numapin's own options by the headings of the help page
    "Binding": list(BINDING),
    "Start, data path and checks": [option for option in OPTIONS if option not in BINDING],
}
run = TorchrunCommand(
    "run",
    _run,
    about=_DESCRIPTION,
    examples=_EXAMPLES,
    sections=SECTIONS,
)


def start(job: Job, options: RunOptions, mailbox: Mailbox) -> None:
    """Read the machine, make the plan, and run the job to its end."""
    try:
        # The environment and the options, before the machine is read.
        forgotten, more_files = forget_outer_rank(os.environ), raise_open_files()
        if binding := binding_variables(os.environ):
            settings = " ".join(f"{name}={value[:_SHOWN_CHARS]}" for name, value in binding.items())
            warn_or_refuse(
                f"{settings}: OpenMP binds the main thread of each rank to part of the rank's CPUs when torch is "
                "imported, and DataLoader workers inherit that",
                f"unset {' '.join(binding)}",
                # torch's wheels with GNU's OpenMP ignore KMP_AFFINITY.
                strict=options.strict and binding.keys() != {"KMP_AFFINITY"},
            )
        _warn_of_options_after(job)
        num_hosts = job.min_max_nodes[1]
        why_launcher = job.why_torch or ("one host" if num_hosts == 1 else f"{num_hosts} hosts")
        watch = None
        if options.verify or options.verify_after is not None or options.report is not None:
            name = "agent" if job.why_torch else "direct"  # the words of docs/schemas.md
            watch = watching_of(options, {"name": name, "reason": why_launcher})

        # The machine, then the plan, which is tried before any rank exists.
        topology = topology_from(gpu_nodes=options.gpu_nodes)
        request, gpu_variables = _request(job, options, topology)
        if options.dataloader != "torch":
            if reason := hook_env.refusal(job.command):
                problem = f"--dataloader numapin cannot work: {reason}"
                warn_or_refuse(problem, hook_env.REMEDY, strict=options.strict)
            elif not hook_env.is_python(job.command):
                say(f"--dataloader numapin applies to the Python processes that {job.command[0]} starts, if any")
        environment = {**gpu_variables, **hook_env.environment(options.dataloader, os.environ)}
        plan = rehearse(with_users_nics(make_plan(topology, request), os.environ), strict=options.strict)

        # What is shown before the ranks start.
        if options.dry_run or not options.quiet:
            from numapin.view.plan_table import plan_table

            show(plan_table(plan), err=True)
            if len(topology.nodes) == 1:
                say("this machine has one NUMA node: all memory is local, with or without binding")
        warn(plan.warnings)
        if options.dry_run or options.verbose:
            way = "with torch's store" if job.why_torch else "direct, without torch"
            say(f"launcher: {way}: {why_launcher}")
        if options.verbose:
            _explain_start(plan, job, forgotten=forgotten, more_files=more_files)

        if options.dry_run:
            for rank in plan.ranks:
                threads = os.environ.get("OMP_NUM_THREADS", str(rank.num_threads))
                variables = {**environment, "OMP_NUM_THREADS": threads, **nic_variables(rank)}
                assignments = " ".join(f"{name}={formats.quote(value)}" for name, value in variables.items())
                command = formats.quote_all(job.command_of(rank.local_rank))
                emit(f"rank {rank.local_rank}: {assignments} {command}\n", encoding=sys.getfilesystemencoding())
        else:
            has_nvidia = any(gpu.is_nvidia for gpu in topology.visible_gpus)
            _launch(plan, job, environment, mailbox, options=options, watch=watch, has_nvidia=has_nvidia)
    except NumapinError as error:
        if options.traceback:
            _show_all_frames(error)
        raise


def _launch(
    plan: Plan,
    job: Job,
    environment: dict[str, str],
    mailbox: Mailbox,
    *,
    options: RunOptions,
    watch: Watching | None,
    has_nvidia: bool,
) -> None:
    """Run the job in a folder of its own; with `has_nvidia`, NVML shows before a restart whether a GPU was lost."""
    from numapin.launch import launch

    if job.why_torch:
        affinity = os.sched_getaffinity(0)
        with importing_torch():
            hosts.import_torch()
        # Importing torch starts OpenMP, which rebinds this thread if OMP_PROC_BIND or GOMP_CPU_AFFINITY is set.
        os.sched_setaffinity(0, affinity)
    os.environ.update(environment)
    os.environ[JOB_IDS] = job_ids_of(os.environ)  # a launcher in a rank knows by them whether it is in the same job
    mailbox.leave(job.signals)  # these end the job; the ranks get the others
    # Below a wrapper, such as a shell, the nearest process that handles a signal gets it.
    mailbox.wrapper = None if hook_env.is_python(job.command) else job.command[0]
    with ExitStack() as during:
        run_dir = during.enter_context(run_directory(os.environ, say if options.verbose else None))
        if options.dataloader != "torch":
            during.enter_context(_loaders_reported(run_dir, job, options))
        if watch is not None:
            from numapin.observe.during_run import watching

            during.enter_context(watching(run_dir, len(plan.ranks), watch))
        if options.verbose:
            say(f"files of this run: {run_dir}")
        try:
            launch(plan, job, run_dir, mailbox, lambda: require_gpus(plan, _gpu_readings() if has_nvidia else ()))
        except (RankError, Stopped) as error:
            if failure := _failure_in(error):
                from numapin.view.failure_block import failure_block, failure_text

                # The run may have moved, as NUMAPIN_RUN_DIR then says: cleaners of temporary files remove folders.
                folder, file = os.environ.get("NUMAPIN_RUN_DIR") or run_dir, ""
                with suppress(NumapinError):  # a full disk
                    handover.write_text(folder, handover.REPORT, failure_text(failure))
                    file = f"{folder}/{handover.REPORT}"
                error.block = tuple(failure_block(failure, file=file))
            raise


# --- the command line ------------------------------------------------------------------------------------------------


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
    job, remark = with_found_hosts(job, os.environ, _own_host())
    if remark:
        say(remark)
    require_program(job.program, module=job.module, no_python=job.no_python, run_path=job.run_path)
    problem = hosts.why_torch(job)
    if problem:
        require_torch(f"{prog} with torch's store ({problem})")
    return replace(job, why_torch=problem), values


def _own_host() -> OwnHost:
    """Return this host as the search for the job's hosts sees it."""
    import socket

    def has_address(address: str) -> bool:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))  # fails unless the address is this host's
            return True
        return False

    return OwnHost(
        pid=os.getpid(),
        name=os.uname().nodename,
        full_name=socket.getfqdn,
        has_address=has_address,
        read=lambda path: Path(path).read_text(errors="replace"),
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


def _request(job: Job, options: RunOptions, topology: Topology) -> tuple[Request, dict[str, str]]:
    """Return the request of the options, including torchrun's, and the variables that show CUDA the GPUs of --gpus."""
    asked = options.request(num_ranks=_num_ranks(job, topology), numa_binding=job.numa_binding)
    request, gpu_variables = settle_gpus(topology, asked, os.environ)
    if job.virtual_local_rank:  # torch shows rank n only one GPU: entry n of CUDA_VISIBLE_DEVICES, or GPU n
        environ = {**os.environ, **gpu_variables}
        listed = environ.get("CUDA_VISIBLE_DEVICES")
        entries = [str(n) for n in range(len(topology.vendor_gpus))] if listed is None else listed.split(",")
        shown = ({**environ, "CUDA_VISIBLE_DEVICES": entry.strip()} for entry in entries)
        gpus = tuple(first_visible(topology.gpus, each) for each in shown)
        if request.num_ranks is not None and 0 < len(gpus) < request.num_ranks:
            raise UsageError(
                f"--virtual-local-rank shows each rank one GPU; there are {counted(request.num_ranks, 'rank')} and "
                f"{counted(len(gpus), 'GPU')}",
                "start fewer ranks with --nproc-per-node",
            )
        request = replace(request, rank_gpus=gpus)
    return request, gpu_variables


def _num_ranks(job: Job, topology: Topology) -> int | None:
    """Return the number of ranks. None: one per GPU."""
    wanted = job.nproc_per_node
    if wanted is None:
        return default_num_ranks(topology)
    if wanted in ("gpu", "auto") and topology.has_usable_gpu:
        return None
    if wanted == "gpu":
        raise UsageError("--nproc-per-node gpu: CUDA shows no GPU", "see why with: numapin doctor")
    with suppress(ValueError):
        return int(wanted)
    from importlib.metadata import entry_points  # here, because it is slow to import

    words = next(option.words for option in torchruns.TORCHRUN_OPTIONS if option.key == "nproc_per_node")
    # Only torch knows the name of a device that a package of this group adds to it.
    if wanted not in words and not entry_points(group="torch.backends"):
        raise UsageError(
            f"--nproc-per-node is {wanted}; it must be a number, {', '.join(words[:-1])} or {words[-1]}",
            "give a number, or leave it out for one rank per visible GPU",
        )
    require_torch(f"--nproc-per-node {wanted}")
    try:
        with importing_torch():  # it knows other devices, and counts CPUs
            return hosts.count_devices(wanted)
    except ValueError as error:
        raise UsageError(f"--nproc-per-node {wanted}: {error}", "give a number, or gpu, cpu or auto") from None


# --- before the start ------------------------------------------------------------------------------------------------


def _explain_start(plan: Plan, job: Job, *, forgotten: Sequence[str], more_files: str) -> None:
    """Print each decision that is not about a rank's CPUs and memory; those are in the plan."""
    why = "one per visible GPU" if any(rank.gpu for rank in plan.ranks) else "no GPU is visible"
    if job.nproc_per_node is not None:
        why = f"--nproc-per-node {job.nproc_per_node}"
    say(f"{counted(len(plan.ranks), 'rank')} on this host: {why}")
    say(f"ranks meet {hosts.meeting_of(job)}")
    if job.hosts_from:
        say(f"found {job.hosts_from}")
    threads = os.environ.get("OMP_NUM_THREADS")
    share = "its share of the cores for each rank"
    say(f"OMP_NUM_THREADS: {share if threads is None else f'{threads} was set'}")
    if forgotten:
        say(f"unset, because an outer rank's launcher has set them: {', '.join(forgotten)}")
    if more_files:
        say(more_files)


# --- during the run --------------------------------------------------------------------------------------------------


def watching_of(options: RunOptions, launcher: Mapping[str, str]) -> Watching:
    """Return the checks that --verify, --verify-after and --report ask for. Raises UsageError for an unusable file."""
    from numapin.observe.during_run import Watching

    def tell(report: VerifyReport, age_s: float) -> None:
        from numapin.view.verify_table import findings_of, summary

        when = f" {age_s:.0f} s ago" if age_s else ""
        say(f"verified{when}: {summary(report)}")
        for finding in findings_of(report, notes=False):
            show(finding, err=True)

    require_writable(options.report, option="--report")
    return Watching(
        after_s=10 if options.verify_after is None else options.verify_after,
        report=options.report,
        tell=tell,
        warn=lambda text: warn([text]),
        launcher=launcher,
        outcome_of=outcome_of,
    )


def _loaders_reported(run_dir: str, job: Job, options: RunOptions) -> AbstractContextManager[None]:
    """Report at the end which loaders took numapin's path. Each host has its launcher, and so its line."""
    from numapin.observe.during_run import reporting_loaders

    title = "dataloader" if job.is_single_host else f"dataloader on {os.uname().nodename}"
    return reporting_loaders(run_dir, strict=options.strict, report=lambda text: say(f"{title}: {text}"))


def _gpu_readings() -> Iterator[NvmlReadings]:
    """Query NVML a few times, because a GPU may not answer for a moment, e.g. during a reset."""
    from numapin.topology.sources.nvml import read_nvml

    for pause_s in (0, 1, 2, 2):
        time.sleep(pause_s)
        yield read_nvml()


# --- a job that failed -----------------------------------------------------------------------------------------------


def _show_all_frames(error: NumapinError) -> None:
    """Print all frames of the rank that failed first, or of numapin's own error."""
    failure = _failure_in(error)
    if failure is not None and failure.elsewhere is not None:
        return  # that host prints them
    if failure is not None:
        from numapin.view.failure_block import traceback_lines

        say(f"all frames of rank {failure.first.rank}:")
        show_frames("\n".join(traceback_lines(failure.first)))
    elif not isinstance(error, Stopped) or error.__cause__:
        import traceback

        show_frames("".join(traceback.format_exception(error)).rstrip())


def outcome_of(error: BaseException) -> dict[str, object]:
    """Return the fields of the report file about the error that ended a job."""
    failure = _failure_in(error)
    outcome: dict[str, object] = {} if failure is None else {"failure": failure.to_json()}
    if isinstance(error, Stopped):
        outcome["stopped_by"] = error.number.name
    return outcome


def _failure_in(error: BaseException) -> JobFailure | None:
    """Return the account of failed ranks, also if a signal came later. Jobs that succeed do not import it."""
    found = error.__cause__ if isinstance(error, Stopped) else error
    if not isinstance(found, RankError):
        return None
    from numapin.launcher.failure import RanksFailed

    return found.failure if isinstance(found, RanksFailed) else None
