"""Candidates for completing a command line, and the lines that the shells' scripts read."""

from __future__ import annotations

import pytest

from tests.unit.cli.seam import Candidates, _bash_lines, _lines, complete, numapin, split_line


def words_for(line: str) -> list[str]:
    """Return the words that may stand at the end of a command line."""
    return [word for word, _ in complete(numapin, line.split(" ")[1:]).words]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("numapin to", ["topo", "top"]),
        ("numapin jo", ["job"]),
        ("numapin --v", ["--version"]),
        ("numapin run --da", ["--dataloader"]),
        ("numapin exec --local", ["--local-rank", "--local-size"]),
        ("numapin run --rdzv-", ["--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf"]),
        ("numapin run --rdzv_c", ["--rdzv_conf"]),
        ("numapin run --nproc-per-node ", ["auto", "cpu", "gpu", "xpu"]),
        ("numapin run --standalone --bind=s", ["--bind=socket"]),
        ("numapin run --bind node --bi", []),
        ("numapin trace --ste", ["--steps"]),
        ("numapin trace --numa_binding c", ["core-complex"]),
        ("numapin plan --memory b", ["bind"]),
        ("numapin bench transfer --peers slot,pin", ["slot,pinned"]),
        ("numapin bench transfer --peers slot,slo", []),
        ("numapin job p", ["pbs"]),
        ("numapin job slurm --for", ["--form"]),
        ("numapin job slurm --form ", ["node", "task"]),
        ("numapin job slurm --machine example:n", ["example:ndv4"]),
        ("numapin job slurm --nodes 2 --dataloader numapin-", ["numapin-balanced"]),
        ("numapin topo --format ", ["tree", "matrix", "json", "svg", "html"]),
        ("numapin completion z", ["zsh"]),
        ("numapin run train.py --bi", []),
        ("numapin job slurm train.py --nod", []),
        ("numapin nonsense --bi", []),
    ],
)
def test_words(line: str, expected: list[str]) -> None:
    """Commands, options not given yet, their values; nothing of ours after the script."""
    assert words_for(line) == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("numapin run ", Candidates(files="file")),
        ("numapin run --log-dir ", Candidates(files="file")),
        ("numapin run --report=pla", Candidates(files="file", prefix="--report=")),
        ("numapin run -m mod --out=x", Candidates(files="file", prefix="--out=")),
        ("numapin run --no-python ", Candidates(command_at=2)),
        ("numapin run --no-python --standalone env A", Candidates(command_at=3)),
        ("numapin exec --strict -- python tr", Candidates(command_at=3)),
        ("numapin exec py", Candidates(command_at=1)),
        ("numapin job slurm tr", Candidates(files="file")),
        ("numapin job slurm --machine mine", Candidates(files="file")),
        ("numapin trace --read a b", Candidates(files="file")),
        ("numapin doctor x", Candidates()),
    ],
)
def test_what_the_shell_completes(line: str, expected: Candidates) -> None:
    """Files, and other programs' command lines with the place at which they begin."""
    assert complete(numapin, line.split(" ")[1:]) == expected


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
