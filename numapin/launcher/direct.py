"""Stage 3: the direct way: the launcher starts the ranks of one host itself, without torch. Edge.

Comes in: a `Plan` and a `DirectJob`. Goes out: ranks, run to their end. There are no restarts. The ranks find what
torch's agent would give them: the same variables, a store that the launcher serves, the same signals, the same grace
period.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import uuid
from typing import TYPE_CHECKING, Final

from numapin.base.stderr import say
from numapin.errors import NumapinError, Stopped, UsageError
from numapin.launcher import processes
from numapin.launcher.listening import LOOPBACK, listen
from numapin.launcher.processes import StartedRank, StopSignal, ended_on_error
from numapin.launcher.store_server import serving
from numapin.launcher.variables import job_variables, rank_variables, virtual_rank_variables
from numapin.rank import handover
from numapin.system import oom
from numapin.system.proc import is_dying

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Self

    from numapin.launcher.direct_options import DirectJob
    from numapin.launcher.failure import EndedRank
    from numapin.plan.model import Plan
    from numapin.rank.signals import Mailbox

# An ended rank and a signal end the wait at once. This bounds how late a rank's new handler is seen.
_LOOK_S: Final = 0.1
_MANY_SIGNALS: Final = 4096


class _RankFailed(Exception):  # noqa: N818 - ends the other ranks; the report follows when they have ended
    """A rank failed while these others were running."""

    def __init__(self, others: frozenset[int]) -> None:
        super().__init__(others)
        self.others = others


def launch(plan: Plan, job: DirectJob, run_dir: str, mailbox: Mailbox) -> None:
    """Start the ranks and run them to their end.

    Args:
        plan: The binding of each rank.
        job: The parsed command line.
        run_dir: The directory of this run.
        mailbox: The signals to pass on to the ranks.

    Raises:
        RanksFailed: A rank failed; all of them have ended.
        Stopped: A signal stopped the launcher; all ranks have ended.
        NumapinError: A rank could not be started.
        UsageError: The address or the port cannot be used.
    """
    address, kills_before = job.local_addr or LOOPBACK, oom.read_kills()
    with listen(address, job.master_port) as listening, serving(listening):
        handover.hand_over(plan, run_dir, os.environ)
        shared = _shared_variables(job, len(plan.ranks), address, listening.getsockname()[1])
        variables = [{**shared, **_own_variables(job, rank.local_rank, run_dir)} for rank in plan.ranks]
        ranks: list[StartedRank] = []
        try:
            with (
                _Alarm(job.signals) as alarm,
                ended_on_error(ranks, job.shutdown_timeout_s, alarm.is_urgent, alarm.further),
            ):
                _start(ranks, job, variables, alarm)
                _wait(ranks, mailbox, alarm)
        except StopSignal as stop:
            raise Stopped(stop.number, _notes_of(stop)) from None
        except _RankFailed as failed:
            ended = [_ended(rank, was_ended=rank.local_rank in failed.others, run_dir=run_dir) for rank in ranks]
            from numapin.launcher.account import ranks_failed, stopped_after  # a job that succeeds does not need it

            error = ranks_failed(job.program, ended, plan, kills_before)
            alarm.further()  # a signal may have come while the ranks ended
            if alarm.stopped_by is None:
                for note in getattr(failed, "__notes__", ()):
                    say(note)
                raise error from None
            stopped, cause = stopped_after(error, alarm.stopped_by, left=_notes_of(failed))
            raise stopped from cause


class _Alarm:
    """Wakes the launcher when a rank ends or a signal arrives, and notes the signals that are to end all ranks.

    Handlers only take notes, so that no signal can interrupt the start of a rank and leave one that nobody knows.
    """

    def __init__(self, numbers: frozenset[signal.Signals]) -> None:
        self._numbers = numbers
        self.received: list[signal.Signals] = []  # those that neither `ring` nor `further` has taken
        self.stopped_by: signal.Signals | None = None
        self._ours, self._theirs = socket.socketpair()
        self._poll = select.poll()  # select() takes no descriptor above 1023
        self._poll.register(self._ours, select.POLLIN)

    def __enter__(self) -> Self:
        """Install the handlers. For the main thread only."""
        self._ours.setblocking(False)
        self._theirs.setblocking(False)
        self._former_fd = signal.set_wakeup_fd(self._theirs.fileno(), warn_on_full_buffer=False)
        self._former = {number: signal.signal(number, self._note) for number in self._numbers}
        self._former[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)  # the default wakes nothing
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the former handlers."""
        for number, handler in self._former.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._former_fd)
        self._ours.close()
        self._theirs.close()

    def _note(self, number: int, _: object) -> None:
        self.received.append(signal.Signals(number))

    def wait(self, seconds: float) -> None:
        """Wait until a signal arrives, SIGCHLD included, at most this long."""
        if self._poll.poll(seconds * 1000):
            self._ours.recv(_MANY_SIGNALS)

    def ring(self) -> None:
        """Raise StopSignal if a signal to end has arrived."""
        number = self.further()
        if number is not None:
            raise StopSignal(number)

    def further(self) -> signal.Signals | None:
        """Return the signal that stops the job; None if none has come, or if it was returned before."""
        if not self.received or self.stopped_by is not None:
            return None
        self.stopped_by = self.received[0]
        self.received.clear()
        return self.stopped_by

    def is_urgent(self) -> bool:
        """Return whether not to wait for the ranks: a failed job is stopped, or Ctrl-C was pressed again.

        A second SIGTERM is no hurry: some schedulers send two.
        """
        return bool(self.received) if self.stopped_by is None else signal.SIGINT in self.received


