"""`numapin top` on real jobs and in a terminal; `--all` for root, also on runs of users not to trust."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import pwd
import re
import select
import shutil
import signal
import struct
import subprocess
import termios
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
from prometheus_client.openmetrics import parser as strict

from numapin import Bind, Memory, Plan
from tests.integration.launching import NUMAPIN, TORCH_QUICKLY, Done, environment, forked, numapin
from tests.integration.seam import NodeFollower, handover, node, proc, running_folders
from tests.integration.staying import STEPPING_JOB, staying_job
from tests.integration.test_security_folders import VICTIM, as_user
from tests.needs import needs_root
from tests.nvml.fake import FakeGpu, render
from tests.unit.planned import PLANNED
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

if TYPE_CHECKING:
    from tests.nvml.fake import FakeNvml

_SLEEPING = ("230", "115")  # clock_nanosleep on x86-64 and Arm: between the two samples
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

    def end(self) -> tuple[int, str]:
        with ThreadPoolExecutor() as thread:
            last = thread.submit(self.read_all)
            try:
                _, err = self.process.communicate(timeout=30)
            finally:
                self.process.kill()  # if it does not end: reading ends with it
            self.last = last.result()
        return self.process.returncode, err.decode()


def test_the_loop_of_torchs_loader(tmp_path: Path) -> None:
    """The steps of every DataLoader are counted, also where the script is unmodified."""
    with staying_job(tmp_path, job_script=LOADING_JOB):
        table, told = _top(tmp_path, "--once", "--interval", "2"), _top(tmp_path, "--once", "--json")
    (rank,) = json.loads(told.out)["ranks"]
    assert rank["loader_wait_share"] > 0.5, told
    heads, row = (line.split() for line in table.out.splitlines()[2:4])
    assert float(row[heads.index("steps/s")]) > 0


def test_job_that_ends_meanwhile(tmp_path: Path) -> None:
    """A job that ends during the sample is reported with status 0, in the JSON too."""
    command = [*NUMAPIN, "top", "--once", "--json", "--interval", "12"]
    environ = environment(NUMAPIN_RUN_DIR=str(tmp_path / "runs"))
    with staying_job(tmp_path):
        top = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        syscall = Path(f"/proc/{top.pid}/syscall")
        assert wait_until(lambda: syscall.read_text().split()[0] in _SLEEPING, limit_s=60)
    out, err = top.communicate(timeout=60)
    assert (top.returncode, json.loads(out)["ended"]) == (0, True)
    assert err.endswith("the job ended\n")


def test_in_a_terminal(tmp_path: Path) -> None:
    """Steps are shown in a window of any size; however `top` ends, the terminal is as before.

    When the job ends, `top` says so, and the last figures of living ranks are left on the screen.
    """
    with staying_job(tmp_path, num_ranks=2, job_script=STEPPING_JOB):
        # A larger window shows more columns, whatever COLUMNS says; one that reports no size counts as 80 columns.
        terminal = _Terminal(tmp_path)
        terminal.read_until(b"whole machine")
        terminal.resize(24, 160)
        terminal.read_until(b"  pid")
        terminal.resize(0, 0)
        terminal.read_until(b"whole machine", times=2)
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.end() == (0, "")
        for number, expected in (
            (signal.SIGINT, (0, "")),
            (signal.SIGTERM, (143, "numapin: stopped by SIGTERM; the job goes on\n")),
            (signal.SIGQUIT, (131, "numapin: stopped by SIGQUIT; the job goes on\n")),
        ):
            terminal = _Terminal(tmp_path, NO_COLOR="1")
            terminal.read_until(b"50%")  # half of each step is waiting
            terminal.process.send_signal(number)
            assert terminal.end() == expected
            assert b"\x1b[?25h" in terminal.last  # the cursor
            assert termios.tcgetattr(terminal.master) == terminal.settings
        # The cursor is visible while the table is live, because nothing could show it after SIGSTOP or SIGKILL.
        terminal = _Terminal(tmp_path)
        seen = terminal.read_until(b"whole machine")
        assert seen.rfind(b"\x1b[?25h") > seen.rfind(b"\x1b[?25l")
        terminal.process.send_signal(signal.SIGSTOP)
        terminal.process.send_signal(signal.SIGCONT)
        terminal.read_until(b"whole machine")
        terminal.process.kill()
        terminal.end()
        assert termios.tcgetattr(terminal.master) == terminal.settings
        # A terminal that is closed is a plain error.
        terminal = _Terminal(tmp_path)
        terminal.read_until(b"whole machine")
        os.close(terminal.master)
        status, err = terminal.end()
        assert (status, "the terminal is gone" in err, "Traceback" in err) == (1, True, False)
        terminal = _Terminal(tmp_path)
        terminal.read_until(b"50%")
    assert b"50%" in terminal.read_all().rpartition(b"whole machine")[2]
    assert terminal.end() == (0, "numapin: the job ended\n")


def test_openmetrics_of_one_job(tmp_path: Path) -> None:
    """One sample goes to stdout; the file follows the job; at the end, it says so only. A run is no file."""
    path = tmp_path / "numapin.prom"
    with staying_job(tmp_path, num_ranks=2, job_script=STEPPING_JOB):
        once = _top(tmp_path, "--openmetrics", "--interval", "0.1")
        assert once.status == 0, once.err
        swallowed = _top(tmp_path, "--openmetrics", "@last")
        assert (swallowed.status, "type: numapin top @last --openmetrics" in swallowed.err) == (2, True), swallowed.err
        assert len(re.findall(r"^numapin_rank_steps_total{.*} [1-9]", once.out, re.MULTILINE)) == 2
        assert once.out.endswith("# EOF\n")
        line = [*NUMAPIN, "top", "--interval", "0.1", "--openmetrics", str(path)]
        with subprocess.Popen(line, env=environment(NUMAPIN_RUN_DIR=str(tmp_path / "runs"))) as writer:
            try:
                assert wait_until(lambda: path.exists() and "_steps_total" in path.read_text(), limit_s=60)
                (tmp_path / "end").touch()
                assert writer.wait(60) == 0
            finally:
                writer.kill()
    assert "numapin_rank" not in path.read_text()
    assert "numapin_run_active" in path.read_text()


def test_where_nothing_can_be_drawn(tmp_path: Path) -> None:
    """Without a terminal an option must say what to write; with TERM=dumb the message recommends a single sample."""
    done = _top(tmp_path)
    assert (done.status, done.out, "stdout is not a terminal" in done.err) == (2, "", True), done.err
    status, err = _Terminal(tmp_path, TERM="dumb").end()
    assert (status, "TERM=dumb" in err, "numapin top --once" in err) == (2, True, True), err


# --- all runs of a host -----------------------------------------------------------------------------------------------

ATTACKER: Final = 65534
_SLEEP: Final = shutil.which("cat") or "/bin/cat"  # until its input ends; this Python may be root's only


def _of_runs(text: str, names: list[str]) -> list[tuple[str, dict[str, str], float]]:
    families = list(strict.text_string_to_metric_families(text))
    samples = [sample for family in families for sample in family.samples]
    return [(each.name, dict(each.labels), each.value) for each in samples if each.labels.get("run") in names]


def test_two_runs(tmp_path: Path) -> None:
    """Runs in different folders are found by their processes, with the batch system's job and the ranks' numbers."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    with (
        staying_job(first, num_ranks=2, job_script=STEPPING_JOB, LSB_JOBID="4711"),
        staying_job(second, job_script=STEPPING_JOB),
    ):
        done = forked("top", "--openmetrics", "--all", "--once", "--interval", "0.3")
        (name,), (other,) = (os.listdir(folder / "runs") for folder in (first, second))  # noqa: PTH208
    assert (done.status, done.err) == (0, "")
    found = _of_runs(done.out, [name, other])
    steps = {
        (labels["run"], labels["rank"], labels["local_rank"]): value
        for metric, labels, value in found
        if metric == "numapin_rank_steps_total"
    }
    assert steps.keys() == {(name, "0", "0"), (name, "1", "1"), (other, "0", "0")}
    assert min(steps.values()) > 0
    for _, labels, _ in found:
        assert labels["host"] == os.uname().nodename
        assert labels.get("job_id") == ("4711" if labels["run"] == name else None)
    assert "numapin_runs_unread " in done.out


