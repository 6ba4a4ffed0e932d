"""The job below `numapin trace`, on the CPU: signals, `--stop`, errors of the report, and advice."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.launching import (
    NUMAPIN,
    TORCH_QUICKLY,
    WITHOUT_COMPILER,
    Done,
    call,
    environment,
    numapin,
    script,
)
from tests.integration.seam import read_trace
from tests.integration.warm_ranks import client, forked_script
from tests.waiting import gone, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("warm ranks")]  # one process has torch imported
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


def changed(change: str, *words: str) -> tuple[str, ...]:
    """Return a command line that runs numapin with these words after a change to the module `trace`."""
    lines = ("import sys, numapin.cli.trace as trace", change, "from numapin.cli.entry import main")
    return sys.executable, "-c", "\n".join([*lines, f"sys.argv = {['numapin', 'trace', *words]!r}", "main()"])


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
    command = (*NUMAPIN, "trace", *STEPS, *RUN, script(tmp_path, TRAINS + text))
    with subprocess.Popen(command, cwd=tmp_path, stdout=writer, env=environment()) as process:
        try:
            os.close(writer)
            assert wait_until((tmp_path / "out" / "report.json").exists, limit_s=LIMIT_S)
            process.terminate()
            assert wait_until((tmp_path / "saved").exists, limit_s=LIMIT_S)
            with os.fdopen(reader, "rb") as file:
                assert file.read().count(b"ms/step") == 1  # and not again at the end
            assert process.wait(LIMIT_S) == 128 + signal.SIGTERM
        finally:
            process.kill()


def test_a_bug_in_the_report_does_not_end_the_job(tmp_path: Path) -> None:
    """An error that we did not expect ends `trace` only after the job; it is reported once."""
    path = forked_script(tmp_path, TRAINS + 'train(300); mark("trained")\n')
    bug = "def read_report(*_): raise ValueError('bug in the analysis')\ntrace.read_report = read_report"
    done = call(*changed(bug, *STEPS, *RUN, path), cwd=tmp_path)
    assert (tmp_path / "trained").exists(), done.err
    assert (done.status, done.err.count("bug in the analysis")) == (1, 1), done.err
    assert not (tmp_path / "out" / ".loads").exists()


def test_stop_ends_a_command_that_ignores_sigterm(tmp_path: Path) -> None:
    """With --stop it is killed after the grace period, and so is what it has left behind."""
    path = script(tmp_path, TRAINS + "signal.signal(signal.SIGTERM, signal.SIG_IGN); mark('here'); train(100000)\n")
    shell = ("sh", "-c", 'trap "" TERM; "$@"; exit 1', "sh", sys.executable, path)
    soon = "trace._COMMAND_GRACE_S = trace._GRACE_S = 0.5"
    line = changed(soon, *STEPS, "--stop", "--", *shell)
    done = call("timeout", "-s", "KILL", "100", *line, cwd=tmp_path)
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


def test_a_command_that_cannot_be_started(tmp_path: Path) -> None:
    """It is named, with the reason, and the folder can be used again."""
    for _ in range(2):
        done = call(*NUMAPIN, "trace", "--output", "out", "--", "nosuchcmd", cwd=tmp_path)
        assert (done.status, "nosuchcmd cannot be started: No such file" in done.err) == (2, True), done.err


def test_json_without_stderr(tmp_path: Path) -> None:
    """If stderr is closed, the command starts all the same; its own output is dropped."""
    done = call("sh", "-c", f"{' '.join(NUMAPIN)} trace --json -- touch started 2>&-", cwd=tmp_path)
    assert (done.status, Path(tmp_path, "started").exists()) == (1, True)


# --- advice, each provoked by a script -------------------------------------------------------------------------------

EPOCHS = (
    WITHOUT_COMPILER
    + """
import sys, time, torch
import numapin
class Data(torch.utils.data.Dataset):
    def __len__(self): return 12
    def __getitem__(self, i):
        time.sleep(0.02)
        return torch.ones(8)
def log(step):
    if step == 14: time.sleep(1.5)
def start(worker):
    time.sleep(0.3)
if __name__ == "__main__":
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = numapin.DataLoader(Data(), batch_size=2, num_workers=1, worker_init_fn=start)
    step = 0
    for epoch in range(3):
        for x in loader:
            optimizer.zero_grad(); model(x).sum().backward(); optimizer.step()
            step += 1
            log(step)
    print("trained")
"""
)
RANKS = (
    WITHOUT_COMPILER
    + """
