"""Start numapin and torchrun as a user does, in new processes."""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.integration.forking import CommandLine, Forked, Forker
from tests.integration.seam import proc

NUMAPIN = (sys.executable, "-m", "numapin")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
_WITH_TORCH = ("run", "trace")  # the commands that import it
_COMMANDS = (
    *("numapin.cli.main", "numapin.cli.entry", "numapin.cli.job", "numapin.cli.compare", "numapin.cli.topo"),
    *("numapin.cli.plan", "numapin.cli.verify", "numapin.cli.top", "numapin.cli.attach", "numapin.cli.doctor"),
)
_MEASURING = (  # for benchmarks whose measuring processes may be forks
    *("torch.utils.data", "numapin.cli.bench", "numapin.bench.buffers", "numapin.bench.loader"),
)
_LIMIT_S = 120
_DEATH_S = 10
_NOTHING = Path(os.devnull)
REFUSE_POLICY = (sys.executable, str(Path(__file__).resolve().parents[1] / "vm" / "refuse_policy.py"))

# Begins scripts in which torch's compiler does not matter. Optimizers and profilers import it to ask for its settings,
# which costs a rank 2 s of CPU time.
WITHOUT_COMPILER = """
import sys
class _NoCompiler:
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self
    def __call__(self, *_, **__):
        return self
    def __bool__(self):
        return False
    def disable(self, function, *_, **__):
        return function
sys.modules.update(dict.fromkeys(("torch._dynamo", "torch._inductor", "torch._inductor.config"), _NoCompiler()))
"""

# Begins scripts in which Python's garbage does not matter, or the line that imports torch. To look for garbage during
# the import, and when the process ends, costs a rank 0.6 s.
WITHOUT_GARBAGE = "import atexit, gc; gc.disable(); atexit.register(gc.freeze); "

# Both of these, for scripts that import torch. Garbage is collected again after the import, except torch's own objects.
TORCH_QUICKLY = f"{WITHOUT_COMPILER}{WITHOUT_GARBAGE}import torch; gc.freeze(); gc.enable()\n"

# Prints a rank's environment, and its process, CPUs, memory policy and limit on files as the kernel reports them.
DUMP = """
import ctypes, json, os, resource
status = open("/proc/self/status").read()
cpus = next(line.split()[1] for line in status.splitlines() if line.startswith("Cpus_allowed_list"))
mode = ctypes.c_int(-1)
ctypes.CDLL("libnuma.so.1").get_mempolicy(ctypes.byref(mode), None, 0, None, 0)
files = str(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
environ = dict(os.environ) | {"RANK": os.environ.get("RANK", "0"), "cpus": cpus, "mode": str(mode.value)}
line = json.dumps(environ | {"pid": str(os.getpid()), "files": files}) + "\\n"
os.write(1, line.encode())  # in one piece: ranks share the pipe
"""

# Variables of this test run must not reach the launchers under test.
_DROPPED = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "NUMAPIN_RUN_DIR", "XDG_RUNTIME_DIR")


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    status: int
    out: str
    err: str

    def json_lines(self) -> list[dict[str, str]]:
        """Return the JSON lines that ranks printed, in the order of the ranks."""
        return sorted(
            (json.loads(line) for line in self.out.splitlines() if line.startswith("{")), key=lambda d: int(d["RANK"])
        )


def environment(**changes: str) -> dict[str, str]:
    """Return this process's environment without the launchers' variables, and with changes."""
    return {key: value for key, value in os.environ.items() if key not in _DROPPED} | changes


def call(*command: str, cwd: Path | None = None, **changes: str) -> Done:
    """Run a command and wait for its end. If it takes too long, fail with what its processes were doing.

    They say so if they have PYTHONFAULTHANDLER.
    """
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=cwd, env=environment(**changes)) as process:
        (done,) = all_ended(process)
    return done


