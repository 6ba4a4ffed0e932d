"""The advice of `numapin trace`, each provoked by a script on the CPU. One run serves several assertions."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.launching import TORCHRUN, WITHOUT_COMPILER, Done, numapin, script
from tests.integration.seam import read_trace
from tests.integration.warm_ranks import forked_script

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.xdist_group("warm ranks")  # one process has torch imported

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


ENDLESS = (
    WITHOUT_COMPILER
    + """
import os, sys, time, torch
weight = torch.nn.Parameter(torch.ones(8))
optimizer = torch.optim.SGD([weight], 0.1)
while not os.path.exists(sys.argv[1]):
    weight.grad = torch.ones(8)
    optimizer.step()
    time.sleep(0.002)
print("saw it")
"""
)


SLEEPING = (
    WITHOUT_COMPILER
    + """
import time, torch
class Data(torch.utils.data.Dataset):
    def __len__(self): return 400
    def __getitem__(self, i):
        time.sleep(0.05)
        return torch.ones(8)
if __name__ == "__main__":
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for i, x in enumerate(torch.utils.data.DataLoader(Data(), batch_size=4, num_workers=1)):
        optimizer.zero_grad(); model(x).sum().backward(); optimizer.step()
        if i == 20: break
"""
)


def traced(folder: Path, text: str, *options: str, arguments: tuple[str, ...] = ()) -> Done:
    path = forked_script(folder, text)
    done = numapin("trace", "--quiet", *options, "--output", "out", path, *arguments, cwd=folder)
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
    _, _, ranking = done.out.partition("most to gain first")
    saved = [float(line.split()[1]) for line in ranking.splitlines() if line.startswith("  ")]
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


def test_the_report_comes_while_the_job_goes_on(tmp_path: Path) -> None:
    """The script, which waits for the report, sees it; stdout has it once."""
    done = traced(tmp_path, ENDLESS, "--nproc-per-node", "1", "--steps", "5", "--json", arguments=("out/report.json",))
    assert json.loads(done.out)["schema"] == "numapin.trace/1"
    assert "saw it" in done.err


def test_stop_ends_a_job_of_any_launcher(tmp_path: Path) -> None:
    """With --stop all ranks of torchrun end, with status 0."""
    launcher = (*TORCHRUN, "--nproc-per-node", "2", forked_script(tmp_path, ENDLESS), "never")
    done = numapin("trace", "--steps", "60", "--stop", "--output", "out", "--", *launcher, cwd=tmp_path)
    assert done.status == 0, done.err
    assert "the job was ended after the traced steps (--stop)" in done.err
    assert "saw it" not in done.out
    assert done.out.count("most to gain first") == 1
    ranks = json.loads((tmp_path / "out" / "report.json").read_text())["ranks"]
    assert [rank["num_steps"] for rank in ranks] == [60, 60]


def test_stop_counts_numapins_batches(tmp_path: Path) -> None:
    """A job that --stop ends has counted the batches that took numapin's data path until the trace was written."""
    options = ("--nproc-per-node", "1", "--steps", "5", "--skip", "3", "--stop", "--dataloader=numapin")
    done = numapin("trace", *options, "--output", "out", script(tmp_path, SLEEPING), cwd=tmp_path)
    assert done.status == 0, done.err
    assert "uses numapin's data path" in done.err
    counted = re.search(r"1 loader, (?:at least )?(\d+) batches by numapin", done.err)
    assert counted is not None, done.err
    assert int(counted[1]) >= 8
    (rank,) = json.loads((tmp_path / "out" / "report.json").read_text())["ranks"]
    assert rank["num_batches"] == 5
