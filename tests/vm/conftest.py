"""Fixtures that boot each machine once for all tests of this folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.nvml import fake
from tests.vm.machine import Batch, Job, VmMachine, VmResult, boot, missing

if TYPE_CHECKING:
    from collections.abc import Sequence

HERE: Final = Path(__file__).resolve().parent
MACHINES: Final = ("two_nodes", "two_nodes_again", "four_nodes", "memory_only")
NUMAPIN: Final = (
    *("numapin.cli.main", "numapin.cli.run", "numapin.cli.verify", "numapin.cli.attach", "numapin.children.command"),
    *("numapin.launch", "numapin.launcher.ranks", "numapin.topology.discover"),
)
TORCHRUN: Final = ("torch.distributed.run", "torch.distributed.launcher.api")


@pytest.hookimpl(tryfirst=True)  # before xdist looks for groups
def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Keep the tests of one machine in one process, which boots it."""
    for item in items:
        if item.path.parent == HERE:
            item.add_marker(pytest.mark.xdist_group(f"vm-{_machine(item)}"))


def _machine(item: pytest.Item) -> str:
    call = getattr(item, "callspec", None)
    words = [*getattr(item, "fixturenames", ()), *(call.params.values() if call else ())]
    return next((name for name in MACHINES if name in words), "none")


@pytest.fixture(scope="session")
def two_nodes(request: pytest.FixtureRequest) -> VmResult:
    """Return the results of all jobs on the two-node machine."""
    return _booted("two-nodes", request)


@pytest.fixture(scope="session")
def two_nodes_again(request: pytest.FixtureRequest) -> VmResult:
    """Return the results of the other jobs on a second machine of that kind, which runs at the same time."""
    return _booted("two-nodes-again", request)


@pytest.fixture(scope="session")
def four_nodes(request: pytest.FixtureRequest) -> VmResult:
    """Return the results of all jobs on the four-node machine, whose NVML order differs from its node order."""
    return _booted("four-nodes", request)


@pytest.fixture(scope="session")
def memory_only(request: pytest.FixtureRequest) -> VmResult:
    """Return the results of all jobs on the machine whose third node has no CPUs."""
    return _booted("memory-only", request)


def _booted(name: str, request: pytest.FixtureRequest) -> VmResult:
    """Boot a machine for the jobs of all collected test files; skip if no machine can be booted."""
    if reason := missing():
        pytest.skip(reason)
    nvml: Path = request.getfixturevalue("nvml")
    items = (item for item in request.session.items if item.path.parent == HERE)
    files: dict[Any, None] = dict.fromkeys(getattr(item, "module", None) for item in items)
    jobs: list[Job] = [job for file in files for job in file.jobs(name, nvml)]
    jobs.sort(key=lambda job: job.spoils)
    share = request.getfixturevalue("tmp_path_factory").mktemp(name)
    names = {job.name for job in jobs}
    # In emulation torch takes longer to import than a machine to boot.
    torch = ("numapin.data.loader",) if "load-rank" in names else ()
    preload = (*NUMAPIN, *torch, *(TORCHRUN if "torchrun" in names else ()))
    return boot(VmMachine.load(name), Batch(jobs=jobs, libraries=nvml.parent, preload=preload), share=share)


@pytest.fixture(scope="session")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the fake NVML."""
    if fake.compiler() is None:
        pytest.skip("no C compiler: install gcc")
    return fake.build(tmp_path_factory.mktemp("nvml"))
