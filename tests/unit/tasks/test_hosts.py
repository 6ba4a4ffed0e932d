"""Which host of a job this is, by the variables of each resource manager, and what may not make one job of two."""

from __future__ import annotations

import tracemalloc
from typing import TYPE_CHECKING, Any

import pytest

from numapin.errors import UsageError
from tests.unit.tasks.seam import (
    IDENTITY,
    HostsFound,
    OwnHost,
    expand,
    find_hosts,
    identity_of,
    parse,
    with_found_hosts,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.unit.tasks.seam import Job

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
SLURM_PORT = 10_000 + 71 * 101 + 2
ALLOCATION = {name: STEP[name] for name in ("SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "SLURM_JOB_NODELIST")}
BATCH = ALLOCATION | {"SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_TASK_PID": "4711"}
OMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "OMPI_MCA_ess_base_jobid": "915",
}
URI = {"OMPI_MCA_orte_hnp_uri": "915.0;tcp://10.0.0.1,172.17.0.1,127.0.0.1:4000;tcp6://[fd00::1]:4001"}
EACH = ("10.0.0.1", "172.17.0.1", "fd00::1")
HYDRA = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
LSF = {"LSF_PM_TASKID": "2", "LSB_MCPU_HOSTS": "lsf1 8 lsf2 8", "LSB_JOBID": "5"}
PBS = {"PBS_NODENUM": "1", "PBS_TASKNUM": "20000001", "PBS_JOBID": "5.head"}
OMPI5 = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": "prterun-a-head-29533@1"}
LWS = {"LWS_WORKER_INDEX": "1", "LWS_GROUP_SIZE": "2", "LWS_LEADER_ADDRESS": "set-0.set.space"}
POD = {"JOB_COMPLETION_INDEX": "3"}
RANK = {"LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "job", "NUMAPIN_BINDING": "{}"}
FILES = {"/nodes": "pbs1\npbs1\npbs2\n"}


def own(
    *, name: str = "gpu03", full_name: str = "gpu03.site", addresses: tuple[str, ...] = (), pid: int = 1
) -> OwnHost:
    """Return a host with these addresses, on which FILES can be read."""

    def read(path: str) -> str:
        if path not in FILES:
            raise FileNotFoundError(2, "No such file or directory")
        return FILES[path]

    return OwnHost(pid=pid, name=name, full_name=lambda: full_name, has_address=addresses.__contains__, read=read)


def find(environ: Mapping[str, str], **facts: Any) -> HostsFound | None:
    """Return the place that is found."""
    return find_hosts(environ, own(**facts), num_hosts=4)[0]


def job(line: str, environ: Mapping[str, str], **facts: Any) -> Job:
    """Return the job of a command line."""
    return settled(line, environ, **facts)[0]


def settled(line: str, environ: Mapping[str, str], **facts: Any) -> tuple[Job, str]:
    """Return the job of a command line, and the remark."""
    parsed = parse([*line.split(), "train.py"], {}, environ, python="python", prog="numapin run")
    return with_found_hosts(parsed, environ, own(**facts))


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a", "a"),
        ("a,b-c", "a b-c"),
        ("n[1-3]", "n1 n2 n3"),
        ("n[008-011],m", "n008 n009 n010 n011 m"),
        ("n[1,3-4]x,m[2]", "n1x n3x n4x m2"),
        ("r[0-1]n[1-2]", "r0n1 r0n2 r1n1 r1n2"),
    ],
)
def test_lists_of_slurm(text: str, names: str) -> None:
    """As `scontrol show hostnames` prints them."""
    assert expand(text) == tuple(names.split())


@pytest.mark.parametrize(
    "text", ["", "a,", "a[1", "a]1", "a[2-1]", "a[1-x]", "a[]", "a[[1]]", "a[0-99999]", "a[1-300]b[1-300]"]
)
def test_no_lists(text: str) -> None:
    """Nor do they take all memory."""
    with pytest.raises(ValueError, match=r"^(is not|has)"):
        expand(text)


@pytest.mark.parametrize(
    "text", [f"n[{','.join(['0-65535'] * 50)}]", "n" + "[0-65535]" * 50], ids=["ranges", "brackets"]
)
def test_lists_that_are_too_long(text: str) -> None:
    """They are refused before their names take memory."""
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="is not a list of at most 65536 hosts"):
            expand(text)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("environ", "facts", "number", "num_hosts", "first"),
    [
        (STEP, {}, 1, 3, "gpu02"),
        (STEP | {"SLURM_PTY_PORT": "5"}, {"pid": 4711}, 1, 3, "gpu02"),
        (OMPI | URI, {}, 1, 2, "10.0.0.1,172.17.0.1,fd00::1"),
        (OMPI | URI | {"OMPI_COMM_WORLD_RANK": "0"}, {"addresses": EACH}, 0, 2, "10.0.0.1,172.17.0.1,fd00::1"),
        (OMPI | URI, {"addresses": ("172.17.0.1",)}, 1, 2, "10.0.0.1,fd00::1"),
        (OMPI | URI, {"addresses": EACH}, 1, 2, None),
        (OMPI | BATCH, {}, 1, 2, "gpu01"),
        (OMPI | STEP, {}, 1, 2, "gpu01"),
        (OMPI, {}, 1, 2, None),
        (OMPI | URI | {"OMPI_COMM_WORLD_RANK": "0"}, {"addresses": ("172.17.0.1",)}, 0, 2, None),
        (OMPI5, {}, 1, 2, "a-head"),
        (OMPI5, {"name": "a-head.site"}, 1, 2, None),
        (OMPI5 | {"OMPI_COMM_WORLD_RANK": "0"}, {"name": "a-head.site"}, 0, 2, "a-head"),
        (OMPI5 | {"OMPI_COMM_WORLD_RANK": "0"}, {}, 0, 2, None),
        (OMPI5 | {"PMIX_NAMESPACE": "slurm.pmix.7.0"}, {}, 1, 2, None),
        (OMPI5 | {"PMIX_NAMESPACE": "mine"}, {}, 1, 2, None),
        (OMPI5 | BATCH, {}, 1, 2, "gpu01"),
        (HYDRA, {}, 0, 2, None),
        (HYDRA | {"PBS_NODEFILE": "/nodes"}, {"name": "pbs1.site"}, 0, 2, "pbs1"),
        (HYDRA | {"PBS_NODEFILE": "/nodes"}, {"name": "pbs2"}, 0, 2, None),
        (HYDRA | {"PBS_NODEFILE": "/no"}, {}, 0, 2, None),
        (HYDRA | {"PMI_RANK": "1", "LSB_MCPU_HOSTS": "lsf1 8 lsf2 8"}, {}, 1, 2, "lsf1"),
        (LSF, {}, 1, 2, "lsf1"),
        (LSF, {"name": "lsf1.site"}, 0, 2, "lsf1"),
        (PBS, {}, 1, None, None),
        (PBS | {"PBS_NODENUM": "0", "PBS_TASKNUM": "00000002"}, {}, 0, None, None),
        (LWS, {}, 1, 2, "set-0.set.space"),
        (LWS | {"LWS_LEADER_ADDRESS": ""}, {}, 1, 2, None),
        (POD, {"name": "train-3", "full_name": "train-3.train.space.svc"}, 3, None, "train-0.train.space.svc"),
        (POD, {"name": "train-3", "full_name": "train-3"}, 3, None, None),
        (POD, {"name": "mine", "full_name": "mine.train.space.svc"}, 3, None, None),
    ],
)
def test_each_source(
    environ: dict[str, str], facts: dict[str, Any], number: int, num_hosts: int | None, first: str | None
) -> None:
    """The place, and all that gave it; of several sources the innermost counts."""
    found = find(environ, **facts)
    assert found is not None
    assert (found.number, found.num_hosts, found.first) == (number, num_hosts, first)
    assert bool(found.missing) == (first is None)
    for setting in found.settings:
        name, equals, value = setting.partition("=")
        assert not equals or environ[name].startswith(value)


