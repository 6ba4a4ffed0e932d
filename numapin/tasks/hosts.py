"""Identify which host of a job this is, where a resource manager started one launcher on each host.

Options and PET_* variables come first; `with_found_hosts` adds what they leave open.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Final, NamedTuple
from zlib import crc32

from numapin.errors import UsageError
from numapin.tasks.identify import explain_repeated, is_in_step, is_inside_rank, repeated_task, required_count

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numapin.launcher.options import Job

HOST_FILES: Final = {"pbs": "PBS_NODEFILE", "lsf": "LSB_DJOB_HOSTFILE"}
"""The variables that name a file with the job's hosts, one per line, by the engine of `numapin job`."""
JOB_IDS: Final = "NUMAPIN_HOSTS"
"""The variable in which a launcher leaves its `job_ids_of` for launchers that its ranks start."""
_OF_JOBS: Final = (
    *("OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE"),
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "LSB_JOBID", "PBS_JOBID"),
)
_FIRST_PORT, _NUM_PORTS = 10_000, 20_000  # below Linux's range of ephemeral ports
_PRIME: Final = 101  # two jobs, or steps of a job, have the same port only if their numbers are far apart
_GIVE_ADDRESS: Final = "give an address of host 0 to all of them: --master-addr HOST"
_GIVE_ALL: Final = "give all hosts the same: --nnodes N --master-addr HOST"
_ALONE: Final = "for this host only: numapin run --standalone …"
_MAX_SHOWN: Final = 60  # characters of a variable's value


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnHost:
    """This host, as far as finding the job's hosts needs it besides the environment."""

    pid: int
    name: str
    full_name: Callable[[], str]  # may ask a name server
    has_address: Callable[[str], bool]
    read: Callable[[str], str]  # of a small file; raises OSError


class HostsFound(NamedTuple):
    """The place of this host in its job; None means unknown."""

    manager: str
    number: int
    num_hosts: int | None
    first: str | None  # an address of host 0; several are separated by commas
    port: int | None  # None: the usual one
    settings: tuple[str, ...]  # the variables and files that gave the above
    name: str | None = None  # this host's name, by which the others reach it
    missing: str = ""  # why `first` is unknown

    def __str__(self) -> str:
        """Return the place, and what gave it."""
        size = "an unknown number" if self.num_hosts is None else str(self.num_hosts)
        first = f"host 0 is {self.first}" if self.first else "host 0 is unknown"
        return f"host {self.number} of {size}, {first}, from {self.manager} ({', '.join(self.settings)})"


def job_ids_of(environ: Mapping[str, str]) -> str:
    """Return the ids of the job, and of its step if the manager numbers steps: the same in all processes of a step."""
    return " ".join(f"{name}={environ[name]}" for name in _OF_JOBS if name in environ)


def find_hosts(
    environ: Mapping[str, str], own: OwnHost, *, num_hosts: int | None = None
) -> tuple[HostsFound | None, str]:
    """Return this host's place in the job of a resource manager, None for a job on this host only, and a remark.

    The first source whose variables are there counts, so mpirun inside a job of Slurm comes before Slurm. A launcher in
    a rank, e.g. for an evaluation, inherits the variables of the launcher above it, which are not about it. They are
    new if that rank has submitted another job. `num_hosts` is that of --nnodes, without which an Indexed Job of
    Kubernetes is one job in each pod. Raises UsageError for variables that contradict each other.
    """
    answers = (source(environ, own) for source in (_SOURCES if num_hosts else _SOURCES[:-1]))
    found, remark = next(filter(None, answers), (None, ""))
    if is_inside_rank(environ):
        outer = environ.get(JOB_IDS)
        if outer is None and found is not None and (found.num_hosts or 1) > 1:
            remark = f"this launcher is in a rank of another one, so the variables of {found.manager} are ignored"
            return None, f"{remark}; unset LOCAL_RANK, TORCHELASTIC_RUN_ID and NUMAPIN_BINDING if they are not about it"
        if outer is None or outer == job_ids_of(environ):
            return None, ""
    if found is None or found.num_hosts is None:
        return found, remark
    if found.number >= found.num_hosts:
        raise UsageError(f"host number {found.number} is not below the number of hosts: {found}", _ALONE)
    return (None if found.num_hosts == 1 else found), remark


