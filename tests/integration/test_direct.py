"""`numapin run` on one host, without torch in the launcher: its start, its store, its end, and signals at any time.

How jobs of several hosts end, too, where torch lets them meet.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.integration.faulty import Job, handles, meeting
from tests.integration.launching import NUMAPIN, call, environment, numapin, script
from tests.waiting import gone, wait_until

DIRECT = ("run", "--quiet")
TWO = ("--nproc-per-node", "2")
LIMIT_S = 60
TERMINATED = (128 + signal.SIGTERM, "numapin: stopped by SIGTERM; no rank is running\n")

LOOKS = """
import json, os
launcher = f"/proc/{os.getppid()}"
status = dict(line.split(":", 1) for line in open(f"{launcher}/status"))
found = {"peak_kb": int(status["VmHWM"].split()[0]), "maps": open(f"{launcher}/maps").read()}
os.write(1, (json.dumps(found) + "\\n").encode())
"""

MEETS = """
import os, sys
if os.environ.pop("AGAIN", "") and "again" not in sys.argv:
    os.execv(sys.executable, [sys.executable, "-I", __file__, "again"])
import torch, torch.distributed as dist
dist.init_process_group("gloo")
ranks = [None] * 2
dist.all_gather_object(ranks, dist.get_rank())
dist.new_group([1, 0])
dist.monitored_barrier()
dist.destroy_process_group()
os.write(1, f"{ranks}\\n".encode())
"""


FIRST_STATEMENTS = """
import os, signal, sys
sys.modules["numapin.cli.main"] = None  # what comes next cannot be imported
sys.argv[1:] = [{command!r}]
from numapin.cli.entry import main
try:
    main()
except ImportError:
    pass
os.kill(os.getpid(), signal.SIGUSR1)
os.kill(os.getpid(), signal.SIGUSR2)
print("lives", *sorted(sys.modules.keys() & {{"enum", "typing", "re", "click"}}))
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


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Give a function that starts two ranks, or what options say, with a script; end what is left afterwards."""
    yield lambda text, *options, **given: Job(tmp_path / "job", [*(options or TWO)], text, **given)
    while Job.started:
        Job.started.pop().clean()


def test_the_launcher_stays_small(tmp_path: Path) -> None:
    """The launcher never loads torch, and takes at most 40 MB."""
    done = call(*NUMAPIN, *DIRECT, *TWO, script(tmp_path, LOOKS))
    assert done.status == 0, done.err
    ranks = [json.loads(line) for line in done.out.splitlines()]
    assert len(ranks) == 2
    for rank in ranks:
        assert "/torch/" not in rank["maps"]
        assert "/site-packages/numa" in rank["maps"] or "libnuma" in rank["maps"]  # it is the launcher's
        assert rank["peak_kb"] <= 40_000


def test_automatic_choice(tmp_path: Path) -> None:
    """--dry-run, --verbose and the report say whether torch's store is used, and why."""
    path, report = script(tmp_path, ""), tmp_path / "report.json"
    direct = "launcher: direct, without torch: one host"
    done = numapin("run", "--dry-run", "--max-restarts", "1", path, PET_NNODES="1")
    assert (done.status, f"numapin: {direct}\n" in done.err) == (0, True), done.err
    done = numapin("run", "--dry-run", "--nnodes", "1:2", path)
    assert (done.status, "numapin: launcher: with torch's store: --nnodes 2\n" in done.err) == (0, True), done.err
    assert numapin("run", "--verbose", "--report", str(report), path).err.count(f"numapin: {direct}\n") == 1
    assert json.loads(report.read_text())["launcher"] == {"name": "direct", "reason": "one host"}
    assert "launcher" not in numapin("run", path).err


def test_the_store_of_a_newer_torch(tmp_path: Path) -> None:
    """If numapin does not know the store of the installed torch, torch serves it; the report says so."""
    installed, newer, report = Path(torch.__file__).parent, tmp_path / "path" / "torch", tmp_path / "report.json"
    newer.mkdir(parents=True)
    for entry in installed.iterdir():
        if entry.name not in ("include", "version.py"):
            (newer / entry.name).symlink_to(entry)
    version = re.sub("__version__ = .*", "__version__ = '99.0'", (installed / "version.py").read_text())
    (newer / "version.py").write_text(version)
    options = ("run", "--quiet", *TWO, "--report", str(report))
    path = script(
        tmp_path,
        "import os, socket\n"
        "socket.create_connection((os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT'])))\n"
        "os.write(1, b'served\\n')\n",
    )
    done = call(*NUMAPIN, *options, path, PYTHONPATH=str(newer.parent))
    assert (done.status, done.out) == (0, "served\n" * 2), done.err
    reason = "this numapin does not know the store of torch 99.0"
    assert json.loads(report.read_text())["launcher"] == {"name": "agent", "reason": reason}


def test_ranks_meet(tmp_path: Path) -> None:
    """Ranks make process groups over the launcher's store, also after they became another, isolated Python."""
    done = numapin(*DIRECT, *TWO, script(tmp_path, MEETS), AGAIN="1")
    assert (done.status, done.out) == (0, "[0, 1]\n" * 2), done.err


