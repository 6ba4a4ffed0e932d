"""Machines that are namespaces of this host, each with its own network and host name, and a common hosts file.

All their processes are in one PID namespace. Its first process dies with its creator; the kernel then ends all others,
and the networks with them. Their addresses and ports are not visible outside, so that they do not disturb other
processes of this host.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.integration.launching import Done, environment
from tests.waiting import wait_until

_UNDER_TEST: Final = {
    "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
    "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
}
"""Variables by which scripts find the numapin and python under test first."""

_TIMEOUT_S: Final = 240  # for a command that takes 1 to 10 s; other tests may share the CPUs
_SUBNET: Final = "10.213.0"
INTERFACE: Final = "wire"
_STAY: Final = ("sleep", "infinity")
# Names are looked up only in our hosts file; a query to an unreachable name server can take minutes.
_WORLD: Final = """
mount --bind "$1/hosts" /etc/hosts
mount --bind "$1/nsswitch" /etc/nsswitch.conf
exec sleep infinity
"""
_MACHINE: Final = 'hostname "$1"; ip link set lo up; exec sleep infinity'


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One machine. `pid` is the process that holds it, as seen from outside; `ended` waits for its processes."""

    name: str
    address: str
    pid: int
    ended: ExitStack

    def enter(self, folder: Path) -> tuple[str, ...]:
        spaces = ("--mount", "--pid", "--net", "--uts")
        return ("nsenter", f"--target={self.pid}", *spaces, "--", "env", f"--chdir={folder}", "--")

    def from_beside(self) -> tuple[str, ...]:
        """Return the words by which another machine of the same world starts a command here, as ssh would."""
        return ("nsenter", f"--target={_inner_pid(self.pid)}", "--net", "--uts", "--")

    def call(self, *command: str, folder: Path, **changes: str) -> Done:
        done = subprocess.run(
            [*self.enter(folder), *command],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
            env=environment(**_UNDER_TEST | changes),
        )
        return Done(status=done.returncode, out=done.stdout, err=done.stderr)

    def start(self, *command: str, folder: Path, log: Path, **changes: str) -> subprocess.Popen[bytes]:
        with log.open("ab") as file:
            process = subprocess.Popen(
                [*self.enter(folder), *command],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=environment(**_UNDER_TEST | changes),
            )
        self.ended.callback(process.wait)
        return process

    def processes(self) -> frozenset[int]:
        """Return the processes of this machine, except the one that holds it, as seen from outside."""
        own = _spaces_of(self.pid)
        found = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
        return frozenset(pid for pid in found if pid != self.pid and own and _spaces_of(pid) == own)

    def lose_power(self) -> None:
        """Kill all processes of this machine; it can be used again afterwards."""

        def dark() -> bool:
            left = self.processes()
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return not left

        is_dark = wait_until(dark, limit_s=120)
        assert is_dark, f"{self.name} still has processes"


@contextmanager
def pair(folder: Path, *names: str, resolved: bool = True) -> Iterator[tuple[Machine, Machine]]:
    """Make two connected machines, and end all of their processes afterwards, even if this process is killed.

    `resolved` puts their names into the hosts file; host names that cannot be resolved are common too.
    """
    addresses = [f"{_SUBNET}.{number}" for number in (1, 2)]
    lines = [f"{address} {name}" for address, name in zip(addresses, names, strict=True)]
    (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *(lines if resolved else [])]) + "\n")
    (folder / "nsswitch").write_text("passwd: files\ngroup: files\nhosts: files\n")
    with ExitStack() as ended:
        # The common process and mount namespaces: they end with this process.
        unshared = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
        world = _started(["setpriv", "--pdeathsig=KILL", *unshared, "sh", "-ec", _WORLD, "sh", str(folder)], ended)
        try:
            enter = ("nsenter", f"--target={_staying(world)}", "--mount", "--pid", "--")
            machines = []
            for name, address in zip(names, addresses, strict=True):
                words = [*enter, "unshare", "--net", "--uts", "--", "sh", "-ec", _MACHINE, "sh", name]
                pid = _staying(_started(words, ended))
                machines.append(Machine(name=name, address=address, pid=pid, ended=ended))
            one, other = machines
            _connect(one, other)
            yield one, other
        finally:
            for child in _children(world.pid):
                os.kill(child, signal.SIGKILL)  # the namespace's first process, with which the kernel ends all others
            world.kill()


def _started(words: Sequence[str], ended: ExitStack) -> subprocess.Popen[bytes]:
    """Start a process that runs until its world ends, and is waited for then."""
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL)
    ended.callback(process.wait)
    return process


def _connect(one: Machine, other: Machine) -> None:
    """Connect two machines by a virtual cable."""
    peer = f"peer name {INTERFACE} netns {_inner_pid(other.pid)}"
    commands = [(one, f"link add {INTERFACE} type veth {peer}")]
    for machine in (one, other):
        commands.append((machine, f"address add {machine.address}/24 dev {INTERFACE}"))
        commands.append((machine, f"link set {INTERFACE} up"))
    for machine, words in commands:
        done = machine.call("ip", *words.split(), folder=Path("/"))
        assert done.status == 0, done.err


def _staying(parent: subprocess.Popen[bytes]) -> int:
    """Wait until a child of `parent` runs `sleep infinity`, and return its process id."""

    def child() -> int | None:
        assert parent.poll() is None, f"ended with status {parent.returncode}: {parent.args!r}"
        stays = [pid for pid in _children(parent.pid) if _command_of(pid) == _STAY]
        return stays[0] if stays else None

    pid = wait_until(child, limit_s=60)
    assert pid is not None, "no new namespaces"
    return pid


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _command_of(pid: int) -> Sequence[str]:
    try:
        return tuple(Path(f"/proc/{pid}/cmdline").read_text(errors="replace").rstrip("\0").split("\0"))
    except OSError:
        return ()


def _inner_pid(pid: int) -> int:
    """Return a process's id within its own namespace."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("NSpid:")).split()[-1])


def _spaces_of(pid: int) -> tuple[str, ...]:
    """Return the network and PID namespaces of a process; empty if it has ended."""
    try:
        return tuple(str(Path(f"/proc/{pid}/ns/{space}").readlink()) for space in ("net", "pid"))
    except OSError:
        return ()
