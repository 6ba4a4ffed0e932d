"""A script on stdin."""

from __future__ import annotations

import os
import pty
import subprocess

from tests.integration.launching import NUMAPIN, environment

SCRIPT = """
import os, sys
what = [__name__, *sys.argv, "__file__" in globals(), sys.stdin.read()]
os.write(1, f"{what}\\n".encode())
sys.exit(os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and sys.argv[1:] == ["restart"])
"""


def test_every_rank_gets_the_script() -> None:
    """Under torchrun one rank gets it; here all do, and restarted ones, with the same names and an empty stdin."""
    line = "['__main__', '-', 'restart', True, '']\n"
    options = ("--quiet", "--nproc-per-node", "2", "--max-restarts", "1")
    done = _run(*NUMAPIN, "run", *options, "-", "restart")
    assert done.stdout in (3 * line, 4 * line), done.stderr  # the first to fail may end the other
    assert done.returncode == 0


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, input=SCRIPT, capture_output=True, text=True, timeout=120, check=False, env=environment()
    )


def test_a_terminal_has_no_script() -> None:
    """Ranks have sessions of their own and cannot read a terminal."""
    ours, theirs = pty.openpty()
    try:
        done = subprocess.run(
            [*NUMAPIN, "run", "--quiet", "-"],
            stdin=theirs,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env=environment(),
        )
    finally:
        os.close(ours)
        os.close(theirs)
    assert done.returncode == 2
    assert done.stderr == (
        "numapin: error: the script - is read from stdin, which is a terminal\n  hint: numapin run - < train.py\n"
    )
