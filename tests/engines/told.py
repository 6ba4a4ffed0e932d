"""The ranks' reports: the files that probe.py and steps.py write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tests.engines.seam import CpuSet

if TYPE_CHECKING:
    from collections.abc import Sequence

HERE: Final = Path(__file__).resolve().parent
PROBE: Final = str(HERE / "probe.py")
STEPS: Final = str(HERE / "steps.py")


def ranks_in(folder: Path) -> list[dict[str, Any]]:
    """Return the ranks' reports, ordered by rank."""
    told = [json.loads(path.read_text()) for path in folder.glob("[!.]*.json")]
    return sorted(told, key=lambda rank: int(rank["rank"]))


def assert_met(ranks: Sequence[dict[str, Any]], *, size: int) -> None:
    """Check that all ranks joined one group, and that each has the right sum over all ranks."""
    assert [rank["rank"] for rank in ranks] == list(range(size))
    assert {rank["world_size"] for rank in ranks} == {size}
    assert {rank["sum"] for rank in ranks} == {size * (size + 1) // 2}


def assert_bound(ranks: Sequence[dict[str, Any]]) -> None:
    """Check that each rank's CPUs, as the kernel reports them, match its binding."""
    for rank in ranks:
        assert rank["cpus"] == rank["binding"]["cpus"], rank
        assert CpuSet.parse(rank["cpus"]), rank
