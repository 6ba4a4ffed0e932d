"""Run a benchmark: warm-up, repeats, peers in turn, each in fresh processes. Edge.

Comes in: a `Benchmark`. Goes out: one `Run` after the other. Every repeat runs every peer of a case once, in turn, so
that a machine that slows down slows all of them. A peer's threads, pinned pools and workers end with its processes,
which are its own unless the case names a session.
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
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, cast

from numapin.bench.model import Run, combine
from numapin.bench.python import running_module
from numapin.system import proc
from numapin.system.proc import children_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from numapin.bench.model import Benchmark, Case, Peer

_GRACE_S: Final = 10.0  # torch's workers notice within 5 s that they are not needed any more
_CLEAN_UP_S: Final = 2.0
_POLL_S: Final = 0.2


class _CannotMeasure(Exception):  # noqa: N818 - reads as what happened
    """A peer's process said, or showed by ending, that it has no figures; the text is the reason."""


def measure(
    benchmark: Benchmark, *, repeats: int, timeout_s: float, starts: Callable[[Case, Peer, int], None]
) -> Iterator[Run]:
    """Run each case's peers `repeats` times, interleaved, and yield each run when it is over.

    `starts` is called before each. A peer that cannot be measured, or is not done after `timeout_s` seconds, gives a
    run that says why, and is left out of the case's later repeats.
    """
    with closing(_Processes(benchmark.module, timeout_s)) as processes:
        for case in benchmark.cases:
            left_out: set[str] = set()
            for repeat in range(repeats):
                for peer in (peer for peer in case.peers if peer.name not in left_out):
                    starts(case, peer, repeat)
                    run = _run(benchmark, case, peer, repeat, processes)
                    left_out |= {peer.name} if run.skipped is not None else set()
                    yield run


def _run(benchmark: Benchmark, case: Case, peer: Peer, repeat: int, processes: _Processes) -> Run:
    try:
        answers = processes.answers(case, peer)
    except _CannotMeasure as reason:
        return Run(case=case.name, peer=peer.name, repeat=repeat, skipped=str(reason))
    return Run(
        case=case.name,
        peer=peer.name,
        repeat=repeat,
        figures=combine([answer["figures"] for answer in answers], summed=benchmark.summed),
        details=tuple(answer["details"] for answer in answers),
    )


class _Processes:
    """The measuring processes: those of one run, or of one session until a case of another one comes."""

    def __init__(self, module: str, timeout_s: float) -> None:
        self._module, self._timeout_s = module, timeout_s
        self._session: str | None = None
        self._children: list[_Child] = []

    def answers(self, case: Case, peer: Peer) -> list[dict[str, Any]]:
        """Let the peer's processes begin to measure at once when all are warm, and return what they said."""
        if case.session != self._session:
            self._finish()
        self._session = case.session
        try:
            answers = self._ask(peer, time.monotonic() + self._timeout_s)
        except BaseException:
            self.close()  # nobody knows what state they are in
            raise
        if case.session is None:
            self._finish()
        return answers

    def close(self) -> None:
        """End all, and what they started."""
        while self._children:
            self._children.pop().close()

    def _ask(self, peer: Peer, deadline: float) -> list[dict[str, Any]]:
        while len(self._children) < len(peer.specs):
            self._children.append(_Child(self._module))
        asked = list(zip(self._children, peer.specs, strict=False))
        for child, spec in asked:
            child.take(spec)
        for child, _ in asked:
            child.answer(deadline)
        for child, _ in asked:
            child.go()
        answers = [child.answer(deadline) for child, _ in asked]
        if self._session is not None:
            for child, _ in asked:
                child.go()
        return answers

    def _finish(self) -> None:
        """Let all end by themselves."""
        for child in self._children:
            child.stop()
        self.close()


class _Child:
    """A measuring process, in a session of its own, and all that it started: gone when it is closed."""

    def __init__(self, module: str) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - `close` does
        command = running_module(module)
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=self._errors, bufsize=0, start_new_session=True
        )
        self._stdin, self._stdout = cast("IO[bytes]", self._process.stdin), cast("IO[bytes]", self._process.stdout)
        self._heard = b""
        self._members: list[int] = []  # when it was told to stop

    def close(self) -> None:
        """Give a process that was told to stop the time to close its loader; then end what is left of its session."""
        members = self._members or _session(self._process.pid)
        if self._members:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_GRACE_S)
        self._end_session()
        self._process.wait()
        _remove_leftovers({self._process.pid, *members})  # one that died is not among the members
        for file in (self._stdin, self._stdout, self._errors):
            file.close()

    def _end_session(self) -> None:
        """Ask all that is left to end, and kill it if it does not; multiprocessing's tracker cleans up in between."""
        deadline = time.monotonic() + _CLEAN_UP_S
        started = _below(self._process.pid, children_of())  # a launcher's ranks have sessions of their own
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
            while _session(self._process.pid) and time.monotonic() < deadline:
                time.sleep(_CLEAN_UP_S / 100)
            os.killpg(self._process.pid, signal.SIGKILL)
        for pid in started:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def take(self, spec: Mapping[str, object]) -> None:
        """Give it what to measure."""
        self._say(json.dumps(spec).encode() + b"\n")

    def go(self) -> None:
        """Let it measure; or, when it has, take what comes next."""
        self._say(b"\n")

    def _say(self, line: bytes) -> None:
        with suppress(BrokenPipeError):  # it has just died: `answer` will tell
            self._stdin.write(line)

    def stop(self) -> None:
        """Let it end."""
        self._members = _session(self._process.pid)
        self._stdin.close()

    def answer(self, deadline: float) -> dict[str, Any]:
        """Return the next thing it says. Raises _CannotMeasure where that is a reason, its end, or late."""
        content: dict[str, Any] = json.loads(self._line(deadline))
        for word, prefix in (("skipped", ""), ("failed", "failed: ")):
            if word in content:
                raise _CannotMeasure(f"{prefix}{content[word]}")
        return content

    def _line(self, deadline: float) -> bytes:
        while b"\n" not in self._heard:
            if time.monotonic() > deadline:
                raise _CannotMeasure("failed: not done within its time; more with --timeout")
            ended = self._process.poll() is not None  # its workers may hold the pipe open
            if select.select([self._stdout], [], [], 0 if ended else _POLL_S)[0]:
                heard = os.read(self._stdout.fileno(), 1 << 16)
            else:
                heard = b""
            if not heard and ended:
                raise _CannotMeasure(self._epitaph())
            self._heard += heard
        line, _, self._heard = self._heard.partition(b"\n")
        return line

    def _epitaph(self) -> str:
        """Say how it ended, with the last line that it wrote on stderr."""
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "nothing on stderr")
        return f"failed: ended with status {self._process.returncode}: {last.strip()}"


def _below(pid: int, children: Mapping[int, list[int]]) -> list[int]:
    """Return all that a process started, and what that started."""
    return [below for child in children.get(pid, []) for below in (child, *_below(child, children))]


def _session(leader: int) -> list[int]:
    """Return the processes of a session that have not ended; of zombies only their parents can dispose."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(proc.Gone):  # it has just ended
            stat = proc.stat(str(path))
            found += [int(path.name)] if stat.session == leader and not stat.has_ended else []
    return found


def _remove_leftovers(pids: Iterable[int]) -> None:
    """Remove the files of batches that torch's workers were about to unlink when they ended."""
    for pid in pids:
        for path in Path("/dev/shm").glob(f"torch_{pid}_*"):  # noqa: S108 - where torch puts them
            path.unlink(missing_ok=True)
