"""`numapin.share` on a machine with two nodes: the kernel reports on which node the pages of ranks and workers are."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.vm import gpus
from tests.vm.machine import HERE, SHARE, TEST_LIMIT_S, Job, VmResult
from tests.vm.probe import MAPPING_BYTES

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.vm, pytest.mark.timeout(TEST_LIMIT_S)]

RUN = (sys.executable, "-m", "numapin", "run", "--nproc-per-node", "2", HERE / "share_probe.py")
NUM_PAGES = MAPPING_BYTES // 4096


def jobs(machine: str, nvml: Path) -> list[Job]:
    """Return the job for the two-node machine."""
    if machine != "two-nodes":
        return []
    environ = {**gpus.shown(machine, nvml), "NUMAPIN_RUN_DIR": str(SHARE / "share")}
    return [Job(name="share", argv=RUN, env=environ)]


def _found(result: VmResult, placement: str, rank: int) -> dict[str, Any]:
    """Return what a rank's probe wrote; the job must have succeeded, without a warning of numapin.share."""
    job = result.jobs["share"]
    assert job.status == 0, job.shown()
    assert "numapin.share" not in job.stderr, job.shown()
    found: Any = job.json(f"{rank}.json")
    return dict(found[placement])


def test_interleaved_pages_are_on_both_nodes(two_nodes: VmResult) -> None:
    """With the default placement, both ranks and their workers map one file, half of whose pages are on each node."""
    first, second = (_found(two_nodes, "interleave", rank) for rank in (0, 1))
    assert first["file"] == second["file"]
    for seen in (first["rank"], first["worker"], second["rank"], second["worker"]):
        assert seen == {"0": pytest.approx(NUM_PAGES / 2, rel=0.01), "1": pytest.approx(NUM_PAGES / 2, rel=0.01)}
        assert NUM_PAGES <= sum(seen.values()) <= NUM_PAGES + 1


def test_each_rank_reads_the_copy_of_its_node(two_nodes: VmResult) -> None:
    """With "per-node", each rank and its worker map a file whose pages are all on the rank's node."""
    ranks = [_found(two_nodes, "per-node", rank) for rank in (0, 1)]
    assert ranks[0]["file"] != ranks[1]["file"]
    for rank, gpu in enumerate(two_nodes.machine.gpus):
        for process in ("rank", "worker"):
            seen = ranks[rank][process]
            assert seen.keys() == {str(gpu.node)}
            assert NUM_PAGES <= seen[str(gpu.node)] <= NUM_PAGES + 1
