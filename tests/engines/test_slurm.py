"""numapin below a real Slurm: `srun numapin run`, `srun numapin exec`, and the scripts that `numapin job slurm` writes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.engines.told import PROBE, assert_bound, assert_met, ranks_in
from tests.integration.launching import NUMAPIN

if TYPE_CHECKING:
    from pathlib import Path

    from tests.engines.cluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]
SRUN = ("srun", "--cpu-bind=none")


def test_run_in_a_step(cluster: Cluster, tmp_path: Path) -> None:
    """One task that is `numapin run` starts all ranks of its machine, each bound."""
    words = (*SRUN, "--gpus-per-node=2", *NUMAPIN, "run", "--nproc-per-node=2", PROBE, str(tmp_path))
    done = cluster.call(*words, folder=tmp_path)
    assert done.status == 0, done.err
    ranks = ranks_in(tmp_path)
    assert_met(ranks, size=2)
    assert_bound(ranks)
    assert [rank["environ"]["CUDA_VISIBLE_DEVICES"] for rank in ranks] == ["0,1", "0,1"]


def test_a_failed_rank_fails_the_step(cluster: Cluster, tmp_path: Path) -> None:
    """The step has the exit status that `numapin run` has."""
    program = ("--no-python", "sh", "-c", "exit 3")
    assert cluster.call(*SRUN, *NUMAPIN, "run", "--nproc-per-node=1", *program, folder=tmp_path).status == 1
