"""Single runs of `numapin compare`: programs that are hard to measure, and what they leave behind."""

from __future__ import annotations

import json
import os
import shlex
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from tests.integration.launching import call
from tests.integration.seam import (
    MOST_BYTES,
    NO_STEP,
    SCHEMA,
    JobOptions,
    JobResult,
    Phase,
    RankFiles,
    RankSteps,
    RunOutput,
    StepSettings,
    StepUnit,
    find_place,
    own_command,
    run_job,
    to_json,
)
from tests.integration.stepping import script_with_stand_in
from tests.unit.compare.test_report import rank
from tests.waiting import gone, wait_until

if TYPE_CHECKING:
    from pathlib import Path

BEGIN = """
import os, subprocess, sys, threading, time, types
from torch.optim import Optimizer
from torch.utils.data import DataLoader
def train(num_steps=10**9):
    optimizer = Optimizer()
    for _ in range(num_steps):
        time.sleep(0.002)
        optimizer.step()
"""


def measured(tmp_path: Path, program: str, *, timeout_s: float = 60) -> JobResult:
    """Run a program with the stand-in for torch until it has measured five steps."""
    path = script_with_stand_in(tmp_path, BEGIN + program)
    options = JobOptions(
        settings=StepSettings(folder="", skip=2, steps=5, seconds=60),
        timeout_s=timeout_s,
        grace_s=5,
        nodes={},
        loads=dict,
        logs=tmp_path,
    )
    command = shlex.join([sys.executable, path])
    return run_job(own_command(command, option="--a"), options, log_name="log", report=lambda _: None)


def test_processes_that_left_the_job_are_stopped(tmp_path: Path) -> None:
    """A process in a session of its own, whose parent has ended, does not outlive the run."""
    program = (
        "if not os.fork():\n"
        "    child = subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
        f"    open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
        "    os._exit(0)\n"
        "os.wait()\n"
        "train()"
    )
    result = measured(tmp_path, program)
    assert (result.failure, len(result.steps_s)) == (None, 5)
    assert wait_until(lambda: gone(int((tmp_path / "pid").read_text())), limit_s=10)


def test_a_program_that_prepares_data_first_is_measured_when_it_trains(tmp_path: Path) -> None:
    """A process that only takes batches, and ends, does not take the rank away from the one that trains."""
    prepare = "from torch.utils.data import DataLoader\nfor batch in DataLoader(range(5), batch_size=4): pass"
    first = f"subprocess.run([sys.executable, '-c', {prepare!r}], check=True, cwd=sys.path[0])"
    result = measured(tmp_path, f"{first}\ntrain()")
    assert (result.failure, result.unit, len(result.steps_s)) == (None, "optimizer step", 5)


def test_a_loop_may_move_to_another_thread(tmp_path: Path) -> None:
    """If the thread that stepped has ended, the steps of the next one count."""
    result = measured(tmp_path, "t = threading.Thread(target=train, args=(3,)); t.start(); t.join(); train()")
    assert (result.failure, len(result.steps_s)) == (None, 5)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("os.environ['RANK'] = 'first'; train()", "its steps cannot be measured: process"),
        (
            "Optimizer()\nfor x in DataLoader(range(10**9), batch_size=1): time.sleep(0.01)",
            "no optimizer step of rank 0",
        ),
        ("train(3)", "steps of rank 0; the first 2 are not measured (--skip); if it resumes from a checkpoint"),
        ("train(3); os.kill(os.getpid(), 40)", "it was ended by signal 40 after"),
    ],
)
def test_what_cannot_be_measured_is_said(tmp_path: Path, program: str, words: str) -> None:
    """A hook that fails ends the run at once; an optimizer that never steps, and too few steps, are named."""
    result = measured(tmp_path, program, timeout_s=5 if "Optimizer()" in program else 10_000)  # the test has 300
    assert words in (result.failure or "")


def test_a_log_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """A full disk, or a folder that is gone, is not called a command that cannot be started."""
    (tmp_path / "log.log").mkdir()
    result = measured(tmp_path, "train()")
    assert result.failure == f"it cannot be started: {tmp_path / 'log.log'}: Is a directory"


