"""A private Slurm on two machines: munged, slurmctld, and a slurmd on each, from Debian packages.

All its files are in one folder and all its ports on those machines, so that it does not interfere with a Slurm of this
host.
"""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.waiting import wait_until

if TYPE_CHECKING:
    from tests.engines.machines import Machine
    from tests.integration.launching import Done

CPUS: Final = 8
"""CPUs of each machine according to Slurm; config_overrides keeps it from counting this host's CPUs."""
GPUS: Final = 2
"""GPUs of each machine: fake device files, enough for Slurm to count them and to set CUDA_VISIBLE_DEVICES."""

_SEARCHED: Final = f"{os.defpath}:/usr/sbin:/sbin"
_CONFIGURATION: Final = """
ClusterName=numapin
SlurmctldHost={head.name}({head.address})
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
GresTypes=gpu
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
KillWait=5
NodeName={names} CPUs={cpus} Sockets=1 CoresPerSocket={cpus} ThreadsPerCore=1 RealMemory=4000 Gres=gpu:{gpus}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PreemptMode=OFF
PartitionName=spare Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=90
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=9 PreemptMode=OFF
"""
# A requeued job waits until its credentials expire; cred_expire makes that 5 s instead of 2 minutes.


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A running Slurm; commands run on the first machine."""

    head: Machine
    folder: Path

    def call(self, *command: str, folder: Path, **changes: str) -> Done:
        return self.head.call(*command, folder=folder, SLURM_CONF=str(self.folder / "slurm.conf"), **changes)

    def submit(self, script: str, *, folder: Path, **changes: str) -> str:
        path = folder / "job.sh"
        path.write_text(script)
        done = self.call("sbatch", "--parsable", str(path), folder=folder, **changes)
        assert done.status == 0, done.err
        return done.out.strip()

    def shown(self, job: str) -> str:
        """Return what Slurm knows about a job, in one line."""
        return self.call("scontrol", "show", "job", "--oneliner", job, folder=self.folder).out

    def state_of(self, job: str) -> str:
        words = self.shown(job).split()
        return next((word.partition("=")[2] for word in words if word.startswith("JobState=")), "")

    def ended(self, job: str, *, folder: Path) -> str:
        """Wait for a job's end and return its state; on a timeout, fail with the job's output and the logs."""
        over = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL"}
        state = wait_until(lambda: {self.state_of(job)} & over, limit_s=240)
        assert state, "\n".join((f"no end of job {job}", self.state_of(job), output_in(folder), self.logs()))
        return state.pop()

    def logs(self) -> str:
        paths = sorted(self.folder.glob("*.log"))
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in paths)


def output_in(folder: Path) -> str:
    return "\n".join(path.read_text(errors="replace") for path in sorted(folder.glob("*.out")))


@contextmanager
def slurm(machines: tuple[Machine, Machine]) -> Iterator[Cluster]:
    """Start the daemons, wait until both machines accept jobs, and end everything on the machines afterwards."""
    # A short path, because munged's socket path is limited to 107 bytes; its folders must belong to root.
    folder = Path(tempfile.mkdtemp(prefix="numapin-slurm-"))
    try:
        cluster = Cluster(head=machines[0], folder=folder)
        _configure(folder, machines)
        _start(cluster, machines)
        yield cluster
    finally:
        for machine in machines:
            machine.lose_power()
        shutil.rmtree(folder)


def _configure(folder: Path, machines: tuple[Machine, Machine]) -> None:
    for name in ("munge", "state", *(f"spool-{machine.name}" for machine in machines)):
        (folder / name).mkdir(mode=0o700)
    (folder / "munge" / "key").touch(mode=0o600)
    (folder / "munge" / "key").write_bytes(secrets.token_bytes(128))
    names = ",".join(machine.name for machine in machines)
    user = pwd.getpwuid(os.geteuid()).pw_name
    text = _CONFIGURATION.format(head=machines[0], user=user, folder=folder, names=names, cpus=CPUS, gpus=GPUS)
    (folder / "slurm.conf").write_text(text)
    for number, device in zip(range(GPUS), ("/dev/null", "/dev/zero"), strict=True):
        (folder / f"nvidia{number}").symlink_to(device)
    (folder / "gres.conf").write_text(f"AutoDetect=off\nName=gpu File={folder}/nvidia[0-{GPUS - 1}]\n")
    (folder / "cgroup.conf").write_text("CgroupPlugin=autodetect\n")  # unused, but slurmd requires it


def _start(cluster: Cluster, machines: tuple[Machine, Machine]) -> None:
    """Start the daemons in the foreground, so that they end with their machines."""
    folder, conf = cluster.folder, {"SLURM_CONF": str(cluster.folder / "slurm.conf")}
    files = ("key-file=key", "socket=socket", "pid-file=pid", "log-file=log", "seed-file=seed")
    options = [f"--{name}={folder}/munge/{value}" for name, _, value in (file.partition("=") for file in files)]
    # --force, because munged rejects a folder that only root can enter, which is intended here.
    started = [
        cluster.head.start(_program("munged"), "--foreground", "--force", *options, folder=folder, log=folder / "m.log")
    ]
    assert wait_until((folder / "munge" / "socket").exists, limit_s=60), f"no socket of munged\n{cluster.logs()}"
    started += [
        cluster.head.start(_program("slurmctld"), "-D", "-c", folder=folder, log=folder / "out-c.log", **conf),
        *(
            machine.start(_program("slurmd"), "-D", folder=folder, log=folder / f"out-{machine.name}.log", **conf)
            for machine in machines
        ),
    ]

    def ready() -> bool:
        assert [daemon.poll() for daemon in started] == [None] * len(started), cluster.logs()
        return cluster.call("sinfo", "--noheader", "--format=%D %t", folder=folder).out.strip() == "2 idle"

    assert wait_until(ready, limit_s=120), f"no two idle machines\n{cluster.logs()}"


def find(program: str) -> str | None:
    """Return a program's path. Daemons may not be on the user's PATH."""
    return shutil.which(program) or shutil.which(program, path=_SEARCHED)


def _program(name: str) -> str:
    path = find(name)
    assert path is not None
    return path
