"""A doctor's report as text."""

from __future__ import annotations

from collections import Counter
from textwrap import shorten
from typing import TYPE_CHECKING, Final

from rich.console import Group
from rich.constrain import Constrain
from rich.table import Table
from rich.text import Text

from numapin.base.text import counted
from numapin.doctor.check import DoctorSeverity

if TYPE_CHECKING:
    from rich.console import RenderableType

    from numapin.doctor.model import DoctorReport

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
_MOST_CHARS: Final = 70  # of a finding in the first line


def doctor_table(report: DoctorReport) -> RenderableType:
    """Return the whole report, at most 100 columns wide; the first line counts findings and has the worst."""
    counts = Counter(finding.severity for finding in report.findings)
    found = [counted(counts[severity], severity) for severity in _TO_MEND if counts[severity]] or ["nothing to fix"]
    found.append(f"{counted(counts[DoctorSeverity.OK], 'check')} ok")
    if counts[None]:
        found.append(f"{counts[None]} without an answer")
    summary = f"{report.host or report.source}: {', '.join(found)}"
    worst_first = (finding for severity in _TO_MEND for finding in report.findings if finding.severity is severity)
    if first := next(worst_first, None):
        summary += f". Start with {first.check}: {shorten(first.what, _MOST_CHARS, placeholder=' …')}"
    parts: list[RenderableType] = [Constrain(Text(summary, style="bold"), _WIDTH), Text()]
    for severity, style in _STYLES.items():
        findings = [finding for finding in report.findings if finding.severity is severity]
        if not findings:
            continue
        rows: list[tuple[str, RenderableType]] = []
        for finding, following in zip(findings, [*findings[1:], None], strict=True):
            shown = [Text(finding.what)]
            is_last_of_check = following is None or following.check != finding.check
            is_explained = severity in _TO_MEND and is_last_of_check  # the others take one line each
            if is_explained:
                shown += [Text(f"why: {finding.why}", style="dim"), Text(f"seen: {finding.where}", style="dim")]
            if is_explained and finding.remedy:
                shown.append(Text(f"fix: {finding.remedy}", style="cyan"))
            rows.append((finding.check, Group(*shown)))
        parts += [Text(f"{severity or 'unknown'} ({len(findings)})", style=style), _table(rows), Text()]
    return Group(*parts, Text("pinned memory", style="bold"), _table([("", Text(report.pinnable))]))


def _table(rows: list[tuple[str, RenderableType]]) -> RenderableType:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True, width=_NAME_WIDTH)
    table.add_column(overflow="fold", ratio=1)
    for name, text in rows:
        table.add_row(f"  {name}", text)
    return Constrain(table, _WIDTH)
