"""What the command of `numapin exec --children` gets."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.unit.children.below import table
from tests.unit.children.seam import BINDING, CHILDREN, HOOK, command, proc
from tests.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path


def test_nothing_of_an_outer_run_is_left(tmp_path: Path) -> None:
    """The binding and the NIC of the rank that it runs in do not hold for processes with another GPU."""
    nic = {"UCX_NET_DEVICES": "mlx5_0:1", "NUMAPIN_NIC_ENV": "UCX_NET_DEVICES"}
    outer = {BINDING: "{}", "PYTHONPATH": "/own", "NAME": "value", **nic}
    given = command._environment(table(tmp_path), outer)
    assert given.keys() == {"NAME", CHILDREN, "PYTHONPATH"}
    assert given["PYTHONPATH"] == os.pathsep.join((HOOK, "/own"))


def test_a_signal_that_stops_reaches_the_command() -> None:
    """`kill -TSTP` of numapin stops the command, too, and `kill -CONT` lets both go on."""
    command_code = """
import os, signal, sys
for number in (signal.SIGTSTP, signal.SIGCONT):
    signal.signal(number, lambda number, _: os.write(1, (signal.Signals(number).name + "\\n").encode()))
print("ready", flush=True)
sys.exit(len(sys.stdin.read()))
"""
    code = f"""
import os, sys
from numapin.children import command
sys.exit(command._run([sys.executable, "-c", {command_code!r}], os.environ))
"""
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True)
    try:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTSTP)
        assert process.stdout.readline() == "SIGTSTP\n"
        assert wait_until(lambda: proc.state_of(process.pid) == "T", limit_s=60)
        process.send_signal(signal.SIGCONT)
        assert process.stdout.readline() == "SIGCONT\n"
        process.communicate("abc")
        assert process.returncode == 3
    finally:
        process.kill()
        process.communicate()
