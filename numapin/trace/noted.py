"""Reader of the hook's notes on a traced rank: loaders, epochs, optimizer, stack samples.

Times are in microseconds on the trace's clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any, Final

from numapin.base.text import printable
from numapin.trace.records import Span

_LIMIT: Final = 2**63
_LONGEST: Final = 200  # characters of a name
_UNKNOWN: Final = "?"


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

    `is_running` is false if the thread slept or waited; None if that is unknown.
    """

    at: float
    own: str
    innermost: str
    is_running: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a trace was made. `cpus` is a Linux list; "" and None are unknown.

    `other_cpu_ms` is the CPU time of other programs on these CPUs within `traced_ms`.
    """

    host: str = ""
    cpus: str = ""
    nodes: str = ""
    num_cpus: int | None = None
    num_threads: int | None = None
    traced_ms: int | None = None
    other_cpu_ms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptNotes:
    """Everything that the hook noted.

    `epochs` are the calls of `iter()` on loaders with workers; `row` is the loader. `ends` are the calls of `next()`
    that ended an epoch.
    `optimizer` is the class whose steps count; `updates_on_cpu` is true if all of its parameters are in host memory.
    """

    origin: Origin = Origin()
    loaders: tuple[LoaderUse, ...] = ()
    epochs: tuple[Span, ...] = ()
    ends: tuple[Span, ...] = ()
    samples: tuple[StackSample, ...] = ()
    optimizer: str = ""
    updates_on_cpu: bool | None = None

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
        nodes = f", node {self.origin.nodes}" if self.origin.nodes else ""
        return f"CPUs {self.origin.cpus}{nodes}" if self.origin.cpus else ""


def read_noted(value: object, zero_ns: int) -> ScriptNotes:
    """Read the metadata; skip what is malformed. Times count from `zero_ns`, in ns since 1970."""
    if not isinstance(value, dict):
        return ScriptNotes()
    stacks = [[_text(name) or _UNKNOWN for name in _list(stack)] for stack in _list(value.get("stacks"))]
    samples = []
    for at, number, running in sorted(_rows(value.get("samples"))):
        if 0 <= number < len(stacks):
            stack = stacks[number] if len(stacks[number]) == 2 else (_UNKNOWN, _UNKNOWN)
            is_running = None if running < 0 else bool(running)
            at_us = (at - zero_ns) / 1000
            samples.append(StackSample(at=at_us, own=stack[0], innermost=stack[1], is_running=is_running))
    on_cpu = value.get("updates_on_cpu")
    return ScriptNotes(
        origin=Origin(
            host=_text(value.get("host")),
            cpus=_text(value.get("cpus")),
            nodes=_text(value.get("nodes")),
            num_cpus=_count(value.get("num_cpus")),
            num_threads=_count(value.get("num_threads")),
            traced_ms=_count(value.get("traced_ms")),
            other_cpu_ms=_count(value.get("other_cpu_ms")),
        ),
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
        epochs=_epochs(value.get("epochs"), zero_ns),
        ends=_epochs(value.get("ends"), zero_ns),
        samples=tuple(samples),
        optimizer=_text(value.get("optimizer")),
        updates_on_cpu=on_cpu if isinstance(on_cpu, bool) else None,
    )


def _epochs(value: object, zero_ns: int) -> tuple[Span, ...]:
    """Return the spans of [loader, start, end], in the order of their starts."""
    rows = sorted(_rows(value), key=lambda row: row[1])
    return tuple(
        Span(start=(start - zero_ns) / 1000, end=(max(end, start) - zero_ns) / 1000, name="epoch", row=loader)
        for loader, start, end in rows
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
