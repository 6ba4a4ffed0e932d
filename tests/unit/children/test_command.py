"""The command of `numapin exec --children`: what it gets, and what is said of the records at its end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.children.below import table
from tests.unit.children.seam import BINDING, CHILDREN, HOOK, command, conclude, proc, variables
from tests.waiting import wait_until


def _bound(folder: Path, pid: int, *gpus: str) -> None:
    content = {"local_rank": 0, "pid": pid, "gpus": gpus, "surprises": []}
    (folder / f"observed-0-{pid}.json").write_text(json.dumps(content))


@pytest.mark.parametrize("kind", ["observed-0-7.json", "unbound-7.json"])
def test_a_record_that_cannot_be_read(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A record that goes between its listing and its reading, or is malformed, does not change the command's status."""
    _bound(tmp_path, 8, "GPU 0")
    (tmp_path / kind).symlink_to("gone")
    for text in ("", "{", "[]", "{}", ""):
        assert conclude(table(tmp_path, verbose=True), 7) == 7
        assert "1 process used 1 GPU and was bound" in capsys.readouterr().err
        (tmp_path / kind).unlink()
        (tmp_path / kind).write_text(text)


def test_processes_with_several_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each GPU is counted once, whichever process used it first."""
    _bound(tmp_path, 1, "GPU 0", "GPU 1")
    assert conclude(table(tmp_path, verbose=True), 0) == 0
    assert "1 process used 2 GPUs and was bound" in capsys.readouterr().err
    _bound(tmp_path, 2, "GPU 0")
    assert conclude(table(tmp_path, verbose=True), 0) == 0
    assert "2 processes used 2 GPUs and were bound" in capsys.readouterr().err


def test_nothing_of_an_outer_run_is_left(tmp_path: Path) -> None:
    """The binding and the NIC of the rank that it runs in do not hold for processes with another GPU."""
    nic = {"UCX_NET_DEVICES": "mlx5_0:1", "NUMAPIN_NIC_ENV": "UCX_NET_DEVICES"}
    outer = {BINDING: "{}", "PYTHONPATH": "/own", "NAME": "value", **nic}
    given = command._environment(table(tmp_path), outer)
    assert given.keys() - variables().keys() == {"NAME", CHILDREN, "PYTHONPATH"}
    assert given["PYTHONPATH"] == os.pathsep.join((HOOK, "/own"))


def test_a_command_that_cannot_be_tied_to_numapin() -> None:
    """If a seccomp filter forbids prctl, the command is not started, and a line says why."""
    code = """
import os, sys
from numapin.children import command
def refused(*_):
    raise PermissionError(1, "prctl: Operation not permitted")
command.calls.end_with_parent = refused
sys.exit(command._run(["true"], os.environ))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    told = "numapin: error: true cannot be started: [Errno 1] prctl: Operation not permitted\n"
    assert (done.returncode, done.stderr) == (126, told)


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
        assert wait_until(lambda: proc.state_of(process.pid) == "T", limit_s=300)
        process.send_signal(signal.SIGCONT)
        assert process.stdout.readline() == "SIGCONT\n"
        process.communicate("abc")
        assert process.returncode == 3
    finally:
        process.kill()
        process.communicate()