def with_found_hosts(job: Job, environ: Mapping[str, str], own: OwnHost) -> tuple[Job, str]:
    """Add what a resource manager knows about the job's hosts; return the job, and a remark for the user or "".

    The hosts get torchrun's static options, or torch's rendezvous if they may restart their ranks or change in number.
    What the user gave stays. Raises UsageError for contradictions, for what is unknown, and for one of several
    launchers of this host.
    """
    typed, is_known = job.typed, "nnodes" in job.typed
    if job.standalone or job.rdzv_backend != "static":
        return job, ""
    if not is_known or job.nnodes[1] == 1:
        task = repeated_task(environ)
        if task is not None:
            raise UsageError(*explain_repeated(task))
    has_all = {"nnodes", "node_rank", "master_addr"} <= typed  # as in pods of a TrainJob
    if has_all or (is_known and job.nnodes[1] == 1):
        _require_number(job, "--node-rank")
        return job, ""
    found, remark = find_hosts(environ, own, num_hosts=job.nnodes[1] if is_known else None)
    if found is None:
        _require_number(job, "--node-rank")
        return job, remark

    values: dict[str, object] = {"node_rank": found.number}
    if found.num_hosts is not None:
        values["nnodes"] = (found.num_hosts, found.num_hosts)
    elif not is_known:
        raise UsageError(f"{found.manager} does not say how many hosts there are: {found.missing}", _GIVE_ALL)
    if "rdzv_endpoint" not in typed:
        if found.first is None and "master_addr" not in typed:
            raise UsageError(f"{found.manager} does not say where host 0 is: {found.missing}", _GIVE_ADDRESS)
        values |= {"master_addr": found.first, "master_port": found.port}
    added = {key: value for key, value in values.items() if key not in typed and value is not None}
    job = replace(job, options={**job.options, **added}, typed=typed | added.keys(), hosts_from=str(found))
    _require_number(job, "--node-rank" if "node_rank" in typed else str(found))
    if job.is_fixed:
        return job, remark
    # State which host serves the rendezvous, so that torch compares no names.
    elastic = {
        "rdzv_backend": "c10d",
        "rdzv_endpoint": job.rdzv_endpoint or f"{job.master_addr.partition(',')[0]}:{job.master_port or 29400}",
        "rdzv_conf": {"is_host": str(int(job.node_rank == 0)), **job.rdzv_conf},
        "local_addr": job.local_addr or found.name,
    }
    return replace(job, options={**job.options, **elastic}, typed=job.typed | {"rdzv_endpoint"}), remark


def _require_number(job: Job, where: str) -> None:
    if job.is_fixed and job.node_rank >= job.nnodes[1]:
        problem = f"host number {job.node_rank} is not below the number of hosts, {job.nnodes[1]}"
        raise UsageError(f"{problem} ({where})", _ALONE)


# --- the sources -----------------------------------------------------------------------------------------------------

_Answer = tuple[HostsFound | None, str] | None
"""The place and the remark that `find_hosts` returns; None if the variables of this manager are not set."""


def _open_mpi(environ: Mapping[str, str], own: OwnHost) -> _Answer:
    """OMPI_COMM_WORLD_*: Open MPI's documentation, "Environment variables set for MPI applications"."""
    jobs = ("OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE")  # of Open MPI 4 and 5
    found = _of_mpi("Open MPI", environ, own, rank="OMPI_COMM_WORLD_RANK", size="OMPI_COMM_WORLD_SIZE", jobs=jobs)
    if found is None:
        return None
    # Open MPI 4: mpirun's own addresses, which orte/mca/schizo/ompi/schizo_ompi.c gives to all processes.
    uri = environ.get("OMPI_MCA_orte_hnp_uri", "")
    addresses = [
        address
        for group in re.findall(r"tcp6?://([^;]*):\d+", uri)
        for address in group.replace("[", "").replace("]", "").split(",")
        if address and not address.startswith(("127.", "::1"))
    ]
    # Bridges of containers have the same address on all hosts.
    elsewhere = [address for address in addresses if not own.has_address(address)]
    usable = elsewhere
    if found.number == 0:
        usable = [] if elsewhere else addresses
    if usable:
        settings = (*found.settings, f"OMPI_MCA_orte_hnp_uri={uri[:_MAX_SHOWN]}")
        return found._replace(first=",".join(usable), settings=settings, missing=""), ""
    # Open MPI 5 gives them no address of mpirun: PMIX_SERVER_URI* is that of each host's own daemon. But a namespace
    # begins with mpirun's program, host and process (plm_base_jobid.c of PRRTE 3.0 and 4.1): prterun-gpu01-4711@1
    named = re.fullmatch(r"prte(?:run)?-(.+)-[0-9]+@[0-9]+", environ.get("PMIX_NAMESPACE", ""))
    if named and found.first is None and (found.number == 0) == (_short(named[1]) == _short(own.name)):
        return found._replace(first=named[1], missing=""), ""
    if (addresses or named) and found.first is None:
        found = found._replace(missing="mpirun does not run on the host of its first process")
    return found, ""


