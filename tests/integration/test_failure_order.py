"""The first of several ranks that fail, and signals while a failed job ends, on both ways."""

from __future__ import annotations

import json
import re
import signal
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.faulty import PRELUDE, Job, meeting
from tests.integration.launching import TORCH_QUICKLY, numapin, script

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

TWO = ("--nproc-per-node", "2")

# Rank 1 raises, and takes its time to end. Rank 0 raises then, and ends at once.
SLOW = """
import atexit
def slow(): mark("ending"); time.sleep(60)
def main():
    mark("here"); wait_for("here.*", 2)
    if rank == "1": atexit.register(slow); raise ValueError("the first")
    wait_for("ending.*"); raise KeyError("the second")
main()
"""
GRACE = """
signals = []
def asked(number, _):
    signals.append(signal.Signals(number).name)
    mark(f"asked{len(signals)}")
    if len(signals) == 2: mark("_".join(signals)); sys.exit(0)
for number in (signal.SIGTERM, signal.SIGHUP): signal.signal(number, asked)
mark("here"); wait_for("here.*", 2)
if rank == "1": sys.exit(7)
while True: time.sleep(0.05)
"""
WORKER = f"""{TORCH_QUICKLY}
from torch.utils.data import DataLoader
class Data(torch.utils.data.Dataset):
    def __len__(self): return 100
    def __getitem__(self, number):
        if number == 5: os.kill(os.getpid(), signal.SIGBUS)
        time.sleep(0.01)
        return number
for batch in DataLoader(Data(), num_workers=1): pass
"""


def failed(tmp_path: Path, text: str, *options: str) -> tuple[str, dict[str, Any]]:
    """Run a job of two ranks that fails; return its block, and the account in its report."""
    report = tmp_path / "report.json"
    job = (script(tmp_path, PRELUDE + text), str(tmp_path))
    done = numapin("run", "--quiet", "--report", str(report), *options, *job, cwd=tmp_path, TMPDIR=str(tmp_path))
    assert done.status == 1, done.err
    return done.err.rpartition("numapin: error: ")[2], json.loads(report.read_text())["failure"]


def test_a_rank_that_takes_long_to_end(tmp_path: Path) -> None:
    """The first is the one that raised first, not the one that ended first. Records of torch's: tests/unit/launcher."""
    block, failure = failed(tmp_path, SLOW, *TWO)
    assert "rank    1, the first to fail" in block
    assert "failed  ValueError: the first\n          then ended by numapin (SIGTERM)\n" in block
    assert "others  1 failed later (rank 0)\n" in block
    assert [rank["rank"] for rank in failure["ranks"]] == [1, 0]


def test_a_dataloaders_worker(tmp_path: Path) -> None:
    """The exception about a worker that was killed is followed by the likely cause.

    It is torch's RuntimeError, or that of the connection to the worker if this ends while a batch is read.
    """
    block, failure = failed(tmp_path, WORKER)
    assert re.search("failed  (RuntimeError: DataLoader worker .pid|EOFError|ConnectionResetError)", block), block
    assert re.search("likely  .*(was truncated|DataLoader worker ended)", block), block
    assert "/dev/shm" not in failure["cause"]  # noqa: S108 - it is not full


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Give a function that starts a launcher with options and a script; end what is left of the jobs afterwards."""
    yield lambda options, text, **variables: Job(tmp_path / "job", "numapin", [*options], text, **variables)
    while Job.started:
        Job.started.pop().clean()


def test_a_signal_while_a_failed_job_ends(start: Callable[..., Job]) -> None:
    """It decides the exit status; the ranks get it, too, and the block says what had failed before."""
    job = start(TWO, GRACE)
    job.await_marks("asked1", 1)
    job.process.send_signal(signal.SIGHUP)
    assert job.wait() == 128 + signal.SIGHUP
    assert job.marked("SIGTERM_SIGHUP")
    block, _, last = job.err.partition("numapin: stopped by ")
    assert block.startswith("numapin: error: ")
    assert "rank    1, the first to fail" in block
    assert "failed  exit status 7\n" in block
    assert "others  1 was running and ended by numapin (exit status 0)\n" in block
    assert last == "SIGHUP; all ranks have ended\n"


# Host 0's ranks have succeeded when its launcher has waited for the rank.
APART = """
host = os.environ["HOST"]
if host != "0":
    wait_for("here.*")
    first = glob.glob(f"{folder}/here.*")[0].rpartition(".")[2]
    while os.path.exists(f"/proc/{first}"): time.sleep(0.005)
    sys.exit(6 + int(host))
mark("here")
"""


def test_a_host_does_not_wait_for_those_that_failed(start: Callable[..., Job]) -> None:
    """A host whose ranks have succeeded ends when the others fail. Under torchrun it waits for 300 s.

    Host 1 has no restart. Host 2 has one, for which the job has too few hosts left.
    """
    together, jobs = meeting(), []
    for host, restarts in enumerate("001"):
        elastic = ("--nnodes", "3", "--rdzv-conf", f"is_host={int(host == 0)}", "--max-restarts", restarts)
        jobs.append(start([*together, *elastic, "--nproc-per-node", "1"], APART, HOST=str(host)))
    errs = [f"{job.wait()} {job.err}" for job in jobs]
    assert [err[0] for err in errs] == ["0", "1", "1"], "\n---\n".join(errs)
    assert "failed  exit status 7\n" in errs[1]
    assert "failed  exit status 8\n" in errs[2]
    # Host 2 sees that host 0 has succeeded, or that host 1 has closed the rendezvous if it restarts before that.
    ends = "the ranks of another host have succeeded|the job has ended on another host"
    assert re.search(f"numapin: ({ends}).*; the ranks are not restarted\n", errs[2]), errs[2]
    assert not any("Traceback" in err for err in errs)


def test_a_run_that_lost_its_folder(tmp_path: Path) -> None:
    """The file with all frames is in the folder in which the run goes on."""
    text = (
        "import os, shutil, sys\n"
        "folder = os.environ['NUMAPIN_RUN_DIR']\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': shutil.rmtree(folder)\n"
        "sys.exit(3)\n"
    )
    done = numapin("run", "--quiet", "--max-restarts", "1", script(tmp_path, text), TMPDIR=str(tmp_path))
    assert done.status == 1
    assert "takes its place" in done.err
    (file,) = tmp_path.glob("numapin-*/failure.txt")
    assert str(file) in done.err.replace(f"\n{' ' * 10}", "")
    assert file.parent.name in done.err
