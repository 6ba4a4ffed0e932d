"""A doctor's report for people. Pure.

Comes in: a `DoctorReport`. Goes out: findings grouped by severity, the worst first, with reason, source and remedy; a
line each for what is well and for what could not be told; and the advice on pinning.
"""

from __future__ import annotations

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

_STYLES: Final = {
    DoctorSeverity.ERROR: "bold red",
    DoctorSeverity.WARNING: "bold yellow",
    DoctorSeverity.NOTE: "bold",
    None: "bold",
}
_WIDTH: Final = 100
_NAME_WIDTH: Final = 18


def doctor_table(report: DoctorReport) -> RenderableType:
    """Return the whole report, at most 100 columns wide."""
    parts: list[RenderableType] = []
    for severity, style in _STYLES.items():
        group = [finding for finding in report.findings if finding.severity is severity]
        if group:
            parts += [Text(f"{severity.value if severity else 'not known'} ({len(group)})", style=style)]
            parts += [_table(map(_row, group) if severity is None else map(_full, group)), Text()]
    well = [finding for finding in report.findings if finding.severity is DoctorSeverity.OK]
    parts += [Text(f"ok ({len(well)})", style="bold green"), _table(map(_row, well)), Text()]
    return Group(*parts, Text("should you pin?", style="bold"), _table([_advice(report.advice)]))


def _table(rows: Iterable[tuple[str, RenderableType]]) -> RenderableType:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True, width=_NAME_WIDTH)
    table.add_column(overflow="fold", ratio=1)
    for name, text in rows:
        table.add_row(f"  {name}", text)
    return Constrain(table, _WIDTH)


def _row(finding: DoctorFinding) -> tuple[str, Text]:
    return finding.check, Text(finding.what)


def _full(finding: DoctorFinding) -> tuple[str, RenderableType]:
    facts = _dim(("why", finding.why), ("from", finding.where))
    return finding.check, Group(Text(finding.what), *facts, *_remedy(finding.remedy))


def _advice(advice: Advice) -> tuple[str, RenderableType]:
    return advice.verdict.value if advice.verdict else "", Group(Text(advice.reason), *_remedy(advice.remedy))


def _dim(*lines: tuple[str, str]) -> Iterator[Text]:
    yield from (Text(f"{word}: {text}", style="dim") for word, text in lines)


def _remedy(remedy: str | None) -> Iterator[Text]:
    if remedy:
        yield Text(f"do: {remedy}", style="cyan")
