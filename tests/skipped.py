"""One table of the tests that several runs of pytest skipped.

    NUMAPIN_SKIPPED=FILE pytest …       appends the skipped tests to FILE
    python -m tests.skipped FILE        prints the table

Comes in: the reports of skipped tests. Goes out: one line per reason, with the number of tests.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import pytest

VARIABLE = "NUMAPIN_SKIPPED"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Record the skipped tests, for the table that `make` prints after all runs."""
    if "PYTEST_XDIST_WORKER" not in os.environ:  # the controlling process reports the skips of its workers
        note(terminalreporter.getreports("skipped"))


def note(reports: Iterable[pytest.TestReport | pytest.CollectReport]) -> None:
    """Append the reasons of skipped tests to the file named by NUMAPIN_SKIPPED, if it is set."""
    path = os.environ.get(VARIABLE)
    reasons = [json.dumps(_reason(report)) + "\n" for report in reports]
    if path and reasons:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with Path(path).open("a") as file:
            file.writelines(reasons)


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    told = report.longrepr
    return str(told[2] if isinstance(told, tuple) else told).removeprefix("Skipped: ")


def table(reasons: Iterable[str]) -> str:
    """Render the number of skipped tests for each reason, the most frequent first."""
    rows = sorted(Counter(reasons).items(), key=lambda row: (-row[1], row[0]))
    if not rows:
        return "nothing was skipped\n"
    head = ("skipped", "why")
    return "".join(f"{number:>7}  {reason}\n" for number, reason in [head, *((num, why) for why, num in rows)])


def main(arguments: Sequence[str]) -> None:
    """Print the table of a file; a missing file means that nothing was skipped."""
    path = Path(arguments[0])
    lines = path.read_text().splitlines() if path.exists() else []
    sys.stdout.write(table(map(json.loads, lines)))


if __name__ == "__main__":
    main(sys.argv[1:])
