"""`numapin job`: its scripts run by bash, with stand-ins for the manager's programs; its help and errors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.launching import all_ended, environment, script
from tests.integration.seam import HOST_FILES, hiding_variables
from tests.integration.warm_ranks import client, forked_script
from tests.jobs import schemas
from tests.jobs.cases import ENGINES, HOSTILE, write
from tests.waiting import wait_until

# Runs the rest of its command line as one task. `takes` lists the options that are followed by a value.
_STARTER = """
import json, os, sys
name, words = os.path.basename(sys.argv[0]), sys.argv[1:]
with open(os.path.join(os.environ["NOTED"], name), "a") as file:
    print(json.dumps(words), file=file)
takes = {"-np", "--map-by", "--bind-to", "-x", "--hostfile", "--wdir"}
while words[0].startswith("-"):
    words = words[2 if words[0] in takes else 1 :]
ours = {"srun": {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
                 "SLURMD_NODENAME": "second"},
        "mpirun": {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                   "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}}.get(name, {})
os.environ.update({**ours, **os.environ})
os.execvp(words[0], words)
"""
_NOTER = """
import json, os, resource, signal, sys, time
name = os.path.basename(sys.argv[0])
with open(os.path.join(os.environ["NOTED"], name), "a") as file:
    print(json.dumps(sys.argv[1:]), file=file)
with open(os.path.join(os.environ["NOTED"], name + ".env"), "w") as file:
    json.dump(dict(os.environ), file)
if name == "numapin":
    with open(os.path.join(os.environ["NOTED"], "limit"), "w") as file:
        file.write(str(resource.getrlimit(resource.RLIMIT_NOFILE)[0]))
if name in ("hostname", "scontrol"):
    print("first\\nsecond" if "hostnames" in sys.argv else "first")
if name == "scontrol" and sys.argv[1:3] == ["show", "job"]:
    open(os.path.join(os.environ["NOTED"], "asked"), "w").close()
    time.sleep(float(os.environ.get("SLOW", "0")))
    print(os.environ.get("SHOWN", "PreemptEligibleTime=2026-11-20T10:00:00 PreemptTime=None SuspendTime=None "))
    sys.exit(int(os.environ.get("UNKNOWN", "0")))
if name == "numapin" and "WAIT" in os.environ:
    heard = []
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda number, frame: heard.append(number))
    open(os.path.join(os.environ["NOTED"], "ready"), "w").close()
    while not heard:
        time.sleep(0.01)
    time.sleep(0.3)  # to save
    with open(os.path.join(os.environ["NOTED"], "heard"), "w") as file:
        file.write(signal.Signals(heard[0]).name)
    sys.exit(int(os.environ["WAIT"]))
"""
_STAND_INS = {
    **dict.fromkeys(("srun", "mpirun"), _STARTER),
    **dict.fromkeys(("numapin", "scontrol", "hostname", "apptainer"), _NOTER),
}
_MANAGER = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "54321", "SLURM_CPUS_PER_TASK": "3"}
PORT = 10000 + os.getpid() % 20000
"""A port of this test process, below Linux's range of ephemeral ports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A folder of stand-ins and their records; jobs start in the folder of submission, or in `elsewhere`."""

    programs: Path
    noted: Path
    work: Path
    elsewhere: Path | None = None

    @property
    def path(self) -> str:
        return f"{self.programs}:{os.environ['PATH']}"

    def start(self, arguments: list[str], **changes: str) -> subprocess.Popen[str]:
        script = self.work.parent / "job.sh"
        script.write_text(write(arguments))
        hosts = self.work.parent / "the hosts of it"
        hosts.write_text("first\nsecond\n")
        files = dict.fromkeys(HOST_FILES.values(), str(hosts))
        own = {"PBS_O_WORKDIR": str(self.work), "NOTED": str(self.noted), "PATH": self.path}
        environ, pipe = environment(**(_MANAGER | files | own | changes)), subprocess.PIPE
        cwd = self.elsewhere or self.work
        return subprocess.Popen(["bash", str(script)], env=environ, cwd=cwd, stdout=pipe, stderr=pipe, text=True)

    def run(self, arguments: list[str], **changes: str) -> int:
        """Run it to its end and return its status; nothing may be written to stderr."""
        with self.start(arguments, **changes) as script:
            (done,) = all_ended(script, limit_s=60)
        assert done.err == ""
        return done.status

    def calls(self, program: str) -> list[list[str]]:
        path = self.noted / program
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def environment(self, program: str = "numapin") -> dict[str, str]:
        given: dict[str, str] = json.loads((self.noted / f"{program}.env").read_text())
        return given

    def use_numapin(self) -> None:
        root = Path(__file__).resolve().parents[2]
        start = f"import sys; sys.path.insert(0, {str(root)!r}); from numapin.cli.entry import main; main()"
        path = script(self.programs, start, "numapin.py")
        (self.programs / "numapin").write_text(f"#!{sys.executable} -IS\n{client(path)}")

    def wait_for(self, name: str) -> None:
        assert wait_until((self.noted / name).exists, limit_s=30), name


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    """Give stand-ins for a cluster's programs, in a folder whose name has to be quoted."""
    folders = {name: tmp_path / f"it's {name}" for name in ("programs", "noted", "work")}
    for folder in folders.values():
        folder.mkdir()
    for name, text in _STAND_INS.items():
        program = folders["programs"] / name
        program.write_text(f"#!{sys.executable} -IS\n{text}")
        program.chmod(0o755)
    return Cluster(**folders)


_BINDING = ["--bind=exclusive", "--gpu-nodes=0=1,1=1", "--nic-env=ucx,nvshmem"]
_SHAPE = ["--nodes=2", "--gpus-per-node=4", "--cpus-per-task=3", *_BINDING]
_EXEC = ["exec", *_BINDING, "--", "python", "-u", *HOSTILE]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("form", ["node", "task"])
def test_what_a_task_is_started_with(engine: str, form: str, cluster: Cluster, tmp_path: Path) -> None:
    """Quotes, newlines, dollars, backticks, dashes and empty words pass the script and its shells unchanged.

    A task per rank has the variables of env://; a task per host finds its hosts itself, and has a secret of the job,
    different each time. --setup lines run in the folder of submission, even if PBS starts in $HOME.
    """
    (cluster.work / "venv").write_text("export VIRTUAL_ENV=activated\n")
    started = replace(cluster, elsewhere=tmp_path if engine == "pbs" else None)
    assert started.run([engine, "--form", form, *_SHAPE, "--setup", "source ./venv", *HOSTILE]) == 0
    (words,) = cluster.calls("numapin")
    given = cluster.environment()
    address = ["--master-addr=first"] if engine == "mpi" else []
    run = ["run", "--nproc-per-node=4", *address, *_BINDING, *HOSTILE]
    assert words == (run if form == "node" else _EXEC)
    assert given["VIRTUAL_ENV"] == "activated"
    assert given["PWD"] == str(cluster.work)
    if engine == "pbs":  # its tasks do not start where the script is
        options = cluster.calls("mpirun")[-1]
        assert options[options.index("--wdir") + 1] == str(cluster.work)
    assert [path.name for path in cluster.work.iterdir()] == ["venv"]  # no word was executed
    if form == "task":
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
        assert [given[name] for name in names] == ["5", "8", "1", "4", "first"]
        assert 10000 <= int(given["MASTER_PORT"]) < 32768
    else:
        assert "MASTER_ADDR" not in given
        assert started.run([engine, *_SHAPE, "train.py"]) == 0
        assert uuid.UUID(given["PET_RDZV_ID"]) != uuid.UUID(cluster.environment()["PET_RDZV_ID"])


def test_mpirun_passes_on_what_a_rank_needs(cluster: Cluster) -> None:
    """Variables of launchers, libraries and all vendors' GPUs are exported, even with spaces; the shell's are not."""
    given = {"NCCL_DEBUG": "a b", "NUMAPIN_RUN_DIR": "/a b", "PET_MAX_RESTARTS": "3", "GLOO_SOCKET_IFNAME": "ib0"}
    given |= {"PBS_ARRAY_INDEX": "7", **dict.fromkeys(hiding_variables(), "0")}
    cluster.run(["mpi", *_SHAPE, "train.py"], PS9="x", UCX_TLS="rc", **given)
    words = cluster.calls("mpirun")[-1]
    passed = {words[at + 1] for at, word in enumerate(words) if word == "-x"}
    assert passed >= {*given, "UCX_TLS", "PET_RDZV_ID", "NUMAPIN_HOSTS", "PATH"}
    assert not passed & {"PS9", "PWD", "NOTED"}


# Variables that `numapin run`, --dataloader numapin and `numapin trace` give a rank, in addition to torch's.
_NUMAPINS = ("NUMAPIN_BINDING", "NUMAPIN_RUN_DIR", "NUMAPIN_DATALOADER", "NUMAPIN_TRACE")
_AGENTS = (
    *(f"TORCHELASTIC_{name}" for name in ("RUN_ID", "USE_AGENT_STORE", "RESTART_COUNT", "MAX_RESTARTS", "ERROR_FILE")),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "OMP_NUM_THREADS"),
)


