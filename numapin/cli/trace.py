"""`numapin trace`: run a script under torch's profiler, or read a trace, and advise on changes.

The output folder gets a Chrome trace and a record per rank, and the report.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from numapin.base.files import make_own, opened, unwritten, write_text_to
from numapin.base.stderr import say
from numapin.cli.options import FilePath
from numapin.cli.output import emit, json_text, say_error, show
from numapin.cli.run import SECTIONS, RunOptions, parse, start
from numapin.cli.torch_import import require_torch
from numapin.cli.torchrun_command import TorchrunCommand
from numapin.cli.trace_reading import read_report
from numapin.cli.trace_watch import TraceWatch
from numapin.errors import NumapinError, UsageError
from numapin.launcher.program import python
from numapin.rank.signals import open_mailbox
from numapin.steps.record import StepSettings

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numapin.trace.report import TraceReport

_ABOUT: Final = (
    "Run a script under torch's profiler, and report where the time of its steps "
    "goes (compute, exposed copies, waiting for data), which copies are pageable or blocking, and what to change. "
    "The report comes as soon as the steps are recorded, and the job goes on; --stop ends it. "
    "With --read FILE, read existing traces instead. A job that already runs cannot be traced: start it with this "
    "command, and a large --skip."
)
_EXAMPLES: Final = """\
  numapin trace train.py --lr 0.1                   20 steps of each rank, after the first 10
  numapin trace --steps 5 --skip 3 --nproc-per-node 2 train.py
  numapin trace --stop train.py                     end the job after the traced steps
  numapin trace --read trace.json                   a torch.profiler trace, or an output folder
  numapin trace --read trace.json --output DIR      also write report.json"""
_REPORT: Final = "report.json"
_READ_OPTIONS: Final = ("--json", "--output")
_JSON: Final = click.Option(
    ["--json", "as_json"], is_flag=True, help="Print the report as JSON; the script's own output goes to stderr."
)
_OUTPUT: Final = click.Option(
    ["--output"],
    type=FilePath(),
    metavar="DIR",
    help="Folder for the traces; each host gets a subfolder. [numapin-trace-DATE]",
)
_OPTIONS: Final = (
    click.Option(["--steps"], type=click.IntRange(1), default=20, metavar="N", help="Steps to trace. [20]"),
    click.Option(["--skip"], type=click.IntRange(1), default=10, metavar="N", help="Steps to skip first. [10]"),
    click.Option(["--stop"], is_flag=True, help="End the job once all ranks have recorded their steps; status 0."),
    _OUTPUT,
    _JSON,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions(RunOptions):
    """The parsed values of the options of a run and of `_OPTIONS`, by click's names."""

    steps: int
    skip: int
    stop: bool
    output: Path | None
    as_json: bool


def _trace(arguments: tuple[str, ...]) -> None:
    if _asks_to_read(arguments):
        _read_command.main(list(arguments), prog_name="numapin trace", standalone_mode=False)
    else:
        _run(arguments)


_READ: Final = click.Option(
    ["--read"], type=FilePath(), metavar="FILE...", help="Read traces or output folders instead of running a script."
)
trace = TorchrunCommand(
    "trace",
    _trace,
    about=_ABOUT,
    examples=_EXAMPLES,
    short_help="Profile a script, and report what to change.",
    sections={"Trace": [*_OPTIONS, _READ]},
    other_sections=SECTIONS,
)


def _asks_to_read(arguments: Sequence[str]) -> bool:
    """Return whether --read is among the options, before or after --json and --output."""
    words = list(arguments)
    while words and words[0].partition("=")[0] in _READ_OPTIONS:
        words = words[2:] if words[0] == "--output" else words[1:]
    return bool(words) and words[0].partition("=")[0] == "--read"


@click.command(params=[_OUTPUT, _JSON])
@click.option("--read", "first", type=FilePath(), required=True)
@click.argument("others", nargs=-1, type=FilePath())
def _read_command(first: Path, others: tuple[Path, ...], output: Path | None, *, as_json: bool) -> None:
    """Read Chrome traces, one per rank, or the output folders of earlier runs."""
    paths = (first, *others)
    if output is not None:
        for path in paths:
            if os.path.realpath(path) == os.path.realpath(output / _REPORT):
                raise UsageError(f"--output {output} would overwrite {path}", "choose another folder")
    report = read_report(paths)
    if output is not None:
        _write(report, output)
    _show(report, as_json=as_json)


