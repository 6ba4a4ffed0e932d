"""`numapin trace`: run a script under torch's profiler, or read a trace, and advise on changes. Edge.

Comes in: the command line of `numapin run`, or trace files. Goes out: tables or JSON (schema numapin.trace/1) on
stdout. The output folder gets a Chrome trace and a record per rank, the report, and a timeline page.
"""

from __future__ import annotations

import gzip
import os
import shutil
import sys
import time
import zlib
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

import click

from numapin.base.files import unwritten, write_text_to
from numapin.base.folders import make_own, opened
from numapin.base.printable import printable
from numapin.base.regular_file import open_file
from numapin.base.stderr import say
from numapin.base.strict_json import decode
from numapin.cli.options import FilePath
from numapin.cli.output import emit, json_text, say_error, show
from numapin.cli.run import RunOptions, parse, sections_of_run, start
from numapin.cli.torch_import import require_torch
from numapin.cli.torchrun_command import TorchrunCommand
from numapin.errors import NumapinError, UsageError
from numapin.launcher.command import python
from numapin.rank.signals import open_mailbox
from numapin.trace.analysis import analyze
from numapin.trace.reading import read_trace
from numapin.trace.report import make_report, name_of
from numapin.trace.settings import Settings
from numapin.trace.timeline import timeline

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numapin.trace.analysis import Analysis
    from numapin.trace.report import TraceReport

_ABOUT: Final = (
    "Run a script under torch's profiler, and report where the time of its steps "
    "goes (compute, exposed copies, waiting for data), which copies are pageable or blocking, and what to change. "
    "With --read FILE, read existing traces instead."
)
_EXAMPLES: Final = """\
  numapin trace train.py --lr 0.1                   20 steps of each rank, after the first 10
  numapin trace --steps 5 --skip 3 --nproc-per-node 2 train.py
  numapin trace --read trace.json                   a torch.profiler trace, or an output folder
  numapin trace --read trace.json --output DIR      also write a timeline"""
_TRACE: Final = ".trace.json"
_REPORT: Final = "report.json"
_TIMELINE: Final = "timeline.html"
_LARGEST_BYTES: Final = 1 << 30  # reading it takes some 10 GB of memory
_MOST_UNPACKED: Final = 64  # times the packed size; traces shrink by 10 to 30, zeros by 1000
_LEAST_UNPACKED: Final = 16 << 20

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
    _OUTPUT,
    _JSON,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions(RunOptions):
    """The parsed values of the options of a run and of `_OPTIONS`, by click's names."""

    steps: int
    skip: int
    output: Path | None
    as_json: bool


def _trace(arguments: tuple[str, ...]) -> None:
    if _reads(arguments):
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
    other_sections=sections_of_run(),
)


def _reads(arguments: Sequence[str]) -> bool:
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
        _require_kept(paths, output)
    report = _read(paths)
    if output is not None:
        _write(report, output)
    _show(report, as_json=as_json)


def _require_kept(paths: Sequence[Path], output: Path) -> None:
    """Raise UsageError if writing into `output` would overwrite one of the files that are read."""
    written = [os.path.realpath(output / name) for name in (_REPORT, _TIMELINE)]
    for path in paths:
        if os.path.realpath(path) in written:
            raise UsageError(f"--output {output} would overwrite {path}", "choose another folder")


def _run(arguments: tuple[str, ...]) -> None:
    mailbox = open_mailbox()
    job, options = parse(arguments, TraceOptions, _OPTIONS, command="trace")
    if job.command[0] == python():
        require_torch("numapin trace")
    folder = Path(options.output or time.strftime("numapin-trace-%Y%m%d-%H%M%S")).absolute()
    outer = folder
    if job.min_max_nodes[1] > 1:  # hosts may share the folder, join late, and end at different times
        folder /= f"{os.uname().nodename}-{os.getpid()}"
    settings = Settings(folder=str(folder), steps=options.steps, skip=options.skip)
    if options.dry_run:
        start(job, options, mailbox, trace=settings.to_text())
        return
    _make(outer, folder, settings)
    try:
        with _stdout_to_stderr(wanted=options.as_json):
            start(job, options, mailbox, trace=settings.to_text())
    except BaseException:  # a rank failed, or Ctrl-C: report the steps traced so far
        _finish_after_failure(folder, settings, as_json=options.as_json)
        raise
    _finish(folder, settings, as_json=options.as_json)