def _hydra(environ: Mapping[str, str], own: OwnHost) -> _Answer:
    """MPICH and Intel MPI: PMI_RANK and PMI_SIZE, with MPI_LOCALNRANKS: pmip_cb.c of MPICH's Hydra.

    `srun --mpi=pmi2` sets the former, but not MPI_LOCALNRANKS. Hydra itself has no variable for the job.
    """
    if "MPI_LOCALNRANKS" not in environ:
        return None
    jobs = ("PBS_JOBID", "LSB_JOBID", "SLURM_JOB_ID")
    found = _of_mpi("MPICH", environ, own, rank="PMI_RANK", size="PMI_SIZE", jobs=jobs)
    return None if found is None else (found, "")


def _slurm(environ: Mapping[str, str], own: OwnHost) -> _Answer:
    """Slurm's variables: srun(1) of Slurm 22.05, OUTPUT ENVIRONMENT VARIABLES."""
    if "SLURM_JOB_ID" not in environ and "SLURM_STEP_ID" not in environ:
        return None
    num_of_job = environ.get("SLURM_JOB_NUM_NODES", environ.get("SLURM_NNODES", "1"))
    # In the shell that `srun --pty bash` starts, the variables are those of the shell, which is one task of the step.
    # SLURM_PTY_PORT is not in the manual.
    is_shells = "SLURM_PTY_PORT" in environ and environ.get("SLURM_TASK_PID") != str(own.pid)
    if not is_in_step(environ) or is_shells:
        is_one = num_of_job in ("0", "1")
        remark = f"this job of Slurm has {num_of_job[:_MAX_SHOWN]} hosts, and numapin runs on this one only; "
        on_all = "for all of them: srun --ntasks-per-node=1 numapin run …"
        return None, "" if is_one else f"{remark}{on_all}"
    size, nodes = "SLURM_STEP_NUM_NODES", "SLURM_STEP_NODELIST"
    settings = _shown(environ, (size, "SLURM_NODEID", nodes, "SLURM_JOB_ID", "SLURM_STEP_ID"))
    if len(settings) < 5:
        return None, ""
    try:
        hosts = expand_hostlist(environ[nodes])
    except ValueError as error:
        raise UsageError(f"{nodes}={environ[nodes][:_MAX_SHOWN]} {error}", _ALONE) from None
    tasks = environ["SLURM_STEP_TASKS_PER_NODE"]
    if not re.fullmatch(r"1(\(x[0-9]+\))?(,1(\(x[0-9]+\))?)*", tasks):
        raise UsageError(
            f"SLURM_STEP_TASKS_PER_NODE={tasks[:_MAX_SHOWN]}: some hosts have several tasks",
            "for one on each: srun --ntasks-per-node=1 numapin run …",
        )
    num_hosts, number = _count(environ, size), _count(environ, "SLURM_NODEID")
    if len(hosts) != num_hosts:
        raise UsageError(f"{' and '.join((settings[0], settings[2]))} contradict each other", _ALONE)
    ids = (environ["SLURM_JOB_ID"], environ["SLURM_STEP_ID"])
    job, step = (int(text) if re.fullmatch(r"[0-9]{1,18}", text) else 0 for text in ids)  # int() refuses 5000 digits
    name = hosts[number] if number < num_hosts else None
    return HostsFound("Slurm", number, num_hosts, hosts[0], _port(job * _PRIME + step), settings, name), ""


