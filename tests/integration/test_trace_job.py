"""The job below `numapin trace`: signals, `--stop` and errors of the report, on the CPU, through the real command."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from tests.integration.launching import NUMAPIN, TORCH_QUICKLY, call, environment, script
from tests.integration.warm_ranks import client, forked_script
from tests.waiting import gone, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.xdist_group("warm ranks")  # one process has torch imported
LIMIT_S = 60
STEPS = ("--steps", "2", "--skip", "1", "--output", "out")
RUN = ("--nproc-per-node", "1", "--quiet")
TRAINS = (
    TORCH_QUICKLY
    + """
import os, signal, time
def mark(name): open(name, "w").write(str(os.getpid()))
def train(num_steps):
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], 0.1)
    for _ in range(num_steps):
        time.sleep(0.01); weight.sum().backward(); optimizer.step()
"""
)


@contextmanager
def traced(folder: Path, text: str, *options: str, stdout: int | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """Start a script below `numapin trace`, and kill that afterwards, with which the job ends."""
    path = script(folder, TRAINS + text)
    command = (*NUMAPIN, "trace", *STEPS, *options, path)
    with subprocess.Popen(command, cwd=folder, stdout=stdout, env=environment()) as process:
        try:
            yield process
        finally:
            process.kill()


def test_signals_are_passed_on_while_the_report_is_made(tmp_path: Path) -> None:
    """A report that takes long, here because nothing reads stdout, does not hold back SIGTERM from the ranks."""
    text = """
def save(*_): mark("saved"); sys.exit(0)
signal.signal(signal.SIGTERM, save)
train(100000)
"""
    reader, writer = os.pipe()
    size = fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    os.write(writer, b"x" * size)
    with traced(tmp_path, text, *RUN, stdout=writer) as process:
        os.close(writer)
        assert wait_until((tmp_path / "out" / "report.json").exists, limit_s=LIMIT_S)
        process.terminate()
        assert wait_until((tmp_path / "saved").exists, limit_s=LIMIT_S)
        with os.fdopen(reader, "rb") as file:
            shown = file.read()
        assert process.wait(LIMIT_S) == 128 + signal.SIGTERM
    assert b"rank" in shown


def test_a_bug_in_the_report_does_not_end_the_job(tmp_path: Path) -> None:
    """An error that we did not expect ends `trace` only after the job; it is reported once."""
    path = forked_script(tmp_path, TRAINS + 'train(300); mark("trained")\n')
    code = f"""
import sys
import numapin.cli.trace as trace
def read_report(*_): raise ValueError("bug in the analysis")
trace.read_report = read_report
from numapin.cli.entry import main
sys.argv = ["numapin", "trace", *{(*STEPS, *RUN, path)!r}]
main()
"""
    done = call(sys.executable, "-c", code, cwd=tmp_path)
    assert (tmp_path / "trained").exists(), done.err
    assert (done.status, done.err.count("bug in the analysis")) == (1, 1), done.err
    assert not (tmp_path / "out" / ".loads").exists()


def test_stop_ends_a_command_that_ignores_sigterm(tmp_path: Path) -> None:
    """With --stop it is killed after the grace period, and so is what it has left behind."""
    path = script(tmp_path, TRAINS + "signal.signal(signal.SIGTERM, signal.SIG_IGN); mark('here'); train(100000)\n")
    shell = ("sh", "-c", 'trap "" TERM; "$@"; exit 1', "sh", sys.executable, path)
    code = f"""
import sys
import numapin.cli.trace as trace
trace._COMMAND_GRACE_S = trace._GRACE_S = 0.5
from numapin.cli.entry import main
sys.argv = ["numapin", "trace", *{(*STEPS, "--stop", "--", *shell)!r}]
main()
"""
    done = call("timeout", "-s", "KILL", "100", sys.executable, "-c", code, cwd=tmp_path)
    pid = int((tmp_path / "here").read_text())
    assert (done.status, "the job was ended after the traced steps (--stop)" in done.err) == (0, True), done.err
    assert wait_until(lambda: gone(pid), limit_s=LIMIT_S)


def test_a_helper_that_takes_batches_before_the_training(tmp_path: Path) -> None:
    """The rank is that of the training, though the helper's steps were traced in part; the report waits for it."""
    prepares = script(tmp_path, "import torch\nfor _ in torch.utils.data.DataLoader(range(4)): pass\n", "prepare.py")
    helper = script(tmp_path, client(prepares), "starts_prepare.py")
    path = forked_script(tmp_path, TRAINS + "time.sleep(1); train(20)\n")
    shell = ("sh", "-c", '"$0" "$1" && "$0" "$2"', sys.executable, helper, path)
    done = call(*NUMAPIN, "trace", "--steps", "3", "--skip", "1", "--output", "out", "--", *shell, cwd=tmp_path)
    assert (done.status, "is not traced" in done.err) == (0, False), done.err
    assert done.err.count("report and Chrome traces") == 1
    (rank,) = json.loads((tmp_path / "out" / "report.json").read_text())["ranks"]
    assert (rank["num_steps"], rank["step_unit"]) == (3, "optimizer step")


def test_a_command_that_cannot_be_started_leaves_no_folder(tmp_path: Path) -> None:
    """The output folder is removed again, unless it was there before."""
    line = (*NUMAPIN, "trace", "--output", "out", "--", "nosuchcmd")
    done = call(*line, cwd=tmp_path)
    assert (done.status, "nosuchcmd cannot be started: No such file" in done.err) == (2, True), done.err
    assert not any(tmp_path.iterdir())
    (tmp_path / "out").mkdir()
    assert call(*line, cwd=tmp_path).status == 2
    assert [path.name for path in tmp_path.rglob("*")] == ["out"]


def test_json_without_stderr(tmp_path: Path) -> None:
    """If stderr is closed, the script's own output is dropped, and stdout has the report."""
    path = script(tmp_path, TRAINS + 'train(10); print("trained")\n')
    line = " ".join((*NUMAPIN, "trace", *STEPS, "--json", "--", sys.executable, path))
    done = call("sh", "-c", f"{line} 2>&-", cwd=tmp_path)
    assert done.status == 0
    assert [rank["num_steps"] for rank in json.loads(done.out)["ranks"]] == [2]