def _finish_after_failure(folder: Path, settings: Settings, *, as_json: bool) -> None:
    """Finish, but only print an error of this, because the job's own error decides the exit status."""
    try:
        _finish(folder, settings, as_json=as_json)
    except NumapinError as error:
        say_error(error.message, error.hint)
    except Exception as error:  # noqa: BLE001 - even a bug here must not hide the job's own error
        say_error(str(error))


def _finish(folder: Path, settings: Settings, *, as_json: bool) -> None:
    """Read the ranks' traces and records; write and show the report."""
    with suppress(OSError), opened(settings.folder) as opened_folder:
        shutil.rmtree(Path(settings.loads).name, ignore_errors=True, dir_fd=opened_folder)
    report = _read((folder,), settings)
    _write(report, folder)
    _show(report, as_json=as_json)


def _make(outer: Path, folder: Path, settings: Settings) -> None:
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
def _stdout_to_stderr(*, wanted: bool) -> Iterator[None]:
    """Keep the ranks' output out of the JSON: send it to stderr during the block."""
    if not wanted:
        yield
        return
    try:
        kept = os.dup(1)
    except OSError as error:
        raise UsageError(
            f"--json: stdout cannot be written: {error.strerror}", "see report.json in --output DIR"
        ) from None
    try:
        os.dup2(2, 1)
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _read(paths: Sequence[Path], settings: Settings | None = None) -> TraceReport:
    """Return the report on these files and folders. Raises NumapinError if there are no traces."""
    analyses: list[Analysis] = []
    notes: list[str] = []
    for path in paths:
        analyses += _read_run(path, notes, settings) if _is_folder(path) else [_analyze(path)]
    if not analyses:
        found = "; ".join(notes)
        raise NumapinError(found if settings is None else f"nothing was traced: {found}", _remedy(notes, settings))
    return make_report(analyses, notes)


def _is_folder(path: Path) -> bool:
    """Return whether this is a folder. False if its name is too long, which `Path.is_dir` raises for."""
    try:
        return path.is_dir()
    except OSError:
        return False


def _read_run(path: Path, notes: list[str], settings: Settings | None) -> list[Analysis]:
    """Return the analyses of a run's ranks, from the run's folder or its hosts' subfolders; append to `notes`."""
    analyses: list[Analysis] = []
    for folder in _with_ranks(path):
        notes += _missing(folder, settings)
        analyses += _found(folder, notes)
    _require_one_run(path, analyses)
    return analyses


def _analyze(path: Path) -> Analysis:
    return analyze(read_trace(_load(path), source=path.name))


def _require_one_run(folder: Path, analyses: Sequence[Analysis]) -> None:
    """Raise UsageError if the hosts' subfolders belong to several runs, or to a job that was requeued."""
    num_traces = Counter(name_of(analysis) for analysis in analyses if analysis.trace.rank is not None)
    twice = [name for name, number in num_traces.items() if number > 1]
    if twice:
        raise UsageError(
            f"{folder} holds the traces of several runs: rank {min(twice)} is there more than once",
            f"name the folders of one run: numapin trace --read {folder}/HOST-PID …",
        )


def _with_ranks(folder: Path) -> list[Path]:
    """Return the folder itself, or the hosts' subfolders in it."""
    hosts = [] if any(folder.glob("rank-*")) else sorted({path.parent for path in folder.glob("*/rank-*")})
    return hosts or [folder]


def _found(folder: Path, notes: list[str]) -> Iterator[Analysis]:
    """Yield the analyses of the ranks' traces. A broken file becomes a note, and its rank is left out."""
    for path in sorted(folder.glob(f"rank-*{_TRACE}")):
        try:
            yield _analyze(path)
        except NumapinError as error:
            notes.append(printable(f"{path.name.removesuffix(_TRACE).replace('-', ' ', 1)}: {error.message}"))


