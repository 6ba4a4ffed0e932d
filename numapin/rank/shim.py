"""Stage 4: the shim that each rank starts as. Edge.

Comes in: `--local-rank=N --launcher=PID --exec=PROGRAM ARGUMENTS…`, as the launcher wrote it, and the run directory in
NUMAPIN_RUN_DIR. Ties this process to its launcher's life, binds it, records what the kernel says about it, and execs
the user's command. Goes out: the user's program, in the same process, bound; with NUMAPIN_BINDING (its slice of the
plan, JSON, as the kernel took it) in its environment.

It is started with `python -I -S`, without site-packages, so that it costs milliseconds: this module and what it imports
may use the standard library only.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING, Final

from numapin.base.stderr import say
from numapin.errors import NumapinError
from numapin.plan.model import Plan
from numapin.rank import bind, handover, signals
from numapin.rank.become import become
from numapin.system import proc, process

if TYPE_CHECKING:
    from numapin.plan.model import RankPlan

_PACKAGE_PARENT: Final = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


FIND_NUMAPIN: Final = f"import sys; sys.path.append({_PACKAGE_PARENT!r})"
"""Python code. Appended, so that nothing beside this package can take the place of a standard module."""


CODE: Final = f"import gc; gc.disable(); {FIND_NUMAPIN}; from numapin.rank.shim import main; main()"
"""What `python -I -S -c` runs as the shim."""


def main() -> None:
    """Bind, record, and become the user's command; never returns.

    LOCAL_RANK is not asked: --virtual-local-rank makes it 0 in every rank. Leaves with status 127 where the command
    does not exist and 126 where it cannot be executed, as a shell does.
    """
    local_rank = sys.argv[1].removeprefix("--local-rank=")
    _end_with(int(sys.argv[2].removeprefix("--launcher=")))
    program, rest = sys.argv[3].removeprefix("--exec="), sys.argv[4:]
    text, source = handover.take_plan(os.environ)
    rank = Plan.from_json(text, source=source).ranks[int(local_rank)]
    applied = bind.apply(rank)
    for text in bind.surprises(rank, applied.shortfalls):
        say(f"rank {local_rank}: {text}")
    _record(rank, applied)
    signals.accept()
    become([program, *rest] if program else rest, bind.as_bound(rank, applied.shortfalls))


def _end_with(launcher: int) -> None:
    """End this process, and the program that it becomes, when the launcher is gone: nobody else would end it then.

    By SIGKILL, because a launcher that could still ask its ranks to leave has done so.
    """
    process.end_with_parent(signal.SIGKILL)
    if (parent := os.getppid()) != launcher:  # it ended before that
        say(
            f"a rank leaves: its parent is process {parent} and not {launcher}, its launcher: that is gone, or the "
            "Python for ranks is a wrapper, which must exec Python"
        )
        os._exit(1)


def _record(rank: RankPlan, applied: bind.Applied) -> None:
    """Write what was requested and what holds into the run directory."""
    restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    record = {
        "schema": "numapin.observed/1",
        "local_rank": rank.local_rank,
        "rank": int(os.environ["RANK"]),
        "restart": restart,
        "pid": os.getpid(),
        "start": proc.start_time(),
        "host": os.uname().nodename,
        "requested": rank.to_json(),
        "applied": applied.to_json(),
    }
    try:
        handover.write_json(os.environ["NUMAPIN_RUN_DIR"], f"observed-{rank.local_rank}-{restart}.json", record)
    except NumapinError as error:  # a full disk is no reason to lose the job
        say(f"rank {rank.local_rank}: no record of the binding: {error.message}")