def all_ended(*processes: subprocess.Popen[str], limit_s: float = _LIMIT_S) -> list[Done]:
    """Wait for processes that depend on each other; return how each ended.

    If they take too long, all of them end, with what they started, and the test fails with the output of each.
    """
    is_late = threading.Event()

    def end() -> None:
        is_late.set()
        children = proc.children_of()
        running = [process.pid for process in processes if process.poll() is None]
        pids = [each for pid in running for each in (*proc.descendants(pid, children), pid)]
        for number in (signal.SIGABRT, signal.SIGKILL):  # the first shows what they were doing, unless it is blocked
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            time.sleep(_DEATH_S)

    timer = threading.Timer(limit_s, end)
    timer.start()
    with ThreadPoolExecutor(len(processes)) as pool:  # all are read at once: one that cannot write may hold up another
        # What holds the pipes of a process that has ended may have left it, and is not among those that are killed.
        outputs = list(pool.map(lambda process: process.communicate(timeout=limit_s + 3 * _DEATH_S), processes))
    timer.cancel()
    ended = [
        Done(status=process.returncode, out=out or "", err=err or "")
        for process, (out, err) in zip(processes, outputs, strict=True)
    ]
    if is_late.is_set():
        said = [
            f"--- {process.args!r} ended with {done.status}\n{done.out[-2000:]}\n{done.err[-20000:]}"
            for process, done in zip(processes, ended, strict=True)
        ]
        pytest.fail("\n".join([f"this took longer than {limit_s} s", *said]))
    return ended


def numapin(*arguments: str, cwd: Path | None = None, **changes: str) -> Done:
    if arguments and arguments[0] in _WITH_TORCH:
        return _forked("numapin", *arguments, cwd=cwd, changes=changes)
    return call(*NUMAPIN, *arguments, cwd=cwd, **changes)


def forked(*arguments: str, cwd: Path | None = None, **changes: str) -> Done:
    """Run a command of numapin's that does not import torch in a fork, and wait for its end.

    Tests of numapin's own start-up use `numapin`.
    """
    return _forked("numapin", *arguments, cwd=cwd, changes=changes, imported=_COMMANDS)


def forked_bench(*arguments: str, **changes: str) -> Done:
    """Run `numapin bench` in a fork, and its measuring processes in forks of that; not for benchmarks of launchers."""
    root = Path(__file__).resolve().parents[2]
    return _forked(
        "tests.integration.forked_bench", "bench", *arguments, cwd=root, changes=changes, imported=_MEASURING
    )


def torchrun(*arguments: str, cwd: Path | None = None, **changes: str) -> Done:
    return _forked("torch.distributed.run", *arguments, cwd=cwd, changes=changes)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def torchs_store() -> tuple[str, ...]:
    """Return options with which torch serves the ranks' store on one host, on a free port."""
    return "--rdzv-backend", "static", "--rdzv-endpoint", f"localhost:{free_port()}"


def _forked(
    module: str, *arguments: str, cwd: Path | None, changes: Mapping[str, str], imported: Sequence[str] = ()
) -> Done:
    """Run a module in a fork of `_forker(*imported)`, or in a new process if it cannot run there."""
    environ = environment(**changes)
    forker = _forker(*imported)
    if not forker.fits(environ):
        return call(sys.executable, "-m", module, *arguments, cwd=cwd, **changes)
    command = CommandLine(module=module, arguments=arguments, environ=environ, cwd=str(cwd or Path.cwd()))
    status, out, err = forker.call(command, limit_s=_LIMIT_S)
    return Done(status=status, out=out, err=err)


def start(command: CommandLine, *, err: Path, out: Path = _NOTHING, fork: bool) -> Forked | subprocess.Popen[bytes]:
    """Start a command, which writes to files, in a new process or in a fork of one that has torch imported."""
    with out.open("wb") as output, err.open("wb") as errors:
        if fork and _forker().fits(command.environ):
            return _forker().start(command, out=output.fileno(), err=errors.fileno())
        return subprocess.Popen(
            [sys.executable, "-m", command.module, *command.arguments],
            cwd=command.cwd,
            env=command.environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            start_new_session=command.new_session,
        )


@cache
def _forker(*imported: str) -> Forker:
    """Return this test process's forker with torch, or with these modules; start it at the first call."""
    forker = Forker(environment(), imported) if imported else Forker(environment())
    atexit.register(forker.close)
    return forker


def script(folder: Path, text: str, name: str = "train.py") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def observed(run_dir: Path) -> list[dict[str, Any]]:
    """Return the records that ranks left in the only run below `run_dir`, by name: rank, then restart."""
    return [json.loads(path.read_text()) for path in sorted(run_dir.glob("run-*/observed-*.json"))]
