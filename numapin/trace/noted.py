"""What the hook of a traced rank noted about its script: loaders, epochs, the optimizer, stack samples.

Times are in microseconds on the trace's clock.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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

    def earlier(self, by_us: float) -> ScriptNotes:
        """Return the same with earlier times."""
        return replace(
            self,
            epochs=tuple(epoch.earlier(by_us) for epoch in self.epochs),
            ends=tuple(end.earlier(by_us) for end in self.ends),
            samples=tuple(replace(sample, at=sample.at - by_us) for sample in self.samples),
        )

    @property
    def loader(self) -> LoaderUse | None:
        """The longest loader, which is usually the one of the training: a stream, else the one with most batches."""
        return max(self.loaders, key=_length, default=None)

    @property
    def uses_numapin(self) -> bool:
        """True if numapin's data path is in use."""
        return any(loader.is_numapin for loader in self.loaders)

    @property
    def place(self) -> str:
        """The rank's CPUs and nodes in words; "" if unknown."""
        nodes = f", node {self.origin.nodes}" if self.origin.nodes else ""
        return f"CPUs {self.origin.cpus}{nodes}" if self.origin.cpus else ""


def _length(loader: LoaderUse) -> float:
    return inf if loader.num_batches is None else loader.num_batches


def read_noted(value: object, base_ns: float) -> ScriptNotes:
    """Read the metadata; skip what is malformed."""
    if not isinstance(value, dict):
        return ScriptNotes()
    on_cpu = value.get("updates_on_cpu")
    return ScriptNotes(
        origin=_origin(value),
        loaders=tuple(map(_loader, _dicts(value.get("loaders")))),
        epochs=_epochs(value.get("epochs"), base_ns),
        ends=_epochs(value.get("ends"), base_ns),
        samples=_samples(value, base_ns),
        optimizer=_text(value.get("optimizer")),
        updates_on_cpu=on_cpu if isinstance(on_cpu, bool) else None,
    )


def _origin(value: dict[str, Any]) -> Origin:
    texts: dict[str, Any] = {name: _text(value.get(name)) for name in ("host", "cpus", "nodes")}
    counts: dict[str, Any] = {
        name: _count(value.get(name)) for name in ("num_cpus", "num_threads", "traced_ms", "other_cpu_ms")
    }
    return Origin(**texts, **counts)


def _loader(value: dict[str, Any]) -> LoaderUse:
    return LoaderUse(
        is_numapin=value.get("is_numapin") is True,
        num_workers=_count(value.get("num_workers")) or 0,
        is_persistent=value.get("is_persistent") is True,
        delivers_on_gpu=value.get("delivers_on_gpu") is True,
        num_batches=_count(value.get("num_batches")),
    )


def _epochs(value: object, base_ns: float) -> tuple[Span, ...]:
    """Return the spans of [loader, start, end], in the order of their starts."""
    rows = sorted(_rows(value, 3), key=lambda row: row[1])
    return tuple(
        Span(start=(start - base_ns) / 1000, end=(max(end, start) - base_ns) / 1000, name="epoch", row=loader)
        for loader, start, end in rows
    )


def _samples(value: dict[str, Any], base_ns: float) -> tuple[StackSample, ...]:
    """Return the samples [time, stack, running], with stacks [own, innermost]."""
    stacks = [_stack(stack) for stack in _list(value.get("stacks"))]
    return tuple(
        StackSample(
            at=(at - base_ns) / 1000,
            own=stacks[stack][0],
            innermost=stacks[stack][1],
            is_running=None if running < 0 else bool(running),
        )
        for at, stack, running in sorted(_rows(value.get("samples"), 3))
        if 0 <= stack < len(stacks)
    )


def _stack(value: object) -> tuple[str, str]:
    names = [_text(name) or _UNKNOWN for name in _list(value)]
    return (names[0], names[1]) if len(names) == 2 else (_UNKNOWN, _UNKNOWN)


def _rows(value: object, length: int) -> list[list[int]]:
    """Return the rows that are lists of this many integers."""
    rows = (row for row in _list(value) if isinstance(row, list) and len(row) == length)
    return [row for row in rows if all(type(cell) is int and abs(cell) < _LIMIT for cell in row)]


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _dicts(value: object) -> list[dict[str, Any]]:
    return [one for one in _list(value) if isinstance(one, dict)]


def _text(value: object) -> str:
    return printable(value)[:_LONGEST] if isinstance(value, str) else ""


def _count(value: object) -> int | None:
    return value if type(value) is int and 0 <= value < _LIMIT else None