def test_stdin_and_programs(tmp_path: Path) -> None:
    """Ranks inherit stdin, as under torchrun, and may be any program."""
    rank = ("--nproc-per-node", "1", "--no-python", "sh", "-c", "cat; echo rank ${local_rank}")
    done = call("sh", "-c", 'echo typed | "$@"', "sh", *NUMAPIN, *DIRECT, *rank, cwd=tmp_path)
    assert (done.status, done.out) == (0, "typed\nrank 0\n"), done.err


def test_a_script_on_stdin_is_refused() -> None:
    """Only one rank would get it, and the others run nothing and succeed."""
    done = call(*NUMAPIN, *DIRECT, "-")
    assert (done.status, "a script on stdin would reach one rank only" in done.err) == (2, True), done.err


@pytest.mark.parametrize(("command", "status"), [("run", 0), ("trace", 0), ("topo", -signal.SIGUSR1)])
def test_signals_are_held_back_before_anything_is_imported(command: str, status: int) -> None:
    """The first statements of a launcher block SIGUSR1 and SIGUSR2; other commands keep their usual effect."""
    code = FIRST_STATEMENTS.format(command=command)
    done = call(sys.executable, "-c", code)
    assert done.status == status
    assert command != "run" or done.out == "lives enum\n"  # from the test's own `signal`


@pytest.mark.parametrize(("options", "status"), [((), 0), (("--signals-to-handle", "SIGHUP"), 128 + signal.SIGHUP)])
def test_nohup(tmp_path: Path, options: tuple[str, ...], status: int) -> None:
    """Under nohup, neither the launcher nor its ranks end with the terminal, unless the user asks for SIGHUP."""
    kill = "for pid in (os.getppid(), os.getpid()): os.kill(pid, signal.SIGHUP)"
    path = script(tmp_path, f"import os, signal, time\n{kill}\ntime.sleep(1)\n")
    done = call("nohup", *NUMAPIN, "run", "--quiet", "--nproc-per-node", "1", *options, path)
    assert done.status == status, done.err


def test_a_signal_in_the_first_milliseconds_reaches_the_rank(tmp_path: Path) -> None:
    """A signal that comes as soon as the launcher holds it back is delivered once the rank handles it."""
    handler = "lambda *_: (print('took', flush=True), sys.exit())"
    text = f"import signal, sys, time\nsignal.signal(signal.SIGUSR1, {handler})\ntime.sleep(60)\n"
    command = [*NUMAPIN, *DIRECT, script(tmp_path, text)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) as process:
        assert wait_until(lambda: handles(process.pid, signal.SIGUSR1, "SigBlk"), limit_s=60)
        process.send_signal(signal.SIGUSR1)
        assert process.communicate(timeout=120)[0] == "took\n"
    assert process.returncode == 0


def test_port(tmp_path: Path) -> None:
    """The store listens on one address before any rank starts; a port that is in use is status 2."""
    path = script(
        tmp_path,
        "import os, socket\n"
        "port = int(os.environ['MASTER_PORT'])\n"
        "socket.create_connection((os.environ['MASTER_ADDR'], port)).close()\n"
        "for address in ('127.0.0.1', '0.0.0.0'):\n"
        "    with socket.socket() as other:\n"
        "        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)\n"
        "        try: other.bind((address, port)); other.listen()\n"
        "        except OSError: print('closed', os.environ['MASTER_ADDR'])\n",
    )
    done = numapin(*DIRECT, "--local-addr", "127.0.0.3", path)
    assert (done.status, done.out) == (0, "closed 127.0.0.3\n"), done.err
    done = numapin(*DIRECT, path)
    assert (done.status, done.out) == (0, "closed 127.0.0.1\n" * 2), done.err
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = numapin(*DIRECT, "--master-port", str(taken.getsockname()[1]), path)
    assert done.status == 2
    assert "hint: choose another --master-port" in done.err


