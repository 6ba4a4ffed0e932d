"""Reader of Chrome traces as Kineto, the library behind torch's profiler, writes them.

The name of the GPU's record says which kinds of memory a copy reads and writes, as in "Memcpy HtoD (Pinned -> Device)";
the host calls cudaMemcpyAsync for every kind. "correlation" links the record to the host's call, and "External id"
links it to the operator that issued the copy.
"""

from __future__ import annotations

import gzip
import os
import re
import zlib
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from itertools import pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from numapin.base.files import open_regular, read_file
from numapin.base.records import read_record
from numapin.base.strict_json import decode
from numapin.base.text import counted, printable
from numapin.errors import NumapinError, UsageError
from numapin.steps.record import SCHEMA, TRACE, RankSteps
from numapin.trace.analysis import analyze
from numapin.trace.records import Copy, Kernel, Span, Trace, read_noted, timed_spans
from numapin.trace.report import make_report, name_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from numapin.steps.record import StepSettings
    from numapin.trace.analysis import Analysis
    from numapin.trace.report import TraceReport

_REMEDY: Final = "trace the script again with: numapin trace train.py"
_CATEGORIES: Final = {
    "kernel": "kernel",
    "gpu_memset": "kernel",
    "gpu_memcpy": "copy",
    "cuda_runtime": "call",
    "cuda_driver": "call",
    "cpu_op": "operator",
    "user_annotation": "range",
}
# No kind of memory has a ">" in its name; so there is one way at most to match any name.
_COPY: Final = re.compile(r"Memcpy (?P<direction>\w+) \((?P<source>[^>]+) -> (?P<target>[^>)]+)\)", re.IGNORECASE)
_LIMIT: Final = 2.0**63  # of times in us and of every other number; sums of larger ones may be infinite
_MOST_WAITS: Final = 16  # per copy; an operator waits once or twice for what it copied
_LOADER: Final = "enumerate(DataLoader)#"
_MARKED_STEP: Final = "ProfilerStep#"
_OPTIMIZER_STEP: Final = "Optimizer.step#"
_PINNING: Final = ("aten::pin_memory", "aten::_pin_memory")
_PRODUCTS: Final = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::convolution"}
_EXCHANGES: Final = ("gloo:", "mpi:", "c10d::")
_NOT_COMPUTE: Final = (_MARKED_STEP, "Optimizer.", _LOADER, *_EXCHANGES)
_CORRELATION: Final = "correlation"
_EXTERNAL_ID: Final = "External id"
_LARGEST_RECORD: Final = 1 << 20
_LARGEST_BYTES: Final = 1 << 30  # reading it takes some 10 GB of memory
_MOST_UNPACKED: Final = 64  # times the packed size; traces shrink by 10 to 30, zeros by 1000
_LEAST_UNPACKED: Final = 16 << 20
_NAME_ONE: Final = "name a file that torch.profiler wrote, or the output folder of numapin trace"


class _Event:
    """A complete event ("ph": "X") of the trace."""

    __slots__ = ("args", "kind", "name", "span")

    def __init__(self, raw: dict[str, Any], start: float, duration: float) -> None:
        self.kind = _CATEGORIES.get(str(raw.get("cat", "")), "")
        self.name = printable(str(raw.get("name", "")))
        args = raw.get("args")
        self.args: dict[str, Any] = args if isinstance(args, dict) else {}
        self.span = Span(start=start, end=start + duration, name=self.name, row=_integer(raw.get("tid")))

    def number(self, name: str) -> int | None:
        """Return an argument; None if it is not an integer."""
        return _integer(self.args.get(name))

    @property
    def shapes(self) -> list[object]:
        """The shapes of an operator's arguments."""
        shapes = self.args.get("Input Dims")
        return shapes if isinstance(shapes, list) else []


def _integer(value: object) -> int | None:
    """Return an integer below the limit, None for anything else."""
    return value if type(value) is int and -_LIMIT < value < _LIMIT else None  # a bool is none


