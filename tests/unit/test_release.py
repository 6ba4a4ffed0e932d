"""The table of `make release`: what pytest's last line says, and what the page says about it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from scripts import release
from scripts.release_table import PAGE, RAW, Counts, Result, write_table

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("output", "counts"),
    [
        ("..\n26 passed in 1.00s", Counts(passed=26)),
        ("FAILED a\n1 failed, 25 passed, 3 skipped, 2 deselected in 39.17s", Counts(passed=25, failed=1, skipped=3)),
        ("ERROR a\n2 passed, 2 errors in 1s", Counts(passed=2, failed=2)),
        ("1 error in 0.5s", Counts(failed=1)),
        ("no tests ran in 0.01s", Counts(failed=1)),
        ("Segmentation fault", Counts(failed=1)),
        ("", Counts(failed=1)),
    ],
)
def test_counts(output: str, counts: Counts) -> None:
    """What pytest counted is read from its last line; a run that ended without one has failed."""
    assert release.count(output) == counts


def result(**fields: object) -> Result:
    """Return a result with some fields set."""
    known = {"name": "n", "python": "3.13.0", "torch": "2.15.0", "kind": "pure", "files": "hash"}
    return Result(**{**known, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (result(counts=Counts(passed=7)), "passed"),
        (result(counts=Counts(passed=7, retried=2)), "passed, 2 on a second try"),
        (result(counts=Counts(passed=7, failed=1)), "1 failed"),
        (result(why="no python3.14t on PATH"), "not tried: no python3.14t on PATH"),
    ],
)
def test_the_page_says_what_happened(made: Result, words: str, tmp_path: Path) -> None:
    """A failure and a trial that was not run are in the table, and counts only if there are any."""
    (tmp_path / "docs" / "results").mkdir(parents=True)
    write_table([made], tmp_path)
    (row,) = [line for line in (tmp_path / PAGE).read_text().splitlines() if line.startswith("| 3.13.0")]
    assert row.split(" | ")[3] == words
    assert ("| 7 |" in row) == (not made.why)
    assert f"== n: {words}" in (tmp_path / RAW).read_text()


def test_a_misspelt_trial(capsys: pytest.CaptureFixture[str]) -> None:
    """A name that is no trial is refused, with the names that are, before anything is installed."""
    assert release.main(["3.13-torch9"]) == 2
    assert "3.13-torchnewest" in capsys.readouterr().out


def test_a_python_that_is_not_there() -> None:
    """A Python that is on no PATH is named; the trial is then not tried."""
    with pytest.raises(release.NotHereError, match=r"no python3\.99 on PATH"):
        release.find_python("3.99")
