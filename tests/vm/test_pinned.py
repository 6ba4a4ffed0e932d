"""`numapin.pinned` in one process with a GPU on each of two nodes: reused memory is on the node that is asked for.

torch's cache knows sizes only: memory that one GPU's thread has freed goes to the other GPU's thread (pytorch#160420).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tests.vm.machine import GPUS, Job, publish

if TYPE_CHECKING:
    from tests.vm.machine import VmResult

JOBS = {"two-nodes": [Job(name="pinned", argv=(sys.executable, "-m", "tests.vm.pinned_probe"), env=GPUS)]}
NUM_PAGES = 8 * 1024 * 1024 // 4096


def _are_on(node: int, pages: Mapping[str, int]) -> bool:
    """Return whether all pages are on a node; malloc's memory begins and ends inside of a page."""
    return list(pages) == [str(node)] and NUM_PAGES - 1 <= pages[str(node)] <= NUM_PAGES


def test_placement_survives_reuse_by_another_thread(two_nodes: VmResult) -> None:
    """What the other GPU's thread frees is not given to that GPU, and is on its node whenever it is used again.

    All of this needs two blocks of one GPU, and one of the other: each is reused.
    """
    found = two_nodes.found("pinned", "seen.json")
    for gpu in (0, 1):
        seen = found[f"gpu {gpu}"]
        assert [_are_on(gpu, seen[name]) for name in ("first", "asked", "last")] == [True] * 3
        assert _are_on(1 - gpu, seen["others"])
        assert seen["is_same"] == [False, True]
        assert seen["is_last_same"]
    assert found["registered_bytes"] <= 3 * NUM_PAGES * 4096
    content = {"machine": two_nodes.machine.name, "probe": "8 MiB, pages by node", "seen": found}
    publish("vm-pinned-two-nodes.json", content)


def test_torchs_own_pinning_is_on_the_gpus_node(two_nodes: VmResult) -> None:
    """For GPU 1, from a thread on node 0: FSDP2's pin_memory, and a stager's shared, private and used memory."""
    seen: dict[str, Any] = two_nodes.found("pinned", "seen.json")
    assert all(_are_on(0, pages) for pages in seen["without"].values())
    assert all(_are_on(1, pages) for pages in (seen["offload"], *seen["staged"].values()))
    assert list(seen["staged"]) == ["shared", "private", "used"]
    assert seen["num_staged"] == 2 * 3
