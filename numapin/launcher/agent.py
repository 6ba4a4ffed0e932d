"""Stage 3: torch's elastic agent, which starts, watches and restarts the ranks, with additions. Edge.

Comes in: a `Job`, the signals for its ranks, a check of the machine before a restart, which raises NumapinError if this
host can no longer take part, a check of the folder for the ranks' logs, and a function that is told of failed ranks.
Goes out: an agent that replaces torch's. Knows nothing of NUMA. It adds the signals, both checks, the account of each
failed round, one grace period for all the ways in which ranks are ended, the end of what ranks started if one of them
failed, a wait for dying ranks before others start, and the release of hosts that wait for one that failed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

from torch.distributed.elastic.agent.server.api import WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.launcher import api

from numapin.errors import NumapinError
from numapin.launcher import exit_barrier, leftovers
from numapin.launcher.account import ended_rank
from numapin.rank import signals
from numapin.system.proc import is_dying

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
    from torch.distributed.elastic.multiprocessing import LogsSpecs

    from numapin.launcher.failure import EndedRank
    from numapin.launcher.torchrun import Job

    FailedRound = Callable[[Sequence[EndedRank], int], None]
    """Called with the ends of this host's ranks, of which at least one failed, and the number of restarts left."""
    _Own = tuple[Job, signals.Mailbox, Callable[[], None], Callable[[], LogsSpecs | None], FailedRound]

_GRACE_S: Final = 30  # torch's own default
_CAUSES: Final = {-number for number in signal.Signals} - {-signal.SIGABRT}


@contextmanager
def replacing_torch_agent(
    job: Job,
    mailbox: signals.Mailbox,
    before_restart: Callable[[], None],
    new_logs: Callable[[], LogsSpecs | None],
    failed_round: FailedRound,
) -> Iterator[None]:
    """Make torch's launcher create our agent.

    `new_logs` is called before ranks start. It returns where their logs go now, None if that has not changed.

    torch's `launch_agent` takes no agent as an argument, and a copy of its 150 lines would not follow torch's changes.
    """
    theirs = vars(api)["LocalElasticAgent"]
    ours = vars(api)["LocalElasticAgent"] = _with_additions(
        theirs, (job, mailbox, before_restart, new_logs, failed_round)
    )
    try:
        yield
    finally:
        if vars(api)["LocalElasticAgent"] is ours:  # else another patch came on top of it and has not been undone
            vars(api)["LocalElasticAgent"] = theirs


def _with_additions(theirs: Callable[..., LocalElasticAgent], own: _Own) -> Callable[..., LocalElasticAgent]:
    """Return a class or function that makes agents as `theirs` does, torch's own or another's, with our additions."""

    def make(*args: Any, **kwargs: Any) -> LocalElasticAgent:  # the installed torch's own arguments
        agent = theirs(*args, **kwargs)
        kind = _subclass(type(agent), own)
        ours = kind.__new__(kind)
        vars(ours).update(vars(agent))  # Python allows no assignment to __class__ here
        return ours

    return _subclass(theirs, own) if isinstance(theirs, type) else make


def _subclass(theirs: type[LocalElasticAgent], own: _Own) -> type[LocalElasticAgent]:
    job, mailbox, before_restart, new_logs, failed_round = own
    names = {"_job": job, "_mailbox": mailbox}
    functions = {
        "_before_restart": staticmethod(before_restart),
        "_new_logs": staticmethod(new_logs),
        "_failed_round": staticmethod(failed_round),
    }
    return type(theirs.__name__, (_Agent, theirs), {"__module__": __name__, **names, **functions})


