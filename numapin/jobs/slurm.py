"""Slurm: a script for sbatch. Pure.

Comes in: a `JobRequest`. Goes out: its text. With --form node srun starts `numapin run` once a node, with --form task
`numapin exec` once a rank. Option names are those of Slurm 22.05 and later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from numapin.jobs import duration, shell
from numapin.jobs.image import for_pyxis
from numapin.jobs.request import Form

if TYPE_CHECKING:
    from numapin.jobs.request import JobRequest

_FIRST: Final = """\
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_ADDR=${hosts[0]}"""
_PORT: Final = """\
MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000)) # below the ports that Linux gives away by itself
export MASTER_ADDR MASTER_PORT"""
_RANK: Final = "RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID LOCAL_WORLD_SIZE={ranks}"
# Which node answers is said, and not found by comparing names; and each node goes by the name that Slurm reaches it by.
_MEETING: Final = 'PET_RDZV_CONF="is_host=$((SLURM_NODEID == 0))" PET_LOCAL_ADDR="$SLURMD_NODENAME"'
# In the grace time of a preemption Slurm tells the steps and not the batch script, and a job that ends in it is over.
# Gang scheduling may set PreemptTime, too, before it suspends the job, which goes on later; both times stay.
# SuspendTime is when a job was last suspended or resumed (slurm.h).
_PREEMPTED: Final = """\
job=$(SLURM_TIME_FORMAT=standard scontrol show job "$SLURM_JOB_ID") && [[ $job =~ PreemptTime=([0-9][0-9T:-]*) ]] &&
    preempted=${BASH_REMATCH[1]} && [[ ! $job =~ SuspendTime=([0-9][0-9T:-]*) || $preempted > ${BASH_REMATCH[1]} ]]"""


def build(request: JobRequest) -> str:
    """Return the script."""
    requeue = 'scontrol requeue "$SLURM_JOB_ID"' if request.requeue else ""
    return shell.script(
        ["#!/bin/bash", *_directives(request)],
        shell.preparation(request),
        _address(request),
        [
            "# Slurm binds nothing: numapin places each rank within the CPUs that the job has on its node.",
            "# shellcheck disable=SC2016 # the shell of each task puts these in",
            *shell.run_to_its_end(request, _srun(request), requeue=requeue, preempted=_PREEMPTED),
        ],
    )


def _address(request: JobRequest) -> str:
    """Return the lines that say where rank 0 is: `numapin run` on a single node needs none."""
    if request.nodes > 1:
        identity = f"\n{shell.RENDEZVOUS_ID}" if request.form is Form.NODE else ""
        return f"{_FIRST}\n{_PORT}{identity}"
    return f"MASTER_ADDR=127.0.0.1\n{_PORT}" if request.form is Form.TASK else ""


def _directives(request: JobRequest) -> list[str]:
    """Return the lines for sbatch. Every value is a number or was checked: sbatch has no quoting to rely on."""
    options = {
        "job-name": request.job_name,
        "nodes": str(request.nodes),
        "ntasks-per-node": str(request.tasks_per_node),
        "gpus-per-node": str(request.gpus_per_node) if request.gpus_per_node else None,
        "cpus-per-task": _text(request.cpus_per_task),
        "hint": "multithread" if request.smt else "nomultithread",
        "mem": _memory(request),
        "time": request.time_s and duration.with_days(request.time_s),
        "partition": request.queue,
        "account": request.account,
        "signal": request.signal_s and f"B:USR1@{request.signal_s}",
        "output": "%x-%j.out",
        "open-mode": "append" if request.requeue else None,
    }
    flags = {"exclusive": request.whole_nodes, "requeue": request.requeue}
    lines = [f"#SBATCH --{name}={value}" for name, value in options.items() if value]
    return [*lines, *(f"#SBATCH --{name}" for name, wanted in flags.items() if wanted)]


def _memory(request: JobRequest) -> str | None:
    """Return the memory of a node: what was asked, all of a node of one's own, or what the cluster gives."""
    if request.memory_bytes:
        return f"{request.memory_bytes >> 20}M"
    return "0" if request.whole_nodes else None


def _srun(request: JobRequest) -> str:
    """Return the srun line. srun does not inherit --cpus-per-task from sbatch since 22.05."""
    options = [f"--nodes={request.nodes}", f"--ntasks-per-node={request.tasks_per_node}"]
    if request.cpus_per_task:
        options.append(f"--cpus-per-task={request.cpus_per_task}")
    # Ranks of one node see all the job's GPUs there: CUDA's shortcuts between processes need both ends visible. No
    # --gpu-bind=none for that: with it Slurm 22.05 gives several tasks of a node no CUDA_VISIBLE_DEVICES, and they see
    # other jobs' GPUs where no cgroup forbids it.
    bindings = ["--cpu-bind=none", "--mem-bind=none"]
    pyxis = request.container and for_pyxis(request.container)
    mounts = ['--container-mounts="$PWD:$PWD"', '--container-workdir="$PWD"']
    image = [f"--container-image={pyxis}", *mounts] if pyxis else []
    tasks = shell.started(request, _RANK.format(ranks=request.ranks), _MEETING, apptainer=not image)
    return shell.statement(["srun", *options], [*bindings, "--kill-on-bad-exit=1"], image, *tasks)


def _text(number: int | None) -> str | None:
    return None if number is None else str(number)
