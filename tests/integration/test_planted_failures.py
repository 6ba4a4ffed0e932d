"""Planted failures: for each, the rank that the block names, what it says of it, and what it must not say.

What is a matter of text only, is tested with recorded input in tests/unit/launcher/test_failure.py.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from tests.integration.launching import TORCH_QUICKLY, numapin, script

if TYPE_CHECKING:
    from pathlib import Path

# All ranks are there before one fails; the others stay.
TOGETHER = """
import os, signal, sys, time
from pathlib import Path
rank = os.environ["RANK"]
def await_mark(name):
    while not Path(name).exists(): time.sleep(0.005)
def meet():
    Path(f"here.{rank}").touch()
    for number in range(int(os.environ["WORLD_SIZE"])): await_mark(f"here.{number}")
def stay():
    Path(f"stays.{rank}").touch()
    while True: time.sleep(60)
"""
AWAIT_OTHERS = """
meet()
if rank != "1": stay()
for number in range(int(os.environ["WORLD_SIZE"])):
    if number != 1: await_mark(f"stays.{number}")
"""
ALONE = f"{TOGETHER}{AWAIT_OTHERS}"
EXITS = "def main():\n    sys.exit('cannot open data')\n"
GLOO = f"{TORCH_QUICKLY}import datetime, torch.distributed as dist\n{TOGETHER}"
GROUP = "dist.init_process_group('gloo', timeout=datetime.timedelta(seconds={}))\n"
IMAGES = f"""{TORCH_QUICKLY}
from torch.utils.data import DataLoader, Dataset
class Images(Dataset):
    def __len__(self): return 32
    def __getitem__(self, number):
        try:
            if number == 17: open("17.jpg")
        except OSError as error:
            raise ValueError("image 17.jpg is truncated") from error
        return number
