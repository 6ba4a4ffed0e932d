"""Process 1 of a container: adopt and reap what others leave behind, and pass signals on.

The launcher then waits for its own children only, and nothing takes their exit statuses away from it.

Without that, each orphan stays a zombie until the container ends, because nothing else adopts it, and the kernel drops
every signal that the launcher does not handle yet.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from typing import NoReturn

_FOR_THE_LEADER: Final = (signal.SIGHUP, signal.SIGCONT)
"""When a terminal hangs up, the kernel sends these to the leader of its session only: to process 1 (docker run -t)."""


def supervise_if_init() -> None:
    """If this is process 1, return in a child only. This process stays its supervisor and exits with its status."""
    if os.getpid() != 1:
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    _supervise(child)


def _supervise(child: int) -> NoReturn:
    """Reap children and pass signals on until the child has ended; then end the container with its exit status.

    Other signals of a terminal (si_code > 0) go to the whole process group, so the child has them already.
    """
    while True:
        received = signal.sigwaitinfo(signal.valid_signals())
        if received.si_signo == signal.SIGCHLD:
            _reap(child)
        elif received.si_code <= 0 or received.si_signo in _FOR_THE_LEADER:
            with suppress(ProcessLookupError):
                os.kill(child, received.si_signo)


def _reap(child: int) -> None:
    """Reap all children that have ended; exit if the one to supervise is among them."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = ended
            if pid == child:
                code = os.waitstatus_to_exitcode(status)
                os._exit(code if code >= 0 else 128 - code)
