"""`srun numapin run train.py`, `mpirun numapin run train.py` and nothing else, on two machines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.engines.cluster import output_in
from tests.engines.conftest import NAMESPACES, require
from tests.engines.machines import INTERFACE, pair
from tests.engines.test_mpi import Hosts
from tests.engines.told import PROBE, met_in, ranks_in, run_on_each
from tests.integration.launching import NUMAPIN

if TYPE_CHECKING:
    from tests.engines.cluster import Cluster
    from tests.engines.machines import Machine

pytestmark = [pytest.mark.xdist_group("engines"), pytest.mark.timeout(600)]
SRUN = ("srun", "--cpu-bind=none", "--nodes=2", "--ntasks-per-node=1")
EXAMPLE = str(Path(__file__).resolve().parents[2] / "examples" / "train_ddp.py")
RUN = (*NUMAPIN, "run", "--nproc-per-node=2")


@pytest.mark.slurm
def test_srun_needs_nothing_else(cluster: Cluster, tmp_path: Path) -> None:
    """Two launchers find each other by Slurm's variables; test_slurm.py has ranks that join one group."""
    done = cluster.call(*SRUN, *RUN, "--verbose", PROBE, str(tmp_path), "--alone", folder=tmp_path)
    assert done.status == 0, done.err
    assert [rank["host"] for rank in ranks_in(tmp_path)] == ["node1", "node1", "node2", "node2"]
    assert "found host 1 of 2, host 0 is node1, from Slurm (SLURM_STEP_NUM_NODES=2" in done.err
    assert "launcher: direct, without torch: 2 hosts" in done.err


@pytest.mark.slurm
def test_srun_with_restarts(cluster: Cluster, tmp_path: Path) -> None:
    """With --max-restarts the hosts meet in torch's rendezvous, at the address that was found."""
    done = cluster.call(*SRUN, *RUN, "--max-restarts=1", PROBE, str(tmp_path), "--alone", folder=tmp_path)
    assert done.status == 0, done.err
    assert [rank["rank"] for rank in ranks_in(tmp_path)] == [0, 1, 2, 3]


@pytest.mark.slurm
def test_a_failure_ends_the_step(cluster: Cluster, tmp_path: Path) -> None:
    """Both hosts name the rank that failed first, although srun does not end the other host, and nothing is left."""
    program = "import os, sys, time; os.environ['RANK'] == '3' and sys.exit('no data'); time.sleep(300)"
    (tmp_path / "train.py").write_text(program)
    done = cluster.call(*SRUN, "--kill-on-bad-exit=0", *RUN, "train.py", folder=tmp_path)
    assert done.status == 1, done.err
    assert "rank    3, the first to fail: host 1 (node2)" in done.err
    assert "rank    3 (local rank 1), the first to fail: no GPU" in done.err
    assert done.err.count("failed  SystemExit: no data") == 2, done.err


@pytest.mark.slurm
def test_an_allocation_without_srun(cluster: Cluster, tmp_path: Path) -> None:
    """A batch script of two hosts that does not use srun runs on one, and is told how to use both."""
    (tmp_path / "train.py").write_text("import os; print('size', os.environ['WORLD_SIZE'])")
    lines = (
        f"#!/bin/bash\n#SBATCH --nodes=2 --output={tmp_path}/job.out\nexec 2>&1; numapin run --quiet --nproc-per-node=2"
    )
    job = cluster.submit(f"{lines} train.py\n", folder=tmp_path)
    assert cluster.ended(job, folder=tmp_path) == "COMPLETED", output_in(tmp_path)
    assert "has 2 hosts, and numapin runs on this one only; for all of them: srun" in output_in(tmp_path)
    assert output_in(tmp_path).count("size 2") == 2


@pytest.mark.slurm
def test_one_task_for_each_gpu(cluster: Cluster, tmp_path: Path) -> None:
    """Several launchers of a host start nothing, and name the command for tasks."""
    done = cluster.call("srun", "--nodes=2", "--ntasks-per-node=2", *RUN, PROBE, str(tmp_path), folder=tmp_path)
    assert done.status == 2
    assert "2 launchers are started on this host (SLURM_LOCALID=" in done.err
    assert "srun … numapin exec -- python train.py" in done.err
    assert not ranks_in(tmp_path)


@pytest.mark.mpi
def test_mpirun_needs_nothing_else(two_machines: tuple[Machine, Machine], tmp_path: Path) -> None:
    """Two processes of a real Open MPI, 4 or 5, find each other by mpirun, which is on the first host."""
    require("mpirun")
    hosts = Hosts(two_machines, tmp_path)
    variables = [word for name in ("PATH", "PYTHONPATH", "GLOO_SOCKET_IFNAME") for word in ("-x", name)]
    words = ("mpirun", "--hostfile", str(hosts.hostfile), "--map-by", "ppr:1:node", "--bind-to", "none", *variables)
    run = (*NUMAPIN, "run", "--nproc-per-node=1", "--verbose", EXAMPLE, "--epochs=1")
    done = hosts.call(*words, *run, GLOO_SOCKET_IFNAME=INTERFACE)
    assert done.status == 0, done.err
    first = two_machines[0]
    told = [f"host 0 is {where}, from Open MPI (OMPI_COMM_WORLD_RANK=1" for where in (first.address, first.name)]
    assert any(each in done.err for each in told), done.err
    assert done.out.count("epoch 0") == 1, done.out


@pytest.mark.netns
def test_pods_of_a_pytorchjob(tmp_path: Path) -> None:
    """They need no option with the variables of the training operator 1.9: pkg/controller.v1/pytorch/envvar.go."""
    require(*NAMESPACES, namespaces=True)
    names = ("train-master-0", "train-worker-0")
    alike = {"WORLD_SIZE": "2", "PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PYTHONUNBUFFERED": "1"}
    alike |= {"MASTER_ADDR": names[0], "MASTER_PORT": "23456", "PET_MASTER_ADDR": names[0], "PET_MASTER_PORT": "23456"}
    variables = [alike | {"RANK": str(index), "PET_NODE_RANK": str(index)} for index in (0, 1)]
    with pair(tmp_path, *names) as pods:
        run_on_each(pods, tmp_path, variables=variables)
    assert [rank["host"] for rank in met_in(tmp_path, size=2)] == [*names]


@pytest.mark.netns
def test_pods_of_an_indexed_job(tmp_path: Path) -> None:
    """Pods find pod 0 by their own names and --nnodes."""
    require(*NAMESPACES, namespaces=True)
    variables = [{"JOB_COMPLETION_INDEX": str(index)} for index in (0, 1)]
    with pair(tmp_path, "train-0.train.space", "train-1.train.space") as pods:
        run_on_each(pods, tmp_path, "--nnodes=2", "--nproc-per-node=1", variables=variables, probe=("--alone",))
    assert [rank["host"] for rank in ranks_in(tmp_path)] == ["train-0.train.space", "train-1.train.space"]
