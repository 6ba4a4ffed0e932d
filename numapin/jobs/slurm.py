"""Slurm: a script for sbatch. Pure.

Comes in: a `JobRequest`. Goes out: the script's text. srun starts `numapin run` once per host with --form node, and
`numapin exec` once per rank with --form task. Option names are those of Slurm 22.05 and later.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from numapin.jobs import duration, shell
from numapin.jobs.image import for_pyxis
from numapin.jobs.request import Form

if TYPE_CHECKING:
    from numapin.jobs.request import JobRequest

_INDICES: Final = "[0-9]{1,9}(?:-[0-9]{1,9}(?::[1-9][0-9]{0,8})?)?"
_ARRAY: Final = re.compile(f"{_INDICES}(?:,{_INDICES})*")
_LIMIT: Final = re.compile(r"[1-9][0-9]{0,8}")
_RANGE: Final = re.compile(r"([0-9]+)-([0-9]+)")
_FIRST: Final = """\
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_ADDR=${hosts[0]}"""
_PORT: Final = """\
MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000)) # below Linux's range of ephemeral ports
export MASTER_ADDR MASTER_PORT"""
_RANK: Final = "RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID LOCAL_WORLD_SIZE={num_ranks}"
# State which host serves the rendezvous, so that no names are compared, and use the names by which Slurm reaches hosts.
_MEETING: Final = 'PET_RDZV_CONF="is_host=$((SLURM_NODEID == 0))" PET_LOCAL_ADDR="$SLURMD_NODENAME"'
# In the grace time of a preemption Slurm signals the steps but not the batch script, and does not requeue a job that
# ends in it. Gang scheduling may also set PreemptTime before it suspends a job that continues later; both times stay.
# SuspendTime is the time of the last suspension or resumption (slurm.h).
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
            "# Slurm binds nothing: numapin binds each rank within the job's CPUs on its host.",
            "# shellcheck disable=SC2016 # expanded by the shell of each task",
            *shell.run_to_its_end(request, _srun(request), requeue=requeue, preempted=_PREEMPTED),
        ],
    )


def _address(request: JobRequest) -> str:
    """Return the lines that set rank 0's address. `numapin run` on a single host needs none."""
    if request.nodes > 1:
        identity = f"\n{shell.RENDEZVOUS_ID}" if request.form is Form.NODE else ""
        return f"{_FIRST}\n{_PORT}{identity}"
    return f"MASTER_ADDR=127.0.0.1\n{_PORT}" if request.form is Form.TASK else ""


def _directives(request: JobRequest) -> list[str]:
    """Return the lines for sbatch. Every value is a number or was checked, because sbatch has no reliable quoting."""
    options = {
        "--job-name=": request.job_name,
        "--nodes=": request.nodes,
        "--ntasks-per-node=": request.tasks_per_node,
        "--gpus-per-node=": request.gpus_per_node,
        "--cpus-per-task=": request.cpus_per_task,
        "--hint=": "multithread" if request.smt else "nomultithread",
        "--mem=": _memory(request),
        "--time=": request.time_s and duration.with_days(request.time_s),
        "--partition=": request.queue,
        "--account=": request.account,
        "--signal=B:USR1@": request.signal_s,
        "--array=": request.array,
        "--output=": "%x-%A_%a.out" if request.array else "%x-%j.out",
        "--open-mode=": request.requeue and "append",
        "--exclusive": request.whole_nodes,
        "--requeue": request.requeue,
    }
    return shell.directives("#SBATCH", options)


def _memory(request: JobRequest) -> str | None:
    """Return the memory per host: as requested, all of an exclusive host, or None for the cluster's default."""
    if request.memory_bytes:
        return f"{request.memory_bytes >> 20}M"
    return "0" if request.whole_nodes else None


def _srun(request: JobRequest) -> str:
    """Return the srun line: the step's shape, what Slurm must not bind, the image, and the command of each task.

    The ranks of a host see all of the job's GPUs there, because CUDA's transfers between processes need both GPUs to be
    visible. --gpu-bind=none is not used: with it Slurm 22.05 gives several tasks of a host no CUDA_VISIBLE_DEVICES, and
    they see other jobs' GPUs unless a cgroup forbids it. Since 22.05 srun does not inherit --cpus-per-task from sbatch.
    """
    step = [f"--nodes={request.nodes}", f"--ntasks-per-node={request.tasks_per_node}"]
    if request.cpus_per_task:
        step.append(f"--cpus-per-task={request.cpus_per_task}")
    bindings = ["--cpu-bind=none", "--mem-bind=none"]
    pyxis = request.container and for_pyxis(request.container)
    mounts = ['--container-mounts="$PWD:$PWD"', '--container-workdir="$PWD"']
    image = [f"--container-image={pyxis}", *mounts] if pyxis else []
    tasks = shell.started(request, _RANK.format(num_ranks=request.num_ranks), _MEETING, apptainer=not image)
    return shell.statement(["srun", *step], [*bindings, "--kill-on-bad-exit=1"], image, *tasks)


def parse_array(text: str) -> str:
    """Return the indices of a job array, as sbatch takes them. Raises ValueError."""
    indices, has_limit, limit = text.partition("%")
    is_limited = not has_limit or bool(_LIMIT.fullmatch(limit))
    if not _ARRAY.fullmatch(indices) or not is_limited:
        raise ValueError(f"{text!r} is not a list of indices, such as 0-9, 1,3,5 or 0-99%4 (four at a time)")
    for first, last in _RANGE.findall(indices):
        if int(first) > int(last):
            raise ValueError(f"{text!r} has the range {first}-{last}, which is empty")
    return text
