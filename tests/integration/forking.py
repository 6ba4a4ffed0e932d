"""A process that has torch and numapin imported, or other modules, and runs each command line in a fork of itself.

Importing torch takes 1.5 s of CPU time. Settings that Python, the linker and torch read at start-up cannot be changed
later: `Forker.fits` says whether a command line may run here. Tests of numapin's own start-up use new processes.

A request is one message: the command line as JSON, its stdin, stdout and stderr, and a socket for the answer, which is
the fork's process id and then its exit status. If the other end of that socket is closed earlier, the fork is killed.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import inspect
import json
import os
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, NoReturn

_IMPORTED: Final = (
    *("torch.distributed.run", "torch.distributed.launcher.api"),
    *("numapin.cli.main", "numapin.cli.run", "numapin.cli.trace", "numapin.launcher.options", "numapin.launcher.hosts"),
    *("numapin.cli.entry", "numapin.launcher.ranks", "numapin.launch", "numapin.topology.discover"),
)
_READ_AT_START: Final = ("LD_", "PYTHON", "LC_", "LANG", "LOGLEVEL", "TORCH", "OMP_", "GOMP_", "KMP_", "MKL_")
_READ_LATER: Final = ("TORCHELASTIC_ERROR_FILE",)
_MESSAGE_BYTES: Final = 1 << 19
_ANSWER_BYTES: Final = 16
_CLIENT: Final = f"""
import json, os, signal, socket, sys
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
command = dict(arguments=sys.argv[1:], environ=dict(os.environ), cwd=os.getcwd(), cpus=[*os.sched_getaffinity(0)])
with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as forker, theirs:
    forker.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, {_MESSAGE_BYTES})
    forker.connect({{address!r}})
    message = json.dumps(dict(command, module={{script!r}})).encode()
    socket.send_fds(forker, [message], [0, 1, 2, theirs.fileno()])
pid = int(ours.recv({_ANSWER_BYTES}))
for number in {{passed_on}}:
    signal.signal(number, lambda number, _: os.kill(pid, number))
status = int(ours.recv({_ANSWER_BYTES}))
if status < 0:
    if -status in {{passed_on}}:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """`python -m module arguments`, with this environment and folder, and possibly in a session of its own.

    If `module` is the path of a script, it is `python script arguments`. It runs on `cpus`, or on the forker's if that
    is empty.
    """

    module: str
    arguments: Sequence[str]
    environ: Mapping[str, str]
    cwd: str
    new_session: bool = False
    cpus: Sequence[int] = ()

    def run(self) -> NoReturn:
        if self.cpus:
            os.sched_setaffinity(0, self.cpus)
        if self.new_session:
            os.setsid()
        os.chdir(self.cwd)
        os.environ.clear()
        os.environ.update(self.environ)
        tempfile.tempdir = None
        if self.module.endswith(".py"):  # it ends as Python does, because its end may matter
            sys.path[0] = str(Path(self.module).parent)
            sys.argv = [self.module, *self.arguments]
            runpy.run_path(self.module, run_name="__main__")
            sys.exit()
        sys.path[0] = self.cwd
        sys.argv = ["-m", *self.arguments]
        sys.modules.pop(self.module, None)
        try:
            runpy.run_module(self.module, run_name="__main__", alter_sys=True)
        except SystemExit as left:
            leave(left.code)
        leave(0)


