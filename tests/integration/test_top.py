"""`numapin top` on real jobs and in a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tests.integration.launching import NUMAPIN, TORCH_QUICKLY, Done, environment, forked
from tests.integration.staying import STEPPING_JOB, staying_job
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

_SLEEPING = ("230", "115")  # clock_nanosleep on x86-64 and Arm: between the two samples
CPUS = sorted(os.sched_getaffinity(0))
LOADING_JOB = (
    TORCH_QUICKLY
    + """
import os, sys, time
class Data:
    def __len__(self): return 10**6
    def __getitem__(self, i): time.sleep(0.02); return i
for n, _ in enumerate(torch.utils.data.DataLoader(Data(), batch_size=1)):
    if n == 3: open(sys.argv[1] + os.environ["LOCAL_RANK"], "w").close()
    if os.path.exists(sys.argv[2]): break
"""
)


def _top(folder: Path, *options: str) -> Done:
    return forked("top", *options, NUMAPIN_RUN_DIR=str(folder / "runs"))


class _Terminal:
    def __init__(self, folder: Path, *options: str, **environ: str) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.settings, self.last = termios.tcgetattr(self.master), b""
        changes = {"TERM": "xterm", "COLUMNS": "80", **environ}
        self.process = subprocess.Popen(
            [*NUMAPIN, "top", "--interval", "0.1", *options],
            env=environment(NUMAPIN_RUN_DIR=str(folder / "runs"), **changes),
            stdin=slave,
            stdout=slave,
            stderr=subprocess.PIPE,
        )
        os.close(slave)

    def read_until(self, text: bytes, *, times: int = 1) -> bytes:
        seen = b""
        while seen.count(text) < times:
            assert select.select([self.master], [], [], 30)[0], seen
            seen += os.read(self.master, 65536)
        return seen

    def read_all(self) -> bytes:
        seen = b""
        with contextlib.suppress(OSError):  # it was closed
            while select.select([self.master], [], [], 30)[0]:
                seen += os.read(self.master, 65536)
        return seen

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    @property
    def is_restored(self) -> bool:
        """Whether the terminal has its settings and its cursor back, after `end`."""
        return b"\x1b[?25h" in self.last and termios.tcgetattr(self.master) == self.settings

    def end(self) -> tuple[int, str]:
        with ThreadPoolExecutor() as thread:
            last = thread.submit(self.read_all)
            try:
                _, err = self.process.communicate(timeout=30)
            finally:
                self.process.kill()  # if it does not end: reading ends with it
            self.last = last.result()
        return self.process.returncode, err.decode()


def test_bound_job(tmp_path: Path) -> None:
    """The JSON of two ranks has CPUs, threads, pages and no GPU; the table has a row per rank."""
    with staying_job(tmp_path, *NUMAPIN, "run", "--nproc-per-node", "2", num_ranks=2):
        table, told = _top(tmp_path, "--once", "--interval", "0.2"), _top(tmp_path, "--once", "--json")
    assert (table.status, told.status) == (0, 0), table.err + told.err
    assert [row.split()[0] for row in table.out.splitlines()[3:5]] == ["0", "1"]
    seen = json.loads(told.out)
    assert (seen["schema"], seen["ended"]) == ("numapin.top/1", False)
    assert seen["interval_s"] > 0.99
    assert seen["swap_in_pages_per_s"] >= 0
    for rank in seen["ranks"]:
        assert (rank["threads"], rank["threads_off_plan"], rank["gone"]) == (2, 0, False)
        assert (rank["pinned_bytes"], rank["gpu_busy_share"]) == (0, None)


def test_the_loop_of_torchs_loader(tmp_path: Path) -> None:
    """The steps of every DataLoader are counted, also where the script is unmodified."""
    with staying_job(tmp_path, *NUMAPIN, "run", "--nproc-per-node", "1", num_ranks=1, job_script=LOADING_JOB):
        table, told = _top(tmp_path, "--once", "--interval", "2"), _top(tmp_path, "--once", "--json")
    (rank,) = json.loads(told.out)["ranks"]
    assert rank["loader_wait_share"] > 0.5, told
    heads, row = (line.split() for line in table.out.splitlines()[2:4])
    assert float(row[heads.index("steps/s")]) > 0


def test_job_that_ends_meanwhile(tmp_path: Path) -> None:
    """A job that ends during the sample is reported with status 0, in the JSON too."""
    command = [*NUMAPIN, "top", "--once", "--json", "--interval", "12"]
    environ = environment(NUMAPIN_RUN_DIR=str(tmp_path / "runs"))
    with staying_job(tmp_path, *NUMAPIN, "run", "--nproc-per-node", "1", num_ranks=1):
        top = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        syscall = Path(f"/proc/{top.pid}/syscall")
        assert wait_until(lambda: syscall.read_text().split()[0] in _SLEEPING, limit_s=60)
    out, err = top.communicate(timeout=60)
    assert (top.returncode, json.loads(out)["ended"]) == (0, True)
    assert err.endswith("the job ended\n")


class TestTerminal:
    """The live display."""

    def test_while_the_job_goes_on(self, tmp_path: Path) -> None:
        """Steps are shown in a window of any size; however `top` ends, the terminal is as before."""
        with staying_job(tmp_path, *NUMAPIN, "run", "--nproc-per-node", "2", num_ranks=2, job_script=STEPPING_JOB):
            self._follows_the_window(tmp_path)
            for number, expected in (
                (signal.SIGINT, (0, "")),
                (signal.SIGTERM, (143, "numapin: stopped by SIGTERM; the job goes on\n")),
                (signal.SIGQUIT, (131, "numapin: stopped by SIGQUIT; the job goes on\n")),
            ):
                terminal = _Terminal(tmp_path, NO_COLOR="1")
                terminal.read_until(b"50%")  # half of each step is waiting
                terminal.process.send_signal(number)
                assert terminal.end() == expected
                assert terminal.is_restored
                os.close(terminal.master)
            self._survives_a_stop_and_a_kill(tmp_path)
            self._loses_its_terminal(tmp_path)

    @staticmethod
    def _follows_the_window(folder: Path) -> None:
        """A larger window shows more columns, whatever COLUMNS says; one that reports no size counts as 80 columns."""
        terminal = _Terminal(folder)
        terminal.read_until(b"whole machine")
        terminal.resize(24, 160)
        terminal.read_until(b"  pid")
        terminal.resize(0, 0)
        terminal.read_until(b"whole machine", times=2)
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.end() == (0, "")
        os.close(terminal.master)

    @staticmethod
    def _survives_a_stop_and_a_kill(folder: Path) -> None:
        """The cursor is visible while the table is live, because nothing could show it after SIGSTOP or SIGKILL."""
        terminal = _Terminal(folder)
        seen = terminal.read_until(b"whole machine")
        assert seen.rfind(b"\x1b[?25h") > seen.rfind(b"\x1b[?25l")
        terminal.process.send_signal(signal.SIGSTOP)
        terminal.process.send_signal(signal.SIGCONT)
        terminal.read_until(b"whole machine")
        terminal.process.kill()
        terminal.end()
        assert termios.tcgetattr(terminal.master) == terminal.settings
        os.close(terminal.master)

    @staticmethod
    def _loses_its_terminal(folder: Path) -> None:
        """A terminal that is closed is reported as a plain error."""
        terminal = _Terminal(folder)
        terminal.read_until(b"whole machine")
        os.close(terminal.master)
        status, err = terminal.end()
        assert status == 1
        assert "the terminal is gone" in err
        assert "Traceback" not in err

    def test_last_figures_stay(self, tmp_path: Path) -> None:
        """When the job ends, `top` ends too and says why; the last figures of living ranks are left on the screen."""
        with staying_job(tmp_path, *NUMAPIN, "run", "--nproc-per-node", "1", num_ranks=1, job_script=STEPPING_JOB):
            terminal = _Terminal(tmp_path)
            terminal.read_until(b"50%")
        assert b"50%" in terminal.read_all().rpartition(b"whole machine")[2]
        assert terminal.end() == (0, "numapin: the job ended\n")
        os.close(terminal.master)


def test_stdout_and_file(tmp_path: Path) -> None:
    """One sample goes to stdout; the file follows the job; at the end, it says so only."""
    path = tmp_path / "numapin.prom"
    with staying_job(tmp_path, *NUMAPIN, "run", "--nproc-per-node", "2", num_ranks=2, job_script=STEPPING_JOB):
        once = _top(tmp_path, "--openmetrics", "--interval", "0.1")
        assert once.status == 0, once.err
        assert len(re.findall(r"^numapin_rank_steps_total{.*} [1-9]", once.out, re.MULTILINE)) == 2
        assert once.out.endswith("# EOF\n")
        with _exporting(tmp_path, str(path)) as writer:
            assert wait_until(lambda: path.exists() and "_steps_total" in path.read_text(), limit_s=60)
            (tmp_path / "end").touch()
            assert writer.wait(60) == 0
    assert "numapin_rank" not in path.read_text()
    assert "numapin_run_active" in path.read_text()


@contextmanager
def _exporting(folder: Path, target: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [*NUMAPIN, "top", "--interval", "0.1", "--openmetrics", target]
    environ = environment(NUMAPIN_RUN_DIR=str(folder / "runs"))
    with subprocess.Popen(command, env=environ, stderr=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def test_no_terminal(tmp_path: Path) -> None:
    """Without a terminal, an option must say what to write."""
    done = _top(tmp_path)
    assert (done.status, done.out, "stdout is not a terminal" in done.err) == (2, "", True), done.err


def test_terminal_that_cannot_draw(tmp_path: Path) -> None:
    """With TERM=dumb the message recommends a single sample."""
    terminal = _Terminal(tmp_path, TERM="dumb")
    status, err = terminal.end()
    os.close(terminal.master)
    assert status == 2
    assert "TERM=dumb" in err
    assert "numapin top --once" in err
