"""Processes that ranks started end with the ranks if one rank fails, and stay if all succeed."""

from __future__ import annotations

import json
import os
import signal
from typing import TYPE_CHECKING

from tests.integration.launching import numapin, script
from tests.waiting import gone, wait_until

if TYPE_CHECKING:
    from pathlib import Path

STARTS_CHILDREN = """
import json, os, signal, sys, time
folder, restart, rank = sys.argv[1], os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
def start(how, stubborn):
    pid = os.fork()
    if pid:
        return pid
    how()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    if stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.execlp("sleep", "sleep", "300")
def lives(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
if restart == "1":
    if rank == "0":
        pids = [pid for path in ("0", "1") for pid in json.load(open(f"{folder}/{path}")).values()]
        print(*filter(lives, pids), "live")
        with open(f"{folder}/stays", "w") as file:
            file.write(str(start(os.setpgrp, False)))
    sys.exit(0)
pids = {
    "a child": start(lambda: None, False),
    "one that ignores SIGTERM": start(lambda: None, True),
    "one in its own process group": start(os.setpgrp, True),
    "one in its own session": start(os.setsid, False),
    "the same, ignoring SIGTERM": start(os.setsid, True),
}
with open(f"{folder}/{rank}.new", "w") as file:
    json.dump(pids, file)
os.rename(f"{folder}/{rank}.new", f"{folder}/{rank}")
while not all(os.path.exists(f"{folder}/{other}") for other in "01"):
    time.sleep(0.02)
if rank == "1":
    sys.exit(1)
time.sleep(300)
"""


def test_children_of_ranks_are_gone_before_a_restart(tmp_path: Path) -> None:
    """Ranks that fail or are ended leave no process to the next round; ranks that succeed may."""
    options = ("--nproc-per-node", "2", "--max-restarts", "1", "--shutdown-timeout", "1", "--quiet")
    (tmp_path / "marks").mkdir()
    done = numapin("run", *options, script(tmp_path, STARTS_CHILDREN), str(tmp_path / "marks"))
    left = {path.name: path.read_text() for path in (tmp_path / "marks").iterdir()}
    try:
        assert done.status == 0, done.err
        assert done.out == "live\n"
        assert not gone(int(left["stays"]))
    finally:
        _kill(*json.loads(left["0"]).values(), *json.loads(left["1"]).values(), int(left["stays"]))


STARTS_TWO = """
import os, subprocess, sys
quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
print(*(subprocess.Popen(["sleep", "300"], start_new_session=new, **quiet).pid for new in (False, True)), flush=True)
sys.exit(1)
"""


def test_children_of_a_rank_whose_job_fails(tmp_path: Path) -> None:
    """They end with the job, except those that have left its session on purpose, as under torchrun."""
    done = numapin("run", "--quiet", script(tmp_path, STARTS_TWO))
    child, detached = map(int, done.out.split())
    try:
        assert done.status == 1
        assert wait_until(lambda: gone(child), limit_s=5)
        assert not gone(detached)
    finally:
        _kill(child, detached)


def _kill(*pids: int) -> None:
    for pid in pids:
        if not gone(pid):
            os.kill(pid, signal.SIGKILL)