class _Agent(LocalElasticAgent if TYPE_CHECKING else object):  # type: ignore[misc] # the class beside it is the agent's
    """The additions. A subclass has them first, then the class of the agent, which may be torch's or another's."""

    _job: Job
    _mailbox: signals.Mailbox
    _logs_specs: LogsSpecs
    _before_restart: Callable[[], None]
    _new_logs: Callable[[], LogsSpecs | None]
    _failed_round: FailedRound
    _remaining_restarts: int
    _running: frozenset[int] = frozenset()  # the local ranks that ran when ranks were to be ended
    _has_failed: bool = False  # whether ranks failed in this round, and the account of it has not been made
    _looked_s: float = 0  # when all ranks were seen running for the last time
    _started_in: frozenset[str] = frozenset()  # the folders of the run in which ranks have been started

    def run(self, *arguments: Any, **named: Any) -> RunResult:  # the installed torch's own arguments
        """Run the ranks to their end. After an error, whatever it interrupted, nothing of them is left.

        If a signal arrives while torch ends the ranks, torch begins again, and gives up at the next one. The ranks die
        with the launcher then, but not what they started.
        """
        try:
            result: RunResult = super().run(*arguments, **named)
        except BaseException:
            _kill([*self._processes().values()])
            raise
        finally:
            if self._worker_group.state is not WorkerState.SUCCEEDED:  # else it has been in the exit barrier
                self._release_others_at_shutdown()
        return result

    def _processes(self) -> dict[int, subprocess.Popen[bytes]]:
        """Return the ranks of this round by their local ranks."""
        handlers = getattr(getattr(self, "_pcontext", None), "subprocess_handlers", {})
        return {local_rank: handler.proc for local_rank, handler in handlers.items()}

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        with self._others_continue(worker_group):
            self._logs_specs = self._new_logs() or self._logs_specs
        if self._started_in:
            leftovers.end_detached(self._started_in, self._grace_s)
        self._started_in |= {os.environ["NUMAPIN_RUN_DIR"]}
        with signals.kept_from_children():
            ids: dict[int, Any] = super()._start_workers(worker_group)
        self._looked_s, self._running, self._has_failed = time.time(), frozenset(), False
        self._give_grace()
        self._mailbox.address(ids)
        return ids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        looked_s, self._looked_s = self._looked_s, time.time()
        result: RunResult = super()._monitor_workers(worker_group)
        self._mailbox.deliver()
        if result.state is WorkerState.FAILED:
            self._account(looked_s, self._remaining_restarts)
        return result

    def _release_others_at_shutdown(self) -> None:
        """Count this host in the exit barrier after it has closed the rendezvous, where torch does that.

        After a signal, torch does not: the host may come back.
        """
        group, store = self._worker_group, getattr(self, "_store", None)
        if store is None:  # there has been no round
            return
        handler = group.spec.rdzv_handler
        close = handler.shutdown

        def close_and_arrive() -> bool:
            is_closed: bool = close()
            exit_barrier.arrive(store, group.group_world_size)
            return is_closed

        handler.shutdown = close_and_arrive

    def _exit_barrier(self) -> None:
        exit_barrier.note_success(self._worker_group.spec.rdzv_handler, self._store)
        super()._exit_barrier()

    def _account(self, looked_s: float, restarts_left: int) -> None:
        """Make the account of a failed round, the ranks of which have ended."""
        if hasattr(self._pcontext, "subprocess_handlers"):
            self._failed_round(self._ended(self._worker_group, looked_s), restarts_left)
        self._has_failed = False  # only now: a signal may interrupt this at any point

    def _shutdown(self, *arguments: Any, **named: Any) -> None:  # the installed torch's own arguments
        """End the ranks; if a signal came while those of a failed round were being ended, make the account now."""
        super()._shutdown(*arguments, **named)
        if self._has_failed:
            self._account(self._looked_s, 0)

    def _ended(self, worker_group: WorkerGroup, looked_s: float) -> list[EndedRank]:
        """Return the ends of this host's ranks, all of which ran at `looked_s`."""
        context: Any = self._pcontext
        seen_s = self._looked_s
        return [
            ended_rank(
                local_rank,
                rank=worker_group.workers[local_rank].global_rank,
                pid=handler.proc.pid,
                exitcode=-signal.SIGKILL if handler.proc.returncode is None else handler.proc.returncode,
                # torch looks ten times a second. A signal, except for an abort, is hardly a consequence of an
                # exception elsewhere, whose exact time is known: it counts as the earlier of the two.
                ended_s=looked_s if handler.proc.returncode in _CAUSES else seen_s,
                was_ended=local_rank in self._running,
                is_left=handler.proc.returncode is None,
                error_file=context.error_files[local_rank],
                logs=_logs(context.stdouts[local_rank], context.stderrs[local_rank]),
            )
            for local_rank, handler in context.subprocess_handlers.items()
        ]

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        exit_barrier.leave_round(self._store)
        with self._others_continue(worker_group):
            self._before_restart()
        super()._restart_workers(worker_group)

    @contextmanager
    def _others_continue(self, worker_group: WorkerGroup) -> Iterator[None]:
        """If the body raises NumapinError, stop the ranks of this host; the others continue if they can."""
        try:
            yield
        except NumapinError:
            self._stop_workers(worker_group)
            if (worker_group.group_world_size or 1) > self._job.min_max_nodes[0]:
                # Leaving with an error would close the rendezvous for the hosts that can continue.
                worker_group.spec.rdzv_handler.shutdown = lambda: True  # type: ignore[method-assign]
            raise

    @property
    def _grace_s(self) -> float:
        seconds = self._job.shutdown_timeout_s
        return _GRACE_S if seconds is None else seconds

    def _give_grace(self) -> None:
        """Use one grace period wherever torch ends ranks; its own option applies to signals only.

        Unless all ranks have succeeded, what they started ends with them. torch signals only the process groups of
        ranks that are still running, and waits for these ranks alone.
        """
        context = getattr(self, "_pcontext", None)
        if context is None:
            return
        close, seconds = context.close, self._job.shutdown_timeout_s

        def close_in_time(death_sig: signal.Signals | None = None, timeout: int = _GRACE_S) -> None:
            grace_s = timeout if seconds is None else seconds
            deadline_s = time.monotonic() + grace_s
            processes = self._processes()
            ranks = [*processes.values()]
            self._has_failed |= death_sig is None and any(rank.poll() for rank in ranks)
            self._running |= {rank for rank, process in processes.items() if _is_running(process)}
            with _ending_what_they_started(ranks, death_sig or signal.SIGTERM, deadline_s):
                close(death_sig, grace_s)
            if seconds is not None:
                _await_deaths(ranks)

        context.close = close_in_time  # for this object only