def _run(arguments: tuple[str, ...]) -> None:
    mailbox = open_mailbox()
    job, options = parse(arguments, TraceOptions, _OPTIONS, command="trace")
    if job.command[0] == python():
        require_torch("numapin trace")
    folder = Path(options.output or time.strftime("numapin-trace-%Y%m%d-%H%M%S")).absolute()
    outer = folder
    if job.min_max_nodes[1] > 1:  # hosts may share the folder, join late, and end at different times
        folder /= f"{os.uname().nodename}-{os.getpid()}"
    settings = StepSettings(folder=str(folder), steps=options.steps, skip=options.skip)
    if options.dry_run:
        start(job, options, mailbox, trace=settings.to_text())
        return
    _make_folders(outer, folder, settings)
    watch = TraceWatch(folder, lambda: None, stops=options.stop)
    try:
        with _stdout_to_stderr(wanted=options.as_json) as kept:
            watch.report = lambda: _report(folder, settings, as_json=options.as_json, to=kept)
            with watch.during():
                start(job, options, mailbox, trace=settings.to_text())
    except BaseException:  # a rank failed, or Ctrl-C: report the steps traced so far
        try:
            _finish(folder, settings, watch, as_json=options.as_json)
        except NumapinError as error:  # only printed: the job's own error decides the exit status
            say_error(error.message, error.hint)
        except Exception as error:  # noqa: BLE001 - even a bug here must not hide the job's own error
            say_error(str(error))
        raise
    if watch.has_stopped:
        say("the job was ended after the traced steps (--stop)")
    _finish(folder, settings, watch, as_json=options.as_json)


def _finish(folder: Path, settings: StepSettings, watch: TraceWatch, *, as_json: bool) -> None:
    """Clean up, and report; not again if nothing was recorded since the report. JSON is printed once in any case."""
    with suppress(OSError), opened(settings.folder) as opened_folder:
        shutil.rmtree(Path(settings.loads).name, ignore_errors=True, dir_fd=opened_folder)
    if watch.is_report_complete:
        return
    if watch.num_reported is not None and as_json:
        _write(read_report((folder,), settings), folder)
    else:
        _report(folder, settings, as_json=as_json)


def _report(folder: Path, settings: StepSettings, *, as_json: bool, to: int | None = None) -> None:
    """Read the ranks' traces and records; write and show the report."""
    report = read_report((folder,), settings)
    _write(report, folder)
    _show(report, as_json=as_json, to=to)


# --- the folder and the report ---------------------------------------------------------------------------------------


def _make_folders(outer: Path, folder: Path, settings: StepSettings) -> None:
    """Make the folder, which only this user may enter. Raises UsageError if it holds traces of an earlier run.

    Raises NumapinError if it, its parent or its contents belong to another user.
    """
    try:
        for made in (outer, folder, settings.loads):
            make_own(str(made))
        old = next(folder.glob("rank-*"), None)
    except OSError as error:
        raise NumapinError(f"{folder} cannot be used: {error.strerror}", "choose another with --output DIR") from None
    if old is not None:
        raise UsageError(f"--output {folder} holds {old.name} of an earlier run", "choose another folder")


@contextmanager
def _stdout_to_stderr(*, wanted: bool) -> Iterator[int | None]:
    """Send the ranks' output to stderr during the block, which gets the descriptor for JSON."""
    if not wanted:
        yield None
        return
    try:
        kept = os.dup(1)
    except OSError as error:
        raise UsageError(
            f"--json: stdout cannot be written: {error.strerror}", "see report.json in --output DIR"
        ) from None
    try:
        os.dup2(2, 1)
        yield kept
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _write(report: TraceReport, folder: Path) -> None:
    """Write the report. Raises NumapinError, also if the folder belongs to another user."""
    try:
        make_own(str(folder.absolute()))
    except OSError as error:
        raise unwritten(str(folder), error, "choose another with --output DIR") from None
    text = json_text(report.to_json()).encode(errors="replace").decode()
    write_text_to(str(folder / _REPORT), text, remedy=f"see the tables with: numapin trace --read {folder}")
    say(f"report and Chrome traces: {folder}")


def _show(report: TraceReport, *, as_json: bool, to: int | None = None) -> None:
    """Print the report; JSON to the descriptor `to`, if there is one. Raises NumapinError."""
    if as_json and to is not None:
        with os.fdopen(os.dup(to), "w", encoding="utf-8", errors="replace") as file:
            file.write(json_text(report.to_json()))
    elif as_json:
        try:
            emit(json_text(report.to_json()))
        except OSError as error:
            hint = "write it elsewhere: numapin trace --read DIR --json > FILE"
            raise NumapinError(f"the report cannot be written to stdout: {error.strerror}", hint) from None
    else:
        from numapin.view.trace_table import trace_table

        show(trace_table(report))
