"""`numapin attach` on real processes. Pages on several nodes are in tests/vm."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import pytest

from numapin.errors import NumapinError
from tests.integration.launching import NUMAPIN, Done, call, environment, forked
from tests.integration.seam import numapin as commands
from tests.integration.seam import thread_cpus
from tests.needs import needs_root, needs_two_cpus
from tests.nvml.fake import FakeGpu, render
from tests.waiting import wait_until

if TYPE_CHECKING:
    from tests.nvml.fake import FakeNvml

CPUS = sorted(os.sched_getaffinity(0))
ALL, SECOND = frozenset(CPUS), frozenset(CPUS[1:2])
RANK = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
EXCLUSIVE = ("--bind", "exclusive")

# Starts threads without end, has a child, and tells the child's id; a line on stdin makes one more thread and child.
WORK = """
import os, sys, threading
end = threading.Event()
def others():
    while not end.wait(0.005):
        threading.Thread(target=end.wait, args=(0.05,)).start()
def child():
    pid = os.fork()
    if pid == 0:
        end.wait()
    return pid
first = child()
for target in (others, end.wait):
    threading.Thread(target=target, daemon=True).start()
print(first, flush=True)
for line in sys.stdin:
    threading.Thread(target=end.wait, daemon=True).start()
    print(child(), flush=True)
"""


class _Worker:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout
        self._process = process
        self.pid, self.children = process.pid, [int(process.stdout.readline())]

    def start_more(self) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        self.children.append(int(self._process.stdout.readline()))

    def cpus(self) -> set[frozenset[int]]:
        return {frozenset(cpus) for pid in (self.pid, *self.children) for cpus in thread_cpus(pid)}


@contextmanager
def _worker(code: str = WORK, **variables: str) -> Iterator[_Worker]:
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", code]
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment(**variables))
    worker = _Worker(process)
    try:
        yield worker
    finally:
        for pid in (*worker.children, worker.pid):
            os.kill(pid, signal.SIGKILL)
        process.communicate()


def _attach(*options: str) -> Done:
    return forked("attach", *options)


@needs_two_cpus
class TestBind:
    """Threads of a process on two CPUs, which starts threads all the time."""

    def test_bound_and_undone(self) -> None:
        """All threads and children get the rank's CPU, later ones inherit it; the printed commands undo it.

        The CPUs that this command was started on do not limit the processes; its cpuset does.
        """
        bound = ("taskset", "-c", str(CPUS[0]), *NUMAPIN, "attach")
        with _worker(**RANK) as worker:
            pid = str(worker.pid)
            dry = _attach("--pid", pid, *EXCLUSIVE, "--dry-run", "--json")
            assert (dry.status, worker.cpus(), json.loads(dry.out)["undo"]) == (0, {ALL}, []), dry.err
            done = call(*bound, "--pid", pid, *EXCLUSIVE, "--strict")
            assert (done.status, worker.cpus(), done.err) == (0, {SECOND}, "")
            assert "cannot be changed" in done.out
            _, _, commands = done.out.partition("undo with (")
            again = _attach("--pid", pid)
            assert (again.status, worker.cpus()) == (0, {SECOND}), "narrower threads stay"
            assert "--widen" in again.out
            subprocess.run(["sh", "-c", commands.partition("\n")[2]], check=True, stdout=subprocess.PIPE)
            assert wait_until(lambda: worker.cpus() == {ALL}, limit_s=30), worker.cpus()  # short threads end
            assert _attach("--pid", pid, *EXCLUSIVE).status == 0
            worker.start_more()
            assert worker.cpus() == {SECOND}
            wide = call(*bound, "--pid", pid, "--widen", "--strict")
            assert (wide.status, worker.cpus(), wide.err) == (0, {ALL}, "")

    def test_launcher(self) -> None:
        """The process id of a launcher stands for the ranks below it; the whole command does not import torch."""
        code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {WORK!r}], env={{'LOCAL_RANK': '1'}})"
        with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as launcher:
            assert launcher.stdout
            child = int(launcher.stdout.readline())
            options = ["attach", "--pid", str(launcher.pid), *EXCLUSIVE, "--migrate", "--json"]
            run = f"import sys; from numapin.cli.main import numapin; numapin({options!r}, standalone_mode=False)"
            done = call(sys.executable, "-c", f"{run}; sys.exit('torch' in sys.modules)")
            rank = int(Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[1])
            assert done.status == 0, done.err
            assert [each["pid"] for each in json.loads(done.out)["ranks"]] == [rank]
            assert {frozenset(cpus) for cpus in thread_cpus(child)} == {SECOND}
            assert {frozenset(cpus) for cpus in thread_cpus(launcher.pid)} == {ALL}
            for pid in (child, rank, launcher.pid):
                os.kill(pid, signal.SIGKILL)

    def test_gpu_that_the_driver_reports(self, tmp_path: Path, fake_nvml: FakeNvml) -> None:
        """NVML's processes name the GPU of a process without a rank, for `verify`, too; --gpu overrules them."""
        with _worker() as worker:
            gpus = [
                FakeGpu(uuid=f"GPU-{i}0000000-0000-0000-0000-000000000000", pci=f"00000000:{i}B:00.0", processes=pids)
                for i, pids in enumerate(((), (worker.pid,)))
            ]
            environ = fake_nvml.environment(tmp_path, render(gpus))
            line = [*NUMAPIN, "attach", "--pid", str(worker.pid), "--dry-run", "--json"]
            shown = [subprocess.check_output([*line, *more], env=environ) for more in ((), ("--gpu", "0"))]
            command = [*NUMAPIN, "verify", "--json", "--pid", str(worker.pid)]
            verified = subprocess.run(command, env=environ, stdout=subprocess.PIPE, check=False)
        found = [json.loads(text)["ranks"][0] for text in shown]
        assert [rank["requested"]["gpu"]["index"] for rank in found] == [1, 0]
        assert [rank["gpu_source"] for rank in found] == ["the driver sees it compute there", "--gpu"]
        assert json.loads(verified.stdout)["ranks"][0]["requested"]["gpu"]["index"] == 1


