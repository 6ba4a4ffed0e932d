"""Booting machines for the tests of this folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import pytest

from tests.vm.machine import Job, VmMachine, VmResult, boot, missing

if TYPE_CHECKING:
    from collections.abc import Sequence


class Boot(Protocol):
    """Boot a machine by its name, run jobs in it, and return what they did."""

    def __call__(self, name: str, jobs: Sequence[Job], *, timeout_s: float = 150) -> VmResult:
        """Skip the test, with what is missing, where no machine can be booted."""


@pytest.fixture(scope="session")
def boot_machine(tmp_path_factory: pytest.TempPathFactory) -> Boot:
    """Return the function that boots machines; module fixtures call it once a machine."""
    if reason := missing():
        pytest.skip(reason)

    def run(name: str, jobs: Sequence[Job], *, timeout_s: float = 150) -> VmResult:
        return boot(VmMachine.load(name), jobs, share=tmp_path_factory.mktemp(name), timeout_s=timeout_s)

    return run
