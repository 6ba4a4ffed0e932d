"""One rank's trace, as far as loading, copying and computing are in it. Pure.

Comes in: what `reading` found. Goes out: frozen records. Times are microseconds from the start of the first step; what
the trace does not tell is None.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

HOST_TO_DEVICE: Final = "HtoD"
_LONG_CALL_US: Final = 50.0  # starting an asynchronous copy takes 5 to 20 us under the profiler


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Something that went on from `start` to `end`, in a `row`: a thread, a worker process or a stream."""

    start: float
    end: float
    name: str
    row: int | None = None

    @property
    def pair(self) -> tuple[float, float]:
        """Return both ends."""
        return self.start, self.end


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel(Span):
    """Work of a GPU; its stream is the row."""

    device: int | None

    @property
    def communicates(self) -> bool:
        """Return whether it is one of NCCL's (or RCCL's), which waits for other ranks."""
        return self.name.startswith("nccl")


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A copy as the GPU carried it out. `source` and `target` are kinds of memory: "Pageable", "Pinned", "Device".

    `call` is the host's call that asked for it, and `waits` are the calls in which the host, inside the same operator,
    then waited for it.
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
        """Return both ends."""
        return self.start, self.end

    @property
    def blocking(self) -> bool | None:
        """Return whether the host stood still for it: it waited, or its call lasted about as long as the copy."""
        if self.call is None:
            return None
        called_us = self.call.end - self.call.start
        return bool(self.waits) or (called_us > _LONG_CALL_US and called_us > 0.5 * (self.end - self.start))

    @property
    def blocked(self) -> tuple[tuple[float, float], ...]:
        """Return when the host stood still for it."""
        return tuple(span.pair for span in (self.call, *self.waits) if span) if self.blocking else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What one rank did in the traced steps. `restart` counts its lives from 0.

    `waits` are the loop's `next()` on a DataLoader, `loads` the making of batches wherever it went on, `pins` the
    pinning of batches; `loop_pins` is that part of it that the loop's own thread did. `operators` are the CPU's.
    `notes` say what the trace does not tell.
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
    notes: tuple[str, ...]

    @property
    def on_gpu(self) -> bool:
        """Return whether a GPU did anything in it."""
        return bool(self.kernels or self.copies)
