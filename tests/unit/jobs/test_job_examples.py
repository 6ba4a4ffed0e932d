"""The job scripts in examples/ are the output of the commands in their READMEs."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from tests.jobs.cases import write

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
FOLDERS = ("slurm", "mpi", "kubernetes")


def _commands(folder: str) -> dict[str, list[str]]:
    """Return the arguments of `numapin job` by file name, as the README shows them."""
    lines = (EXAMPLES / folder / "README.md").read_text().splitlines()
    shown = [shlex.split(line)[3:] for line in lines if line.startswith("$ numapin job ")]
    return {words[-1]: words[:-2] for words in shown}


@pytest.mark.parametrize("folder", FOLDERS)
def test_examples_are_what_their_readme_writes(folder: str) -> None:
    """Each file is the output of its command, and there are no other files."""
    commands = _commands(folder)
    if os.environ.get("NUMAPIN_UPDATE_GOLDEN"):
        for name, arguments in commands.items():
            (EXAMPLES / folder / name).write_text(write(arguments))
    assert {path.name for path in (EXAMPLES / folder).iterdir()} == {*commands, "README.md"}
    for name, arguments in commands.items():
        assert (EXAMPLES / folder / name).read_text() == write(arguments), name


@pytest.mark.parametrize("folder", ["slurm", "mpi"])
def test_scripts_that_are_named_exist(folder: str) -> None:
    """The program that an example starts is in this repository."""
    for arguments in _commands(folder).values():
        assert (EXAMPLES.parent / arguments[-1]).is_file()
