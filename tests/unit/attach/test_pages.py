"""The memory of a process, from the text of its numa_maps and maps files."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.unit.attach.seam import CpuSet, pages
from tests.unit.planned import PLANNED

if TYPE_CHECKING:
    from pathlib import Path

NODE_1 = CpuSet({1})
MAPS = """10000-20000 rw-p 00000000 00:00 0
30000-50000 rw-p 00000000 00:00 0    [heap]
60000-61000 r-xp 00000000 08:01 7    /usr/lib/libc.so.6
7f0000000000-7f0000200000 rw-p 00000000 00:00 0
7ffd00000000-7ffd00021000 rw-p 00000000 00:00 0    [stack]
"""
LINES = (
    "00010000 {0} anon=16 dirty=16 N0=10 N1=6 kernelpagesize_kB=4",
    "00030000 {0} heap anon=2 dirty=2 N0=2 kernelpagesize_kB=4",
    "00060000 {0} file=/usr/lib/libc.so.6 mapped=1 N0=1 kernelpagesize_kB=4",
    "7f0000000000 bind:0 anon=1 N0=1 kernelpagesize_kB=2048",
    "7ffd00000000 {0} stack anon=3 N1=3 kernelpagesize_kB=4",
)


def _memory(root: Path, policy: str = "default") -> pages.ProcessMemory:
    """Return the memory of a process that is written below `root`."""
    folder = root / "proc/10"
    folder.mkdir(parents=True)
    (folder / "numa_maps").write_text("\n".join(LINES).format(policy))
    (folder / "maps").write_text(MAPS)
    memory = pages.memory_of(10, NODE_1, root=root)
    assert memory is not None
    return memory


def test_memory(tmp_path: Path) -> None:
    """Pages elsewhere are to be moved, but for files and for what has a policy of its own."""
    memory = _memory(tmp_path)
    assert memory.policy_name == "default"
    assert memory.by_node == {0: 12 * 4096 + (2 << 20), 1: 9 * 4096}
    assert memory.regions == (pages.Region(0x10000, 0x20000, 4096, 40960), pages.Region(0x30000, 0x50000, 4096, 8192))
    assert (memory.own_bytes, memory.far_bytes) == (2 << 20, (2 << 20) + 12 * 4096)


def test_policy_of_the_process(tmp_path: Path) -> None:
    """Memory under the policy of the process itself is to be moved, although the policy names nodes."""
    memory = _memory(tmp_path, "bind:0")
    assert memory.own_bytes == 0
    assert len(memory.regions) == 3
    (shortfall,) = pages.policy_shortfalls(memory, PLANNED)
    assert "its memory policy is bind:0, and no other process can change that" in shortfall


@pytest.mark.parametrize("policy", ["default", "local", "prefer:1", "bind:1"])
def test_policies_that_agree_with_the_plan(tmp_path: Path, policy: str) -> None:
    """With these policies, new pages go to the planned node."""
    assert pages.policy_shortfalls(_memory(tmp_path, policy), PLANNED) == ()


def test_pieces_cover_the_region() -> None:
    """Each page's address is in one piece, a huge page's too; a piece has at most 32 MiB of small pages."""
    region = pages.Region(0x10000, 0x10000 + (100 << 20), 4096, 0)
    found = list(region.pieces)
    assert [address for piece in found for address in piece] == list(range(region.start, region.end, 4096))
    assert max(map(len, found)) * 4096 == 32 << 20
    assert [piece.start % (2 << 20) for piece in found[1:]] == [0] * 3


def test_planned_nodes() -> None:
    """Pages belong on the nodes of the policy, or else on the GPU's node; without both, nowhere."""
    assert pages.planned_nodes(PLANNED) == NODE_1
    assert pages.planned_nodes(replace(PLANNED, nodes=CpuSet(), node=0)) == CpuSet({0})
    assert pages.planned_nodes(replace(PLANNED, nodes=CpuSet(), node=None)) == CpuSet()
