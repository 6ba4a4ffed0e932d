"""Job scripts for Slurm, Open MPI, PBS and LSF, as text for bash.

`numapin run` finds the hosts of its job itself, so a script is directives, and the command that starts one launcher on
each host. All words of the user go through `quote`; everything else is numapin's own. Option names are those of Slurm
22.05, Open MPI 4, OpenPBS and PBS Professional, LSF 10.1.0.9, and later.
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
from numapin.tasks.hosts import HOST_FILES
from numapin.topology.vendors import hiding_variables, support_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_MOST_CHARS: Final = 110  # of a line with several groups of words

# --- what all scripts have -------------------------------------------------------------------------------------------


def run_command(request: JobRequest) -> tuple[str, ...]:
    """Return the end of a `numapin run` line."""
    flags = {"--module": request.module, "--no-python": request.no_python}
    return *(flag for flag, is_given in flags.items() if is_given), *request.command


def _part(name: str) -> list[str]:
    """Return lines of scripts that are always the same."""
    path = resources.files("numapin.jobs") / "templates" / f"{name}.sh"
    return path.read_text(encoding="ascii").splitlines()


def _forward() -> list[str]:
    """Return lines that list the variables for mpirun to export, with those of all vendors' GPUs."""
    prefixes = sorted({name.partition("_")[0] for name in hiding_variables()})
    return [line.replace("$gpus", "|".join(prefixes)) for line in _part("forward")]


def _statement(*groups: Iterable[str]) -> str:
    """Return one command, with a line for one group of words or a few short ones; numapin and the program come last."""
    *texts, numapin, program = (" ".join(group) for group in map(tuple, groups) if group)
    fits = len(numapin) + len(program) < _MOST_CHARS
    lines: list[str] = []
    for text in [*texts, f"{numapin} {program}"] if fits else [*texts, numapin, program]:
        if lines and len(lines[-1]) + len(text) < _MOST_CHARS:
            lines[-1] += f" {text}"
        else:
            lines.append(text)
    return " \\\n    ".join(lines)


def _script(
    request: JobRequest,
    directives: Iterable[str],
    start: str,
    *,
    folder: str = "",
    first: str = "",
    forward: Iterable[str] = (),
    end: Iterable[str] = (),
) -> str:
    """Return a script: directives, what wrote it, the user's lines, what the tasks need, and the command `start`.

    The user's lines run in `folder`, if the manager starts elsewhere. `first` is a command that sets MASTER_ADDR to the
    first host, or ends the script; it is empty if there is only one host. Without `end` the script becomes `start`, so
    that signals reach it. Else the script passes them on and waits; `end` then has the exit status, and whether SIGUSR1
    has come.
    """
    cleaned, address, quoted = _part("new_job") if first else [], list[str](), list[str]()
    if request.form is Form.TASK:
        cleaned = _part("new_ranks")
        address = [
            first or "MASTER_ADDR=127.0.0.1",
            "MASTER_PORT=$((10000 + RANDOM % 20000)) # below Linux's range of ephemeral ports",
            "export MASTER_ADDR MASTER_PORT",
        ]
        quoted = ["# shellcheck disable=SC2016 # expanded by the shell of each task"]
    enter = [f"cd {folder} || exit"] if folder and request.setup else []
    run = [*quoted, f"exec {start}"]
    if end:
        run = [*_part("signaled"), *quoted, f"{start} &", *_part("wait"), *end]
    head = ["#!/bin/bash", *directives, f"# {request.written_by}"]
    lines = [*head, *cleaned, *enter, *request.setup, *address, *forward, *run]
    return "\n".join([*lines, ""])


def _started(
    request: JobRequest, rank_variables: str, *, apptainer: bool = True, has_address: bool = False
) -> list[list[str]]:
    """Return the command of each task, one group of words per line: container, numapin, the user's program.

    With one task per rank, a shell exports `rank_variables`, which only the task knows. `apptainer` is False if the
    manager itself runs the task in the image. With `has_address`, MASTER_ADDR is the first host, which launchers cannot
    find.
    """
    container: list[str] = []
    if request.container and apptainer:
        options_of_gpus = support_of(request.vendor).apptainer_options
        container = ["apptainer", "exec", *options_of_gpus, for_apptainer(request.container)]
    options = [quote(option) for option in request.run_options]
    if request.form is Form.TASK:
        shell = ["bash", "-c", f"'export {rank_variables}; exec \"$@\"'", "bash"]
        python = [] if request.no_python else ["python", "-u", *(["-m"] if request.module else [])]
        return [shell, container, ["numapin", "exec", *options, "--"], [*python, *map(quote, request.command)]]
    address = ['--master-addr="$MASTER_ADDR"'] if has_address else []
    start = ["numapin", "run", f"--nproc-per-node={request.num_ranks}", *address, *options]
    return [container, start, [*map(quote, run_command(request))]]


