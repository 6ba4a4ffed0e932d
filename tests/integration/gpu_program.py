"""Programs that tests on a GPU run: python -m tests.integration.gpu_program SCENE ARGUMENT.

Input: the scene to run. Output: a line on stdout, which the test reads.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

import numapin
from numapin.data.slots import quarantine
from numapin.system.placement import PINNED
from tests.integration.gpu_loading import (
    BATCH,
    CYCLES,
    MIB,
    Filled,
    assert_no_error_is_pending,
    is_right,
    warmed,
    wrong_ones,
)
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable


def say(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)  # noqa: T201 - what the test reads


def train(method: str) -> None:
    """Hold a GiB of the GPU and copy batches to it forever; print "ready" once they come in used slots."""
    held = torch.ones(1024 * MIB, dtype=torch.uint8, device="cuda")
    dataset = Filled(4_000_000)
    loader: Any = numapin.DataLoader(
        dataset, BATCH, num_workers=2, pin_memory=True, multiprocessing_context=method, persistent_workers=True
    )
    iterator, _ = warmed(loader)
    say("ready")
    while True:
        held[: BATCH * MIB].view(torch.int32).view(BATCH, -1).copy_(next(iterator), non_blocking=True)


def capture(guard: str) -> None:
    """Capture a CUDA graph while released slots wait, with numapin's guard or without it; print "whole" or "broken"."""
    if guard == "unguarded":
        vars(quarantine)["no_capture"] = lambda: nullcontext(True)  # "no capture is in progress"
    loader: Any = numapin.DataLoader(Filled(), BATCH, num_workers=2, pin_memory=True)
    iterator, _ = warmed(loader)
    held, ones, graph = [next(iterator) for _ in range(3)], torch.ones(8, device="cuda"), torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            ones.mul_(2)
            held.clear()
            next(iterator)
    except RuntimeError:
        say("broken")
    else:
        graph.replay()
        say("whole" if int(ones.sum()) == 16 else "wrong")
    os._exit(0)


def vanish(what: str) -> None:
    """Drop or close a loader while its copies wait on the device; print the state of the batches and the ring."""
    loader: Any = numapin.DataLoader(Filled(), BATCH, num_workers=2, device="cuda")
    iterator, first = warmed(loader)
    cuda: Any = torch.cuda
    with cuda.stream(loader._numapin_path._mover._stream):
        cuda._sleep(4 * CYCLES)
    batches = [next(iterator) for _ in range(3)]
    del iterator
    if what == "closed":
        loader.close()
    kept = loader if what == "closed" else None
    del loader
    gc.collect()
    time.sleep(0.01)
    wrong = wrong_ones(batches, first)
    assert_no_error_is_pending()
    wait_until(lambda: not PINNED.total, limit_s=2)
    say(json.dumps({"wrong": wrong, "pinned_bytes": PINNED.total}))
    del kept


def limited(kind: str) -> None:
    """Load with `ulimit -l 64`, on the device or in host memory; print the result as JSON."""
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, 64 << 10))
    torch.ones(1, device="cuda")
    options: dict[str, Any] = {"device": "cuda"} if kind == "device" else {"pin_memory": True}
    loader: Any = numapin.DataLoader(Filled(800, 1 << 16), BATCH, num_workers=2, **options)
    wrong = [n for n, batch in enumerate(loader) if not is_right(batch.to("cuda", non_blocking=True), n)]
    assert_no_error_is_pending()
    stats = loader.stats()
    say(json.dumps({"wrong": wrong, "batches": stats.batches, "hits": stats.hits, "notes": stats.notes}))


SCENES: dict[str, Callable[[str], None]] = {"train": train, "capture": capture, "vanish": vanish, "limited": limited}

if __name__ == "__main__":
    SCENES[sys.argv[1]](sys.argv[2])
