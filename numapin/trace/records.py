"""One rank's trace, reduced to loading, copying and computing.

Times are in microseconds from the start of the first step; what the trace does not say is None.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any, Final

from numapin.base.text import printable

HOST_TO_DEVICE: Final = "HtoD"
DEVICE_TO_HOST: Final = "DtoH"
_LONG_CALL_US: Final = 50.0  # starting an asynchronous copy takes 5 to 20 us under the profiler
_LIMIT: Final = 2**63
_LONGEST: Final = 200  # characters of a name
_UNKNOWN: Final = "?"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Something that lasted from `start` to `end`. Its `row` is a thread, a worker process or a stream."""

    start: float
    end: float
    name: str
    row: int | None = None

    @property
    def pair(self) -> tuple[float, float]:
        """The start and the end."""
        return self.start, self.end

    def earlier(self, by_us: float) -> Span:
        """Return the span at an earlier time."""
        # dataclasses.replace took a quarter of the time of reading a trace with many copies.
        return Span(start=self.start - by_us, end=self.end - by_us, name=self.name, row=self.row)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel(Span):
    """A kernel that ran on a GPU; the row is its stream."""

    device: int | None

    @property
    def communicates(self) -> bool:
        """True for a kernel of NCCL or RCCL, which waits for other ranks."""
        return self.name.startswith("nccl")


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy(Span):
    """A copy as the GPU made it; the row is its stream.

    `source` and `target` are kinds of memory: "Pageable", "Pinned" or "Device".
    `call` is the host's call that requested the copy. `waits` are the calls by which the host then waited for it,
    inside the same operator.
    """

    direction: str | None
    source: str | None
    target: str | None
    num_bytes: int | None
    device: int | None
    call: Span | None
    waits: tuple[Span, ...]
    operator: str | None
    shapes: str | None

    @property
    def duration_us(self) -> float:
        """The time that the GPU took for the copy."""
        return self.end - self.start

    @property
    def crosses(self) -> bool:
        """False for a copy that is known not to go between host and GPU."""
        return self.direction in (None, HOST_TO_DEVICE, DEVICE_TO_HOST)

    @property
    def blocking(self) -> bool | None:
        """Whether the copy blocked the host: it waited, or its call lasted about as long as the copy."""
        if self.call is None:
            return None
        called_us = self.call.end - self.call.start
        return bool(self.waits) or (called_us > _LONG_CALL_US and called_us > 0.5 * self.duration_us)

    @property
    def blocked(self) -> tuple[tuple[float, float], ...]:
        """The times when the copy blocked the host."""
        return tuple(span.pair for span in (self.call, *self.waits) if span) if self.blocking else ()

    @property
    def occupied(self) -> tuple[tuple[float, float], ...]:
        """The times when the copy ran or blocked the host."""
        return self.pair, *self.blocked


