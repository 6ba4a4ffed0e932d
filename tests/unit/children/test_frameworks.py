"""Frameworks that bind their own processes: their documentation. What is said of them is in test_own.py."""

from __future__ import annotations

from pathlib import Path

from tests.unit.children.seam import FRAMEWORKS

PAGE = Path(__file__).resolve().parents[3] / "docs" / "guides" / "frameworks.md"


def test_each_framework_has_a_row_in_the_documentation() -> None:
    """The table has each framework's name and variables."""
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    for framework in FRAMEWORKS:
        settings = [*(f"{name}={value}" for name, value in framework.off.items()), *framework.on]
        (row,) = [row for row in rows if row.startswith(f"| {framework.name} ")]
        assert [setting for setting in settings if setting not in row] == [], framework.name
