"""`numapin trace`: run a job under torch's profiler, or read traces, and advise on changes.

The job is `numapin run` or any other command, and runs below this process. The output folder gets a Chrome trace and a
record per rank, and the report.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from numapin.base.files import make_own, opened, unwritten, write_text_to
from numapin.base.formats import quote, running
from numapin.base.stderr import say
from numapin.cli.options import FilePath
from numapin.cli.output import emit, json_text, say_error, show
from numapin.cli.run import SECTIONS, RunOptions, parse
from numapin.cli.torch_import import require_torch
from numapin.cli.torchrun_command import TorchrunCommand
from numapin.errors import NumapinError, UsageError
from numapin.launcher.program import python
from numapin.rank import hook_env
from numapin.rank.become import FORWARDED
from numapin.steps.job import RankFiles, marked, start_below, wait_for
from numapin.steps.record import StepSettings
from numapin.trace.reading import read_report

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numapin.trace.report import TraceReport

_ABOUT: Final = (
    "Run a script under torch's profiler, and report where the time of its steps "
    "goes (compute, exposed copies, waiting for data), which copies are pageable or blocking, and what to change. "
    "The report comes as soon as the steps are recorded, and the job goes on; --stop ends it. "
    "The job is a script, started as by `numapin run`, or any other command after --. "
    "With --read FILE, read existing traces instead. A job that already runs cannot be traced: start it with this "
    "command, and a large --skip."
)
_EXAMPLES: Final = """\
  numapin trace train.py --lr 0.1                   steps 11-30 of each rank
  numapin trace --steps 5 --skip 3 --nproc-per-node 2 train.py
  numapin trace --stop train.py                     end after the traced steps
  numapin trace -- torchrun --nproc-per-node 2 train.py
  numapin trace --read trace.json                   a trace or output folder
  numapin trace --read trace.json --output DIR      also write report.json"""
_REPORT: Final = "report.json"
_LOOK_S: Final = 0.3
_COMMAND_GRACE_S: Final = 60.0  # with --stop; torchrun gives its ranks 30 s
_GRACE_S: Final = 10.0  # for processes that the command has left behind, with --stop
_JSON: Final = click.Option(
    ["--json", "as_json"], is_flag=True, help="Print the report as JSON; the script's own output goes to stderr."
)
_OUTPUT: Final = click.Option(
    ["--output"],
    type=FilePath(),
    metavar="DIR",
    help="Folder for the traces; with --nnodes, each host gets a subfolder. [numapin-trace-DATE]",
)
_OPTIONS: Final = (
    click.Option(["--steps"], type=click.IntRange(1), default=20, metavar="N", help="Steps to trace. [20]"),
    click.Option(["--skip"], type=click.IntRange(1), default=10, metavar="N", help="Steps to skip first. [10]"),
    click.Option(["--stop"], is_flag=True, help="End the job once all ranks have recorded their steps; status 0."),
    _OUTPUT,
    _JSON,
)


@dataclass(frozen=True, kw_only=True)
class _OwnOptions:
    """The parsed values of `_OPTIONS`, by click's names."""

    steps: int
    skip: int
    stop: bool
    output: Path | None
    as_json: bool


@dataclass(frozen=True, kw_only=True)
class _TraceOptions(_OwnOptions, RunOptions):
    """These values and those of the options of a run."""


def _trace(arguments: tuple[str, ...]) -> None:
    own, rest = _separate(arguments)
    if any(word.partition("=")[0] == "--read" for word in own):
        _read_command.main(list(arguments), prog_name="numapin trace", standalone_mode=False)
    elif rest[:1] == ["--"] and len(rest) > 1:
        options = click.Command("trace", params=[*_OPTIONS]).make_context("numapin trace", own).params
        _require_hook(rest[1:])
        _trace_command(rest[1:], _OwnOptions(**options), subfolder=None)
    else:
        _trace_run(arguments)


_READ: Final = click.Option(
    ["--read"], type=FilePath(), metavar="FILE...", help="Read traces or output folders instead of running a script."
)
trace = TorchrunCommand(
    "trace",
    _trace,
    about=_ABOUT,
    examples=_EXAMPLES,
    sections={"Trace": [*_OPTIONS, _READ]},
    other_sections=SECTIONS,
)
_TAKE_VALUE: Final = {name: not option.is_flag for option in (*_OPTIONS, _READ) for name in option.opts}