# --- the hook's notes on a rank --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderUse:
    """A DataLoader that the script iterated. `num_batches` is its length, None if it has none."""

    is_numapin: bool
    num_workers: int
    is_persistent: bool
    delivers_on_gpu: bool
    num_batches: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StackSample:
    """The place of the loop's thread at one moment: in the script's own code, and innermost.

    `is_running` is false if the thread slept or waited.
    """

    at: float
    own: str
    innermost: str
    is_running: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptNotes:
    """Everything that the hook noted; "" and None are unknown.

    `cpus` is a Linux list, and `other_cpu_ms` is the CPU time of other programs on these CPUs within `traced_ms`.
    `epochs` are the calls of `iter()` on loaders with workers; `row` is the loader. `ends` are the calls of `next()`
    that ended an epoch. `image_work` names what was done to make the batches: "jpeg", files were decoded with PIL;
    "float", images were converted to floats.
    """

    host: str = ""
    cpus: str = ""
    nodes: str = ""
    num_cpus: int | None = None
    traced_ms: int | None = None
    other_cpu_ms: int | None = None
    loaders: tuple[LoaderUse, ...] = ()
    epochs: tuple[Span, ...] = ()
    ends: tuple[Span, ...] = ()
    samples: tuple[StackSample, ...] = ()
    image_work: frozenset[str] = frozenset()

    @property
    def loader(self) -> LoaderUse | None:
        """The longest loader, which is usually the one of the training: a stream, else the one with most batches."""
        return max(self.loaders, key=lambda one: inf if one.num_batches is None else one.num_batches, default=None)

    @property
    def uses_numapin(self) -> bool:
        """True if numapin's data path is in use."""
        return any(loader.is_numapin for loader in self.loaders)

    @property
    def place(self) -> str:
        """The rank's CPUs and nodes in words; "" if unknown."""
        nodes = f", node {self.nodes}" if self.nodes else ""
        return f"CPUs {self.cpus}{nodes}" if self.cpus else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One rank's traced steps. `restart` counts its restarts from 0.

    `waits` are the loop's calls of `next()` on a DataLoader. `loads` are the batches being made, in whichever process;
    `loop_pins` are those that the loop's own thread pinned. `operators` ran on the CPU, and `exchanges` are collective
    operations there. `same_shapes` is true if all steps multiply and convolve tensors of the same shapes, None if the
    trace has no shapes. `noted` is what the hook saw of the script. `notes` say what the trace does not.
    """

    source: str
    rank: int | None
    restart: int
    step_unit: str
    steps: tuple[Span, ...]
    waits: tuple[Span, ...]
    loads: tuple[Span, ...]
    loop_pins: tuple[Span, ...]
    copies: tuple[Copy, ...]
    kernels: tuple[Kernel, ...]
    operators: tuple[Span, ...]
    exchanges: tuple[Span, ...]
    same_shapes: bool | None
    noted: ScriptNotes
    notes: tuple[str, ...]

    @property
    def on_gpu(self) -> bool:
        """True if the trace has work of a GPU."""
        return bool(self.kernels or self.copies)


# --- reader of the notes ---------------------------------------------------------------------------------------------


def read_noted(value: object, zero_ns: int) -> ScriptNotes:
    """Read the metadata; skip what is malformed. Times count from `zero_ns`, in ns since 1970."""
    if not isinstance(value, dict):
        return ScriptNotes()
    stacks = [[_text(name) or _UNKNOWN for name in _list(stack)] for stack in _list(value.get("stacks"))]
    samples = []
    for at, number, running in sorted(_rows(value.get("samples"))):
        if 0 <= number < len(stacks):
            stack = stacks[number] if len(stacks[number]) == 2 else (_UNKNOWN, _UNKNOWN)
            at_us = (at - zero_ns) / 1000
            samples.append(StackSample(at=at_us, own=stack[0], innermost=stack[1], is_running=bool(running)))
    return ScriptNotes(
        host=_text(value.get("host")),
        cpus=_text(value.get("cpus")),
        nodes=_text(value.get("nodes")),
        num_cpus=_count(value.get("num_cpus")),
        traced_ms=_count(value.get("traced_ms")),
        other_cpu_ms=_count(value.get("other_cpu_ms")),
        loaders=tuple(
            LoaderUse(
                is_numapin=loader.get("is_numapin") is True,
                num_workers=_count(loader.get("num_workers")) or 0,
                is_persistent=loader.get("is_persistent") is True,
                delivers_on_gpu=loader.get("delivers_on_gpu") is True,
                num_batches=_count(loader.get("num_batches")),
            )
            for loader in _list(value.get("loaders"))
            if isinstance(loader, dict)
        ),
        epochs=timed_spans(value.get("epochs"), "epoch", zero_ns),
        ends=timed_spans(value.get("ends"), "epoch", zero_ns),
        samples=tuple(samples),
        image_work=frozenset(map(_text, _list(value.get("image_work")))),
    )


def timed_spans(value: object, name: str, zero_ns: int) -> tuple[Span, ...]:
    """Return the spans [row, start, end] that the hook timed, in ns since 1970. Malformed rows are skipped."""
    return tuple(
        Span(start=(start - zero_ns) / 1000, end=(max(end, start) - zero_ns) / 1000, name=name, row=row)
        for row, start, end in sorted(_rows(value), key=lambda timed: (timed[1], -timed[2]))
    )


def _rows(value: object) -> list[list[int]]:
    """Return the rows that are lists of three integers."""
    rows = (row for row in _list(value) if isinstance(row, list) and len(row) == 3)
    return [row for row in rows if all(type(cell) is int and abs(cell) < _LIMIT for cell in row)]


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: object) -> str:
    return printable(value)[:_LONGEST] if isinstance(value, str) else ""


def _count(value: object) -> int | None:
    return value if type(value) is int and 0 <= value < _LIMIT else None