def _logs(*paths: str) -> tuple[str, ...]:
    """Return the files with a rank's output; "" is the launcher's own."""
    return tuple(path for path in paths if path not in {"", os.devnull})


@contextmanager
def _ending_what_they_started(
    ranks: Sequence[subprocess.Popen[bytes]], number: signal.Signals, deadline_s: float
) -> Iterator[None]:
    """If ranks failed or are to be ended in the body, end what they started, by the deadline (monotonic).

    If the body raises an error, as when a signal arrives, torch ends the ranks once more, or `run` kills what is left.
    """
    if all(rank.poll() == 0 for rank in ranks):
        yield
        return
    leftovers.ask(leftovers.in_sessions({rank.pid for rank in ranks if rank.poll() is not None}), number)
    yield
    leftovers.kill_after(deadline_s, lambda: leftovers.in_sessions({rank.pid for rank in ranks}))


def _kill(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kill ranks that are left, and what they started, unless all have succeeded."""
    if any(rank.poll() != 0 for rank in ranks):
        left = [rank.pid for rank in ranks if rank.poll() is None]
        leftovers.ask([*leftovers.in_sessions({rank.pid for rank in ranks}), *left], signal.SIGKILL)
        _await_deaths(ranks)


def _is_running(rank: subprocess.Popen[bytes]) -> bool:
    """Return whether a rank is running, and the kernel is not ending it: that may take a GPU's driver seconds."""
    return rank.poll() is None and not is_dying(rank.pid)


def _await_deaths(ranks: Iterable[subprocess.Popen[bytes]]) -> None:
    """Wait for killed ranks. torch 2.13 waits the grace period again after SIGKILL, and then starts new ranks."""
    deadline_s = time.monotonic() + leftovers.DEATH_S
    for rank in ranks:
        with suppress(subprocess.TimeoutExpired):
            rank.wait(max(0, deadline_s - time.monotonic()))
