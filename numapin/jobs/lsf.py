"""LSF: a script for bsub, in which mpirun starts the ranks. Pure.

Comes in: a `JobRequest`. Goes out: its text. Option names are those of LSF 10.1.0.9 and later. GPUs and memory say that
they are a host's: a number alone is a task's where a cluster has RESOURCE_RESERVE_PER_TASK.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from numapin.jobs import duration, mpi, shell

if TYPE_CHECKING:
    from numapin.jobs.request import JobRequest

_REQUEUE_STATUS: Final = 85
"""Any status will do that neither bash nor numapin ends with."""


def build(request: JobRequest) -> str:
    """Return the script; LSF puts a job back into the queue that ends with a status named to it."""
    requeue = f"status={_REQUEUE_STATUS}" if request.requeue and request.signal_s else ""
    return shell.script(
        ["#!/bin/bash", *_directives(request)],
        shell.preparation(request),
        *mpi.body(request, hosts=["--hostfile", '"$LSB_DJOB_HOSTFILE"'], requeue=requeue),
    )


def _directives(request: JobRequest) -> list[str]:
    gpus = f'-gpu "num={request.gpus_per_node}/host:mode=shared:j_exclusive=yes"' if request.gpus_per_node else ""
    signal = f"-wa USR1 -wt {duration.minutes_begun(request.signal_s)}" if request.signal_s else ""
    options = [
        f"-J {request.job_name}",
        f"-n {request.nodes * request.tasks_per_node}",
        f'-R "{_resources(request)}"',
        gpus,
        "-x" if request.whole_nodes else "",
        f"-W {duration.hours_and_minutes(request.time_s)}" if request.time_s else "",
        f"-q {request.queue}" if request.queue else "",
        f"-P {request.account}" if request.account else "",
        signal,
        "-r" if request.requeue else "",
        f"-Q {_REQUEUE_STATUS}" if request.requeue and request.signal_s else "",
        f"-o {request.job_name}-%J.out",
    ]
    return [f"#BSUB {option}" for option in options if option]


def _resources(request: JobRequest) -> str:
    """Return the hosts' shape. On hosts of one's own nothing is said of CPUs: LSF would bind the tasks to them."""
    parts = [f"span[ptile={request.tasks_per_node}]"]
    if request.memory_bytes:
        parts.append(f"rusage[mem={request.memory_bytes >> 20}MB/host]")
    if request.cpus_per_task is not None and not request.whole_nodes:
        parts.append(f"affinity[{'thread' if request.smt else 'core'}({request.cpus_per_task})]")
    return " ".join(parts)
