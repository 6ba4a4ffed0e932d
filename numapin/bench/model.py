"""A benchmark as data, and the arithmetic of medians, spreads and ratios. Pure.

Comes in: cases, and the runs that the harness made of them. Goes out: a `BenchReport` (schema numapin.bench/1).
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

SCHEMA: Final = "numapin.bench/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One of those that a case compares. `specs` are given to one process each, which all measure at the same time."""

    name: str
    specs: tuple[Mapping[str, object], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What all of its peers do. `about` is shown and goes into the result; `skipped` says why it cannot run here.

    Cases of one `group` are a sweep over `num_bytes`. Neighbours of one `session` are measured by the same processes,
    which is for what needs no fresh start: seconds a case less. Without one every peer of every repeat has its own.
    """

    name: str
    about: str
    peers: tuple[Peer, ...] = ()
    skipped: str | None = None
    group: str | None = None
    num_bytes: int | None = None
    session: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A figure called `name`: a peer's `figure` over that of the peer `against`, within the same repeat."""

    name: str
    figure: str
    against: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """Cases, the module that measures one peer of one of them, and how the figures are put together.

    With several processes at once the figures named in `summed` are added up; of any other the highest counts.
    """

    name: str
    module: str
    cases: tuple[Case, ...]
    comparisons: tuple[Comparison, ...] = ()
    summed: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One peer in one repeat. `details` are what its processes said besides, one each; nothing where it was skipped."""

    case: str
    peer: str
    repeat: int
    figures: Mapping[str, float] = field(default_factory=dict)
    details: tuple[Mapping[str, object], ...] = ()
    skipped: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A figure over the repeats: its median, its lowest and highest value, and all of them in order of the repeats."""

    median: float
    low: float
    high: float
    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarise at least one value."""
        return cls(median=statistics.median(values), low=min(values), high=max(values), values=tuple(values))


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerResult:
    """A peer's figures over its runs. `skipped` is why it did not run, or why it ran no further."""

    name: str
    num_runs: int
    figures: Mapping[str, Spread]
    details: tuple[Mapping[str, object], ...]
    skipped: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """A case with what its peers reached, in their order."""

    name: str
    about: str
    peers: tuple[PeerResult, ...]
    skipped: str | None
    group: str | None = None
    num_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """All of a benchmark, with what its figures depend on."""

    benchmark: str
    command: tuple[str, ...]
    machine: Mapping[str, object]
    settings: Mapping[str, object]
    cases: tuple[CaseResult, ...]

    def to_json(self) -> dict[str, object]:
        """Return the JSON form."""
        return {"schema": SCHEMA, **asdict(self)}


def combine(figures: Sequence[Mapping[str, float]], *, summed: frozenset[str]) -> dict[str, float]:
    """Return the figures of processes that ran at once as one: the sum of those in `summed`, else the highest."""
    names = dict.fromkeys(name for own in figures for name in own)
    return {name: (sum if name in summed else max)([own[name] for own in figures if name in own]) for name in names}


def summarise(benchmark: Benchmark, runs: Iterable[Run]) -> tuple[CaseResult, ...]:
    """Return every case with its peers' medians and spreads; a peer with no run yet is not in it."""
    made = tuple(runs)
    return tuple(
        CaseResult(
            name=case.name,
            about=case.about,
            skipped=case.skipped,
            group=case.group,
            num_bytes=case.num_bytes,
            peers=_peers(case, tuple(run for run in made if run.case == case.name), benchmark.comparisons),
        )
        for case in benchmark.cases
    )


def _peers(case: Case, runs: tuple[Run, ...], comparisons: tuple[Comparison, ...]) -> tuple[PeerResult, ...]:
    by_peer = {peer.name: tuple(run for run in runs if run.peer == peer.name) for peer in case.peers}
    return tuple(
        PeerResult(
            name=name,
            num_runs=sum(run.skipped is None for run in own),
            figures=_spreads(own, by_peer, comparisons),
            details=tuple(detail for run in own for detail in run.details),
            skipped=next((run.skipped for run in own if run.skipped is not None), None),
        )
        for name, own in by_peer.items()
        if own
    )


def _spreads(
    own: tuple[Run, ...], by_peer: Mapping[str, tuple[Run, ...]], comparisons: tuple[Comparison, ...]
) -> dict[str, Spread]:
    names = dict.fromkeys(name for run in own for name in run.figures)
    values = {name: [run.figures[name] for run in own if name in run.figures] for name in names}
    for compared in comparisons:
        values[compared.name] = _ratios(own, by_peer.get(compared.against, ()), compared.figure)
    return {name: Spread.of(found) for name, found in values.items() if found}


def _ratios(own: tuple[Run, ...], others: tuple[Run, ...], figure: str) -> list[float]:
    """Return own over other for each repeat in which both have the figure, so that a slow minute slows both."""
    base = {run.repeat: run.figures[figure] for run in others if run.figures.get(figure)}
    return [run.figures[figure] / base[run.repeat] for run in own if figure in run.figures and run.repeat in base]
