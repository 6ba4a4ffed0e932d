"""Benchmarks and their results as data: medians, spreads and ratios."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

SCHEMA: Final = "numapin.bench/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One of the things that a case compares. Each spec goes to one process; all of them measure at the same time."""

    name: str
    specs: tuple[Mapping[str, object], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The task that peers are compared on. `about` describes it; `skipped` is the reason if it cannot run here.

    Cases of one `group` are a sweep over `num_bytes`. Consecutive cases of one `session` are measured by the same
    processes, which saves seconds per case if no fresh start is needed. Without a session, every peer of every repeat
    has its own processes.
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
    """A ratio called `name`: the `figure` of a peer divided by the one of the peer `against`, in the same repeat."""

    name: str
    figure: str
    against: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question that a benchmark answers: is a peer better than the peer `against`, by `figure`?"""

    subject: str  # the choice in question, such as "pin"; "{own}" in it stands for the peer's name
    things: str  # what the figure is about, with a verb: "copies are"
    figure: str
    own: tuple[str, ...]  # the peers in question; in each case, the first one that was measured counts
    against: str
    less_is_better: bool = False  # whether the figure is a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A figure, the heading above it, its number format, and whether its spread is shown.

    `meaning` explains the heading in the legend; "" if the heading says it all.
    """

    figure: str
    heading: str
    form: str = ".3g"
    spread: bool = False
    meaning: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """Cases, the module that measures one peer of a case, the rules for combining figures, and the table.

    If several processes measure at once, figures in `summed` are added; of all others, the highest counts. The verdict
    answers the first of `questions` whose peers were measured. `settings` are the options that the report names.
    """

    name: str
    module: str
    cases: tuple[Case, ...]
    comparisons: tuple[Comparison, ...] = ()
    summed: frozenset[str] = frozenset()
    questions: tuple[Question, ...] = ()
    settings: Mapping[str, object] = field(default_factory=dict)
    columns: tuple[Column, ...] = ()
    legend: str = "median [lowest, highest]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One peer in one repeat. `details` has one entry per process; a skipped run has neither figures nor details."""

    case: str
    peer: str
    repeat: int
    figures: Mapping[str, float] = field(default_factory=dict)
    details: tuple[Mapping[str, object], ...] = ()
    skipped: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A figure over the repeats: median, lowest and highest value, and all values in the order of the repeats."""

    median: float
    low: float
    high: float
    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarize at least one value."""
        return cls(median=statistics.median(values), low=min(values), high=max(values), values=tuple(values))


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerResult:
    """A peer's figures over its runs. `skipped` is the reason if it did not run, or stopped running."""

    name: str
    num_runs: int
    figures: Mapping[str, Spread]
    details: tuple[Mapping[str, object], ...]
    skipped: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """A case with the results of its peers, in their order."""

    name: str
    about: str
    peers: tuple[PeerResult, ...]
    skipped: str | None
    group: str | None = None
    num_bytes: int | None = None


class BenchAnswer(StrEnum):
    """The answer to a benchmark's question."""

    YES = "yes"
    NO = "no"
    DEPENDS = "depends"
    """Yes in some cases, no in others."""
    SAME = "no difference"
    UNKNOWN = "cannot tell"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchVerdict:
    """The answer to a benchmark's question, and the whole verdict in one line."""

    answer: BenchAnswer
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """The results of a benchmark, with the command, machine and settings that they depend on.

    `is_complete` is False if the benchmark was stopped early.
    """

    benchmark: str
    command: tuple[str, ...]
    machine: Mapping[str, object]
    settings: Mapping[str, object]
    cases: tuple[CaseResult, ...]
    is_complete: bool = True
    verdict: BenchVerdict

    def to_json(self) -> dict[str, object]:
        """Return the JSON form."""
        return {"schema": SCHEMA, **asdict(self)}


def summarize(benchmark: Benchmark, runs: Iterable[Run]) -> tuple[CaseResult, ...]:
    """Return every case with its peers' medians and spreads, without peers that have no run yet."""
    runs_of: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for run in runs:
        runs_of[run.case, run.peer].append(run)
    results = []
    for case in benchmark.cases:
        peers = []
        for peer in case.peers:
            own = runs_of[case.name, peer.name]
            if not own:
                continue
            values: dict[str, list[float]] = defaultdict(list)
            for run in own:
                for name, value in run.figures.items():
                    values[name].append(value)
            # A ratio is formed within each repeat that has both sides: a slow minute slows both alike.
            for compared in benchmark.comparisons:
                others = runs_of[case.name, compared.against]
                base = {run.repeat: run.figures[compared.figure] for run in others if run.figures.get(compared.figure)}
                both = (run for run in own if compared.figure in run.figures and run.repeat in base)
                values[compared.name] = [run.figures[compared.figure] / base[run.repeat] for run in both]
            reasons = [run.skipped for run in own if run.skipped is not None]
            peers.append(
                PeerResult(
                    name=peer.name,
                    num_runs=len(own) - len(reasons),
                    figures={name: Spread.of(found) for name, found in values.items() if found},
                    details=tuple(detail for run in own for detail in run.details),
                    skipped=reasons[0] if reasons else None,
                )
            )
        results.append(
            CaseResult(
                name=case.name,
                about=case.about,
                peers=tuple(peers),
                skipped=case.skipped,
                group=case.group,
                num_bytes=case.num_bytes,
            )
        )
    return tuple(results)
