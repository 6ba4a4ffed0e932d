"""Become the user's program.

Each rank imports this before its program starts: the standard library only, without modules that import enum or typing,
as `signal` does. `signal` is a wrapper of the built-in module `_signal`, which is used here instead.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import os

from numapin.base.stderr import say

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final, NoReturn

    from numapin.plan.model import RankPlan

BINDING: Final = "NUMAPIN_BINDING"
CHILDREN: Final = "NUMAPIN_CHILDREN"  # the plan of `numapin exec --children`, see `children.table`
SIGKILL: Final = _signal.SIGKILL
FORWARDED: Final = (_signal.SIGUSR1, _signal.SIGUSR2)
"""Signals that the launcher passes on to the ranks; blocked in each rank until `accept`."""
SHIM: Final = _signal.SIGRTMAX
"""Also blocked in shims; programs that block `FORWARDED` to wait for them (sigwait) do not block this one."""


def hold() -> None:
    """Block the signals in a launcher that has just started: they wait for its handlers and do not end it.

    SIGCHLD gets its default action: if it is inherited as ignored, children lose their exit statuses.
    """
    _signal.pthread_sigmask(_signal.SIG_BLOCK, FORWARDED)
    _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)


def accept() -> None:
    """Let the signals through to this process's program, and drop those that came earlier.

    A signal to a whole job also reaches the launcher, which sends it to the rank when the program can handle it.
    """
    while _signal.sigtimedwait(FORWARDED, 0) is not None:
        pass
    _signal.pthread_sigmask(_signal.SIG_UNBLOCK, (*FORWARDED, SHIM))


def become(command: list[str], binding: str, num_threads: int, nic_variables: dict[str, str]) -> NoReturn:
    """Exec the command, which finds `binding`, its rank's slice of the plan as JSON, in its environment.

    `nic_variables` (see `plan.nics`) replace variables of the same names; none of them is one that the user has set.

    Exits with status 127 if the command does not exist, and 126 if it cannot be executed. SIGPIPE and SIGXFSZ, which
    Python ignores, get their default action back; else `yes` would not end with `head`.
    """
    os.environ[BINDING] = binding
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num_threads)))  # a plan that a user wrote may say 0
    os.environ.update(nic_variables)
    os.environ.pop(CHILDREN, None)  # what this program starts belongs to this rank
    execute(command)


def read_binding(text: str) -> RankPlan:
    """Return the rank's part of the plan from NUMAPIN_BINDING. Raises MachineFileError that names the variable."""
    from numapin.plan.model import RankPlan

    hint = f"numapin sets it for each rank; to go on without it: unset {BINDING}"
    return RankPlan.from_json(text, source=BINDING, hint=hint)


def execute(command: list[str]) -> NoReturn:
    """Exec the command with this process's environment, with the statuses and signals that `become` describes."""
    for number in (_signal.SIGPIPE, _signal.SIGXFSZ):
        _signal.signal(number, _signal.SIG_DFL)
    try:
        os.execvp(command[0], command)  # noqa: S606 - the user's own command
    except OSError as error:
        is_missing = isinstance(error, FileNotFoundError)
        was_searched = os.sep not in command[0]
        say(f"{command[0]}: {'command not found' if is_missing and was_searched else error.strerror}")
        os._exit(127 if is_missing else 126)
