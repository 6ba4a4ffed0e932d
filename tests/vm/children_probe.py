"""A program that starts GPU processes by itself, in the ways in which frameworks do. `torch` is the stand-in.

    numapin exec --children -- python children_probe.py

Each process writes the kernel's view of itself to $PROBE_OUT/NAME.json. The driver has one CPU of node 0, so that what
the processes allocate before they are bound is on node 0. It sees two GPUs: GPU 1 is on node 1.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import multiprocessing as mp
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from tests.vm import probe

OUT: Final = Path(os.environ["PROBE_OUT"])
WAYS: Final = ("spawn", "fork", "forkserver")
BEFORE_BYTES: Final = 24 << 20


def main() -> None:
    os.sched_setaffinity(0, {0})
    for way in WAYS:
        _workers(way)
    _alone("engine", run_engine)
    _told_by_environment()
    _alone("both", _take_both)
    _alone("follower", _with_followers)
    write("driver")


def write(name: str, **more: object) -> None:
    told = {
        "pid": os.getpid(),
        "threads": probe._threads(),
        "policy": probe._policy(),
        "pages": _placed(),
        "binding": os.environ.get("NUMAPIN_BINDING"),
        **more,
    }
    new = OUT / f"{name}.new"
    new.write_text(json.dumps(told))
    new.rename(OUT / f"{name}.json")


def _placed() -> object:
    """Touch new memory and return the nodes of its pages.

    From numa_maps: move_pages does not find pages that the kernel's NUMA balancing looks at, as in threads without a
    policy.
    """
    mapping = probe.touched(probe.MAPPING_BYTES)
    found = probe._numa_maps(f"{ctypes.addressof(ctypes.c_char.from_buffer(mapping)):x}")
    return found and found["pages"]


# --- multiprocessing, in its three ways ------------------------------------------------------------------------------


def _workers(way: str) -> None:
    """Start a worker per GPU; verify the run while they are there."""
    context: Any = mp.get_context(way)
    ready, done = context.Semaphore(0), context.Event()
    workers = [context.Process(target=work, args=(f"{way}-{rank}", rank, ready, done)) for rank in range(2)]
    for worker in workers:
        worker.start()
    for _ in workers:
        ready.acquire()
    if way == "spawn":
        from tests.vm.agent import verify  # only here, as its imports take each process a second in emulation

        verify(OUT / "verify.json")
    done.set()
    for worker in workers:
        worker.join()


def work(name: str, rank: int, ready: Any, done: Any) -> None:
    """Do as vLLM's worker does: start threads, import torch, allocate, and set the device late; then feed it."""
    with ThreadPoolExecutor(3) as pool:
        barrier = threading.Barrier(4)
        for _ in range(3):
            pool.submit(barrier.wait)
        barrier.wait()
        before = probe.touched(BEFORE_BYTES)
        before.madvise(mmap.MADV_DOFORK)  # else the kernel may merge it with the next mapping
        import torch

        torch.cuda.set_device(f"cuda:{rank}")
        older_thread = pool.submit(_placed).result()
        write(name, older_thread=older_thread)
        helper = mp.get_context("fork").Process(target=write, args=(f"{name}-loader",))
        helper.start()
        helper.join()
        if name == "spawn-1":
            subprocess.run([sys.executable, __file__, "helper", f"{name}-helper"], check=True)
        ready.release()
        done.wait()
        before.close()


# --- an engine between the driver and its workers, as in vLLM and SGLang ---------------------------------------------


def run_engine(name: str) -> None:
    """Start a worker, which sets its device; this process never takes one."""
    worker = mp.get_context("spawn").Process(target=_engine_worker)
    worker.start()
    worker.join()
    write(name)


def _engine_worker() -> None:
    import torch

    with ThreadPoolExecutor(1) as pool:  # some executors set the device in a thread
        pool.submit(torch.cuda.set_device, 1).result()
        write("engine-1")


# --- the other scenes ------------------------------------------------------------------------------------------------


def _told_by_environment() -> None:
    """Start processes whose environment says which GPU is theirs, as Ray, torchrun and accelerate do."""
    for name, variables in (("visible", {"CUDA_VISIBLE_DEVICES": "1"}), ("rank", {"LOCAL_RANK": "1"})):
        environ = {**os.environ, **variables}
        subprocess.run([sys.executable, __file__, "helper", name], env=environ, check=True)
    environ = {**os.environ, "LOCAL_RANK": "1"}
    subprocess.run([sys.executable, __file__, "asks", "asked"], env=environ, check=True)


def _ask_for_another(name: str) -> None:
    import numapin

    numapin.bind_this_process(0, bind="node")
    write(name)


def _alone(name: str, target: Any) -> None:
    process = mp.get_context("spawn").Process(target=target, args=(name,))
    process.start()
    process.join()


def _take_both(name: str) -> None:
    import torch

    torch.cuda.set_device(1)
    torch.cuda.set_device(0)
    write(name)


def _with_followers(name: str) -> None:
    """Start a fork server and a process before the device is set; they follow."""
    import torch

    server = mp.get_context("forkserver")
    first = server.Process(target=write, args=("early",))
    first.start()
    first.join()
    waits = subprocess.Popen([sys.executable, __file__, "waits", "waiting"], stdin=subprocess.PIPE)
    while not (OUT / "waiting-started.json").exists():
        threading.Event().wait(0.05)
    torch.cuda.set_device(1)
    late = server.Process(target=write, args=("late",))
    late.start()
    late.join()
    waits.communicate(b"go")
    write(name)


if __name__ == "__main__":
    if sys.argv[1:2] == ["helper"]:
        write(sys.argv[2], at_start_of_torch="torch" in sys.modules)
    elif sys.argv[1:2] == ["asks"]:
        _ask_for_another(sys.argv[2])
    elif sys.argv[1:2] == ["waits"]:
        write(f"{sys.argv[2]}-started")
        sys.stdin.read()
        write(sys.argv[2])
    else:
        main()
