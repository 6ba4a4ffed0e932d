"""A doctor's report as text."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import TYPE_CHECKING, Final

from rich.console import Group
from rich.constrain import Constrain
from rich.table import Table
from rich.text import Text

from numapin.base.text import counted
from numapin.doctor.check import DoctorSeverity

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rich.console import RenderableType

    from numapin.doctor.model import DoctorFinding, DoctorReport

    _Row = tuple[str, RenderableType]  # the name of a check, and the rest

_STYLES: Final = {
    DoctorSeverity.ERROR: "bold red",
    DoctorSeverity.WARNING: "bold yellow",
    DoctorSeverity.NOTE: "bold",
    None: "bold",
    DoctorSeverity.OK: "bold green",
}
_TO_MEND: Final = (DoctorSeverity.ERROR, DoctorSeverity.WARNING, DoctorSeverity.NOTE)
_WIDTH: Final = 100
_NAME_WIDTH: Final = 18


def doctor_table(report: DoctorReport) -> RenderableType:
    """Return the whole report, at most 100 columns wide; the first line is the summary."""
    parts = chain.from_iterable(_section(severity, report.findings) for severity in _STYLES)
    summary = Constrain(Text(summary_line(report), style="bold"), _WIDTH)
    return Group(summary, Text(), *parts, Text("pinned memory", style="bold"), _table([("", Text(report.pinnable))]))


def summary_line(report: DoctorReport) -> str:
    """Return the number of findings by severity, and the first thing to do."""
    to_mend = sorted(filter(_is_to_mend, report.findings), key=_rank)
    line = f"{report.host or report.source}: {', '.join(_counts(report.findings))}"
    return f"{line}. Start with: {to_mend[0].check}" if to_mend else line


def _is_to_mend(finding: DoctorFinding) -> bool:
    return finding.severity in _TO_MEND


def _rank(finding: DoctorFinding) -> int:
    """Return the place of a finding's severity, the worst first."""
    return list(_STYLES).index(finding.severity)


def _counts(findings: Iterable[DoctorFinding]) -> Iterator[str]:
    """Yield the number of findings of each severity that occurs."""
    counts = Counter(finding.severity for finding in findings)
    found = [counted(counts[severity], severity) for severity in _TO_MEND if counts[severity]]
    yield from found or ["nothing to fix"]
    yield f"{counted(counts[DoctorSeverity.OK], 'check')} ok"
    if counts[None]:
        yield f"{counts[None]} without an answer"


def _section(severity: DoctorSeverity | None, all_findings: Iterable[DoctorFinding]) -> tuple[RenderableType, ...]:
    """Return the findings of one severity; those with nothing to do take one line each."""
    findings = [finding for finding in all_findings if finding.severity is severity]
    if not findings:
        return ()
    row = _short if severity in (DoctorSeverity.OK, None) else _full
    heading = f"{severity or 'unknown'} ({len(findings)})"
    return Text(heading, style=_STYLES[severity]), _table(map(row, findings)), Text()


def _table(rows: Iterable[_Row]) -> RenderableType:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True, width=_NAME_WIDTH)
    table.add_column(overflow="fold", ratio=1)
    for name, text in rows:
        table.add_row(f"  {name}", text)
    return Constrain(table, _WIDTH)


def _short(finding: DoctorFinding) -> _Row:
    return finding.check, Text(finding.what)


def _full(finding: DoctorFinding) -> _Row:
    facts = [Text(f"{label}: {text}", style="dim") for label, text in (("why", finding.why), ("seen", finding.where))]
    return finding.check, Group(Text(finding.what), *facts, *_remedy(finding.remedy))


def _remedy(remedy: str | None) -> Iterator[Text]:
    if remedy:
        yield Text(f"fix: {remedy}", style="cyan")