def _lsf(environ: Mapping[str, str], own: OwnHost) -> _Answer:
    """Tasks of blaunch, which LSF_PM_TASKID numbers from 1: Open MPI's ess_lsf_module.c relies on that, too."""
    if "LSF_PM_TASKID" not in environ or "LSB_MCPU_HOSTS" not in environ:
        return None
    hosts = _lsf_hosts(environ)
    settings = _shown(environ, ("LSF_PM_TASKID", "LSB_MCPU_HOSTS", "LSB_JOBID"))
    # blaunch -z may start tasks in another order.
    short = [_short(host) for host in hosts]  # with or without a domain
    task = _count(environ, "LSF_PM_TASKID") - 1
    number = short.index(_short(own.name)) if _short(own.name) in short else task
    if not 0 <= number < len(hosts):
        raise UsageError(
            f"{' and '.join(settings[:2])} contradict each other, unless blaunch starts more than one task on a host",
            'for one task on each host: blaunch -z "$(cut -d" " -f1 "$LSB_DJOB_HOSTFILE" | sort -u)" numapin run …',
        )
    port = _port_of(environ.get("LSB_JOBID", ""))
    return HostsFound("LSF", number, len(hosts), hosts[0], port, settings, hosts[number]), ""


def _pbs(environ: Mapping[str, str], _: OwnHost) -> _Answer:
    """Tasks of pbsdsh: start_exec.c of OpenPBS, which gives PBS_NODEFILE to the job script only, not to them.

    The job script is task 1 of host 0, and not one of several. Tasks have numbers such as 00000002.
    """
    if "PBS_NODENUM" not in environ or (environ["PBS_NODENUM"], environ.get("PBS_TASKNUM", "1")) == ("0", "1"):
        return None
    settings = _shown(environ, ("PBS_NODENUM", "PBS_TASKNUM", "PBS_JOBID"))
    port = _port_of(environ.get("PBS_JOBID", ""))
    missing = "pbsdsh passes no list of hosts on"
    number = _count(environ, "PBS_NODENUM")
    return HostsFound("PBS", number, None, None, port, settings, missing=missing), ""


def _leader_worker_set(environ: Mapping[str, str], _: OwnHost) -> _Answer:
    """LeaderWorkerSet's documentation, "Labels, Annotations and Environment Variables"; pod_utils.go sets them."""
    names = ("LWS_WORKER_INDEX", "LWS_GROUP_SIZE", "LWS_LEADER_ADDRESS")
    if not environ.keys() >= {*names}:
        return None
    settings = _shown(environ, names)
    number, num_hosts = (_count(environ, name) for name in names[:2])
    first = environ[names[2]] or None
    missing = "" if first else f"{names[2]} is empty"
    return HostsFound("LeaderWorkerSet", number, num_hosts, first, None, settings, missing=missing), ""


def _indexed_job(environ: Mapping[str, str], own: OwnHost) -> _Answer:
    """Pods of an Indexed Job, also of a JobSet, which are not told how many they are.

    The host name of pod N is JOB-N: Kubernetes' documentation, "Job with Pod-to-Pod Communication". Another pod is
    found by that name and the subdomain of this one.
    """
    index = "JOB_COMPLETION_INDEX"
    if index not in environ:
        return None
    number = _count(environ, index)
    settings = (f"{index}={number}", f"host name {own.name}")
    job, dash, of_name = own.name.partition(".")[0].rpartition("-")
    domain = own.full_name().partition(".")[2]
    if not dash or of_name != str(number) or not domain:
        missing = "the pods have no subdomain and headless service, or their host names were changed"
        return HostsFound("Kubernetes", number, None, None, None, settings, missing=missing), ""
    return HostsFound("Kubernetes", number, None, f"{job}-0.{domain}", None, settings), ""


_SOURCES: Final = (_open_mpi, _hydra, _slurm, _lsf, _pbs, _leader_worker_set, _indexed_job)
"""The innermost first: mpirun starts its processes with srun, and managers' pods run mpirun."""


