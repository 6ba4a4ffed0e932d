"""Wait for the ranks of `numapin.spawn`. Edge.

Comes in: running ranks, each with a pipe for its answer. Goes out: their results by rank, or the first error; and no
rank that still runs.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import time
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, Final

from numapin import cpulist
from numapin.errors import NumapinError, RankError
from numapin.spawned import Answer, Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

# An answer wakes the wait at once; this is how soon the death of a rank is seen. Without pidfds, which need Linux 5.3.
_LOOK_S: Final = 0.05
_LOADING: Final = "fn and its arguments must be importable from a module or script; see the traceback for what was not"


class Rank:
    """A rank's process and the pipe on which its answer comes."""

    def __init__(self, number: int, process: subprocess.Popen[bytes], pipe: Connection) -> None:
        self.number = number
        self.process = process
        self.pipe = pipe

    def receive(self) -> Answer | None:
        """Return the answer that is there; None where the rank closed the pipe without one."""
        try:
            content = self.pipe.recv_bytes()
        except (EOFError, OSError):
            return None
        finally:
            self.pipe.close()  # there is one answer
        return Answer(*pickle.loads(content))  # noqa: S301 - from a process of ours

    def signal(self, number: signal.Signals) -> None:
        """Signal the rank and what it started: it leads a session."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def kill(self) -> None:
        """Have nothing of this rank be left."""
        if self.process.poll() is None:
            self.signal(signal.SIGKILL)
        self.process.wait()
        self.pipe.close()


def results_of(ranks: Sequence[Rank], *, timeout_s: float | None, grace_s: float) -> tuple[Any, ...]:
    """Return the results of all ranks; on the first error, or any other exception, end all ranks and raise it."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    try:
        return _results(ranks, deadline, timeout_s)
    except BaseException:
        _end(ranks, grace_s)
        raise


def _results(ranks: Sequence[Rank], deadline: float | None, timeout_s: float | None) -> tuple[Any, ...]:
    results: dict[int, Any] = {}
    while waiting := [rank for rank in ranks if rank.process.returncode is None]:
        if deadline is not None and time.monotonic() > deadline:
            raise _late(waiting, timeout_s)
        talking = {rank.pipe: rank for rank in ranks if not rank.pipe.closed}
        ended = [rank for rank in waiting if rank.process.poll() is not None]
        for pipe in wait(list(talking), 0 if ended else _LOOK_S) if talking else _nap():
            rank = talking[pipe]  # type: ignore[index] # wait returns what it was given
            if (answer := rank.receive()) is not None:
                results[rank.number] = _value(rank, answer)
        for rank in ended:
            _require_result(rank, results)
    return tuple(results[rank.number] for rank in ranks)


def _late(ranks: Sequence[Rank], timeout_s: float | None) -> RankError:
    who = f"rank{'s' if len(ranks) > 1 else ''} {cpulist.render(rank.number for rank in ranks)}"
    pids = " ".join(str(rank.process.pid) for rank in ranks)
    return RankError(f"{who} (pid {pids}) did not end within {timeout_s:g} s", "give spawn a longer timeout")


def _nap() -> tuple[Connection, ...]:
    """Wait for ranks that have answered to end."""
    time.sleep(_LOOK_S)
    return ()


def _require_result(rank: Rank, results: dict[int, Any]) -> None:
    """Raise RankError for a rank that ended without a result, or not well after it."""
    status = rank.process.returncode
    if status < 0:
        name = signal.Signals(-status).name
        more = "; SIGKILL comes from the kernel where memory is short: dmesg" if -status == signal.SIGKILL else ""
        raise RankError(f"rank {rank.number} (pid {rank.process.pid}) died of {name}", f"see its output above{more}")
    if status or rank.number not in results:
        raise RankError(
            f"rank {rank.number} (pid {rank.process.pid}) left with status {status}"
            + ("" if rank.number in results else " before fn returned"),
            "see its output above; fn must return, not call sys.exit or os._exit",
        )


def _value(rank: Rank, answer: Answer) -> object:
    """Return the result, or raise what the rank's answer tells."""
    if answer.outcome is Outcome.RETURNED:
        try:
            return pickle.loads(answer.content)  # noqa: S301 - from a process of ours
        except Exception as error:
            raise RankError(
                f"what rank {rank.number} returned cannot be unpickled here: {error}", "return plain CPU values"
            ) from error
    where = RankError(f"in rank {rank.number}:\n{answer.text.rstrip()}")
    if answer.outcome is Outcome.UNPICKLABLE:
        raise RankError(f"what rank {rank.number} returned cannot be pickled", "return plain CPU values") from where
    raised = _unpickled(answer.content)
    if answer.outcome is Outcome.UNLOADABLE and not isinstance(raised, NumapinError):
        raise RankError(f"rank {rank.number} could not load fn or its arguments", _LOADING) from where
    if raised is None:
        raise RankError(f"rank {rank.number} raised what cannot be pickled:\n{answer.text.rstrip()}")
    raise raised from where


def _unpickled(content: bytes) -> BaseException | None:
    try:
        error = pickle.loads(content) if content else None  # noqa: S301 - from a process of ours
    except Exception:  # noqa: BLE001 - a class that is not here, or one that raises
        return None
    return error if isinstance(error, BaseException) else None


def _end(ranks: Sequence[Rank], grace_s: float) -> None:
    """Ask all ranks, and what they started, to end, then make them; a second Ctrl-C makes them at once."""
    try:
        for rank in ranks:
            rank.signal(signal.SIGTERM)  # a dead rank's workers, too
        deadline = time.monotonic() + grace_s
        for rank in ranks:
            with suppress(subprocess.TimeoutExpired):
                rank.process.wait(max(0, deadline - time.monotonic()))
    finally:
        for rank in ranks:
            rank.kill()
