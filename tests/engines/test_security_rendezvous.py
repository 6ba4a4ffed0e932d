"""Another user of the node who reaches the ports of a job cannot run code in it; and the list of those ports.

The attacker is a process of uid 65534. The attack also runs against torchrun, where it succeeds.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.engines.seam import proc
from tests.integration.launching import NUMAPIN, TORCHRUN, environment, free_port, numapin, script, torchs_store
from tests.needs import needs_root
from tests.waiting import wait_until

# A group, so that jobs that several tests use are started once.
pytestmark = [pytest.mark.xdist_group("rendezvous"), pytest.mark.timeout(900)]

ROOT = os.getuid() == 0
JOINING = str(Path(__file__).parent / "joining.py")
ATTACKER = (sys.executable, str(Path(__file__).parents[1] / "integration" / "attacker.py"))
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "security.md"
LIMIT_S = 240.0
NOBODY = 65534  # the attacker
LISTEN = "0A"  # in /proc/net/tcp

MEETS = """
import os, sys, time
import torch.distributed as dist
def main():
    dist.init_process_group("gloo")
    dist.barrier()
    rank = os.environ["RANK"]
    folder = sys.argv[1] if len(sys.argv) > 1 else os.environ["FOLDER"]
    with open(f"{folder}/port", "w") as file:
        file.write(os.environ["MASTER_PORT"])
    open(f"{folder}/ready.{rank}", "w").close()
    while not os.path.exists(f"{folder}/go"):
        time.sleep(0.02)
    dist.barrier()
    dist.destroy_process_group()
"""
AS_SCRIPT = f"{MEETS}\nmain()\n"
AS_SPAWN = f"{MEETS}\nimport numapin\nif __name__ == '__main__':\n    numapin.spawn(main, num_ranks=2)\n"
LATE = """
import os, sys, time
import torch.distributed as dist
if os.environ["RANK"] == "1":
    time.sleep(300)
with open(f"{sys.argv[1]}/port.new", "w") as file:
    file.write(os.environ["MASTER_PORT"])
