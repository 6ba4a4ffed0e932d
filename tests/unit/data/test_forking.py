"""Device memory is not freed in forked children, and children end without their parent's workers."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import pytest
import torch

from tests.data.child import in_forked_child
from tests.unit.data.seam import keep_in_children

BEGIN = """
import gc, os
class Memory:
    def __del__(self, parent=os.getpid(), getpid=os.getpid, write=os.write):
        if getpid() != parent: write(1, b"freed in the child ")
"""
HELD = "held = [Memory()]\nkeep_in_children(held[0])\n"
IN_A_CYCLE = "held = [Memory()]\nkeep_in_children(held[0])\ngc.disable()\nheld.append(held)\ndel held\n"
FORK = """
pid = os.fork()
if pid: os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
os.write(1, b"ended")
"""


@pytest.mark.parametrize("view", [False, True])
def test_memory_outlives_its_last_reference_in_a_child(view: bool) -> None:  # noqa: FBT001
    """In a child it lives on; in the process itself it is freed with the last tensor or view."""
    tensors = [torch.zeros(8)]
    keep_in_children(tensors[0].untyped_storage())
    lives = weakref.ref(tensors[0].untyped_storage())
    if view:
        tensors[0] = tensors[0][3:]

    def drop() -> bool:
        tensors.clear()
        gc.collect()
        return lives() is not None

    assert in_forked_child(drop)
    assert lives() is not None
    tensors.clear()
    assert lives() is None


@pytest.mark.parametrize("held", [HELD, IN_A_CYCLE], ids=["referenced", "garbage"])
@pytest.mark.parametrize("is_kept", [True, False])
def test_at_no_moment_of_a_child_memory_is_freed(held: str, is_kept: bool) -> None:  # noqa: FBT001
    """Neither by a collection before numapin's own at-fork handler runs, nor when Python clears the modules."""
    first = "os.register_at_fork(after_in_child=gc.collect)\nfrom numapin.data.forking import keep_in_children\n"
    ignored = "" if is_kept else "keep_in_children = lambda _: None\n"
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + first + ignored + held + FORK], capture_output=True, text=True, check=True
    )
    assert ("freed" not in done.stdout) is is_kept, done.stdout
    assert "ended" in done.stdout


def test_a_child_that_ends_leaves_its_parents_workers_alone() -> None:
    """A child of os.fork inherits multiprocessing's list of processes, whose exit handler would terminate them."""
    code = (
        "import os, sys, numapin\n"
        "batches = iter(numapin.DataLoader(range(400), batch_size=4, num_workers=2))\n"
        "next(batches)\n"
        "pid = os.fork()\n"
        "if pid == 0: sys.exit()\n"
        "status = os.waitpid(pid, 0)[1]\n"
        "print(status, len(list(batches)))\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "0 99\n", done.stderr


def test_a_worker_forked_during_an_import_of_numpy_random_does_not_hang() -> None:
    """Numpy loads it late, and torch seeds it in each worker, which would wait for a lock of the parent's thread."""
    code = (
        "import sys, threading, time\n"
        "import torch, numpy\n"
        "assert 'numpy.random' not in sys.modules\n"  # else this test shows nothing
        "import numapin\n"
        "numapin.DataLoader\n"  # imports the data path
        "class Slow:\n"
        "    def find_spec(name, path, target=None):\n"
        "        if name == 'numpy.random': time.sleep(5)\n"
        "sys.meta_path.insert(0, Slow)\n"
        "threading.Thread(target=__import__, args=('numpy.random',), daemon=True).start()\n"
        "print(len(list(numapin.DataLoader(range(4), num_workers=1, timeout=30))))\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "4\n", done.stderr


def test_two_threads_that_fork_at_once() -> None:
    """The end of one thread's fork lets go of its own memory only, and collection goes on after the last."""
    fork = (
        "import threading, numapin.data.forking as forking\n"
        """
import torch
torch.cuda.is_initialized = lambda: True  # collection is only stopped where CUDA is used
forking._begin_fork()
other = threading.Thread(target=forking._begin_fork); other.start(); other.join()
kept = set(forking._FORKS.held) - {threading.get_ident()}
forking._end_fork()
assert set(forking._FORKS.held) == kept and not gc.isenabled()
forking._FORKS.held.clear()  # an interrupt kept the other thread from ending its fork
forking._begin_fork(); forking._end_fork()
assert gc.isenabled() and not forking._FORKS.held
"""
    )
    subprocess.run([sys.executable, "-c", "import gc\n" + fork], check=True)