def test_gpus(fake_nvml: FakeNvml, tmp_path: Path) -> None:
    """The load of each GPU is that of the run whose rank has it, and GPUs are read once for all runs."""
    uuid = "GPU-497f9be6-753d-e541-65dd-c97e2d4802b7"
    gpus = [FakeGpu(uuid=uuid, pci="00000000:1B:00.0", load=(87, 24_000_000), vram=(12, 80), power=350_000)]
    environ = fake_nvml.environment(tmp_path, render(gpus))
    settings = {name: environ[name] for name in ("LD_LIBRARY_PATH", "FAKE_NVML_DATA", "FAKE_NVML_LOG")}
    with staying_job(tmp_path, num_ranks=1, job_script=STEPPING_JOB, moved_to=None, **settings):
        (tmp_path / "calls").unlink()
        done = numapin("top", "--openmetrics", "--all", "--once", "--interval", "0.3", cwd=None, **settings)
        (name,) = os.listdir(tmp_path / "runs")  # noqa: PTH208
    assert done.status == 0, done.err
    values = {metric: value for metric, labels, value in _of_runs(done.out, [name]) if labels.get("uuid") == uuid}
    assert values["numapin_gpu_busy_ratio"] == pytest.approx(0.87)
    assert values["numapin_gpu_memory_used_bytes"] == 12 << 20
    assert values["numapin_gpu_power_watts"] == pytest.approx(350)
    assert (tmp_path / "calls").read_text().count("nvmlDeviceGetUtilizationRates") == 2  # two samples


