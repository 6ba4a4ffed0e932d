"""Several launchers on one host that know each other: their roll call, and how a job on several hosts ends."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.integration.faulty import PRELUDE
from tests.integration.launching import NUMAPIN, environment, free_port, script
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

LIMIT_S = 90
HOST = os.uname().nodename
ENDS = {signal.SIGINT: -signal.SIGINT, signal.SIGTERM: 128 + signal.SIGTERM}
SECRET = "0123456789abcdef0123456789abcdef"  # noqa: S105 - of no use elsewhere
STAY = "mark('ready'); time.sleep(300)\n"


class Job:
    """The launchers of a job, by the order in which they were started. Its ranks leave their marks in its folder."""

    def __init__(self, folder: Path, text: str = "") -> None:
        self.folder, self.script, self.port = folder, script(folder, PRELUDE + text), free_port()
        self.launchers: list[subprocess.Popen[bytes]] = []

    def start(
        self,
        number: int,
        *options: str,
        of: int = 2,
        ranks: int = 1,
        by_manager: bool = False,
        address: tuple[str, ...] = ("--master-addr=127.0.0.1",),
        program: tuple[str, ...] = NUMAPIN,
        **changes: str,
    ) -> subprocess.Popen[bytes]:
        numbers = () if by_manager else (f"--nnodes={of}", f"--node-rank={number}")
        words = (*numbers, *address, f"--master-port={self.port}", f"--nproc-per-node={ranks}", *options)
        with (self.folder / f"err.{len(self.launchers)}").open("w") as err:
            launcher = subprocess.Popen(
                [*program, "run", "--quiet", *words, self.script, str(self.folder)],
                stdout=subprocess.DEVNULL,
                stderr=err,
                env=environment(CUDA_VISIBLE_DEVICES="", **changes),
                start_new_session=True,
            )
        self.launchers.append(launcher)
        return launcher

    def start_all(self, num_hosts: int) -> None:
        for number in range(num_hosts):
            self.start(number, of=num_hosts, PYTHONIOENCODING="utf-8")

    def err(self, launcher: int) -> str:
        """Return what a launcher and its ranks wrote to stderr, each text in one line."""
        return " ".join((self.folder / f"err.{launcher}").read_text().split())

    def await_said(self, launcher: int, text: str) -> None:
        assert wait_until(lambda: text in self.err(launcher), limit_s=LIMIT_S), self.err(launcher)

    def await_marks(self, word: str, count: int) -> None:
        marked = wait_until(lambda: len([*self.folder.glob(f"{word}.*")]) == count, limit_s=LIMIT_S)
        assert marked, [self.err(launcher) for launcher in range(len(self.launchers))]

    def await_listening(self) -> None:
        def listens() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", self.port)) == 0

        assert wait_until(listens, limit_s=LIMIT_S)

    def assert_ends(self, *statuses: int) -> None:
        """Wait for all launchers, then until no rank is left; compare how the launchers ended."""
        ended = [launcher.wait(LIMIT_S) for launcher in self.launchers]
        assert wait_until(lambda: not processes_with(self.script), limit_s=LIMIT_S), processes_with(self.script)
        assert ended == [*statuses], [self.err(launcher) for launcher in range(len(ended))]


def processes_with(text: str) -> list[int]:
    """Return the processes whose command lines have a text."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if text.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Return a folder, and end what is left of the job in it."""
    yield tmp_path
    for pid in processes_with(str(tmp_path)):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def line(**message: object) -> bytes:
    """Return a message between launchers, without a signature."""
    return f"- {json.dumps(message)}\n".encode()


GREETING = line(numapin=1, nonce=SECRET)


def hello(host: int) -> bytes:
    return line(kind="hello", host=host, hosts=2, ranks=1, name="n", role="", job="")


