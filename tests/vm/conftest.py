"""Booting machines for the tests of this folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import pytest

from tests.nvml import fake
from tests.vm.machine import Batch, VmMachine, VmResult, boot, missing

if TYPE_CHECKING:
    from pathlib import Path


class Boot(Protocol):
    """Boot a machine by its name, run a batch in it, and return what its jobs did."""

    def __call__(self, name: str, batch: Batch) -> VmResult:
        """Skip the test, with what is missing, where no machine can be booted."""


@pytest.fixture(scope="session")
def boot_machine(tmp_path_factory: pytest.TempPathFactory) -> Boot:
    """Return the function that boots machines; module fixtures call it once a machine."""
    if reason := missing():
        pytest.skip(reason)

    def run(name: str, batch: Batch) -> VmResult:
        return boot(VmMachine.load(name), batch, share=tmp_path_factory.mktemp(name))

    return run


@pytest.fixture(scope="session")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the stand-in for NVML."""
    if fake.compiler() is None:
        pytest.skip("no C compiler: install gcc")
    return fake.build(tmp_path_factory.mktemp("nvml"))