class Forked:
    """A command line that runs in a fork, as a `subprocess.Popen` of it would be."""

    def __init__(self, answer: socket.socket) -> None:
        """Wait for the fork's process id on the socket for the answer."""
        self._answer = answer
        self.pid = self._read_number()
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._answer], [], [], 0)[0]:
            self.returncode = self._read_number()
            self._answer.close()
        return self.returncode

    def _read_number(self) -> int:
        number = self._answer.recv(_ANSWER_BYTES)
        if not number:
            raise ChildProcessError("the forker, or its child that waits for this fork, ended without an answer")
        return int(number)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit status. Raises subprocess.TimeoutExpired."""
        if self.returncode is None and not select.select([self._answer], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(f"fork {self.pid}", timeout or 0.0)
        status = self.poll()
        assert status is not None
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Forker:
    """A handle of the process, which ends with this object or with the process that made it."""

    def __init__(self, environ: Mapping[str, str], imported: Sequence[str] = _IMPORTED) -> None:
        self._start = _start(environ)
        self._folder = tempfile.TemporaryDirectory(prefix="np-forker-")
        self._address = str(Path(self._folder.name, "s"))
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MESSAGE_BYTES)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as theirs:
            theirs.bind(self._address)
            self._socket.connect(self._address)
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), *imported],
                env=environ,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.PIPE,  # its end is the end of this process
                stdout=subprocess.DEVNULL,
            )

    def client(self, path: str, passed_on: Sequence[signal.Signals] = ()) -> str:
        """Return a script that has the script `path` run in a fork, with its own environment, CPUs and files.

        It passes these signals on.
        """
        return _CLIENT.format(address=self._address, script=path, passed_on=[*map(int, passed_on)])

    def fits(self, environ: Mapping[str, str]) -> bool:
        """Return whether a new process with this environment would start as the forker did."""
        return _start(environ) == self._start

    def call(self, command: CommandLine, *, limit_s: float) -> tuple[int, str, str]:
        """Run a command in a fork, until its output is closed; return status, stdout and stderr."""
        (out, out_end), (err, err_end) = os.pipe(), os.pipe()
        process = self.start(command, out=out_end, err=err_end)
        os.close(out_end)
        os.close(err_end)
        end = time.monotonic() + limit_s
        output, complaints = _read([out, err], limit_s)
        try:
            status = process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            words = [command.module, *command.arguments]
            raise subprocess.TimeoutExpired(words, limit_s, output, complaints) from None
        return status, output.decode(), complaints.decode()

    def start(self, command: CommandLine, *, out: int, err: int) -> Forked:
        answer, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        message = json.dumps(asdict(command)).encode()
        with theirs, open(os.devnull, "rb") as nothing:  # noqa: PTH123 - as subprocess does
            socket.send_fds(self._socket, [message], [nothing.fileno(), out, err, theirs.fileno()])
        return Forked(answer)

    def close(self) -> None:
        self._socket.close()
        self._process.communicate()
        self._folder.cleanup()


def _start(environ: Mapping[str, str]) -> tuple[dict[str, str], set[int]]:
    """Return what a process inherits from this one and cannot change later."""
    names = (name for name in environ if name.startswith(_READ_AT_START) and name not in _READ_LATER)
    return {name: environ[name] for name in names}, os.sched_getaffinity(0)


def _read(pipes: Sequence[int], limit_s: float) -> list[bytes]:
    read = dict.fromkeys(pipes, b"")
    end = time.monotonic() + limit_s
    with selectors.DefaultSelector() as selector:
        for pipe in pipes:
            selector.register(pipe, selectors.EVENT_READ)
        while selector.get_map() and time.monotonic() < end:
            for key, _ in selector.select(end - time.monotonic()):
                if part := os.read(key.fd, 1 << 16):
                    read[key.fd] += part
                else:
                    selector.unregister(key.fd)
    for pipe in pipes:
        os.close(pipe)
    return [*read.values()]


def _stack() -> list[inspect.FrameInfo]:
    """Return the frames as `inspect.stack` does, without their source.

    torchrun asks for the names of functions, and reading the source takes 0.3 s of CPU time per start.
    """
    frames, frame = [], inspect.currentframe()
    while frame is not None and (frame := frame.f_back) is not None:
        code = frame.f_code
        frames.append(inspect.FrameInfo(frame, code.co_filename, frame.f_lineno, code.co_name, None, None))
    return frames


def main() -> None:
    gc.disable()
    for module in sys.argv[2:]:
        importlib.import_module(module)
    gc.enable()
    gc.freeze()  # so that no fork copies the pages of these modules to look for garbage in them
    inspect.stack = _stack  # type: ignore[assignment]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # reaps the children that wait for the commands
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        while True:
            ready, _, _ = select.select([requests, sys.stdin], [], [])
            if sys.stdin in ready:
                return
            message, descriptors, *_ = socket.recv_fds(requests, _MESSAGE_BYTES, 4)
            if os.fork() == 0:
                break
            for descriptor in descriptors:
                os.close(descriptor)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _fork(descriptors[:3], socket.socket(fileno=descriptors[3]))
    CommandLine(**json.loads(message)).run()


def _fork(files: Sequence[int], answer: socket.socket) -> None:
    pid = os.fork()
    if pid:
        for descriptor in (*range(3), *files):
            os.close(descriptor)
        _await(pid, answer)
    answer.close()
    for number, descriptor in enumerate(files):
        os.dup2(descriptor, number)
        os.close(descriptor)


def _await(pid: int, answer: socket.socket) -> NoReturn:
    """Answer with the process id and the exit status of a child; kill it once the other end is closed."""
    with suppress(OSError):
        answer.send(str(pid).encode())
    ended = os.pidfd_open(pid)
    if ended not in select.select([ended, answer.fileno()], [], [])[0]:
        os.kill(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with suppress(OSError):
        answer.send(str(status).encode())
    os._exit(0)


def leave(code: object) -> NoReturn:
    """End as Python does after `sys.exit(code)`, without taking its modules and torch's operators apart.

    That takes 0.2 to 0.6 s of CPU time with torch, and no command has anything left to do by then.
    """
    if code is not None and not isinstance(code, int):
        sys.stderr.write(f"{code}\n")
        code = 1
    threading._shutdown()  # type: ignore[attr-defined] # joins the threads, as Python does first
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit((code or 0) & 0xFF)


if __name__ == "__main__":
    main()
