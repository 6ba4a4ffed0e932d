"""The report of `numapin run` on a failed job: the block, a file of all frames, fields of the report file."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from numapin.base.stderr import say
from numapin.cli.output import show_frames
from numapin.errors import NumapinError, RankError, Stopped
from numapin.rank import handover

if TYPE_CHECKING:
    from numapin.launcher.failure import JobFailure


def add_account(error: RankError | Stopped, run_dir: str) -> None:
    """If ranks failed, write the file with all frames, and add the block that the command line shows to the error.

    The run may have gone on in another folder, which NUMAPIN_RUN_DIR then names: cleaners of temporary files remove it.
    """
    failure = _failure_in(error)
    if failure is None:
        return
    from numapin.view.failure_block import failure_block, failure_text

    folder, file = os.environ.get("NUMAPIN_RUN_DIR") or run_dir, ""
    with suppress(NumapinError):  # a full disk
        handover.write_text(folder, handover.REPORT, failure_text(failure))
        file = f"{folder}/{handover.REPORT}"
    error.block = tuple(failure_block(failure, file=file))


def show_all_frames(error: NumapinError) -> None:
    """Print all frames of the rank that failed first, or of numapin's own error."""
    failure = _failure_in(error)
    if failure is not None:
        from numapin.view.failure_block import traceback_lines

        say(f"all frames of rank {failure.first.rank}:")
        show_frames("\n".join(traceback_lines(failure.first)))
    elif not isinstance(error, Stopped) or error.__cause__:
        import traceback

        show_frames("".join(traceback.format_exception(error)).rstrip())


def outcome_of(error: BaseException) -> dict[str, object]:
    """Return the fields of the report file about the error that ended a job."""
    failure = _failure_in(error)
    outcome: dict[str, object] = {} if failure is None else {"failure": failure.to_json()}
    if isinstance(error, Stopped):
        outcome["stopped_by"] = error.number.name
    return outcome


def _failure_in(error: BaseException) -> JobFailure | None:
    """Return the account of failed ranks, also of ranks that had failed before a signal came; None without one.

    Jobs that succeed do not import it.
    """
    found = error.__cause__ if isinstance(error, Stopped) else error
    if not isinstance(found, RankError):
        return None
    from numapin.launcher.failure import RanksFailed

    return found.failure if isinstance(found, RanksFailed) else None
