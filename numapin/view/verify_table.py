"""A report of `numapin verify` as a table and findings."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Final

from rich.console import Group
from rich.table import Table
from rich.text import Text

from numapin.base.text import counted
from numapin.observe.model import PRIVATE, Role
from numapin.observe.verify import JUDGED, LOCKED, VerifySeverity, elsewhere
from numapin.view.machine import known, rank_names
from numapin.view.plan_table import gpu_cell

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rich.console import RenderableType

    from numapin.observe.model import MemoryKind
    from numapin.observe.verify import RankReport, VerifyFinding, VerifyReport

_SHARED: Final = tuple(kind for kind in JUDGED if kind not in PRIVATE | LOCKED)
_COLUMNS: Final = (("private", PRIVATE), ("shared", _SHARED), ("pinned", LOCKED))
_VERDICT: Final = {True: "ok", False: "off plan", None: "unverified"}
_SUMMARY: Final = {True: "the plan holds", False: "the plan does not hold", None: "nothing contradicts the plan"}
_STYLE: Final = {
    VerifySeverity.ERROR: "bold red",
    VerifySeverity.UNVERIFIED: "bold yellow",
    VerifySeverity.WARNING: "bold yellow",
    VerifySeverity.NOTE: "bold",
}
_LEGEND: Final = "threads: on planned CPUs / total; memory: MiB on planned nodes / total, excluding file cache"


def verify_table(report: VerifyReport) -> RenderableType:
    """Return the table of ranks, its legend, and the findings."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("rank", "pid", "GPU", "node", "threads", "workers", *dict(_COLUMNS)):
        table.add_column(heading, justify="left" if heading == "GPU" else "right", overflow="fold")
    table.add_column("plan", overflow="fold")
    for rank in report.ranks:
        plan, observed = rank.requested, rank.observed
        num_threads = sum(len(process.threads) for process in observed.processes)
        num_workers = sum(process.role is Role.WORKER for process in observed.processes)
        is_hidden = any(process.role is Role.RANK and process.pages is None for process in observed.processes)
        sizes = [_sizes_mib(rank, kinds) for _, kinds in _COLUMNS]
        cells = (
            str(plan.local_rank),
            str(observed.pid),
            gpu_cell(plan.gpu),
            known(plan.node, unknown="-"),
            f"{num_threads - rank.num_off_plan}/{num_threads}",
            str(num_workers),
            *("?" if is_hidden else f"{planned:.0f}/{total:.0f}" for planned, total in sizes),
        )
        table.add_row(*cells, Text(_VERDICT[rank.holds], style="" if rank.holds else "bold red"))
    return Group(table, Text(_LEGEND, style="dim"), *findings_of(report))


def findings_of(report: VerifyReport, *, notes: bool = True) -> Iterator[Group]:
    """Yield each finding with where it was seen and what to do; ranks with the same finding share one."""
    groups: dict[tuple[str, ...], list[tuple[int, VerifyFinding]]] = {}
    for rank in report.ranks:
        for finding in rank.findings:
            same = groups.setdefault((finding.severity, finding.what, finding.remedy), [])
            same.append((rank.requested.local_rank, finding))
    for found in groups.values():
        ranks, first = rank_names({number for number, _ in found}), found[0][1]
        title = Text(f"{first.severity}: ", style=_STYLE[first.severity])
        title.append(f"{ranks}: {first.what}", style="not bold default")
        if first.severity is not VerifySeverity.NOTE:
            seen = "; ".join(dict.fromkeys(finding.where for _, finding in found))
            yield Group(title, Text(f"  seen: {seen}"), Text(f"  fix: {first.remedy}"))
        elif notes:
            yield Group(title)


def summary(report: VerifyReport) -> str:
    """Return the verdict and what was checked, in one line."""
    processes = list(chain.from_iterable(rank.observed.processes for rank in report.ranks))
    num_threads = sum(len(process.threads) for process in processes)
    size_mib = sum(_sizes_mib(rank, JUDGED)[1] for rank in report.ranks)
    counts = (counted(len(report.ranks), "rank"), counted(len(processes), "process"), counted(num_threads, "thread"))
    return f"{_SUMMARY[report.holds]}: {', '.join(counts)}, {size_mib:.0f} MiB"


def _sizes_mib(rank: RankReport, kinds: Iterable[MemoryKind]) -> tuple[float, float]:
    by_node = rank.observed.bytes_by_node(kinds)
    total = sum(by_node.values())
    remote = sum(elsewhere(rank.requested, by_node).values())
    return (total - remote) / 2**20, total / 2**20
