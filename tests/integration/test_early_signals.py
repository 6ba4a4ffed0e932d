"""Signals to a launcher that has just started: they wait for its ranks and do not end it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.launching import NUMAPIN, environment, script
from tests.waiting import wait_until

FIRST_STATEMENTS = """
import os, signal, sys
sys.modules["numapin.cli.main"] = None  # what comes next cannot be imported
sys.argv[1:] = [{command!r}]
from numapin.cli.entry import main
try:
    main()
except ImportError:
    pass
os.kill(os.getpid(), signal.SIGUSR1)
os.kill(os.getpid(), signal.SIGUSR2)
print("lives", *sorted(sys.modules.keys() & {{"enum", "typing", "re", "click"}}))
"""


@pytest.mark.parametrize(("command", "status"), [("run", 0), ("trace", 0), ("topo", -signal.SIGUSR1)])
def test_signals_are_held_back_before_anything_is_imported(command: str, status: int) -> None:
    """The first statements of a launcher block SIGUSR1 and SIGUSR2; other commands keep their usual effect."""
    code = FIRST_STATEMENTS.format(command=command)
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == status
    assert command != "run" or done.stdout == "lives enum\n"  # from the test's own `signal`


def test_a_signal_in_the_first_milliseconds_reaches_the_rank(tmp_path: Path) -> None:
    """A signal that comes as soon as the launcher holds it back is delivered once the rank handles it."""
    text = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGUSR1, lambda *_: (print('took', flush=True), sys.exit(0)))\n"
        "time.sleep(60)\n"
    )
    command = [*NUMAPIN, "run", "--quiet", script(tmp_path, text)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) as process:
        assert wait_until(lambda: _holds_back(process.pid, signal.SIGUSR1), limit_s=60)
        process.send_signal(signal.SIGUSR1)
        assert process.communicate(timeout=120)[0] == "took\n"
    assert process.returncode == 0


def _holds_back(pid: int, number: signal.Signals) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    masks = [int(line.split()[1], 16) for line in lines if line.startswith(("SigBlk", "SigCgt"))]
    return any(mask >> (number - 1) & 1 for mask in masks)
