"""`numapin.spawn` with real processes: binding before unpickling, results, errors, cleanup, and the ranks' port."""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest

import numapin
from tests.integration import calls
from tests.integration.launching import call, free_port, script
from tests.integration.launching import numapin as run_numapin
from tests.integration.seam import (
    NUM_SIZE_BYTES,
    Answer,
    Outcome,
    RankProcess,
    ended_on_error,
    results_of,
    spawn_call,
)
from tests.needs import needs_two_cpus
from tests.recorded.screens import compare_answers
from tests.waiting import gone, wait_until

ROOT = str(Path(__file__).parents[2])


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let ranks import these tests, and keep run directories in the test's own folder."""
    for name in ("OMP_NUM_THREADS", "NUMAPIN_RUN_DIR", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "tmp").mkdir()
    (tmp_path / "pids").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))


class TestResults:
    """The results of ranks."""

    def test_ranks_see_what_those_of_run_see(self, tmp_path: Path) -> None:
        """Every variable that a script needs has the value that `numapin run` gives it."""
        told = f"json.dumps({{n: os.environ.get(n) for n in {calls.VARIABLES}}}) + chr(10)"
        dump = f"import json, os; os.write(1, ({told}).encode())"
        done = run_numapin("run", "--nproc-per-node", "2", "--quiet", script(tmp_path, dump))
        assert numapin.spawn(calls.variables, num_ranks=2) == tuple(done.json_lines())

    @needs_two_cpus
    def test_bound_before_the_call_is_unpickled(self) -> None:
        """Arguments are unpickled on the rank's own CPUs, without importing torch."""
        ranks = numapin.spawn(calls.cpus_when_unpickled, (calls.Told(),), num_ranks=2, bind="exclusive")
        assert [when == where for when, where, _ in ranks] == [True, True]
        assert not ranks[0][0] & ranks[1][0]
        assert not any(has_torch for *_, has_torch in ranks)

    def test_large_results_come_whole(self) -> None:
        """Each rank can return a result far larger than a pipe's buffer."""
        big = b"x" * (8 << 20)
        assert numapin.spawn(calls.echo, (big, 1), num_ranks=2) == ((big, 1), (big, 1))

    def test_queues_of_multiprocessing_can_be_arguments(self) -> None:
        """Locks and queues of multiprocessing can be passed to ranks as arguments."""
        queue = multiprocessing.get_context("spawn").SimpleQueue()
        numapin.spawn(methodcaller("put", "here"), (queue,), num_ranks=2)
        assert [queue.get(), queue.get()] == ["here", "here"]
        queue.close()

    def test_functions_of_the_script_itself(self, tmp_path: Path) -> None:
        """A script can pass its own functions and classes, with the usual guard."""
        path = script(
            tmp_path,
            "import numapin\n"
            "class Odd: pass\n"
            "def train(x): return (x, Odd())\n"
            "if __name__ == '__main__':\n"
            "    ((x, odd),) = numapin.spawn(train, (7,))\n"
            "    print(x, type(odd) is Odd)\n",
        )
        done = call(sys.executable, path, PYTHONPATH=ROOT)
        assert (done.out, done.status) == ("7 True\n", 0), done.err

    def test_nothing_is_left(self, tmp_path: Path) -> None:
        """After a call no descriptor, file or process is left."""
        numapin.spawn(calls.echo)  # the first call may allocate things that stay
        before = len(list(Path("/proc/self/fd").iterdir()))
        numapin.spawn(calls.echo, num_ranks=2)
        assert len(list(Path("/proc/self/fd").iterdir())) == before
        assert not [path for path in (tmp_path / "tmp").rglob("*") if path.is_file()]


