"""Measuring processes: they take turns, begin together, fail on their own, and leave nothing behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.unit.bench.seam import Benchmark, Case, Peer, Run, process, read_machine
from tests.waiting import gone, wait_until

# A measuring process that does what its spec says.
FAKE_CHILD = """
import os, subprocess, sys, time
from io import StringIO
from pathlib import Path

def measure(spec, harness):
    do = spec.get("do")
    if do == "raise":
        raise ValueError("no such thing")
    if do == "die":
        sys.stderr.write("last words\\n")
        sys.stderr.flush()
        os.kill(os.getpid(), 9)
    if do == "hang":
        started = subprocess.Popen(["sleep", "600"])
        Path(spec["pid_file"] + ".new").write_text(str(started.pid))
        os.rename(spec["pid_file"] + ".new", spec["pid_file"])
        time.sleep(600)
    print("noise on stdout")
    os.system("echo more noise")
    time.sleep(spec.get("warm_s", 0))
    warm = time.monotonic()
    harness.wait_for_start(lambda: time.sleep(0.001))
    start, turns = time.monotonic(), []
    Path("/dev/shm", f"torch_{os.getpid()}_left").touch()
    helper = subprocess.Popen(["sleep", "600"]).pid
    details = {"warm": warm, "start": start, "helper": helper, "pid": os.getpid()}
    harness.report({"rate": spec.get("rate", 1.0), "wait": 2.0}, details=details, idle=lambda: time.sleep(0.001))

print("noise before the start\\n" * 2000, end="and a part of a line", flush=True)
"""


TORCHS_FILES = Path("/dev/shm")  # noqa: S108 - torch's place


@pytest.fixture(autouse=True)
def _fake_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fake_child.py").write_text(FAKE_CHILD)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[3]}")


def measured(
    *cases: tuple[str | None, Peer], repeats: int = 1, timeout_s: float = 300, order: list[str] | None = None
) -> list[Run]:
    """Run the fake module on cases, given as session and peer; those with the same session None are one case."""
    alone = tuple(peer for session, peer in cases if session is None)
    made = [
        Case(name=f"{number}", about="", session=session, peers=(peer,))
        for number, (session, peer) in enumerate(cases)
        if session is not None
    ]
    every = (*made, Case(name="a", about="", peers=alone)) if alone else tuple(made)
    starts = [] if order is None else order
    return list(
        process.measure(
            Benchmark(name="fake", module="fake_child", cases=every, summed=frozenset({"rate"})),
            repeats=repeats,
            timeout_s=timeout_s,
            starts=lambda case, peer, repeat: starts.append(f"{case.name} {peer.name} {repeat}"),
        )
    )


def peer(*specs: dict[str, object], name: str = "x") -> Peer:
    return Peer(name=name, specs=specs)


def pids(found: list[Run]) -> list[object]:
    return [detail["pid"] for run in found for detail in run.details]


FAILURES = {"raise": "failed: ValueError: no such thing", "die": "failed: was ended by SIGKILL: last words"}


def test_peers_take_turns_and_leave_nothing() -> None:
    """Every repeat runs every peer once, in its own process, which ends with its children and torch's files.

    Other output on stdout is not mistaken for figures. A run that fails has the reason; later repeats leave it out.
    """
    order: list[str] = []
    failing = [(None, peer({"do": do}, name=do)) for do in FAILURES]
    found = measured((None, peer({"rate": 3})), *failing, (None, peer({}, name="y")), repeats=2, order=order)
    assert order == ["a x 0", "a raise 0", "a die 0", "a y 0", "a x 1", "a y 1"]
    assert {run.peer: run.skipped for run in found if run.skipped} == FAILURES
    found = [run for run in found if not run.skipped]
    assert [(run.repeat, run.figures["rate"]) for run in found] == [(0, 3), (0, 1), (1, 3), (1, 1)]
    assert len(set(pids(found))) == 4
    assert all(wait_until(lambda run=run: gone(run.details[0]["helper"]), limit_s=300) for run in found)  # type: ignore[misc]
    assert not [path for pid in pids(found) for path in TORCHS_FILES.glob(f"torch_{pid}_*")]


def test_a_session_goes_on_with_a_new_process() -> None:
    """What a case that fails has left behind is removed."""
    failing = [("s", peer({"do": do})) for do in FAILURES]
    found = measured(("s", peer({})), failing[0], ("s", peer({})), failing[1], ("s", peer({})))
    assert [run.skipped for run in found] == [None, FAILURES["raise"], None, FAILURES["die"], None]
    assert len(set(pids(found))) == 3
    assert not [path for pid in pids(found) for path in TORCHS_FILES.glob(f"torch_{pid}_*")]


def test_several_processes_begin_together() -> None:
    """No process measures before the slowest is warm; rates are added, and the highest of other figures counts."""
    (run,) = measured((None, peer({"rate": 1}, {"rate": 2, "warm_s": 0.5})))
    assert run.figures == {"rate": 3, "wait": 2.0}
    slow = max(float(str(detail["warm"])) for detail in run.details)
    assert all(float(str(detail["start"])) >= slow for detail in run.details)


def test_one_of_several_dies() -> None:
    """If one process fails, the run fails at once, and the others end, too, although they would wait for it."""
    (run,) = measured((None, peer({}, {"do": "raise"})), timeout_s=10_000)  # the test has 300
    assert run.skipped == "failed: ValueError: no such thing"


def test_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that hangs is ended after the timeout, with its children."""
    pid_file = tmp_path / "pid"
    hours_later = SimpleNamespace(monotonic=lambda: time.monotonic() + 9999 * pid_file.exists(), sleep=time.sleep)
    monkeypatch.setattr(process, "time", hours_later)  # as soon as it hangs
    (run,) = measured((None, peer({"do": "hang", "pid_file": str(pid_file)})))
    assert run.skipped == "failed: timed out; allow more time with --timeout"
    assert wait_until(lambda: gone(int(pid_file.read_text())), limit_s=300)


