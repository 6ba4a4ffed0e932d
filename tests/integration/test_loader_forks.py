"""numapin.DataLoader with a worker that hangs in its fork: the worker is restarted, and no batch is lost or repeated.

To simulate the hang, a child waits in an at-fork handler that runs before numapin's own.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import numapin
from tests.contract.datasets import Made
from tests.data.warm import run_script
from tests.integration.seam import FORKS_ISSUE, forks_may_hang, state_of
from tests.integration.seam_torch import HandedDown, forking
from tests.waiting import wait_until

ROWS = 40
NUMBERS = Made(lambda index: torch.cat((torch.full((8,), float(index)), torch.rand(8))), ROWS)  # with own randomness


@dataclass(slots=True)
class Forks:
    num_to_hang: int = 0
    hangs: bool = False

    def before(self) -> None:
        self.hangs = self.num_to_hang > 0
        self.num_to_hang -= self.hangs

    def in_child(self) -> None:
        """Wait for a lock that nothing can release; or, if locks cannot be seen, for a signal."""
        lock = threading.Lock()
        while self.hangs:
            lock.acquire()


_FORKS = Forks()
os.register_at_fork(before=_FORKS.before, after_in_child=_FORKS.in_child)


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        assert info is not None
        return (torch.full((8,), float(index)) for index in range(info.id, ROWS, 2))


def _values(batches: list[torch.Tensor], *, whole: bool) -> list[Any]:
    """Return the batches, or their sorted first numbers if it is open which worker makes which."""
    return [batch.tolist() for batch in batches] if whole else sorted(float(batch[0, 0]) for batch in batches)


# Workers hang in their forks as long as `hang` is true.
HANGING = """
import os, signal, threading, time, numapin
hang, lock = True, threading.Lock()
def in_child():
    while hang: {hangs}
os.register_at_fork(after_in_child=in_child)
"""


def _require_good_end(folder: Path, text: str, hangs: str = "lock.acquire()") -> None:
    status, _out, err = run_script(folder, HANGING.format(hangs=hangs) + text)
    assert (status, "Exception ignored" in err) == (0, False), err


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Forks]:
    """Give control over hanging forks; workers are looked at after 0.1 s instead of 1."""
    monkeypatch.setattr(forking, "LOOK_S", 0.1)
    yield _FORKS
    _FORKS.num_to_hang = 0
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    "options",
    [
        {"dataset": NUMBERS, "num_workers": 2, "persistent_workers": True},
        {"dataset": NUMBERS, "num_workers": 2, "timeout": 100},
        {"dataset": NUMBERS, "num_workers": 2, "in_order": False},
        {"dataset": Stream(), "num_workers": 2},
    ],
    ids=["persistent", "timeout", "any-order", "iterable"],
)
def test_is_started_again(forks: Forks, capfd: pytest.CaptureFixture[str], options: dict[str, Any]) -> None:
    """Two epochs have the same batches as torch's loader, and the restart is reported once."""
    told = []
    for loader_class, hang in ((DataLoader, 0), (numapin.DataLoader, 2)):
        torch.manual_seed(3)
        forks.num_to_hang = hang
        loader = loader_class(batch_size=4, **options)
        told.append([_values(epoch, whole=options.get("in_order", True)) for epoch in (list(loader), list(loader))])
        assert forks.num_to_hang == 0
        del loader
    assert told[0] == told[1]
    said = capfd.readouterr().err
    num_told = [said.count(f"worker {n} hung in its fork, before it ran anything, and was restarted") for n in (0, 1)]
    assert num_told == [1, 1]
    assert (FORKS_ISSUE in said) == forks_may_hang(sys.version_info[:3])


def test_one_that_always_hangs_is_an_error(forks: Forks) -> None:
    """A worker that always hangs is an error that names the remedy; no process is left."""
    forks.num_to_hang = 255
    with pytest.raises(RuntimeError, match=r"worker 0 hung in its fork 4 times.*forkserver"):
        list(numapin.DataLoader(NUMBERS, 4, num_workers=1))


@pytest.mark.parametrize("verdict", [False, None])
def test_one_that_may_only_be_slow(
    forks: Forks, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, verdict: object
) -> None:
    """A worker that does not certainly hang is left alone, so that the user's time-out raises torch's error."""
    monkeypatch.setattr(forking, "waits_forever", lambda *_: verdict)
    forks.num_to_hang = 1
    with pytest.raises(RuntimeError, match=r"DataLoader timed out after 0.5 seconds"):
        list(numapin.DataLoader(NUMBERS, 4, num_workers=1, timeout=0.5))
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("hangs", ["lock.acquire()", "pass"])
def test_one_that_is_left_at_exit_holds_nobody(tmp_path: Path, hangs: str) -> None:
    """A hung worker that is left at exit blocks nothing, stopped or not, also if the script handles SIGTERM."""
    _require_good_end(
        tmp_path,
        "signal.signal(signal.SIGTERM, lambda *_: None)\n"
        "left = iter(numapin.DataLoader(range(8), num_workers=1))\n"
        f"while {hangs != 'pass'} and not left._context.hung(left._workers): time.sleep(0.02)\n",
        hangs,
    )


