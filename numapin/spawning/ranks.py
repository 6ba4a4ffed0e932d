"""Wait for the ranks of `numapin.spawn`. Edge.

Comes in: running ranks, each with a socket for its answer. Goes out: their results by rank, or the first error; and no
rank that still runs.
"""

from __future__ import annotations

import os
import pickle
import signal
import time
from contextlib import contextmanager, suppress
from math import inf
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, Final

from numapin.base import cpu_set
from numapin.errors import NumapinError, RankError
from numapin.spawning.child import NUM_SIZE_BYTES, Answer, Outcome
from numapin.system import oom
from numapin.system.proc import is_exiting

if TYPE_CHECKING:
    import socket
    import subprocess
    from collections.abc import Iterator, Sequence

# An answer wakes the wait at once; this is how soon the death of a rank is seen. Without pidfds, which need Linux 5.3.
_LOOK_S: Final = 0.05
_PART_BYTES: Final = 1 << 20
# How long a process may take to go: one that has GPU memory to give back takes seconds.
_DYING_S: Final = 5
_DEATH_S: Final = 30
_LOADING: Final = "fn and its arguments must be importable from a module or script; see the traceback for what was not"


class RankProcess:
    """A rank's process and the socket on which its answer comes; `status` is how it ended, None while it runs."""

    def __init__(self, local_rank: int, process: subprocess.Popen[bytes], pipe: socket.socket) -> None:
        self.local_rank = local_rank
        self.process = process
        self.pipe = pipe
        self.status: int | None = None
        self.answer: Answer | None = None
        self.kills_before = oom.read_kills()
        self._content = bytearray()
        pipe.setblocking(False)

    @property
    def talks(self) -> bool:
        """Return whether an answer may still come."""
        return self.pipe.fileno() >= 0

    def go(self) -> None:
        """Let the rank load its call: every rank is in the hands of whoever ends them."""
        with suppress(OSError):  # it may be over
            self.pipe.send(b"\n")

    def look(self) -> None:
        """See whether the rank is over, and take what is there of its answer; when it is over, all that is there."""
        if self.status is None:
            self.status = _status(self.process)
        while self.talks and self._receive() and self.status is not None:
            pass

    def signal(self, number: signal.Signals) -> None:
        """Signal the rank and what it started: it leads a session."""
        if self.process.returncode is None:  # else its number may be a stranger's by now
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, number)

    def close(self) -> None:
        """Close the socket and reap the process if it is over."""
        self.pipe.close()
        if self.status is not None:
            self.process.wait()

    def _receive(self) -> bool:
        """Take a part of the answer; return whether there may be more."""
        try:
            part = self.pipe.recv(_PART_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            part = b""
        self._content += part
        size = int.from_bytes(self._content[:NUM_SIZE_BYTES], "little")
        if size and len(self._content) == NUM_SIZE_BYTES + size:
            self.answer = Answer(*pickle.loads(memoryview(self._content)[NUM_SIZE_BYTES:]))  # noqa: S301 - from a process of ours
        if self.answer or not part:
            self.pipe.close()  # there is one answer
            self._content = bytearray()
        return self.talks


def _status(process: subprocess.Popen[bytes]) -> int | None:
    """Return how a child ended, None while it runs, and do not reap it: so nobody is given its number, or group's."""
    try:
        ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # somebody else has waited for it
        return process.wait()
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


@contextmanager
def none_left(grace_s: float) -> Iterator[list[RankProcess]]:
    """Give a list for ranks. On any exception all in it, and what they started, are asked to end, and then made to."""
    ranks: list[RankProcess] = []
    try:
        yield ranks
    except BaseException as error:
        try:
            _signal_all(ranks, signal.SIGTERM)
            _running_after(ranks, grace_s)
        finally:  # a second Ctrl-C comes here at once
            _signal_all(ranks, signal.SIGKILL)
            if stay := _running_after(ranks, _DEATH_S):
                error.add_note(f"{_names(stay)} still there {_DEATH_S} s after SIGKILL; see: cat /proc/PID/stack")
        raise
    finally:
        for rank in ranks:
            rank.close()


def _signal_all(ranks: Sequence[RankProcess], number: signal.Signals) -> None:
    for rank in ranks:
        rank.signal(number)


def _running_after(ranks: Sequence[RankProcess], seconds: float) -> list[RankProcess]:
    """Wait until the ranks are over, so long at most; return those that are not."""
    deadline = time.monotonic() + seconds
    while running := [rank for rank in ranks if rank.status is None]:
        for rank in running:
            rank.look()
        if time.monotonic() > deadline:
            return [rank for rank in running if rank.status is None]
        time.sleep(_LOOK_S / 5)
    return []


def results_of(ranks: Sequence[RankProcess], *, timeout_s: float | None) -> tuple[Any, ...]:
    """Return the results of all ranks, or raise the first error: that of a rank which died before others' of that."""
    deadline = inf if timeout_s is None else time.monotonic() + timeout_s
    results: dict[int, Any] = {}
    while waiting := [rank for rank in ranks if rank.status is None]:
        if time.monotonic() > deadline:
            raise RankError(f"{_names(waiting)} did not end within {timeout_s:g} s", "give spawn a longer timeout")
        wait([rank.pipe for rank in waiting if rank.talks], _LOOK_S)
        for rank in waiting:
            rank.look()
        for rank in waiting:
            if rank.status is not None and rank.answer is None:
                raise _died(rank)
        for rank in waiting:
            if rank.answer is not None and rank.local_rank not in results:
                results[rank.local_rank] = _value_unless_others_die(rank, rank.answer, ranks)
            if rank.status:
                raise _died(rank)
    return tuple(results[rank.local_rank] for rank in ranks)


def _names(ranks: Sequence[RankProcess]) -> str:
    pids = " ".join(str(rank.process.pid) for rank in ranks)
    return f"rank{'s' if len(ranks) > 1 else ''} {cpu_set.render(rank.local_rank for rank in ranks)} (pid {pids})"


def _died(rank: RankProcess) -> RankError:
    """Return the error for a rank that ended without a result, or not well after it."""
    who, status = _names([rank]), rank.status
    if status is None:
        return RankError(f"{who} dies, and is not gone after {_DYING_S} s", "see its output above, and: dmesg")
    if status < 0:
        reason = oom.explain(rank.kills_before) if -status == signal.SIGKILL else None
        if reason is not None:
            return RankError(f"{who} died of SIGKILL, {reason}", oom.REMEDY)
        more = "; SIGKILL comes from the kernel where memory is short: dmesg" if -status == signal.SIGKILL else ""
        return RankError(f"{who} died of {_name_of(-status)}", f"see its output above{more}")
    return RankError(
        f"{who} left with status {status}" + ("" if rank.answer else " before fn returned"),
        "see its output above; fn must return, not call sys.exit or os._exit",
    )


def _name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time one
        return f"signal {number}"


def _value_unless_others_die(rank: RankProcess, answer: Answer, ranks: Sequence[RankProcess]) -> object:
    """Return the result or raise the error of a rank; where another dies without a word, that is why this one failed.

    A dying rank closes its sockets before its end can be seen, so another may fail of that first. Who dies is asked
    before the answer is unpickled: that may import torch, which takes seconds, in which other ranks return or die of
    this very error. A rank that ends well looks like a dying one, too, but has answered by the time that we waited.
    """
    silent = [other for other in ranks if other.answer is None]
    dying = [other for other in silent if not other.talks or is_exiting(other.process.pid)]
    try:
        return _value(rank, answer)
    except Exception as error:
        _running_after(dying, _DYING_S)
        if dead := [other for other in dying if other.answer is None]:
            raise _died(dead[0]) from error
        raise


def _value(rank: RankProcess, answer: Answer) -> object:
    """Return the result, or raise what the rank's answer tells."""
    if answer.outcome is Outcome.RETURNED:
        try:
            return pickle.loads(answer.content)  # noqa: S301 - from a process of ours
        except Exception as error:
            raise RankError(
                f"what rank {rank.local_rank} returned cannot be unpickled here: {error}", "return plain CPU values"
            ) from error
    where = RankError(f"in rank {rank.local_rank}:\n{answer.text.rstrip()}")
    if answer.outcome is Outcome.UNPICKLABLE:
        raise RankError(f"what rank {rank.local_rank} returned cannot be pickled", "return plain CPU values") from where
    raised = _unpickled(answer.content)
    if answer.outcome is Outcome.UNLOADABLE and not isinstance(raised, NumapinError):
        raise RankError(f"rank {rank.local_rank} could not load fn or its arguments", _LOADING) from where
    if raised is None:
        raise RankError(f"rank {rank.local_rank} raised what cannot be pickled:\n{answer.text.rstrip()}")
    raise raised from where


def _unpickled(content: bytes) -> BaseException | None:
    try:
        error = pickle.loads(content) if content else None  # noqa: S301 - from a process of ours
    except Exception:  # noqa: BLE001 - a class that is not here, or one that raises
        return None
    return error if isinstance(error, BaseException) else None
