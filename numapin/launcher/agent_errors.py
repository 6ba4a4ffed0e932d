"""Stage 3: the errors of torch's agent as the command line reports them. Edge.

Comes in: torch's ChildFailedError or SignalException, and the failed rounds before it. Goes out: `RanksFailed` or
`Stopped`, as on the direct way, and one line for each round after which the ranks are restarted. torch's own report is
left out, and so are the lines of its log that say the same. Callers of `numapin.launch.launch` get torch's errors.
"""

from __future__ import annotations

import logging
import os
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError

from numapin.base.plural import counted
from numapin.base.stderr import say
from numapin.errors import NumapinError, Stopped
from numapin.launcher import leftovers
from numapin.launcher.account import ranks_failed, stopped_after
from numapin.system import oom

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numapin.launcher.agent import FailedRound
    from numapin.launcher.failure import EndedRank, RanksFailed
    from numapin.plan.model import Plan

_TORCHS_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_LOGGERS: Final = (
    "torch.distributed.elastic.multiprocessing.api",
    "torch.distributed.elastic.multiprocessing.errors.error_handler",
    "torch.distributed.elastic.agent.server.api",
)
_SAID_BY_US: Final = (
    "failed (exitcode:",
    "Sending process ",
    "Closing process ",
    "no error file defined for parent",
    "Received %s death signal",
)
"""The beginnings of torch's log messages about the end of ranks."""


_SEE_OTHERS: Final = "see what numapin printed on the other hosts"
_NOT_MET: Final = {
    "HostSucceededError": (
        "the ranks of another host have succeeded, so it cannot take part in a restart",
        _SEE_OTHERS,
    ),
    "RendezvousClosedError": ("the job has ended on another host", _SEE_OTHERS),
    "RendezvousConnectionError": (
        "the rendezvous host has ended its launcher, or cannot be reached",
        "see what numapin printed there, and whether --rdzv-endpoint is right",
    ),
    "RendezvousTimeoutError": (
        "the other hosts of the job did not come in time",
        "start it on all of them, or wait for longer with: --rdzv-conf join_timeout=SECONDS",
    ),
}
"""The message and the hint for each rendezvous error, by its name."""


class _Rounds:
    """The failed rounds of a job."""

    def __init__(self, program: str, plan: Plan, *, is_only_host: bool) -> None:
        self.last: RanksFailed | None = None
        self.is_restarted = False  # whether ranks were started again after that
        self._is_only_host = is_only_host
        self._program, self._plan, self._num_rounds = program, plan, 0
        self._kills_before = oom.read_kills()

    def failed(self, ended: Sequence[EndedRank], restarts_left: int) -> None:
        """Keep the account of a round; say in one line that it failed if the ranks are restarted."""
        only = self._is_only_host
        self.last = ranks_failed(self._program, ended, self._plan, self._kills_before, is_only_host=only)
        self.is_restarted = restarts_left > 0
        self._num_rounds += 1
        if self.is_restarted:
            left = counted(restarts_left - 1, "restart")  # this one is not left
            say(f"round {self._num_rounds}: {self.last.failure.summary}; the ranks are restarted, {left} left")
            self._kills_before = oom.read_kills()

    def stop(self, number: signal.Signals) -> tuple[Stopped, RanksFailed | None]:
        """Return the error about a signal, and its cause: the failure of a round that is not restarted."""
        pids = leftovers.ranks_left()
        left = leftovers.survival(f"pid {' '.join(map(str, pids))}") if pids else ""
        if self.last is None or self.is_restarted:
            return Stopped(number, left), None
        return stopped_after(self.last, number, left)


@contextmanager
def own_errors(program: str, plan: Plan, *, is_only_host: bool) -> Iterator[FailedRound]:
    """Yield the function that is told of failed rounds; raise our errors in place of torch's.

    Args:
        program: The script, as the user typed it.
        plan: The bindings of the ranks.
        is_only_host: Whether the job has no ranks on other hosts.
    """
    rounds = _Rounds(program, plan, is_only_host=is_only_host)
    try:
        with _former_handlers(), _without_repetitions():
            yield rounds.failed
    except SignalException as signalled:
        stop, cause = rounds.stop(signalled.sigval)
        raise stop from cause
    except RendezvousError as error:
        raise _of_rendezvous(error, rounds) from None
    except ChildFailedError:
        if rounds.last is None:
            raise
        raise rounds.last from None


def _of_rendezvous(error: RendezvousError, rounds: _Rounds) -> NumapinError:
    """Return the error about hosts that do not meet, or the failure of this host's ranks before that."""
    message, hint = _NOT_MET.get(type(error).__name__, (f"the hosts of the job did not meet: {error}", _SEE_OTHERS))
    if rounds.last is None:
        return NumapinError(message, hint)
    say(f"{message}; the ranks are not restarted")
    return rounds.last


@contextmanager
def _former_handlers() -> Iterator[None]:
    """Take back torch's signal handlers at the end: they would raise while the account is printed."""
    former = {number: signal.getsignal(number) for number in _TORCHS_SIGNALS}
    try:
        yield
    finally:
        for number, handler in former.items():
            if handler is not None:  # of another language
                signal.signal(number, handler)


@contextmanager
def _without_repetitions() -> Iterator[None]:
    """Drop messages of torch's log that say what we say, unless the user chose a level for the log."""
    names = () if os.environ.get("LOGLEVEL") else _LOGGERS
    for name in names:
        logging.getLogger(name).addFilter(_is_news)
    try:
        yield
    finally:
        for name in names:
            logging.getLogger(name).removeFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_SAID_BY_US)
