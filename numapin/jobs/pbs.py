"""PBS: a script for qsub, in which mpirun starts the ranks. Pure.

Comes in: a `JobRequest`. Goes out: its text. Option names are those of OpenPBS and PBS Professional.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from numapin.errors import UsageError
from numapin.jobs import duration, mpi, shell

if TYPE_CHECKING:
    from numapin.jobs.request import JobRequest


def build(request: JobRequest) -> str:
    """Return the script. PBS can send no signal before the end: a timer does."""
    timer_s = request.time_s - request.signal_s if request.time_s and request.signal_s else None
    return shell.script(
        ["#!/bin/bash", *_directives(request)],
        shell.preparation(request, folder='"$PBS_O_WORKDIR"'),
        *mpi.body(request, hosts=["--hostfile", '"$PBS_NODEFILE"'], timer_s=timer_s),
    )


def warnings(request: JobRequest) -> tuple[str, ...]:
    """Return what was asked for and PBS cannot do."""
    if request.signal_s and request.requeue:
        return ("a PBS job cannot put itself back into the queue after --signal: submit it again",)
    return ()


def _directives(request: JobRequest) -> list[str]:
    if request.cpus_per_node is None:
        raise UsageError(
            "PBS gives a node's CPUs only by number", "say how many: --cpus-per-task N, or --machine FILE (topo --save)"
        )
    chunk = [f"select={request.nodes}", f"ncpus={request.cpus_per_node}", f"mpiprocs={request.tasks_per_node}"]
    if request.gpus_per_node:
        chunk.append(f"ngpus={request.gpus_per_node}")
    if request.memory_bytes:
        chunk.append(f"mem={request.memory_bytes >> 20}mb")
    options = [
        f"-N {request.name or request.job_name[:15].rstrip('-')}",  # some PBS take 15 letters
        f"-l {':'.join(chunk)}",
        f"-l place=scatter{':excl' if request.whole_nodes else ''}",
        f"-l walltime={duration.clock(request.time_s)}" if request.time_s else "",
        f"-q {request.queue}" if request.queue else "",
        f"-A {request.account}" if request.account else "",
        "-r y" if request.requeue else "",
        "-j oe",
        "-V",
    ]
    return [f"#PBS {option}" for option in options if option]