os.rename(f"{sys.argv[1]}/port.new", f"{sys.argv[1]}/port")
dist.init_process_group("gloo")
dist.all_gather_object([None, None], "mine")
"""
QUICK = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=30"


class Port(NamedTuple):
    """A listening socket; `pid` is its first holder."""

    pid: int
    address: str
    port: int


def _tree(pid: int) -> list[int]:
    return [pid, *proc.descendants(pid, proc.children_of())]


def _ports_of(pid: int) -> list[Port]:
    owners: dict[str, int] = {}
    for member in _tree(pid):
        with suppress(FileNotFoundError, ProcessLookupError):  # the process has ended
            for entry in Path(f"/proc/{member}/fd").iterdir():
                with suppress(FileNotFoundError):  # it has just closed the file
                    owners.setdefault(os.readlink(entry), member)  # noqa: PTH115 - "socket:[1]" is no path
    found = []
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            _, place, _, state, *_, inode = line.split()[:10]
            holder = owners.get(f"socket:[{inode}]")
            if state == LISTEN and holder is not None:
                address, port = place.split(":")
                # It consists of four-byte words in the host's byte order.
                words = [bytes.fromhex(address[start : start + 8])[::-1] for start in range(0, len(address), 8)]
                shown = ip_address(b"".join(words))
                if isinstance(shown, IPv6Address) and shown.ipv4_mapped:
                    shown = shown.ipv4_mapped
                found.append(Port(holder, str(shown), int(port, 16)))
    return found


class Job:
    """A job of two ranks that connect, report it, and wait until they may end."""

    def __init__(
        self, folder: Path, commands: list[list[str]], variables: list[dict[str, str]], *, identity: str
    ) -> None:
        self.folder, self.identity = folder, identity
        folder.chmod(0o777)  # the victim makes the attacker's marker, and may be any user
        self.err = folder / "err"
        with self.err.open("w") as err:
            self.processes = [
                subprocess.Popen(
                    command,
                    env=environment(FOLDER=str(folder), CUDA_VISIBLE_DEVICES="", **changes),
                    stdout=subprocess.DEVNULL,
                    stderr=err,
                    start_new_session=True,
                )
                for command, changes in zip(commands, variables, strict=True)
            ]

    @property
    def master_port(self) -> int:
        return int((self.folder / "port").read_text())

    def await_ready(self) -> None:
        ready = wait_until(lambda: all((self.folder / f"ready.{n}").exists() for n in (0, 1)), limit_s=LIMIT_S)
        assert ready, self.err.read_text()

    def ports(self) -> list[Port]:
        return sorted({port for process in self.processes for port in _ports_of(process.pid)})

    def let_go(self) -> list[int]:
        """Let the ranks end; return the statuses of the launchers."""
        (self.folder / "go").touch()
        return [process.wait(LIMIT_S) for process in self.processes]

    def end(self) -> None:
        """End all remaining processes, also ranks that a killed torchrun left: their command line names the folder."""
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                if str(self.folder).encode() in path.read_bytes().split(b"\0"):
                    os.kill(int(path.parent.name), signal.SIGKILL)


@contextmanager
def job(
    folder: Path,
    kind: str,
    *options: str,
    hosts: int = 1,
    is_fixed: bool = False,
    launcher: tuple[str, ...] = NUMAPIN,
) -> Iterator[Job]:
    """Start a job with `run`, `trace`, `exec`, `spawn` or `torchrun` as `launcher`, and end it after the block.

    `options` are more options of numapin run. Several hosts meet in a c10d store, or, if fixed, in a roll call.
    """
    folder.mkdir()
    secret = secrets.token_hex(16)
    path = script(folder, AS_SPAWN if kind == "spawn" else AS_SCRIPT)
    variables: list[dict[str, str]] = [{} for _ in range(hosts)]
    if kind == "spawn":
        commands = [[sys.executable, path]]
    elif kind == "exec":
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
        alone = {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        variables = [meeting | alone | {"RANK": str(rank)} for rank in range(2)]
        commands = [[*launcher, "exec", "--", sys.executable, path]] * 2
    else:
        words = [*launcher, *((kind, "--quiet") if launcher is NUMAPIN else ()), "--nproc-per-node", str(2 // hosts)]
        if kind == "trace":
            words += ["--output", str(folder / "trace")]
        parts: list[list[str]] = [[]]
        if hosts > 1:
            variables = [{"PET_RDZV_ID": secret} for _ in range(hosts)]
            words += ["--nnodes", "2", "--local-addr", "127.0.0.1"]
            if is_fixed:
                words += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
                parts = [["--node-rank", str(host)] for host in range(hosts)]
            else:
                words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
                parts = [["--rdzv-conf", f"is_host={int(host == 0)},{QUICK}"] for host in range(hosts)]
        commands = [[*words, *part, *options, path, str(folder)] for part in parts]
    started = Job(folder, commands, variables, identity=secret)
    try:
        yield started
    finally:
        started.end()


@dataclass(frozen=True, slots=True)
class Attacked:
    """The outcome of an attack: the ports before it, the attacked ports with their stores' keys, and the statuses.

    The folder of the job has `owned` if the attacker's pickle was read.
    """

    job: Job
    places: str
    ports: list[Port]
    keys: list[list[str]]
    statuses: list[int]


def attack(port: int, marker: Path) -> list[str]:
    """Attack a port as another user; return the keys of the store on it."""
    done = subprocess.run(
        [*ATTACKER, str(port), str(marker)], capture_output=True, text=True, timeout=LIMIT_S, check=True
    )
    keys: list[str] = json.loads(done.stdout)
    return keys


@needs_root
def test_the_attack_works_against_torchrun(tmp_path: Path) -> None:
    """Another user's pickle runs in torchrun's launcher on one host, so the attack is real."""
    folder, marker = tmp_path / "job", tmp_path / "job" / "owned"
    with job(folder, "run", launcher=TORCHRUN) as victim:
        victim.await_ready()
        for port in {port.port for port in victim.ports() if port.pid == victim.processes[0].pid}:
            attack(port, marker)
        assert wait_until(marker.exists, limit_s=LIMIT_S)


def _places(started: Job, *, kind: str = "run") -> str:
    """Return where a job listens, in the words of the documentation."""
    pids = set() if kind == "exec" else {process.pid for process in started.processes}
    for pid in [*pids] if kind == "trace" else []:  # the launcher is its child
        pids |= {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}
    found = set()
    for port in started.ports():
        who = "launcher" if port.pid in pids else "rank"
        if port.port == started.master_port:
            found.add(f"{who}: ranks' store, {_where(port)}")
        elif port.pid in pids:
            found.add(f"launcher: rendezvous, {_where(port)}")
        else:
            found.add("rank: gloo, the address of the host's name")
    return "; ".join(sorted(found))


def _where(port: Port) -> str:
    return "loopback" if port.address == "127.0.0.1" else "all addresses"


def _attacked(folder: Path, *, hosts: int) -> Iterator[Attacked]:
    """Attack the launchers' ports of a job; without root, only record the ports."""
    with job(folder, "run", hosts=hosts) as victim:
        victim.await_ready()
        places = _places(victim)
        pids = {process.pid for process in victim.processes}
        ports = [port for port in victim.ports() if port.pid in pids]
        keys = [attack(port.port, folder / "owned") for port in ports] if ROOT else []
        ends_by_itself = ROOT and hosts > 1
        statuses = [process.wait(LIMIT_S) for process in victim.processes] if ends_by_itself else victim.let_go()
        yield Attacked(victim, places, ports, keys, statuses)


