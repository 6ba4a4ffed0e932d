"""A Chrome trace, as Kineto writes it, becomes a `Trace`. Pure.

Comes in: decoded JSON of any torch version's profiler. Goes out: a `Trace`, or a NumapinError that says what is
missing.

What kind of memory a copy read and wrote is in the name of the GPU's own record, "Memcpy HtoD (Pinned -> Device)"; the
host's call is cudaMemcpyAsync for both kinds. The two are tied by "correlation", and both to the operator that called
by "External id".
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from numapin.base.printable import printable
from numapin.errors import NumapinError
from numapin.trace.records import Copy, Kernel, Span, Trace

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_REMEDY: Final = "trace the script again with: numapin trace train.py"
# Names of categories changed over the years: "Kernel", "Memcpy", "Runtime" and "Operator" are those before torch 2.0.
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
_COPY: Final = re.compile(r"Memcpy (?P<direction>\w+) \((?P<source>.+) -> (?P<target>.+)\)", re.IGNORECASE)
_LIMIT: Final = 2.0**63  # of times in us, and of every number: beyond, sums are infinite
_MOST_WAITS: Final = 16  # of one copy: an operator waits once or twice for what it copied
_LOADER: Final = "enumerate(DataLoader)#"
_PINNING: Final = ("aten::pin_memory", "aten::_pin_memory")


class _Event:
    """A complete event ("ph": "X") of the trace."""

    __slots__ = ("args", "kind", "name", "span", "tid")

    def __init__(self, raw: dict[str, Any], start: float, duration: float) -> None:
        self.kind = _CATEGORIES.get(str(raw.get("cat", "")).lower(), "")
        self.name = printable(str(raw.get("name", "")))
        self.tid: object = raw.get("tid")
        args = raw.get("args")
        self.args: dict[str, Any] = args if isinstance(args, dict) else {}
        self.span = Span(start=start, end=start + duration, name=self.name, row=_whole(self.tid))

    def number(self, *names: str) -> int | None:
        """Return the first of these arguments that is a number."""
        for name in names:
            value = _whole(self.args.get(name))
            if value is not None:
                return value
        return None


def _whole(value: object) -> int | None:
    """Return a whole number that one can count with, None for anything else."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < _LIMIT:
        return value
    return None


def read_trace(content: object, *, source: str) -> Trace:
    """Return what is in a decoded trace file. Raises NumapinError where it is none, or nothing can be made of it."""
    source = printable(source)
    top = content if isinstance(content, dict) else {"traceEvents": content}
    raw = top.get("traceEvents")
    if not isinstance(raw, list):
        raise NumapinError(f"{source}: no Chrome trace: it has no list traceEvents", _REMEDY)
    events = sorted(_events(raw), key=lambda event: event.span.start)
    if not events:
        raise NumapinError(f"{source}: none of its {len(raw)} events has a start and a duration", _REMEDY)
    ours = top.get("numapin")
    trace = _trace(events, ours if isinstance(ours, dict) else {}, base_ns=_base_ns(top), source=source)
    return _from_first_step(trace)


def _base_ns(top: dict[str, Any]) -> float:
    base = top.get("baseTimeNanoseconds", 0)
    return base if isinstance(base, int | float) and abs(base) < _LIMIT else 0


def _events(raw: list[object]) -> Iterator[_Event]:
    """Give every complete event; others (names of threads, arrows) and broken ones are left out."""
    for event in raw:
        if isinstance(event, dict) and event.get("ph") == "X":
            try:
                start, duration = float(event["ts"]), float(event["dur"])
            except (KeyError, TypeError, ValueError, OverflowError):
                continue
            if abs(start) < _LIMIT and abs(duration) < _LIMIT:
                yield _Event(event, start, max(duration, 0.0))