def test_a_session_keeps_its_processes() -> None:
    """One process measures all cases of a session; a case with two specs adds another, which leaves the first."""
    one, two = peer({}), peer({"rate": 2}, {"rate": 3})
    found = measured(("s", one), ("s", two), ("s", one), ("t", one), (None, one), repeats=2)
    assert [run.figures["rate"] for run in found] == [1, 1, 5, 5, 1, 1, 1, 1, 1, 1]
    first, *others = pids(found)
    session = others[:7]
    assert [pid == first for pid in session] == [True, True, False, True, False, True, True]
    assert session[2] == session[4]
    assert len(set(others[7:])) == 3  # one of the session t, and two of the last case
    assert first not in others[7:]


def test_process_names_that_are_not_utf8(tmp_path: Path) -> None:
    """The processes of a session are found even if a process has a name that is not UTF-8."""
    program = tmp_path / os.fsdecode(b"\x9b")
    program.symlink_to(shutil.which("sleep") or "")
    with subprocess.Popen([program, "600"], start_new_session=True) as odd:
        try:
            assert process._session(odd.pid) == [odd.pid]
        finally:
            odd.kill()


ONE_GPU = """
import atexit
print("imported")
atexit.register(print, "bye")
class version: cuda = "13.0"
class cuda:
    device_count = lambda: 1
    get_device_name = "GPU {}".format
"""


def test_what_torch_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch is asked for its GPUs in a process of its own; what else is printed there is not taken for the answer."""
    (tmp_path / "torch.py").write_text(ONE_GPU)
    (tmp_path / "sitecustomize.py").write_text(r"import os; os.write(1, b'started \xff')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    machine = read_machine()
    assert (machine.cuda, machine.gpus, machine.no_gpu) == ("13.0", ("GPU 0",), None)