@pytest.mark.parametrize("engine", ENGINES)
def test_what_a_launcher_gave_the_submitting_shell_stays_there(engine: str, cluster: Cluster) -> None:
    """A task per rank, submitted by a rank, inherits neither agent nor threads, binding, tracing or timers.

    `numapin run` forgets them itself, if it is told that the job is new: `test_two_nodes_meet`.
    """
    given = dict.fromkeys((*_NUMAPINS, *_AGENTS), "of that run")
    assert cluster.run([engine, "--form", "task", *_SHAPE, "train.py"], **given) == 0
    assert not given.keys() & cluster.environment().keys()
    assert not given.keys() & {word for words in cluster.calls("mpirun") for word in words}
    assert cluster.run([engine, *_SHAPE, "train.py"], **given) == 0
    assert cluster.environment()["NUMAPIN_HOSTS"] == "new"


@pytest.mark.parametrize("form", ["node", "task"])
def test_what_is_the_users_stays(form: str, cluster: Cluster) -> None:
    """Outside of a launcher, numapin's variables, torch's and OMP_NUM_THREADS are the user's."""
    kept = {"OMP_NUM_THREADS": "3", "NUMAPIN_RUN_DIR": "/with/a/plan", "NUMAPIN_DATALOADER": "torch"}
    kept["TORCHELASTIC_ENABLE_FILE_TIMER"] = "1"
    assert cluster.run(["mpi", "--form", form, *_SHAPE, "train.py"], **kept) == 0
    assert kept.items() <= cluster.environment().items()


