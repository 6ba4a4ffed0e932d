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


def command_lines(machine: str, plan: str) -> list[list[str]]:
    """Return command lines with all kinds of output, but for help, which is ASCII; some are errors."""
    given = {"MACHINE": machine, "PLAN": plan, "NAME": NAME}
    lines = Path(__file__).with_name("encoded-lines.txt").read_text().splitlines()
    replaced = [
        [re.sub("MACHINE|PLAN|NAME", lambda found: given[found[0]], word) for word in line.split()] for line in lines
    ]
    return [*replaced, *(["topo", "--machine", name] for name in example_names())]


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
def machine(tmp_path: Path) -> str:
    """Return a machine file whose name, host and GPUs have characters that ASCII and Latin-1 lack."""
    topology = json.loads(GOLDEN.read_text())["topology"]
    topology["host"] = NAME
    for gpu in topology["gpus"]:
        gpu["name"] = f"GPU {NAME}"
    path = tmp_path / NAME
    path.write_text(json.dumps(topology, ensure_ascii=False), encoding="utf-8")
    return str(path)


@pytest.fixture
def plan(machine: str, tmp_path: Path) -> str:
    """Return a plan file with such characters in its reasons."""
    made = make_plan(Topology.from_json(Path(machine).read_text(encoding="utf-8")), Request()).to_json()
    text = json.dumps(made).replace('"reason": "', f'"reason": "{NAME}: ')
    path = tmp_path / "plan.json"
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("locale", LOCALES)
def test_no_locale_breaks_a_command(locale: str, machine: str, plan: str, tmp_path: Path) -> None:
    """No command raises, whatever its encoding lacks; tables and messages have stand-ins, in that encoding."""
    is_ascii = locale == "ASCII"
    lines = [*command_lines(machine, plan), *(IMPORTING_TORCH if is_ascii else [])]
    raised, out, err = run_all(lines, tmp_path, **LOCALES[locale])
    assert raised == []
    assert b"Unicode" not in err
    assert b"Traceback" not in err
    assert err.isascii() or not is_ascii
    assert b"\\u65e5" in out  # in tables
    assert f'"host": "{NAME}"'.encode() in out  # JSON is UTF-8


@pytest.mark.parametrize("closed", [">&-", "2>&-"])
def test_closed_streams_break_no_command(closed: str, machine: str, plan: str, tmp_path: Path) -> None:
    """No command raises if its parent closed stdout or stderr."""
    raised, _, err = run_all(command_lines(machine, plan), tmp_path, closed)
    assert raised == []
    assert b"Traceback" not in err


def test_help_is_ascii() -> None:
    """Help pages can be read anywhere: those of all commands, as recorded."""
    pages = (RECORDED / "help.txt").read_text()
    assert pages.count("Usage: ") > 20
    assert pages.isascii()
