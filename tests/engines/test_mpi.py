"""numapin under a real Open MPI, on two machines: `mpirun numapin exec`, and the scripts of `numapin job mpi`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.engines.conftest import NAMESPACES, require
from tests.engines.told import PROBE, assert_own_cores, met_in
from tests.integration.launching import numapin
from tests.needs import needs_two_cpus

if TYPE_CHECKING:
    from tests.engines.machines import Machine
    from tests.integration.launching import Done

pytestmark = [pytest.mark.mpi, pytest.mark.xdist_group("engines"), pytest.mark.timeout(600)]
# Without a hostfile mpirun counts this host's cores, which may be one.
SETTINGS = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_ALLOW_RUN_AS_ROOT": "1",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}


class Hosts:
    """Two machines, their hostfile, and the stand-in for ssh by which mpirun starts its daemon on the second one."""

    def __init__(self, machines: tuple[Machine, Machine], folder: Path) -> None:
        self.head, other = machines
        self.folder = folder
        self.hostfile = folder / "the hosts"
        self.hostfile.write_text("".join(f"{machine.name} slots=2\n" for machine in machines))
        self.agent = folder / "agent"
        self.agent.write_text(f'#!/bin/sh\nshift\nexec {" ".join(other.from_beside())} sh -c "$*"\n')
        self.agent.chmod(0o755)

    def call(self, *command: str, **changes: str) -> Done:
        agent = dict.fromkeys(("OMPI_MCA_plm_rsh_agent", "PRTE_MCA_plm_ssh_agent"), str(self.agent))  # Open MPI 4, 5
        given = SETTINGS | agent | changes
        return self.head.call(*command, folder=self.folder, **given)


@pytest.fixture
def hosts(request: pytest.FixtureRequest, tmp_path: Path) -> Hosts:
    require("mpirun", *NAMESPACES, namespaces=True)
    return Hosts(request.getfixturevalue("two_machines"), tmp_path)


@needs_two_cpus
def test_exec_in_every_task(hosts: Hosts, tmp_path: Path) -> None:
    """Each of two processes per machine is bound to its own cores by its OMPI_COMM_WORLD_LOCAL_RANK."""
    ranks = 'export RANK=$OMPI_COMM_WORLD_RANK; exec "$@"'
    program = ("numapin", "exec", "--bind=exclusive", "--", "python", PROBE, str(tmp_path), "--alone")
    variables = [word for name in ("PATH", "PYTHONPATH") for word in ("-x", name)]
    words = ("mpirun", "--hostfile", str(hosts.hostfile), "-np", "4", "--bind-to", "none", *variables)
    done = hosts.call(*words, "sh", "-c", ranks, "sh", *program)
    assert done.status == 0, done.err
    assert_own_cores(tmp_path, "numapin1", "numapin2")


@pytest.mark.parametrize("form", ["node", "task"])
def test_job_scripts(hosts: Hosts, tmp_path: Path, form: str) -> None:
    """Both forms of script start bound ranks on two machines, which join one group."""
    shape = ("--nodes=2", "--gpus-per-node=0", "--ranks-per-node=1", f"--form={form}", f"--hostfile={hosts.hostfile}")
    script = numapin("job", "mpi", *shape, PROBE, str(tmp_path))
    assert script.status == 0, script.err
    (tmp_path / "job.sh").write_text(script.out)
    done = hosts.call("bash", "job.sh")
    assert done.status == 0, done.err
    assert [rank["host"] for rank in met_in(tmp_path, size=2)] == ["numapin1", "numapin2"]


def test_a_failed_rank_fails_mpirun(hosts: Hosts) -> None:
    """Open MPI sees the exit status of the command that `numapin exec` became."""
    done = hosts.call("mpirun", "-np", "1", "--bind-to", "none", "numapin", "exec", "--", "sh", "-c", "exit 7")
    assert done.status == 7, done.err
