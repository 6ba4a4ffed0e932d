"""The runner of a benchmark: warm-up, repeats, peers in turn, each in fresh processes.

Every repeat runs every peer of a case once, in turn, so that a machine that slows down affects all of them. A peer's
threads, pinned pools and workers end with its processes, which it shares with other peers only if the case has a
session.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
import time
from contextlib import closing, suppress
from itertools import product
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, cast

from numapin.bench.model import Run, combine
from numapin.bench.python import running_module
from numapin.steps.job import remove_leftovers
from numapin.system import proc

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping

    from numapin.bench.model import Benchmark, Case, Peer

_GRACE_S: Final = 10.0  # torch's workers notice within 5 s that their parent is gone
_CLEAN_UP_S: Final = 2.0
_POLL_S: Final = 0.2


class _MeasurementError(Exception):
    """A peer's process reported that it has no figures, or died; the text is the reason."""


def measure(
    benchmark: Benchmark, *, repeats: int, timeout_s: float, starts: Callable[[Case, Peer, int], None]
) -> Generator[Run]:
    """Run each case's peers `repeats` times, interleaved, and yield each run when it ends.

    `starts` is called before each run. A peer that cannot be measured, or takes longer than `timeout_s` seconds, yields
    a run with the reason, and is left out of the later repeats of the case.
    """
    with closing(_Processes(benchmark.module, timeout_s)) as processes:
        left_out: set[tuple[str, str]] = set()
        for case in benchmark.cases:
            for repeat, peer in product(range(repeats), case.peers):
                if (case.name, peer.name) in left_out:
                    continue
                starts(case, peer, repeat)
                run = _run(benchmark, case, peer, repeat, processes)
                if run.skipped is not None:
                    left_out.add((case.name, peer.name))
                yield run


def _run(benchmark: Benchmark, case: Case, peer: Peer, repeat: int, processes: _Processes) -> Run:
    try:
        answers = processes.answers(case, peer)
    except _MeasurementError as reason:
        return Run(case=case.name, peer=peer.name, repeat=repeat, skipped=str(reason))
    return Run(
        case=case.name,
        peer=peer.name,
        repeat=repeat,
        figures=combine([answer["figures"] for answer in answers], summed=benchmark.summed),
        details=tuple(answer["details"] for answer in answers),
    )


class _Processes:
    """The measuring processes of one run, or of consecutive cases with the same session."""

    def __init__(self, module: str, timeout_s: float) -> None:
        self._module, self._timeout_s = module, timeout_s
        self._session: str | None = None
        self._children: list[_Child] = []

    def answers(self, case: Case, peer: Peer) -> list[dict[str, Any]]:
        """Start all of the peer's processes measuring when all are warm, and return their answers."""
        if case.session != self._session:
            self._finish()
        self._session = case.session
        try:
            answers = self._ask(peer, time.monotonic() + self._timeout_s)
        except BaseException:
            self.close()  # their state is unknown
            raise
        if case.session is None:
            self._finish()
        return answers

    def close(self) -> None:
        """End all processes and their children."""
        while self._children:
            self._children[-1].close()  # a signal may interrupt this; the caller then calls again
            self._children.pop()

    def _ask(self, peer: Peer, deadline: float) -> list[dict[str, Any]]:
        num_asked = len(peer.specs)
        self._children += [_Child(self._module) for _ in range(num_asked - len(self._children))]
        asked = self._children[:num_asked]
        for child, spec in zip(asked, peer.specs, strict=True):
            child.take(spec)
        for child in asked:
            child.answer(deadline)
        _let_go(asked)
        answers = [child.answer(deadline) for child in asked]
        if self._session is not None:
            _let_go(asked)
        return answers

    def _finish(self) -> None:
        """Let all processes exit by themselves."""
        for child in self._children:
            child.stop()
        self.close()


def _let_go(children: Iterable[_Child]) -> None:
    for child in children:
        child.go()


class _Child:
    """A measuring process in its own session. Closing it ends everything that it started."""

    def __init__(self, module: str) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - `close` does
        command = running_module(module)
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=self._errors, bufsize=0, start_new_session=True
        )
        self._stdin, self._stdout = cast("IO[bytes]", self._process.stdin), cast("IO[bytes]", self._process.stdout)
        self._received = b""
        self._members: list[int] = []  # of its session, when it was told to stop

    def close(self) -> None:
        """Give a stopped process time to close its loader, then end the rest of its session."""
        members = self._members or _session(self._process.pid)
        if self._members:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_GRACE_S)
        self._end_session()
        self._process.wait()
        remove_leftovers({self._process.pid, *members})  # a dead process is not among the members
        for file in (self._stdin, self._stdout, self._errors):
            file.close()

    def _end_session(self) -> None:
        """Terminate the rest of the session, then kill it; multiprocessing's tracker cleans up in between."""
        deadline = time.monotonic() + _CLEAN_UP_S
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
            while _session(self._process.pid) and time.monotonic() < deadline:
                time.sleep(_CLEAN_UP_S / 100)
            os.killpg(self._process.pid, signal.SIGKILL)

    def take(self, spec: Mapping[str, object]) -> None:
        """Send a spec."""
        self._send(json.dumps(spec).encode() + b"\n")

    def go(self) -> None:
        """Let it start measuring or, after its answer, read the next spec."""
        self._send(b"\n")

    def _send(self, line: bytes) -> None:
        with suppress(BrokenPipeError):  # it just died; `answer` reports that
            self._stdin.write(line)

    def stop(self) -> None:
        """Let it exit."""
        self._members = _session(self._process.pid)
        self._stdin.close()

    def answer(self, deadline: float) -> dict[str, Any]:
        """Return its next answer. Raises _MeasurementError if it cannot measure, has died or is late."""
        content: dict[str, Any] = json.loads(self._line(deadline))
        if "failed" in content:
            raise _MeasurementError(f"failed: {content['failed']}")
        return content

    def _line(self, deadline: float) -> bytes:
        while b"\n" not in self._received:
            if time.monotonic() > deadline:
                raise _MeasurementError("failed: timed out; allow more time with --timeout")
            ended = self._process.poll() is not None  # its workers may hold the pipe open
            readable = select.select([self._stdout], [], [], 0 if ended else _POLL_S)[0]
            received = os.read(self._stdout.fileno(), 1 << 16) if readable else b""
            if ended and not received:
                raise _MeasurementError(self._cause_of_death())
            self._received += received
        line, _, self._received = self._received.partition(b"\n")
        return line

    def _cause_of_death(self) -> str:
        """Return its exit status and the last line that it wrote to stderr."""
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "nothing on stderr")
        return f"failed: exited with status {self._process.returncode}: {last.strip()}"


def _session(leader: int) -> list[int]:
    """Return the live processes of a session; only their parents can reap zombies."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(proc.Gone):  # it just exited
            stat = proc.stat(str(path))
            if stat.session == leader and not stat.has_ended:
                found.append(int(path.name))
    return found
