"""Fixtures that start each engine once for all of its tests, and what these need of the machine.

Without it the tests skip and name the missing package or privilege; in CI they fail instead.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Final

import pytest

from tests.engines.cluster import Cluster, find, slurm
from tests.engines.machines import Machine, pair

PACKAGES: Final[Mapping[str, str]] = {
    "munged": "munge",
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "srun": "slurm-wlm",
    "mpirun": "openmpi-bin",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "unshare": "util-linux",
}
"""Programs that these tests use, and their Debian packages."""

NAMESPACES: Final = ("ip", "nsenter", "setpriv", "unshare")


def require(*programs: str, namespaces: bool = False) -> None:
    """Skip, or fail in CI, if a program or the privilege to create namespaces is missing."""
    packages = sorted({PACKAGES[program] for program in programs if find(program) is None})
    if packages:
        _without(f"{', '.join(packages)} missing; type: apt-get install --no-install-recommends {' '.join(packages)}")
    if namespaces and (reason := _no_namespaces()):
        _without(f"no namespaces for machines: {reason}; run the tests as root, with CAP_SYS_ADMIN")


def _without(what: str) -> None:
    if os.environ.get("CI") == "true" or os.environ.get("NUMAPIN_TEST_ENGINES") == "all":
        pytest.fail(what, pytrace=False)
    pytest.skip(what)


@cache
def _no_namespaces() -> str:
    """Return why namespaces with a virtual cable cannot be created; empty if they can."""
    inside: Sequence[str] = ("ip", "link", "add", "np-try", "type", "veth", "peer", "name", "np-tried")
    words = ["unshare", "--mount", "--pid", "--net", "--uts", "--fork", "--kill-child", "--mount-proc", "--", *inside]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    return "" if done.returncode == 0 else done.stderr.strip() or f"status {done.returncode}"


@pytest.fixture(scope="package")
def made_machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Machine, Machine]]:
    require(*NAMESPACES, namespaces=True)
    with pair(tmp_path_factory.mktemp("machines"), "numapin1", "numapin2") as made:
        yield made


@pytest.fixture
def two_machines(made_machines: tuple[Machine, Machine]) -> Iterator[tuple[Machine, Machine]]:
    """Return two idle machines, and end everything that a test leaves running there."""
    yield made_machines
    for machine in made_machines:
        machine.lose_power()


@pytest.fixture(scope="package")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    require("munged", "slurmctld", "slurmd", "srun", *NAMESPACES, namespaces=True)
    with pair(tmp_path_factory.mktemp("slurm"), "node1", "node2") as machines, slurm(machines) as cluster:
        yield cluster
