"""Several launchers on one host that know each other: their roll call, and how a job on several hosts ends."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.launching import NUMAPIN, environment, script
from tests.integration.seam import fixed_hosts, main
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMIT_S = 90
HOST = os.uname().nodename
ENDS = {signal.SIGINT: -signal.SIGINT, signal.SIGTERM: 128 + signal.SIGTERM}
SECRET = "0123456789abcdef0123456789abcdef"  # noqa: S105 - of no use elsewhere
STAY = """
import os, sys, time
open(f"{sys.argv[1]}/ready.{os.environ['RANK']}", "w").close()
time.sleep(300)
"""


class Job:
    """The launchers of a job, by the order in which they were started."""

    def __init__(self, folder: Path, text: str) -> None:
        self.folder, self.script = folder, script(folder, text)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self.launchers: list[subprocess.Popen[bytes]] = []

    def start(
        self,
        number: int,
        *options: str,
        of: int = 2,
        ranks: int = 1,
        by_manager: bool = False,
        program: tuple[str, ...] = NUMAPIN,
        **changes: str,
    ) -> subprocess.Popen[bytes]:
        """Start the launcher of a host, whose number may come from a resource manager."""
        numbers = () if by_manager else (f"--nnodes={of}", f"--node-rank={number}")
        meeting = (*numbers, "--master-addr=127.0.0.1", f"--master-port={self.port}")
        words = (*program, "run", "--quiet", *meeting, f"--nproc-per-node={ranks}", *options)
        with (self.folder / f"err.{len(self.launchers)}").open("w") as err:
            launcher = subprocess.Popen(
                [*words, self.script, str(self.folder)],
                stdout=subprocess.DEVNULL,
                stderr=err,
                env=environment(CUDA_VISIBLE_DEVICES="", **changes),
                start_new_session=True,
            )
        self.launchers.append(launcher)
        return launcher

    def err(self, launcher: int) -> str:
        """Return what a launcher and its ranks wrote to stderr, each text in one line."""
        return " ".join((self.folder / f"err.{launcher}").read_text().split())

    def await_said(self, launcher: int, text: str) -> None:
        """Wait until a launcher has written a text."""
        assert wait_until(lambda: text in self.err(launcher), limit_s=LIMIT_S), self.err(launcher)

    def await_ready(self, number: int) -> None:
        """Wait until this many ranks are running."""
        ready = wait_until(lambda: len([*self.folder.glob("ready.*")]) == number, limit_s=LIMIT_S)
        assert ready, [self.err(launcher) for launcher in range(len(self.launchers))]

    def await_handlers(self, launcher: int) -> None:
        """Wait until a launcher handles SIGTERM."""
        status = Path(f"/proc/{self.launchers[launcher].pid}/status")

        def handles() -> bool:
            caught = next(line for line in status.read_text().splitlines() if line.startswith("SigCgt:"))
            return bool(int(caught.split()[1], 16) >> signal.SIGTERM - 1 & 1)

        assert wait_until(handles, limit_s=LIMIT_S), self.err(launcher)

    def statuses(self) -> list[int]:
        """Wait for all launchers, then until no rank is left, and return how the launchers ended."""
        statuses = [launcher.wait(LIMIT_S) for launcher in self.launchers]
        assert wait_until(lambda: not self.left(), limit_s=LIMIT_S), self.left()
        return statuses

    def left(self) -> list[int]:
        """Return the processes of the job."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().split(b"\0")
            except OSError:
                continue
            if self.script.encode() in words:
                found.append(int(path.parent.name))
        return found


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Return a folder, and end what is left of the job in it."""
    yield tmp_path
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(tmp_path).encode() in path.read_bytes():
                os.kill(int(path.parent.name), signal.SIGKILL)
        except OSError:
            continue


def listening(port: int) -> bool:
    """Return whether somebody listens on a port of this host."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def is_connected(port: int) -> bool:
    """Return whether a connection to a port is open."""
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return any(line[1].endswith(f":{port:04X}") and line[3] == "01" for line in lines)


