"""`numapin compare` with real jobs on the CPU: what is measured, stopped, shown and left behind; odd programs."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.integration.launching import (
    NUMAPIN,
    TORCH_QUICKLY,
    WITHOUT_COMPILER,
    WITHOUT_GARBAGE,
    Done,
    call,
    environment,
    script,
)
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
    read_record,
    run_job,
    steps_environment,
    to_json,
)
from tests.integration.stepping import script_with_stand_in, training_script
from tests.unit.compare.test_report import rank
from tests.waiting import gone, wait_until

pytestmark = pytest.mark.slow

QUICK = ("--skip", "2", "--steps", "8", "--grace", "20", "--timeout", "100")


def compare(*arguments: str, **variables: str) -> Done:
    folder = os.environ.get("TMPDIR", "/tmp")  # noqa: S108
    return call(*NUMAPIN, "compare", *QUICK, *arguments, cwd=None, TMPDIR=folder, **variables)


def command(path: str, *arguments: object) -> str:
    return " ".join([sys.executable, path, *map(str, arguments)])


def pids(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("pid-")) for path in folder.glob("pid-*")]


def test_a_slower_command_is_found(tmp_path: Path) -> None:
    """A script whose steps take eight times as long is slower; the report is written, and every job is stopped."""
    path = training_script(tmp_path)
    output = ("--output", str(tmp_path / "out.json"))
    pair = ("--a", command(path, tmp_path, 0.02), "--b", f"PYTHONPATH=/nowhere {command(path, tmp_path, 0.16)}")
    done = compare("--repeats", "5", *output, "--logs", str(tmp_path / "logs"), *pair)
    assert done.status == 0, done.err
    assert "b is slower" in done.out
    assert "stopped early" not in done.out
    report = json.loads((tmp_path / "out.json").read_text())
    first, second = report["variants"]
    assert (first["ratio"], second["ratio"]["verdict"], report["is_complete"]) == (None, "slower", True)
    assert (first["num_runs"], first["step_unit"], first["num_ranks"]) == (5, "optimizer step", 1)
    assert second["variables"] == {"PYTHONPATH": "/nowhere"}
    assert first["figures"].keys() >= {"samples_per_s", "wait_share", "startup_s"}
    step_s, samples = first["figures"]["step_s"]["median"], first["figures"]["samples_per_s"]["median"]
    assert step_s > 0.02
    assert samples == pytest.approx(4 / step_s, rel=0.5)
    assert all(len(run["steps_s"]) == 8 for variant in report["variants"] for run in variant["runs"])
    assert len(list((tmp_path / "logs").iterdir())) == 11  # one of them is not counted
    assert len(pids(tmp_path)) == 11
    assert all(map(gone, pids(tmp_path)))


def test_launchers_of_an_unmodified_script(tmp_path: Path) -> None:
    """Torchrun and numapin's loader run the example with two ranks, whose steps, samples and waits are measured."""
    example = str(Path(__file__).resolve().parents[2] / "examples" / "train_unmodified.py")
    launchers = ("--variants", "numapin-loader,torchrun-threads", "--nproc-per-node", "2")
    words = ("--repeats", "1", "--json", *launchers, "--", example, "--epochs", "50", "--batch-size", "16")
    script(tmp_path, WITHOUT_COMPILER + WITHOUT_GARBAGE, "sitecustomize.py")
    done = compare(*words, PYTHONPATH=str(tmp_path))
    assert done.status == 0, done.err
    report = json.loads(done.out)
    assert [variant["num_ranks"] for variant in report["variants"]] == [2, 2]
    assert "OMP_NUM_THREADS" in report["variants"][1]["variables"]
    for variant in report["variants"]:
        figures = variant["figures"]
        assert figures["samples_per_s"]["median"] == pytest.approx(32 / figures["step_s"]["median"], rel=0.5)
        assert 0 < figures["wait_share"]["median"] <= 1


