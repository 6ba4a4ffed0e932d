"""The ranks of `numapin.spawn` and their answers."""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from math import inf
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, Final, NoReturn

from numapin.errors import NumapinError, RankError
from numapin.launcher.guardian import LOOK_S
from numapin.launcher.ranks import StartedRank, names_of, running_after
from numapin.spawning.child import NUM_SIZE_BYTES, Answer, Outcome, unpickle
from numapin.system import cgroup
from numapin.system.proc import is_exiting

if TYPE_CHECKING:
    import socket
    import subprocess
    from collections.abc import Sequence

_PART_BYTES: Final = 1 << 20
# How long a rank that begins to exit may take: giving back GPU memory takes seconds.
_DYING_S: Final = 5
_RETURN_CPU_VALUES: Final = "return plain CPU values"
_MAKE_IMPORTABLE: Final = (
    "fn and its arguments must be importable from a module or script; the traceback names what was not"
)


class RankProcess(StartedRank):
    """A rank's process and the socket for its answer.

    Attributes:
        pipe: Our end of the socket.
        answer: The rank's answer, once all of it is here.
        kills_before: The count of out-of-memory kills when the rank started.
    """

    def __init__(self, local_rank: int, process: subprocess.Popen[bytes], pipe: socket.socket) -> None:
        super().__init__(local_rank, process)
        self.pipe = pipe
        self.answer: Answer | None = None
        self.kills_before = cgroup.read_kills()
        self._content = bytearray()
        pipe.setblocking(False)

    @property
    def talks(self) -> bool:
        """Return whether an answer may still come."""
        return self.pipe.fileno() >= 0

    @property
    def is_dying(self) -> bool:
        """Return whether the rank is ending, as far as can be seen, and has not answered."""
        return self.answer is None and (not self.talks or is_exiting(self.process.pid))

    def go(self) -> None:
        """Let the rank load its call. Only now is every rank in the list of those that are ended on an error."""
        with suppress(OSError):  # it may have ended
            self.pipe.send(b"\n")

    def look(self) -> None:
        """Update the status, and read what has arrived of the answer; all of it if the process has ended."""
        super().look()
        while self.talks and self._receive() and self.status is not None:
            pass

    def close(self) -> None:
        """Close the socket, and reap the process if it has ended."""
        self.pipe.close()
        super().close()

    def _receive(self) -> bool:
        """Read a part of the answer; return whether there may be more."""
        try:
            part = self.pipe.recv(_PART_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            part = b""
        self._content += part
        self.answer = _answer_in(self._content)
        if self.answer or not part:
            self.pipe.close()  # each rank answers once
            self._content = bytearray()
        return self.talks


def _answer_in(content: bytearray) -> Answer | None:
    """Return the answer, None while a part of it is missing."""
    size = int.from_bytes(content[:NUM_SIZE_BYTES], "little")
    is_whole = size > 0 and len(content) == NUM_SIZE_BYTES + size
    return unpickle(memoryview(content)[NUM_SIZE_BYTES:], Answer) if is_whole else None


def _running(ranks: Sequence[RankProcess]) -> list[RankProcess]:
    """Return the ranks that were running when they were last looked at."""
    return [rank for rank in ranks if rank.status is None]


def results_of(ranks: Sequence[RankProcess], *, timeout_s: float | None) -> tuple[Any, ...]:
    """Return the results of all ranks, or raise the first error; a rank that died comes before the failures it caused.

    Args:
        ranks: The ranks, started.
        timeout_s: Seconds until all ranks must have ended. None: no limit.

    Returns:
        The results, in the order of `ranks`.

    Raises:
        RankError: A rank died, took too long, or its answer cannot be used.
    """
    deadline = inf if timeout_s is None else time.monotonic() + timeout_s
    results: dict[int, object] = {}
    while running := _running(ranks):
        if time.monotonic() > deadline:
            raise RankError(f"{names_of(running)} did not end within {timeout_s:g} s", "give spawn a longer timeout")
        wait([rank.pipe for rank in running if rank.talks], LOOK_S)
        for rank in running:
            rank.look()
        _require_answers(running)
        for rank in running:
            _collect(rank, ranks, results)
    return tuple(results[rank.local_rank] for rank in ranks)


def _require_answers(ranks: Sequence[RankProcess]) -> None:
    """Raise RankError for a rank that ended without an answer."""
    for rank in ranks:
        if rank.status is not None and rank.answer is None:
            raise _death_of(rank)


def _collect(rank: RankProcess, ranks: Sequence[RankProcess], results: dict[int, object]) -> None:
    """Add the result of a rank that has answered. Raises its error, and RankError if it failed after its answer."""
    if rank.answer is not None and rank.local_rank not in results:
        results[rank.local_rank] = _result_of(rank, rank.answer, ranks)
    if rank.status:
        raise _death_of(rank)


def _death_of(rank: RankProcess) -> RankError:
    """Return the error for a rank that ended without a result, or failed after it."""
    name, status = names_of([rank]), rank.status
    if status is None:
        return RankError(
            f"{name} began to exit and has not ended after {_DYING_S} s", "see its output above, and: dmesg"
        )
    if status < 0:
        return _killed(rank, -status)
    when = "" if rank.answer else " before fn returned"
    return RankError(
        f"{name} exited with status {status}{when}",
        "see its output above; fn must return, not call sys.exit or os._exit",
    )


def _killed(rank: RankProcess, number: int) -> RankError:
    """Return the error for a rank that a signal killed."""
    problem = f"{names_of([rank])} was killed by {_signal_name(number)}"
    if number != signal.SIGKILL:
        return RankError(problem, "see its output above")
    reason = cgroup.explain(rank.kills_before)
    if reason is None:
        return RankError(problem, "see its output above; the kernel sends SIGKILL when memory is short, see: dmesg")
    return RankError(f"{problem}: {reason}", cgroup.REMEDY)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _result_of(rank: RankProcess, answer: Answer, ranks: Sequence[RankProcess]) -> object:
    """Return a rank's result, or raise its error; if another rank died without an answer, raise that as the cause.

    A dying rank closes its sockets before its end can be seen, so another rank may report the broken connection first.
    Which ranks are dying is asked before the answer is unpickled: that may import torch, which takes seconds, and in
    that time other ranks return, or die of this very error. A rank that ends well looks as if it were dying, too, but
    has answered by the end of the wait.
    """
    dying = [other for other in ranks if other.is_dying]
    try:
        return _value(rank, answer)
    except Exception as error:
        running_after(dying, _DYING_S)
        dead = next((other for other in dying if other.answer is None), None)
        if dead is not None:
            raise _death_of(dead) from error
        raise


def _value(rank: RankProcess, answer: Answer) -> object:
    """Return the result in a rank's answer, or raise the error in it."""
    if answer.outcome is not Outcome.RETURNED:
        _raise_failure(f"rank {rank.local_rank}", answer)
    try:
        return unpickle(answer.content, object)
    except Exception as error:
        raise RankError(
            f"the result of rank {rank.local_rank} cannot be unpickled here: {error}", _RETURN_CPU_VALUES
        ) from error


def _raise_failure(name: str, answer: Answer) -> NoReturn:
    """Raise the error in a rank's answer, with the rank's traceback as its cause."""
    text = answer.text.rstrip()
    in_rank = RankError(f"in {name}:\n{text}")
    if answer.outcome is Outcome.UNPICKLABLE:
        raise RankError(f"the result of {name} cannot be pickled", _RETURN_CPU_VALUES) from in_rank
    raised = _exception_in(answer.content)
    if answer.outcome is Outcome.UNLOADABLE and not isinstance(raised, NumapinError):
        raise RankError(f"{name} could not load fn or its arguments", _MAKE_IMPORTABLE) from in_rank
    if raised is None:
        raise RankError(f"{name} raised an exception that cannot be pickled:\n{text}")
    raise raised from in_rank


def _exception_in(content: bytes) -> BaseException | None:
    """Return the pickled exception, None if there is none or it cannot be unpickled here."""
    try:
        return unpickle(content, BaseException)
    except Exception:  # noqa: BLE001 - its class may be missing here, or raise anything
        return None