def read_trace(content: object, *, source: str) -> Trace:
    """Read a decoded trace file, whose content may be anything. Raises UsageError if it has no complete event."""
    source = printable(source)
    top = content if isinstance(content, dict) else {"traceEvents": content}
    raw = top.get("traceEvents")
    if not isinstance(raw, list):
        raise UsageError(f"{source}: not a Chrome trace: it has no list traceEvents", _REMEDY)
    events = sorted(_complete_events(raw), key=attrgetter("span.start"))
    if not events:
        raise UsageError(f"{source}: none of its {len(raw)} events has a start and a duration", _REMEDY)
    metadata = top.get("numapin")
    if not isinstance(metadata, dict):
        metadata = {}
    by_kind: dict[str, list[_Event]] = defaultdict(list)
    for event in events:
        by_kind[event.kind].append(event)
    # The GPU's own annotations are neither.
    host = sorted((*by_kind["range"], *by_kind["operator"]), key=attrgetter("span.start"))

    # From here on all times count from the start of the first step.
    steps, step_unit = _steps(events, host, metadata)
    zero = steps[0].start
    steps = tuple(step.earlier(zero) for step in steps)
    for event in events:
        event.span = event.span.earlier(zero)
    base = top.get("baseTimeNanoseconds", 0)
    zero_ns = round(base if isinstance(base, int | float) and abs(base) < _LIMIT else 0) + round(zero * 1000)

    operators, calls = by_kind["operator"], by_kind["call"]
    on_gpu = bool(by_kind["kernel"] or by_kind["copy"])
    waits = _named(host, _LOADER)
    computing = [event.span for event in operators if not event.name.startswith(_NOT_COMPUTE)]

    # What the trace does not say.
    notes = []
    if not on_gpu:
        why = "no GPU was used"
        if any(event.name.startswith("cuda") for event in calls):
            why = "CUDA was called, but the profiler got no records from the GPU (another profiler, or no permission)"
        notes.append(f"{why}: copies and their overlap are unknown, and compute is the CPU's")
    if not waits:
        notes.append("no DataLoader was iterated: the time spent waiting for data is unknown")
    names = [event.name for event in by_kind["copy"]]
    num_unknown = sum(not _COPY.match(name) or "unknown" in name.lower() for name in names)
    if num_unknown:
        notes.append(f"copies whose kind of memory the trace does not name: {num_unknown}")

    return Trace(
        source=source,
        rank=_integer(metadata.get("rank")),
        restart=_integer(metadata.get("restart")) or 0,
        step_unit=step_unit,
        steps=steps,
        waits=waits,
        loads=timed_spans(metadata.get("loads"), "load", zero_ns),
        loop_pins=tuple(event.span for event in operators if event.name in _PINNING),
        copies=tuple(_copies(by_kind["copy"], calls, operators)),
        kernels=tuple(
            Kernel(
                start=event.span.start,
                end=event.span.end,
                name=event.name,
                row=event.number("stream"),
                device=event.number("device"),
            )
            for event in by_kind["kernel"]
        ),
        operators=() if on_gpu else tuple(span for span in computing if span.name not in _PINNING),
        exchanges=() if on_gpu else _named(host, _EXCHANGES),
        same_shapes=_have_same_shapes(operators, steps),
        noted=read_noted(metadata.get("noted"), zero_ns),
        notes=tuple(notes),
    )


def _complete_events(raw: list[object]) -> Iterator[_Event]:
    """Yield every complete event; skip malformed ones and other kinds, such as thread names and arrows."""
    for event in raw:
        if isinstance(event, dict) and event.get("ph") == "X":
            try:
                start, duration = float(event["ts"]), float(event["dur"])
            except (KeyError, TypeError, ValueError, OverflowError):
                continue
            if abs(start) < _LIMIT and abs(duration) < _LIMIT:
                yield _Event(event, start, max(duration, 0.0))


def _named(events: Iterable[_Event], prefix: str | tuple[str, ...]) -> tuple[Span, ...]:
    """Return the spans of the events whose names start with the prefix, or with one of them."""
    return tuple(event.span for event in events if event.name.startswith(prefix))


def _steps(events: Sequence[_Event], host: Sequence[_Event], metadata: dict[str, Any]) -> tuple[tuple[Span, ...], str]:
    """Return the steps and their unit: marked steps, else optimizer steps, else batches, else the whole trace."""
    marked = _named(host, _MARKED_STEP)
    if marked:
        num_steps, unit = metadata.get("num_steps"), metadata.get("step_unit")
        is_known = isinstance(num_steps, int) and num_steps > 0  # the end of the script may cut the last one short
        return marked[:num_steps] if is_known else marked, printable(unit) if isinstance(unit, str) else "profiler step"
    moments, unit = [update.end for update in _named(host, _OPTIMIZER_STEP)], "optimizer step"
    if len(moments) < 2:
        moments, unit = [wait.start for wait in _named(host, _LOADER)], "batch"
    if len(moments) < 2:
        moments, unit = [events[0].span.start, max(event.span.end for event in events)], "whole trace"
    pairs = enumerate(pairwise(moments))
    return tuple(Span(start=start, end=end, name=f"{unit} {i}") for i, (start, end) in pairs), unit