_TIME, _LATER = "2026-11-21T10:00:00", "2026-11-21T10:00:01"
_LIMITED = [*_SHAPE, "--time", "1h", "--signal", "60"]


@pytest.mark.parametrize("engine", ["slurm", "lsf"])
@pytest.mark.parametrize("status", [0, 3, None], ids=["saved", "failed", "told nothing"])
def test_a_job_that_saved_goes_back_into_the_queue(engine: str, status: int | None, cluster: Cluster) -> None:
    """SIGUSR1 is passed on; only a job that then ends with status 0 is requeued, and any other status stays.

    The user's lines may have told the shell to end at the first error.
    """
    options = [*_LIMITED, "--requeue", "--setup", "set -euo pipefail"]
    waiting = {} if status is None else {"WAIT": str(status)}
    with cluster.start([engine, *options, "train.py"], **waiting) as script:
        if status is not None:
            cluster.wait_for("ready")
            script.send_signal(signal.SIGUSR1)
        _, complaints = script.communicate(timeout=60)
    if status is not None:
        assert (cluster.noted / "heard").read_text() == "SIGUSR1"
    requeued = ["requeue", "54321"] in cluster.calls("scontrol")
    assert requeued == (engine == "slurm" and status == 0)
    assert script.returncode == (85 if engine == "lsf" and status == 0 else status or 0), complaints


@pytest.mark.parametrize(
    ("arguments", "broken"),
    [
        (["mpi"], "mpirun"),
        (["mpi", "--form=task"], "mpirun"),
        (["slurm", "--form=task"], "scontrol"),
        (["pbs", "--form=task"], ""),
        (["lsf", "--form=task"], ""),
    ],
)
def test_without_a_first_host_nothing_starts(arguments: list[str], broken: str, cluster: Cluster) -> None:
    """A program that cannot name the first host, or a file that is gone, ends the script."""
    if broken:
        fail = '[ "${*%hostname*}" = "$*" ] || exit 3'  # mpirun starts the tasks, too
        (cluster.programs / broken).write_text(f'#!/bin/sh\n{fail}\necho "[]" >> "$NOTED/{broken}"\n')
    files = dict.fromkeys(HOST_FILES.values(), "/gone")
    with cluster.start([*arguments, *_SHAPE, "train.py"], **files) as script:
        script.communicate(timeout=60)
    assert script.returncode != 0
    assert not any(map(cluster.calls, ("numapin", "srun", "mpirun")))