def _trace(events: Sequence[_Event], ours: dict[str, Any], *, base_ns: float, source: str) -> Trace:
    by_kind: dict[str, list[_Event]] = defaultdict(list)
    for event in events:
        by_kind[event.kind].append(event)
    # What records by hand ("range") was an operator once, and what a GPU did is never one.
    host = sorted((*by_kind["range"], *by_kind["operator"]), key=lambda event: event.span.start)
    waits = tuple(event.span for event in host if event.name.startswith(_LOADER))
    steps, step_unit = _steps(events, host, waits, ours)
    loop_pins = tuple(event.span for event in by_kind["operator"] if event.name in _PINNING)
    return Trace(
        source=source,
        rank=_whole(ours.get("rank")),
        restart=_whole(ours.get("restart")) or 0,
        step_unit=step_unit,
        steps=steps,
        waits=waits,
        loads=_timed(ours.get("loads"), "load", base_ns),
        pins=(*loop_pins, *_timed(ours.get("pins"), "pin", base_ns)),
        loop_pins=loop_pins,
        copies=tuple(_copies(by_kind)),
        kernels=tuple(_kernel(event) for event in by_kind["kernel"]),
        operators=() if by_kind["kernel"] or by_kind["copy"] else _computing(by_kind["operator"]),
        notes=tuple(_notes(by_kind, waits)),
    )


def _steps(
    events: Sequence[_Event], host: Sequence[_Event], waits: tuple[Span, ...], ours: dict[str, Any]
) -> tuple[tuple[Span, ...], str]:
    """Return the steps, and what they are.

    Those that the profiler marked; else from one optimizer step to the next, or one batch to the next; else all of it.
    """
    marked = tuple(event.span for event in host if event.name.startswith("ProfilerStep#"))
    if marked:
        unit, complete = ours.get("step_unit"), ours.get("num_steps")
        marked = marked[:complete] if isinstance(complete, int) and complete > 0 else marked
        return marked, printable(unit) if isinstance(unit, str) else "profiler step"
    ends = [event.span.end for event in host if event.name.startswith("Optimizer.step#")]
    for moments, unit in ((ends, "optimizer step"), ([wait.start for wait in waits], "batch")):
        if len(moments) > 1:
            pairs = pairwise(moments)
            return tuple(Span(start=a, end=b, name=f"{unit} {i}") for i, (a, b) in enumerate(pairs)), unit
    whole = Span(start=events[0].span.start, end=max(event.span.end for event in events), name="all")
    return (whole,), "whole trace"


def _computing(operators: Sequence[_Event]) -> tuple[Span, ...]:
    named = (event.span for event in operators if not event.name.startswith(("ProfilerStep#", "Optimizer.", _LOADER)))
    return tuple(span for span in named if span.name not in _PINNING)


def _kernel(event: _Event) -> Kernel:
    return Kernel(
        start=event.span.start,
        end=event.span.end,
        name=event.name,
        row=event.number("stream"),
        device=event.number("device"),
    )


def _copies(by_kind: dict[str, list[_Event]]) -> Iterator[Copy]:
    """Tie each of the GPU's copies to the host's call and operator."""
    wanted = {event.number("correlation") for event in by_kind["copy"]} - {None}
    calls = {n: event for event in by_kind["call"] if (n := event.number("correlation")) in wanted}
    named = {event.number("External id", "external id") for event in by_kind["copy"]} - {None}
    operators = {
        n: event for event in by_kind["operator"] if (n := event.number("External id", "external id")) in named
    }
    syncs: dict[object, list[Span]] = defaultdict(list)
    for event in by_kind["call"]:
        if "Synchronize" in event.name:
            syncs[event.tid].append(event.span)
    for event in by_kind["copy"]:
        call = calls.get(event.number("correlation"))
        operator = operators.get(event.number("External id", "external id"))
        waits = _within(syncs[call.tid], call.span.end, operator.span.end) if call and operator else ()
        yield _copy(event, call, operator, waits)