def _separate(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the options of this command at the start of its arguments, and the rest."""
    own, rest = [], list(arguments)
    while rest and rest[0].partition("=")[0] in _TAKE_VALUE:
        name, equals, _ = rest[0].partition("=")
        num_words = 2 if _TAKE_VALUE[name] and not equals else 1
        own += rest[:num_words]
        del rest[:num_words]
    return own, rest


@click.command(params=[_OUTPUT, _JSON])
@click.option("--read", type=FilePath(), required=True, multiple=True)
@click.argument("others", nargs=-1, type=FilePath())
def _read_command(read: tuple[Path, ...], others: tuple[Path, ...], output: Path | None, *, as_json: bool) -> None:
    """Read Chrome traces, one per rank, or the output folders of earlier runs."""
    paths = (*read, *others)
    if output is not None:
        for path in paths:
            if os.path.realpath(path) == os.path.realpath(output / _REPORT):
                raise UsageError(f"--output {output} would overwrite {path}", "choose another folder")
    report = read_report(paths)
    if output is not None:
        _write(report, output, remedy="choose another with --output DIR")
        say(f"report: {output / _REPORT}")
    _show(report, as_json=as_json)


# --- a job that is traced --------------------------------------------------------------------------------------------


def _require_hook(command: Sequence[str]) -> None:
    """Raise UsageError if no hook can run in this command."""
    refusal = hook_env.refusal(command)
    if refusal:
        raise UsageError(f"numapin trace cannot work: {refusal}", hook_env.TRACE_REMEDY)


def _trace_run(arguments: tuple[str, ...]) -> None:
    """Trace a script that `numapin run` starts with all options but ours. Raises UsageError before it starts."""
    job, options = parse(arguments, _TraceOptions, _OPTIONS, command="trace")
    if job.command[0] == python():
        require_torch("numapin trace")
    _require_hook(job.command)
    if not hook_env.is_python(job.command):
        say(f"numapin trace applies to the Python processes that {job.command[0]} starts, if any")
    in_script = job.command[job.command.index(job.program, 0 if job.no_python and not job.run_path else 2) :]
    words, left = [], list(arguments[: len(arguments) - len(in_script)])
    while left:
        own, left = _separate(left)
        if not own:
            words.append(left.pop(0))
    command = (*running("from numapin.cli.entry import main; main()"), "run", *words, *in_script)
    if options.dry_run:
        raise SystemExit(subprocess.call(command))
    # Hosts may share the folder, join late, and end at different times.
    host = f"{os.uname().nodename}-{os.getpid()}" if job.min_max_nodes[1] > 1 else ""
    _trace_command(command, options, subfolder=host)


def _trace_command(command: Sequence[str], options: _OwnOptions, *, subfolder: str | None) -> None:
    """Run a command whose ranks trace their steps, and report. `subfolder` is None for a command that is not ours.

    Raises SystemExit and Abort as the command ends.
    """
    outer = Path(options.output or time.strftime("numapin-trace-%Y%m%d-%H%M%S")).absolute()
    folder = outer / (subfolder or "")
    settings = StepSettings(folder=str(folder), steps=options.steps, skip=options.skip)
    _make_folders(outer, folder, settings)
    environ = hook_env.steps_environment(settings.to_text(), os.environ, variable=hook_env.TRACE_VARIABLE)
    unblocked = FORWARDED if subfolder is None else ()  # our launcher handles what `cli.entry` holds back
    stderr = subprocess.DEVNULL if sys.stderr is None else 2  # the parent process may have closed it
    stdout = stderr if options.as_json else None
    try:
        process = start_below(command, {**os.environ, **environ}, stdout=stdout, unblocked=unblocked)
    except OSError as error:
        Path(settings.loads).rmdir()  # so that the folder can be used again
        raise UsageError(f"{command[0]} cannot be started: {error.strerror}", "numapin trace --help") from None
    report = _Reporter(folder=folder, settings=settings, as_json=options.as_json, files=RankFiles(folder))
    has_ended, has_stopped = threading.Event(), threading.Event()

    def watch() -> None:
        """Report, or stop the job, when its steps are recorded."""
        while not report.is_due():
            if has_ended.wait(_LOOK_S):
                return
        if options.stop and process.poll() is None:
            has_stopped.set()
            process.terminate()
            # Our own launcher always ends, after the grace period that the user gave it.
            if subfolder is None and not has_ended.wait(_COMMAND_GRACE_S):
                process.kill()
        elif not options.stop:
            with suppress(Exception):  # the report at the end of the job raises it again
                report.show()

    # In a thread: reading large traces, and printing where nothing reads, must not hold back signals from the ranks.
    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    status = wait_for(process)
    has_ended.set()
    watching.join()
    if has_stopped.is_set():
        _end(settings.to_text())
        if subfolder is None or status in (0, -signal.SIGTERM, 128 + signal.SIGTERM):
            status = 0
            say("the job was ended after the traced steps (--stop)")
    with suppress(OSError), opened(settings.folder) as opened_folder:
        shutil.rmtree(Path(settings.loads).name, ignore_errors=True, dir_fd=opened_folder)
    try:
        report.finish()
    except NumapinError as error:
        if not status:
            raise
        say_error(error.message, error.hint)  # only printed: the job's own error decides the exit status
    if status == -signal.SIGINT:
        raise click.Abort
    if status:
        raise SystemExit(status if status > 0 else 128 - status)


def _end(mark: str) -> None:
    """End what the command has left behind: a launcher that SIGTERM ends may not end its ranks."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in marked(hook_env.TRACE_VARIABLE, mark):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        deadline_s = time.monotonic() + _GRACE_S
        while marked(hook_env.TRACE_VARIABLE, mark) and time.monotonic() < deadline_s:
            time.sleep(0.1)


@dataclass(slots=True, kw_only=True)
class _Reporter:
    """The report on a job, shown once; `num_reported` is the number of traces in it, None without one."""

    folder: Path
    settings: StepSettings
    as_json: bool
    files: RankFiles
    num_reported: int | None = None

    @property
    def num_traces(self) -> int:
        """The number of traces that the records of the ranks name."""
        return sum(rank.trace is not None for rank in self.files.found.values())

    def is_due(self) -> bool:
        """Return whether a rank has a trace and all have recorded their steps, or given up."""
        self.files.read(time.monotonic())
        return bool(self.num_traces) and self.files.is_done(time.monotonic())

    def show(self) -> None:
        """Read the ranks' traces and records; write and show the report."""
        num_traces = self.num_traces
        _show(self._written(), as_json=self.as_json)
        self.num_reported = num_traces

    def _written(self) -> TraceReport:
        report = read_report((self.folder,), self.settings)
        _write(report, self.folder, remedy=f"see the tables with: numapin trace --read {quote(str(self.folder))}")
        say(f"report and Chrome traces: {self.folder}")
        return report

    def finish(self) -> None:
        """Report what was recorded since; JSON is printed once in any case."""
        self.files.read(time.monotonic())
        if self.num_reported == self.num_traces:
            return
        if self.num_reported is not None and self.as_json:
            self._written()
        else:
            self.show()


# --- the folder and the report ---------------------------------------------------------------------------------------


def _make_folders(outer: Path, folder: Path, settings: StepSettings) -> None:
    """Make the folder, which only this user may enter.

    Raises UsageError if another run uses it or has left traces there, and NumapinError if it or its parent belongs to
    another user.
    """
    try:
        for path in (outer, folder):
            make_own(str(path))
        old = next(chain(folder.glob("rank-*"), folder.glob(Path(settings.loads).name)), None)
        if old is None:
            Path(settings.loads).mkdir(mode=0o700)  # fails if another run has made it just now
    except OSError as error:
        raise NumapinError(f"{folder} cannot be used: {error.strerror}", "choose another with --output DIR") from None
    if old is not None:
        raise UsageError(f"--output {folder} holds {old.name} of another run", "choose another folder")


def _write(report: TraceReport, folder: Path, *, remedy: str) -> None:
    """Write the report. Raises NumapinError, also if the folder belongs to another user."""
    try:
        make_own(str(folder.absolute()))
    except OSError as error:
        raise unwritten(str(folder), error, "choose another with --output DIR") from None
    text = json_text(report.to_json()).encode(errors="replace").decode()
    write_text_to(str(folder / _REPORT), text, remedy=remedy)


def _show(report: TraceReport, *, as_json: bool) -> None:
    """Print the report. Raises NumapinError."""
    if not as_json:
        from numapin.view.trace_table import trace_table

        show(trace_table(report))
        return
    try:
        emit(json_text(report.to_json()))
    except OSError as error:
        hint = "write it elsewhere: numapin trace --read DIR --json > FILE"
        raise NumapinError(f"the report cannot be written to stdout: {error.strerror}", hint) from None
