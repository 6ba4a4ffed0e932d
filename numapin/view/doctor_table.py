"""A doctor's report as text. Pure.

Comes in: a `DoctorReport`. Goes out: the findings by severity, the worst first, each with cost, source and remedy; one
line for each check that is well or got no answer; and the advice on pinning.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Final

from rich.console import Group
from rich.constrain import Constrain
from rich.table import Table
from rich.text import Text

from numapin.doctor.model import DoctorSeverity

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rich.console import RenderableType

    from numapin.doctor.advice import Advice
    from numapin.doctor.model import DoctorFinding, DoctorReport

    _Row = tuple[str, RenderableType]  # the name of a check, and the rest

_STYLES: Final = {
    DoctorSeverity.ERROR: "bold red",
    DoctorSeverity.WARNING: "bold yellow",
    DoctorSeverity.NOTE: "bold",
    None: "bold",
    DoctorSeverity.OK: "bold green",
}
_WIDTH: Final = 100
_NAME_WIDTH: Final = 18


def doctor_table(report: DoctorReport) -> RenderableType:
    """Return the whole report, at most 100 columns wide."""
    parts = chain.from_iterable(_section(severity, report.findings) for severity in _STYLES)
    return Group(*parts, Text("pinned memory", style="bold"), _table([_advice(report.advice)]))


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


def _advice(advice: Advice) -> _Row:
    return advice.verdict or "", Group(Text(advice.reason), *_remedy(advice.remedy))


def _remedy(remedy: str | None) -> Iterator[Text]:
    if remedy:
        yield Text(f"fix: {remedy}", style="cyan")