# --- directives ------------------------------------------------------------------------------------------------------

_ALIASES: Final = {
    "-J": "--job-name",
    "-N": "--nodes",
    "-n": "--ntasks-per-node",
    "--ntasks": "--ntasks-per-node",
    "-c": "--cpus-per-task",
    "--cpus-per-gpu": "--cpus-per-task",
    "-G": "--gpus-per-node",
    "--gpus": "--gpus-per-node",
    "--gpus-per-task": "--gpus-per-node",
    "--gpus-per-socket": "--gpus-per-node",
    "--gres": "--gpus-per-node",
    "-t": "--time",
    "-p": "--partition",
    "-A": "--account",
    "-a": "--array",
    "-o": "--output",
    "--mem-per-cpu": "--mem",
    "--mem-per-gpu": "--mem",
    "--no-requeue": "--requeue",
}
"""Slurm's other names of our options, and options that would contradict them."""
_OURS: Final = (*dict.fromkeys(_ALIASES.values()), "--hint", "--signal", "--open-mode", "--exclusive")
_REQUIREMENT: Final = "-R"  # of LSF, where several count together
_OPTION: Final = r"--[\w-]+|-l\s*\w+|-\w"


def _directives(
    mark: str,
    options: Mapping[str, object],
    request: JobRequest,
    *,
    sample: str,
    replaceable: Sequence[str] = (),
    others: Sequence[str] = (),
) -> list[str]:
    """Return a manager's directives, one per line, from option texts and the values that follow them directly.

    True is an option without a value. None, False, 0 and empty values leave the option out. Every value is a number or
    was checked, because managers have no reliable quoting. The user's own directives come last; those of ours in
    `replaceable` give way to them. `others` are options of the manager that begin like one of ours. Raises UsageError
    for one that repeats another of ours, and with `sample` for text that is not an option.
    """
    ours = {option: f"{option}{'' if value is True else value}" for option, value in options.items() if value}
    # "-gpu" is -gpu if it is one of ours, but "-joe" is -j with a value.
    words = [*others, *(option.strip() for option in ours if re.fullmatch(r"-\w{2,} ?", option))]
    pattern = re.compile("|".join([*words, _OPTION]))
    own = []
    for line in request.directives:
        text = line.removeprefix(mark).strip()
        name = _name_of(text, mark, pattern)
        if not name:
            raise UsageError(f"--directive {line!r} is not an option", f"for example: --directive='{sample}'")
        for option in [option for option in ours if _name_of(option, mark, pattern) == name != _REQUIREMENT]:
            if option not in replaceable:
                raise UsageError(
                    f"--directive {line!r} contradicts {mark} {ours[option]}, which the script has",
                    f"see what sets it: numapin job {request.engine} --help",
                )
            del ours[option]
        own.append(text)
    return [f"{mark} {text}" for text in (*ours.values(), *own)]


def _name_of(option: str, mark: str, pattern: re.Pattern[str]) -> str:
    """Return the name of a directive's option, such as "--time", "-N" or "-lwalltime"; "" for other text."""
    match = pattern.match(option)
    name = re.sub(r"\s", "", match[0]) if match else ""
    if mark != "#SBATCH":
        return name
    if name.startswith("--") and name not in _ALIASES:  # sbatch accepts the beginning of a name
        name = next((known for known in (*_OURS, *_ALIASES) if known.startswith(name)), name)
    return _ALIASES.get(name, name)


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


def parse_gpus(text: str) -> tuple[str | None, int]:
    """Return the type, None for any, and the number of GPUs in text such as 8 or a100:8. Raises ValueError."""
    kind, colon, number = text.rpartition(":")
    if not re.fullmatch(r"-?[0-9]{1,9}", number) or (colon and not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,62}", kind)):
        raise ValueError(f"{text!r} is not a number of GPUs, such as 8, or a type and a number, such as a100:8")
    return kind or None, int(number)


