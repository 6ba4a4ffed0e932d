"""numapin.DataLoader in whole programs: what is alive when Python exits, and the threads of numpy's BLAS in workers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.integration.launching import call, script
from tests.needs import needs_two_cpus

pytestmark = pytest.mark.slow

# Each ending runs in a child that was forked after torch's import. "kept": references in other modules keep an iterator
# alive until Python has emptied its module, as dill's do.
_PROGRAM = """
import atexit, contextlib, ctypes, os, random, sys, threading
import numpy
import torch
import numapin
from numapin.data import pinning

class Ones(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return torch.ones(1000)

def live_iterators():
    options = [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}]
    iterators = [iter(numapin.DataLoader(Ones(), batch_size=4, **each)) for each in options]
    for iterator in iterators:
        next(iterator)
    return iterators

def keep(iterators):
    random.kept = iterators
    for name, module in list(sys.modules.items()):
        if not name.startswith("torch"):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(module))

class Arrays(Ones):
    def __getitem__(self, index):
        return numpy.ones(5000)

def batches_of(kind):
    # numpy arrays are released until the very end, tensors are not
    loader = kind(Arrays(), batch_size=4, num_workers=1, collate_fn=list)
    iterator = iter(loader)
    return [next(iterator) for _ in range(4)], loader, iterator

class Driver:
    can_record_contexts = True
    relaxed_capture = contextlib.nullcontext
    record_everywhere = list  # there is no device
    def recycle(self, *events):
        pass
    def unregister(self, device, address):
        pass

# The process aborts if Python ends while another thread is in torch, which needs the GIL again. A tensor's destructor
# does so, too (torch 2.11).
class Memory:
    is_going = threading.Event()
    def __del__(self):
        self.is_going.set()
        torch.empty(1 << 20, dtype=torch.uint8).fill_(1)

def settle():
    for _ in range(300):
        pinning.settlers[os.getpid()].submit(threading.Event(), Memory)
    Memory.is_going.wait(10)

def free_all(reclaimer):
    for _ in range(300):
        reclaimer.add(pinning.Locked(memory=Memory(), address=0, num_bytes=0, device=0))

def reclaim():
    free_all(pinning.reclaimer(Driver()))
    Memory.is_going.wait(10)

def reclaim_late():
    atexit.register(lambda: free_all(reclaimer))
    reclaimer = pinning.reclaimer(Driver())

def settle_forever():
    is_going = threading.Event()
    hang = lambda: is_going.set() or threading.Event().wait()
    pinning.settlers[os.getpid()].submit(threading.Event(), hang)
    is_going.wait(10)

for ending in sys.argv[2:]:
    if os.fork() == 0:
        with open(os.path.join(sys.argv[1], ending), "wb", buffering=0) as file:
            os.dup2(file.fileno(), 2)
        if ending in globals():
            globals()[ending]()
            break
        iterators = live_iterators() if "batches" not in ending else []
        if ending == "raise":
            raise LookupError("the user's own")
        if ending == "exit":
            for batch in iterators[1]:
                sys.exit(5)
        if ending == "kept":
            keep(iterators)
        if ending == "kept-batches":
            keep(batches_of(numapin.DataLoader))
        if ending == "kept-batches-of-torch":
            keep(batches_of(torch.utils.data.DataLoader))
        if ending == "kept-batches-only":
            keep(batches_of(numapin.DataLoader)[0])
        break
    status = os.wait()[1]
    print(ending, os.waitstatus_to_exitcode(status))
"""


def test_the_end_of_python_is_silent(tmp_path: Path) -> None:
    """Nothing is printed, with or without workers, also with persistent ones, and while slots are pinned or freed."""
    kept = ("kept", "kept-batches", "kept-batches-only", "kept-batches-of-torch")
    endings = ("end", "raise", "exit", "settle", "settle_forever", "reclaim", "reclaim_late", *kept)
    done = call(sys.executable, script(tmp_path, _PROGRAM), str(tmp_path), *endings)
    said = {ending: (tmp_path / ending).read_text() for ending in endings}
    statuses = {"raise": 1, "exit": 5}
    expected = [f"{ending} {statuses.get(ending, 0)}" for ending in endings]
    assert done.out.splitlines() == expected, (done.err, said)
    error = said.pop("raise")
    assert said == dict.fromkeys(said, "")
    assert error.startswith("Traceback (most recent call last):\n")
    assert error.endswith("LookupError: the user's own\n")
    assert "ignored" not in error


@needs_two_cpus  # with one, BLAS has one thread anyway
def test_numpy_in_workers() -> None:
    """BLAS uses one thread in our workers, forked or spawned, or the user's number; in torch's, that of the rank.

    torch keeps its one thread. No idle BLAS threads are left behind: a worker has its main thread and the one that
    watches the rank. What the user's worker_init_fn sets stays.
    """
    threads = {"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2"}
    done = call(sys.executable, "-m", "tests.data.blas", cwd=Path(__file__).resolve().parents[2], **threads)
    assert done.status == 0, done.err
    seen = {name: [int(n) for n in numbers] for name, *numbers in map(str.split, done.out.splitlines())}
    assert [numbers.pop() for numbers in seen.values()] == [1] * len(seen)
    assert seen["torch"] == [2, 2, 2]
    assert seen["numapin"] == seen["numapin-spawn"] == [1, 2, 1]
    assert seen["numapin-2"][::2] == seen["numapin-0"][::2] == [2, 2]
    assert seen["numapin-own"][::2] == [1, 5]