def _copy(event: _Event, call: _Event | None, operator: _Event | None, waits: tuple[Span, ...]) -> Copy:
    known = _COPY.match(event.name)
    kinds = (
        {key: None if text.lower() == "unknown" else text for key, text in known.groupdict().items()} if known else {}
    )
    num_bytes = event.number("bytes")
    return Copy(
        start=event.span.start,
        end=event.span.end,
        direction=kinds.get("direction"),
        source=kinds.get("source"),
        target=kinds.get("target"),
        num_bytes=num_bytes if num_bytes is not None and num_bytes >= 0 else None,
        device=event.number("device"),
        stream=event.number("stream"),
        call=call.span if call else None,
        waits=waits,
        operator=operator.name if operator else None,
        shapes=_shape(operator) if operator else None,
    )


def _within(spans: Sequence[Span], start: float, end: float) -> tuple[Span, ...]:
    """Return the first spans, sorted by start, that begin in this time."""
    first = bisect_left(spans, start, key=lambda span: span.start)
    last = bisect_left(spans, end, key=lambda span: span.start)
    return tuple(spans[first : min(last, first + _MOST_WAITS)])


def _shape(operator: _Event) -> str | None:
    """Return the shape of what was copied: that of the first argument that has one."""
    shapes = operator.args.get("Input Dims", operator.args.get("Input dims"))
    return next((printable(str(shape)) for shape in shapes if shape), None) if isinstance(shapes, list) else None


def _timed(value: object, name: str, base_ns: float) -> tuple[Span, ...]:
    """Return what the hook timed itself: lists of row, start and end in nanoseconds since 1970."""
    rows = value if isinstance(value, list) else []
    good = [row for row in rows if isinstance(row, list) and len(row) == 3 and all(_whole(n) is not None for n in row)]
    spans: list[Span] = []
    last: dict[int, int] = {}
    for who, start, end in sorted(good, key=lambda row: (row[1], -row[2])):
        if end > last.get(who, 0):  # else inside the one before it: torch pins a batch's tensors one by one
            last[who] = end
            spans.append(Span(start=(start - base_ns) / 1000, end=(end - base_ns) / 1000, name=name, row=who))
    return tuple(spans)


def _notes(by_kind: dict[str, list[_Event]], waits: tuple[Span, ...]) -> Iterator[str]:
    cuda = any(event.name.startswith("cuda") for event in by_kind["call"])
    if not by_kind["kernel"] and not by_kind["copy"]:
        why = (
            "CUDA was called, but the profiler got no records from the GPU (another profiler, or no permission)"
            if cuda
            else "no GPU did anything"
        )
        yield f"{why}: copies and their overlap are unknown, compute is the CPU's"
    if not waits:
        yield "no DataLoader was iterated: waiting for data is unknown"
    unknown = sum(1 for event in by_kind["copy"] if not _COPY.match(event.name) or "unknown" in event.name.lower())
    if unknown:
        yield f"{unknown} copies of a kind of memory that the trace does not tell"


def _from_first_step(trace: Trace) -> Trace:
    """Return the trace with its times counted from the start of the first step."""
    zero = trace.steps[0].start

    def moved(span: Span) -> Span:  # dataclasses.replace took a quarter of the time of a trace with many copies
        return Span(start=span.start - zero, end=span.end - zero, name=span.name, row=span.row)

    def shifted(spans: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(
            moved(span) if type(span) is Span else replace(span, start=span.start - zero, end=span.end - zero)
            for span in spans
        )

    copies = (
        replace(
            copy,
            start=copy.start - zero,
            end=copy.end - zero,
            call=shifted((copy.call,))[0] if copy.call else None,
            waits=shifted(copy.waits),
        )
        for copy in trace.copies
    )
    return replace(
        trace,
        steps=shifted(trace.steps),
        waits=shifted(trace.waits),
        loads=shifted(trace.loads),
        pins=shifted(trace.pins),
        loop_pins=shifted(trace.loop_pins),
        copies=tuple(copies),
        kernels=shifted(trace.kernels),
        operators=shifted(trace.operators),
    )