@pytest.mark.parametrize(
    ("environ", "remark"),
    [
        ({}, ""),
        (BATCH, "has 4 hosts"),
        (ALLOCATION, "has 4 hosts"),
        (BATCH | {"SLURM_JOB_NUM_NODES": "1"}, ""),
        # The shell of salloc, in a step of its own
        (STEP | {"SLURM_STEP_ID": "4294967290"}, "has 4 hosts"),
        # A shell that srun --pty has started
        (STEP | {"SLURM_PTY_PORT": "5"}, "has 4 hosts"),
        (STEP | {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "gpu02", "SLURM_NODEID": "0"}, ""),
        # mpirun of one process within a job of several hosts
        (OMPI | STEP | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, ""),
        # srun --mpi=pmi2 sets PMI_RANK, too
        (BATCH | {"SLURM_JOB_NUM_NODES": "1", "PMI_RANK": "0", "PMI_SIZE": "2"}, ""),
        # The script of a PBS job
        (PBS | {"PBS_NODENUM": "0", "PBS_TASKNUM": "1", "PBS_NODEFILE": "/nodes"}, ""),
        # A launcher in a rank of the same job, then in one of another launcher
        (STEP | RANK | {IDENTITY: identity_of(STEP)}, ""),
        (STEP | RANK, "the variables of Slurm are ignored"),
        (STEP | {"NUMAPIN_BINDING": "{}"}, "the variables of Slurm are ignored"),
        (RANK, ""),
    ],
)
def test_a_job_on_this_host(environ: dict[str, str], remark: str) -> None:
    """An allocation, or variables of another launcher, make no job of several hosts, and never wait for any."""
    found, said = find_hosts(environ, own())
    assert found is None
    assert remark in said
    assert bool(remark) == bool(said)