class TestFailures:
    """Variants that fail, and comparisons that are interrupted."""

    def test_a_failure_is_shown_once_and_the_rest_goes_on(self, tmp_path: Path) -> None:
        """A variant that fails is left out; with only one left there is nothing to compare, and the status is 1."""
        path, broken = training_script(tmp_path), script(tmp_path, "raise SystemExit('no such dataset')", "broken.py")
        one = ("--a", command(path, tmp_path, 0.01), "--b", command(broken))
        done = compare("--repeats", "3", *one)
        assert done.status == 1
        assert done.err.count("b failed, and is left out: it ended with status 1") == 1
        assert done.out.count("no such dataset") == 1
        assert "nothing could be compared: only a was measured" in done.err
        assert "compared with b" not in done.out
        assert "Traceback" not in done.err
        assert len(pids(tmp_path)) == 2

    def test_if_all_fail_one_error_says_why(self, tmp_path: Path) -> None:
        """Each reason is said once; the report, whose file is final, shows the last lines of every variant's output."""
        broken = script(tmp_path, "import sys; sys.exit('no such dataset')")
        idle = script_with_stand_in(
            tmp_path, "from torch.optim import Optimizer; Optimizer().step(); print('stepped once')"
        )
        done = compare("--a", command(broken), "--b", command(idle), "--output", str(tmp_path / "report.json"))
        assert done.status == 1
        assert json.loads((tmp_path / "report.json").read_text())["is_complete"]
        assert done.err.count("numapin: error:") == 1
        assert "every variant failed" in done.err
        assert "--logs" in done.err
        assert "before its first step\n    no such dataset\nb failed: it ended after" in done.out
        assert done.out.endswith("\n    stepped once\n")
        for reason in (
            "a failed, and is left out: it ended with status 1",
            "b failed, and is left out: it ended after",
        ):
            assert done.err.count(reason) == done.err.count(reason.partition(": ")[2]) == 1

    def test_a_job_without_steps_is_stopped(self, tmp_path: Path) -> None:
        """After --timeout seconds a job that does not step is stopped, and the message says that no step was seen."""
        sleeping = script(tmp_path, "import time; time.sleep(1000)")
        done = call(*NUMAPIN, "compare", "--timeout", "2", "--a", command(sleeping), "--b", "nowhere-such-program")
        assert done.status == 1
        assert "no result within 2 s: no step" in done.err
        assert "it cannot be started: nowhere-such-program: No such file" in done.err

    def test_a_signal_keeps_what_was_measured(self, tmp_path: Path) -> None:
        """SIGTERM stops the job that runs, and the report of the runs before it is shown and written."""
        path, output = training_script(tmp_path), tmp_path / "out.json"
        pair = [f"--{name}={command(path, tmp_path, 0.02)}" for name in "ab"]
        process = subprocess.Popen(
            ["nohup", *NUMAPIN, "compare", *QUICK, "--repeats", "50", "--output", str(output), *pair],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )

        def runs() -> int:
            with suppress(OSError, ValueError):
                return sum(variant["num_runs"] for variant in json.loads(output.read_text())["variants"])
            return 0

        try:
            assert wait_until(lambda: runs() >= 1, limit_s=120), "a run ends"
            process.send_signal(signal.SIGHUP)
            assert wait_until(lambda: runs() >= 2, limit_s=120), "the next one, too"
            num_started = len(pids(tmp_path))
            assert wait_until(lambda: len(pids(tmp_path)) > num_started, limit_s=60), "another run starts"
            process.terminate()
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
        assert process.returncode == 128 + signal.SIGTERM
        assert "stopped early" in out
        assert "stopped by SIGTERM; the report covers the first" in err
        assert not json.loads(output.read_text())["is_complete"]
        assert wait_until(lambda: all(map(gone, pids(tmp_path))), limit_s=60), "no job is left"


# Name -> how many steps to measure, and a program, which runs to its end with the hook.
PROGRAMS = {
    "evaluates first": (5, """
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x in DataLoader(data, batch_size=1): pass
for x in DataLoader(data, batch_size=4):
    time.sleep(0.01); model(x).sum().backward(); optimizer.step()
"""),
    "infers": (100, "for x in DataLoader(data, batch_size=4): time.sleep(0.01)"),
    "has workers and threads": (5, """
model = torch.nn.Linear(8, 8)
optimizer, other = (torch.optim.SGD(model.parameters(), 0.1) for _ in range(2))
ended = threading.Event()
def beside():
    while not ended.wait(0.001): optimizer.step()
optimizer.step()
thread = threading.Thread(target=beside)
thread.start()
for x in DataLoader(data, batch_size=4, num_workers=1):
    time.sleep(0.01); model(x).sum().backward(); optimizer.step(); other.step()
ended.set()
thread.join()
"""),
}  # fmt: skip
FORKS = (
    TORCH_QUICKLY
    + """
import json, os, sys, threading, time, torch
from torch.utils.data import DataLoader
data = torch.ones(40, 8)
for settings, program in json.loads(sys.argv[1]):
    pid = os.fork()
    if not pid:
        os.environ["NUMAPIN_STEPS"] = settings
        exec(program, globals())
        sys.exit()
    if os.waitpid(pid, 0)[1]:
        sys.exit(program)
"""
)


def test_what_counts_as_a_step(tmp_path: Path) -> None:
    """In a program with an optimizer, batches are no steps, even many before its first step; in others they are.

    A script that ends early leaves the steps that it made. Neither the workers of a loader, nor a loop beside the first
    one, add steps; samples are the loop's.
    """
    told = {}
    for name, (number, _) in PROGRAMS.items():
        (tmp_path / name).mkdir()
        told[name] = StepSettings(folder=str(tmp_path / name), skip=2, steps=number, seconds=60).to_text()
    words = json.dumps([(told[name], program) for name, (_, program) in PROGRAMS.items()])
    variables = steps_environment(told["infers"], environment())
    done = call(sys.executable, script(tmp_path, FORKS), words, cwd=tmp_path, **variables)
    assert (done.status, done.err) == (0, "")
    paths = [path for name in PROGRAMS for path in (tmp_path / name).glob("rank-*.json")]
    read = partial(read_record, RankSteps, source="", hint="", schema=SCHEMA)
    evaluating, inferring, beside = (read(path.read_text()) for path in paths)
    found = [(each.unit, each.phase, len(each.step_ns)) for each in (evaluating, inferring, beside)]
    assert found == [
        (StepUnit.OPTIMIZER_STEP, Phase.DONE, 5),
        (StepUnit.BATCH, Phase.ENDED, 8),
        (StepUnit.OPTIMIZER_STEP, Phase.DONE, 5),
    ]
    assert (evaluating.num_batches, evaluating.num_samples, beside.num_samples) == (5, 20, 20)
    assert min(*evaluating.step_ns, *beside.step_ns) > 10 * 10**6
    assert evaluating.waited_ns < sum(evaluating.step_ns)
    assert inferring.num_seen == 10


