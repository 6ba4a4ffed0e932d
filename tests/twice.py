"""Run tests beside one another; the few that fail run once more, alone.

    python -m tests.twice [--numprocesses=N …]

Comes in: pytest's arguments. Goes out: pytest's output and exit status, 0 also if at most MOST tests failed and each
passed alone. Tests of one virtual machine share its run, and count as one. Tests that passed alone are reported at
once, and appended to .cache/unsteady, which CI prints at its end: each of them does not hold on a busy machine, or
shows a rare defect (docs/decisions.md).
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final
from xml.etree import ElementTree as ET

import pytest

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST: Final = 3
UNSTEADY: Final = Path(".cache/unsteady")
_MACHINE: Final = "vm-"  # begins the groups whose tests share the run of a virtual machine


class _Failed:
    """Collects the names of the tests that fail. Its hooks run in the controlling process only."""

    def __init__(self) -> None:
        self.tests: dict[str, str] = {}  # the name of each test -> what counts once: it, or its machine
        self.other = False  # something failed that no second run mends

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test."""
        if report.failed:
            name, group = name_and_group(report.nodeid)
            self.tests[name] = group if group.startswith(_MACHINE) else name

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note that a file cannot be read."""
        self.other = self.other or report.failed

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Note that pytest ended before the last test."""
        self.other = self.other or bool(session.shouldfail or session.shouldstop)


def name_and_group(name: str) -> tuple[str, str]:
    """Return a test's name, and its group, which xdist appends after an @, or "" if it has none."""
    head, at, group = name.rpartition("@")
    return (head, group) if at and "]" not in group and "/" not in group else (name, "")


def run(arguments: Sequence[str]) -> int:
    """Run pytest, and what failed once more. Returns the exit status."""
    failed = _Failed()
    status = int(pytest.main(list(arguments), plugins=[failed]))
    if status != pytest.ExitCode.TESTS_FAILED or failed.other or not 0 < len({*failed.tests.values()}) <= MOST:
        return status
    names = list(failed.tests)
    _print(f"\nonce more, alone: {len(names)} that failed\n")
    if not _pass_alone(names):
        return status
    report = "".join(f"failed beside the others, passed alone: {name}\n" for name in names)
    _print(report)
    UNSTEADY.parent.mkdir(parents=True, exist_ok=True)
    with UNSTEADY.open("a") as file:
        file.write(report)
    return 0


def _pass_alone(names: Sequence[str]) -> bool:
    """Run tests, and return whether each has passed; one that is skipped has not."""
    with tempfile.TemporaryDirectory() as folder:
        xml = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-r", "fEs", f"--junitxml={xml}", *names]
        if subprocess.run(command, check=False).returncode:
            return False
        (suite,) = ET.parse(xml).getroot()  # noqa: S314 - pytest wrote it
        return (suite.attrib["tests"], suite.attrib["skipped"]) == (str(len(names)), "0")


def _print(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