def _of_mpi(
    manager: str, environ: Mapping[str, str], own: OwnHost, *, rank: str, size: str, jobs: Sequence[str]
) -> HostsFound | None:
    """Return the place of an MPI process that is the only one on its host; the first host is that of a manager.

    The first of `jobs` that is set gives the port.
    """
    if not environ.keys() >= {rank, size}:
        return None
    number, num_hosts = _count(environ, rank), _count(environ, size)
    job = [name for name in jobs if name in environ][:1]
    settings = _shown(environ, (rank, size, *job))
    port = _port_of(environ[job[0]]) if job else None
    hosts, missing = _listed(environ, own)
    first = hosts[0] if hosts else None
    if first is not None and number == 0 and _short(first) != _short(own.name):
        first, missing = None, f"rank 0 is on {own.name}, and the first host of the resource manager is {first}"
    return HostsFound(manager, number, num_hosts, first, port, settings, missing=missing)


def _listed(environ: Mapping[str, str], own: OwnHost) -> tuple[tuple[str, ...], str]:
    """Return the hosts that a manager has given to the job, each once, or why they are unknown.

    PBS writes its file on the first host only: the others need a shared folder, or another way.
    """
    for variable in HOST_FILES.values():
        if path := environ.get(variable):
            try:
                names = (line.split()[0] for line in own.read(path).splitlines() if line.strip())
                return tuple(dict.fromkeys(names)), ""
            except OSError as error:
                return (), f"{variable}={path}: {error.strerror}"
    if "LSB_MCPU_HOSTS" in environ:
        return _lsf_hosts(environ), ""
    try:
        nodes = environ.get("SLURM_JOB_NODELIST", "")
        return (expand_hostlist(nodes), "") if nodes else ((), "no variable has the address of a host")
    except ValueError as error:
        return (), f"SLURM_JOB_NODELIST {error}"


def _shown(environ: Mapping[str, str], names: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"{name}={environ[name][:_MAX_SHOWN]}" for name in names if name in environ)


def _short(name: str) -> str:
    return name.partition(".")[0]


def _lsf_hosts(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the hosts of an LSF job: "How LSF runs parallel jobs" of LSF 9.1.3 has pairs of a host and its slots."""
    return tuple(dict.fromkeys(environ["LSB_MCPU_HOSTS"].split()[::2]))


def _count(environ: Mapping[str, str], variable: str) -> int:
    return required_count(environ, variable, hint=_ALONE)


def _port_of(job: str) -> int:
    return _port(crc32(job.encode(errors="surrogateescape")))


def _port(number: int) -> int:
    return _FIRST_PORT + number % _NUM_PORTS


# --- lists of hosts --------------------------------------------------------------------------------------------------

_MAX_HOSTS: Final = 65_536
_NO_LIST: Final = f"is not a list of at most {_MAX_HOSTS} hosts"
_ITEM: Final = re.compile(r"(?:[^,\[\]]|\[[0-9,-]+\])+")
_PART: Final = re.compile(r"([^\[\]]+)|\[([0-9,-]+)\]")
_RANGE: Final = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


def expand_hostlist(text: str) -> tuple[str, ...]:
    """Return the names in Slurm's notation, e.g. "gpu[01-03,7],login". Raises ValueError.

    As in `scontrol show hostnames`, a number has at least as many digits as the first of its range, and of several
    brackets the last changes fastest.
    """
    names: list[str] = []
    items = text.split(",")
    if "[" in text or "]" in text:
        items = _ITEM.findall(text)  # between the commas outside of brackets
        if ",".join(items) != text:
            raise ValueError("has brackets that do not match")
    for item in items:
        choices: list[list[str]] = []
        num_names = 1
        for plain, ranges in _PART.findall(item):
            choices.append([plain] if plain else _numbers(ranges))
            num_names *= len(choices[-1])
            if len(names) + num_names > _MAX_HOSTS:
                raise ValueError(_NO_LIST)
        if not item:
            raise ValueError(_NO_LIST)
        names += map("".join, product(*choices))
    return tuple(names)


def _numbers(ranges: str) -> list[str]:
    numbers: list[str] = []
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part)
        first, last = (match[1], match[2] or match[1]) if match else ("", "")
        if not match or int(last) < int(first):
            raise ValueError(f"has a malformed range: {part}")
        if len(numbers) + int(last) - int(first) >= _MAX_HOSTS:
            raise ValueError(_NO_LIST)
        numbers += [f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1)]
    return numbers