def test_the_numbers_of_ranks(folder: Path) -> None:
    """Hosts with different numbers of ranks; rank 0 can listen on MASTER_PORT while the launchers' connections stay.

    As torch's store does: on all addresses, with SO_REUSEADDR. The launchers import no torch.
    """
    text = """
import json, socket
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK"
told = [" ".join(os.environ[name] for name in names.split())]
told += [os.environ[name] for name in ("TORCHELASTIC_USE_AGENT_STORE", "MASTER_ADDR", "MASTER_PORT")]
told += ["torch" in open(f"/proc/{os.getppid()}/maps").read(), os.environ["TORCHELASTIC_RUN_ID"]]
if rank == "0":
    socket.create_server(("", int(os.environ["MASTER_PORT"])))
json.dump(told, open(f"{folder}/rank.{rank}", "w"))
"""
    job = Job(folder, text)
    job.start(2, of=3)
    job.start(0, of=3, ranks=2)
    job.start(1, of=3, ranks=3)
    job.assert_ends(0, 0, 0)
    told = [json.loads((folder / f"rank.{rank}").read_text()) for rank in range(6)]
    assert [each[0] for each in told] == [
        *("0 0 6 2 0 3 0", "1 1 6 2 0 3 1"),
        *("2 0 6 3 1 3 2", "3 1 6 3 1 3 3", "4 2 6 3 1 3 4"),
        "5 0 6 1 2 3 5",
    ]
    assert {(*each[1:5],) for each in told} == {("False", "127.0.0.1", str(job.port), False)}
    assert len({each[5] for each in told}) == 1, "one run id"


@pytest.mark.parametrize(
    ("hosts", "statuses", "said"),
    [
        pytest.param(
            {0: ("--nnodes=4", "--rdzv-conf=join_timeout=20"), 1: ("--nnodes=4",)},  # also on a busy machine 1 comes
            (1, 1),
            (
                "numapin: error: hosts 2-3 of 4 did not come to {where} in 20 s",
                "numapin: error: host 0 reports: hosts 2-3 of 4 did not come to {where} in 20 s",
            ),
            id="hosts are missing",
        ),
        pytest.param(
            {1: ("--local-addr=127.0.0.1", "--rdzv-conf=join_timeout=1,read_timeout=5")},
            (1,),
            (
                "a roll call, on which --rdzv-conf read_timeout, --local-addr has no effect.*"
                "host 0 did not answer at {where} in 1 s: Connection refused",
            ),
            id="host 0 is missing",
        ),
        pytest.param(
            {0: (), 1: ("--log-dir=/proc/nothing",)},
            (1, 2),
            ("no folder for logs can be made in /proc/nothing",) * 2,
            id="no folder for logs",
        ),
        *(
            pytest.param({0: (option,)}, (2,), (f"{problem} hint: give HOST:PORT and join_timeout=SECONDS",), id=option)
            for option, problem in (
                ("--rdzv-endpoint=localhost:99999", "there is no port 99999"),
                ("--rdzv-endpoint=:29577", "it names no host"),
                ("--rdzv-conf=join_timeout=nan", "nan is not a time in seconds"),
            )
        ),
    ],
)
def test_why_a_job_ends_before_it_starts(
    folder: Path, hosts: dict[int, tuple[str, ...]], statuses: tuple[int, ...], said: tuple[str, ...]
) -> None:
    """Each launcher says who is missing and where that was seen, or why another one could not start its ranks."""
    job = Job(folder, STAY)
    for number, options in hosts.items():
        job.start(number, *options)
    job.assert_ends(*statuses)
    for launcher, text in enumerate(said):
        assert re.search(text.format(where=f"127.0.0.1 port {job.port}"), job.err(launcher)), job.err(launcher)


@pytest.mark.parametrize(("stopped", "number"), [(0, signal.SIGINT), (1, signal.SIGTERM)])
def test_the_wait_is_reported(folder: Path, stopped: int, number: signal.Signals) -> None:
    """After 10 s, long before the time limit, each launcher says for whom it waits, and how not to.

    A connection that says nothing is closed then, but not refused: a slow host comes again. A signal to one launcher
    stops both.
    """
    job = Job(folder)
    job.start(0, of=3)
    job.await_listening()
    silent = socket.create_connection(("127.0.0.1", job.port), timeout=LIMIT_S)
    job.start(1, of=3)
    job.await_said(0, f"waiting for host 2 of 3 at 127.0.0.1 port {job.port} (")
    job.await_said(1, f"waiting for the other hosts; host 0 at 127.0.0.1 port {job.port} says which")
    assert " of 900 s)" in job.err(0)
    assert "for a job on this host only: numapin run --standalone" in job.err(0)
    with silent:
        assert "refused" not in silent.makefile().read()
    job.launchers[stopped].send_signal(number)
    job.assert_ends(ENDS[number], ENDS[number])
    assert f"host {stopped} ({HOST}) was stopped by {number.name}, and so is this one" in job.err(1 - stopped)


