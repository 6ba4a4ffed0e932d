"""Every command in ASCII, without a locale, and without stdout or stderr; stand-ins of others: tests/unit/base."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from numapin import Request, Topology, make_plan
from tests.integration.launching import environment
from tests.integration.seam import example_names

GOLDEN = Path(__file__).parents[1] / "machines" / "golden" / "2pkg-8node-smt2-8gpu-pairs.json"
RECORDED = Path(__file__).parents[1] / "recorded"
NAME = "ü → 日本 😀.json"
"""A name with characters that ASCII and Latin-1 lack."""
LOCALES = {
    "ASCII": {"PYTHONIOENCODING": "ascii"},
    "none": {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
}


IMPORTING_TORCH = [["run", "--dry-run", NAME], ["run", "--bnd", NAME]]
"""Command lines that take a second, and so run in one locale only."""


def run_all(lines: list[list[str]], folder: Path, *redirection: str, **changes: str) -> tuple[list[str], bytes, bytes]:
    """Run command lines in one process; return those that raised, stdout and stderr."""
    results = folder / "results"
    command = [sys.executable, "-m", "tests.integration.every_command", str(results)]
    command = ["sh", "-c", f'exec "$@" {" ".join(redirection)}', "sh", *command]
    given = "".join(json.dumps(line) + "\n" for line in lines).encode()
    root = Path(__file__).resolve().parents[2]
    environ = environment(**{"PYTHONPATH": str(root), "CUDA_VISIBLE_DEVICES": "", **changes})
    done = subprocess.run(command, input=given, capture_output=True, cwd=folder, env=environ, timeout=120, check=False)
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    ended = [json.loads(line) for line in results.read_text().splitlines()]
    assert [words for words, _, _ in ended] == lines
    return [f"{words}: {error}" for words, _, error in ended if error], done.stdout, done.stderr


@pytest.fixture
def lines(tmp_path: Path) -> list[list[str]]:
    """Return command lines with all kinds of output, but for help, which is ASCII; some are errors.

    Their machine has a name, a host and GPUs, and their plan has reasons, with characters that ASCII and Latin-1 lack.
    """
    topology = json.loads(GOLDEN.read_text())["topology"]
    topology["host"] = NAME
    for gpu in topology["gpus"]:
        gpu["name"] = f"GPU {NAME}"
    machine, plan = tmp_path / NAME, tmp_path / "plan.json"
    machine.write_text(json.dumps(topology, ensure_ascii=False), encoding="utf-8")
    made = json.dumps(make_plan(Topology.from_json(machine.read_text(encoding="utf-8")), Request()).to_json())
    plan.write_text(made.replace('"reason": "', f'"reason": "{NAME}: '), encoding="utf-8")
    given = {"MACHINE": str(machine), "PLAN": str(plan), "NAME": NAME}
    found = [
        [re.sub("MACHINE|PLAN|NAME", lambda name: given[name[0]], word) for word in line.split()]
        for line in Path(__file__).with_name("encoded-lines.txt").read_text().splitlines()
    ]
    return [*found, *(["topo", "--machine", name] for name in example_names())]


@pytest.mark.parametrize("locale", LOCALES)
def test_no_locale_breaks_a_command(locale: str, lines: list[list[str]], tmp_path: Path) -> None:
    """No command raises, whatever its encoding lacks; tables and messages have stand-ins, in that encoding."""
    is_ascii = locale == "ASCII"
    raised, out, err = run_all([*lines, *(IMPORTING_TORCH if is_ascii else [])], tmp_path, **LOCALES[locale])
    assert raised == []
    assert b"Unicode" not in err
    assert b"Traceback" not in err
    assert err.isascii() or not is_ascii
    assert b"\\u65e5" in out  # in tables
    assert f'"host": "{NAME}"'.encode() in out  # JSON is UTF-8


@pytest.mark.parametrize("closed", [">&-", "2>&-"])
def test_closed_streams_break_no_command(closed: str, lines: list[list[str]], tmp_path: Path) -> None:
    """No command raises if its parent closed stdout or stderr."""
    raised, _, err = run_all(lines, tmp_path, closed)
    assert raised == []
    assert b"Traceback" not in err


def test_help_is_ascii() -> None:
    """Help pages can be read anywhere: those of all commands, as recorded."""
    pages = (RECORDED / "help.txt").read_text()
    assert pages.count("Usage: ") > 20
    assert pages.isascii()
