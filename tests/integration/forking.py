"""A process that has torch and numapin imported, or other modules, and runs each command line in a fork of itself.

Importing torch takes 1.5 s of CPU time, and most tests of this folder would start by importing it. Input: a module, its
arguments, environment and folder. Output: exit status, stdout and stderr, as from a new process. Settings that Python,
the linker and torch read at start-up cannot be changed later: `Forker.fits` says whether a command line may run here.
Tests of numapin's own start-up use new processes.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_IMPORTED: Final = (
    *("torch.distributed.run", "torch.distributed.launcher.api"),
    *("numapin.cli.main", "numapin.cli.run", "numapin.cli.trace", "numapin.launch", "numapin.launcher.torchrun"),
)
_READ_AT_START: Final = ("LD_", "PYTHON", "LC_", "LANG", "LOGLEVEL", "TORCH", "OMP_", "GOMP_", "KMP_", "MKL_")
_MESSAGE_BYTES: Final = 1 << 19


class Forker:
    """A handle of the process, which ends with this object or with the process that made it.

    The modules that it has imported are those of the launchers, unless others are given.
    """

    def __init__(self, environ: Mapping[str, str], imported: Sequence[str] = _IMPORTED) -> None:
        self._start = _start(environ)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MESSAGE_BYTES)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), *imported],
                env=environ,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )

    def fits(self, environ: Mapping[str, str]) -> bool:
        """Return whether a new process with this environment would start as the forker did."""
        return _start(environ) == self._start

    def call(
        self, module: str, arguments: Sequence[str], environ: Mapping[str, str], cwd: Path | None, *, limit_s: float
    ) -> tuple[int, str, str]:
        """Run `python -m module arguments` in a fork, until its output is closed; return status, stdout and stderr."""
        told = {"module": module, "arguments": [*arguments], "environ": {**environ}, "cwd": str(cwd or Path.cwd())}
        pipes = [os.pipe() for _ in range(3)]
        socket.send_fds(
            self._socket, [json.dumps(told).encode()], [writer for _, writer in pipes]
        )  # in the order of _fork
        for _, writer in pipes:
            os.close(writer)
        out, err, answer = _read([reader for reader, _ in pipes], limit_s)
        pid, *status = map(int, answer.split())
        if not status:
            os.kill(pid, signal.SIGKILL)
            raise subprocess.TimeoutExpired([module, *arguments], limit_s, out, err)
        return status[0], out.decode(), err.decode()

    def close(self) -> None:
        """End the process."""
        self._socket.close()
        self._process.wait()


def _start(environ: Mapping[str, str]) -> tuple[dict[str, str], set[int]]:
    """Return what a process inherits from this one and cannot change later."""
    return {name: environ[name] for name in environ if name.startswith(_READ_AT_START)}, os.sched_getaffinity(0)


def _read(pipes: Sequence[int], limit_s: float) -> list[bytes]:
    """Return the output of each pipe, until all are closed or the time is up."""
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


def main() -> None:
    """Do the slow imports, and fork for each command line that arrives."""
    for module in sys.argv[2:]:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # so that no fork copies the pages of these modules to look for garbage in them
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # reaps the children that wait for the commands
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        while True:
            message, descriptors, *_ = socket.recv_fds(requests, _MESSAGE_BYTES, 3)
            if not message:
                return
            if os.fork() == 0:
                break
            for descriptor in descriptors:
                os.close(descriptor)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _fork(*descriptors)
    _become(**json.loads(message))


def _fork(out: int, err: int, answer: int) -> None:
    """Return in a fork that has these as its output; in the parent, wait for it and answer with its status."""
    pid = os.fork()
    if pid:
        for descriptor in (1, 2, out, err):
            os.close(descriptor)
        os.write(answer, f"{pid} ".encode())
        os.write(answer, str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
        os._exit(0)
    for number, descriptor in enumerate((out, err), start=1):
        os.dup2(descriptor, number)
    for descriptor in (out, err, answer):
        os.close(descriptor)


def _become(module: str, arguments: list[str], environ: dict[str, str], cwd: str) -> NoReturn:
    """Run `python -m module arguments` in this folder with this environment."""
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    tempfile.tempdir = None
    sys.path[0] = cwd
    sys.argv = ["-m", *arguments]
    sys.modules.pop(module, None)
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as left:
        _leave(left.code)
    _leave(0)


def _leave(code: object) -> NoReturn:
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
