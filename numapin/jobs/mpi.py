"""Open MPI: a script around mpirun. Pure.

Comes in: a `JobRequest`. Goes out: the script's text, and its body for PBS and LSF, which start ranks by mpirun too.
Option names are those of Open MPI 4 and 5.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from numapin.base.quoting import quote
from numapin.jobs import shell
from numapin.jobs.request import Form

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numapin.jobs.request import JobRequest

_PORT: Final = "MASTER_PORT=$((10000 + RANDOM % 20000)) # below Linux's range of ephemeral ports"
_RANK: Final = (
    "RANK=$OMPI_COMM_WORLD_RANK WORLD_SIZE=$OMPI_COMM_WORLD_SIZE "
    "LOCAL_RANK=$OMPI_COMM_WORLD_LOCAL_RANK LOCAL_WORLD_SIZE=$OMPI_COMM_WORLD_LOCAL_SIZE"
)
_MEETING: Final = 'PET_RDZV_CONF="is_host=$((OMPI_COMM_WORLD_RANK == 0))" PET_LOCAL_ADDR="$(hostname)"'


def build(request: JobRequest) -> str:
    """Return the script."""
    return shell.script(["#!/bin/bash"], shell.preparation(request), *body(request))


def body(
    request: JobRequest, *, hosts: Sequence[str] = (), timer_s: int | None = None, requeue: str = ""
) -> list[str | list[str]]:
    """Return the parts that find the first host, choose the exported variables, and run mpirun on `hosts`."""
    hosts = [*hosts, *(["--hostfile", quote(request.hostfile)] if request.hostfile else [])]
    return [
        _address(request, hosts),
        shell.FORWARD,
        [
            "# mpirun binds nothing: numapin binds each rank within its allowed CPUs.",
            "# shellcheck disable=SC2016 # expanded by the shell of each task",
            *shell.run_to_its_end(request, _mpirun(request, hosts), timer_s=timer_s, requeue=requeue),
        ],
    ]


def _address(request: JobRequest, hosts: Sequence[str]) -> str:
    """Return the lines that set rank 0's address, which they ask mpirun for, because only mpirun knows its hosts."""
    if request.nodes == 1 and request.form is Form.NODE:
        return ""
    first = " ".join(["mpirun", "-np", "1", *hosts, "hostname"])
    address = "127.0.0.1" if request.nodes == 1 else f"$({first})"
    identity = f"\n{shell.RENDEZVOUS_ID}" if request.form is Form.NODE else ""
    return f"MASTER_ADDR={address}\n{_PORT}\nexport MASTER_ADDR MASTER_PORT{identity}"


def _mpirun(request: JobRequest, hosts: Sequence[str]) -> str:
    tasks = request.tasks_per_node
    placing = ["-np", str(request.nodes * tasks), "--map-by", f"ppr:{tasks}:node", "--bind-to", "none"]
    return shell.statement(["mpirun", *hosts, *placing, '"${forward[@]}"'], *shell.started(request, _RANK, _MEETING))