@pytest.fixture(scope="module")
def one_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    yield from _attacked(tmp_path_factory.mktemp("one") / "job", hosts=1)


@pytest.fixture(scope="module")
def two_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    yield from _attacked(tmp_path_factory.mktemp("two") / "job", hosts=2)


@needs_root
def test_one_host_is_closed_to_other_users(one_host: Attacked) -> None:
    """On one host the launcher listens on one loopback port, which refuses another user; the job succeeds."""
    (port,) = one_host.ports
    assert (port.address, port.port) == ("127.0.0.1", one_host.job.master_port)
    assert one_host.keys == [[]]
    assert f"the ranks' store refused a connection of user {NOBODY}" in one_host.job.err.read_text()
    assert one_host.statuses == [0], one_host.job.err.read_text()
    assert not list(one_host.job.folder.glob("owned*"))


@needs_root
@pytest.mark.parametrize("is_torchs", [False, True], ids=["numapin's store", "torch's store"])
def test_the_place_of_a_late_rank(tmp_path: Path, is_torchs: bool) -> None:  # noqa: FBT001 - a parameter of the test
    """Another user cannot take it; from torch's store he can, and all_gather_object runs his code, as documented.

    If this fails because torch has closed its store, docs/security.md, SECURITY.md and docs/limits.md claim too much.
    """
    folder = tmp_path / "job"
    tmp_path.chmod(0o755)
    folder.mkdir()
    options = ("--quiet", "--nproc-per-node", "2", *(torchs_store() if is_torchs else ()))
    victim = Job(folder, [[*NUMAPIN, "run", *options, script(folder, LATE), str(folder)]], [{}], identity="")
    try:
        assert wait_until((folder / "port").exists, limit_s=LIMIT_S), victim.err.read_text()
        arguments = (str(victim.master_port), str(folder / "owned"), "120" if is_torchs else "10")
        subprocess.run([sys.executable, JOINING, *arguments], capture_output=True, timeout=LIMIT_S, check=False)
        if is_torchs:
            assert wait_until((folder / f"owned.{os.getuid()}").exists, limit_s=LIMIT_S), victim.err.read_text()
        else:
            assert f"the ranks' store refused a connection of user {NOBODY}" in victim.err.read_text()
            assert victim.processes[0].poll() is None
            assert not list(folder.glob("owned*"))
    finally:
        victim.end()


@needs_root
def test_several_hosts_unpickle_nothing_that_is_not_signed(two_hosts: Attacked) -> None:
    """A pickle under the key of the rendezvous ends the job with the reason, and is never unpickled."""
    assert any("torch.rendezvous" in key for keys in two_hosts.keys for key in keys)
    assert not any(two_hosts.job.identity in key for keys in two_hosts.keys for key in keys)
    assert two_hosts.statuses == [1, 1]
    assert "is not signed with this job's --rdzv-id" in two_hosts.job.err.read_text()
    assert not list(two_hosts.job.folder.glob("owned*"))
    assert "warning: " not in two_hosts.job.err.read_text()  # a random id in the environment


