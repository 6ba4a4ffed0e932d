"""One rank's trace, reduced to loading, copying and computing.

Times are in microseconds from the start of the first step; what the trace does not say is None.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from numapin.trace.noted import ScriptNotes

HOST_TO_DEVICE: Final = "HtoD"
DEVICE_TO_HOST: Final = "DtoH"
_LONG_CALL_US: Final = 50.0  # starting an asynchronous copy takes 5 to 20 us under the profiler


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
class Copy:
    """A copy as the GPU made it. `source` and `target` are kinds of memory: "Pageable", "Pinned" or "Device".

    `call` is the host's call that requested the copy. `waits` are the calls by which the host then waited for it,
    inside the same operator.
    """

    start: float
    end: float
    direction: str | None
    source: str | None
    target: str | None
    num_bytes: int | None
    device: int | None
    stream: int | None
    call: Span | None
    waits: tuple[Span, ...]
    operator: str | None
    shapes: str | None

    @property
    def pair(self) -> tuple[float, float]:
        """The start and the end."""
        return self.start, self.end

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One rank's traced steps. `restart` counts its restarts from 0.

    `waits` are the loop's calls of `next()` on a DataLoader. `loads` are the batches being made, in whichever process,
    and `pins` the batches being pinned; `loop_pins` are those that the loop's own thread pinned. `operators` ran on the
    CPU, and `exchanges` are collective operations there. `updates` are the optimizer's steps; `updates_launch` is true
    if they launched kernels. `same_shapes` is true if all steps multiply and convolve tensors of the same shapes, None
    if the trace has no shapes. `noted` is what the hook saw of the script. `notes` say what the trace does not.
    """

    source: str
    rank: int | None
    restart: int
    step_unit: str
    steps: tuple[Span, ...]
    waits: tuple[Span, ...]
    loads: tuple[Span, ...]
    pins: tuple[Span, ...]
    loop_pins: tuple[Span, ...]
    copies: tuple[Copy, ...]
    kernels: tuple[Kernel, ...]
    operators: tuple[Span, ...]
    exchanges: tuple[Span, ...]
    updates: tuple[Span, ...]
    updates_launch: bool
    same_shapes: bool | None
    noted: ScriptNotes
    notes: tuple[str, ...]

    @property
    def on_gpu(self) -> bool:
        """True if the trace has work of a GPU."""
        return bool(self.kernels or self.copies)
