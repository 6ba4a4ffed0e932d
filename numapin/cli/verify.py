"""`numapin verify`: compare a running job with its plan.

Status 0: the plan holds; 1: it does not; 2: no such job; 3: the job cannot be read.
"""

from __future__ import annotations

import os
from typing import Final

import click

from numapin.cli.options import JOB, json_option
from numapin.cli.output import emit, json_text, show
from numapin.errors import MachineError, UsageError
from numapin.observe.find import LIST_PROCESSES, find_job
from numapin.observe.read import verify_running

_STATUS: Final = {True: 0, False: 1, None: 3}


@click.command(params=[*JOB])
@json_option("numapin.report/1")
@click.pass_context
def verify(ctx: click.Context, run: str | None, pids: tuple[int, ...] | None, *, as_json: bool) -> None:
    """Compare the threads and pages of a running job with its plan.

    RUN is a run's folder, its name, the end of its name, or @last (the newest run); by default it is this user's only
    active run. With --pid the plan is the one that `numapin plan` would make.

    \b
    Examples:
      numapin verify                   the active run
      numapin verify @last             the newest run, if several are active
      numapin verify --pid 4711        a job that torchrun, srun or python started
      numapin verify --json            for scripts; status 1 if it does not hold
    """
    try:
        job = find_job(run, pids, os.environ, again="numapin verify")
        report = verify_running(job)
        if all(rank.observed.is_gone for rank in report.ranks):
            hint = LIST_PROCESSES if pids is not None else "if they are being restarted, try again: numapin verify"
            raise UsageError(f"{job.name}: all of its ranks have ended", hint)
    except (OSError, ValueError, MemoryError) as error:  # other programs' files can hold anything
        seen = str(error) or type(error).__name__
        raise MachineError(
            f"the job cannot be read: {seen}", "run this as the job's user, or start it again"
        ) from error
    if as_json:
        emit(json_text(report.to_json()))
    else:
        from numapin.view.verify_table import verify_table

        show(verify_table(report))
    ctx.exit(_STATUS[report.holds])
