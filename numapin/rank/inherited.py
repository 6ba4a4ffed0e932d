"""Settings that a launcher inherits and changes for its ranks: the limit on open files, an outer rank's variables.

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

    with suppress(ValueError):
        planned = decode(binding)
        num_threads = planned.get("num_threads") if isinstance(planned, dict) else None
        if isinstance(num_threads, int):
            return str(max(1, num_threads))
    return None
