"""Reader of the trace files and folders of `numapin trace`."""

from __future__ import annotations

import gzip
import os
import zlib
from collections import Counter
from typing import TYPE_CHECKING, BinaryIO, Final

from numapin.base.files import open_regular
from numapin.base.strict_json import decode
from numapin.base.text import counted, printable
from numapin.errors import NumapinError, UsageError
from numapin.trace.analysis import analyze
from numapin.trace.reading import read_trace
from numapin.trace.report import make_report, name_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from numapin.trace.analysis import Analysis
    from numapin.trace.report import TraceReport
    from numapin.trace.settings import Settings

_TRACE: Final = ".trace.json"
_LARGEST_BYTES: Final = 1 << 30  # reading it takes some 10 GB of memory
_MOST_UNPACKED: Final = 64  # times the packed size; traces shrink by 10 to 30, zeros by 1000
_LEAST_UNPACKED: Final = 16 << 20
_NAME_ONE: Final = "name a file that torch.profiler wrote, or the output folder of numapin trace"


def read_report(paths: Sequence[Path], settings: Settings | None = None) -> TraceReport:
    """Return the report on these files and folders.

    Raises UsageError if a file that the user named (`settings` is None) cannot be read or has no trace, and
    NumapinError if a run with these settings traced nothing.
    """
    analyses: list[Analysis] = []
    notes: list[str] = []
    for path in paths:
        of_path: list[str] = []
        found = _read_run(path, of_path, settings) if _is_folder(path) else [_analyze(path)]
        if settings is None and not found:
            raise _no_trace(of_path, settings)
        analyses += found
        notes += of_path
    if not analyses:
        raise _no_trace(notes, settings)
    return make_report(analyses, notes)


def _no_trace(notes: Sequence[str], settings: Settings | None) -> NumapinError:
    found, remedy = "; ".join(notes), _remedy(notes, settings)
    return UsageError(found, remedy) if settings is None else NumapinError(f"nothing was traced: {found}", remedy)


def records_of(folder: Path) -> list[Mapping[str, object]]:
    """Return what the ranks of a run have recorded so far; a rank that steps has a record."""
    return [_load_record(path) for path in _record_paths(folder)]


def _record_paths(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.glob("rank-*.json")) if not path.name.endswith(_TRACE)]


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
            f"{folder} holds the traces of several runs: rank {min(twice)} occurs more than once",
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
    paths = _record_paths(folder)
    if settings is None and not any(folder.glob(f"rank-*{_TRACE}")):
        yield f"{folder} has no rank-*{_TRACE}"
    if settings is not None and not paths:
        yield f"{folder}: no rank took a batch from a torch DataLoader or stepped a torch optimizer"
    records = [_load_record(path) for path in paths]
    for record in records:
        if record.get("reason"):
            yield printable(_shortfall(record, settings))
    yield from _silent(folder, records)


def _silent(folder: Path, records: Sequence[Mapping[str, object]]) -> Iterator[str]:
    """Yield the number of the host's ranks that left no record, because they did nothing that is traced."""
    numbers = (record.get("num_local_ranks") for record in records)
    num_ranks = max((number for number in numbers if isinstance(number, int)), default=0)
    num_silent = num_ranks - len({str(record.get("rank")) for record in records})
    if num_silent > 0:
        yield printable(f"{folder}: {num_silent} of {counted(num_ranks, 'rank')} took no batch and made no step")


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
    """Return the JSON of a file, which may be compressed. Raises UsageError."""
    try:
        content = _content(path)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{path} cannot be read: {reason}", _NAME_ONE) from None
    try:
        return decode(content)
    except ValueError as error:
        raise UsageError(f"{path}: not JSON, or cut off: {error}", "trace the script again") from None


def _content(path: Path) -> bytes:
    """Return a file's bytes, unpacked. Raises OSError, EOFError, zlib.error, and UsageError if it is too large."""
    with os.fdopen(open_regular(str(path)), "rb") as file:
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
        raise UsageError(f"{path} is too large to read: more than {most >> 20} MiB", "trace fewer steps: --steps 5")
