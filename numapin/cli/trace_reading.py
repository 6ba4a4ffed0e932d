"""Reader of the trace files and folders of `numapin trace`."""

from __future__ import annotations

import gzip
import os
import zlib
from collections import Counter
from typing import TYPE_CHECKING, BinaryIO, Final

from numapin.base.files import open_regular, read_file
from numapin.base.records import read_record
from numapin.base.strict_json import decode
from numapin.base.text import counted, printable
from numapin.errors import NumapinError, UsageError
from numapin.steps.job import TRACE
from numapin.steps.record import SCHEMA, RankSteps
from numapin.trace.analysis import analyze
from numapin.trace.reading import read_trace
from numapin.trace.report import make_report, name_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numapin.steps.record import StepSettings
    from numapin.trace.analysis import Analysis
    from numapin.trace.report import TraceReport

_LARGEST_RECORD: Final = 1 << 20
_LARGEST_BYTES: Final = 1 << 30  # reading it takes some 10 GB of memory
_MOST_UNPACKED: Final = 64  # times the packed size; traces shrink by 10 to 30, zeros by 1000
_LEAST_UNPACKED: Final = 16 << 20
_NAME_ONE: Final = "name a file that torch.profiler wrote, or the output folder of numapin trace"


def read_report(paths: Sequence[Path], settings: StepSettings | None = None) -> TraceReport:
    """Return the report on these files and folders.

    Raises UsageError if a file that the user named (`settings` is None) cannot be read or has no trace, and
    NumapinError if a run with these settings traced nothing.
    """
    analyses: list[Analysis] = []
    notes: list[str] = []
    for path in paths:
        of_path: list[str] = []
        is_folder = os.path.isdir(path)  # noqa: PTH112 - Path.is_dir raises for a name that is too long
        found = _read_run(path, of_path, settings) if is_folder else [_analyze(path)]
        if settings is None and not found:
            raise _no_trace(of_path, settings)
        analyses += found
        notes += of_path
    if not analyses:
        raise _no_trace(notes, settings)
    return make_report(analyses, notes)


def _no_trace(notes: Sequence[str], settings: StepSettings | None) -> NumapinError:
    found = "; ".join(notes)
    remedy = "use torch.profiler in the script, and read its trace with: numapin trace --read FILE"
    if any("the script ended" in note for note in notes):
        remedy = "give it more steps, or take fewer: numapin trace --skip 1 --steps 3 train.py"
    elif settings is None:
        remedy = "give a trace file, or the output folder of numapin trace"
    return UsageError(found, remedy) if settings is None else NumapinError(f"nothing was traced: {found}", remedy)


def _read_run(path: Path, notes: list[str], settings: StepSettings | None) -> list[Analysis]:
    """Return the analyses of a run's ranks, from the run's folder or its hosts' subfolders; append to `notes`.

    Raises UsageError if the hosts' subfolders belong to several runs, or to a job that was requeued.
    """
    analyses: list[Analysis] = []
    hosts = [] if any(path.glob("rank-*")) else sorted({trace.parent for trace in path.glob("*/rank-*")})
    for folder in hosts or [path]:
        traces = sorted(folder.glob(f"rank-*{TRACE}"))
        paths = sorted(path for path in folder.glob("rank-*.json") if path not in traces)
        records: list[RankSteps] = []

        # Which ranks have no trace, or a shorter one, and why.
        if settings is None and not traces:
            notes.append(f"{folder} has no rank-*{TRACE}")
        if settings is not None and not paths:
            notes.append(f"{folder}: no rank took a batch from a torch DataLoader or stepped a torch optimizer")
        asked = f"; {settings.skip} were to be skipped and {settings.steps} traced" if settings else ""
        for record_path in paths:
            try:
                text = read_file(str(record_path), max_bytes=_LARGEST_RECORD).decode(errors="replace")
                record = read_record(RankSteps, text, source=record_path.name, hint="", schema=SCHEMA)
            except (NumapinError, OSError) as error:
                reason = getattr(error, "message", None) or f"{record_path}: {error}"
                notes.append(printable(f"rank {record_path.stem.removeprefix('rank-')}: {reason}"))
                continue
            records.append(record)
            if record.reason:
                traced = f", {record.num_traced} steps traced" if record.trace else ""
                notes.append(printable(f"rank {record.rank}: {record.reason}{traced}{asked}"))
        num_ranks = max((record.num_local_ranks for record in records), default=0)
        num_silent = num_ranks - len({record.rank for record in records})
        if num_silent > 0:  # they did nothing that is traced, and so left no record
            silent = f"{num_silent} of {counted(num_ranks, 'rank')} took no batch and made no step"
            notes.append(printable(f"{folder}: {silent}"))

        for trace in traces:
            try:
                analyses.append(_analyze(trace))
            except NumapinError as error:  # a broken file: its rank is left out
                notes.append(printable(f"{trace.name.removesuffix(TRACE).replace('-', ' ', 1)}: {error.message}"))

    num_traces = Counter(name_of(analysis) for analysis in analyses if analysis.trace.rank is not None)
    twice = [name for name, number in num_traces.items() if number > 1]
    if twice:
        raise UsageError(
            f"{path} holds the traces of several runs: rank {min(twice)} occurs more than once",
            f"name the folders of one run: numapin trace --read {path}/HOST-PID …",
        )
    return analyses


def _analyze(path: Path) -> Analysis:
    return analyze(read_trace(_load(path), source=path.name))


def _load(path: Path) -> object:
    """Return the JSON of a file, which may be compressed. Raises UsageError."""
    most = _LARGEST_BYTES
    try:
        with os.fdopen(open_regular(str(path)), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            source: BinaryIO | gzip.GzipFile = file
            if path.suffix == ".gz":
                source, most = gzip.GzipFile(fileobj=file), min(most, max(_MOST_UNPACKED * size, _LEAST_UNPACKED))
            is_too_large = source is file and size > most  # known before a gigabyte is read
            content = b"" if is_too_large else source.read(most + 1)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{path} cannot be read: {reason}", _NAME_ONE) from None
    if is_too_large or len(content) > most:
        raise UsageError(f"{path} is too large to read: more than {most >> 20} MiB", "trace fewer steps: --steps 5")
    try:
        return decode(content)
    except ValueError as error:
        raise UsageError(f"{path}: not JSON, or cut off: {error}", "trace the script again") from None
