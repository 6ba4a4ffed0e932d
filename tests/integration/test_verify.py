"""`numapin verify` and `numapin run --verify` on real jobs. Machines with several nodes are in tests/vm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from numapin.errors import MachineError
from tests.integration import seam
from tests.integration.launching import NUMAPIN, Done, call, environment, forked, numapin, script
from tests.integration.seam import CpuSet, handover, run_folder
from tests.integration.staying import JOB, staying_job
from tests.needs import needs_root, needs_two_cpus

CPUS = sorted(os.sched_getaffinity(0))


def _verify(folder: Path, *options: str) -> Done:
    return forked("verify", *options, NUMAPIN_RUN_DIR=str(folder / "runs"))


def _top(folder: Path, *options: str) -> Done:
    return forked("top", "--once", "--interval", "0.2", *options, NUMAPIN_RUN_DIR=str(folder / "runs"))


class TestRunningJob:
    """Jobs that keep running while they are inspected."""

    def test_bound_job_holds(self, tmp_path: Path) -> None:
        """The table says that two ranks hold, the JSON has the bindings that were applied, and the status is 0.

        The JSON of `top` has CPUs, threads, pages and no GPU; its table has a row per rank.
        """
        with staying_job(tmp_path, num_ranks=2) as launcher:
            table, report = _verify(tmp_path), _verify(tmp_path, "--json")
            shown, top = _top(tmp_path), _top(tmp_path, "--json")
            by_pid = _verify(tmp_path, "--json", "--pid", str(launcher))
        assert (table.status, report.status) == (0, 0), table.err + report.err
        rows = table.out.splitlines()[1:3]
        assert [" ".join(row.split()[i] for i in (0, 4, -1)) for row in rows] == ["0 2/2 ok", "1 2/2 ok"]
        told = json.loads(report.out)
        assert (told["schema"], told["holds"]) == ("numapin.report/1", True)
        for rank in told["ranks"]:
            assert rank["applied"]["cpus"] == rank["requested"]["cpus"]
        assert json.loads(by_pid.out)["run"] == told["run"]
        assert (shown.status, top.status) == (0, 0), shown.err + top.err
        assert [row.split()[0] for row in shown.out.splitlines()[3:5]] == ["0", "1"]
        seen = json.loads(top.out)
        assert (seen["schema"], seen["ended"], seen["interval_s"] > 0.19) == ("numapin.top/1", False, True)
        assert seen["swap_in_pages_per_s"] >= 0
        for rank in seen["ranks"]:
            assert (rank["threads"], rank["threads_off_plan"], rank["gone"]) == (2, 0, False)
            assert (rank["pinned_bytes"], rank["gpu_busy_share"]) == (0, None)

    @needs_two_cpus
    def test_moved_thread_is_found(self, tmp_path: Path) -> None:
        """A thread that moved outside the rank's CPUs is reported, and the status is 1; `attach` binds it again."""
        with staying_job(tmp_path, "--cpus-per-rank", "1", moved_to=CPUS[1]) as launcher:
            done = forked("verify", "--pid", str(launcher))  # this shell does not know where the run's folder is
            words = done.out.partition("bind it again with: numapin ")[2].partition("note:")[0].split()
            bound = forked(*words, "--json")
            after = _verify(tmp_path)
        assert done.status == 1, done.err
        assert "rank 0: 1 thread 'python" in done.out
        assert f"' of the rank may run on CPUs {CPUS[1]}; planned: {CPUS[0]}" in done.out
        assert (bound.status, after.status) == (0, 0), bound.err
        (rank,) = json.loads(bound.out)["ranks"]
        assert rank["gpu_source"].startswith("the plan of run-")
        assert rank["processes"][0]["changed"] == 1

    @needs_two_cpus
    def test_squeezed_ranks_are_found(self, tmp_path: Path) -> None:
        """Ranks whose program keeps to one CPU are off the plan for `verify` and `top`; the remedy undoes that."""
        narrow = f"import os\nos.sched_setaffinity(0, {{{CPUS[0]}}})\n{JOB}"
        with staying_job(tmp_path, num_ranks=2, job_script=narrow):
            squeezed, shown = _verify(tmp_path), _top(tmp_path, "--json")
            remedy = squeezed.out.partition("to give the CPUs back now: numapin ")[2].partition("note:")[0].split()
            bound = forked(*remedy, NUMAPIN_RUN_DIR=str(tmp_path / "runs"))
            after = _verify(tmp_path)
        assert (squeezed.status, squeezed.out.count("off plan\n")) == (1, 2)
        assert f"the main thread may run on CPUs {CPUS[0]} only; planned: {CpuSet(CPUS)}" in squeezed.out
        assert [rank["threads_off_plan"] for rank in json.loads(shown.out)["ranks"]] == [1, 1]
        assert (bound.status, after.status) == (0, 0), bound.err + after.out

    @needs_two_cpus
    def test_job_that_plain_python_runs(self, tmp_path: Path) -> None:
        """An unbound process is compared with numapin's plan for one rank; fewer CPUs than that are a warning."""
        code = (
            "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start(); print(flush=True)"
        )
        pipe, line = subprocess.PIPE, [sys.executable, "-c", f"{code}; open(0).read()"]
        with subprocess.Popen(line, stdin=pipe, stdout=pipe, env=environment()) as process:
            assert process.stdout
            process.stdout.readline()
            pid = process.pid
            free = _verify(tmp_path, "--json", "--pid", str(pid))
            outside = call("taskset", "-c", str(CPUS[0]), *NUMAPIN, "verify", "--pid", str(pid))
            os.sched_setaffinity(pid, {CPUS[0]})
            narrow = _verify(tmp_path, "--pid", str(pid))
        assert (free.status, narrow.status, outside.status) == (0, 0, 1), free.err + narrow.err + outside.err
        assert "warning: rank 0: bound to fewer CPUs than numapin would give it" in narrow.out
        assert "not bound: 2 of 2 threads may run on CPUs" in outside.out
        (rank,) = json.loads(free.out)["ranks"]
        assert (rank["pid"], rank["applied"], rank["requested"]["local_rank"]) == (pid, None, 0)

    @needs_root
    def test_process_of_another_user(self) -> None:
        """It is an error with status 3 and the remedy. Its threads are seen; its memory is reported as unreadable."""
        start = (
            "import json, os, sys, numapin.cli.verify\n"
            "from numapin.cli.main import main\n"
            "from numapin.observe.read import observe\n"
            "numapin.discover()  # another user may not be allowed to read the modules\n"
            "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
            "print(json.dumps(observe({0: int(sys.argv[1])}).ranks[0].processes[0].to_json()), flush=True)\n"
            "sys.argv = ['numapin', 'verify', '--pid', sys.argv[1]]; main()\n"
        )
        done = call(sys.executable, "-c", start, str(os.getpid()))
        assert done.status == 3
        assert f"process {os.getpid()} belongs to another user" in done.err
        assert "as root" in done.err
        seen = json.loads(done.out)
        assert os.getpid() in [thread["tid"] for thread in seen["threads"]]
        assert (seen["memory"], seen["policy"]) == (None, None)
        assert "cannot be read" in seen["unreadable"]

    def test_process_that_may_not_be_traced(self) -> None:
        """An own process whose environment the kernel hides is not called another user's."""
        code = (
            "import ctypes, os, sys\n"
            "from numapin.cli.main import main\n"
            "import numapin, numapin.cli.verify\n"
            "numapin.discover()  # another user may not be allowed to read the modules\n"
            "if os.geteuid() == 0:\n"
            "    os.setgroups([]); os.setgid(65534); os.setuid(65534)  # root may trace everything\n"
            "ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE\n"
            "sys.argv = ['numapin', 'verify', '--pid', str(os.getpid())]\n"
            "if os.fork() == 0:\n"
            "    main()\n"
            "sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))\n"
        )
        done = call(sys.executable, "-c", code)
        assert (done.status, done.out) == (3, "")
        assert "cannot be read: the kernel does not permit tracing it" in done.err
        assert "SYS_PTRACE" in done.err


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), ValueError("no number"), MemoryError()], ids=repr)
def test_what_cannot_be_read_is_told_in_words(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Any failure of a read is an error with status 3, never a traceback."""

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(seam.verify, "find_job", fail)
    with pytest.raises(MachineError, match="the job cannot be read: ") as caught:
        seam.verify.verify.main([], standalone_mode=False)
    assert caught.value.exit_code == 3


def test_job_that_ends_meanwhile(tmp_path: Path) -> None:
    """If all ranks have ended by the time they are read, the job has ended; without records it has not begun."""
    plan = json.loads(forked("plan", "--nproc-per-node", "1", "--json").out)
    record = {"schema": "numapin.observed/1", "local_rank": 0, "restart": 0, "pid": 4194305, "applied": {}}
    with run_folder.run_directory({"NUMAPIN_RUN_DIR": str(tmp_path / "runs")}) as folder:
        handover.write_json(folder, handover.PLAN, plan)
        assert "no rank has started yet" in _verify(tmp_path).err
        handover.write_json(folder, "observed-0-0.json", record)
        done = _verify(tmp_path)
    assert done.status == 2
    assert ": all of its ranks have ended" in done.err


class TestRun:
    """`numapin run --verify`."""

    def test_one_line_where_the_plan_holds(self, tmp_path: Path) -> None:
        """The launcher prints one line that the plan holds, the report has every rank, and the job is not changed."""
        report = tmp_path / "report.json"
        job = (script(tmp_path, JOB), str(tmp_path / "ready"), str(report))
        options = ("--nproc-per-node", "2", "--quiet", "--verify-after", "0.1", "--report", str(report))
        done = numapin("run", *options, *job, TMPDIR=str(tmp_path))
        assert done.status == 0, done.err
        (line,) = [line for line in done.err.splitlines() if "numapin:" in line]
        assert line.startswith("numapin: verified: the plan holds: 2 ranks, 2 processes, "), done.err
        told = json.loads(report.read_text())
        assert [rank["local_rank"] for rank in told["ranks"]] == [0, 1]
        assert not list(tmp_path.rglob("run-*"))

    @needs_two_cpus
    def test_findings_do_not_fail_the_job(self, tmp_path: Path) -> None:
        """A moved thread is reported with its remedy while the job runs; the job's status is unchanged."""
        report = tmp_path / "report.json"
        code = f"import os; os.sched_setaffinity(0, {{{CPUS[1]}}})\n{JOB}"
        job = (script(tmp_path, code), str(tmp_path / "ready"), str(report))
        # ten seconds after the shim, because on a busy machine the script must have begun
        options = ("--nproc-per-node", "1", "--cpus-per-rank", "1", "--verify-after", "10", "--report", str(report))
        done = numapin("run", *options, *job)
        assert done.status == 0, done.err
        assert "numapin: verified: the plan does not hold" in done.err
        assert "error: rank 0: " in done.err
        assert json.loads(report.read_text())["holds"] is False

    @pytest.mark.parametrize(("ends", "status"), [("", 0), ("; sys.exit(3)", 3)], ids=["well", "badly"])
    def test_report_on_a_full_disk(self, tmp_path: Path, ends: str, status: int) -> None:
        """The job runs to its end, and the verdict is reported; the missing report is then an error, status 1."""
        done_file = tmp_path / "done"
        # on a busy machine the look takes seconds
        code = f"import sys, time; time.sleep(5); open({str(done_file)!r}, 'w').close(){ends}"
        options = ("--nproc-per-node", "1", "--quiet", "--verify-after", "0.1", "--report", "/dev/full")
        done = numapin("run", *options, script(tmp_path, code))
        assert (done.status, done_file.exists()) == (1, True), done.err
        assert "numapin: verified: the plan holds: 1 rank" in done.err
        level = "warning" if status else "error"
        assert f"numapin: {level}: /dev/full cannot be written: No space left on device" in done.err
        assert ("  failed  exit status 3\n" in done.err) == bool(status), done.err

    def test_report_that_cannot_be_written(self, tmp_path: Path) -> None:
        """A report in a folder that does not exist is status 2, before any rank starts."""
        marker = tmp_path / "ran"
        path = script(tmp_path, f"open({str(marker)!r}, 'w')")
        done = numapin("run", "--report", str(tmp_path / "no" / "report.json"), "--nproc-per-node", "1", path)
        assert done.status == 2
        assert done.err.startswith(f"numapin: error: {tmp_path}/no/report.json cannot be written: No such file")
        assert "--report" in done.err
        assert not marker.exists()
