"""How a program that uses a loader ends, in its own process: exits, signals, and remaining processes.

The programs are forks of one process that has torch imported; they end as any Python does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeAlias

import pytest

from tests.contract.rank import SCENES
from tests.contract.watching import TORCH
from tests.integration.forking import CommandLine, Forker
from tests.integration.launching import environment
from tests.waiting import gone, wait_until

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator

    from tests.contract.watching import LoaderClass
    from tests.integration.forking import Forked

pytestmark = pytest.mark.xdist_group("programs")  # so that torch is imported once

ROOT = Path(__file__).resolve().parents[2]
KILLED = (("run_on", "fork"), ("run_on", "spawn"), ("run_on", "forkserver"), ("stop_stepping", "fork"))


@dataclass(frozen=True, slots=True)
class Program:
    """A program in its own session, so that all its descendants can be found."""

    process: Forked | subprocess.Popen[str]
    stdout: IO[str]
    read_errors: Callable[[], str]

    def members(self) -> list[int]:
        """Return the live processes of its session, without zombies."""
        return [pid for pid, session in _processes() if session == self.process.pid and not gone(pid)]

    def wait_for(self, word: str) -> None:
        """Wait until it prints this line."""
        for line in self.stdout:
            if line.strip() == word:
                return
        pytest.fail(f"ended without {word!r}: {self.read_errors()}")

    def ended(self) -> tuple[int, str, str]:
        """Wait for its end; return its status, what it printed since, and what it wrote to stderr."""
        out = self.stdout.read()
        return self.process.wait(timeout=60), out, self.read_errors()

    def seconds_to_end(self, limit_s: float = 20.0) -> float:
        """Return how long it takes until all members have ended; fail at the limit."""
        start = time.monotonic()
        assert wait_until(lambda: not self.members(), limit_s=limit_s), f"still there: {self.members()}"
        return time.monotonic() - start


def _processes() -> Iterator[tuple[int, int]]:
    """Yield process id and session of every process."""
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                yield int(entry.name), os.getsid(int(entry.name))


Run: TypeAlias = "Callable[..., contextlib.AbstractContextManager[Program]]"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Give a function that starts a scene with a loader class; everything ends with the block."""
    environ = environment(PYTHONWARNINGS="ignore", PYTHONPATH=str(ROOT))
    forker = Forker(environ, ("numapin", "tests.contract.rank"))

    @contextlib.contextmanager
    def start(kind: LoaderClass, scene: str, method: str = "fork") -> Iterator[Program]:
        assert scene in SCENES
        words = (f"{kind.__module__}:{kind.__qualname__}", scene, method)
        command = CommandLine(
            module="tests.contract.rank",
            arguments=words,
            environ=environ,
            cwd=str(ROOT),
            new_session=True,
            quick_end=False,
        )
        errors = tmp_path_factory.mktemp(scene) / "err"
        reader, writer = os.pipe()
        with os.fdopen(reader, encoding="utf-8") as stdout:
            with errors.open("wb") as err:
                process = forker.start(command, out=writer, err=err.fileno())
            os.close(writer)
            try:
                yield Program(process, stdout, errors.read_text)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait(timeout=60)

    yield start
    forker.close()


@pytest.fixture(scope="module")
def killed(own_class: LoaderClass, running: Run) -> dict[tuple[str, str], tuple[int, float]]:
    """Kill programs; give each one's number of processes, and how long they survived."""
    found = {}
    with contextlib.ExitStack() as stack:
        programs = {case: stack.enter_context(running(own_class, *case)) for case in KILLED}
        for case, program in programs.items():
            program.wait_for("ready")
            members = len(program.members())
            program.process.kill()
            found[case] = (members, program.seconds_to_end())
    return found


@pytest.mark.parametrize("case", KILLED, ids="-".join)
def test_killed(killed: dict[tuple[str, str], tuple[int, float]], case: tuple[str, str]) -> None:
    """Two seconds after SIGKILL no worker, server or tracker is alive, whether batches arrive or workers wait."""
    members, seconds = killed[case]
    assert members >= 3  # the program and two workers
    assert seconds < 2


def test_made_in_a_thread_that_ends(loader_class: LoaderClass, running: Run) -> None:
    """Workers that a thread started survive its end, deliver batches, and end with the program."""
    with running(loader_class, "hold_in_thread") as program:
        program.wait_for("ready")
        program.wait_for("alive")
        assert len(program.members()) == 3
        program.process.terminate()
        assert program.seconds_to_end() < (20 if loader_class is TORCH else 2)


@pytest.mark.parametrize("whole_group", [False, True], ids=["program", "group"])
def test_interrupted(loader_class: LoaderClass, running: Run, whole_group: bool) -> None:  # noqa: FBT001
    """After Ctrl-C, to the program alone or to all as a terminal sends it, all processes end at once, as with torch."""
    with running(loader_class, "run_on") as program:
        program.wait_for("ready")
        (os.killpg if whole_group else os.kill)(program.process.pid, signal.SIGINT)
        assert program.seconds_to_end() < 3
        status, _, err = program.ended()
        assert (status, err.splitlines()[-1]) == (-signal.SIGINT, "KeyboardInterrupt")  # torch's, too


@pytest.mark.parametrize(
    ("scene", "status", "last"),
    [
        ("leave", 0, ""),
        ("leave_holding", 0, ""),
        ("exit_early", 5, ""),
        ("fail_early", 1, "ValueError: the loss of 3 is not a number"),
    ],
)
def test_ends_in_the_middle(loader_class: LoaderClass, running: Run, scene: str, status: int, last: str) -> None:
    """A program may end at any point: with its own status, only its own message, and no process left."""
    with running(loader_class, scene) as program:
        ended, out, err = program.ended()
        assert "ready" in out
        assert (ended, err.strip().splitlines()[-1:]) == (status, [last] if last else [])
        assert program.seconds_to_end() < 2


def test_handler_for_children(loader_class: LoaderClass, running: Run) -> None:
    """A SIGCHLD handler that was set before the loader was made is still called."""
    with running(loader_class, "chain_handler") as program:
        _, out, err = program.ended()
        assert (out, err) == ("ready\ncalled True\n", "")
