"""The ranks of `numapin.spawn` and their answers."""

from __future__ import annotations

import pickle
import signal
import time
from contextlib import suppress
from math import inf
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, Final

from numapin.errors import NumapinError, RankError
from numapin.launcher.guardian import LOOK_S
from numapin.launcher.ranks import StartedRank, names_of, running_after
from numapin.spawning.child import NUM_SIZE_BYTES, Answer, Outcome
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


class RankProcess(StartedRank):
    """A rank's process and the socket for its answer."""

    def __init__(self, local_rank: int, process: subprocess.Popen[bytes], pipe: socket.socket) -> None:
        super().__init__(local_rank, process)
        self.pipe = pipe  # closed once no answer can come any more: each rank answers once
        self.answer: Answer | None = None  # once all of it is here
        self.kills_before = cgroup.read_kills()
        self._content = bytearray()
        pipe.setblocking(False)

    @property
    def talks(self) -> bool:
        """Return whether an answer may still come."""
        return self.pipe.fileno() >= 0

    def look(self) -> None:
        """Update the status, then read what has arrived of the answer: all of it if the process has ended."""
        super().look()
        while self.talks:
            try:
                part = self.pipe.recv(_PART_BYTES)
            except BlockingIOError:
                return
            except OSError:
                part = b""
            self._content += part
            size = int.from_bytes(self._content[:NUM_SIZE_BYTES], "little")
            if 0 < size == len(self._content) - NUM_SIZE_BYTES:
                self.answer = pickle.loads(memoryview(self._content)[NUM_SIZE_BYTES:])
            if self.answer is not None or not part:
                self.pipe.close()
                self._content = bytearray()

    def close(self) -> None:
        """Close the socket, and reap the process if it has ended."""
        self.pipe.close()
        super().close()


def results_of(ranks: Sequence[RankProcess], *, timeout_s: float | None) -> tuple[Any, ...]:
    """Return the results of all ranks in their order, or raise the first error.

    A rank that died comes before the failures it caused. RankError says that a rank died, took too long, or that its
    answer cannot be used.
    """
    deadline = inf if timeout_s is None else time.monotonic() + timeout_s
    results: dict[int, object] = {}
    while running := [rank for rank in ranks if rank.status is None]:
        if time.monotonic() > deadline:
            raise RankError(f"{names_of(running)} did not end within {timeout_s:g} s", "give spawn a longer timeout")
        wait([rank.pipe for rank in running if rank.talks], LOOK_S)
        for rank in running:
            rank.look()
        for rank in running:
            if rank.status is not None and rank.answer is None:
                raise _death_of(rank)
        for rank in running:
            if rank.answer is not None and rank.local_rank not in results:
                results[rank.local_rank] = _result_of(rank, rank.answer, ranks)
            if rank.status:  # a result counts only if the rank ends well
                raise _death_of(rank)
    return tuple(results[rank.local_rank] for rank in ranks)


def _result_of(rank: RankProcess, answer: Answer, ranks: Sequence[RankProcess]) -> object:
    """Return a rank's result, or raise its error; if another rank died without an answer, raise that as the cause.

    A dying rank closes its sockets before its end can be seen, so another rank may report the broken connection first.
    Which ranks are dying is asked before the answer is unpickled: that may import torch, which takes seconds, and in
    that time other ranks return, or die of this very error. A rank that ends well looks as if it were dying, too, but
    has answered by the end of the wait.
    """
    dying = [other for other in ranks if other.answer is None and (not other.talks or is_exiting(other.process.pid))]
    try:
        return _value_in(answer, f"rank {rank.local_rank}")
    except Exception as error:
        running_after(dying, _DYING_S)
        dead = next((other for other in dying if other.answer is None), None)
        if dead is not None:
            raise _death_of(dead) from error
        raise


def _value_in(answer: Answer, name: str) -> object:
    """Return the result in a rank's answer, or raise the error in it, with the rank's traceback as its cause."""
    if answer.outcome is Outcome.RETURNED:
        try:
            return pickle.loads(answer.content)
        except Exception as error:
            raise RankError(f"the result of {name} cannot be unpickled here: {error}", _RETURN_CPU_VALUES) from error
    text = answer.text.rstrip()
    in_rank = RankError(f"in {name}:\n{text}")
    if answer.outcome is Outcome.UNPICKLABLE:
        raise RankError(f"the result of {name} cannot be pickled", _RETURN_CPU_VALUES) from in_rank
    raised: BaseException | None = None
    with suppress(Exception):  # there is no pickle, or its class is missing here, or raises anything
        raised = pickle.loads(answer.content)
    if answer.outcome is Outcome.UNLOADABLE and not isinstance(raised, NumapinError):
        raise RankError(
            f"{name} could not load fn or its arguments",
            "fn and its arguments must be importable from a module or script; the traceback names what was not",
        ) from in_rank
    if raised is None:
        raise RankError(f"{name} raised an exception that cannot be pickled:\n{text}")
    raise raised from in_rank


def _death_of(rank: RankProcess) -> RankError:
    """Return the error for a rank that ended without a result, or failed after it."""
    from numapin.launcher.failure import name_of_signal  # ranks that succeed do not need it

    name, see_output = names_of([rank]), "see its output above"
    if rank.status is None:
        return RankError(f"{name} began to exit and has not ended after {_DYING_S} s", f"{see_output}, and: dmesg")
    if rank.status >= 0:
        when = "" if rank.answer else " before fn returned"
        hint = f"{see_output}; fn must return, not call sys.exit or os._exit"
        return RankError(f"{name} exited with status {rank.status}{when}", hint)
    problem = f"{name} was killed by {name_of_signal(-rank.status)}"
    if rank.status != -signal.SIGKILL:
        return RankError(problem, see_output)
    reason = cgroup.explain(rank.kills_before)
    if reason is None:
        return RankError(problem, f"{see_output}; the kernel sends SIGKILL when memory is short, see: dmesg")
    return RankError(f"{problem}: {reason}", cgroup.REMEDY)