def cpu_s(pid: int) -> float:
    """Return the CPU time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_the_numbers_of_ranks(folder: Path) -> None:
    """Hosts with different numbers of ranks; rank 0 can listen on MASTER_PORT while the launchers' connections stay.

    As torch's store does: on all addresses, with SO_REUSEADDR. The launchers import no torch.
    """
    names = "'RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE', 'GROUP_RANK', 'GROUP_WORLD_SIZE', 'ROLE_RANK'"
    text = f"""
import json, os, socket, sys, time
told = [os.environ[name] for name in ({names})]
told += [os.environ[name] for name in ("TORCHELASTIC_USE_AGENT_STORE", "MASTER_ADDR", "MASTER_PORT")]
told += [os.environ["TORCHELASTIC_RUN_ID"]]
if told[0] == "0":
    socket.create_server(("", int(os.environ["MASTER_PORT"])))
told.append("torch" in open(f"/proc/{{os.getppid()}}/maps").read())
json.dump(told, open(f"{{sys.argv[1]}}/rank.{{told[0]}}", "w"))
"""
    job = Job(folder, text)
    job.start(2, of=3)
    job.start(0, of=3, ranks=2)
    job.start(1, of=3, ranks=3)
    assert job.statuses() == [0, 0, 0], [job.err(launcher) for launcher in range(3)]
    told = [json.loads((folder / f"rank.{rank}").read_text()) for rank in range(6)]
    assert [" ".join(each[:7]) for each in told] == [
        *("0 0 6 2 0 3 0", "1 1 6 2 0 3 1"),
        *("2 0 6 3 1 3 2", "3 1 6 3 1 3 3", "4 2 6 3 1 3 4"),
        "5 0 6 1 2 3 5",
    ]
    assert {(*each[7:10], each[11]) for each in told} == {("False", "127.0.0.1", str(job.port), False)}
    assert len({each[10] for each in told}) == 1, "one run id"


def test_a_missing_host(folder: Path) -> None:
    """All that have come say within the time limit of host 0 who is missing."""
    job = Job(folder, "")
    job.start(0, "--rdzv-conf=join_timeout=20", of=4)  # in which the other one comes, also on a busy machine
    job.start(1, of=4)
    assert job.statuses() == [1, 1]
    missing = f"hosts 2-3 of 4 did not come to 127.0.0.1 port {job.port} in 20 s"
    assert f"numapin: error: {missing}" in job.err(0)
    assert f"numapin: error: host 0 reports: {missing}" in job.err(1)


@pytest.mark.parametrize(("stopped", "number"), [(0, signal.SIGINT), (1, signal.SIGTERM)])
def test_the_wait_is_reported(folder: Path, stopped: int, number: signal.Signals) -> None:
    """After 10 s, long before the time limit, each launcher says for whom it waits, and how not to.

    A connection that says nothing is closed then, but not refused: a slow host comes again. A signal to one launcher
    stops both.
    """
    job = Job(folder, "")
    job.start(0, of=3)
    assert wait_until(lambda: listening(job.port), limit_s=LIMIT_S)
    silent = socket.create_connection(("127.0.0.1", job.port), timeout=LIMIT_S)
    job.start(1, of=3)
    job.await_said(0, f"waiting for host 2 of 3 at 127.0.0.1 port {job.port} (")
    job.await_said(1, f"waiting for the other hosts; host 0 at 127.0.0.1 port {job.port} says which")
    assert " of 900 s)" in job.err(0)
    assert "for a job on this host only: numapin run --standalone" in job.err(0)
    with silent:
        assert "refused" not in silent.makefile().read()
    job.launchers[stopped].send_signal(number)
    assert job.statuses() == [ENDS[number]] * 2
    assert f"host {stopped} ({HOST}) was stopped by {number.name}, and so is this one" in job.err(1 - stopped)


@pytest.mark.parametrize(
    ("others", "problem"),
    [
        (((1, 3), (1, 3)), "two hosts have the number 1: "),
        (((0, 2),), "two hosts have the number 0: "),
        (((1, 3), (2, 4)), "the hosts disagree on their number: "),
    ],
)
def test_hosts_that_contradict_each_other(folder: Path, others: tuple[tuple[int, int], ...], problem: str) -> None:
    """Each of them says so, at once."""
    job = Job(folder, "")
    job.start(0, of=others[0][1])
    for number, of in others:
        if number == 0:  # it cannot listen, so another program speaks for it
            break
        job.start(number, of=of)
        assert wait_until(lambda: is_connected(job.port), limit_s=LIMIT_S)  # before a contradiction ends the roll call
    else:
        assert job.statuses() == [1] * len(job.launchers)
        assert all(problem in job.err(launcher) for launcher in range(len(job.launchers)))
        return
    assert wait_until(lambda: listening(job.port), limit_s=LIMIT_S)
    with socket.create_connection(("127.0.0.1", job.port)) as caller:
        caller.sendall(b'- {"numapin": 1, "nonce": ""}\n')
        caller.sendall(b'- {"kind": "hello", "host": 0, "hosts": 2, "ranks": 1, "name": "n", "role": "", "job": ""}\n')
        assert job.statuses() == [1]
        assert problem in caller.makefile().read()
    assert problem in job.err(0)


def test_a_port_in_use(folder: Path) -> None:
    """Host 0 says so at once, the others in time."""
    job = Job(folder, "")
    with socket.create_server(("127.0.0.1", job.port)):
        job.start(0)
        job.start(1, "--rdzv-conf=join_timeout=0")
        assert job.statuses() == [1, 1]
    assert f"host 0 cannot listen on port {job.port}: Address already in use" in job.err(0)
    assert "host 0 did not answer" in job.err(1)
    assert "it is not a launcher of numapin" in job.err(1)


def test_strangers_do_not_hold_up_the_roll_call(folder: Path) -> None:
    """One says nothing, others say what no launcher says; those are told why they are refused."""
    job = Job(folder, "")
    job.start(0)
    assert wait_until(lambda: listening(job.port), limit_s=LIMIT_S)
    greeting = b'- {"numapin": 1, "nonce": ""}\n'
    garbage = [
        *(b"GET / HTTP/1.0\r\n\r\n", b"\xff\xfe\n", b"- [1]\n", b"- " + b"[" * 4000 + b"\n", b"x" * 9000),
        *(b'- {"numapin": 99, "nonce": ""}\n', b'- {"numapin": true, "nonce": ""}\n', b'- {"nonce": ""}\n'),
        *(greeting + b'- {"kind": "hello"}\n', greeting + b'- {"kind": "stopped", "signal": 15}\n'),
        *(greeting + b'- {"kind": "hello", "host": -1, "hosts": 2, "ranks": 1, "name": "", "role": ""}\n',),
        *(greeting + b'f00 {"kind": "hello", "host": 1, "hosts": 2, "ranks": 1, "name": "", "role": ""}\n',),
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
        job.start(1)
        assert job.statuses() == [0, 0], (job.err(0), job.err(1))


def test_a_secret_signs_what_hosts_say(folder: Path) -> None:
    """With one PET_RDZV_ID the job runs. A launcher without it, or with another one, ends at once; host 0 waits on."""
    job = Job(folder, "import os, sys; print(os.environ['TORCHELASTIC_RUN_ID'], file=sys.stderr)")
    job.start(0, PET_RDZV_ID=SECRET)
    strangers = (job.start(1), job.start(1, PET_RDZV_ID=f"{SECRET}0"))
    assert [stranger.wait(LIMIT_S) for stranger in strangers] == [1, 1]
    refused = f"host 0 at 127.0.0.1 port {job.port} was refused, because its messages are not signed with the"
    assert all(f"{refused} rendezvous id of this host (PET_RDZV_ID)" in job.err(launcher) for launcher in (1, 2))
    assert all("hint: set the same PET_RDZV_ID on all hosts" in job.err(launcher) for launcher in (1, 2))
    assert job.launchers[0].poll() is None
    job.start(1, PET_RDZV_ID=SECRET)
    assert job.statuses() == [0, 1, 1, 0]
    assert job.err(0) == job.err(3), "the same id for all ranks"
    assert SECRET not in job.err(0)


def test_another_address_of_host_0(folder: Path) -> None:
    """Where host 0 has several addresses, a launcher of another job at one of them does not end the search."""
    job = Job(folder, "")
    job.start(0, PET_RDZV_ID=f"{SECRET}0")
    job.start(1, "--master-addr=127.0.0.1,nowhere.invalid", "--rdzv-conf=join_timeout=2", PET_RDZV_ID=SECRET)
    assert job.launchers[1].wait(LIMIT_S) == 1
    assert "host 0 did not answer at 127.0.0.1,nowhere.invalid" in job.err(1)
    job.launchers[0].terminate()
    assert job.statuses() == [143, 1]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_fails(folder: Path, failing: int) -> None:
    """On every host the block names the rank and the host, also if JSON has 12 bytes a character; no rank is left."""
    text = f"if os.environ['RANK'] == '{failing}': sys.exit('\\U0001f600' * 400)\ntime.sleep(300)\n"
    job = Job(folder, f"import os, sys, time\n{text}")
    for number in range(3):
        job.start(number, of=3, PYTHONIOENCODING="utf-8")
    assert job.statuses() == [1, 1, 1]
    for number in range(3):
        where = "" if number == failing else f": host {failing} ({HOST})"
        assert f"rank {failing}" in job.err(number)
        assert f"the first to fail{where}" in job.err(number)
        assert "failed SystemExit: \U0001f600" in job.err(number)


def test_a_rank_fails_after_others_have_succeeded(folder: Path) -> None:
    """Hosts that are done leave, except host 0, which reports the failure, too."""
    text = """