def _missing(folder: Path, settings: Settings | None) -> Iterator[str]:
    """Yield which ranks have no trace, or a shorter one, and why."""
    paths = [path for path in sorted(folder.glob("rank-*.json")) if not path.name.endswith(_TRACE)]
    if settings is None and not any(folder.glob(f"rank-*{_TRACE}")):
        yield f"{folder} has no rank-*{_TRACE}"
    if settings is not None and not paths:
        yield f"{folder}: no rank took a batch from a torch DataLoader or stepped a torch optimizer"
    for record in map(_load_record, paths):
        if record.get("reason"):
            yield printable(_shortfall(record, settings))


def _shortfall(record: Mapping[str, object], settings: Settings | None) -> str:
    """Return why a rank's trace is missing or short, and the steps that were traced and asked for."""
    traced = f", {record.get('num_steps')} steps traced" if record.get("trace") else ""
    asked = f"; {settings.skip} were to be skipped and {settings.steps} traced" if settings else ""
    return f"rank {record.get('rank')}: {record['reason']}{traced}{asked}"


def _load_record(path: Path) -> Mapping[str, object]:
    """Return a rank's record. One that cannot be read becomes a record with that reason."""
    try:
        record = _load(path)
    except NumapinError as error:
        return {"rank": path.stem.removeprefix("rank-"), "reason": error.message}
    return record if isinstance(record, dict) else {}


def _remedy(notes: Sequence[str], settings: Settings | None) -> str:
    if any("the script ended" in note for note in notes):
        return "give it more steps, or take fewer: numapin trace --skip 1 --steps 3 train.py"
    if settings is None:
        return "give a trace file, or the output folder of numapin trace"
    return "use torch.profiler in the script, and read its trace with: numapin trace --read FILE"


def _load(path: Path) -> object:
    """Return the JSON of a file, which may be compressed. Raises NumapinError."""
    try:
        content = _content(path)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise NumapinError(f"{path} cannot be read: {reason}", "name a file that torch.profiler wrote") from None
    try:
        return decode(content)
    except ValueError as error:
        raise NumapinError(f"{path}: not JSON, or cut off: {error}", "trace the script again") from None


def _content(path: Path) -> bytes:
    """Return a file's bytes, unpacked. Raises OSError, EOFError, zlib.error, and NumapinError if it is too large."""
    with os.fdopen(open_file(str(path)), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if path.suffix != ".gz":
            _require_at_most(_LARGEST_BYTES, size, path)  # before a gigabyte is read
            return _bounded(file, _LARGEST_BYTES, path)
        with gzip.GzipFile(fileobj=file) as unpacked:
            return _bounded(unpacked, min(_LARGEST_BYTES, max(_MOST_UNPACKED * size, _LEAST_UNPACKED)), path)


def _bounded(file: BinaryIO | gzip.GzipFile, most: int, path: Path) -> bytes:
    content = file.read(most + 1)
    _require_at_most(most, len(content), path)
    return content


def _require_at_most(most: int, num_bytes: int, path: Path) -> None:
    if num_bytes > most:
        raise NumapinError(f"{path} is too large to read: more than {most >> 20} MiB", "trace fewer steps: --steps 5")


def _write(report: TraceReport, folder: Path) -> None:
    """Write the report and the timeline. Raises NumapinError, also if the folder belongs to another user."""
    template = files("numapin.trace").joinpath("timeline.html").read_text(encoding="utf-8")
    texts = {
        _REPORT: json_text(report.to_json()),
        _TIMELINE: timeline(report, template),
    }
    remedy = f"see the tables with: numapin trace --read {folder}"
    try:
        make_own(str(folder.absolute()))
    except OSError as error:
        raise unwritten(str(folder), error, "choose another with --output DIR") from None
    for name, text in texts.items():
        write_text_to(str(folder / name), text.encode(errors="replace").decode(), remedy=remedy)
    say(f"timeline and Chrome traces: {folder}")


def _show(report: TraceReport, *, as_json: bool) -> None:
    if as_json:
        try:
            emit(json_text(report.to_json()))
        except OSError as error:
            hint = "write it elsewhere: numapin trace --read DIR --json > FILE"
            raise NumapinError(f"the report cannot be written to stdout: {error.strerror}", hint) from None
    else:
        from numapin.view.trace_table import trace_table

        show(trace_table(report))
