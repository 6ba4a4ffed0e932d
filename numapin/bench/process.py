"""Measuring processes: `measure` runs the peers of a benchmark in turn; each process runs `serve`.

Every repeat runs every peer of a case once, in turn, so that a machine that slows down affects all of them. A peer's
threads, pinned pools and workers end with its processes, which it shares with other peers only if the case has a
session. The two ends exchange lines of JSON over stdin and stdout.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import tempfile
import time
from collections import defaultdict
from contextlib import closing, suppress
from importlib import import_module
from itertools import product
from math import isfinite
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, cast

from numapin.base.formats import running
from numapin.base.strict_json import encode
from numapin.bench.model import Run
from numapin.launcher.failure import name_of_signal
from numapin.steps.job import remove_leftovers, stop
from numapin.system import proc

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

    from numapin.bench.model import Benchmark, Case, Peer

_GRACE_S: Final = 10.0  # torch's workers notice within 5 s that their parent is gone
_CLEAN_UP_S: Final = 2.0
_POLL_S: Final = 0.2
_STDIN, _STDOUT, _STDERR = 0, 1, 2


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
                try:
                    answers = processes.answers(case, peer)
                except _MeasurementError as reason:
                    left_out.add((case.name, peer.name))
                    yield Run(case=case.name, peer=peer.name, repeat=repeat, skipped=str(reason))
                    continue
                values: dict[str, list[float]] = defaultdict(list)
                for answer in answers:
                    for name, value in answer["figures"].items():
                        values[name].append(value)
                yield Run(
                    case=case.name,
                    peer=peer.name,
                    repeat=repeat,
                    figures={name: (sum if name in benchmark.summed else max)(found) for name, found in values.items()},
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
            deadline = time.monotonic() + self._timeout_s
            while len(self._children) < len(peer.specs):
                self._children.append(_Child(self._module))
            asked = self._children[: len(peer.specs)]
            for child, spec in zip(asked, peer.specs, strict=True):
                child.send(json.dumps(spec))
            for child in asked:
                child.answer(deadline)  # it is warm
            for child in asked:
                child.send("")  # measure
            answers = [child.answer(deadline) for child in asked]
            for child in asked if case.session is not None else ():
                child.send("")  # stop working, and read the next spec
        except BaseException:
            self.close()  # their state is unknown
            raise
        if case.session is None:
            self._finish()
        return answers

    def _finish(self) -> None:
        """Let all processes exit by themselves."""
        for child in self._children:
            child.stop()
        self.close()

    def close(self) -> None:
        """End all processes and their children."""
        while self._children:
            self._children[-1].close()  # a signal may interrupt this; the caller then calls again
            self._children.pop()


class _Child:
    """A measuring process in its own session. Closing it ends everything that it started."""

    def __init__(self, module: str) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - `close` does
        command = running(f"from numapin.bench.process import serve; serve({module!r})")
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=self._errors, bufsize=0, start_new_session=True
        )
        self._stdin, self._stdout = cast("IO[bytes]", self._process.stdin), cast("IO[bytes]", self._process.stdout)
        self._received = b""
        self._members: list[int] = []  # of its session, when it was told to stop

    def send(self, line: str) -> None:
        """Send a spec or, as an empty line, the signal to go on."""
        with suppress(BrokenPipeError):  # it just died; `answer` reports that
            self._stdin.write(line.encode() + b"\n")

    def answer(self, deadline: float) -> dict[str, Any]:
        """Return its next answer. Raises _MeasurementError if it cannot measure, has died or is late."""
        line = b""
        while not line.startswith(b"{"):  # other lines were printed before the process reserved stdout
            while b"\n" not in self._received:
                if time.monotonic() > deadline:
                    raise _MeasurementError("failed: timed out; allow more time with --timeout")
                ended = self._process.poll() is not None  # its workers may hold the pipe open
                readable = select.select([self._stdout], [], [], 0 if ended else _POLL_S)[0]
                received = os.read(self._stdout.fileno(), 1 << 16) if readable else b""
                if ended and not received:
                    self._errors.seek(0)
                    lines = self._errors.read().decode(errors="replace").split("\n")
                    last = next((line for line in reversed(lines) if line.strip()), "nothing on stderr")
                    status = self._process.returncode
                    how = f"was ended by {name_of_signal(-status)}" if status < 0 else f"exited with status {status}"
                    raise _MeasurementError(f"failed: {how}: {last.strip()}")
                self._received += received
            line, _, self._received = self._received.partition(b"\n")
        content: dict[str, Any] = json.loads(line)
        if "failed" in content:
            raise _MeasurementError(f"failed: {content['failed']}")
        return content

    def stop(self) -> None:
        """Let it exit."""
        self._members = _session(self._process.pid)
        self._stdin.close()

    def close(self) -> None:
        """Give a stopped process time to close its loader, then end the rest of its session."""
        if self._members:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_GRACE_S)
        # multiprocessing's tracker needs time to clean up
        stop(self._process, lambda: _session(self._process.pid), grace_s=_CLEAN_UP_S)
        remove_leftovers({self._process.pid, *self._members})  # also of members that ended before `stop` looked
        for file in (self._stdin, self._stdout, self._errors):
            file.close()


def _session(leader: int) -> list[int]:
    """Return the live processes of a session; only their parents can reap zombies."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(proc.Gone):  # it just exited
            stat = proc.stat(str(path))
            if stat.session == leader and not stat.has_ended:
                found.append(int(path.name))
    return found


