"""Device memory is not freed in forked children, and children end without their parent's workers."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch

from tests.data.loopback import in_forked_child
from tests.data.warm import run_script
from tests.unit.data.seam import keep_in_children

MEMORY = """
import gc, os
os.register_at_fork(after_in_child=gc.collect)
from numapin.data.forking import keep_in_children

class Memory:
    def __del__(self, parent=os.getpid(), getpid=os.getpid, write=os.write):
        if getpid() != parent:
            write(1, b"freed in the child ")

held = [Memory()]
{keep}
{then}
pid = os.fork()
if pid:
    os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
os.write(1, b"ended")
"""
IN_A_CYCLE = "gc.disable()\nheld.append(held)\ndel held"
ENDS = """
import os, sys, numapin

batches = iter(numapin.DataLoader(range(400), batch_size=4, num_workers=2))
next(batches)
pid = os.fork()
if pid == 0:
    sys.exit()
status = os.waitpid(pid, 0)[1]
print(status, len(list(batches)))
"""
SLOW_IMPORT = """
import sys, threading, time
import torch, numpy
assert "numpy.random" not in sys.modules  # else this test shows nothing
import numapin
numapin.DataLoader  # imports the data path

class Slow:
    def find_spec(name, path, target=None):
        if name == "numpy.random":
            time.sleep(3)

sys.meta_path.insert(0, Slow)
threading.Thread(target=__import__, args=("numpy.random",), daemon=True).start()
print(len(list(numapin.DataLoader(range(4), num_workers=1, timeout=100))))
"""
TWO_THREADS = """
import gc, threading, numapin.data.forking as forking
import torch

torch.cuda.is_initialized = lambda: True  # collection is only stopped where CUDA is used
forking._begin_fork()
other = threading.Thread(target=forking._begin_fork)
other.start()
other.join()
kept = set(forking._FORKS.held) - {threading.get_ident()}
forking._end_fork()
assert set(forking._FORKS.held) == kept and not gc.isenabled()
forking._FORKS.held.clear()  # an interrupt kept the other thread from ending its fork
forking._begin_fork()
forking._end_fork()
assert gc.isenabled() and not forking._FORKS.held
"""


def test_memory_outlives_its_last_reference_in_a_child() -> None:
    """In a child it lives on; in the process itself it is freed with the last tensor or view."""
    tensors = [torch.zeros(8)]
    keep_in_children(tensors[0].untyped_storage())
    lives = weakref.ref(tensors[0].untyped_storage())
    tensors[0] = tensors[0][3:]

    def drop() -> bool:
        tensors.clear()
        gc.collect()
        return lives() is not None

    assert in_forked_child(drop)
    assert lives() is not None
    tensors.clear()
    assert lives() is None


@pytest.mark.parametrize("then", ["", IN_A_CYCLE], ids=["referenced", "garbage"])
@pytest.mark.parametrize("is_kept", [True, False])
def test_at_no_moment_of_a_child_memory_is_freed(tmp_path: Path, then: str, *, is_kept: bool) -> None:
    """Neither by a collection before numapin's own at-fork handler runs, nor when Python clears the modules."""
    keep = "keep_in_children(held[0])" if is_kept else ""
    _status, out, _err = run_script(tmp_path, MEMORY.format(keep=keep, then=then))
    assert ("freed" not in out) is is_kept, out
    assert "ended" in out


@pytest.mark.parametrize(
    ("script", "out"),
    [
        pytest.param(ENDS, "0 99\n", id="a child inherits multiprocessing's list of workers, and ends without them"),
        pytest.param(SLOW_IMPORT, "4\n", id="torch seeds numpy.random in a worker, while a thread imports it"),
        pytest.param(TWO_THREADS, "", id="the end of one thread's fork lets go of its own memory only"),
    ],
)
def test_forks_beside_others(tmp_path: Path, script: str, out: str) -> None:
    """Forks beside other forks, threads and imports neither hang nor end the processes of others."""
    status, told, err = run_script(tmp_path, script)
    assert (status, told) == (0, out), err