def test_a_fork_while_a_step_is_counted_does_not_hang() -> None:
    """A child that is forked while another thread counts a step is able to step, and is not measured."""
    program = """
import os, signal, threading, types
from numapin.steps import recorder as hook
class Optimizer: pass
hook.attach(types.SimpleNamespace(__name__="optimizer", register_optimizer_step_post_hook=print, Optimizer=Optimizer))
recording = hook.Recording(hook.StepListener, print, hook.StepListener())  # this process is measured
hook.recordings.append(recording)
held, done = threading.Event(), threading.Event()
def count():
    with recording.lock: held.set(); done.wait()
threading.Thread(target=count).start()
held.wait()
pid = os.fork()
if not pid:
    signal.alarm(20)
    recording.pass_on(lambda meter: os._exit(1), begins=True)
    os._exit(0)
status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
done.set()
raise SystemExit(abs(status))
"""
    assert call(sys.executable, "-c", program).status == 0


def test_ranks_that_a_script_starts_by_itself_have_the_process_groups_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a launcher's variables, the rank is that of the process group."""
    group = SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: True, get_rank=lambda: 3, get_world_size=lambda: 4
    )
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(sys.modules, "torch.distributed", group)
    assert find_place()[:3] == (3, 3, 4)


def test_output_stays_small_and_shows_its_end_without_secrets(tmp_path: Path) -> None:
    """A file that has become too large is cut while it is written; the last lines are shown, secrets are not."""
    output = RunOutput(tmp_path / "log")
    with output.open() as writer:
        writer.write(b"\0" * (MOST_BYTES + 1) + b"\nlogin --password hunter2\n")
        writer.flush()
        output.bound()
        writer.write(b"the end\n")
    assert output.path.stat().st_size < 20_000
    assert output.path.read_bytes().startswith(b"[numapin: earlier output was dropped]")
    tail = output.tail()
    assert tail.endswith("the end")
    assert "hunter2" not in tail


def put(folder: Path, one: RankSteps) -> None:
    """Write a rank's file, as the rank does."""
    text = json.dumps({"schema": SCHEMA, **to_json(one)})
    (folder / f"rank-{one.rank}-0.json").write_text(text)


class TestRankFiles:
    """The progress of the ranks."""

    @staticmethod
    def files(folder: Path, *ranks: RankSteps) -> RankFiles:
        """Write the ranks' files and read them at time 0."""
        found = RankFiles(folder)
        for one in ranks:
            put(folder, one)
        found.read(0.0)
        return found

    def test_a_rank_that_measures_is_waited_for(self, tmp_path: Path) -> None:
        """The job is done when all ranks are. A rank that measures may take long, one without steps half a minute."""
        found = self.files(tmp_path, rank(0), rank(1, phase=Phase.MEASURING, step_ns=()))
        assert not found.is_done(1000.0)
        put(tmp_path, rank(1, phase=Phase.STARTED, step_ns=()))
        assert found.read(1000.0)
        assert not found.is_done(29.0)
        assert found.is_done(31.0)
        put(tmp_path, rank(1))
        assert found.read(32.0)
        assert found.is_done(1.0)

    def test_every_change_is_read(self, tmp_path: Path) -> None:
        """A file that is written again within the clock's resolution is read again."""
        found = self.files(tmp_path, rank(0, phase=Phase.MEASURING, step_ns=()))
        (path,) = tmp_path.iterdir()
        times = (path.stat().st_atime_ns, path.stat().st_mtime_ns)
        put(tmp_path, rank(0))
        os.utime(path, ns=times)
        assert found.read(1.0)
        assert found.measured[0].phase is Phase.DONE

    def test_progress_in_words(self, tmp_path: Path) -> None:
        """No rank stepped; one rank stepped least; there was a batch, but no step of the optimizer."""
        assert RankFiles(tmp_path).progress() == NO_STEP
        assert self.files(tmp_path, rank(0), rank(1, num_seen=3)).progress() == "3 optimizer steps of rank 1"
        idle = rank(1, num_seen=0, unit=StepUnit.OPTIMIZER_STEP)
        assert "no optimizer step of rank 1" in self.files(tmp_path, idle).progress()