# --- in the measuring process -----------------------------------------------------------------------------------------


class Harness:
    """The measuring process's connection to `measure`. Other output to stdout goes to stderr."""

    def __init__(self) -> None:
        """Reserve stdout for the protocol."""
        self._out = os.dup(_STDOUT)
        os.dup2(_STDERR, _STDOUT)
        os.write(self._out, b"\n")  # the end of what was printed

    def next_spec(self) -> dict[str, Any] | None:
        """Wait for the next spec; return None at the end."""
        line = bytearray()
        while not line.endswith(b"\n"):
            byte = os.read(_STDIN, 1)  # one byte at a time: what follows the line is for _wait
            if not byte:
                return None
            line += byte
        spec: dict[str, Any] = json.loads(line)
        return spec

    def wait_for_start(self, idle: Callable[[], object]) -> None:
        """Report that this process is warm, and call `idle` until every process is."""
        self._write({"state": "warm"})
        self._wait(idle)

    def report(
        self, figures: Mapping[str, float], *, details: Mapping[str, object], idle: Callable[[], object]
    ) -> None:
        """Report the figures, and keep calling `idle`, so that slower processes measure under the same load."""
        odd = [name for name, figure in figures.items() if not isfinite(figure)]
        if odd:
            msg = f"{odd[0]} is {figures[odd[0]]}, not a finite number"
            raise ValueError(msg)
        self._write({"figures": dict(figures), "details": dict(details)})
        self._wait(idle)

    def fail(self, error: BaseException) -> None:
        """Report an error at once: threads that the peer left behind may keep this process from exiting."""
        self._write({"failed": f"{type(error).__name__}: {error}"})

    def _write(self, content: Mapping[str, object]) -> None:
        os.write(self._out, encode(content, indent=None, default=str).encode() + b"\n")

    def _wait(self, idle: Callable[[], object]) -> None:
        while not select.select([_STDIN], [], [], 0)[0]:
            idle()
        os.read(_STDIN, 1)


def serve(module: str) -> None:
    """Measure each spec that arrives with the function `measure` of the module, which a benchmark names."""
    measure: Callable[[dict[str, Any], Harness], None] = import_module(module).measure
    harness = Harness()
    while (spec := harness.next_spec()) is not None:
        try:
            measure(spec, harness)
        except BaseException as error:
            harness.fail(error)
            raise
