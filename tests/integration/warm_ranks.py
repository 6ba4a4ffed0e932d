"""Ranks that run in forks of a process which has torch, and the hook of `numapin trace` in it, imported.

Importing torch takes a rank 1.5 s of CPU time. Input: a script. Output: another script, for the launcher, which has the
first one run in a fork with its own environment, folder, CPUs and files, and which ends as the fork does; if it ends
before, the fork is killed. A script may also run numapin, where another program starts that. Tests of how hooks come
into a rank, of DataLoaders that numapin replaces, of signals, and of what restarts, start their ranks anew.

What Python, OpenMP and torch read when they start (PYTHON*, LD_*, OMP_NUM_THREADS) is the server's, not the rank's.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from numapin.launcher.preload import environment as hook_environment
from numapin.trace.settings import Settings
from tests.integration.launching import environment, script

if TYPE_CHECKING:
    from collections.abc import Sequence

_IMPORTED: Final = (
    *("torch", "torch.distributed", "torch.optim", "torch.profiler", "torch.utils.data"),
    *("numapin.data.loader", "numapin.trace.hook", "torch.distributed.run"),
)
_MESSAGE_BYTES: Final = 1 << 19
_CLIENT: Final = """
import json, os, socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
    server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 19)
    server.connect({address!r})
    said = [{script!r}, *sys.argv[1:]], dict(os.environ), os.getcwd(), sorted(os.sched_getaffinity(0))
    socket.send_fds(server, [json.dumps(said).encode()], [0, 1, 2])
    status = int(server.recv(16))
if status < 0:
    os.kill(os.getpid(), -status)
os._exit(status)
"""


def forked_script(folder: Path, text: str) -> str:
    """Write a script, train.py, and return the path of the one that has it run in a fork."""
    return script(folder, client(script(folder, text)), "starts_train.py")


def client(path: str) -> str:
    """Return a script that has the script `path` run in a fork."""
    return _CLIENT.format(address=_server(), script=path)


@cache
def _server() -> str:
    """Start this test process's server at the first call; return its address."""
    folder = tempfile.TemporaryDirectory(prefix="np-ranks-")
    atexit.register(folder.cleanup)
    os.chmod(folder.name, 0o755)  # noqa: S103, PTH101 - a script may drop its privileges
    address = str(Path(folder.name, "s"))
    own = environment()
    settings = Settings(folder="out", steps=1, skip=1)  # DataLoaders keep this one: use --output out
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen()
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(listener.fileno())],
            env=own | hook_environment("torch", own, trace=settings.to_text()),
            cwd=Path(__file__).parents[2],
            pass_fds=[listener.fileno()],
            stdin=subprocess.PIPE,  # its end is the end of this process
        )
    atexit.register(process.communicate)
    return address


def main() -> None:
    """Do the slow imports, and fork for each rank that asks."""
    gc.disable()
    for module in _IMPORTED:
        importlib.import_module(module)
    gc.enable()
    gc.freeze()  # so that no fork copies the pages of these modules to look for garbage in them
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # reaps the children that wait for the ranks
    with socket.socket(fileno=int(sys.argv[1])) as listener:
        while True:
            ready, _, _ = select.select([listener.fileno(), sys.stdin.fileno()], [], [])
            if sys.stdin.fileno() in ready:
                return
            connection, _ = listener.accept()
            if os.fork() == 0:
                break
            connection.close()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _serve(connection)


def _serve(connection: socket.socket) -> None:
    """Run the rank in a fork; wait here for its end, or for that of the process that asked."""
    message, descriptors, *_ = socket.recv_fds(connection, _MESSAGE_BYTES, 3)
    pid = os.fork()
    if not pid:
        connection.close()
        _become(descriptors, *json.loads(message))
        return
    for descriptor in descriptors:
        os.close(descriptor)
    ended = os.pidfd_open(pid)
    ready, _, _ = select.select([ended, connection.fileno()], [], [])
    if ended not in ready:
        os.kill(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        connection.send(str(status).encode())
    finally:
        os._exit(0)


def _become(
    descriptors: Sequence[int], argv: list[str], environ: dict[str, str], folder: str, cpus: Sequence[int]
) -> None:
    """Run a script as `python script` does: return, or raise, at its end."""
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(folder)
    os.sched_setaffinity(0, cpus)
    os.environ.clear()
    os.environ.update(environ)
    tempfile.tempdir = None
    sys.argv[:] = argv
    sys.path[0] = str(Path(argv[0]).parent)
    runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