for batch in DataLoader(Images(), num_workers=1): pass
"""
PYTHON = sys.executable
OTHER_SIGNAL = "signal.SIGRTMAX - 1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Planted:
    """A job that fails.

    Attributes:
        text: The script, train.py.
        says: What the block says, its lines joined.
        rank: The rank that it names as the first.
        not_says: What it does not say.
        command: What numapin runs in place of the script: options, a program and its arguments.
        num_ranks: The number of ranks.
        beside: Other files.
    """

    text: str
    says: tuple[str, ...]
    rank: int = 1
    not_says: tuple[str, ...] = ()
    command: tuple[str, ...] = ("train.py",)
    num_ranks: int = 2
    beside: tuple[tuple[str, str], ...] = ()


def shell(line: str) -> tuple[str, ...]:
    """Return a job whose ranks are shells; `python` in it is this Python."""
    return ("--no-python", "sh", "-c", line.replace("python", PYTHON))


FAILURES = {
    "a file server's reset, and a handler of SIGTERM that raises": Planted(
        text=f"{TOGETHER}def asked(*_): raise SystemError('asked to end')\nsignal.signal(signal.SIGTERM, asked)\n"
        f"{AWAIT_OTHERS}raise ConnectionResetError(104, 'Connection reset by peer')\n",
        says=("failed ConnectionResetError: [Errno 104]", "1 failed while numapin ended it (rank 0: exit status 1)"),
        not_says=("lost its connection", "why ", "SystemError"),
    ),
    "a shell that becomes Python": Planted(
        text=f"{ALONE}{EXITS}main()\n",
        says=("failed SystemExit: cannot open data",),
        command=shell("exec python train.py"),
    ),
    "a shell around Python": Planted(
        text=f"{ALONE}1 / 0\n",
        says=("failed ZeroDivisionError: division by zero then exit status 5", "were in rank 0: stay, train.py:"),
        command=shell("python train.py; exit 5"),
    ),
    "a failure that a shell survives": Planted(
        text=f"{ALONE}raise ValueError('of the training')\n",
        says=("failed ValueError: of the training",),
        not_says=("KeyError",),
        command=shell("python check.py || true; python train.py; exit $?"),
        beside=(("check.py", "raise KeyError('of the check')\n"),),
    ),
    "a daemon": Planted(
        text=f"{ALONE}sys.exit(4)\n",
        says=("failed exit status 4",),
        not_says=("KeyError",),
        command=shell("setsid -w python check.py; python train.py; exit $?"),
        beside=(("check.py", "raise KeyError('of the daemon')\n"),),
    ),
    "a Python that becomes another": Planted(
        text=f"{ALONE}1 / 0\n",
        says=("failed ZeroDivisionError",),
        command=("--no-python", PYTHON, "wrapper.py", PYTHON, "train.py"),
        beside=(
            (
                "wrapper.py",
                "import os, sys\nos.environ['PYTHONPATH'] = '/nonexistent'\nos.execl(sys.argv[1], *sys.argv[1:])\n",
            ),
        ),
    ),
    "a Python that starts another": Planted(
        text=f"{ALONE}1 / 0\n",
        says=("failed subprocess.CalledProcessError",),
        not_says=("ZeroDivisionError",),
        command=(
            "--no-python",
            PYTHON,
            "-c",
            "import subprocess, sys; subprocess.run(sys.argv[1:], check=True)",
            PYTHON,
            "train.py",
        ),
    ),
    "ranks in several places": Planted(
        text=f"{TOGETHER}def reads(): stay()\nmeet()\nif rank == '3': reads()\n{AWAIT_OTHERS}raise ValueError('x')\n",
        says=("were in ranks 0,2-3: stay, train.py:",),
        num_ranks=4,
    ),
    "a rank in C code that holds the interpreter's lock": Planted(
        text=f"{TOGETHER}from itertools import repeat\nmeet()\n"
        "def busy():\n    Path('stays.0').touch()\n    sum(repeat(1))\n"
        "if rank == '0': busy()\nawait_mark('stays.0')\nraise ValueError('x')\n",
        says=("failed ValueError: x", "were in rank 0: busy, train.py:"),
    ),
    "a rank that blocks signals": Planted(
        text=f"{TOGETHER}signal.pthread_sigmask(signal.SIG_BLOCK, [{OTHER_SIGNAL}])\n"
        f"{AWAIT_OTHERS}raise ValueError('x')\n",
        says=("others 1 was running and ended by numapin (SIGTERM)",),
        not_says=("were in",),
    ),
    "a rank that has given the signal its default": Planted(
        text=f"{TOGETHER}signal.signal({OTHER_SIGNAL}, signal.SIG_DFL)\n{AWAIT_OTHERS}raise ValueError('x')\n",
        says=("others 1 was running and ended by numapin (SIGTERM)",),
        not_says=("were in",),
    ),
    "a rank that has closed all files": Planted(
        text=f"{TOGETHER}os.closerange(3, 99)\nfile = open('data', 'w')\n{AWAIT_OTHERS}raise ValueError('x')\n",
        says=("others 1 was running and ended by numapin (SIGTERM)",),
        not_says=("were in",),
    ),
    "torch's DataLoader": Planted(
        text=IMAGES,
        rank=0,
        num_ranks=1,
        says=(
            "failed ValueError: image 17.jpg is truncated in DataLoader worker process 0 "
            "raised from FileNotFoundError: [Errno 2] No such file or directory: '17.jpg' at File",
            'raise ValueError("image 17.jpg is truncated") from error',
        ),
        not_says=("Caught", "likely "),
    ),
    "a collective whose peer has ended": Planted(
        text=f"{GLOO}{GROUP.format(60)}meet()\nif rank == '1': os._exit(3)\ndist.barrier()\n",
        says=("failed exit status 3",),
        not_says=("timed out",),
    ),
    "a collective that times out": Planted(
        # A shorter time for the collective only: on a busy machine the ranks need a while to meet.
        text=f"{GLOO}{GROUP.format(60)}if rank == '1': stay()\n"
        "dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=1))\ndist.barrier()\n",
        rank=0,
        says=("why it timed out waiting for another rank; look also at rank 1", "were in rank 1: stay, train.py:"),
        not_says=("lost its connection",),
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_block(tmp_path: Path, name: str) -> None:
    """The block names the rank that failed first, says what is known of its failure, and states nothing else."""
    planted = FAILURES[name]
    script(tmp_path, planted.text)
    for file, text in planted.beside:
        script(tmp_path, text, file)
    options = ("--quiet", "--nproc-per-node", str(planted.num_ranks), "--report", "report.json")
    done = numapin("run", *options, *planted.command, cwd=tmp_path, TMPDIR=str(tmp_path))
    assert done.status == 1, done.err
    block = " ".join(done.err.rpartition("numapin: error: ")[2].split())
    assert f"rank {planted.rank}, the first to fail" in block, done.err
    for text in planted.says:
        assert text in block, done.err
    for text in planted.not_says:
        assert text not in block, done.err
    ranks = json.loads((tmp_path / "report.json").read_text())["failure"]["ranks"]
    assert len(ranks) == planted.num_ranks