def slurm(request: JobRequest) -> str:
    """Return a script for sbatch. srun starts `numapin run` once per host, or `numapin exec` once per rank.

    The ranks of a host see all of the job's GPUs there, because CUDA's transfers between processes need both GPUs to be
    visible. --gpu-bind=none is not used: with it Slurm 22.05 gives several tasks of a host no CUDA_VISIBLE_DEVICES, and
    they see other jobs' GPUs unless a cgroup forbids it. Since 22.05 srun does not inherit --cpus-per-task from sbatch.
    """
    gpus, log = request.gpus_per_node, "%x-%A_%a" if request.array else "%x-%j"
    memory = "0" if request.whole_nodes else None  # all of an exclusive host's; None: the cluster's default
    options = {
        "--job-name=": request.job_name,
        "--nodes=": request.nodes,
        "--ntasks-per-node=": request.tasks_per_node,
        "--gpus-per-node=": f"{request.gpu_type}:{gpus}" if request.gpu_type else gpus,
        "--cpus-per-task=": request.cpus_per_task,
        "--hint=": "multithread" if request.smt else "nomultithread",
        "--mem=": f"{request.memory_bytes >> 20}M" if request.memory_bytes else memory,
        "--time=": request.time_s and notation.with_days(request.time_s),
        "--partition=": request.queue,
        "--account=": request.account,
        "--signal=B:USR1@": request.signal_s,
        "--array=": request.array,
        "--output=": f"{log}.out",
        "--open-mode=": request.requeue and "append",
        "--exclusive": request.whole_nodes,
        "--requeue": request.requeue,
    }
    directives = _directives(
        "#SBATCH", options, request, sample="--constraint=ib", replaceable=("--output=", "--exclusive", "--mem=")
    )
    srun = ["srun", f"--ntasks-per-node={request.tasks_per_node}"]
    if request.cpus_per_task:
        srun.append('--cpus-per-task="$SLURM_CPUS_PER_TASK"')
    srun += ["--cpu-bind=none", "--mem-bind=none", "--kill-on-bad-exit=1"]
    logs: list[str] = []
    if request.nodes > 1 and f"#SBATCH --output={log}.out" in directives:  # else the user has chosen one file
        logs = [f"--output={log}-%N.out", *(["--open-mode=append"] if request.requeue else [])]
    pyxis = request.container and for_pyxis(request.container)
    mounts = ['--container-mounts="$PWD:$PWD"', '--container-workdir="$PWD"']
    image = [f"--container-image={pyxis}", *mounts] if pyxis else []
    ids = f"RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID LOCAL_WORLD_SIZE={request.num_ranks}"
    start = _statement(srun, logs, image, *_started(request, ids, apptainer=not image))
    # In the grace time of a preemption Slurm signals the steps but not the batch script, and does not requeue a job
    # that ends in it. Gang scheduling may also set PreemptTime, before it suspends a job, which continues later; both
    # times stay.
    job = '"${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"' if request.array else '"$SLURM_JOB_ID"'
    preempted = f"scontrol show job --oneliner {job} | grep -q ' PreemptTime=[^NU].* SuspendTime=None '"
    requeue = [
        'if [ "$signaled$status" = 10 ] ||',
        f"    {preempted}; then",
        f"    exec scontrol requeue {job} # it has saved, or was preempted",
        "fi",
        'exit "$status"',
    ]
    # sbatch may be given more --nodes than the script says, so scripts for one host are made for several.
    first = "read -r MASTER_ADDR < <(scontrol show hostnames) || exit"
    return _script(request, directives, start, first=first, end=requeue if request.requeue else ())


# --- Open MPI, and the managers in which mpirun starts the tasks -----------------------------------------------------


def mpi(request: JobRequest) -> str:
    """Return a script around mpirun, which may run on a host that is not the job's, so it names the first one."""
    hosts = ["--hostfile", quote(request.hostfile)] if request.hostfile else []
    ask = " ".join(["mpirun", "-np", "1", *hosts, "hostname"])
    first = f"MASTER_ADDR=$({ask}) || exit" if request.nodes > 1 else ""
    has_address = bool(first) and request.form is Form.NODE
    forward = [*([first] if has_address else []), *_forward()]
    return _script(request, [], _mpirun(request, hosts, has_address=has_address), first=first, forward=forward)


def _mpirun(request: JobRequest, hosts: Sequence[str], *, has_address: bool = False, under: Sequence[str] = ()) -> str:
    """Return the command that runs mpirun on `hosts`, and exports the variables in the array `forward`."""
    tasks = request.tasks_per_node
    placing = ["-np", str(request.nodes * tasks), "--map-by", f"ppr:{tasks}:node", "--bind-to", "none"]
    ids = (
        "RANK=$OMPI_COMM_WORLD_RANK WORLD_SIZE=$OMPI_COMM_WORLD_SIZE "
        "LOCAL_RANK=$OMPI_COMM_WORLD_LOCAL_RANK LOCAL_WORLD_SIZE=$OMPI_COMM_WORLD_LOCAL_SIZE"
    )
    mpirun = [*under, "mpirun", *hosts, *placing, '"${forward[@]}"']
    return _statement(mpirun, *_started(request, ids, has_address=has_address))


