"""LSF: a script for bsub, in which mpirun starts the ranks. Pure.

Comes in: a `JobRequest`. Goes out: the script's text. Option names are those of LSF 10.1.0.9 and later. GPUs and memory
are marked as per host, because plain numbers are per task on clusters with RESOURCE_RESERVE_PER_TASK.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from numapin.jobs import duration, mpi, shell

if TYPE_CHECKING:
    from numapin.jobs.request import JobRequest

_REQUEUE_STATUS: Final = 85
"""Any status that neither bash nor numapin ends with."""


def build(request: JobRequest) -> str:
    """Return the script. LSF requeues a job that ends with the status given to it."""
    requeue = f"status={_REQUEUE_STATUS}" if request.requeue and request.signal_s else ""
    return shell.script(
        ["#!/bin/bash", *_directives(request)],
        shell.preparation(request),
        *mpi.body(request, hosts=["--hostfile", '"$LSB_DJOB_HOSTFILE"'], requeue=requeue),
    )


def _directives(request: JobRequest) -> list[str]:
    gpus = request.gpus_per_node
    options = {
        "-J ": request.job_name,
        "-n ": request.nodes * request.tasks_per_node,
        "-R ": f'"{_resources(request)}"',
        "-gpu ": gpus and f'"num={gpus}/host:mode=shared:j_exclusive=yes"',
        "-x": request.whole_nodes,
        "-W ": request.time_s and duration.hours_and_minutes(request.time_s),
        "-q ": request.queue,
        "-P ": request.account,
        "-wa USR1 -wt ": request.signal_s and duration.minutes_begun(request.signal_s),
        "-r": request.requeue,
        "-Q ": request.requeue and request.signal_s and _REQUEUE_STATUS,
        "-o ": f"{request.job_name}-%J.out",
    }
    return shell.directives("#BSUB", options)


def _resources(request: JobRequest) -> str:
    """Return the resources per host. On exclusive hosts no CPUs are requested, or LSF would bind the tasks to them."""
    parts = [f"span[ptile={request.tasks_per_node}]"]
    if request.memory_bytes:
        parts.append(f"rusage[mem={request.memory_bytes >> 20}MB/host]")
    if request.cpus_per_task is not None and not request.whole_nodes:
        parts.append(f"affinity[{'thread' if request.smt else 'core'}({request.cpus_per_task})]")
    return " ".join(parts)
