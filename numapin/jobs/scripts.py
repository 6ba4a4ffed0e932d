"""Job scripts for Slurm, Open MPI, PBS and LSF, as text for bash.

All words of the user go through `quote`; everything else is numapin's own. Option names are those of Slurm 22.05, Open
MPI 4, OpenPBS and PBS Professional, LSF 10.1.0.9, and later.
"""

from __future__ import annotations

import re
from importlib import resources
from typing import TYPE_CHECKING, Final

from numapin.base.formats import quote
from numapin.errors import UsageError
from numapin.jobs import notation
from numapin.jobs.notation import for_apptainer, for_pyxis
from numapin.jobs.request import Form, JobRequest
from numapin.topology.vendors import support_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

# Every DataLoader worker holds pipes and memory; the usual limit of 1024 files is too low for eight ranks' loaders.
OPEN_FILES: Final = 'ulimit -S -n 65536 2>/dev/null || ulimit -S -n "$(ulimit -H -n)"'

# The random id is in the environment, as PET_RDZV_ID: `ps` would show --rdzv-id to every user of the host.
_RENDEZVOUS: Final = ("--rdzv-backend=c10d", '--rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT"')

# --- what all scripts have -------------------------------------------------------------------------------------------


def run_command(request: JobRequest) -> tuple[str, ...]:
    """Return the end of a `numapin run` line."""
    flags = {"--module": request.module, "--no-python": request.no_python}
    return *(flag for flag, is_given in flags.items() if is_given), *request.command


def rank_command(request: JobRequest) -> tuple[str, ...]:
    """Return a rank's command line, as `numapin run` would start it."""
    python = () if request.no_python else ("python", "-u")
    return *python, *(["-m"] if request.module else []), *request.command


def _part(name: str) -> str:
    """Return a part of scripts that is always the same."""
    return (resources.files("numapin.jobs") / "templates" / f"{name}.sh").read_text(encoding="ascii").rstrip()


def _script(*parts: str | Iterable[str]) -> str:
    """Join parts to a script, with an empty line between them. Empty parts are left out."""
    return "\n\n".join(filter(None, (part if isinstance(part, str) else "\n".join(part) for part in parts))) + "\n"


def _statement(*groups: Iterable[str]) -> str:
    """Return one command of several lines, with one group of words per line."""
    return " \\\n    ".join(" ".join(group) for group in map(tuple, groups) if group)


def _preparation(request: JobRequest, *, folder: str = "") -> list[str]:
    """Return the first lines: a clean environment, `cd folder` if the manager starts elsewhere, the user's own lines.

    bash's strict mode comes last, because `activate` scripts may fail in it.
    """
    # With another agent's USE_AGENT_STORE, no rank of a job without agents would serve the store, and all would wait.
    # Variables that users set for their own launcher (TORCHELASTIC_ENABLE_FILE_TIMER) stay. OMP_NUM_THREADS is the
    # user's, unless a launcher has set it.
    change_folder = [f"cd {folder} || exit"] if folder else []
    return [_part("clean_environment"), *change_folder, *request.setup, "set -euo pipefail"]


def _directives(mark: str, options: Mapping[str, object]) -> list[str]:
    """Return a manager's directives, one per line, from option texts and the values that follow them directly.

    True is an option without a value. None, False, 0 and empty values leave the option out. Every value is a number or
    was checked, because managers have no reliable quoting.
    """
    return [f"{mark} {option}{'' if value is True else value}" for option, value in options.items() if value]