# --- single runs of `numapin compare`: programs that are hard to measure, and what they leave behind -----------------


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


def run_of(tmp_path: Path, program: str, *, timeout_s: float = 60) -> JobResult:
    """Run a program with the stand-in for torch until it has measured five steps."""
    path = script_with_stand_in(tmp_path, BEGIN + program)
    settings = StepSettings(folder="", skip=2, steps=5, seconds=60)
    options = JobOptions(settings=settings, timeout_s=timeout_s, grace_s=5, logs=tmp_path)
    variant = own_command(shlex.join([sys.executable, path]), option="--a")
    return run_job(variant, options, log_name="log", report=lambda: None)


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
    result = run_of(tmp_path, program)
    assert (result.failure, len(result.steps_s)) == (None, 5)
    assert wait_until(lambda: gone(int((tmp_path / "pid").read_text())), limit_s=60)


PREPARE = "from torch.utils.data import DataLoader\nfor batch in DataLoader(range(5), batch_size=4): pass"


@pytest.mark.parametrize(
    "program",
    [
        f"subprocess.run([sys.executable, '-c', {PREPARE!r}], check=True, cwd=sys.path[0])\ntrain()",
        "t = threading.Thread(target=train, args=(3,)); t.start(); t.join(); train()",
    ],
    ids=["helper", "thread"],
)
def test_a_training_after_something_else_is_measured(tmp_path: Path, program: str) -> None:
    """A process that only takes batches, or a thread that stepped, and ends, leaves the rank to the one that trains."""
    result = run_of(tmp_path, program)
    assert (result.failure, result.unit, len(result.steps_s)) == (None, "optimizer step", 5)


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
    result = run_of(tmp_path, program, timeout_s=12 if "Optimizer()" in program else 10_000)  # the test has 300
    assert words in (result.failure or "")


def test_a_log_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """A full disk, or a folder that is gone, is not called a command that cannot be started."""
    (tmp_path / "log.log").mkdir()
    result = run_of(tmp_path, "train()")
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
    text = json.dumps({"schema": SCHEMA, **to_json(one)})
    (folder / f"rank-{one.rank}-{one.restart}.json").write_text(text)


class TestRankFiles:
    """The progress of the ranks."""

    @staticmethod
    def files(folder: Path, *ranks: RankSteps) -> RankFiles:
        found = RankFiles(folder)
        for one in ranks:
            put(folder, one)
        found.read(0.0)
        return found

    def test_a_rank_that_measures_is_waited_for(self, tmp_path: Path) -> None:
        """The job is done when all ranks are. A rank that measures may take long, one without steps half a minute.

        So does one that was killed while it measured, unless it was never seen, as in a container of its own.
        """
        with subprocess.Popen(["sleep", "100"]) as process:
            found = self.files(tmp_path, rank(0), rank(1, phase=Phase.MEASURING, step_ns=(), pid=process.pid))
            assert not found.is_done(1000.0)
            process.kill()
        assert (found.is_done(29.0), found.is_done(31.0)) == (False, True)
        put(tmp_path, rank(1, phase=Phase.MEASURING, step_ns=(), pid=1 << 30))
        assert found.read(1000.0)
        assert not found.is_done(1000.0)
        put(tmp_path, rank(1, phase=Phase.STARTED, step_ns=()))
        assert found.read(1000.0)
        assert not found.is_done(29.0)
        assert found.is_done(31.0)
        put(tmp_path, rank(1))
        assert found.read(32.0)
        assert found.is_done(1.0)

    def test_ranks_that_are_restarted(self, tmp_path: Path) -> None:
        """What was measured before a restart is over, so the job is not done without a measured step."""
        found = self.files(tmp_path, rank(0), rank(1, phase=Phase.STARTED, step_ns=()))
        put(tmp_path, rank(0, restart=1, phase=Phase.STARTED, step_ns=()))
        found.read(1.0)
        assert (found.measured, found.is_done(100.0)) == ([], False)

    def test_progress_in_words(self, tmp_path: Path) -> None:
        """No rank stepped; one rank stepped least; there was a batch, but no step of the optimizer."""
        assert RankFiles(tmp_path).progress() == NO_STEP
        assert self.files(tmp_path, rank(0), rank(1, num_seen=3)).progress() == "3 optimizer steps of rank 1"
        idle = rank(1, num_seen=0, unit=StepUnit.OPTIMIZER_STEP)
        assert "no optimizer step of rank 1" in self.files(tmp_path, idle).progress()