@pytest.mark.parametrize("is_asleep", [False, True])
def test_an_iterator_that_is_dropped_ends_them(forks: Forks, is_asleep: bool) -> None:  # noqa: FBT001
    """Dropping an iterator kills hung workers, also if they inherit a SIGTERM handler that never gets to run."""
    former = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        forks.num_to_hang = 1
        held: list[Any] = [iter(numapin.DataLoader(NUMBERS, 4, num_workers=2))]
        assert not is_asleep or wait_until(lambda: 0 in held[0]._context.hung(held[0]._workers), limit_s=60)
        workers = list(held[0]._workers)
        held.clear()
        assert [worker.exitcode for worker in workers] == [-signal.SIGKILL, 0]
    finally:
        signal.signal(signal.SIGTERM, former)


def test_one_that_the_script_reaped_is_left_alone(tmp_path: Path) -> None:
    """A worker that the script's SIGCHLD handler reaped is left alone; multiprocessing thinks it is alive."""
    _require_good_end(
        tmp_path,
        "def reap(*_):\n"
        "    try:\n"
        "        while os.waitpid(-1, os.WNOHANG)[0]: pass\n"
        "    except ChildProcessError: pass\n"
        "signal.signal(signal.SIGCHLD, reap)\n"
        "dropped = iter(numapin.DataLoader(range(8), num_workers=2))\n"
        "gone, left = dropped._workers\n"
        "while len(dropped._context.hung(dropped._workers)) < 2: time.sleep(0.02)\n"
        "dropped._unwatch()\n"
        "os.kill(gone.pid, signal.SIGKILL)\n"
        "while os.path.exists(f'/proc/{gone.pid}'): time.sleep(0.02)\n"
        "assert gone.is_alive()\n"
        "pid = left.pid\n"
        "del dropped\n"
        "assert not os.path.exists(f'/proc/{pid}')\n",
    )


def test_one_that_began_after_all_goes_on(forks: Forks) -> None:
    """A worker that starts after all is kept, because it may have taken a task already."""
    context = forking.Context(multiprocessing.get_context("fork"), (), lambda _: HandedDown(list), num_workers=1)
    forks.num_to_hang = 1
    processes = [process := context.Process(target=print, args=())]
    process.start()
    assert wait_until(lambda: context.hung(processes) == [0], limit_s=60)
    context._page[0] = 1  # type: ignore[index] # forked: there is one
    assert not context.start_again(processes, 0)
    assert wait_until(lambda: state_of(process.pid or 0) == "S", limit_s=60)  # and is not stopped
    process.kill()
    process.join()


def test_one_whose_judge_is_interrupted_is_not_left_stopped(forks: Forks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C between the stop and the end of a hung worker leaves no stopped process behind."""
    forks.num_to_hang = 1
    loader = iter(numapin.DataLoader(NUMBERS, 4, num_workers=1))
    (process,) = loader._workers  # type: ignore[attr-defined] # torch's

    def interrupt(pid: int) -> str | None:
        assert wait_until(lambda: state_of(pid) == "T", limit_s=60)
        raise KeyboardInterrupt

    with monkeypatch.context() as changed:
        changed.setattr(forking, "state_of", interrupt)
        with pytest.raises(KeyboardInterrupt):
            next(loader)
    assert wait_until(lambda: state_of(process.pid) == "S", limit_s=60)
    assert len(list(loader)) == ROWS // 4


# CUDA is simulated. Each fork has garbage to inherit, and its child makes enough objects to start a collection. The
# last child is not a worker.
_GARBAGE = """
import gc, os, types
import torch, numapin
from numapin.data import forking as garbage
rank = os.getpid()
class cuda:
    is_initialized = staticmethod(lambda: os.getpid() == rank)
    _is_in_bad_fork = staticmethod(lambda: os.getpid() != rank)
garbage.torch = types.SimpleNamespace(cuda=cuda)
class Event:  # its destructor aborts a forked child
    def __init__(self): self.itself = self
    def __del__(self): os.getpid() == rank or os.abort()
class Collects(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, index): return torch.tensor([gc.isenabled(), os.getpid() != rank])
loader = numapin.DataLoader(Collects(), batch_size=2, num_workers=2)
gc.collect()
os.register_at_fork(before=Event, after_in_child=lambda: [[] for _ in range(10 * gc.get_threshold()[0])])
iterator = iter(loader)
assert gc.isenabled()
print(torch.cat(list(iterator)).all().item())
if not (child := os.fork()):
    gc.collect()
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_child_collects_nothing_that_it_inherited(tmp_path: Path) -> None:
    """A destructor of CUDA would abort it. A worker collects its own garbage, and so does the rank."""
    assert run_script(tmp_path, _GARBAGE) == (0, "True\n0\n", "")