import os, sys, time
rank = os.environ["RANK"]
open(f"{sys.argv[1]}/ready.{rank}", "w").close()
while rank == "1" and not os.path.exists(f"{sys.argv[1]}/left"):
    time.sleep(0.02)
sys.exit("no data" if rank == "1" else 0)
"""
    job = Job(folder, text)
    for number in range(3):
        job.start(number, of=3)
    job.await_ready(3)
    assert job.launchers[2].wait(LIMIT_S) == 0
    assert wait_until(lambda: len(job.left()) == 3, limit_s=LIMIT_S), "two launchers and rank 1 are left"
    (folder / "left").touch()
    assert job.statuses() == [1, 1, 0]
    assert "rank 1, the first to fail: host 1" in job.err(0)
    assert "here 1 had finished" in job.err(0)


def test_the_cause_comes_before_its_consequences(folder: Path) -> None:
    """A rank that has lost its connection ends first; all hosts name the one that had failed, and takes time to end."""
    text = """
import atexit, os, sys, time
if os.environ["RANK"] == "1":
    atexit.register(time.sleep, 60)
    open(f"{sys.argv[1]}/failed", "w").close()
    raise ValueError("the cause")
while not os.path.exists(f"{sys.argv[1]}/failed"):
    time.sleep(0.02)