class TestEnds:
    """Ranks that fail, and signals to the launcher."""

    def test_two_sigterms(self, start: Callable[..., Job]) -> None:
        """A second SIGTERM does not cut the grace period short, and the ranks get a SIGUSR1 that came at once before.

        Some schedulers send them so.
        """
        job = start(
            "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})\n"
            "def save(*_): time.sleep(0.5); mark(f'saved{len(signal.sigpending())}'); sys.exit(0)\n"
            "signal.signal(signal.SIGTERM, save); mark('here'); time.sleep(300)\n"
        )
        job.await_marks("here", 2)
        for number in (signal.SIGSTOP, signal.SIGUSR1, signal.SIGTERM, signal.SIGCONT):
            job.process.send_signal(number)
        time.sleep(0.1)  # so that the kernel does not merge them
        job.process.send_signal(signal.SIGTERM)
        assert (job.wait(), job.err, len(job.marked("saved1"))) == (*TERMINATED, 2)

    def test_what_a_rank_started_has_the_grace_period(self, start: Callable[..., Job]) -> None:
        """The rank ends at once, as a shell does; its children save, in its process group or in one of their own."""
        job = start(
            "def save(*_): time.sleep(0.5); mark(f'saved{group}'); os._exit(0)\n"
            "for group in (0, 1):\n"
            "    if os.fork() == 0:\n"
            "        if group: os.setpgrp()\n"
            "        signal.signal(signal.SIGTERM, save); mark(f'here{group}'); time.sleep(300)\n"
            "time.sleep(300)\n"
        )
        job.await_marks("here?", 4)
        job.process.send_signal(signal.SIGTERM)
        assert job.wait() == TERMINATED[0]
        assert job.marked("saved?") == job.marked("here?")
        assert wait_until(lambda: all(gone(pid) for *_, pid in job.marked("here?")), limit_s=LIMIT_S)

    def test_a_scheduler_that_signals_every_process(self, start: Callable[..., Job]) -> None:
        """A job is stopped, and has not failed, if a rank died of the signal that then reaches the launcher."""
        job = start(
            "def save(*_): mark('saves'); wait_for('sent'); sys.exit(0)\n"
            "if rank == '0': signal.signal(signal.SIGTERM, save)\n"
            "mark('here'); time.sleep(300)\n"
        )
        job.await_marks("here", 2)
        os.kill(job.marked("here")[1][2], signal.SIGTERM)
        job.await_marks("saves", 1)
        job.process.send_signal(signal.SIGTERM)
        (job.marks / "sent").touch()
        assert (job.wait(), job.err) == TERMINATED

    @pytest.mark.parametrize("after_s", [0.05, 0.15])
    def test_a_signal_at_any_time(self, start: Callable[..., Job], after_s: float) -> None:
        """A launcher that gets SIGTERM while it starts leaves no rank behind."""
        job = start("mark('here'); time.sleep(300)\n")
        time.sleep(after_s)
        job.process.send_signal(signal.SIGTERM)
        assert job.wait() in (TERMINATED[0], -signal.SIGTERM)
        assert wait_until(lambda: job.processes() == [], limit_s=LIMIT_S)


def test_the_rank_behind_a_virtual_number_has_its_gpu(tmp_path: Path) -> None:
    """--virtual-local-rank without an entry for a rank is status 2."""
    text = 'import os\nline = f\'{os.environ["LOCAL_RANK"]} {os.environ["CUDA_VISIBLE_DEVICES"]}\\n\'\n'
    path = script(tmp_path, f"{text}os.write(1, line.encode())\n")  # at once: ranks share stdout
    done = numapin(*DIRECT, "--virtual-local-rank", *TWO, path, CUDA_VISIBLE_DEVICES="7, 5")
    assert (done.status, sorted(done.out.splitlines())) == (0, ["0 5", "0 7"]), done.err
    done = numapin(*DIRECT, "--virtual-local-rank", *TWO, path, CUDA_VISIBLE_DEVICES="7")
    assert done.status == 2
    assert done.out == ""


# --- jobs that fail --------------------------------------------------------------------------------------------------


def test_a_signal_while_a_failed_job_ends(start: Callable[..., Job]) -> None:
    """It decides the exit status; the ranks get it, too, and the block says what had failed before."""
    job = start(GRACE)
    job.await_marks("asked1", 1)
    job.process.send_signal(signal.SIGHUP)
    assert job.wait() == 128 + signal.SIGHUP
    assert job.marked("SIGTERM_SIGHUP")
    block, _, last = job.err.partition("numapin: stopped by ")
    assert block.startswith("numapin: error: ")
    assert "rank    1, the first to fail" in block
    assert "failed  exit status 7\n" in block
    assert "others  1 was running and ended by numapin (exit status 0)\n" in block
    assert last == "SIGHUP; no rank is running\n"


CLOSED = """
signal.signal(signal.SIGTERM, lambda *_: (mark("asked"), wait_for("waiting"), sys.exit()))
mark("here"); wait_for("here.*", 3)
if os.environ["HOST"] == "1": wait_for("asked.*"); sys.exit(8)
if os.environ["LOCAL_RANK"] == "0": sys.exit(7)
time.sleep(300)
"""


def test_another_host_gives_up(start: Callable[..., Job]) -> None:
    """A host that waits for it, to restart its ranks, ends with its own failure and without a traceback."""
    together, jobs = [*meeting(), "--nnodes", "2"], []
    for host, options in enumerate(([*TWO], ["--nproc-per-node", "1", "--max-restarts", "1"])):
        jobs.append(start(CLOSED, *together, "--rdzv-conf", f"is_host={host}", *options, HOST=str(host)))
    first, other = jobs
    wait_until(lambda: "are restarted" in other.err or other.process.poll() is not None, limit_s=LIMIT_S)
    (first.marks / "waiting").touch()
    assert (first.wait(), other.wait()) == (1, 1), f"{first.err}\n---\n{other.err}"
    said = "the ranks are restarted.*numapin: the job has ended on another host; the ranks are not restarted\n"
    assert re.search(f"{said}.*failed  exit status 8\n", other.err, re.DOTALL), other.err
    assert "Traceback" not in other.err


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
        jobs.append(start(APART, *together, *elastic, "--nproc-per-node", "1", HOST=str(host)))
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
