"""Become the user's program, and change what a rank inherits from the launcher and an outer rank.

Each rank imports this before its program starts: the standard library only, without modules that import enum or typing,
as `signal` does. `signal` is a wrapper of the built-in module `_signal`, which is used here instead.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import os

from numapin.base.stderr import say

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import MutableMapping
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


# --- what ranks inherit from the launcher ----------------------------------------------------------------------------

OPEN_FILES: Final = 65536
"""Every DataLoader worker holds pipes and memory: the usual limit of 1024 is too low for the loaders of eight ranks."""
_AGENT_VARIABLES: Final = ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_TIMER_FILE")
_NIC_PREFIXES: Final = ("UCX_", "NVSHMEM_")  # of the variables of --nic-env
_RANK_VARIABLES: Final = ("LOCAL_RANK", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "NUMAPIN_BINDING")


def raise_open_files() -> str:
    """Raise this process's limit on open files to OPEN_FILES, or to the hard limit; return a line that reports it.

    A higher limit stays, and so does one that the kernel refuses to change: it accepts no hard limit above fs.nr_open,
    not even the present one. "" means that nothing was changed.
    """
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return ""
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (ValueError, OSError):
        return ""
    return f"open files: the limit is raised from {soft} to {wanted}, because each DataLoader worker holds several"


def forget_outer_rank(environ: MutableMapping[str, str]) -> tuple[str, ...]:
    """Remove the variables that a launcher has set for an outer rank, and return their names.

    The outer rank has started this launcher, or has submitted its job. Its number of threads, its NICs and its timers
    do not suit the ranks that this launcher starts. Nor does its store: with TORCHELASTIC_USE_AGENT_STORE, no rank of a
    job without a launcher's store would serve one, and all would wait. RANK and LOCAL_RANK stay: they show that this
    launcher runs inside a rank, and its own ranks get others. A number of threads that the user has set stays, too. A
    job script sets NUMAPIN_HOSTS to "new": its launchers are not inside the rank that has submitted the job.
    """
    binding = environ.get("NUMAPIN_BINDING")
    forgotten = [*_RANK_VARIABLES] if environ.get("NUMAPIN_HOSTS") == "new" else []
    if binding is not None or "TORCHELASTIC_RUN_ID" in environ:
        of_nics = [name for name in environ.get("NUMAPIN_NIC_ENV", "").split(":") if name.startswith(_NIC_PREFIXES)]
        forgotten += [*_AGENT_VARIABLES, *of_nics, "NUMAPIN_NIC_ENV"]
        has_one_rank = environ.get("LOCAL_WORLD_SIZE") == "1"  # torchrun then leaves the number of threads alone
        if environ.get("OMP_NUM_THREADS") == _threads_of(binding) and not (binding is None and has_one_rank):
            forgotten.append("OMP_NUM_THREADS")
        if not os.path.isdir(environ.get("NUMAPIN_RUN_DIR", "")):  # the folder of a run on another host
            forgotten.append("NUMAPIN_RUN_DIR")
    return tuple(name for name in forgotten if environ.pop(name, None) is not None)


def _threads_of(binding: str | None) -> str | None:
    """Return the number of threads that the launcher of a rank has set; torchrun, which leaves no binding, sets 1."""
    if binding is None:
        return "1"
    from numapin.base.strict_json import decode

    try:
        planned = decode(binding)
    except ValueError:
        return None
    num_threads = planned.get("num_threads") if isinstance(planned, dict) else None
    return str(max(1, num_threads)) if isinstance(num_threads, int) else None