@pytest.mark.parametrize(
    ("others", "problem"),
    [(((1, 3), (1, 3)), "two hosts have the number 1: "), (((2, 4),), "the hosts disagree on their number: ")],
)
def test_hosts_that_contradict_each_other(folder: Path, others: tuple[tuple[int, int], ...], problem: str) -> None:
    """Each of them says so, at once."""
    job = Job(folder)
    job.start(0, of=3)
    for number, of in others:
        job.start(number, of=of)
    job.assert_ends(1, *(1 for _ in others))
    assert all(problem in job.err(launcher) for launcher in range(len(job.launchers)))


def test_a_port_in_use(folder: Path) -> None:
    """Host 0 says so at once, the others in time; before, one does not say that it knows who is missing."""
    job = Job(folder)
    with socket.create_server(("127.0.0.1", job.port)):
        job.start(0)
        job.start(1, "--rdzv-conf=join_timeout=0")
        job.start(1)
        job.await_said(2, f"waiting for host 0 at 127.0.0.1 port {job.port}, which says nothing")
        job.launchers[2].terminate()
        job.assert_ends(1, 1, 143)
    assert f"host 0 cannot listen on port {job.port}: Address already in use" in job.err(0)
    assert "host 0 did not answer" in job.err(1)
    assert "it is not a launcher of numapin" in job.err(1)