def test_a_service(tmp_path: Path) -> None:
    """The file follows runs that start and end; when the service ends, it has no metrics; it can be read by all."""
    path = tmp_path / "numapin.prom"
    command = [*NUMAPIN, "top", "--interval", "0.2", "--openmetrics", str(path), "--all"]
    with subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True) as service:
        try:
            assert wait_until(path.exists, limit_s=60)
            with staying_job(tmp_path, job_script=STEPPING_JOB):
                (name,) = os.listdir(tmp_path / "runs")  # noqa: PTH208
                assert wait_until(lambda: f'numapin_rank_up{{run="{name}"' in path.read_text(), limit_s=60)
            assert wait_until(lambda: name not in path.read_text(), limit_s=60)
            service.send_signal(signal.SIGTERM)
            _, err = service.communicate(timeout=60)
        finally:
            service.kill()
    assert (service.returncode, err) == (143, "numapin: stopped by SIGTERM; the job goes on\n")
    assert path.read_text() == "# EOF\n"
    assert path.stat().st_mode & 0o444 == 0o444


# --- runs of users that root cannot trust ----------------------------------------------------------------------------


@contextmanager
def _planted(folder: Path, *, rank_pid: int | None = None) -> Iterator[int]:
    """Make a live run of another user with one rank; yield its process. `rank_pid` is the one that the record names."""
    folder.mkdir(mode=0o700)
    with subprocess.Popen(
        _SLEEP,
        env={"NUMAPIN_RUN_DIR": str(folder), "RANK": "5"},
        stdin=subprocess.PIPE,
        user=ATTACKER,
        group=ATTACKER,
        extra_groups=[],
        cwd="/",
    ) as rank:
        pid = rank_pid or rank.pid
        plan = Plan(bind=Bind.NODE, memory=Memory.PREFERRED, ranks=(PLANNED,)).to_json()
        record = {"schema": "numapin.observed/1", "local_rank": 0, "rank": 5, "restart": 0, "applied": {}}
        record |= {"pid": pid, "start": proc.stat(proc.folder_of(pid)).start, "host": os.uname().nodename}
        for name, content in ((handover.PLAN, plan), (f"{handover.OBSERVED}0-0.json", record)):
            (folder / name).write_text(json.dumps(content))
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for path in (folder, *folder.iterdir()):
                os.chown(path, ATTACKER, ATTACKER)
            try:
                yield rank.pid
            finally:
                rank.communicate(b"\n")