@pytest.fixture(scope="module")
def sleeper() -> Iterator[int]:
    with subprocess.Popen(["sleep", "600"], env=environment()) as process:
        yield process.pid
        process.kill()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--pid", "9" * 30], "there is no process"),
        (["--pid", "1"], "process 1 is the first process of this host or container"),
        (["--pid", "{pid},4194305"], "there is no process 4194305"),
        (["--pid", "{pid}"], "the GPU of process {pid} (sleep) is unknown: this host has no GPU"),
        (["--pid", "{pid}", "--gpu", "7"], "no GPU matches '7'"),
        (["--job", "x"], "no active run is named x"),
        (["--job", "x", "--gpu", "0"], "--gpu works only with --pid"),
        (["--job", "x", "--no-smt"], "binding options work only with --pid; a run has a plan of its own"),
        (["--pid", "{pid}", "--bind", "none"], "none"),
    ],
)
def test_wrong_input(
    options: list[str], told: str, sleeper: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names what was given, and what to do; nothing is changed."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # where runs are looked for first
    line = [option.format(pid=sleeper) for option in options]
    with pytest.raises((NumapinError, click.ClickException)) as caught:
        commands.main(["attach", *line], standalone_mode=False)
    error: Any = caught.value
    assert error.exit_code == 2
    assert told.format(pid=sleeper) in error.message
    assert getattr(error, "hint", "of click")
    assert {frozenset(cpus) for cpus in thread_cpus(sleeper)} == {ALL}


def test_the_number_of_a_thread() -> None:
    """The number of a thread is not a process id; the error names its process."""
    with _worker() as worker:
        tids = [int(path.name) for path in Path(f"/proc/{worker.pid}/task").iterdir()]
        tid = min(tid for tid in tids if tid != worker.pid)
        done = _attach("--pid", str(tid))
    assert (done.status, done.out) == (2, "")
    assert f"{tid} is a thread of process {worker.pid}" in done.err


@needs_root
def test_other_users() -> None:
    """Neither a user nor root changes other users' processes."""
    as_nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    command = [*as_nobody, sys.executable, "-c", "import time; print(1, flush=True); time.sleep(600)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment(**RANK)) as process:
        assert process.stdout
        process.stdout.readline()
        line = ("--pid", str(process.pid), *EXCLUSIVE)
        refused = _attach(*line)
        of_root = call(*as_nobody, *NUMAPIN, "attach", "--pid", str(os.getpid()))
        cpus = {frozenset(cpus) for cpus in thread_cpus(process.pid)}
        process.kill()
    assert (refused.status, of_root.status, cpus) == (3, 3, {ALL})
    assert f"process {process.pid} belongs to another user (uid 65534)" in refused.err
    assert "run this as that user" in refused.err
    assert "run this as that user" in of_root.err