def test_without_a_secret_nothing_starts(cluster: Cluster) -> None:
    """Launchers of several hosts would trust anyone."""
    text = write(["slurm", *_SHAPE, "train.py"]).replace("/proc/sys/kernel/random/uuid", "/gone")
    environ = environment(**_MANAGER, NOTED=str(cluster.noted), PATH=cluster.path)
    done = subprocess.run(["bash", "-c", text], env=environ, capture_output=True, check=False)
    assert done.returncode != 0
    assert not cluster.calls("srun")


@pytest.mark.parametrize("form", ["node", "task"])
def test_a_slurm_script_for_one_host_may_get_several(form: str, cluster: Cluster) -> None:
    """With `sbatch --nodes=2`, srun starts tasks on both hosts: they have the address of the first, and a secret."""
    assert cluster.run(["slurm", "--form", form, "--gpus-per-node=4", "train.py"]) == 0
    given = cluster.environment()
    if form == "task":
        assert given["MASTER_ADDR"] == "first"
    else:
        assert uuid.UUID(given["PET_RDZV_ID"])


@pytest.mark.parametrize(
    ("preempted", "suspended", "status", "goes_back"),
    [
        ("None", "None", 3, False),
        (_TIME, "None", 0, True),
        (_TIME, "None", 3, True),
        (_TIME, _TIME, 3, False),  # preempted by the gang scheduler, which then suspended it
        (_TIME, _LATER, 0, False),  # and resumed it
        ("None", _TIME, 10, False),  # without a signal, no status puts the job back
        ("no answer", "", 3, False),  # of the controller
    ],
)
def test_a_preempted_job_goes_back_and_a_suspended_one_has_ended(
    preempted: str, suspended: str, status: int, goes_back: object, cluster: Cluster
) -> None:
    """A preempted job is requeued with any status; one that was only suspended keeps its status.

    Slurm may set PreemptTime when its gang scheduler suspends a job, and does not clear it.
    """
    (cluster.programs / "numapin").write_text(f"#!/bin/sh\nexit {status}\n")
    shown = f"JobId=5 PreemptEligibleTime={_TIME} PreemptTime={preempted} SuspendTime={suspended} SecsPreSuspend=9"
    answer = {"SHOWN": "", "UNKNOWN": "1"} if preempted == "no answer" else {"SHOWN": shown}
    ended = cluster.run(["slurm", *_LIMITED, "--requeue", "train.py"], **answer)
    assert (["requeue", "54321"] in cluster.calls("scontrol")) == goes_back
    assert ended == (0 if goes_back else status)


