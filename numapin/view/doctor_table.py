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
    counts = Counter(finding.severity for finding in report.findings)
    found = [counted(counts[severity], severity) for severity in _TO_MEND if counts[severity]] or ["nothing to fix"]
    found.append(f"{counted(counts[DoctorSeverity.OK], 'check')} ok")
    if counts[None]:
        found.append(f"{counts[None]} without an answer")
    line = f"{report.host or report.source}: {', '.join(found)}"
    # The worst first.
    to_mend = (finding for severity in _TO_MEND for finding in report.findings if finding.severity is severity)
    first = next(to_mend, None)
    return f"{line}. Start with: {first.check}" if first else line


def _section(severity: DoctorSeverity | None, all_findings: Iterable[DoctorFinding]) -> Iterator[RenderableType]:
    """Yield the findings of one severity; those with nothing to do take one line each."""
    findings = [finding for finding in all_findings if finding.severity is severity]
    if findings:
        row = _full if severity in _TO_MEND else lambda finding: (finding.check, Text(finding.what))
        yield Text(f"{severity or 'unknown'} ({len(findings)})", style=_STYLES[severity])
        yield _table(map(row, findings))
        yield Text()


def _table(rows: Iterable[_Row]) -> RenderableType:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True, width=_NAME_WIDTH)
    table.add_column(overflow="fold", ratio=1)
    for name, text in rows:
        table.add_row(f"  {name}", text)
    return Constrain(table, _WIDTH)


def _full(finding: DoctorFinding) -> _Row:
    facts = [Text(f"{label}: {text}", style="dim") for label, text in (("why", finding.why), ("seen", finding.where))]
    remedy = [Text(f"fix: {finding.remedy}", style="cyan")] if finding.remedy else []
    return finding.check, Group(Text(finding.what), *facts, *remedy)
