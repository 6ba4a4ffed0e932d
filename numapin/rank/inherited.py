"""What a launcher inherits and changes for its ranks: the limit on open files, and the variables of an outer rank.

`numapin exec` imports this before the program starts: the standard library only.
"""

from __future__ import annotations

import os
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import MutableMapping
    from typing import Final

OPEN_FILES: Final = 65536
"""Every DataLoader worker holds pipes and memory: the usual limit of 1024 is too low for the loaders of eight ranks."""
_OF_AGENTS: Final = ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_TIMER_FILE")
_OF_RANKS: Final = ("LOCAL_RANK", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "NUMAPIN_BINDING")


def raise_open_files() -> str:
    """Raise this process's limit on open files to OPEN_FILES, or to the hard limit; return what was done, for people.

    A higher limit stays. "" means that nothing was changed.
    """
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return ""
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return f"open files: the limit is raised from {soft} to {wanted}, because each DataLoader worker holds several"


def forget_outer_rank(environ: MutableMapping[str, str]) -> tuple[str, ...]:
    """Remove what a launcher has set for an outer rank, and return the names of these variables.

    The outer rank has started this launcher, or has submitted its job. Its number of threads, NICs and timers are not
    those of the ranks that this launcher starts. Nor is its store: with TORCHELASTIC_USE_AGENT_STORE, no rank of a job
    without a launcher's store would serve one, and all would wait. RANK and LOCAL_RANK stay: they say that this
    launcher runs inside a rank, and its own ranks get others. So does a number of threads that the user has set. A job
    script sets NUMAPIN_HOSTS to "new": its launchers are not inside the rank that has submitted the job.
    """
    binding = environ.get("NUMAPIN_BINDING")
    forgotten = [*_OF_RANKS] if environ.get("NUMAPIN_HOSTS") == "new" else []
    if binding is not None or "TORCHELASTIC_RUN_ID" in environ:
        forgotten += [*_OF_AGENTS, *environ.get("NUMAPIN_NIC_ENV", "").split(":"), "NUMAPIN_NIC_ENV"]
        if environ.get("OMP_NUM_THREADS") == _threads_of(binding):
            forgotten.append("OMP_NUM_THREADS")
        if not os.path.isdir(environ.get("NUMAPIN_RUN_DIR", "")):  # that of a run on another host
            forgotten.append("NUMAPIN_RUN_DIR")
    return tuple(name for name in forgotten if environ.pop(name, None) is not None)


def _threads_of(binding: str | None) -> str | None:
    """Return the number of threads that the launcher of a rank has set; torchrun, which leaves no binding, sets 1."""
    if binding is None:
        return "1"
    from numapin.base.strict_json import decode

    with suppress(ValueError):
        planned = decode(binding)
        num_threads = planned.get("num_threads") if isinstance(planned, dict) else None
        if isinstance(num_threads, int):
            return str(max(1, num_threads))
    return None