@pytest.mark.parametrize("late", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_after_the_end_changes_nothing(late: signal.Signals, cluster: Cluster) -> None:
    """A signal that arrives while Slurm is asked about an ended run is ignored, and the status stays."""
    with cluster.start(["slurm", *_LIMITED, "--requeue", "train.py"], SLOW="1") as script:
        cluster.wait_for("asked")
        script.send_signal(late)
        _, complaints = script.communicate(timeout=60)
    assert (script.returncode, complaints) == (0, "")
    assert ["requeue", "54321"] not in cluster.calls("scontrol")


@pytest.mark.parametrize("options", [_LIMITED, [*_SHAPE, "--requeue"]])
def test_an_end_that_was_asked_for_reaches_the_run(options: list[str], cluster: Cluster) -> None:
    """SIGTERM is passed on to the run, and the script waits for the run's end."""
    with cluster.start(["slurm", *options, "train.py"], WAIT="7") as script:
        cluster.wait_for("ready")
        script.send_signal(signal.SIGTERM)
        script.communicate(timeout=60)
    assert (cluster.noted / "heard").read_text() == "SIGTERM"
    assert script.returncode == 7


def test_pbs_has_a_timer(cluster: Cluster) -> None:
    """PBS sends no signal before the time limit, so `timeout` does, and it leaves nothing behind."""
    assert cluster.run(["pbs", *_SHAPE, "--time", "10s", "--signal", "2", "train.py"], WAIT="4") == 4
    assert (cluster.noted / "heard").read_text() == "SIGUSR1"
    assert cluster.run(["pbs", *_LIMITED, "train.py"]) == 0  # would wait an hour for a process that holds its output


@pytest.mark.xdist_group("warm ranks")
@pytest.mark.parametrize("form", ["job", "trainjob", "leaderworkerset"])  # a jobset's pods have a job's variables
def test_pods_meet(form: str, cluster: Cluster, tmp_path: Path) -> None:
    """Two pods, run on this host with the variables that the form's controller sets, are one group of ranks."""
    cluster.use_numapin()
    train = forked_script(
        tmp_path,
        "import torch.distributed as dist, os\n"
        "dist.init_process_group('gloo')\n"
        "dist.barrier()  # else a rank that ends first makes the other one's init_process_group fail\n"
        "os.write(1, f'rank {dist.get_rank()} of {dist.get_world_size()}\\n'.encode())\n"
        "dist.destroy_process_group()\n",
    )
    given = "--nodes 2 --gpus-per-node 0 --cpus-per-task 1 --mem-per-node 1G --container a --dataloader numapin --form"
    documents = yaml.safe_load_all(write(["kubernetes", *given.split(), form, str(train)]))
    (pod,) = [pod for document in documents for pod in schemas.pods(document)]
    (container,) = pod["spec"]["containers"]
    words = container["command"] + container["args"]
    environs = [environment(PATH=cluster.path, **_pod_variables(form, container, index)) for index in (1, 0)]
    pipe = subprocess.PIPE
    starts = [subprocess.Popen(words, env=environ, stdout=pipe, stderr=pipe, text=True) for environ in environs]
    ended = all_ended(*starts)
    assert [done.status for done in ended] == [0, 0], ended
    assert sorted("".join(done.out for done in ended).splitlines()) == ["rank 0 of 2", "rank 1 of 2"]


def _pod_variables(form: str, container: dict[str, Any], index: int) -> dict[str, str]:
    """Return the variables of a pod of this host: the manifest's, and those that the form's controller sets."""
    fields = {"metadata.labels['batch.kubernetes.io/controller-uid']": "0f8fad5b-d9cb-469f-a165-70867728950e"}
    named = {
        entry["name"]: entry["value"] if "value" in entry else fields[entry["valueFrom"]["fieldRef"]["fieldPath"]]
        for entry in container["env"]
    }
    # The name server of a cluster would know the first pod.
    address = {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(PORT)}
    leader = {"LWS_LEADER_ADDRESS": "127.0.0.1", "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": str(index)}
    controllers = {
        "job": {"JOB_COMPLETION_INDEX": str(index), **address},
        "leaderworkerset": {**leader, "PET_MASTER_PORT": str(PORT)},
        "trainjob": {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": str(index), **address},
    }
    return {**named, **controllers[form]}


_OF_TORCHRUN = {"LOCAL_RANK": "3", "RANK": "3", "OMP_NUM_THREADS": "1"}
_OF_TORCHRUN |= {"TORCHELASTIC_RUN_ID": "outer", "TORCHELASTIC_USE_AGENT_STORE": "True"}


@pytest.mark.xdist_group("warm ranks")
@pytest.mark.parametrize("outer", [{}, _OF_TORCHRUN, {"NUMAPIN_BINDING": "{}"}], ids=["shell", "torchrun", "exec"])
def test_two_nodes_meet(outer: dict[str, str], cluster: Cluster, tmp_path: Path) -> None:
    """Both tasks of the Slurm script, run on this host, find each other, and every rank gets its number."""
    starter = """
import os, subprocess, sys
words = sys.argv[1:]
while words[0].startswith("-"):
    words = words[1:]
step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "localhost,127.0.0.1"}
step |= {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_LOCALID": "0"}
tasks = [subprocess.Popen(words, env={**os.environ, **step, "SLURM_NODEID": str(node)}) for node in (1, 0)]
sys.exit(max(task.wait() for task in tasks))
"""
    (cluster.programs / "srun").write_text(f"#!{sys.executable} -IS\n{starter}")
    cluster.use_numapin()
    train = tmp_path / "train.py"
    train.write_text(
        "import json, os\n"
        "names = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'MASTER_ADDR', 'TORCHELASTIC_USE_AGENT_STORE')\n"
        "text = json.dumps({name: os.environ.get(name) for name in names})\n"
        "os.write(1, f'{text}\\n'.encode())  # in one piece: the other rank writes to the same pipe\n"
    )
    given = ["--nodes", "2", "--gpus-per-node", "0", "--ranks-per-node", "1"]
    with cluster.start(["slurm", *given, str(train)], SLURM_JOB_ID=str(os.getpid()), **outer) as script:
        (done,) = all_ended(script)
    assert done.status == 0, done.err
    assert [list(variables.values()) for variables in done.json_lines()] == [
        [str(rank), "2", "0", "localhost", "False"] for rank in range(2)
    ]
