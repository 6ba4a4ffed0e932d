"""Fixtures that start each engine once for all of its tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.engines.cluster import Cluster, slurm
from tests.engines.machines import Machine, pair
from tests.engines.needs import NAMESPACES, require

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="package")
def made_machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Machine, Machine]]:
    """Make two machines with a cable between them."""
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
    """Return a Slurm on two machines."""
    require("munged", "slurmctld", "slurmd", "srun", *NAMESPACES, namespaces=True)
    with pair(tmp_path_factory.mktemp("slurm"), "node1", "node2") as machines, slurm(machines) as cluster:
        yield cluster