def _started(request: JobRequest, rank_variables: str, meeting: str, *, apptainer: bool = True) -> list[Iterable[str]]:
    """Return the command of each task, one group of words per line: shell, container, numapin, the user's program.

    The shell exports the variables that only the task knows: `rank_variables` with one task per rank, `meeting` with
    one task per host and several hosts. `apptainer` is False if the manager itself runs the task in the image.
    """
    is_task, has_hosts = request.form is Form.TASK, request.nodes > 1
    variables = rank_variables if is_task else meeting
    exports = [f"    export {variables}"] if is_task or has_hosts else []
    lines = ["bash -c '", f"    {OPEN_FILES}", *exports, '    exec "$@"\' bash']
    container: list[str] = []
    if request.container and apptainer:
        options_of_gpus = support_of(request.vendor).apptainer_options
        container = ["apptainer", "exec", *options_of_gpus, for_apptainer(request.container)]
    options = [quote(option) for option in request.run_options]
    shell = ["\n".join(lines)]
    if is_task:
        return [shell, container, ["numapin", "exec", *options, "--"], map(quote, rank_command(request))]
    nnodes = [f"--nnodes={request.nodes}"] if has_hosts else []
    start = ["numapin", "run", *nnodes, f"--nproc-per-node={request.num_ranks}"]
    rendezvous = _RENDEZVOUS if has_hosts else ()
    return [shell, container, start, rendezvous, options, map(quote, run_command(request))]


def _run_to_its_end(
    request: JobRequest, start: str, *, timer_s: int | None = None, requeue: str = "", preempted: str = ""
) -> list[str]:
    """Return the lines that run `start` and handle signals.

    Without --signal and `requeue` the script becomes `start`. Otherwise it waits for it and passes SIGUSR1 on, which it
    sends itself `timer_s` seconds after the start if the manager cannot. If the program then ends with status 0, it has
    saved and is not done: `requeue` puts the job back into its queue. `preempted` is a command that succeeds if the
    manager ended the program; then the job is requeued whatever its status is.
    """
    if request.signal_s is None and not requeue:
        return [f"exec {start}"]
    # `ending` records that the job was asked to save and end.
    initial, on_usr1 = (" ending=0", "ending=1; ") if requeue else ("", "")
    lines = [
        f"{start} &",
        "run=$!",
        f"signals=0{initial}",
        f"trap 'signals=$((signals + 1)); {on_usr1}kill -USR1 \"$run\" || true' USR1",
        "trap 'signals=$((signals + 1)); kill -TERM \"$run\" || true' TERM",
    ]
    if timer_s:
        lines += ["(", f"    sleep {timer_s} &", "    trap 'kill \"$!\"; exit' TERM"]
        lines += ['    wait "$!"', "    kill -USR1 $$", ") &", "timer=$!"]
    lines.append(_part("wait"))
    if timer_s:
        lines.append('kill "$timer" 2>/dev/null || true')
    if preempted:
        lines += [f"if {preempted}; then", "    ending=1 status=0 # the manager ended the ranks", "fi"]
    if requeue:
        lines += ['if [ "$ending" = 1 ] && [ "$status" = 0 ]; then # it saved, and is not done', f"    {requeue}", "fi"]
    return [*lines, 'exit "$status"']


# --- Slurm -----------------------------------------------------------------------------------------------------------

_INDICES: Final = "[0-9]{1,9}(?:-[0-9]{1,9}(?::[1-9][0-9]{0,8})?)?"
_ARRAY: Final = re.compile(f"{_INDICES}(?:,{_INDICES})*")
_LIMIT: Final = re.compile(r"[1-9][0-9]{0,8}")
_RANGE: Final = re.compile(r"([0-9]+)-([0-9]+)")


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


