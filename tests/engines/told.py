"""The ranks' reports: the files that probe.py writes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tests.engines.seam import CpuSet
from tests.integration.launching import NUMAPIN

if TYPE_CHECKING:
    from tests.engines.machines import Machine

HERE: Final = Path(__file__).resolve().parent
PROBE: Final = str(HERE / "probe.py")


def ranks_in(folder: Path) -> list[dict[str, Any]]:
    """Return the ranks' reports, ordered by rank, whose CPUs, as the kernel reports them, must match their bindings."""
    told = [json.loads(path.read_text()) for path in folder.glob("[!.]*.json")]
    for rank in told:
        assert rank["cpus"] == rank["binding"]["cpus"], rank
        assert CpuSet.parse(rank["cpus"]), rank
    return sorted(told, key=lambda rank: int(rank["rank"]))


def met_in(folder: Path, *, size: int) -> list[dict[str, Any]]:
    """Return the ranks' reports. All must have joined one group, in which each has the right sum over all ranks."""
    ranks = ranks_in(folder)
    assert [rank["rank"] for rank in ranks] == list(range(size))
    assert {rank["world_size"] for rank in ranks} == {size}
    assert {rank["sum"] for rank in ranks} == {size * (size + 1) // 2}
    return ranks


def assert_own_cores(folder: Path, *hosts: str) -> None:
    """Check that two tasks on each host have their place by their local ranks, and cores of their own."""
    told = ranks_in(folder)
    assert [(rank["host"], rank["binding"]["local_rank"]) for rank in told] == [(h, n) for h in hosts for n in (0, 1)]
    for one, other in (told[:2], told[2:]):
        assert one["cpus"] != other["cpus"]


def run_on_each(
    machines: Sequence[Machine],
    folder: Path,
    *options: str,
    each: Sequence[tuple[str, ...]] = ((), ()),
    variables: Sequence[dict[str, str]] = ({}, {}),
    probe: tuple[str, ...] = (),
) -> None:
    """Run the probe below a launcher on each machine, with options and variables of its own; all must succeed."""
    log = folder / "log"
    launchers = [
        machine.start(*NUMAPIN, "run", *options, *own, PROBE, str(folder), *probe, folder=folder, log=log, **changes)
        for machine, own, changes in zip(machines, each, variables, strict=True)
    ]
    assert [launcher.wait(timeout=180) for launcher in launchers] == [0, 0], log.read_text()