def test_a_rank_that_submits_a_job() -> None:
    """The new job inherits the rank's variables; its own are those of another step."""
    assert find(STEP | RANK | {IDENTITY: identity_of(STEP | {"SLURM_JOB_ID": "70"})}) == find(STEP)


def test_ports() -> None:
    """They differ between jobs and steps, and are below the ephemeral ones; all hosts have the same."""
    found = find(STEP)
    assert found is not None
    assert found.port == SLURM_PORT
    others = [
        find(environ) for environ in (STEP | {"SLURM_STEP_ID": "3"}, STEP | {"SLURM_JOB_ID": "72"}, OMPI, LSF, PBS)
    ]
    ports = [other.port for other in others if other is not None and other.port]
    assert len({SLURM_PORT, *ports}) == 6
    hydra = [find(HYDRA | changes) for changes in ({"PBS_JOBID": "7"}, {"PBS_JOBID": "8"}, {})]
    of_hydra = [found.port for found in hydra if found is not None]
    assert of_hydra[0] != of_hydra[1], "Hydra has no variable for the job, so the manager's counts"
    assert of_hydra[2] is None
    assert all(10_000 <= port < 30_000 for port in ports)
    same = find(STEP | {"SLURM_NODEID": "0"})
    assert same is not None
    assert same.port == SLURM_PORT


@pytest.mark.parametrize(
    "environ", [STEP | {"SLURM_JOB_ID": "9" * 5000}, STEP | {"SLURM_STEP_ID": ""}, LSF | {"LSB_JOBID": "\udcff"}]
)
def test_damaged_numbers_of_jobs(environ: dict[str, str]) -> None:
    """They give a port, too."""
    found = find(environ)
    assert found is None or 10_000 <= (found.port or 0) < 30_000


@pytest.mark.parametrize(
    ("line", "environ", "message", "hint"),
    [
        ("", STEP | {"SLURM_STEP_NODELIST": "gpu[02-03]"}, "contradict each other", "--standalone"),
        ("", STEP | {"SLURM_STEP_NODELIST": "gpu[02"}, "brackets that do not match", "--standalone"),
        ("", STEP | {"SLURM_NODEID": "x"}, "is not a number", "numapin run --standalone"),
        ("", STEP | {"SLURM_NODEID": "3"}, "host number 3 is not below the number of hosts: host 3", "--standalone"),
        ("", LWS | {"LWS_GROUP_SIZE": "1"}, "host number 1 is not below the number of hosts: host 1", "--standalone"),
        ("--nnodes 2", STEP | {"SLURM_NODEID": "2"}, "host number 2 is not below", "--standalone"),
        ("--nnodes 2 --node-rank 2", {}, "not below the number of hosts, 2 (--node-rank)", "--standalone"),
        ("", STEP | {"SLURM_STEP_TASKS_PER_NODE": "8(x3)"}, "8 launchers", "srun … numapin exec -- python train.py"),
        ("", STEP | {"SLURM_STEP_TASKS_PER_NODE": "2,1(x2)"}, "some hosts have several tasks", "--ntasks-per-node=1"),
        ("--nnodes 1", STEP | {"SLURM_STEP_TASKS_PER_NODE": "8(x3)"}, "8 launchers", "srun --ntasks-per-node=1"),
        ("", OMPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, "8 launchers", "mpirun --map-by ppr:1:node"),
        ("", OMPI, "Open MPI does not say where host 0 is", "--master-addr"),
        ("", HYDRA | {"PBS_NODEFILE": "/no"}, "PBS_NODEFILE=/no: No such file", "--master-addr"),
        ("", PBS, "PBS does not say how many hosts there are", "--nnodes N --master-addr"),
        ("--nnodes 2", PBS, "PBS does not say where host 0 is: pbsdsh passes no list of hosts on", "--master-addr"),
        ("", OMPI5 | {"OMPI_COMM_WORLD_RANK": "0"}, "mpirun does not run on the host of its first process", "--master"),
        ("", LSF | {"LSF_PM_TASKID": "3"}, "contradict each other", "blaunch -z"),
        ("--nnodes 4", POD, "Kubernetes does not say where host 0 is: the pods have no subdomain", "--master-addr"),
    ],
)
def test_contradictions(line: str, environ: dict[str, str], message: str, hint: str) -> None:
    """Each is an error with the next command."""
    with pytest.raises(UsageError) as caught:
        job(line, environ)
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_what_is_found_becomes_options() -> None:
    """They are torchrun's static ones; --verbose says from where they are."""
    made = job("", STEP)
    assert (made.is_fixed, made.nnodes, made.node_rank) == (True, (3, 3), 1)
    assert (made.master_addr, made.master_port) == ("gpu02", SLURM_PORT)
    assert made.hosts_from.startswith(
        "host 1 of 3, host 0 is gpu02, from Slurm (SLURM_STEP_NUM_NODES=3, SLURM_NODEID=1"
    )