time.sleep(0.5)
raise RuntimeError("gloo: Connection closed by peer")
"""
    job = Job(folder, text)
    for number in (0, 1):
        job.start(number)
    assert job.statuses() == [1, 1]
    assert "rank 1, the first to fail: host 1" in job.err(0)
    assert "rank 1 (local rank 0), the first to fail:" in job.err(1)
    assert all("failed ValueError: the cause" in job.err(number) for number in (0, 1))


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_launcher(folder: Path, killed: int) -> None:
    """The others say whose launcher is gone; the kernel and the guardian end its own ranks."""
    job = Job(folder, STAY)
    for number in range(3):
        job.start(number, of=3)
    job.await_ready(3)
    job.launchers[killed].kill()
    assert job.statuses() == [-9 if number == killed else 1 for number in range(3)]
    for number in {0, 1, 2} - {killed}:
        assert f"host {killed} ({HOST}) failed its launcher is gone: " in job.err(number)


@pytest.mark.parametrize("moment", ["alone", "while ranks run"])
@pytest.mark.parametrize(("stopped", "number"), [(0, signal.SIGINT), (1, signal.SIGTERM)])
def test_a_signal(folder: Path, moment: str, stopped: int, number: signal.Signals) -> None:
    """A signal stops a launcher that is alone. Once ranks run, it stops all launchers."""
    job = Job(folder, STAY)
    launchers = {stopped: job.start(stopped)}
    if moment == "while ranks run":
        launchers[1 - stopped] = job.start(1 - stopped)
        job.await_ready(2)
    elif stopped == 0:
        assert wait_until(lambda: listening(job.port), limit_s=LIMIT_S)
    else:
        job.await_handlers(0)
    launchers[stopped].send_signal(number)
    assert job.statuses() == [ENDS[number]] * len(launchers), [job.err(n) for n in range(len(launchers))]
    if moment == "while ranks run":
        assert f"host {stopped} ({HOST}) was stopped by {number.name}, and so is this one" in job.err(1)


def test_a_signal_to_every_launcher(folder: Path) -> None:
    """Ranks get it once, and have their grace period, also if a launcher hears from another one before its own.

    Ctrl-C, of which a second one is urgent: tests/unit/launcher/test_direct.py.
    """
    text = """
