"""The first of several ranks that fail, and signals while a failed job ends, on both ways."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.faulty import Job
from tests.integration.launching import TORCH_QUICKLY, numapin, script
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

LIMIT_S = 100
TWO = ("--nproc-per-node", "2")

TOGETHER = """
import atexit, os, signal, sys, time
from pathlib import Path
rank = os.environ["RANK"]
def mark(name): Path(name).write_text(str(os.getpid()))
def await_mark(name):
    while not (Path(name).exists() and Path(name).read_text()): time.sleep(0.005)
    return int(Path(name).read_text())
def await_end(pid):
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z": time.sleep(0.005)
"""
# Rank 1 raises, and takes its time to end. Rank 0 raises then, and ends at once.
SLOW = """
def slow(): mark("ending"); time.sleep(60)
def main():
    mark(f"here.{rank}"); await_mark("here.0"); await_mark("here.1")
    if rank == "1": atexit.register(slow); raise ValueError("the first")
    await_mark("ending"); raise KeyError("the second")
"""
GRACE = """
signals = []
def asked(number, _):
    signals.append(signal.Signals(number).name)
    mark(f"asked.{len(signals)}")
    if len(signals) == 2: mark("_".join(signals)); sys.exit(0)
for number in (signal.SIGTERM, signal.SIGHUP): signal.signal(number, asked)
mark(f"here.{rank}"); await_mark("here.0"); await_mark("here.1")
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
    path = script(tmp_path, TOGETHER + text)
    options = ("--quiet", "--report", str(report), *options)
    done = numapin("run", *options, path, cwd=tmp_path, TMPDIR=str(tmp_path))
    assert done.status == 1, done.err
    return done.err.rpartition("numapin: error: ")[2], json.loads(report.read_text())["failure"]


def test_a_rank_that_takes_long_to_end(tmp_path: Path) -> None:
    """The first is the one that raised first, not the one that ended first. Records of torch's: tests/unit/launcher."""
    block, failure = failed(tmp_path, f"{SLOW}main()\n", *TWO)
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
    """Give a function that starts a launcher with options, a script and variables; end what is left of the jobs."""

    def start(options: Sequence[str], text: str, name: str = "host", **variables: str) -> Job:
        (tmp_path / name).mkdir()
        return Job(
            tmp_path / name, "numapin", [*options], f"import os\nos.chdir({str(tmp_path)!r})\n{text}", **variables
        )

    yield start
    while Job.started:
        Job.started.pop().clean()


def test_a_signal_while_a_failed_job_ends(tmp_path: Path, start: Callable[..., Job]) -> None:
    """It decides the exit status; the ranks get it, too, and the block says what had failed before."""
    job = start(TWO, TOGETHER + GRACE)
    assert wait_until((tmp_path / "asked.1").exists, limit_s=LIMIT_S), job.err
    job.process.send_signal(signal.SIGHUP)
    assert job.wait() == 128 + signal.SIGHUP
    assert (tmp_path / "SIGTERM_SIGHUP").exists()
    block, _, last = job.err.partition("numapin: stopped by ")
    assert block.startswith("numapin: error: ")
    assert "rank    1, the first to fail" in block
    assert "failed  exit status 7\n" in block
    assert "others  1 was running and ended by numapin (exit status 0)\n" in block
    assert last == "SIGHUP; all ranks have ended\n"


def meeting(num_hosts: int = 2) -> list[str]:
    """Return the options with which the launchers of a job on several hosts meet on this host."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = ("--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1")
    return ["--nnodes", str(num_hosts), "--rdzv-backend", "c10d", *address, "--rdzv-id", "job"]


CLOSED = """
signal.signal(signal.SIGTERM, lambda *_: (mark("asked"), await_mark("waiting"), sys.exit(0)))
host = os.environ["HOST"]
mark(f"here.{rank}")
for number in range(3): await_mark(f"here.{number}")
if rank == os.environ["FAILS"]: sys.exit(7)
if host == "b": await_mark("asked"); sys.exit(8)
while True: time.sleep(0.05)
"""


def test_the_other_host_ends_the_job(tmp_path: Path, start: Callable[..., Job]) -> None:
    """A host that waits for another, which gives up, ends with its own failure and without a traceback."""
    together, text = meeting(), TOGETHER + CLOSED
    one = start([*together, "--nproc-per-node", "2"], text, "a", FAILS="0", HOST="a")
    other = start([*together, "--nproc-per-node", "1", "--max-restarts", "1"], text, "b", FAILS="-", HOST="b")
    restarted = "the ranks are restarted"
    wait_until(lambda: restarted in other.err or other.process.poll() is not None, limit_s=LIMIT_S)
    assert restarted in other.err, one.err
    (tmp_path / "waiting").write_text("1")
    assert (one.wait(), other.wait()) == (1, 1), f"{one.err}\n---\n{other.err}"
    assert ", the first to fail on this host: " in one.err
    assert "Traceback" not in other.err
    rest = other.err.partition(restarted)[2]
    # Host b sees that the rendezvous is closed, or that host a, which keeps it, has ended since.
    ends = ("the job has ended on another host", "the rendezvous host has ended its launcher, or cannot be reached")
    assert any(f"numapin: {end}; the ranks are not restarted\n" in rest for end in ends), rest
    assert "failed  exit status 8\n" in rest


# Host 0's ranks have succeeded when its launcher has waited for the rank.
APART = """
host = os.environ["HOST"]
if host != "0":
    first = await_mark("here")
    while Path(f"/proc/{first}").exists(): time.sleep(0.005)
    sys.exit(6 + int(host))
mark("here")
"""


def test_a_host_does_not_wait_for_those_that_failed(start: Callable[..., Job]) -> None:
    """A host whose ranks have succeeded ends when the others fail. Under torchrun it waits for 300 s.

    Host 1 has no restart. Host 2 has one, for which the job has too few hosts left.
    """
    together, jobs = meeting(3), []
    for host, restarts in enumerate("001"):
        options = [*together, "--rdzv-conf", f"is_host={int(host == 0)}", "--max-restarts", restarts]
        jobs.append(start([*options, "--nproc-per-node", "1"], TOGETHER + APART, f"host{host}", HOST=str(host)))
    errs = [f"{job.wait()} {job.err}" for job in jobs]
    assert [err[0] for err in errs] == ["0", "1", "1"], "\n---\n".join(errs)
    assert "failed  exit status 7\n" in errs[1]
    assert "failed  exit status 8\n" in errs[2]
    # Host 2 sees that host 0 has succeeded, or that host 1 has closed the rendezvous if it restarts before that.
    assert re.search("numapin: the .* another host.*; the ranks are not restarted\n", errs[2]), errs[2]
    assert not any("Traceback" in err for err in errs)


def test_a_run_that_lost_its_folder(tmp_path: Path) -> None:
    """The file with all frames is in the folder in which the run goes on."""
    text = (
        f"{TOGETHER}import shutil\n"
        "folder = os.environ['NUMAPIN_RUN_DIR']\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': shutil.rmtree(folder)\n"
        "sys.exit(3)\n"
    )
    done = numapin("run", "--quiet", "--max-restarts", "1", script(tmp_path, text), TMPDIR=str(tmp_path))
    assert done.status == 1
    assert "takes its place" in done.err
    (file,) = tmp_path.glob("numapin-*/failure.txt")
    assert str(file) in done.err.replace(f"\n{' ' * 10}", "")
    assert os.path.basename(file.parent) in done.err  # noqa: PTH119 - one word