@pytest.mark.parametrize(
    ("line", "environ", "expected"),
    [
        ("--nnodes 2 --node-rank 0", STEP, ((2, 2), 0, "gpu02", SLURM_PORT)),
        ("--master-addr head --master-port 4000", STEP, ((3, 3), 1, "head", 4000)),
        ("--master-addr head", OMPI | {"PET_MASTER_PORT": "4000"}, ((2, 2), 1, "head", 4000)),
        ("", STEP | {"PET_NNODES": "5", "PET_NODE_RANK": "4"}, ((5, 5), 4, "gpu02", SLURM_PORT)),
        ("", POD | {"PET_NNODES": "4", "PET_NODE_RANK": "2", "PET_MASTER_ADDR": "a"}, ((4, 4), 2, "a", None)),
        ("--nnodes 2 --master-addr head", PBS, ((2, 2), 1, "head", None)),
    ],
)
def test_options_win(line: str, environ: dict[str, str], expected: tuple[object, ...]) -> None:
    """What the user gave, also as PET_*, stays; the rest is found."""
    made = job(line, environ)
    port = made.master_port if expected[3] is not None else None
    assert (made.nnodes, made.node_rank, made.master_addr, port) == expected


@pytest.mark.parametrize(
    "line", ["--standalone", "--nnodes 1", "--nnodes 3 --rdzv-backend c10d --rdzv-endpoint head:29500"]
)
def test_the_users_own_way(line: str) -> None:
    """Who says where hosts meet, or that there is one, gets that and nothing else."""
    made = job(line, STEP)
    assert made == parse([*line.split(), "train.py"], {}, STEP, python="python", prog="numapin run")


def test_several_jobs_on_a_host() -> None:
    """With --standalone, each of several launchers of a host has a job of its own."""
    assert job("--standalone", STEP | {"SLURM_STEP_TASKS_PER_NODE": "8(x3)"}).is_single_host


@pytest.mark.parametrize("line", ["--max-restarts 2", "--nnodes 1:3"])
@pytest.mark.parametrize("number", ["0", "1"])
def test_jobs_that_change_meet_in_torchs_rendezvous(line: str, number: str) -> None:
    """Its endpoint is that of host 0, which is named, and each host has the name that the manager gives it."""
    made = job(line, STEP | {"SLURM_NODEID": number})
    assert (made.rdzv_backend, made.rdzv_endpoint, made.is_fixed) == ("c10d", f"gpu02:{SLURM_PORT}", False)
    assert made.rdzv_conf == {"is_host": "1" if number == "0" else "0"}
    assert made.local_addr == ("gpu02", "gpu03")[int(number)]


def test_pods_of_an_indexed_job_are_jobs_of_their_own() -> None:
    """Unless --nnodes says how many of them are one."""
    assert job("", POD).is_single_host
    assert job("--nnodes 4", POD, name="train-3", full_name="train-3.train.space").master_addr == "train-0.train.space"


def test_a_remark_is_for_the_user() -> None:
    """An allocation of several hosts is named with the command that uses all of them."""
    made, remark = settled("", BATCH)
    assert made.is_single_host
    assert "srun --ntasks-per-node=1 numapin run" in remark
