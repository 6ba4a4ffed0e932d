"""Become the user's program. Edge.

Comes in: a command, and the rank's slice of the plan as JSON. Goes out: the program, in this process, which finds the
slice in NUMAPIN_BINDING.

Each rank imports this before its program starts: the standard library only, and of that nothing that imports enum or
typing, as `signal` does. It wraps the builtin module `_signal`, whose numbers and functions these are.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import os

from numapin.base.stderr import say

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final, NoReturn

BINDING: Final = "NUMAPIN_BINDING"
SIGKILL: Final = _signal.SIGKILL
FORWARDED: Final = (_signal.SIGUSR1, _signal.SIGUSR2)
"""What the launcher passes on to the ranks; blocked in each until `accept`."""
SHIM: Final = _signal.SIGRTMAX
"""Blocked in shims besides, which tells them from programs that block the others to wait for them (sigwait)."""


def accept() -> None:
    """Let the signals through to this process's program; those that came before it are dropped.

    The launcher gets what is sent to a whole job, too, and gives it to the rank when its program can take it.
    """
    while _signal.sigtimedwait(FORWARDED, 0) is not None:
        pass
    _signal.pthread_sigmask(_signal.SIG_UNBLOCK, (*FORWARDED, SHIM))


def become(command: list[str], binding: str, num_threads: int) -> NoReturn:
    """Become the command, which finds in its environment what holds for its rank: `binding` is its slice, JSON.

    Leaves with status 127 where the command does not exist and 126 where it cannot be executed. Python ignores SIGPIPE
    and SIGXFSZ, and what is ignored stays so across exec: `yes` would not end with `head`.
    """
    os.environ[BINDING] = binding
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num_threads)))  # a plan that a user wrote may say 0
    for number in (_signal.SIGPIPE, _signal.SIGXFSZ):
        _signal.signal(number, _signal.SIG_DFL)
    try:
        os.execvp(command[0], command)  # noqa: S606 - the user's own command
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        searched = missing and os.sep not in command[0]
        say(f"{command[0]}: {'command not found' if searched else error.strerror}")
        os._exit(127 if missing else 126)