def slurm(request: JobRequest) -> str:
    """Return a script for sbatch. srun starts `numapin run` once per host, or `numapin exec` once per rank.

    The ranks of a host see all of the job's GPUs there, because CUDA's transfers between processes need both GPUs to be
    visible. --gpu-bind=none is not used: with it Slurm 22.05 gives several tasks of a host no CUDA_VISIBLE_DEVICES, and
    they see other jobs' GPUs unless a cgroup forbids it. Since 22.05 srun does not inherit --cpus-per-task from sbatch.
    """
    is_task = request.form is Form.TASK
    memory = "0" if request.whole_nodes else None  # all of an exclusive host's; None: the cluster's default
    options = {
        "--job-name=": request.job_name,
        "--nodes=": request.nodes,
        "--ntasks-per-node=": request.tasks_per_node,
        "--gpus-per-node=": request.gpus_per_node,
        "--cpus-per-task=": request.cpus_per_task,
        "--hint=": "multithread" if request.smt else "nomultithread",
        "--mem=": f"{request.memory_bytes >> 20}M" if request.memory_bytes else memory,
        "--time=": request.time_s and notation.with_days(request.time_s),
        "--partition=": request.queue,
        "--account=": request.account,
        "--signal=B:USR1@": request.signal_s,
        "--array=": request.array,
        "--output=": "%x-%A_%a.out" if request.array else "%x-%j.out",
        "--open-mode=": request.requeue and "append",
        "--exclusive": request.whole_nodes,
        "--requeue": request.requeue,
    }
    port = "MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000)) # below Linux's range of ephemeral ports"
    address = [port, "export MASTER_ADDR MASTER_PORT"]
    if request.nodes > 1:
        hosts = 'mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")'
        address = [hosts, "MASTER_ADDR=${hosts[0]}", *address, *([] if is_task else [_part("rendezvous_id")])]
    else:  # numapin run on a single host needs no address
        address = ["MASTER_ADDR=127.0.0.1", *address] if is_task else []

    step = [f"--nodes={request.nodes}", f"--ntasks-per-node={request.tasks_per_node}"]
    if request.cpus_per_task:
        step.append(f"--cpus-per-task={request.cpus_per_task}")
    pyxis = request.container and for_pyxis(request.container)
    mounts = ['--container-mounts="$PWD:$PWD"', '--container-workdir="$PWD"']
    image = [f"--container-image={pyxis}", *mounts] if pyxis else []
    ids = f"RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID LOCAL_WORLD_SIZE={request.num_ranks}"
    # State which host serves the rendezvous, so that no names are compared, and use the names by which Slurm reaches
    # hosts.
    meeting = 'PET_RDZV_CONF="is_host=$((SLURM_NODEID == 0))" PET_LOCAL_ADDR="$SLURMD_NODENAME"'
    srun = _statement(
        ["srun", *step],
        ["--cpu-bind=none", "--mem-bind=none", "--kill-on-bad-exit=1"],
        image,
        *_started(request, ids, meeting, apptainer=not image),
    )
    # In the grace time of a preemption Slurm signals the steps but not the batch script, and does not requeue a job
    # that ends in it. Gang scheduling may also set PreemptTime before it suspends a job that continues later; both
    # times stay. SuspendTime is the time of the last suspension or resumption (slurm.h).
    requeue, preempted = ('scontrol requeue "$SLURM_JOB_ID"', _part("preempted")) if request.requeue else ("", "")
    return _script(
        ["#!/bin/bash", *_directives("#SBATCH", options)],
        _preparation(request),
        address,
        [
            "# Slurm binds nothing: numapin binds each rank within the job's CPUs on its host.",
            "# shellcheck disable=SC2016 # expanded by the shell of each task",
            *_run_to_its_end(request, srun, requeue=requeue, preempted=preempted),
        ],
    )


# --- Open MPI, and the managers in which mpirun starts the ranks -----------------------------------------------------


def mpi(request: JobRequest) -> str:
    """Return a script around mpirun."""
    return _script(["#!/bin/bash"], _preparation(request), *_mpirun(request))


def _mpirun(
    request: JobRequest, *, hosts: Sequence[str] = (), timer_s: int | None = None, requeue: str = ""
) -> list[str | list[str]]:
    """Return the parts that find the first host, choose the exported variables, and run mpirun on `hosts`."""
    hosts = [*hosts, *(["--hostfile", quote(request.hostfile)] if request.hostfile else [])]
    address: list[str] = []
    if request.nodes > 1 or request.form is Form.TASK:  # numapin run on a single host needs no address
        # Only mpirun knows its hosts.
        first = "127.0.0.1" if request.nodes == 1 else f"$({' '.join(['mpirun', '-np', '1', *hosts, 'hostname'])})"
        port = "MASTER_PORT=$((10000 + RANDOM % 20000)) # below Linux's range of ephemeral ports"
        identity = [_part("rendezvous_id")] if request.form is Form.NODE else []
        address = [f"MASTER_ADDR={first}", port, "export MASTER_ADDR MASTER_PORT", *identity]
    tasks = request.tasks_per_node
    placing = ["-np", str(request.nodes * tasks), "--map-by", f"ppr:{tasks}:node", "--bind-to", "none"]
    ids = (
        "RANK=$OMPI_COMM_WORLD_RANK WORLD_SIZE=$OMPI_COMM_WORLD_SIZE "
        "LOCAL_RANK=$OMPI_COMM_WORLD_LOCAL_RANK LOCAL_WORLD_SIZE=$OMPI_COMM_WORLD_LOCAL_SIZE"
    )
    meeting = 'PET_RDZV_CONF="is_host=$((OMPI_COMM_WORLD_RANK == 0))" PET_LOCAL_ADDR="$(hostname)"'
    start = _statement(["mpirun", *hosts, *placing, '"${forward[@]}"'], *_started(request, ids, meeting))
    return [
        address,
        _part("export_variables"),  # mpirun exports only those that it is given
        [
            "# mpirun binds nothing: numapin binds each rank within its allowed CPUs.",
            "# shellcheck disable=SC2016 # expanded by the shell of each task",
            *_run_to_its_end(request, start, timer_s=timer_s, requeue=requeue),
        ],
    ]


