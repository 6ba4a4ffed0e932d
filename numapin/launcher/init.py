"""Process 1 of a container, and others that wait for one child: reap what it leaves behind, and pass signals on to it.

Without that, orphans stay zombies until the container ends, and the kernel drops every signal that the launcher does
not handle yet. The launcher itself waits for its own children only: nothing takes their exit statuses away from it.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from typing import Final

_FOR_THE_LEADER: Final = (signal.SIGHUP, signal.SIGCONT)
"""When a terminal hangs up, the kernel sends these to the leader of its session only (docker run -t: process 1)."""
_STOPS: Final = (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)


def supervise_if_init() -> None:
    """If this is process 1, return in a child only. This process stays its supervisor and exits with its status."""
    if os.getpid() != 1:
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    status = supervise(child)
    os._exit(status if status >= 0 else 128 - status)


def supervise(child: int) -> int:
    """Reap children and pass signals on until this child has ended; return its status, or -n after signal n.

    All signals must be blocked. A signal that stops the child stops this process, too, unless it is process 1.
    """
    while True:
        received = signal.sigwaitinfo(signal.valid_signals())
        if received.si_signo == signal.SIGCHLD:
            with suppress(ChildProcessError):
                while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                    if ended[0] == child:
                        return os.waitstatus_to_exitcode(ended[1])
        # Other signals of a terminal (si_code > 0) go to the whole process group, so the child has them already.
        elif received.si_code <= 0 or received.si_signo in _FOR_THE_LEADER:
            with suppress(ProcessLookupError):
                os.kill(child, received.si_signo)
        if received.si_signo in _STOPS:
            os.kill(os.getpid(), signal.SIGSTOP)  # the kernel keeps it from process 1