def _seen(folder: Path) -> tuple[bool, bool]:
    """Look at all runs; return whether this one is among them, and whether it counts as one that cannot be read."""
    follower = NodeFollower(dict, {})
    follower.look()
    return folder.name in {top.run for top, _ in follower.look()}, str(folder) in follower.unread


@pytest.fixture
def open_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("others")
    for path in (folder, *folder.parents):
        if not path.stat().st_mode & 0o001:
            path.chmod(path.stat().st_mode | 0o111)
    return folder


@needs_root
@pytest.mark.xdist_group("runs of another user")  # the number of which is bounded
class TestOthers:
    """Root looks at the runs of all users."""

    def test_a_run_of_another_user(self, open_folder: Path) -> None:
        """Its metrics have the user's name; other users but root do not see it."""
        folder = open_folder / "run-theirs"
        with _planted(folder):
            assert _seen(folder) == (True, False)
            follower = NodeFollower(dict, {})
            follower.look()
            ((_, origin),) = [each for each in follower.look() if each[0].run == folder.name]
            assert (origin.user, origin.ranks) == (pwd.getpwuid(ATTACKER).pw_name, {0: 5})
            assert str(folder) in running_folders()
            assert as_user(ATTACKER, running_folders) == {str(folder): ATTACKER}
            assert str(folder) not in as_user(VICTIM, running_folders)

    def test_too_many_runs_of_one_user(self, open_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """No user can fill the file: more runs than a bound are only counted."""
        first, second = open_folder / "run-1", open_folder / "run-2"
        monkeypatch.setattr(node, "_MOST_RUNS", 1)
        with _planted(first), _planted(second):
            follower = NodeFollower(dict, {})
            follower.look()
            runs = {top.run for top, _ in follower.look()}
            assert {str(first), str(second)} & follower.unread == {str(first)}
            assert (second.name in runs, first.name in runs) == (True, False)

    def test_a_record_that_names_another_users_process(self, open_folder: Path) -> None:
        """Nothing is published about a process that is not the run's user's."""
        folder = open_folder / "run-spy"
        with _planted(folder, rank_pid=os.getpid()):
            assert _seen(folder) == (False, False)

    @pytest.mark.parametrize("what", ["link", "pipe", "huge file", "third user's file", "many records"])
    def test_files_that_no_run_writes(self, open_folder: Path, what: str) -> None:
        """A run with a trap in its folder is counted as unread; the others are not held up."""
        folder, good = open_folder / "run-trap", open_folder / "run-good"
        with _planted(folder), _planted(good):
            plan = folder / handover.PLAN
            content = plan.read_text()
            plan.unlink()
            if what == "link":
                (open_folder / "target").write_text(content)
                plan.symlink_to(open_folder / "target")
            elif what == "pipe":
                os.mkfifo(plan)
            elif what == "huge file":
                with plan.open("w") as file:
                    file.truncate(1 << 30)
            elif what == "third user's file":
                plan.write_text(content)
            else:
                plan.write_text(content)
                for number in range(6):
                    (folder / f"{handover.OBSERVED}1-{number}.json").write_text(" " * (15 << 20))
            if plan.is_file() and not plan.is_symlink():
                os.chown(plan, 4711 if what == "third user's file" else ATTACKER, ATTACKER)
            for path in folder.glob(f"{handover.OBSERVED}1-*"):
                os.chown(path, ATTACKER, ATTACKER)
            assert _seen(folder) == (False, True)
            assert _seen(good) == (True, False)