def pbs(request: JobRequest) -> str:
    """Return a script for qsub. PBS cannot send a signal before the time limit, so a timer in the script does.

    Raises UsageError if the number of CPUs is unknown.
    """
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
    options = {
        "-N ": request.name or request.job_name[:15].rstrip("-"),  # some PBS take 15 letters
        "-l select=": ":".join([str(request.nodes), *given]),
        "-l place=scatter": ":excl" if request.whole_nodes else True,
        "-l walltime=": request.time_s and notation.clock(request.time_s),
        "-q ": request.queue,
        "-A ": request.account,
        "-r ": request.requeue and "y",
        "-j ": "oe",
        "-V": True,
    }
    timer_s = request.time_s - request.signal_s if request.time_s and request.signal_s else None
    return _script(
        ["#!/bin/bash", *_directives("#PBS", options)],
        _preparation(request, folder='"$PBS_O_WORKDIR"'),
        *_mpirun(request, hosts=["--hostfile", '"$PBS_NODEFILE"'], timer_s=timer_s),
    )


def pbs_warnings(request: JobRequest) -> tuple[str, ...]:
    """Return the parts of the request that PBS cannot do."""
    if request.signal_s and request.requeue:
        return ("a PBS job cannot requeue itself after --signal: submit it again",)
    return ()


def lsf(request: JobRequest) -> str:
    """Return a script for bsub. LSF requeues a job that ends with the status given to it.

    GPUs and memory are marked as per host, because plain numbers are per task on clusters with
    RESOURCE_RESERVE_PER_TASK. On exclusive hosts no CPUs are requested, or LSF would bind the tasks to them.
    """
    gpus, requeue_status = request.gpus_per_node, 85  # neither bash nor numapin ends with it
    resources = [f"span[ptile={request.tasks_per_node}]"]
    if request.memory_bytes:
        resources.append(f"rusage[mem={request.memory_bytes >> 20}MB/host]")
    if request.cpus_per_task is not None and not request.whole_nodes:
        resources.append(f"affinity[{'thread' if request.smt else 'core'}({request.cpus_per_task})]")
    options = {
        "-J ": request.job_name,
        "-n ": request.nodes * request.tasks_per_node,
        "-R ": f'"{" ".join(resources)}"',
        "-gpu ": gpus and f'"num={gpus}/host:mode=shared:j_exclusive=yes"',
        "-x": request.whole_nodes,
        "-W ": request.time_s and notation.hours_and_minutes(request.time_s),
        "-q ": request.queue,
        "-P ": request.account,
        "-wa USR1 -wt ": request.signal_s and notation.minutes_begun(request.signal_s),
        "-r": request.requeue,
        "-Q ": request.requeue and request.signal_s and requeue_status,
        "-o ": f"{request.job_name}-%J.out",
    }
    requeue = f"status={requeue_status}" if request.requeue and request.signal_s else ""
    return _script(
        ["#!/bin/bash", *_directives("#BSUB", options)],
        _preparation(request),
        *_mpirun(request, hosts=["--hostfile", '"$LSB_DJOB_HOSTFILE"'], requeue=requeue),
    )