def _have_same_shapes(operators: Iterable[_Event], steps: Sequence[Span]) -> bool | None:
    """Return whether all steps multiply and convolve tensors of the same shapes; None if the trace has no shapes.

    Other operators do not count: a loop that logs now and then has some in these steps only.
    """
    starts = [step.start for step in steps]
    products: list[Counter[str]] = [Counter() for _ in steps]
    for event in operators:
        if event.name in _PRODUCTS and event.shapes:
            i = bisect_right(starts, event.span.start) - 1
            if i >= 0 and event.span.start < steps[i].end:
                products[i][f"{event.name} {event.shapes}"] += 1
    return all(own == products[0] for own in products) if any(products) else None


def _copies(copies: Sequence[_Event], calls: Sequence[_Event], operators: Sequence[_Event]) -> Iterator[Copy]:
    """Link each of the GPU's copies to the host's call and to its operator."""
    call_by_number = _linked(calls, copies, _CORRELATION)
    operator_by_number = _linked(operators, copies, _EXTERNAL_ID)
    waits_in: dict[int | None, list[Span]] = defaultdict(list)  # by thread
    for event in calls:
        if "Synchronize" in event.name:
            waits_in[event.span.row].append(event.span)
    for event in copies:
        call = call_by_number.get(event.number(_CORRELATION))
        operator = operator_by_number.get(event.number(_EXTERNAL_ID))
        match, num_bytes = _COPY.match(event.name), event.number("bytes")
        kinds = match.groups() if match else (None, None, None)
        direction, source, target = (None if kind is None or kind.lower() == "unknown" else kind for kind in kinds)
        shapes = operator.shapes if operator else []
        yield Copy(
            start=event.span.start,
            end=event.span.end,
            name=event.name,
            row=event.number("stream"),
            direction=direction,
            source=source,
            target=target,
            num_bytes=num_bytes if num_bytes is not None and num_bytes >= 0 else None,
            device=event.number("device"),
            call=call.span if call else None,
            waits=_within(waits_in[call.span.row], call.span.end, operator.span.end) if call and operator else (),
            operator=operator.name if operator else None,
            shapes=next((printable(str(shape)) for shape in shapes if shape), None),  # of what was copied
        )


def _linked(events: Iterable[_Event], copies: Iterable[_Event], name: str) -> dict[int | None, _Event]:
    """Return the events that share a number of this name with a copy, by number."""
    wanted = {copy.number(name) for copy in copies} - {None}
    numbered = ((event.number(name), event) for event in events)
    return {number: event for number, event in numbered if number in wanted}


def _within(spans: Sequence[Span], start: float, end: float) -> tuple[Span, ...]:
    """Return the first spans that begin between start and end; the spans are sorted by start."""
    first = bisect_left(spans, start, key=attrgetter("start"))
    last = bisect_left(spans, end, key=attrgetter("start"))
    return tuple(spans[first : min(last, first + _MOST_WAITS)])


# --- files and folders -----------------------------------------------------------------------------------------------


def read_report(paths: Sequence[Path], settings: StepSettings | None = None) -> TraceReport:
    """Return the report on these files and folders.

    Raises UsageError if a file that the user named (`settings` is None) cannot be read or has no trace, or if a
    rank has several traces, as of several runs or of a job that was requeued, and NumapinError if a run with these
    settings traced nothing.
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
    num_traces = Counter(name_of(analysis) for analysis in analyses if analysis.trace.rank is not None)
    twice = min((name for name, number in num_traces.items() if number > 1), default=None)
    if twice is not None:
        raise UsageError(
            f"{num_traces[twice]} traces of rank {twice}: they are of several runs, or of several times in one",
            "name one trace of each rank, or the folders of one run's hosts: numapin trace --read DIR/HOST-PID …",
        )
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
    """Return the analyses of a run's ranks, from the run's folder or its hosts' subfolders; append to `notes`."""
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