def test_the_first_host_holds_the_ranks_port_also_if_ranks_may_restart(tmp_path: Path) -> None:
    """No other user can take the port of the ranks' store before rank 0 listens: its launcher holds it, in each round.

    Of the rendezvous id, which is also in PET_RDZV_ID, the command line is mentioned, because ps shows it.
    """
    secret = secrets.token_hex(16)
    with job(tmp_path / "job", "run", "--max-restarts", "1", "--rdzv-id", secret, hosts=2) as started:
        started.await_ready()
        first_port, places = started.master_port, _places(started)
        assert places.startswith("launcher: ranks' store, all addresses; launcher: rendezvous"), places
        pids = [pid for process in started.processes for pid in _tree(process.pid)]
        (rank,) = (pid for pid in pids if b"RANK=0" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
        for ready in started.folder.glob("ready.*"):
            ready.unlink()
        os.kill(rank, signal.SIGKILL)
        started.await_ready()
        assert _places(started) == places
        assert started.master_port != first_port
        assert started.let_go() == [0, 0], started.err.read_text()
        shown = "ps shows --rdzv-id to every user of this host: anyone who knows it and can reach the rendezvous can"
        assert started.err.read_text().count(shown) == 2


def test_etcd_v2_is_not_signed(tmp_path: Path) -> None:
    """It keeps torch's own pickle, so numapin warns before it connects."""
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['etcd'] = None")
    meeting = ("--nnodes", "2", "--rdzv-backend", "etcd-v2", "--rdzv-endpoint", "127.0.0.1:1")
    done = numapin("run", "--quiet", *meeting, script(tmp_path, "pass"), PYTHONPATH=str(tmp_path))
    assert "the rendezvous state in etcd-v2 is a pickle that numapin does not sign: anyone" in done.err
    assert (done.status, "Traceback" in done.err) == (1, False), done.err


KINDS = [("trace", "1", 1), ("exec", "1 or more", 2), ("spawn", "1", 1)]
"""The command, its hosts according to the documentation, and here."""


def test_the_documented_table_of_ports(one_host: Attacked, two_hosts: Attacked, tmp_path: Path) -> None:
    """docs/security.md lists the ports that /proc/net shows in a roll call, and while two gloo ranks are running."""
    lines = ["| command | hosts | listens |", "|---|---|---|", f"| `numapin run` | 1 | {one_host.places} |"]
    with job(tmp_path / "waiting", "run", "--nnodes", "3", hosts=2, is_fixed=True) as started:
        assert wait_until(started.ports, limit_s=LIMIT_S), started.err.read_text()
        (port,) = started.ports()
        assert port.pid == started.processes[0].pid
        lines.append(f"| `numapin run` | 2, until all have come | launcher: roll call, {_where(port)} |")
    with job(tmp_path / "fixed", "run", hosts=2, is_fixed=True) as started:
        started.await_ready()
        lines.append(f"| `numapin run` | 2 | {_places(started)} |")
        assert started.let_go() == [0, 0], started.err.read_text()
    lines.append(f"| `numapin run --rdzv-backend c10d` | 2 | {two_hosts.places} |")
    for kind, documented, hosts in KINDS:
        with job(tmp_path / f"{kind}{hosts}", kind, hosts=hosts) as started:
            started.await_ready()
            name = "numapin.spawn" if kind == "spawn" else f"numapin {kind}"
            lines.append(f"| `{name}` | {documented} | {_places(started, kind=kind)} |")
            started.let_go()  # its status does not matter: `trace` found no step to record
    text = DOCUMENT.read_text()
    start, end = "<!-- ports: written by the test -->\n", "<!-- end of ports -->"
    before, _, rest = text.partition(start)
    _, _, after = rest.partition(end)
    wanted = f"{before}{start}" + "\n".join(lines) + f"\n{end}{after}"
    if os.environ.get("NUMAPIN_UPDATE_GOLDEN"):
        DOCUMENT.write_text(wanted)
    assert text == wanted or os.environ.get("NUMAPIN_UPDATE_GOLDEN")
