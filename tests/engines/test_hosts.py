"""`srun numapin run train.py`, `mpirun numapin run train.py` and nothing else, on two machines."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

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