def _start(ranks: list[StartedRank], job: DirectJob, variables: Sequence[Mapping[str, str]], alarm: _Alarm) -> None:
    """Start the ranks and add them to `ranks`. Raises NumapinError, and StopSignal."""
    for local_rank, own in enumerate(variables):
        alarm.ring()
        words = job.command_of(local_rank)
        program, *arguments = ["", *words] if job.no_python else words
        try:
            process = processes.start(processes.shim_command(local_rank, sys.executable, program, arguments), own)
        except (OSError, ValueError) as error:  # ValueError: a NUL in an argument
            raise NumapinError(f"rank {local_rank} cannot be started: {error}", "see limits with: ulimit -a") from None
        ranks.append(StartedRank(local_rank, process))


def _wait(ranks: Sequence[StartedRank], mailbox: Mailbox, alarm: _Alarm) -> None:
    """Wait until all ranks have ended well. Raises _RankFailed, and StopSignal."""
    mailbox.address({rank.local_rank: rank.process.pid for rank in ranks})
    while running := processes.without_status(ranks):
        alarm.wait(_LOOK_S)
        alarm.ring()
        mailbox.deliver()
        processes.look_at(running)
        _require_no_failure(running)


def _require_no_failure(ranks: Sequence[StartedRank]) -> None:
    """Raise _RankFailed, with the ranks that are running, if one of these has failed."""
    if any(rank.status for rank in ranks):
        raise _RankFailed(frozenset(rank.local_rank for rank in ranks if _is_running(rank)))


def _is_running(rank: StartedRank) -> bool:
    """Return whether a rank is running, and the kernel is not ending it: that may take a GPU's driver seconds."""
    return rank.status is None and not is_dying(rank.process.pid)


def _shared_variables(job: DirectJob, num_ranks: int, address: str, port: int) -> dict[str, str]:
    """Return the environment of all ranks."""
    set_by_torchrun = job_variables(
        num_ranks,
        address=address,
        port=port,
        run_id=job.run_id or str(uuid.uuid4()),
        role=job.role,
        launcher_has_store=True,
        environ=os.environ,
    )
    return {**os.environ, **set_by_torchrun, "TORCHELASTIC_SIGNALS_TO_HANDLE": job.signals_to_handle}


def _own_variables(job: DirectJob, local_rank: int, run_dir: str) -> dict[str, str]:
    """Return the variables of one rank. Raises UsageError if --virtual-local-rank has no GPU for it."""
    own = {**rank_variables(local_rank), "TORCHELASTIC_ERROR_FILE": _error_file(local_rank, run_dir)}
    if not job.virtual_local_rank:
        return own
    try:
        return {**own, **virtual_rank_variables(local_rank, os.environ)}
    except IndexError:
        listed = os.environ["CUDA_VISIBLE_DEVICES"]
        raise UsageError(
            f"--virtual-local-rank: CUDA_VISIBLE_DEVICES={listed} has no GPU for rank {local_rank}",
            "start fewer ranks with --nproc-per-node",
        ) from None


def _error_file(local_rank: int, run_dir: str) -> str:
    return os.path.join(run_dir, f"error-{local_rank}.json")


def _ended(rank: StartedRank, *, was_ended: bool, run_dir: str) -> EndedRank:
    """Return how a rank ended, with what it recorded. One that is still there counts as killed."""
    from numapin.launcher.account import ended_rank

    return ended_rank(
        rank.local_rank,
        rank=rank.local_rank,
        pid=rank.process.pid,
        exitcode=-signal.SIGKILL if rank.status is None else rank.status,
        ended_s=rank.ended_s,
        was_ended=was_ended,
        is_left=rank.status is None,
        error_file=_error_file(rank.local_rank, run_dir),
    )


def _notes_of(error: BaseException) -> str:
    """Return which ranks did not end, "" if all did."""
    return "; ".join(getattr(error, "__notes__", ()))
