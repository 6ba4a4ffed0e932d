"""Processes that ranks started end with the ranks if one rank fails or the launcher ends, and stay if all succeed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.faulty import Job
from tests.integration.launching import NUMAPIN, environment, script
from tests.integration.seam import guarded, proc, run_folder, write_json
from tests.waiting import gone, wait_until

pytestmark = pytest.mark.slow

STARTS_CHILDREN = """
def start(how, stubborn):
    if os.fork() == 0:
        how()
        if stubborn:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        mark("child")
        os.execlp("sleep", "sleep", "300")
def lives(path):
    try:
        return open(f"/proc/{path.rpartition('.')[2]}/stat").read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
if restart == 1:
    if rank == "0":
        mark("left" if any(map(lives, glob.glob(f"{folder}/child.*"))) else "clean")
        start(os.setpgrp, False)
        wait_for("child.0.1.*")
    sys.exit(0)
for how, stubborn in ((int, False), (int, True), (os.setpgrp, True), (os.setsid, False), (os.setsid, True)):
    start(how, stubborn)
wait_for("child.*", 10)
if rank == "1":
    sys.exit(1)
time.sleep(300)
"""


def test_children_of_ranks_are_gone_before_a_restart(tmp_path: Path) -> None:
    """Ranks that fail or are ended leave no process to the next round; ranks that succeed may.

    Some ignore SIGTERM, or are in a process group or a session of their own.
    """
    options = ["--nproc-per-node", "2", "--max-restarts", "1", "--shutdown-timeout", "1"]
    job = Job(tmp_path / "job", options, STARTS_CHILDREN)
    try:
        assert job.wait() == 0, job.err
        assert (len(job.marked("clean")), job.marked("left")) == (1, [])
        assert [gone(pid) for *_, pid in job.marked("child", restart=1)] == [False]
    finally:
        Job.started.pop().clean()


# Starts processes that nothing but numapin could end, writes their ids to the file argv[-1], and waits.
STARTS_ALL_KINDS = """
import ctypes, multiprocessing, os, subprocess, sys, time
quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
def overwrite_environment():  # as setproctitle does
    fields = open("/proc/self/stat").read().rpartition(")")[2].split()
    start, end = map(int, fields[47:49])
    ctypes.memset(start, 0, end - start)
    time.sleep(300)
def main():
    forked = multiprocessing.get_context("fork").Process(target=overwrite_environment)
    forked.start()
    pids = {
        "a child": subprocess.Popen(["sleep", "300"], **quiet).pid,
        "in its own group": subprocess.Popen(["sleep", "300"], process_group=0, **quiet).pid,
        "in its own session": subprocess.Popen(["sleep", "300"], start_new_session=True, **quiet).pid,
        "without its environment": forked.pid,
        "the program": os.getpid(),
    }
    while b"LOCAL_RANK" in open(f"/proc/{forked.pid}/environ", "rb").read():
        time.sleep(0.02)
    with open(sys.argv[-1] + ".new", "w") as file:
        print(*pids.values(), file=file)
    os.rename(sys.argv[-1] + ".new", sys.argv[-1])
    time.sleep(300)
if __name__ == "__main__":
    main()
"""


SPAWNS = """
import sys, numapin
from ranks import main
if __name__ == "__main__":
    numapin.spawn(main, num_ranks=1)
