"""The launcher as process 1 of a container: it reaps orphans, keeps their statuses, and ends with the right one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.launching import NUMAPIN, call, environment, script
from tests.waiting import wait_until

IN_NAMESPACE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")

LEAVES_ORPHANS = """
import os, signal, sys, time
def zombies():
    stats = [open(f"/proc/{name}/stat").read() for name in os.listdir("/proc") if name.isdigit()]
    return [stat for stat in stats if stat.rpartition(")")[2].split()[0] == "Z"]
for _ in range(3):
    if os.fork() == 0:
        if os.fork() == 0:
            time.sleep(0.1)  # its parent ends first
        os._exit(0)
    os.wait()
end = time.monotonic() + 20
time.sleep(0.3)
while zombies() and time.monotonic() < end:
    time.sleep(0.05)
print(os.getppid(), zombies(), flush=True)
sys.exit(3)
"""

HANGS_UP = """
import os, signal, sys, time
from numapin.launcher.init import supervise_if_init
supervise_if_init()
signal.signal(signal.SIGHUP, lambda *_: (os.write(1, b"saved\\n"), sys.exit(7)))
print(os.getpid(), flush=True)
time.sleep(60)
"""


ON_A_TERMINAL = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execvp(sys.executable, [sys.executable, "-c", sys.argv[1]])
"""


@pytest.fixture(scope="module", autouse=True)
def _needs_namespaces() -> None:
    try:
        subprocess.run([*IN_NAMESPACE, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"PID namespaces cannot be made here: {error}")


def test_orphans_are_reaped_and_statuses_kept(tmp_path: Path) -> None:
    """No zombie stays, and the launcher sees that its rank failed."""
    done = call(*IN_NAMESPACE, *NUMAPIN, "run", "--quiet", script(tmp_path, LEAVES_ORPHANS))
    assert (done.status, done.out) == (1, "2 []\n"), done.err


def test_a_terminal_that_hangs_up() -> None:
    """The launcher gets the SIGHUP that the kernel sends to process 1 alone, as the leader of the session."""
    ours, theirs = os.openpty()
    command = [*IN_NAMESPACE, sys.executable, "-c", ON_A_TERMINAL, HANGS_UP]
    with subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE, text=True) as process:
        os.close(theirs)
        assert process.stdout is not None
        assert process.stdout.readline() == "2\n"
        os.close(ours)
        try:
            assert process.wait(20) == 7
        finally:
            process.kill()
        assert process.stdout.read() == "saved\n"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_status_of_a_container(tmp_path: Path, number: signal.Signals, status: int) -> None:
    """As process 1, the launcher ends its container with the status that a shell would show."""
    path = script(tmp_path, "import time\nopen('here', 'w').close()\ntime.sleep(300)\n")
    command, pipe = [*IN_NAMESPACE, *NUMAPIN, "run", "--quiet", path], subprocess.PIPE
    with subprocess.Popen(command, cwd=tmp_path, stderr=pipe, text=True, env=environment()) as process:
        assert wait_until((tmp_path / "here").exists, limit_s=60)
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(child), number)
        assert process.stderr is not None
        assert process.stderr.read().endswith(f"numapin: stopped by {number.name}; no rank is running\n")
    assert process.returncode == status
