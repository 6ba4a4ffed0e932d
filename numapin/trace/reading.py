"""Reader of Chrome traces as Kineto, the library behind torch's profiler, writes them.

The name of the GPU's record says which kinds of memory a copy reads and writes, as in "Memcpy HtoD (Pinned -> Device)";
the host calls cudaMemcpyAsync for every kind. "correlation" links the record to the host's call, and "External id"
links it to the operator that issued the copy.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, TypeVar

from numapin.base.text import printable
from numapin.errors import UsageError
from numapin.trace.noted import read_noted
from numapin.trace.records import Copy, Kernel, Span, Trace

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    _Events = Mapping[str, Sequence["_Event"]]  # by kind, each in the order of their starts

_Timed = TypeVar("_Timed", Span, Kernel, Copy)

_REMEDY: Final = "trace the script again with: numapin trace train.py"
# Before torch 2.0 the categories were called "Kernel", "Memcpy", "Runtime" and "Operator".
_CATEGORIES: Final = {
    "kernel": "kernel",
    "gpu_memset": "kernel",
    "memset": "kernel",
    "gpu_memcpy": "copy",
    "memcpy": "copy",
    "cuda_runtime": "call",
    "cuda_driver": "call",
    "runtime": "call",
    "cpu_op": "operator",
    "operator": "operator",
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
_CORRELATION: Final = ("correlation",)
_EXTERNAL_ID: Final = ("External id", "external id")


class _Event:
    """A complete event ("ph": "X") of the trace."""

    __slots__ = ("args", "kind", "name", "span", "tid")

    def __init__(self, raw: dict[str, Any], start: float, duration: float) -> None:
        self.kind = _CATEGORIES.get(str(raw.get("cat", "")).lower(), "")
        self.name = printable(str(raw.get("name", "")))
        self.tid: object = raw.get("tid")
        args = raw.get("args")
        self.args: dict[str, Any] = args if isinstance(args, dict) else {}
        self.span = Span(start=start, end=start + duration, name=self.name, row=_integer(self.tid))

    def number(self, *names: str) -> int | None:
        """Return the first of these arguments that is an integer."""
        for name in names:
            value = _integer(self.args.get(name))
            if value is not None:
                return value
        return None


def _integer(value: object) -> int | None:
    """Return an integer below the limit, None for anything else."""
    return value if type(value) is int and -_LIMIT < value < _LIMIT else None  # a bool is none


def read_trace(content: object, *, source: str) -> Trace:
    """Read a decoded trace file.

    Args:
        content: The decoded JSON, which may be anything.
        source: The file's name, for messages.

    Raises:
        UsageError: The content is not a Chrome trace, or has no complete event.
    """
    source = printable(source)
    top = content if isinstance(content, dict) else {"traceEvents": content}
    raw = top.get("traceEvents")
    if not isinstance(raw, list):
        raise UsageError(f"{source}: not a Chrome trace: it has no list traceEvents", _REMEDY)
    events = sorted(_complete_events(raw), key=_start)
    if not events:
        raise UsageError(f"{source}: none of its {len(raw)} events has a start and a duration", _REMEDY)
    metadata = top.get("numapin")
    if not isinstance(metadata, dict):
        metadata = {}
    return _from_first_step(_trace(events, metadata, base_ns=_base_ns(top), source=source))


def _start(event: _Event) -> float:
    return event.span.start


def _base_ns(top: dict[str, Any]) -> float:
    base = top.get("baseTimeNanoseconds", 0)
    return base if isinstance(base, int | float) and abs(base) < _LIMIT else 0


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


def _trace(events: Sequence[_Event], metadata: dict[str, Any], *, base_ns: float, source: str) -> Trace:
    by_kind = _by_kind(events)
    # Before torch 2.0 record_function made operators, not ranges. The GPU's own annotations are neither.
    host = sorted((*by_kind["range"], *by_kind["operator"]), key=_start)
    waits = _named(host, _LOADER)
    steps, step_unit = _steps(events, host, waits, metadata)
    updates = _named(host, _OPTIMIZER_STEP)
    loop_pins = tuple(event.span for event in by_kind["operator"] if event.name in _PINNING)
    return Trace(
        source=source,
        rank=_integer(metadata.get("rank")),
        restart=_integer(metadata.get("restart")) or 0,
        step_unit=step_unit,
        steps=steps,
        waits=waits,
        loads=_timed(metadata.get("loads"), "load", base_ns),
        pins=(*loop_pins, *_timed(metadata.get("pins"), "pin", base_ns)),
        loop_pins=loop_pins,
        copies=tuple(_copies(by_kind)),
        kernels=tuple(map(_kernel, by_kind["kernel"])),
        operators=_computing(by_kind),
        exchanges=() if _on_gpu(by_kind) else _named(host, _EXCHANGES),
        updates=updates,
        updates_launch=_launch(by_kind["call"], updates),
        same_shapes=_have_same_shapes(by_kind["operator"], steps),
        noted=read_noted(metadata.get("noted"), base_ns),
        notes=tuple(_notes(by_kind, waits)),
    )


def _by_kind(events: Iterable[_Event]) -> _Events:
    by_kind: dict[str, list[_Event]] = defaultdict(list)
    for event in events:
        by_kind[event.kind].append(event)
    return by_kind


def _named(events: Iterable[_Event], prefix: str | tuple[str, ...]) -> tuple[Span, ...]:
    """Return the spans of the events whose names start with the prefix, or with one of them."""
    return tuple(event.span for event in events if event.name.startswith(prefix))


def _steps(
    events: Sequence[_Event], host: Sequence[_Event], waits: Sequence[Span], metadata: dict[str, Any]
) -> tuple[tuple[Span, ...], str]:
    """Return the steps and their unit: marked steps, else optimizer steps, else batches, else the whole trace."""
    marked = _named(host, _MARKED_STEP)
    if marked:
        unit = metadata.get("step_unit")
        return _complete_steps(marked, metadata), printable(unit) if isinstance(unit, str) else "profiler step"
    updates = _named(host, _OPTIMIZER_STEP)
    if len(updates) > 1:
        return _steps_between([update.end for update in updates], "optimizer step"), "optimizer step"
    if len(waits) > 1:
        return _steps_between([wait.start for wait in waits], "batch"), "batch"
    last_end = max(event.span.end for event in events)
    return (Span(start=_start(events[0]), end=last_end, name="all"),), "whole trace"


def _complete_steps(marked: tuple[Span, ...], metadata: dict[str, Any]) -> tuple[Span, ...]:
    """Leave out a last step that the end of the script cut short."""
    num_steps = metadata.get("num_steps")
    return marked[:num_steps] if isinstance(num_steps, int) and num_steps > 0 else marked


def _steps_between(moments: Sequence[float], unit: str) -> tuple[Span, ...]:
    pairs = enumerate(pairwise(moments))
    return tuple(Span(start=start, end=end, name=f"{unit} {i}") for i, (start, end) in pairs)


def _on_gpu(by_kind: _Events) -> bool:
    return bool(by_kind["kernel"] or by_kind["copy"])


def _computing(by_kind: _Events) -> tuple[Span, ...]:
    """Return the operators that compute on the CPU; none if the trace has work of a GPU."""
    if _on_gpu(by_kind):
        return ()
    named = (event.span for event in by_kind["operator"] if not event.name.startswith(_NOT_COMPUTE))
    return tuple(span for span in named if span.name not in _PINNING)


def _launch(calls: Iterable[_Event], updates: Sequence[Span]) -> bool:
    """Return whether a call that launches a kernel began during one of the updates."""
    launches = tuple(event.span for event in calls if "Launch" in event.name)
    return any(_within(launches, update.start, update.end) for update in updates)


def _have_same_shapes(operators: Iterable[_Event], steps: Sequence[Span]) -> bool | None:
    """Return whether all steps multiply and convolve tensors of the same shapes; None if the trace has no shapes.

    Other operators do not count: a loop that logs now and then has some in these steps only.
    """
    starts = [step.start for step in steps]
    products: list[Counter[str]] = [Counter() for _ in steps]
    for event in operators:
        if event.name in _PRODUCTS and (shapes := _input_shapes(event)):
            i = bisect_right(starts, event.span.start) - 1
            if i >= 0 and event.span.start < steps[i].end:
                products[i][f"{event.name} {shapes}"] += 1
    return all(own == products[0] for own in products) if any(products) else None


def _kernel(event: _Event) -> Kernel:
    return Kernel(
        start=event.span.start,
        end=event.span.end,
        name=event.name,
        row=event.number("stream"),
        device=event.number("device"),
    )


def _copies(by_kind: _Events) -> Iterator[Copy]:
    """Link each of the GPU's copies to the host's call and to its operator."""
    copies = by_kind["copy"]
    calls = _linked(by_kind["call"], copies, _CORRELATION)
    operators = _linked(by_kind["operator"], copies, _EXTERNAL_ID)
    synchronizations: dict[object, list[Span]] = defaultdict(list)  # by thread
    for event in by_kind["call"]:
        if "Synchronize" in event.name:
            synchronizations[event.tid].append(event.span)
    for event in copies:
        call = calls.get(event.number(*_CORRELATION))
        operator = operators.get(event.number(*_EXTERNAL_ID))
        waits = _within(synchronizations[call.tid], call.span.end, operator.span.end) if call and operator else ()
        yield _copy(event, call, operator, waits)


def _linked(events: Iterable[_Event], copies: Iterable[_Event], names: tuple[str, ...]) -> dict[int | None, _Event]:
    """Return the events that share a number of these names with a copy, by number."""
    wanted = {copy.number(*names) for copy in copies} - {None}
    numbered = ((event.number(*names), event) for event in events)
    return {number: event for number, event in numbered if number in wanted}


def _copy(event: _Event, call: _Event | None, operator: _Event | None, waits: tuple[Span, ...]) -> Copy:
    direction, source, target = _kinds_of_memory(event.name)
    num_bytes = event.number("bytes")
    return Copy(
        start=event.span.start,
        end=event.span.end,
        direction=direction,
        source=source,
        target=target,
        num_bytes=num_bytes if num_bytes is not None and num_bytes >= 0 else None,
        device=event.number("device"),
        stream=event.number("stream"),
        call=call.span if call else None,
        waits=waits,
        operator=operator.name if operator else None,
        shapes=_shape(operator) if operator else None,
    )


def _kinds_of_memory(name: str) -> tuple[str | None, str | None, str | None]:
    """Return the direction, source and target that are in a copy's name; None for what is unknown."""
    match = _COPY.match(name)
    if match is None:
        return None, None, None
    direction, source, target = (None if kind.lower() == "unknown" else kind for kind in match.groups())
    return direction, source, target