import os, signal, sys, time
rank = os.environ["RANK"]
def note(number, _):
    with open(f"{sys.argv[1]}/signals.{rank}", "a") as file:
        print(number, file=file)
signal.signal(signal.SIGTERM, note)
open(f"{sys.argv[1]}/ready.{rank}", "w").close()
while not os.path.exists(f"{sys.argv[1]}/sent"):
    time.sleep(0.02)
time.sleep(0.5)
open(f"{sys.argv[1]}/saved.{rank}", "w").close()
"""
    job = Job(folder, text)
    for host in (0, 1):
        job.start(host)
    job.await_ready(2)
    job.launchers[0].terminate()
    assert wait_until((folder / "signals.1").exists, limit_s=LIMIT_S), job.err(1)
    job.launchers[1].terminate()
    (folder / "sent").touch()
    assert job.statuses() == [143, 143]
    assert [(folder / f"signals.{rank}").read_text() for rank in (0, 1)] == [f"{signal.SIGTERM:d}\n"] * 2
    assert len([*folder.glob("saved.*")]) == 2


def test_a_launcher_is_killed_after_its_rank_failed(folder: Path) -> None:
    """It cannot report any more, and the other hosts say so; no rank of theirs is blamed."""
    text = """
import os, signal, sys, time
if os.environ["RANK"] == "2":
    signal.signal(signal.SIGTERM, lambda *_: open(f"{sys.argv[1]}/asked", "w").close())
open(f"{sys.argv[1]}/ready.{os.environ['RANK']}", "w").close()
while len([name for name in os.listdir(sys.argv[1]) if name.startswith("ready")]) < 4:
    time.sleep(0.02)
if os.environ["RANK"] == "1":
    raise RuntimeError("no data")
while True:
    time.sleep(1)
"""
    job = Job(folder, text)
    for number, ranks in enumerate((1, 2, 1)):
        job.start(number, of=3, ranks=ranks)
    assert wait_until((folder / "asked").exists, limit_s=LIMIT_S)
    job.launchers[1].kill()
    assert job.statuses() == [1, -9, 1]
    for number in (0, 2):
        blamed = f"host 1 ({HOST}) failed a rank failed, and its launcher is gone: "
        assert blamed in job.err(number), job.err(number)


LINKED = """
import os, socket, sys, time
path, rank = f"{sys.argv[1]}/link", os.environ["RANK"]
link = socket.socket(socket.AF_UNIX)
if rank == "0":
    link.bind(path)
    link.listen()
    peer, _ = link.accept()
else:
    while link.connect_ex(path):
        time.sleep(0.02)
open(f"{sys.argv[1]}/ready.{rank}", "w").close()
if rank == "0":
    time.sleep(300)
