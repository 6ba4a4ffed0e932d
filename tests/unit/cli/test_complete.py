"""Candidates for completing a command line, and the lines that the shells' scripts read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recorded.screens import compare_answers
from tests.unit.cli.seam import Candidates, _bash_lines, _lines, complete, numapin, split_line


def test_candidates_are_the_recorded_ones() -> None:
    """Commands, options not given yet, their values, files, and other programs' lines; nothing of ours after a script.

    A recorded line begins with "$ " and ends with a mark for the cursor; its candidates are below, as zsh gets them,
    without descriptions. NUMAPIN_UPDATE_GOLDEN=1 writes them anew.
    """

    def answer(line: str) -> str:
        found = _lines(complete(numapin, line.removesuffix("|").split(" ")[1:]))
        return "\n".join(" ".join(each.split("\t")[:2]) for each in found)

    compare_answers(Path(__file__).with_name("completions.txt"), answer)


def test_words_of_any_bytes() -> None:
    """A word that no job script can contain does not end the completion of the others."""
    assert complete(numapin, ["job", "slurm", "--setup", "\udcff", "--outp"]).words[0][0] == "--output"


def test_descriptions_are_short() -> None:
    """Each option has one visible line, which "e.g." does not end."""
    found = dict(complete(numapin, ["run", "--"]).words)
    assert found["--reserve-cpus"] == "Keep these CPUs free of ranks, e.g. 0-1"
    assert all(0 < len(text) <= 70 and text.isprintable() for text in found.values())


BREAKS = " \t\n\"'@><=;|&(:"


@pytest.mark.parametrize(
    ("line", "typed", "expected"),
    [
        ("numapin run --bind=ex", ["numapin", "run", "--bind", "=", "ex"], ["word\texclusive"]),
        ("numapin run --bind=", ["numapin", "run", "--bind", "="], None),
        ("numapin plan --machine example:nd", ["numapin", "plan", "--machine", "example", ":", "nd"], None),
        ("numapin run tr", ["numapin", "run", "tr"], ["default\t"]),
        ("numapin exec -- py", ["numapin", "exec", "--", "py"], ["command\t3"]),
        ("numapin exec --plan=a -- a b", ["numapin", "exec", "--plan", "=", "a", "--", "a", "b"], ["command\t4"]),
        ("numapin exec -- 'a b' c", ["numapin", "exec", "--", "'a b'", "c"], ["command\t3"]),
    ],
)
def test_bash_gets_what_follows_the_last_break(line: str, typed: list[str], expected: list[str] | None) -> None:
    """Bash splits words at = and :, and replaces only the last part."""
    found = list(_bash_lines(line, BREAKS, typed))
    if expected is None:
        assert not [line for line in found if "=" in line or "example:" in line]
    else:
        assert found == expected


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("a b", ["a", "b"]),
        ("a ", ["a", ""]),
        ("a 'b c", ["a", "b c"]),
        (r"a b\ c", ["a", "b c"]),
        ("a # b", ["a", "#", "b"]),
        ("", []),
    ],
)
def test_split_line(line: str, words: list[str]) -> None:
    """A line splits as in a shell; it may end within a word."""
    assert split_line(line) == words


def test_hostile_candidates_stay_in_their_line() -> None:
    """A candidate cannot add lines or fields, and bash gets its special characters escaped."""
    (line,) = _lines(Candidates(words=(("a\nfile\t/", "x\ty"),)))
    assert line == "word\ta\ufffdfile\ufffd/\tx\ufffdy"
