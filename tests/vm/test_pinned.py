"""`numapin.pinned` in one process with a GPU on each of two nodes: reused memory is on the node that is asked for.

torch's cache knows sizes only: memory that one GPU's thread has freed goes to the other GPU's thread (pytorch#160420).
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.cuda import fake
from tests.vm import gpus
from tests.vm.machine import REPOSITORY, TEST_LIMIT_S, Job, VmResult, publish

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

pytestmark = [pytest.mark.vm, pytest.mark.timeout(TEST_LIMIT_S)]

NUM_PAGES = 8 * 1024 * 1024 // 4096


def jobs(machine: str, nvml: Path) -> list[Job]:
    """Return the job for the two-node machine."""
    if machine != "two-nodes":
        return []
    library = fake.build(REPOSITORY / ".cache" / "fake-cuda")
    probe = (sys.executable, "-m", "tests.vm.pinned_probe", str(library))
    return [Job(name="pinned", argv=probe, env=gpus.shown(machine, nvml))]


def _seen(result: VmResult) -> dict[str, Any]:
    job = result.jobs["pinned"]
    assert job.status == 0, job.shown()
    found: Any = job.json("seen.json")
    return dict(found)


def _are_on(node: int, pages: Mapping[str, int]) -> bool:
    """Return whether all pages are on a node; malloc's memory begins and ends inside of a page."""
    return list(pages) == [str(node)] and NUM_PAGES - 1 <= pages[str(node)] <= NUM_PAGES


@pytest.mark.parametrize("gpu", [0, 1])
def test_placement_survives_reuse_by_another_thread(two_nodes: VmResult, gpu: int) -> None:
    """What the other GPU's thread frees is not given to that GPU, and is on its node whenever it is used again."""
    seen = _seen(two_nodes)[f"gpu {gpu}"]
    assert _are_on(gpu, seen["first"])
    assert _are_on(1 - gpu, seen["others"])
    assert _are_on(gpu, seen["asked"])
    assert seen["is_same"] == [False, True]
    assert _are_on(gpu, seen["last"])
    assert seen["is_last_same"]


def test_torchs_own_pinning_is_on_the_gpus_node(two_nodes: VmResult) -> None:
    """For GPU 1, from a thread on node 0: FSDP2's pin_memory, and a stager's shared, private and used memory."""
    seen = _seen(two_nodes)
    assert all(_are_on(0, pages) for pages in seen["without"].values())
    assert all(_are_on(1, pages) for pages in (seen["offload"], *seen["staged"].values()))
    assert list(seen["staged"]) == ["shared", "private", "used"]
    assert seen["num_staged"] == 2 * 3


def test_blocks_are_reused(two_nodes: VmResult) -> None:
    """All of this needs two blocks of one GPU, and one of the other: each is reused."""
    seen = _seen(two_nodes)
    assert seen["registered_bytes"] <= 3 * NUM_PAGES * 4096
    machine = two_nodes.machine.name
    publish("vm-pinned-two-nodes.json", {"machine": machine, "probe": "8 MiB, pages by node", "seen": seen})