def _first_line(request: JobRequest, file: str) -> str:
    """Return a command that sets MASTER_ADDR to the first host in a file, or ends the script; "" for one host."""
    return f"MASTER_ADDR=$(head -n 1 {file}) || exit" if request.nodes > 1 else ""


def pbs(request: JobRequest) -> str:
    """Return a script for qsub. PBS cannot send a signal before the time limit, so `timeout` does.

    Raises UsageError if the number of CPUs is unknown, and for an array that is not one range.
    """
    if request.cpus_per_node is None:
        raise UsageError(
            "PBS needs the CPUs of each host as a number", "give it: --cpus-per-task N, or --machine FILE (topo --save)"
        )
    if request.array and ("," in request.array or "-" not in request.array):
        raise UsageError(f"--array {request.array}: PBS takes one range", "for example: --array 0-99, or 0-99:2%4")
    resources = {
        "ncpus": request.cpus_per_node,
        "mpiprocs": request.tasks_per_node,
        "ngpus": request.gpus_per_node,
        "mem": request.memory_bytes and f"{request.memory_bytes >> 20}mb",
    }
    given = [f"{name}={value}" for name, value in resources.items() if value]
    options = {
        "-N ": request.name or request.job_name[:15].rstrip("-"),  # some PBS take 15 letters
        "-J ": request.array,
        "-l select=": ":".join([str(request.nodes), *given]),
        "-l place=scatter": ":excl" if request.whole_nodes else True,
        "-l walltime=": request.time_s and notation.clock(request.time_s),
        "-q ": request.queue,
        "-A ": request.account,
        "-r ": request.requeue and "y",
        "-j ": "oe",
        "-V": True,
    }
    timer: list[str] = []
    if request.time_s and request.signal_s:
        timer = [
            "timeout",
            "--foreground",
            "--preserve-status",
            "--signal=USR1",
            str(request.time_s - request.signal_s),
        ]
    file, folder = f'"${HOST_FILES["pbs"]}"', '"$PBS_O_WORKDIR"'  # PBS starts the script in $HOME
    return _script(
        request,
        _directives("#PBS", options, request, sample="-m e", replaceable=("-j ", "-V")),
        _mpirun(request, ["--hostfile", file, "--wdir", folder], under=timer),
        folder=folder,
        first=_first_line(request, file),
        forward=_forward(),
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
    model = f":gmodel={request.gpu_type}" if request.gpu_type else ""
    resources = [f"span[ptile={request.tasks_per_node}]"]
    if request.memory_bytes:
        resources.append(f"rusage[mem={request.memory_bytes >> 20}MB/host]")
    if request.cpus_per_task is not None and not request.whole_nodes:
        resources.append(f"affinity[{'thread' if request.smt else 'core'}({request.cpus_per_task})]")
    is_requeued = request.requeue and request.signal_s
    options = {
        "-J ": request.job_name,
        "-n ": request.nodes * request.tasks_per_node,
        "-R ": f'"{" ".join(resources)}"',
        "-gpu ": gpus and f'"num={gpus}/host{model}:mode=shared:j_exclusive=yes"',
        "-x": request.whole_nodes,
        "-W ": request.time_s and notation.hours_and_minutes(request.time_s),
        "-q ": request.queue,
        "-P ": request.account,
        "-wa ": request.signal_s and "USR1",
        "-wt ": request.signal_s and notation.minutes_begun(request.signal_s),
        "-r": request.requeue,
        "-Q ": is_requeued and requeue_status,
        "-o ": f"{request.job_name}-%J.out",
    }
    file = f'"${HOST_FILES["lsf"]}"'
    requeue = f'[ "$signaled$status" != 10 ] || exit {requeue_status} # it has saved: LSF queues it again'
    return _script(
        request,
        _directives(
            "#BSUB",
            options,
            request,
            sample="-N",
            replaceable=("-o ", "-x"),
            others=("-Jd", "-We", "-notify", "-outdir", "-rnc"),
        ),
        _mpirun(request, ["--hostfile", file]),
        first=_first_line(request, file),
        forward=_forward(),
        end=[requeue, 'exit "$status"'] if is_requeued else (),
    )
