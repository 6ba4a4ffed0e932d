"""Which host of a job this is, by the variables of each resource manager, and what may not make one job of two."""

from __future__ import annotations

import shlex
import tracemalloc
from pathlib import Path

import pytest

from numapin.errors import UsageError
from tests.recorded.screens import compare_answers
from tests.unit.tasks import seam
from tests.unit.tasks.seam import JOB_IDS, OwnHost, expand_hostlist, find_hosts, job_ids_of, parse, with_found_hosts

STEP = {
    "SLURM_JOB_ID": "71",
    "SLURM_STEP_ID": "2",
    "SLURM_NODEID": "1",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_JOB_NODELIST": "gpu[01-04]",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NODELIST": "gpu[02-03,07]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
    "SLURM_LOCALID": "0",
    "SLURM_PROCID": "1",
    "SLURM_TASK_PID": "4711",
}
ALLOCATION = {name: STEP[name] for name in ("SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "SLURM_JOB_NODELIST")}
OMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "OMPI_MCA_ess_base_jobid": "915",
}
URI = "915.0;tcp://10.0.0.1,172.17.0.1,127.0.0.1:4000;tcp6://[fd00::1]:4001"
GIVEN = {
    "STEP": STEP,
    "ALLOCATION": ALLOCATION,
    "BATCH": ALLOCATION | {"SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_TASK_PID": "4711"},
    "OMPI": OMPI,
    "URI": {"OMPI_MCA_orte_hnp_uri": URI},
    "OMPI5": {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": "prterun-a-head-29533@1"},
    "HYDRA": {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"},
    "LSF": {"LSF_PM_TASKID": "2", "LSB_MCPU_HOSTS": "lsf1 8 lsf2 8", "LSB_JOBID": "5"},
    "PBS": {"PBS_NODENUM": "1", "PBS_TASKNUM": "20000001", "PBS_JOBID": "5.head"},
    "LWS": {"LWS_WORKER_INDEX": "1", "LWS_GROUP_SIZE": "2", "LWS_LEADER_ADDRESS": "set-0.set.space"},
    "POD": {"JOB_COMPLETION_INDEX": "3"},
    "RANK": {"LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "job", "NUMAPIN_BINDING": "{}"},
    "SAME_JOB": {JOB_IDS: job_ids_of(STEP)},
    "OTHER_JOB": {JOB_IDS: job_ids_of(STEP | {"SLURM_JOB_ID": "70"})},
}
FILES = {"/nodes": "pbs1\npbs1\npbs2\n"}


def _read(path: str) -> str:
    if path not in FILES:
        raise FileNotFoundError(2, "No such file or directory")
    return FILES[path]


def _answer(line: str) -> str:
    """Return the hosts of a list; else the place that these variables give, and what `run` makes of it with options."""
    words, _, options = line.partition("| ")
    environ: dict[str, str] = {}
    facts = {"name": "gpu03", "full_name": "gpu03.site", "addresses": "", "pid": "1"}
    first, *rest = shlex.split(words) or [""]
    if first == "expand":
        try:
            return " ".join(expand_hostlist(rest[0]))
        except ValueError as error:
            return f"error: {error}"
    for word in (first, *rest):
        name, _, value = word.partition("=")
        if name.startswith("@"):
            facts[name[1:]] = value
        else:
            environ |= GIVEN.get(name, {name: value})
    own = OwnHost(
        pid=int(facts["pid"]),
        name=facts["name"],
        full_name=lambda: facts["full_name"],
        has_address=facts["addresses"].split(",").__contains__,
        read=_read,
    )
    try:
        found, remark = find_hosts(environ, own, num_hosts=4)
        place = f"{found}; port {found.port}, named {found.name}" if found else "this host only"
        lines = [place, *([f"  missing: {found.missing}"] if found and found.missing else [])]
        lines += [f"  remark: {remark}"] if remark else []
    except UsageError as error:
        lines = [f"error: {error.message}"]
    try:
        before = parse([*options.split(), "train.py"], {}, environ, python="python", prog="numapin run")
        job, remark = with_found_hosts(before, environ, own)
        meeting = f"rank {job.node_rank} of {job.nnodes} at {job.master_addr}:{job.master_port}"
        if job.rdzv_endpoint:
            meeting = f"{job.rdzv_backend} {job.rdzv_endpoint} {job.rdzv_conf} of {job.nnodes} as {job.local_addr}"
        kind = "one host" if job.is_single_host else f"{'fixed, ' if job.is_fixed else ''}{meeting}"
        lines += ["  run: as given" if job == before else f"  run: {kind}"]
        lines += [f"  from: {job.hosts_from}"] if job.hosts_from else []
        lines += [f"  remark of run: {remark}"] if remark else []
    except UsageError as error:
        lines += [f"  run: error: {error.message}", f"  hint: {error.hint}"]
    return "\n".join(lines)


def test_each_source() -> None:
    """Lists of hosts, places, contradictions and the users' own options are recorded.

    NUMAPIN_UPDATE_GOLDEN=1 records them anew.
    """
    compare_answers(Path(__file__).with_name("hosts.txt"), _answer)


@pytest.mark.parametrize("variable", seam.hosts.HOST_FILES.values())
def test_the_first_host_of_a_managers_file_is_host_0(variable: str) -> None:
    """So it is for each manager whose file mpirun is given."""
    assert _answer(f"OMPI {variable}=/nodes").startswith("host 1 of 2, host 0 is pbs1, ")


def test_lists_that_are_too_long() -> None:
    """They are refused before their names take memory."""
    tracemalloc.start()
    try:
        for text in (f"n[{','.join(['0-65535'] * 50)}]", "n" + "[0-65535]" * 50):
            with pytest.raises(ValueError, match="is not a list of at most 65536 hosts"):
                expand_hostlist(text)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("changes", [{"SLURM_JOB_ID": "9" * 5000}, {"SLURM_STEP_ID": "\udcff"}], ids=["long", "bytes"])
def test_damaged_numbers_of_jobs(changes: dict[str, str]) -> None:
    """They give a port, too."""
    own = OwnHost(pid=1, name="n", full_name=lambda: "n", has_address=lambda _: False, read=_read)
    found, _ = find_hosts(STEP | changes, own)
    assert found is None or 10_000 <= (found.port or 0) < 30_000