import os, time, torch
import torch.distributed as dist
dist.init_process_group("gloo")
weight = torch.nn.Parameter(torch.ones(64))
optimizer = torch.optim.SGD([weight], 0.1)
def augment():
    end = time.thread_time() + 0.01  # on a busy machine many times as long
    while time.thread_time() < end: pass
def fetch():
    time.sleep(0.1)
for _ in range(12):
    if dist.get_rank() == 1: augment(); fetch(); fetch()
    weight.grad = torch.ones(64)
    dist.all_reduce(weight.grad)
    optimizer.step()
dist.destroy_process_group()
"""
)


def traced(folder: Path, text: str, *options: str) -> Done:
    path = forked_script(folder, text)
    done = numapin("trace", "--quiet", *options, "--output", "out", path, cwd=folder)
    assert done.status == 0, done.err
    return done


def findings(folder: Path) -> dict[str, Any]:
    report = json.loads((folder / "out" / "report.json").read_text())
    return {finding["what"]: finding for finding in report["findings"]}


def test_a_script_with_several_causes(tmp_path: Path) -> None:
    """Workers start slowly in each epoch, data is late, and one step is slow; most to gain comes first.

    Two epochs began: the advice is to keep their workers. A script that uses numapin's loader is not told to use it,
    nor that it is bound by compute. The slow step is named, with the function that slept in it. The trace names its
    CPUs; samples are few, and most of them are in the script's own code.
    """
    done = traced(tmp_path, EPOCHS, "--nproc-per-node", "1", "--steps", "12", "--skip", "3")
    found = findings(tmp_path)
    assert found["start of an epoch"]["evidence"].startswith("2 of the traced steps began an epoch")
    assert "persistent_workers=True" in found["start of an epoch"]["remedy"]
    # Its only worker sleeps nearly all of the time; on a busy machine the rest may be a tenth.
    limits = ("the workers are the limit", "numapin's loader is in use")
    assert found["waiting for data"]["remedy"].startswith(limits)
    assert "--dataloader" not in done.out
    assert "bound by compute" not in found
    assert "of 12; step 11 took" in found["uneven steps"]["evidence"]
    assert "log (train.py:" in found["uneven steps"]["evidence"]
    saved = [finding["saves_s"] for finding in found.values()]
    assert len(saved) >= 3  # on a busy machine there are others
    assert saved == sorted(saved, reverse=True)
    assert min(saved) > 0
    content = json.loads((tmp_path / "out" / "rank-0.trace.json").read_text())
    noted = read_trace(content, source="x").noted
    assert noted.cpus
    assert 10 < len(noted.samples) < 4000
    assert {sample.own for sample in noted.samples if "(train.py:" not in sample.own} == set()


def test_a_slow_rank_that_sleeps(tmp_path: Path) -> None:
    """The rank that the other waits for is named with its CPUs, and the function that it sleeps in."""
    traced(tmp_path, RANKS, "--nproc-per-node", "2", "--steps", "6", "--skip", "3")
    found = findings(tmp_path)
    slow = found["one slow rank"]
    assert slow["ranks"] == ["1"]
    assert "CPUs " in slow["evidence"]
    assert "fetch (train.py:" in slow["evidence"]
    assert found["the script sleeps or waits"]["ranks"] == ["1"]
    assert "waiting for other ranks" not in found


def test_stop_counts_numapins_batches(tmp_path: Path) -> None:
    """A job that --stop ends has counted the batches that took numapin's data path until the trace was written."""
    text = f"""{TRAINS}
class Data(torch.utils.data.Dataset):
    def __len__(self): return 400
    def __getitem__(self, i): time.sleep(0.05); return torch.ones(8)
if __name__ == "__main__":
    weight = torch.nn.Parameter(torch.ones(8))
    optimizer = torch.optim.SGD([weight], 0.1)
    for batch in torch.utils.data.DataLoader(Data(), batch_size=4, num_workers=1):
        (weight * batch).sum().backward(); optimizer.step()
"""
    options = ("--nproc-per-node", "1", "--steps", "5", "--skip", "3", "--stop", "--dataloader=numapin")
    done = numapin("trace", *options, "--output", "out", script(tmp_path, text), cwd=tmp_path)
    assert done.status == 0, done.err
    assert "uses numapin's data path" in done.err
    counted = re.search(r"1 loader, (?:at least )?(\d+) batches by numapin", done.err)
    assert counted is not None, done.err
    assert int(counted[1]) >= 8
    (rank,) = json.loads((tmp_path / "out" / "report.json").read_text())["ranks"]
    assert rank["num_batches"] == 5
