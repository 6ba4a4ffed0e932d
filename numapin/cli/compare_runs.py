"""The runs of `numapin compare`, and where their report goes."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from numapin.base.files import make_own
from numapin.base.redact import without_secrets
from numapin.base.stderr import say
from numapin.cli.output import clear_status, emit, json_text, say_error, show, show_status, write
from numapin.compare.measure import duration
from numapin.errors import NumapinError

if TYPE_CHECKING:
    from pathlib import Path

    from numapin.cli.compare import CompareOptions
    from numapin.compare.measure import ComparedRun, RunProgress
    from numapin.compare.report import CompareReport
    from numapin.compare.variants import Variant
    from numapin.plan.model import Plan
    from numapin.topology.model import Topology


class RunsSoFar:
    """The runs until now, and where their report goes."""

    def __init__(self, options: CompareOptions, variants: list[Variant], *, machine: dict[str, object]) -> None:
        self._options, self._variants, self._machine = options, variants, machine
        self._runs: list[ComparedRun] = []

    def run(self, topology: Topology, plan: Plan | None) -> None:
        """Make all runs."""
        from numapin.compare.job import JobOptions
        from numapin.compare.measure import measure_all
        from numapin.compare.record import StepSettings
        from numapin.topology.sources.nvml import open_loads

        given = self._options
        nodes = {rank.local_rank: rank.nodes for rank in plan.ranks} if plan else {}
        uuids = [gpu.uuid for gpu in topology.visible_gpus if gpu.uuid is not None]
        settings = StepSettings(folder="", skip=given.skip, steps=given.steps, seconds=given.seconds)
        with open_loads(uuids) as loads:
            options = JobOptions(
                settings=settings,
                timeout_s=given.timeout,
                grace_s=given.grace,
                nodes=nodes,
                loads=loads,
                logs=_made(given.logs),
            )
            for made in measure_all(self._variants, options, num_rounds=given.repeats, progress=_show_progress):
                self._note(made)

    def _note(self, made: ComparedRun) -> None:
        clear_status()
        say(_run_in_words(made, is_first=not self._runs or self._runs[-1].variant != made.variant))
        self._runs.append(made)
        self._write_json(is_complete=False)

    def report(self, *, is_complete: bool) -> CompareReport:
        """Return the report on the runs until now."""
        from numapin.compare.report import make_report

        given = self._options
        settings = {name: getattr(given, name) for name in ("repeats", "steps", "skip", "seconds", "margin", "timeout")}
        return make_report(
            self._variants,
            self._runs,
            command=("numapin", *without_secrets(sys.argv[1:])),
            host=os.uname().nodename,
            date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            machine=self._machine,
            settings=settings,
            margin=given.margin,
            is_complete=is_complete,
        )

    def _write_json(self, *, is_complete: bool) -> None:
        """Write the file after every run, so that even a killed comparison leaves what it measured."""
        if self._options.output is not None:
            with suppress(NumapinError):  # the last write reports it
                text = json_text(self.report(is_complete=is_complete).to_json())
                write(text, self._options.output, option="--output")

    def finish_early(self) -> None:
        """Show what was measured, and report an error of that only: what ended the comparison decides its status."""
        clear_status()
        if not any(run.round is not None for run in self._runs):
            return
        try:
            self._show(self.report(is_complete=False))
        except NumapinError as error:
            say_error(error.message, error.hint)

    def finish(self) -> None:
        """Show the report, and write the file. Raises NumapinError if there was nothing to compare."""
        report = self.report(is_complete=True)
        if report.measured:
            self._show(report)
        _require_two(report)

    def _show(self, report: CompareReport) -> None:
        if self._options.as_json:
            emit(json_text(report.to_json()))
        else:
            from numapin.view.compare_table import compare_table

            show(compare_table(report))
        if self._options.output is not None:
            write(json_text(report.to_json()), self._options.output, option="--output")


def _run_in_words(made: ComparedRun, *, is_first: bool) -> str:
    """Return the outcome of a run, and the time that is left; `is_first`: of the uncounted runs of a variant."""
    (name,) = without_secrets([made.variant])
    result = made.result
    if result.failure is not None:
        return f"{name} failed, and is left out: {result.failure.partition(chr(10))[0]}"
    left = f"; {duration(made.left_s)} left" if made.left_s else ""
    times = f"{result.figures['step_s'] * 1000:.2f} ms per step, in {made.took_s:.0f} s{left}"
    uncounted = f"{'first' if is_first else 'second'} run, not counted"
    return f"{name}, {uncounted if made.round is None else f'repeat {made.round + 1}'}: {times}"


def _made(folder: Path | None) -> Path | None:
    """Make the folder for logs, unless it exists. Raises NumapinError."""
    if folder is None:
        return None
    try:
        make_own(str(folder.absolute()))
    except OSError as error:
        raise NumapinError(f"{folder} cannot be used: {error.strerror}", "choose another with --logs DIR") from None
    return folder.absolute()


def _require_two(report: CompareReport) -> None:
    """Raise NumapinError if fewer than two variants were measured. The reasons were said when each variant failed."""
    if len(report.measured) >= 2:
        return
    what = (
        f"nothing could be compared: only {report.measured[0].name} was measured"
        if report.measured
        else _output(report)
    )
    raise NumapinError(what, "run the script by itself first; keep the output of every run with --logs DIR")


def _output(report: CompareReport) -> str:
    """Return that every variant failed, with the last lines of the output of each; the same ones are shown once."""
    names: dict[str, list[str]] = {}
    for variant in report.variants:
        lines = (variant.failure or "").partition("\n")[2]
        names.setdefault(lines, []).append(variant.name)
    shown = [f"    output of {' and '.join(names)}:\n{lines}" for lines, names in names.items() if lines]
    return "\n".join(["every variant failed" + ("; the last lines of what they wrote:" if shown else ""), *shown])


def _show_progress(progress: RunProgress) -> None:
    show_status(progress_text(progress))


def progress_text(progress: RunProgress) -> str:
    """Return the current run, and how long it and the rest will take."""
    left_s = progress.left_s
    when = "" if left_s is None else f"; {duration(left_s)} left"
    run = "first run, not counted" if progress.round is None else f"run {progress.number}/{progress.total}"
    return f"{run}: {progress.variant}, {progress.doing}, {duration(progress.elapsed_s)}{when}"
