"""Reports of `numapin run` during and after a run."""

from __future__ import annotations

import os
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from numapin.base.stderr import say
from numapin.cli import run_failure
from numapin.cli.output import require_writable, show, warn

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from contextlib import AbstractContextManager

    from numapin.cli.run import RunOptions
    from numapin.launcher.options import Job
    from numapin.observe.during_run import Watching
    from numapin.observe.report import VerifyReport


@contextmanager
def observed(run_dir: str, *, job: Job, num_ranks: int, watch: Watching | None, options: RunOptions) -> Iterator[None]:
    """Report, during and after a run, what its options ask for."""
    with (
        _loaders_reported(run_dir, job, options),
        _watched(run_dir, num_ranks, watch),
    ):
        yield


def _loaders_reported(run_dir: str, job: Job, options: RunOptions) -> AbstractContextManager[None]:
    """Report at the end which loaders took numapin's path. Each host has its launcher, and so its line."""
    if options.dataloader == "torch":
        return nullcontext()
    from numapin.observe.loaders import reporting_loaders

    title = "dataloader" if job.is_single_host else f"dataloader on {os.uname().nodename}"
    return reporting_loaders(run_dir, strict=options.strict, report=lambda text: say(f"{title}: {text}"))


def launcher_of(job: Job) -> dict[str, str]:
    """Return what starts the ranks, and why, as the report file has it."""
    if not job.why_torch:
        return {"name": "direct", "reason": "one host"}
    return {"name": "agent", "reason": job.why_torch}


def watching_of(options: RunOptions, launcher: Mapping[str, str]) -> Watching | None:
    """Return the checks that --verify, --verify-after and --report ask for. Raises UsageError for an unusable file."""
    after_s, report = options.verify_after, options.report
    if not options.verify and after_s is None and report is None:
        return None
    from numapin.observe.during_run import Watching

    require_writable(report, option="--report")
    return Watching(
        after_s=10 if after_s is None else after_s,
        report=report,
        tell=_print_report,
        warn=lambda text: warn([text]),
        launcher=launcher,
        outcome_of=run_failure.outcome_of,
    )


def _watched(run_dir: str, num_ranks: int, watch: Watching | None) -> AbstractContextManager[None]:
    if watch is None:
        return nullcontext()
    from numapin.observe.during_run import watching

    return watching(run_dir, num_ranks, watch)


def _print_report(report: VerifyReport, age_s: float) -> None:
    """Print a check's summary line and its findings."""
    from numapin.view.verify_table import findings_of, summary

    when = f" {age_s:.0f} s ago" if age_s else ""
    say(f"verified{when}: {summary(report)}")
    for finding in findings_of(report, notes=False):
        show(finding, err=True)
