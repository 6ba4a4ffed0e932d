"""Run tests beside one another; the few that fail run once more, alone.

    python -m tests.twice [--numprocesses=N …]

Comes in: pytest's arguments. Goes out: pytest's output and exit status, 0 also if at most MOST tests failed and each
passed alone. Tests of one xdist_group share a run, such as that of a virtual machine, and count as one. Those that
passed alone are told at once, and appended to .cache/unsteady, which CI prints at its end: each is a test that
does not hold on a busy machine, or a defect that shows rarely (docs/decisions.md).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST: Final = 3
UNSTEADY: Final = Path(".cache/unsteady")


class _Failed:
    """Collects the names of the tests that fail. Its hooks run in the controlling process only."""

    def __init__(self) -> None:
        self.tests: dict[str, str] = {}  # by their name, that of their group, or else theirs
        self.other = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test."""
        if report.failed:
            name, group = name_and_group(report.nodeid)
            self.tests[name] = group

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note that a file cannot be read: no second run mends that."""
        self.other = self.other or report.failed


def name_and_group(name: str) -> tuple[str, str]:
    """Return a test's name, and that of its group, which xdist appends after an @; without one, the test's twice."""
    head, at, group = name.rpartition("@")
    return (head, group) if at and "]" not in group and "/" not in group else (name, name)


def run(arguments: Sequence[str]) -> int:
    """Run pytest, and what failed once more. Returns the exit status."""
    failed = _Failed()
    status = int(pytest.main(list(arguments), plugins=[failed]))
    if status != pytest.ExitCode.TESTS_FAILED or failed.other or not 0 < len({*failed.tests.values()}) <= MOST:
        return status
    names = list(failed.tests)
    _tell(f"\nonce more, alone: {len(names)} that failed\n")
    again = subprocess.run([sys.executable, "-m", "pytest", "-r", "fE", *names], check=False).returncode
    if again == 0:
        told = "".join(f"failed beside the others, passed alone: {name}\n" for name in names)
        _tell(told)
        UNSTEADY.parent.mkdir(parents=True, exist_ok=True)
        with UNSTEADY.open("a") as file:
            file.write(told)
    return again


def _tell(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
