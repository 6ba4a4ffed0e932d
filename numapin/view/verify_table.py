"""A report as a table and its findings. Pure.

Comes in: a `VerifyReport`. Goes out: one row a rank; then what was found, with evidence and remedy; or all of it in a
line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.console import Group
from rich.table import Table
from rich.text import Text

from numapin.base import cpu_set
from numapin.observe.model import PRIVATE, Role
from numapin.observe.report import VerifySeverity
from numapin.observe.verify import JUDGED, LOCKED, elsewhere, strays
from numapin.view.plan_table import gpu_cell

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rich.console import RenderableType

    from numapin.observe.model import MemoryKind
    from numapin.observe.report import RankReport, VerifyFinding, VerifyReport

_SHARED: Final = tuple(kind for kind in JUDGED if kind not in PRIVATE | LOCKED)
_COLUMNS: Final = (("private", PRIVATE), ("shared", _SHARED), ("pinned", LOCKED))
_VERDICT: Final = {True: "holds", False: "off plan", None: "unverified"}
_STYLE: Final = {
    VerifySeverity.ERROR: "bold red",
    VerifySeverity.UNVERIFIED: "bold yellow",
    VerifySeverity.WARNING: "bold yellow",
    VerifySeverity.NOTE: "bold",
}
_LEGEND: Final = (
    "threads: within the planned CPUs / all; memory: MiB on the planned nodes / all, without the page cache of files"
)


def verify_table(report: VerifyReport) -> RenderableType:
    """Return the table of ranks, its legend, and the findings."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading, right in (("rank", True), ("pid", True), ("GPU", False), ("node", True)):
        table.add_column(heading, justify="right" if right else "left", no_wrap=True)
    for heading in ("threads", "workers", *(name for name, _ in _COLUMNS)):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("plan")
    for rank in report.ranks:
        table.add_row(*_cells(rank), Text(_VERDICT[rank.holds], style="" if rank.holds else "bold red"))
    return Group(table, Text(_LEGEND, style="dim"), *findings_of(report))


def findings_of(report: VerifyReport, *, notes: bool = True) -> Iterator[Group]:
    """Return each finding with where it was seen and what to do; what several ranks have alike is said once."""
    groups: dict[tuple[VerifySeverity, str, str], list[tuple[int, VerifyFinding]]] = {}
    for rank in report.ranks:
        for finding in rank.findings:
            key = (finding.severity, finding.what, finding.remedy)
            groups.setdefault(key, []).append((rank.requested.local_rank, finding))
    for (severity, what, remedy), found in groups.items():
        if notes or severity is not VerifySeverity.NOTE:
            yield _finding(severity, what, remedy, found)


def summary(report: VerifyReport) -> str:
    """Return the verdict and what it was made from, in a line."""
    processes = [process for rank in report.ranks for process in rank.observed.processes]
    threads = sum(len(process.threads) for process in processes)
    size = sum(_sizes(rank, JUDGED)[1] for rank in report.ranks)
    verdict = {True: "the plan holds", False: "the plan does not hold", None: "nothing contradicts the plan"}
    return (
        f"{verdict[report.holds]}: {_count(len(report.ranks), 'rank')}, {_count(len(processes), 'process', 'es')}, "
        f"{_count(threads, 'thread')}, {size:.0f} MiB"
    )


def _cells(rank: RankReport) -> tuple[str, ...]:
    plan, observed = rank.requested, rank.observed
    num_threads = sum(len(process.threads) for process in observed.processes)
    num_workers = sum(process.role is Role.WORKER for process in observed.processes)
    return (
        str(plan.local_rank),
        str(observed.pid),
        gpu_cell(plan.gpu),
        "-" if plan.node is None else str(plan.node),
        f"{num_threads - len(strays(plan, observed))}/{num_threads}",
        str(num_workers),
        *(_memory_cell(rank, kinds) for _, kinds in _COLUMNS),
    )


def _memory_cell(rank: RankReport, kinds: Iterable[MemoryKind]) -> str:
    if any(process.role is Role.RANK and process.pages is None for process in rank.observed.processes):
        return "?"
    there, total = _sizes(rank, kinds)
    return f"{there:.0f}/{total:.0f}"


def _sizes(rank: RankReport, kinds: Iterable[MemoryKind]) -> tuple[float, float]:
    """Return the MiB on the planned nodes, and all."""
    by_node = rank.observed.bytes_by_node(kinds)
    total = sum(by_node.values())
    return (total - sum(elsewhere(rank.requested, by_node).values())) / 2**20, total / 2**20


def _finding(severity: VerifySeverity, what: str, remedy: str, found: list[tuple[int, VerifyFinding]]) -> Group:
    ranks = cpu_set.render(rank for rank, _ in found)
    first = Text(f"{severity}: ", style=_STYLE[severity]).append(f"rank {ranks}: {what}", style="not bold default")
    if severity is VerifySeverity.NOTE:
        return Group(first)
    seen = "; ".join(dict.fromkeys(finding.where for _, finding in found))
    return Group(first, Text(f"  seen:   {seen}"), Text(f"  remedy: {remedy}"))


def _count(number: int, what: str, ending: str = "s") -> str:
    return f"{number} {what}" + ("" if number == 1 else ending)
