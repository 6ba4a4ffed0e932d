"""Suggestions in messages about command lines."""

from __future__ import annotations

import pytest

from numapin.base.suggest import did_you_mean
from numapin.cli.main import numapin
from numapin.cli.mistakes import command_of, suggestion_for, typed_command, usage_of


@pytest.mark.parametrize(
    ("message", "hint", "expected"),
    [
        ("no such command 'rn'", "numapin --help", "run"),
        ("no such command 'transfr'", "numapin bench --help", "transfer"),
        ("no such option '--fromat'", "numapin topo --help", "--format"),
        ("no such option '--cpus'", "numapin plan --help", "--cpus-per-rank"),
        ("no such option '--bnd'", "numapin run --help", "--bind"),
        ("no such option '--max-restrts'", "numapin run --help", "--max-restarts"),
        ("no such option '--stps'", "numapin trace --help", "--steps"),
        ("'exlusive' is not one of 'none', 'exclusive'", "numapin run --help", "exclusive"),
        ("peer 'pagable' is not one of pageable, pinned", "", "pageable"),
        ("--start-method: 'forks' is not one of spawn, fork, forkserver", "", "forkserver"),
        ("--start-method: 'thread' is not one of spawn, fork", "", ""),
        ("no such command 'zzz'", "numapin --help", ""),
        ("'' is not one of a, b", "", ""),
        ("some other error", "numapin run --help", ""),
    ],
)
def test_suggestions(message: str, hint: str, expected: str) -> None:
    """The closest command, option, also of torchrun's, or value; nothing if none is close."""
    suggestion = suggestion_for(message, command_of(hint, numapin)[0])
    assert suggestion == (f"; did you mean {expected}?" if expected else "")


def test_a_beginning_of_a_few_words() -> None:
    """A beginning suggests the words that begin so, but not a long list of them."""
    assert did_you_mean("--tr", ["--train", "--trace", "--x"]) == "; did you mean --train or --trace?"
    assert did_you_mean("--", ["--train", "--trace", "--x"]) == ""
    assert did_you_mean("--t", [f"--t{n}" for n in range(9)]) == "; did you mean --t8?"


@pytest.mark.parametrize(
    ("hint", "usage"),
    [
        ("numapin --help", "numapin [OPTIONS] COMMAND [ARGS]..."),
        ("see the options with: numapin run --help", "numapin run [OPTIONS] SCRIPT [ARGUMENTS]..."),
        ("numapin job slurm --help", "numapin job slurm [OPTIONS] SCRIPT [ARGS]..."),
    ],
)
def test_usage(hint: str, usage: str) -> None:
    """A hint that names a command's help brings the command's usage, in one line."""
    command, path = command_of(hint, numapin)
    assert command is not None
    assert usage_of(command, path) == usage


@pytest.mark.parametrize("hint", ["numapin nope --help", "numapin topo --machine example:", "rm --help", ""])
def test_no_usage(hint: str) -> None:
    """Other hints bring none."""
    assert command_of(hint, numapin)[0] is None


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("attach --pid 1 --job", "numapin attach"),
        ("job slurm --time", "numapin job slurm"),
        ("nope --job", "numapin"),
        ("", "numapin"),
    ],
)
def test_the_command_that_was_typed(line: str, command: str) -> None:
    """An option without its value is an error of the command that the line begins with."""
    assert typed_command(line.split(), numapin) == command
