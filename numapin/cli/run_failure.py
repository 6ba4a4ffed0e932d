"""What `numapin run` says at the end of a job that failed. Edge.

Comes in: the error that ended the job. Goes out: the block of `view/failure_block.py`, a file with all frames in the
run's folder, and the fields of the report file.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from numapin.base.stderr import say
from numapin.cli.output import show_frames
from numapin.errors import NumapinError, Stopped
from numapin.launcher.failure import RanksFailed
from numapin.rank import handover

if TYPE_CHECKING:
    from collections.abc import Iterator

_FILE: Final = "failure.txt"


@contextmanager
def accounted(run_dir: str) -> Iterator[None]:
    """If ranks fail in the body, write the file with all frames, and add the block that the command line shows."""
    try:
        yield
    except RanksFailed as error:
        from numapin.view.failure_block import failure_block, failure_text

        file = ""
        with suppress(NumapinError):  # a full disk
            handover.write_text(run_dir, _FILE, failure_text(error.failure))
            file = f"{run_dir}/{_FILE}"
        error.block = tuple(failure_block(error.failure, file=file))
        raise


@contextmanager
def shown(*, wanted: bool) -> Iterator[None]:
    """Print all frames of the body's error if they are wanted: the first rank's, or numapin's own."""
    try:
        yield
    except RanksFailed as error:
        if wanted:
            from numapin.view.failure_block import traceback_lines

            rank = error.failure.first
            say(f"all frames of rank {rank.rank}:")
            show_frames("\n".join(traceback_lines(rank)))
        raise
    except NumapinError as error:
        if wanted and not isinstance(error, Stopped):
            import traceback

            show_frames("".join(traceback.format_exception(error)).rstrip())
        raise


def outcome_of(error: BaseException) -> dict[str, object]:
    """Return the fields of the report file about the error that ended a job."""
    if isinstance(error, RanksFailed):
        return {"failure": error.failure.to_json()}
    return {"stopped_by": error.number.name} if isinstance(error, Stopped) else {}
