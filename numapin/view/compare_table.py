"""A report of `numapin compare` as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.console import Group
from rich.table import Table
from rich.text import Text

from numapin.base import formats
from numapin.base.stats import Verdict
from numapin.base.text import counted
from numapin.compare.report import verdict_lines
from numapin.view.bench_table import machine_in_words

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from numapin.compare.report import CompareReport, VariantResult

# Figure -> heading, factor, format, and what the legend says.
OTHERS: Final = {
    "samples_per_s": ("samples/s", 1.0, ",.0f", ""),
    "wait_share": ("waits", 1.0, ".1%", "waits: share of time waiting for batches"),
    "startup_s": ("start s", 1.0, ".1f", "start: until the first step"),
    "cpu_s_per_step": ("CPU ms/step", 1e3, ".1f", ""),
    "other_cpus": ("others", 1.0, ".1f", "others: CPUs used by other programs"),
}
_STYLES: Final = {
    Verdict.FASTER: "bold green",
    Verdict.SLOWER: "bold red",
    Verdict.NO_DIFFERENCE: "bold",
    Verdict.UNKNOWN: "bold yellow",
    Verdict.UNSETTLED: "bold yellow",
}


def compare_table(report: CompareReport) -> RenderableType:
    """Return the machine, the tables, and a line per variant."""
    parts: list[RenderableType] = [Text(machine_in_words(report.machine))]
    for variant in report.variants:
        # A quoted assignment would be a command's name to a shell.
        assignments = [f"{name}={formats.quote(value)}" for name, value in variant.variables.items()]
        command = " ".join([*assignments, formats.quote_all(variant.command[len(assignments) :])])
        parts.append(Text(f"{variant.name}: ", style="bold").append(command, style="not bold"))
    if report.measured:
        shown = [name for name in OTHERS if any(name in variant.figures for variant in report.measured)]
        parts += [Text(report.steps_in_words), Text(), _steps(report)]
        if shown:
            table = _table("variant", *(OTHERS[name][0] for name in shown))
            for variant in report.measured:
                table.add_row(variant.name, *(_figure_text(variant, name) for name in shown))
            parts += [Text(), table]
        legend = "; ".join(filter(None, (OTHERS[name][3] for name in shown)))
        if legend:
            parts.append(Text(legend, style="dim"))
    return Group(*parts, Text(), *_outcomes(report))


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, heading in enumerate(headings):
        table.add_column(Text(heading), justify="left" if number == 0 else "right", no_wrap=number > 0, overflow="fold")
    return table


def _steps(report: CompareReport) -> Table:
    against = f"x {report.baseline}"
    table = _table("variant", "runs", "step ms [lowest, highest]", against, "99 % interval")
    for variant in report.measured:
        ratio, step = variant.ratio, variant.figures["step_s"]
        digits = 2 if step.median < 0.1 else 1
        median, low, high = (f"{value * 1000:.{digits}f}" for value in (step.median, step.low, step.high))
        times = "1" if variant.name == report.baseline else "-"  # "-": it counts other things as steps
        interval = "-"
        if ratio is not None:
            times = f"{ratio.ratio:.3f}"
            interval = "-" if ratio.low is None else f"{ratio.low:.3f} to {ratio.high:.3f}"
        table.add_row(variant.name, str(variant.num_runs), f"{median} [{low}, {high}]", times, interval)
    return table


def _figure_text(variant: VariantResult, name: str) -> str:
    """Return the median of a figure in its unit; "-" if it is unknown."""
    _, factor, form, _ = OTHERS[name]
    return format(variant.figures[name].median * factor, form) if name in variant.figures else "-"


def _outcomes(report: CompareReport) -> Iterator[Text]:
    """Yield the verdict on each variant, what failed, and notes."""
    for variant in report.variants:
        if variant.ratio is not None:
            first, *others = verdict_lines(variant)
            yield Text(first, style=_STYLES[variant.ratio.verdict])
            yield from map(Text, others)
    for variant in report.variants:
        if variant.failure is not None:
            when = f"failed after {counted(variant.num_runs, 'run')}" if variant.num_runs else "failed"
            first, *others = variant.failure.split("\n")
            yield Text(f"{variant.name} {when}: {first}", style="red")
            yield from map(Text, others)
        yield from (Text(f"note: {variant.name}: {note}") for note in variant.notes)
    yield from (Text(f"note: {note}") for note in report.notes)
    if not report.is_complete:
        yield Text("note: stopped early; these are the runs that had ended")
