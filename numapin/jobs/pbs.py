"""PBS: a script for qsub, in which mpirun starts the ranks. Pure.

Comes in: a `JobRequest`. Goes out: the script's text. Option names are those of OpenPBS and PBS Professional.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from numapin.errors import UsageError
from numapin.jobs import duration, mpi, shell

if TYPE_CHECKING:
    from numapin.jobs.request import JobRequest


def build(request: JobRequest) -> str:
    """Return the script. PBS cannot send a signal before the time limit, so a timer in the script does."""
    timer_s = request.time_s - request.signal_s if request.time_s and request.signal_s else None
    return shell.script(
        ["#!/bin/bash", *_directives(request)],
        shell.preparation(request, folder='"$PBS_O_WORKDIR"'),
        *mpi.body(request, hosts=["--hostfile", '"$PBS_NODEFILE"'], timer_s=timer_s),
    )


def warnings(request: JobRequest) -> tuple[str, ...]:
    """Return the parts of the request that PBS cannot do."""
    if request.signal_s and request.requeue:
        return ("a PBS job cannot requeue itself after --signal: submit it again",)
    return ()


def _directives(request: JobRequest) -> list[str]:
    """Return the lines for qsub. Raises UsageError if the number of CPUs is unknown."""
    options = {
        "-N ": request.name or request.job_name[:15].rstrip("-"),  # some PBS take 15 letters
        "-l select=": _chunk(request),
        "-l place=scatter": ":excl" if request.whole_nodes else True,
        "-l walltime=": request.time_s and duration.clock(request.time_s),
        "-q ": request.queue,
        "-A ": request.account,
        "-r ": request.requeue and "y",
        "-j ": "oe",
        "-V": True,
    }
    return shell.directives("#PBS", options)


def _chunk(request: JobRequest) -> str:
    """Return the number of hosts, and the resources of each. Raises UsageError if the number of CPUs is unknown."""
    if request.cpus_per_node is None:
        raise UsageError(
            "PBS needs the CPUs of each host as a number", "give it: --cpus-per-task N, or --machine FILE (topo --save)"
        )
    resources = {
        "ncpus": request.cpus_per_node,
        "mpiprocs": request.tasks_per_node,
        "ngpus": request.gpus_per_node,
        "mem": request.memory_bytes and f"{request.memory_bytes >> 20}mb",
    }
    given = [f"{name}={value}" for name, value in resources.items() if value]
    return ":".join([str(request.nodes), *given])
