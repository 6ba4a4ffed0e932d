"""Jobs that are disturbed on purpose: the marks that their ranks leave, and what remains, always in the same words."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import tempfile
import time
import uuid
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from tests.integration.forking import CommandLine
from tests.integration.launching import environment, free_port, script, start
from tests.integration.seam import handover, run_folder
from tests.waiting import gone, wait_until

LIMIT_S = 120.0
CPUS = len(os.sched_getaffinity(0))
PRELUDE = """
import glob, os, signal, sys, time
folder, rank, world = sys.argv[1], os.environ["RANK"], os.environ["WORLD_SIZE"]
restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
def mark(word):
    open(f"{folder}/{word}.{rank}.{restart}.{os.getpid()}", "w").close()
def wait_for(pattern, count=1):
    while len(glob.glob(f"{folder}/{pattern}")) < count:
        time.sleep(0.02)
"""


def meeting() -> list[str]:
    """Return the options with which launchers meet on this host, whose name torch would look up."""
    address = ("--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--local-addr", "127.0.0.1", "--rdzv-id", "job")
    return ["--rdzv-backend", "c10d", *address]


def _in_shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}  # noqa: S108 - only read


class Job:
    """One launcher and its ranks, all marked by an environment variable.

    `started` holds processes that the test must end. A launcher that imports torch is forked from a process that has
    imported it, unless `forks` is false.
    """

    started: ClassVar[list[Job]] = []
    forks: ClassVar[bool] = True

    def __init__(self, folder: Path, options: list[str], text: str, **variables: str) -> None:
        self.folder, self.token = folder, str(uuid.uuid4())
        # Not in the test's folder: multiprocessing puts its sockets here, and their names are limited to 107 bytes.
        self.temporary = Path(tempfile.gettempdir(), f"np{zlib.crc32(bytes(folder)):08x}")
        self.marks = folder / "marks"
        for path in (folder, self.marks, self.temporary):
            path.mkdir(exist_ok=True)
        ours = ["--bind", "exclusive" if CPUS > 1 else "node", "--quiet"]
        self.shared_before = _in_shared_memory()
        changes = {"TMPDIR": str(self.temporary), "FAULT_TOKEN": self.token, "CUDA_VISIBLE_DEVICES": ""} | variables
        line = CommandLine(
            module="numapin",
            arguments=("run", *ours, *options, script(folder, PRELUDE + text), str(self.marks)),
            environ=environment(**changes),
            cwd=str(Path.cwd()),
            new_session=True,  # a session of its own stands for a host
        )
        is_slow = "--nnodes" in options  # it imports torch
        self.process = start(line, err=folder / f"err-{self.token}", fork=self.forks and is_slow)
        self.started.append(self)

    @property
    def err(self) -> str:
        return (self.folder / f"err-{self.token}").read_text()

    def marked(self, word: str, *, restart: int | None = None) -> list[tuple[int, int, int]]:
        """Return (rank, restart, process) of each rank that left a mark."""
        found = [tuple(int(n) for n in path.name.split(".")[1:]) for path in self.marks.glob(f"{word}.*")]
        return sorted((a, b, c) for a, b, c in found if restart in (None, b))

    def await_marks(self, word: str, count: int) -> None:
        wait_until(lambda: len(self.marked(word)) >= count or self.process.poll() is not None, limit_s=LIMIT_S)
        assert len(self.marked(word)) >= count, self.err

    def wait(self) -> int:
        return self.process.wait(LIMIT_S)

    def processes(self) -> list[int]:
        return [int(path.name) for path in Path("/proc").glob("[0-9]*") if self._is_ours(int(path.name))]

    def leftovers(self) -> str:
        pids = {pid for *_, pid in self.marked("*")}
        wait_until(self._has_ended, limit_s=LIMIT_S)
        left = self.processes()
        facts = [f"{len(left)} process{'es' if len(left) > 1 else ''} left" if left else "no process left"]
        names = _in_shared_memory() - self.shared_before
        if shared := [name for name in names if pids & set(map(int, re.findall(r"\d+", name)))]:
            facts.append(f"shared memory left: {', '.join(shared)}")
        return "; ".join([*facts, *self._files()])

    def _has_ended(self) -> bool:
        """Return whether no process is left. One that is calling exec shows no environment, so one look may miss it."""
        if self.processes():
            return False
        time.sleep(0.2)
        return not self.processes()

    def end(self) -> None:
        """End all remaining processes. Their files stay: another host of the job may use the same folder."""
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def clean(self) -> None:
        """End all remaining processes and remove their files."""
        self.end()
        shutil.rmtree(self.temporary, ignore_errors=True)

    def same_binding(self) -> bool:
        paths = sorted(self.temporary.glob("numapin-*/observed-*.json"))
        bindings: dict[int, set[str]] = {}
        for path in paths:
            record = json.loads(path.read_text())
            bindings.setdefault(record["local_rank"], set()).add(json.dumps(record["applied"], sort_keys=True))
        return bool(bindings) and all(len(found) == 1 for found in bindings.values())

    def _files(self) -> Iterator[str]:
        """Describe which files are left after the next run has cleaned up."""
        runs = [run for run in self.temporary.glob("numapin-*") if not run_folder.is_live(str(run))]
        if runs:
            with run_folder.run_directory({"TMPDIR": str(self.temporary)}):
                pass
            left = [run for run in runs if run.exists()]
            has_reports = left and all((run / handover.REPORT).exists() for run in left)
            yield f"run folder {'with the report' if has_reports else 'left' if left else 'until the next run'}"
        others = {p.name for p in self.temporary.iterdir() if not p.name.startswith("numapin-")}
        yield from sorted({f"{name.partition('-')[0]}-* left" for name in others})

    def _is_ours(self, pid: int) -> bool:
        if pid == self.process.pid:  # a fork's first environment is its parent's
            return not gone(pid)
        try:
            environ, line = (Path(f"/proc/{pid}/{name}").read_bytes() for name in ("environ", "cmdline"))
        except OSError:
            return False
        is_guardian = b"launcher.guardian" in line and b"\0%d\0" % self.process.pid in line  # its environment is empty
        return (is_guardian or f"FAULT_TOKEN={self.token}".encode() in environ.split(b"\0")) and not gone(pid)


class JobFromTheStart(Job):
    """A job whose launcher starts in a new process, because the start is what matters."""

    forks: ClassVar[bool] = False


def status_of(code: int) -> str:
    return f"status {code}" if code >= 0 else f"ended by {signal.Signals(-code).name}"


def handles(pid: int, number: signal.Signals, *fields: str) -> bool:
    """Return whether a process has a handler for a signal, or has it in other fields of its status."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return False
    masks = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith(("SigCgt", *fields))]
    return any(mask >> (number - 1) & 1 for mask in masks)
