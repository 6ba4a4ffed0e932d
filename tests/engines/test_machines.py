"""`numapin run --nnodes` on two machines: ranks join over the network, and a lost machine comes back."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.engines.conftest import NAMESPACES, require
from tests.engines.machines import INTERFACE, Machine, pair
from tests.engines.told import PROBE, met_in, ranks_in, run_on_each
from tests.integration.launching import NUMAPIN
from tests.waiting import wait_until

pytestmark = [pytest.mark.netns, pytest.mark.xdist_group("engines"), pytest.mark.timeout(600)]
BOTH = {"GLOO_SOCKET_IFNAME": INTERFACE}
# Detect a lost machine after 5 s instead of 15; wait for additional machines for 2 s instead of 30.
QUICK = "--rdzv-conf=keep_alive_interval=1,keep_alive_max_attempt=5,last_call_timeout=2"


def _meeting(head: Machine, *, nodes: str, ranks: int) -> tuple[str, ...]:
    endpoint = f"--rdzv-endpoint={head.address}:29400"
    return (f"--nnodes={nodes}", f"--nproc-per-node={ranks}", "--rdzv-backend=c10d", endpoint, "--rdzv-id=job")


class _Job:
    """One `numapin run` on each machine, for the tests that lose machines."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder, self.options = folder, options
        self.log = folder / "log"

    def start(self, machine: Machine) -> subprocess.Popen[bytes]:
        words = (*NUMAPIN, "run", *self.options, PROBE, str(self.folder), "--steps")
        return machine.start(*words, folder=self.folder, log=self.log, **BOTH)

    def met(self, size: int, known: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Wait for the first step of a new group of this size, and return its ranks."""

        def group() -> list[dict[str, Any]]:
            new = [rank for rank in ranks_in(self.folder) if rank not in known and rank["world_size"] == size]
            return new if len(new) == size else []

        found = wait_until(group, limit_s=180)
        assert found, f"no group of {size}\n{self.said()}"
        return found

    def said(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]

    def end(self, *launchers: subprocess.Popen[bytes]) -> None:
        (self.folder / "end").touch()
        for launcher in launchers:
            assert launcher.wait(timeout=120) == 0, self.said()


def test_ranks_of_two_machines_meet(two_machines: tuple[Machine, Machine], tmp_path: Path) -> None:
    """Two launchers with one endpoint make one job of four ranks, each bound on its machine, and leave no process."""
    run_on_each(two_machines, tmp_path, *_meeting(two_machines[0], nodes="2", ranks=2))
    ranks = met_in(tmp_path, size=4)
    assert [rank["binding"]["local_rank"] for rank in ranks] == [0, 1, 0, 1]
    assert {rank["host"] for rank in ranks[:2]} != {rank["host"] for rank in ranks[2:]}
    are_idle = wait_until(lambda: not any(machine.processes() for machine in two_machines), limit_s=120)
    assert are_idle, "something is left"


def test_host_names_that_nobody_resolves(tmp_path: Path) -> None:
    """With --local-addr and is_host, which replaces torch's comparison of names, a job needs no host names."""
    require(*NAMESPACES, namespaces=True)
    with pair(tmp_path, "unknown1", "unknown2", resolved=False) as both:
        each = [
            (f"--local-addr={machine.address}", f"--rdzv-conf=is_host={is_host}")
            for machine, is_host in zip(both, (1, 0), strict=True)
        ]
        run_on_each(both, tmp_path, *_meeting(both[0], nodes="2", ranks=1), each=each, variables=(BOTH, BOTH))
    met_in(tmp_path, size=2)


def test_a_machine_that_comes_back(two_machines: tuple[Machine, Machine], tmp_path: Path) -> None:
    """With --max-restarts, ranks wait for a lost machine and continue with it, bound as before."""
    job = _Job(tmp_path, *_meeting(two_machines[0], nodes="2", ranks=1), "--max-restarts=3", QUICK)
    stays, lost = (job.start(machine) for machine in two_machines)
    before = job.met(2, known=[])
    two_machines[1].lose_power()
    assert lost.wait(timeout=240) != 0
    back = job.start(two_machines[1])
    after = job.met(2, known=before)
    job.end(stays, back)
    assert sorted(rank["host"] for rank in after) == ["numapin1", "numapin2"]
    # It was started again, after its failure or because the machine came back before that.
    assert len({rank["pid"] for rank in (*before, *after) if rank["host"] == "numapin1"}) == 2
