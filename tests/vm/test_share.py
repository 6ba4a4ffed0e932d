"""`numapin.share` on a machine with two nodes: the kernel reports on which node the pages of ranks and workers are."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.vm.machine import GPUS, HERE, SHARE, Job
from tests.vm.probe import MAPPING_BYTES

if TYPE_CHECKING:
    from tests.vm.machine import VmResult

RUN = (sys.executable, "-m", "numapin", "run", "--nproc-per-node", "2", HERE / "share_probe.py")
JOBS = {"two-nodes": [Job(name="share", argv=RUN, env={**GPUS, "NUMAPIN_RUN_DIR": str(SHARE / "share")})]}
NUM_PAGES = MAPPING_BYTES // 4096


def _found(result: VmResult, placement: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what each rank's probe wrote; the job must have succeeded, without a warning of numapin.share."""
    first, second = (result.found("share", f"{rank}.json")[placement] for rank in (0, 1))
    assert "numapin.share" not in result.jobs["share"].stderr, result.jobs["share"].shown()
    return first, second


def test_interleaved_pages_are_on_both_nodes(two_nodes: VmResult) -> None:
    """With the default placement, both ranks and their workers map one file, half of whose pages are on each node."""
    first, second = _found(two_nodes, "interleave")
    assert first["file"] == second["file"]
    for seen in (first["rank"], first["worker"], second["rank"], second["worker"]):
        assert seen == {"0": pytest.approx(NUM_PAGES / 2, rel=0.01), "1": pytest.approx(NUM_PAGES / 2, rel=0.01)}
        assert NUM_PAGES <= sum(seen.values()) <= NUM_PAGES + 1


def test_each_rank_reads_the_copy_of_its_node(two_nodes: VmResult) -> None:
    """With "per-node", each rank and its worker map a file whose pages are all on the rank's node."""
    ranks = _found(two_nodes, "per-node")
    assert ranks[0]["file"] != ranks[1]["file"]
    for seen, gpu in zip(ranks, two_nodes.machine.gpus, strict=True):
        for pages in (seen["rank"], seen["worker"]):
            assert pages.keys() == {str(gpu.node)}
            assert NUM_PAGES <= pages[str(gpu.node)] <= NUM_PAGES + 1
