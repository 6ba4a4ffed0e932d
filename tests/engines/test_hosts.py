"""`srun numapin run train.py`, `mpirun numapin run train.py` and nothing else, on two machines."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.engines.cluster import output_in
from tests.engines.told import PROBE, assert_bound, assert_met, ranks_in
from tests.integration.launching import NUMAPIN

if TYPE_CHECKING:
    from pathlib import Path

    from tests.engines.cluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("engines"), pytest.mark.timeout(600)]
SRUN = ("srun", "--cpu-bind=none", "--nodes=2", "--ntasks-per-node=1")
RUN = (*NUMAPIN, "run", "--nproc-per-node=2")


def test_srun_needs_nothing_else(cluster: Cluster, tmp_path: Path) -> None:
    """Two launchers find each other by Slurm's variables, and four ranks join one group."""
    done = cluster.call(*SRUN, *RUN, "--verbose", PROBE, str(tmp_path), folder=tmp_path)
    assert done.status == 0, done.err
    ranks = ranks_in(tmp_path)
    assert_met(ranks, size=4)
    assert_bound(ranks)
    assert [rank["host"] for rank in ranks] == ["node1", "node1", "node2", "node2"]
    assert "found host 1 of 2, host 0 is node1, from Slurm (SLURM_STEP_NUM_NODES=2" in done.err
    assert "launcher: direct, without torch: 2 hosts" in done.err


def test_srun_with_restarts(cluster: Cluster, tmp_path: Path) -> None:
    """With --max-restarts the hosts meet in torch's rendezvous, at the address that was found."""
    done = cluster.call(*SRUN, *RUN, "--max-restarts=1", PROBE, str(tmp_path), folder=tmp_path)
    assert done.status == 0, done.err
    assert_met(ranks_in(tmp_path), size=4)


def test_a_failure_ends_the_step(cluster: Cluster, tmp_path: Path) -> None:
    """Both hosts name the rank that failed first, although srun does not end the other host, and nothing is left."""
    program = "import os, sys, time; os.environ['RANK'] == '3' and sys.exit('no data'); time.sleep(300)"
    (tmp_path / "train.py").write_text(program)
    done = cluster.call(*SRUN, "--kill-on-bad-exit=0", *RUN, "train.py", folder=tmp_path)
    assert done.status == 1, done.err
    assert "rank    3, the first to fail: host 1, node2" in done.err
    assert "rank    3 (local rank 1), the first to fail: no GPU" in done.err
    assert done.err.count("failed  SystemExit: no data") == 2, done.err


def test_a_killed_launcher_ends_the_step(cluster: Cluster, tmp_path: Path) -> None:
    """The other host says which launcher is gone, and ends its ranks."""
    (tmp_path / "train.py").write_text(
        "import os, signal, time\n"
        "time.sleep(1)\n"
        "if os.environ['RANK'] == '2': os.kill(os.getppid(), signal.SIGKILL)\n"
        "time.sleep(300)\n"
    )
    done = cluster.call(*SRUN, "--kill-on-bad-exit=0", *RUN, "train.py", folder=tmp_path)
    assert done.status != 0
    assert "no rank is known to have failed: host 1, node2" in done.err, done.err
    assert "its launcher is gone" in done.err


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


def test_one_task_for_each_gpu(cluster: Cluster, tmp_path: Path) -> None:
    """Several launchers of a host start nothing, and name the command for tasks."""
    done = cluster.call("srun", "--nodes=2", "--ntasks-per-node=2", *RUN, PROBE, str(tmp_path), folder=tmp_path)
    assert done.status == 2
    assert "2 launchers are started on this host (SLURM_LOCALID=" in done.err
    assert "srun … numapin exec -- python train.py" in done.err
    assert not ranks_in(tmp_path)
