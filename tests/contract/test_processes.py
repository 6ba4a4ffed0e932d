"""How a program that uses a loader ends, in its own process: exits, signals, and remaining processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest

from tests.contract import rank
from tests.contract.rank import LOOK_S
from tests.contract.watching import TORCH, LoaderClass
from tests.data.warm import ENVIRON, ROOT, forker, run_script
from tests.integration.forking import CommandLine, Forked
from tests.waiting import gone, wait_until

KILLED = (("run_on", "fork"), ("run_on", "spawn"), ("run_on", "forkserver"), ("stop_stepping", "fork"))


@dataclass(frozen=True, slots=True)
class Program:
    process: Forked | subprocess.Popen[str]
    out: IO[str]
    err: IO[str]

    def members(self) -> list[int]:
        return [pid for pid, session in _processes() if session == self.process.pid and not gone(pid)]

    def wait_for(self, word: str) -> None:
        if not any(line.strip() == word for line in self.out):
            pytest.fail(f"ended without {word!r}: {self.said()}")

    def said(self) -> tuple[str, str]:
        rest = self.out.read()
        self.process.wait(60)
        self.err.seek(0)
        return rest, self.err.read()

    def ends(self) -> None:
        """Wait until all members have ended. numapin's workers need not look for that: see `running`."""
        assert wait_until(lambda: not self.members(), limit_s=60), f"still there: {self.members()}"


def _processes() -> Iterator[tuple[int, int]]:
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                yield int(entry.name), os.getsid(int(entry.name))


@contextlib.contextmanager
def running(kind: LoaderClass, scene: str, method: str = "fork") -> Iterator[Program]:
    """Start a scene with a loader class; everything ends with the block.

    Only torch's workers look now and then whether the program is alive.
    """
    arguments = [f"{kind.__module__}:{kind.__qualname__}", scene, method]
    environ = ENVIRON | ({} if kind is TORCH else {LOOK_S: "1000000"})
    command = CommandLine(module=rank.__file__, arguments=arguments, environ=environ, cwd=str(ROOT), new_session=True)
    read_end, write_end = os.pipe()
    with open(read_end, encoding="utf-8") as out, tempfile.TemporaryFile("w+") as err:  # noqa: PTH123 - a descriptor
        process = forker().start(command, out=write_end, err=err.fileno())
        os.close(write_end)
        try:
            yield Program(process, out, err)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(60)


@pytest.fixture(scope="module")
def killed(own_class: LoaderClass) -> dict[tuple[str, str], tuple[int, list[int]]]:
    found = {}
    with contextlib.ExitStack() as stack:
        programs = {case: stack.enter_context(running(own_class, *case)) for case in KILLED}
        for case, program in programs.items():
            program.wait_for("ready")
            members = len(program.members())
            program.process.kill()
            wait_until(lambda program=program: not program.members(), limit_s=60)  # type: ignore[misc]
            found[case] = (members, program.members())
    return found


@pytest.mark.xdist_group("killed")  # so that the programs are started once
@pytest.mark.parametrize("case", KILLED, ids="-".join)
def test_killed(killed: dict[tuple[str, str], tuple[int, list[int]]], case: tuple[str, str]) -> None:
    """After SIGKILL no worker, server or tracker stays alive, whether batches arrive or workers wait."""
    members, left = killed[case]
    assert members >= 3  # the program and two workers
    assert left == []


def test_made_in_a_thread_that_ends(loader_class: LoaderClass) -> None:
    """Workers that a thread started survive its end, deliver batches, and end with the program."""
    with running(loader_class, "hold_in_thread") as program:
        program.wait_for("ready")
        program.wait_for("alive")
        assert len(program.members()) == 3
        program.process.terminate()
        program.ends()


def test_first_epochs_in_threads(loader_class: LoaderClass) -> None:
    """Threads may each run an epoch at once, as the first thing that a program does: no worker inherits a held lock."""
    with running(loader_class, "run_in_threads") as program:
        out, _ = program.said()
        assert out == f"ready {[190] * 4}\n"


@pytest.mark.parametrize("whole_group", [False, True], ids=["program", "group"])
def test_interrupted(loader_class: LoaderClass, whole_group: bool) -> None:  # noqa: FBT001
    """After Ctrl-C, to the program alone or to all as a terminal sends it, all processes end, as with torch."""
    with running(loader_class, "run_on") as program:
        program.wait_for("ready")
        (os.killpg if whole_group else os.kill)(program.process.pid, signal.SIGINT)
        program.ends()
        last = program.said()[1].splitlines()[-1]
        assert (program.process.returncode, last) == (-signal.SIGINT, "KeyboardInterrupt")  # torch's, too


FORK_SERVER = """
import multiprocessing
from multiprocessing import forkserver
import numapin

if __name__ == "__main__":
    multiprocessing.set_forkserver_preload(users_own := ["users_own"])
    for _ in range(2):
        print(*map(int, numapin.DataLoader([1, 2, 3, 4], num_workers=2, multiprocessing_context="forkserver")))
    assert users_own == ["users_own"]
    print(*forkserver._forkserver._preload_modules)
"""


def test_a_fork_server_imports_for_all_workers(tmp_path: Path) -> None:
    """It imports numapin's modules, which import torch, once for all workers, and those that the user preloads."""
    (tmp_path / "users_own.py").touch()
    status, out, err = run_script(tmp_path, FORK_SERVER)
    *epochs, preloaded = out.splitlines()
    assert (status, epochs) == (0, ["1 2 3 4"] * 2), err
    assert {"users_own", "numapin.data.worker"} <= set(preloaded.split())