class TestErrors:
    """Errors of ranks, and how they are reported."""

    def test_the_first_error_is_raised(self, tmp_path: Path) -> None:
        """The first error is raised in the caller, with the rank's traceback; the other rank is ended."""
        with pytest.raises(numapin.RankError, match=r"rank 1 raised an exception:(?s:.*)LookupError: the root") as told:
            numapin.spawn(calls.fail_in, ("1", str(tmp_path / "pids")), num_ranks=2, timeout=120)
        assert "in fail_in" in told.value.message
        pids = [int(path.name) for path in (tmp_path / "pids").iterdir()]
        assert len(pids) == 1
        assert all(gone(pid) for pid in pids)

    @pytest.mark.parametrize(
        ("fn", "args", "told"),
        [
            (signal.raise_signal, (signal.SIGKILL,), r"rank 0 \(pid \d+\) was killed by SIGKILL"),
            (signal.raise_signal, (signal.SIGRTMIN + 6,), r"rank 0 \(pid \d+\) was killed by signal \d+\n"),
            (os._exit, (0,), r"rank 0 \(pid \d+\) exited with status 0 before fn returned"),
            (atexit.register, (os._exit, 7), r"rank 0 \(pid \d+\) exited with status 7\n"),
            (sys.exit, (3,), r"rank 0 \(pid \d+\) exited with status 3 before fn returned"),
            (threading.Lock, (), r"the result of rank 0 cannot be pickled"),
            (calls.echo, (calls.Unloadable(),), r"rank 0 could not load fn or its arguments"),
        ],
        ids=["signal", "real-time signal", "os._exit", "late exit", "sys.exit", "lock", "argument"],
    )
    def test_told(self, fn: Callable[..., object], args: tuple[object, ...], told: str) -> None:
        """A rank that ends without a result raises a RankError that names the rank and how it ended."""
        with pytest.raises(numapin.RankError, match=told) as caught:
            numapin.spawn(fn, args)
        assert caught.value.hint

    def test_the_root_cause_is_told(self, tmp_path: Path) -> None:
        """If a rank dies, its death is raised, although the errors that its peers get from it come first."""
        with pytest.raises(numapin.RankError, match=r"rank 0 \(pid \d+\) was killed by SIGKILL"):
            numapin.spawn(calls.die_in_front_of_peer, (str(tmp_path / "pids"),), num_ranks=2, timeout=60)

    def test_half_an_answer(self, tmp_path: Path) -> None:
        """A rank that dies while sending its answer is reported, although a child that it forked holds the socket.

        What a failed rank started is killed if it ignores SIGTERM, even in a session of its own.
        """
        with pytest.raises(numapin.RankError, match=r"rank 0 \(pid \d+\) was killed by SIGKILL"):
            numapin.spawn(calls.die_in_answer, (str(tmp_path / "pids"),), timeout=40, shutdown_timeout=1)
        assert [gone(int(path.name)) for path in (tmp_path / "pids").iterdir()] == [True]

    def test_a_rank_that_cannot_be_started(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """If a rank cannot be started, none of its descriptors is left open."""
        monkeypatch.setattr(multiprocessing.spawn, "_python_exe", b"/nonexistent")
        before = len(list(Path("/proc/self/fd").iterdir()))
        for _ in range(2):
            with pytest.raises(FileNotFoundError):
                numapin.spawn(calls.echo)
        assert len(list(Path("/proc/self/fd").iterdir())) == before

    def test_time_out(self, tmp_path: Path) -> None:
        """Ranks that exceed `timeout` are terminated and named."""
        with pytest.raises(numapin.RankError, match=r"ranks 0-1 \(pid \d+ \d+\) did not end within 3 s"):
            numapin.spawn(calls.wait_in, (str(tmp_path / "pids"),), num_ranks=2, timeout=3)
        assert all(gone(int(path.name)) for path in (tmp_path / "pids").iterdir())

    @pytest.mark.parametrize(
        ("options", "error", "told"),
        [
            ({"gpus": "77"}, numapin.UsageError, "no GPU matches '77'"),
            ({"gpus": [77]}, numapin.UsageError, "no GPU matches '77'"),
            ({"gpu_nodes": {"99": 0}}, numapin.UsageError, "no GPU matches '99'"),
            ({"gpu_nodes": {0: 1}}, numapin.UsageError, "gpu_nodes is {0: 1}; it must map text to whole numbers"),
            ({"bind": "exclusive", "num_ranks": 4096}, numapin.PlanError, "too few exclusive cores for 4,096 ranks"),
        ],
        ids=str,
    )
    def test_what_this_machine_lacks(self, options: dict[str, Any], error: type[Exception], told: str) -> None:
        """The message has what was given."""
        with pytest.raises(error, match=told):
            numapin.spawn(calls.echo, **options)

    def test_bad_options(self) -> None:
        """Messages about invalid values are recorded; NUMAPIN_UPDATE_GOLDEN=1 records them anew."""

        def answer(line: str) -> str:
            with pytest.raises(numapin.UsageError) as caught:
                numapin.spawn(calls.echo, **json.loads(line))
            return str(caught.value)

        compare_answers(Path(__file__).with_name("spawn-options.txt"), answer)

    def test_what_cannot_be_pickled(self) -> None:
        """A lambda is refused at once, with the remedy."""
        with pytest.raises(numapin.UsageError, match=r"cannot be pickled(?s:.*)put it into a module"):
            numapin.spawn(lambda: None)

    def test_what_ranks_cannot_import(self, tmp_path: Path) -> None:
        """A function defined at a prompt is refused with the remedy, and so is a call while a script is imported."""
        code = "import numapin\ndef train(): pass\nnumapin.spawn(train)"
        done = call(sys.executable, "-c", code, PYTHONPATH=ROOT)
        assert "train is defined in a notebook or at a prompt" in done.err
        assert "%%writefile train.py" in done.err
        done = call(sys.executable, script(tmp_path, f"{code}\n"), PYTHONPATH=ROOT)
        assert done.status == 1
        assert 'put the call under: if __name__ == "__main__":' in done.err


INTERRUPTED = """
import os, random, signal, sys, time
from pathlib import Path
import numapin
from numapin.spawning import call as spawning
from tests.integration import calls

def interrupt(*_):
    raise KeyboardInterrupt

def start(*args, started=spawning._start):
    signal.setitimer(signal.ITIMER_REAL, random.uniform(0.0001, 0.02))
    return started(*args)

def left():
    pids = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    return [pid for pid in pids if " Z " not in Path(f"/proc/{pid}/stat").read_text()]

if __name__ == "__main__":
    signal.signal(signal.SIGALRM, interrupt)
    spawning._start = start
    for _ in range(10):
        try:
            numapin.spawn(calls.wait_in, (sys.argv[1],), num_ranks=4, shutdown_timeout=0)
        except KeyboardInterrupt:
            pass
    end = time.monotonic() + 20
    while left() and time.monotonic() < end:
        time.sleep(0.1)
    files = [os.readlink(f"/proc/self/fd/{fd}") for fd in range(64) if os.path.exists(f"/proc/self/fd/{fd}")]
    print(len(left()), sum(name.startswith("socket:") for name in files))
"""


def test_interrupts_while_ranks_are_started(tmp_path: Path) -> None:
    """Ctrl-C at any moment of the start leaves no rank and no socket in a parent that keeps running (a notebook)."""
    done = call(sys.executable, script(tmp_path, INTERRUPTED), str(tmp_path / "pids"), PYTHONPATH=ROOT)
    assert done.out == "0 0\n", done.err


def test_a_rank_keeps_its_number() -> None:
    """Ended ranks are not reaped before all have ended, because a new process could get their id and their signals."""
    ranks: list[RankProcess] = []
    with ended_on_error(ranks, "", 0):
        process = subprocess.Popen(["true"])
        ours, theirs = socket.socketpair()
        theirs.close()
        ranks.append(RankProcess(0, process, ours))
        assert wait_until(lambda: ranks[0].look() or ranks[0].status == 0, limit_s=60)  # type: ignore[func-returns-value]
        assert Path(f"/proc/{process.pid}").exists()
    assert not Path(f"/proc/{process.pid}").exists()


class _Overlooked(RankProcess):
    """A rank that answers and ends right after the first look."""

    has_looked = False

    def look(self) -> None:
        if self.has_looked:
            super().look()
        self.has_looked = True


def _over(kind: type[RankProcess], number: int, outcome: Outcome, content: bytes) -> RankProcess:
    """Return a rank that has answered and ended, but has not been looked at yet."""
    ours, theirs = socket.socketpair()
    with theirs:
        answer = pickle.dumps(Answer(outcome, content))
        theirs.sendall(len(answer).to_bytes(NUM_SIZE_BYTES, "little") + answer)
    process = subprocess.Popen(["true"])
    assert wait_until(lambda: gone(process.pid), limit_s=60)
    return kind(number, process, ours)


def test_a_rank_that_leaves_well_beside_the_error() -> None:
    """A rank that the kernel kills after it answered is not the cause of another rank's error."""
    ranks: list[RankProcess] = []
    with ended_on_error(ranks, "", 0):
        ranks.append(_over(_Overlooked, 0, Outcome.RETURNED, pickle.dumps(1)))
        ranks.append(_over(RankProcess, 1, Outcome.RAISED, b"LookupError"))
        with pytest.raises(numapin.RankError, match="rank 1 raised an exception:\nLookupError"):
            results_of(ranks, timeout_s=60)


def test_a_wrapper_that_does_not_exec(tmp_path: Path) -> None:
    """A rank that is not a child of its launcher reports that and exits, because it would not end with the launcher."""
    wrapper = tmp_path / "wrapper"
    wrapper.write_text(f'#!/bin/sh\n{sys.executable} "$@"\nexit $?\n')
    wrapper.chmod(0o700)
    path = script(
        tmp_path,
        "import multiprocessing, sys, numapin\n"
        "if __name__ == '__main__': multiprocessing.set_executable(sys.argv[1]); numapin.spawn(print)\n",
    )
    done = call(sys.executable, path, str(wrapper), PYTHONPATH=ROOT)
    assert "the launcher has ended, or the Python for ranks is a wrapper script, which must exec Python" in done.err


# --- the port on which ranks meet -------------------------------------------------------------------------------------

_LOOPBACK = ("tcp", "0100007F")


@pytest.fixture(params=["numapin", "torch"])
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Say which server of the store the caller uses: torch's, as if the installed torch were a newer one, or ours."""
    kind: str = request.param
    if kind == "torch":
        monkeypatch.setattr(spawn_call, "why_not_served", lambda _: "this numapin does not know the store of torch 9")
    return kind


def test_what_is_written_for_torchs_spawn(server: str) -> None:
    """Rank 0 serves ports of its own choice. MASTER_PORT, on the loopback address only, is served by the caller."""
    results = numapin.spawn(calls.meet, (free_port(), free_port()), num_ranks=2, timeout=240)
    assert results == (({_LOOPBACK}, [2.0] * 4),) * 2, server


def test_a_place_that_is_chosen_before_torch_is_imported() -> None:
    """Rank 0 serves a port that the function puts into MASTER_PORT, also if torch is imported only after that."""
    assert numapin.spawn(calls.meet_at, (free_port(),), num_ranks=2, timeout=240) == (2.0, 2.0)


def test_the_store_ends_with_the_call(server: str) -> None:
    """Nothing listens on the port afterwards, even if the caller keeps a rank's error, as notebooks do."""
    with pytest.raises(numapin.RankError) as caught:
        numapin.spawn(calls.raise_port)
    assert calls.listeners(int(caught.value.message.rpartition("LookupError: ")[2])) == set(), server