def _within(spans: Sequence[Span], start: float, end: float) -> tuple[Span, ...]:
    """Return the first spans that begin between start and end; the spans are sorted by start."""
    first = bisect_left(spans, start, key=attrgetter("start"))
    last = bisect_left(spans, end, key=attrgetter("start"))
    return tuple(spans[first : min(last, first + _MOST_WAITS)])


def _shape(operator: _Event) -> str | None:
    """Return the shape of what was copied: the first argument that has a shape."""
    return next((printable(str(shape)) for shape in _input_shapes(operator) if shape), None)


def _input_shapes(operator: _Event) -> list[object]:
    shapes = operator.args.get("Input Dims", operator.args.get("Input dims"))
    return shapes if isinstance(shapes, list) else []


def _timed(value: object, name: str, base_ns: float) -> tuple[Span, ...]:
    """Return the spans that the hook timed, without those inside an earlier one of the same row.

    torch pins the tensors of a batch one by one, inside the call that pins the batch.
    """
    spans: list[Span] = []
    last_end: dict[int, int] = {}
    for row, start, end in sorted(_timed_rows(value), key=lambda timed: (timed[1], -timed[2])):
        if end > last_end.get(row, 0):
            last_end[row] = end
            spans.append(Span(start=(start - base_ns) / 1000, end=(end - base_ns) / 1000, name=name, row=row))
    return tuple(spans)