"""


@pytest.mark.parametrize(
    ("who", "number"),
    [
        *(("a launcher around a shell", number) for number in (signal.SIGKILL, signal.SIGTERM)),
        ("a launcher", signal.SIGINT),
        ("a launcher around another", signal.SIGKILL),
        *(("a caller of spawn", number) for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)),
    ],
)
def test_who_ends_with_a_signal(tmp_path: Path, who: str, number: signal.Signals) -> None:
    """Nothing that its ranks started is left, whatever session it is in, even if the launcher cannot end it.

    A caller of spawn keeps its own reaction to signals.
    """
    script(tmp_path, STARTS_ALL_KINDS, "ranks.py")
    run = [*NUMAPIN, "run", "--quiet", "--nproc-per-node", "1", "--shutdown-timeout", "1"]
    nested = f"import subprocess, sys; subprocess.run([*{run!r}, *sys.argv[1:]])"
    commands = {
        "a launcher": run,
        "a launcher around a shell": [*run, "--no-python", "bash", "-c", f'{sys.executable} "$@"; exit', "bash"],
        "a launcher around another": [*run, script(tmp_path, nested, "nested.py")],
        "a caller of spawn": [sys.executable, script(tmp_path, SPAWNS, "spawns.py")],
    }
    written = tmp_path / "pids"
    process = subprocess.Popen([*commands[who], str(tmp_path / "ranks.py"), str(written)], env=environment())
    if not wait_until(lambda: written.exists() or process.poll() is not None, limit_s=60):
        process.kill()
    assert written.exists(), process.wait(60)
    pids = [*map(int, written.read_text().split())]
    try:
        assert len(pids) == 5
        process.send_signal(number)
        status, is_launcher = process.wait(60), who != "a caller of spawn"
        assert status == (128 + number if number == signal.SIGTERM and is_launcher else -number)
        has_ended_them = number != signal.SIGKILL and is_launcher
        # Each guardian waits for 6 s, and another 30 s on a machine that is slow to end a process.
        ended = wait_until(lambda: all(map(gone, pids)), limit_s=0 if has_ended_them else 120)
        assert ended, [Path(f"/proc/{pid}/status").read_text() for pid in pids if not gone(pid)]
    finally:
        for pid in pids:
            if not gone(pid):
                os.kill(pid, signal.SIGKILL)


def _guardian_of(launcher: int) -> int | None:
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in proc.children_of().get(launcher, [])}
    return next((pid for pid, line in lines.items() if b"launcher.guardian" in line), None)


def test_the_guardian(tmp_path: Path) -> None:
    """It holds no pipe of the launcher, survives signals to all processes of a job, and ends with the job."""
    ready = tmp_path / "ready"
    waits = f"import os, time\nopen({str(ready)!r}, 'w')\nwhile os.path.exists({str(ready)!r}): time.sleep(0.02)"
    command = [*NUMAPIN, "run", "--quiet", "--nproc-per-node", "1", script(tmp_path, waits)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment()) as launcher:
        assert launcher.stdout is not None
        pipe = os.fstat(launcher.stdout.fileno()).st_ino
        assert wait_until(ready.exists, limit_s=60)
        guardian = _guardian_of(launcher.pid)
        assert guardian is not None
        assert f"pipe:[{pipe}]" not in [str(fd.readlink()) for fd in Path(f"/proc/{guardian}/fd").iterdir()]
        assert os.getsid(guardian) == guardian
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            os.kill(guardian, number)
        assert not gone(guardian)
        ready.unlink()
        assert launcher.wait(60) == 0
    assert gone(guardian)


def test_the_guardian_of_a_killed_launcher(tmp_path: Path) -> None:
    """It ends what a rank's record names, and then itself.

    Another launcher that starts at once does not remove the records before the guardian has read them. The run does not
    count as active meanwhile.
    """
    guardian_file, environ = tmp_path / "guardian", {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as rank:
        try:
            start = proc.stat(proc.folder_of(rank.pid)).start
            launcher = os.fork()
            if launcher == 0:
                try:
                    with run_folder.run_directory(environ) as folder, guarded(folder):
                        write_json(folder, "observed-0-0.json", {"restart": 0, "pid": rank.pid, "start": start})
                        guardian_file.write_text(str(wait_until(lambda: _guardian_of(os.getpid()), limit_s=60)))
                        os.kill(os.getpid(), signal.SIGKILL)
                finally:
                    os._exit(1)
            os.waitpid(launcher, 0)
            (killed,) = (str(path) for path in tmp_path.glob("numapin-*"))
            with run_folder.run_directory(environ):
                pass
            assert wait_until(lambda: not run_folder.is_live(killed), limit_s=60)
            assert rank.poll() is None
            guardian = int(guardian_file.read_text())
            assert rank.wait(60) == -signal.SIGKILL
            assert wait_until(lambda: gone(guardian), limit_s=60)
        finally:
            rank.kill()
