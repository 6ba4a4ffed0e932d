"""Frameworks that bind their own processes: what is recognized on a command line and in the environment."""

from __future__ import annotations

import shlex
from pathlib import Path

from tests.recorded.screens import compare_answers
from tests.unit.children.seam import FRAMEWORKS, both_bind, variables

PAGE = Path(__file__).resolve().parents[3] / "docs" / "guides" / "frameworks.md"


def _answer(line: str) -> str:
    """Return what is said of a command with these variables; OURS are those that numapin sets."""
    names, _, words = line.rpartition("| ")
    environ = variables() if names == "OURS " else dict(name.split("=") for name in names.split())
    return "\n".join(str(problem) for problem in both_bind(shlex.split(words), environ))


def test_both_bind() -> None:
    """What is said of each command is recorded; NUMAPIN_UPDATE_GOLDEN=1 records it anew."""
    compare_answers(Path(__file__).with_name("frameworks.txt"), _answer)


def test_each_framework_has_a_row_in_the_documentation() -> None:
    """The table has each framework's name, variables and options."""
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    for framework in FRAMEWORKS:
        settings = [*(f"{name}={value}" for name, value in framework.off.items()), *framework.on]
        (row,) = [row for row in rows if row.startswith(f"| {framework.name} ")]
        assert [setting for setting in settings if setting not in row + row.replace("_", "-")] == [], framework.name
