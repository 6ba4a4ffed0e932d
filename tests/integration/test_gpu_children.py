"""`numapin exec --children` and `numapin attach` with real GPUs: processes that have CUDA's context and its threads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.launching import NUMAPIN, call, environment, numapin, script
from tests.integration.test_gpu import needs_gpu

pytestmark = needs_gpu
NUM_CPUS = 2
SHARE = ("--cpus-per-rank", str(NUM_CPUS))
LIMIT_S = 120

SHOW = """
import contextlib, json, os, sys
def cpus():
    found = set()
    for tid in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended since
            found.add(tuple(os.sched_getaffinity(int(tid))))
    return sorted(found)
def show(name, **more):
    os.write(1, (json.dumps({"name": name, "cpus": cpus(), "pid": os.getpid(), **more}) + "\\n").encode())
"""

# torch is imported by the first process, so that a fork finds it, and its threads' settings, already there.
WORKERS = """
import multiprocessing, torch, threading
class Masks(torch.utils.data.Dataset):
    def __len__(self): return 2
    def __getitem__(self, index): return cpus()
def work(way):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    show(f"{way}-before")
    torch.cuda.set_device(0)
    torch.ones(1, device="cuda").item()
    loader = torch.utils.data.DataLoader(Masks(), batch_size=None, num_workers=1)
    show(way, worker=[mask for masks in loader for mask in masks])
if __name__ == "__main__":
    for way in sys.argv[1:]:
        worker = multiprocessing.get_context(way).Process(target=work, args=(way,))
        worker.start()
        worker.join()
    show("parent")
"""

# Computes on the GPU until its input ends; each line of it makes a thread more.
HELD = """
import threading, torch
held = torch.ones(1 << 20, device="cuda")
held.sum().item()
show("started")
for line in sys.stdin:
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    held.add_(1).sum().item()
    show("asked")
"""


def shown(text: str) -> dict[str, dict[str, Any]]:
    return {line["name"]: line for line in map(json.loads, text.splitlines())}


@pytest.mark.parametrize("way", ["spawn", "fork", "forkserver"])
def test_a_child_is_bound_when_it_takes_its_gpu(way: str, tmp_path: Path) -> None:
    """Not before; then all of its threads, CUDA's too, and the workers that it starts. Its parent stays free."""
    program = script(tmp_path, SHOW + WORKERS, "program.py")
    options = ("exec", "--children", *SHARE, "--", sys.executable, str(program), way)
    done = call(*NUMAPIN, *options, TMPDIR=str(tmp_path))
    assert done.status == 0, done.err
    found = shown(done.out)
    assert way in found, done.err
    everything = [sorted(os.sched_getaffinity(0))]
    assert found["parent"]["cpus"] == found[f"{way}-before"]["cpus"] == everything
    (mask,) = found[way]["cpus"]
    assert len(mask) == NUM_CPUS
    assert found[way]["worker"] == [mask, mask]


class Held:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process, self.pid = process, str(process.pid)
        self.before = self._read()

    def ask(self) -> list[list[int]]:
        """Return the CPUs of its threads after it has started one more, and used its GPU again."""
        assert self._process.stdin
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> list[list[int]]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        assert line, "the process has ended"
        masks: list[list[int]] = json.loads(line)["cpus"]
        return masks


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Held]:
    process = subprocess.Popen(
        [sys.executable, str(script(tmp_path, SHOW + HELD, "held.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment(),
        text=True,
    )
    with process:
        try:
            yield Held(process)
            assert process.stdin
            process.stdin.close()
            process.wait(LIMIT_S)
        finally:
            process.kill()


def test_attach_asks_the_driver_for_the_gpu(held: Held) -> None:
    """Nothing in the process's environment names its GPU; the printed commands give it its CPUs back."""
    planned = numapin("attach", "--pid", held.pid, *SHARE, "--dry-run")
    assert planned.status == 0, planned.err
    assert held.ask() == held.before
    done = numapin("attach", "--pid", held.pid, *SHARE)
    assert done.status == 0, done.err
    (mask,) = held.ask()
    assert len(mask) == NUM_CPUS
    _, _, commands = done.out.partition("undo with (")
    subprocess.run(["sh", "-e"], input=commands.partition("\n")[2], check=True, text=True)
    assert held.ask() == held.before
