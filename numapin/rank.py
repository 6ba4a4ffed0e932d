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

from numapin import bind, mail, native, rundir
from numapin.errors import NumapinError
from numapin.plan import Plan
from numapin.stderr import say
from numapin.strictjson import encode

if TYPE_CHECKING:
    from typing import NoReturn

    from numapin.plan import RankPlan

BINDING: Final = "NUMAPIN_BINDING"
_PACKAGE_PARENT: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
FIND_NUMAPIN: Final = f"import sys; sys.path.append({_PACKAGE_PARENT!r})"
"""Python code. Appended, so that nothing beside this package can take the place of a standard module."""
CODE: Final = f"import gc; gc.disable(); {FIND_NUMAPIN}; from numapin.rank import main; main()"
"""What `python -I -S -c` runs as the shim."""


def main() -> None:
    """Bind, record, and become the user's command; never returns.

    LOCAL_RANK is not asked: --virtual-local-rank makes it 0 in every rank. Leaves with status 127 where the command
    does not exist and 126 where it cannot be executed, as a shell does.
    """
    local_rank = sys.argv[1].removeprefix("--local-rank=")
    _end_with(int(sys.argv[2].removeprefix("--launcher=")))
    program, rest = sys.argv[3].removeprefix("--exec="), sys.argv[4:]
    text, source = rundir.take_plan(os.environ)
    rank = Plan.from_json(text, source=source).ranks[int(local_rank)]
    applied = bind.apply(rank)
    for text in bind.surprises(rank, applied.shortfalls):
        say(f"rank {local_rank}: {text}")
    _record(rank, applied)
    mail.accept()
    become([program, *rest] if program else rest, bind.as_bound(rank, applied.shortfalls))


def _end_with(launcher: int) -> None:
    """End this process, and the program that it becomes, when the launcher is gone: nobody else would end it then.

    By SIGKILL, because a launcher that could still ask its ranks to leave has done so.
    """
    native.end_with_parent(signal.SIGKILL)
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
        "start": _start_time(),
        "host": os.uname().nodename,
        "requested": rank.to_json(),
        "applied": applied.to_json(),
    }
    try:
        rundir.write_json(os.environ["NUMAPIN_RUN_DIR"], f"observed-{rank.local_rank}-{restart}.json", record)
    except NumapinError as error:  # a full disk is no reason to lose the job
        say(f"rank {rank.local_rank}: no record of the binding: {error.message}")


def _start_time() -> int | None:
    """Return when this process started, by the kernel's clock: with the process id it names a process for good.

    Field 22 of proc_pid_stat(5); the name before it may have brackets in it. None where there is no /proc.
    """
    try:
        with open("/proc/self/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except OSError:
        return None


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
