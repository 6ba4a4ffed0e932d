"""Become the user's program. Edge.

Comes in: a command and the rank's plan. Goes out: the program, in this process, which finds the plan in
NUMAPIN_BINDING.

Each rank imports this before its program starts: the standard library only.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Final

from numapin.base.stderr import say
from numapin.base.strict_json import encode

if TYPE_CHECKING:
    from typing import NoReturn

    from numapin.plan.model import RankPlan

BINDING: Final = "NUMAPIN_BINDING"


def become(command: list[str], rank: RankPlan) -> NoReturn:
    """Become the command, which finds in its environment what holds for its rank.

    Leaves with status 127 where the command does not exist and 126 where it cannot be executed. Python ignores SIGPIPE
    and SIGXFSZ, and what is ignored stays so across exec: `yes` would not end with `head`.
    """
    os.environ[BINDING] = encode(rank.to_json(), indent=None)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, rank.num_threads)))  # a plan that a user wrote may say 0
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)  # noqa: S606 - the user's own command
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        searched = missing and os.sep not in command[0]
        say(f"{command[0]}: {'command not found' if searched else error.strerror}")
        os._exit(127 if missing else 126)
