"""Fixtures that boot each machine once for all tests of this folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest

from tests.cuda import fake as fake_driver
from tests.nvml import fake
from tests.vm.machine import HERE, REPOSITORY, TEST_LIMIT_S, Job, VmMachine, VmResult, boot, missing

MACHINES: Final = ("two-nodes", "two-nodes-again", "four-nodes", "memory-only")
NUMAPIN: Final = (
    *("numapin.cli.main", "numapin.cli.run", "numapin.cli.verify", "numapin.cli.attach", "numapin.children.command"),
    *("numapin.launch", "numapin.launcher.ranks", "numapin.topology.discover"),
)
TORCHRUN: Final = ("torch.distributed.run", "torch.distributed.launcher.api")


@pytest.hookimpl(tryfirst=True)  # before xdist looks for groups, and pytest for marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests. Those of one machine share a process, which boots it; the slowest machine starts first."""
    slowest = f"vm-{MACHINES[0]}"
    group_of: dict[pytest.Item, str] = {}
    for item in [item for item in items if item.path.parent == HERE]:
        call = getattr(item, "callspec", None)
        words = [*getattr(item, "fixturenames", ()), *(call.params.values() if call else ())]
        machine = next((name for name in MACHINES if name.replace("-", "_") in words), "none")
        group_of[item] = f"vm-{machine}"
        for mark in (pytest.mark.vm, pytest.mark.timeout(TEST_LIMIT_S), pytest.mark.xdist_group(group_of[item])):
            item.add_marker(mark)
    items.sort(key=lambda item: group_of.get(item) != slowest)


def _machine(name: str) -> Any:
    def booted(request: pytest.FixtureRequest, nvml: Path, tmp_path_factory: pytest.TempPathFactory) -> VmResult:
        items = (item for item in request.session.items if item.path.parent == HERE)
        files: dict[Any, None] = dict.fromkeys(getattr(item, "module", None) for item in items)
        jobs: list[Job] = [job for file in files for job in file.JOBS.get(name, ())]
        jobs.sort(key=lambda job: job.spoils)
        names = {job.name for job in jobs}
        # In emulation torch takes longer to import than a machine to boot.
        torch = ("numapin.data.loader", "tests.waiting") if names & {"load-rank", "pinned"} else ()
        preload = (*NUMAPIN, *torch, *(TORCHRUN if "torchrun-0" in names else ()))
        driver = fake_driver.build(REPOSITORY / ".cache" / "fake-cuda")
        environ = {"LD_LIBRARY_PATH": str(nvml.parent), "FAKE_CUDA": str(driver)}
        share = tmp_path_factory.mktemp(name)
        return boot(VmMachine.load(name), jobs, environ=environ, preload=preload, share=share)

    return pytest.fixture(scope="session", name=name.replace("-", "_"))(booted)


two_nodes, two_nodes_again, four_nodes, memory_only = map(_machine, MACHINES)


@pytest.fixture(scope="session")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the fake NVML, if there are machines."""
    if reason := missing():
        pytest.skip(reason)
    if fake.compiler() is None:
        pytest.skip("no C compiler: install gcc")
    return fake.build(tmp_path_factory.mktemp("nvml"))