def test_strangers_do_not_hold_up_the_roll_call(folder: Path) -> None:
    """One says nothing, others say what no launcher says; those are told why they are refused.

    One that comes at the limit of open files is accepted later.
    """
    job = Job(folder)
    launcher = job.start(0)
    job.await_listening()
    garbage = [
        *(b"GET / HTTP/1.0\r\n\r\n", b"\xff\xfe\n", b"- [1]\n", b"- " + b"[" * 4000 + b"\n", b"x" * 9000),
        *(line(numapin=99, nonce=""), line(numapin=True, nonce=""), line(nonce="")),
        *(GREETING + line(kind="hello"), GREETING + line(kind="stopped", signal=15)),
        *(GREETING + hello(-1), GREETING + hello(1).replace(b"-", b"f00", 1)),
    ]
    with socket.create_connection(("127.0.0.1", job.port)):
        for text in garbage:
            with socket.create_connection(("127.0.0.1", job.port)) as stranger:
                stranger.settimeout(LIMIT_S)
                stranger.sendall(text)
                answer = b""
                try:
                    while part := stranger.recv(4096):
                        answer += part
                except ConnectionResetError:
                    continue  # it had sent more than was read
                assert b'"refused"' in answer, text
        limits = resource.prlimit(launcher.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(launcher.pid, resource.RLIMIT_NOFILE, (3, limits[1]))
        with socket.create_connection(("127.0.0.1", job.port)):
            time.sleep(0.2)
            resource.prlimit(launcher.pid, resource.RLIMIT_NOFILE, limits)
        job.start(1)
        job.assert_ends(0, 0)


def test_a_secret_signs_what_hosts_say(folder: Path) -> None:
    """With one PET_RDZV_ID the job runs. A launcher without it, or with another one, ends at once; host 0 waits on.

    Where host 0 has several addresses, a launcher of another job at one of them does not end the search.
    """
    job = Job(folder, "print(os.environ['TORCHELASTIC_RUN_ID'], file=sys.stderr)")
    job.start(0, PET_RDZV_ID=SECRET)
    several = ("--master-addr=127.0.0.1,nowhere.invalid", "--rdzv-conf=join_timeout=2")
    strangers = (
        *(job.start(1), job.start(1, PET_RDZV_ID=f"{SECRET}0")),
        job.start(1, *several, PET_RDZV_ID=f"{SECRET}0"),
    )
    assert [stranger.wait(LIMIT_S) for stranger in strangers] == [1, 1, 1]
    refused = f"host 0 at 127.0.0.1 port {job.port} was refused, because its messages are not signed with the"
    assert all(f"{refused} rendezvous id of this host (PET_RDZV_ID)" in job.err(launcher) for launcher in (1, 2))
    assert all("hint: set the same PET_RDZV_ID on all hosts" in job.err(launcher) for launcher in (1, 2))
    assert "host 0 did not answer at 127.0.0.1,nowhere.invalid" in job.err(3)
    assert job.launchers[0].poll() is None
    job.start(1, PET_RDZV_ID=SECRET)
    job.assert_ends(0, 1, 1, 1, 0)
    assert job.err(0) == job.err(4), "the same id for all ranks"
    assert SECRET not in job.err(0)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_fails(folder: Path, failing: int) -> None:
    """On every host the block names the rank and the host, also if JSON has 12 bytes a character; no rank is left."""
    job = Job(folder, f"if rank == '{failing}': sys.exit('\\U0001f600' * 400)\ntime.sleep(300)\n")
    job.start_all(3)
    job.assert_ends(1, 1, 1)
    for number in range(3):
        where = "" if number == failing else f": host {failing} ({HOST})"
        assert f"rank {failing}" in job.err(number)
        assert f"the first to fail{where}" in job.err(number)
        assert "failed SystemExit: \U0001f600" in job.err(number)


def test_a_rank_fails_after_others_have_succeeded(folder: Path) -> None:
    """Hosts that are done leave, except host 0, which reports the failure, too."""
    job = Job(folder, "mark('ready')\nif rank == '1': wait_for('left'); sys.exit('no data')\n")
    job.start_all(3)
    job.await_marks("ready", 3)
    assert job.launchers[2].wait(LIMIT_S) == 0
    left = wait_until(lambda: len(processes_with(job.script)) == 3, limit_s=LIMIT_S)
    assert left, "two launchers and rank 1 are left"
    (folder / "left").touch()
    job.assert_ends(1, 1, 0)
    assert "rank 1, the first to fail: host 1" in job.err(0)
    assert "here 1 had finished" in job.err(0)


def test_the_cause_comes_before_its_consequences(folder: Path) -> None:
    """A rank that has lost its connection ends first; all hosts name the one that had failed, and takes time to end."""
    text = """
if rank == "1":
    import atexit
    atexit.register(time.sleep, 60)
    mark("failed")
    raise ValueError("the cause")
wait_for("failed.*")
time.sleep(0.5)
raise RuntimeError("gloo: Connection closed by peer")
"""
    job = Job(folder, text)
    job.start_all(2)
    job.assert_ends(1, 1)
    assert "rank 1, the first to fail: host 1" in job.err(0)
    assert "rank 1 (local rank 0), the first to fail:" in job.err(1)
    assert all("failed ValueError: the cause" in job.err(number) for number in (0, 1))


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_launcher(folder: Path, killed: int) -> None:
    """The others say whose launcher is gone; the kernel and the guardian end its own ranks."""
    job = Job(folder, STAY)
    job.start_all(3)
    job.await_marks("ready", 3)
    job.launchers[killed].kill()
    job.assert_ends(*(-9 if number == killed else 1 for number in range(3)))
    for number in {0, 1, 2} - {killed}:
        assert f"host {killed} ({HOST}) failed its launcher is gone: " in job.err(number)


@pytest.mark.parametrize(("stopped", "number"), [(0, signal.SIGINT), (1, signal.SIGTERM)])
def test_a_signal_to_a_launcher_that_is_alone(folder: Path, stopped: int, number: signal.Signals) -> None:
    """It ends the wait for the others, of which a launcher without an address says at once where it waits."""
    job = Job(folder)
    launcher = job.start(stopped, address=())
    if stopped == 0:
        job.await_listening()
    job.await_said(0, f"--nnodes 2: waiting for the other hosts at 127.0.0.1 port {job.port}, on this host; ")
    launcher.send_signal(number)
    job.assert_ends(ENDS[number])
    assert job.err(0).endswith(f"numapin: stopped by {number.name}; no rank is running")


@pytest.mark.parametrize(("stopped", "number"), [(0, signal.SIGINT), (1, signal.SIGTERM)])
def test_a_signal_while_ranks_run(folder: Path, stopped: int, number: signal.Signals) -> None:
    """A signal to one launcher stops all."""
    job = Job(folder, STAY)
    job.start_all(2)
    job.await_marks("ready", 2)
    job.launchers[stopped].send_signal(number)
    job.assert_ends(ENDS[number], ENDS[number])
    assert f"host {stopped} ({HOST}) was stopped by {number.name}, and so is this one" in job.err(1 - stopped)


def test_a_signal_to_every_launcher(folder: Path) -> None:
    """Ranks get it once, and have their grace period, also if a launcher hears from another one before its own.

    Ctrl-C, of which a second one is urgent: tests/unit/launcher/test_direct.py.
    """
    text = """
signals = []
def note(*_): signals.append(1); mark(f"signal{len(signals)}")
signal.signal(signal.SIGTERM, note)
mark("ready"); wait_for("sent"); time.sleep(0.5); mark("saved")
"""
    job = Job(folder, text)
    job.start_all(2)
    job.await_marks("ready", 2)
    job.launchers[0].terminate()
    assert wait_until(lambda: [*folder.glob("signal1.1.*")], limit_s=LIMIT_S), job.err(1)
    job.launchers[1].terminate()
    (folder / "sent").touch()
    job.assert_ends(143, 143)
    assert [len([*folder.glob(f"{word}.*")]) for word in ("signal1", "signal2", "saved")] == [2, 0, 2]


def test_a_launcher_is_killed_after_its_rank_failed(folder: Path) -> None:
    """It cannot report any more, and the other hosts say so; no rank of theirs is blamed."""
    text = """
if rank == "2":
    signal.signal(signal.SIGTERM, lambda *_: mark("asked"))
mark("ready"); wait_for("ready.*", 4)
if rank == "1":
    raise RuntimeError("no data")
while True:
    time.sleep(1)
"""
    job = Job(folder, text)
    for number, ranks in enumerate((1, 2, 1)):
        job.start(number, of=3, ranks=ranks)
    job.await_marks("asked", 1)
    job.launchers[1].kill()
    job.assert_ends(1, -9, 1)
    for number in (0, 2):
        blamed = f"host 1 ({HOST}) failed a rank failed, and its launcher is gone: "
        assert blamed in job.err(number), job.err(number)


LINKED = """
import socket
path, link = f"{folder}/link", socket.socket(socket.AF_UNIX)
if rank == "0":
    link.bind(path)
    link.listen()
    peer, _ = link.accept()
    mark("ready"); time.sleep(300)
while link.connect_ex(path):
    time.sleep(0.02)
mark("ready")
link.recv(1)
"""


@pytest.mark.parametrize(
    ("end", "number", "statuses", "said"),
    [
        ("os._exit(1)", signal.SIGTERM, (143, 143), ""),
        ("raise RuntimeError('gloo: Connection closed by peer')", signal.SIGKILL, (-9, 1), "its launcher is gone: "),
    ],
    ids=["stopped", "lost"],
)
def test_what_follows_the_end_of_host_0(
    folder: Path, end: str, number: signal.Signals, statuses: tuple[int, int], said: str
) -> None:
    """A rank that loses its peer on a host that is stopped or lost, and blames it, is a consequence of that."""
    job = Job(folder, LINKED + end)
    job.start_all(2)
    job.await_marks("ready", 2)
    job.launchers[0].send_signal(number)
    job.assert_ends(*statuses)
    assert said == "" or f"host 0 ({HOST}) failed {said}" in job.err(1), job.err(1)


def test_two_jobs_on_one_port(folder: Path) -> None:
    """A launcher that a resource manager has started for another job is refused, and host 0 waits for its own."""
    job = Job(folder)
    slurm: dict[str, Any] = {
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NODELIST": "n[0-1]",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "by_manager": True,
    }
    job.start(0, SLURM_JOB_ID="1", SLURM_NODEID="0", **slurm)
    job.await_listening()
    other = job.start(1, "--rdzv-conf=join_timeout=2", SLURM_JOB_ID="20001", SLURM_NODEID="1", **slurm)
    assert other.wait(LIMIT_S) == 1
    assert f"host 0 reports: {HOST} belongs to another job than {HOST}, on the same port" in job.err(1), job.err(1)
    assert "in 2 s" in job.err(1), "host 0 of its own job may have come"
    job.start(1, SLURM_JOB_ID="1", SLURM_NODEID="1", **slurm)
    job.assert_ends(0, 1, 0)