def _timed_rows(value: object) -> list[list[int]]:
    """Return the valid ones of [row, start, end], the times in nanoseconds since 1970."""
    rows = value if isinstance(value, list) else []
    return [row for row in rows if isinstance(row, list) and len(row) == 3 and None not in map(_integer, row)]


def _notes(by_kind: _Events, waits: Sequence[Span]) -> Iterator[str]:
    """Yield what the trace does not say."""
    if not _on_gpu(by_kind):
        yield f"{_why_no_gpu(by_kind)}: copies and their overlap are unknown, and compute is the CPU's"
    if not waits:
        yield "no DataLoader was iterated: the time spent waiting for data is unknown"
    num_unknown = sum(_is_of_unknown_memory(event.name) for event in by_kind["copy"])
    if num_unknown:
        yield f"copies whose kind of memory the trace does not name: {num_unknown}"


def _why_no_gpu(by_kind: _Events) -> str:
    if any(event.name.startswith("cuda") for event in by_kind["call"]):
        return "CUDA was called, but the profiler got no records from the GPU (another profiler, or no permission)"
    return "no GPU was used"


def _is_of_unknown_memory(name: str) -> bool:
    return not _COPY.match(name) or "unknown" in name.lower()


def _from_first_step(trace: Trace) -> Trace:
    """Return the trace with its times counted from the start of the first step."""
    zero = trace.steps[0].start
    return replace(
        trace,
        steps=_earlier(trace.steps, zero),
        waits=_earlier(trace.waits, zero),
        loads=_earlier(trace.loads, zero),
        pins=_earlier(trace.pins, zero),
        loop_pins=_earlier(trace.loop_pins, zero),
        copies=_earlier(trace.copies, zero),
        kernels=_earlier(trace.kernels, zero),
        operators=_earlier(trace.operators, zero),
        exchanges=_earlier(trace.exchanges, zero),
        updates=_earlier(trace.updates, zero),
        noted=trace.noted.earlier(zero),
    )


def _earlier(spans: Iterable[_Timed], by_us: float) -> tuple[_Timed, ...]:
    return tuple(span.earlier(by_us) for span in spans)