link.recv(1)
"""


@pytest.mark.parametrize(
    ("end", "number", "statuses", "said"),
    [
        ("os._exit(1)", signal.SIGTERM, [143, 143], ""),
        ("raise RuntimeError('gloo: Connection closed by peer')", signal.SIGKILL, [-9, 1], "its launcher is gone: "),
    ],
    ids=["stopped", "lost"],
)
def test_what_follows_the_end_of_host_0(
    folder: Path, end: str, number: signal.Signals, statuses: list[int], said: str
) -> None:
    """A rank that loses its peer on a host that is stopped or lost, and blames it, is a consequence of that."""
    job = Job(folder, LINKED + end)
    for host in (0, 1):
        job.start(host)
    job.await_ready(2)
    job.launchers[0].send_signal(number)
    assert job.statuses() == statuses, job.err(1)
    assert said == "" or f"host 0 ({HOST}) failed {said}" in job.err(1), job.err(1)


def test_few_descriptors(folder: Path) -> None:
    """If the launcher of host 0 can open no more, the connection that has said nothing for longest gives way."""
    job = Job(folder, "")
    module = f"import importlib; importlib.import_module({fixed_hosts.__name__!r})._GREETING_S = 900.0"  # none is late
    start = f"{module}; importlib.import_module({main.__module__!r}).main()"
    launcher = job.start(0, program=(sys.executable, "-c", start))
    assert wait_until(lambda: listening(job.port), limit_s=LIMIT_S)
    open_now = len([*Path(f"/proc/{launcher.pid}/fd").iterdir()])
    resource.prlimit(launcher.pid, resource.RLIMIT_NOFILE, (open_now + 8, open_now + 8))
    with ExitStack() as silent:
        for _ in range(40):
            silent.enter_context(socket.create_connection(("127.0.0.1", job.port)))
        job.start(1)
        assert job.statuses() == [0, 0], (job.err(0), job.err(1))


def test_news_in_the_packet_of_the_place(folder: Path) -> None:
    """A launcher that gets its place and a stop at once stops."""
    job = Job(folder, STAY)
    with socket.create_server(("127.0.0.1", job.port)) as host_0:
        job.start(1)
        host_0.settimeout(LIMIT_S)
        with host_0.accept()[0] as caller:
            caller.sendall(b'- {"numapin": 1, "nonce": "%s"}\n' % SECRET.encode())
            told = caller.makefile()
            told.readline()
            assert '"hello"' in told.readline()
            place = {"kind": "place", "first_rank": 1, "world_size": 2, "first_role_rank": 1, "role_size": 2}
            stop = {"kind": "stopped", "host": 0, "name": "n", "signal": int(signal.SIGTERM)}
            messages = ({**place, "run_id": "1", "name": "n"}, stop)
            caller.sendall("".join(f"- {json.dumps(message)}\n" for message in messages).encode())
            assert job.statuses() == [143]


def test_two_jobs_on_one_port(folder: Path) -> None:
    """A launcher that a resource manager has started for another job is refused, and host 0 waits for its own."""
    job = Job(folder, "")
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
    assert wait_until(lambda: listening(job.port), limit_s=LIMIT_S)
    other = job.start(1, "--rdzv-conf=join_timeout=2", SLURM_JOB_ID="20001", SLURM_NODEID="1", **slurm)
    assert other.wait(LIMIT_S) == 1
    name = os.uname().nodename
    assert f"host 0 reports: {name} belongs to another job than {name}, on the same port" in job.err(1), job.err(1)
    assert "in 2 s" in job.err(1), "host 0 of its own job may have come"
    job.start(1, SLURM_JOB_ID="1", SLURM_NODEID="1", **slurm)
    assert job.statuses() == [0, 1, 0], (job.err(0), job.err(2))


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        ("--rdzv-endpoint=localhost:99999", "there is no port 99999"),
        ("--rdzv-endpoint=:29577", "it names no host"),
        ("--rdzv-conf=join_timeout=nan", "nan is not a time in seconds"),
    ],
)
def test_values_out_of_range(folder: Path, option: str, problem: str) -> None:
    """They are refused before anything starts."""
    job = Job(folder, "")
    job.start(0, option)
    assert job.statuses() == [2]
    assert problem in job.err(0)
    assert "give HOST:PORT and join_timeout=SECONDS" in job.err(0)


def test_a_host_without_logs(folder: Path) -> None:
    """The other hosts say why a launcher could not start its ranks."""
    job = Job(folder, "import time; time.sleep(300)")
    job.start(0)
    job.start(1, "--log-dir=/proc/nothing")
    assert job.statuses() == [1, 2]
    assert "no folder for logs can be made in /proc/nothing" in job.err(0), job.err(0)


def test_a_launcher_says_bye_twice(folder: Path) -> None:
    """It counts once."""
    job = Job(folder, "import sys, time; open(f'{sys.argv[1]}/ready.0', 'w').close(); time.sleep(1)")
    job.start(0)
    assert wait_until(lambda: listening(job.port), limit_s=LIMIT_S)
    with socket.create_connection(("127.0.0.1", job.port)) as caller:
        caller.sendall(b'- {"numapin": 1, "nonce": "%s"}\n' % SECRET.encode())
        caller.sendall(b'- {"kind": "hello", "host": 1, "hosts": 2, "ranks": 1, "name": "n", "role": "", "job": ""}\n')
        job.await_ready(1)
        caller.sendall(b'- {"kind": "bye"}\n' * 2)
        assert job.statuses() == [0], job.err(0)


def test_host_0_says_nothing(folder: Path) -> None:
    """A launcher that waits for it does not say that it knows who is missing."""
    job = Job(folder, "")
    with socket.create_server(("127.0.0.1", job.port)):
        job.start(1)
        job.await_said(0, f"waiting for host 0 at 127.0.0.1 port {job.port}, which says nothing")
        job.launchers[0].terminate()
        assert job.statuses() == [143]


def test_addresses_that_do_not_answer(folder: Path) -> None:
    """Together they take no longer than one of them: the first attempt uses the time up, and no other is made."""
    job = Job(folder, "")
    addresses = ",".join(f"127.0.0.{number}" for number in range(1, 6))
    with socket.create_server(("127.0.0.1", job.port), backlog=0), ExitStack() as opened:
        for _ in range(3):  # fills the queue, so the kernel drops what follows
            waiting = opened.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(("127.0.0.1", job.port))
        others = [
            opened.enter_context(socket.create_server((address, job.port))) for address in addresses.split(",")[1:]
        ]
        job.start(1, f"--master-addr={addresses}", "--rdzv-conf=join_timeout=2")
        assert job.statuses() == [1]
        for other in others:
            other.setblocking(False)
            with pytest.raises(BlockingIOError):
                other.accept()
    assert f"host 0 did not answer at {addresses} port {job.port} in 2 s: " in job.err(0)


def test_host_0_is_missing(folder: Path) -> None:
    """The others say where they looked for it, and what they saw there; options of torch's rendezvous do nothing."""
    job = Job(folder, "")
    job.start(1, "--local-addr=127.0.0.1", "--rdzv-conf=join_timeout=1,read_timeout=5")
    assert job.statuses() == [1]
    assert f"host 0 did not answer at 127.0.0.1 port {job.port} in 1 s: Connection refused" in job.err(0)
    assert "a roll call, on which --rdzv-conf read_timeout, --local-addr has no effect" in job.err(0)


def test_waiting_for_many_hosts_is_cheap(folder: Path) -> None:
    """Host 0 lists the missing ones only when it names them."""
    job = Job(folder, "")
    launcher = job.start(0, of=65536)
    assert wait_until(lambda: listening(job.port), limit_s=LIMIT_S)
    before_s = cpu_s(launcher.pid)
    time.sleep(2)
    assert cpu_s(launcher.pid) - before_s < 0.2
    launcher.terminate()
    assert job.statuses() == [143]
