"""Programs that tests on a GPU run: python -m tests.integration.gpu_program SCENE ARGUMENT."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import sys
import time
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils.data import DataLoader

import numapin
from tests.cuda.fake import moving
from tests.garbage import left_by
from tests.integration.gpu_loading import (
    BATCH,
    CYCLES,
    MIB,
    Filled,
    assert_no_error_is_pending,
    warmed,
    wrong_ones,
)
from tests.integration.seam import PINNED
from tests.integration.seam_torch import forking, opening, quarantine
from tests.waiting import wait_until


def say(line: str) -> None:
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
        vars(quarantine)["is_capturing"] = lambda: False
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


def use(way: str, **options: Any) -> list[Any]:
    """Use a loader in one way, and return what stays alive: batches, the loader, its iterator."""
    loader: Any = numapin.DataLoader(
        Filled(80), BATCH, num_workers=2, persistent_workers=way == "persistent", **options
    )
    if way == "whole":
        assert wrong_ones(list(loader), 0) == []
        return []
    if way == "broken off":
        for number, _ in enumerate(loader):
            if number == 5:
                break
        return []
    if way == "kept":
        return list(loader)
    if way == "persistent":
        for _ in range(3):
            assert wrong_ones(list(loader), 0) == []
        return [loader]
    iterator = iter(loader)  # in the middle
    return [loader, iterator, next(iterator), next(iterator)]


def collect(_worker: int = 0) -> None:
    gc.collect()


def drop(held: list[Any]) -> None:
    held.clear()
    gc.collect()


def status_of(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def fork_and_collect(held: list[Any]) -> int:
    pid = os.fork()
    if pid == 0:
        drop(held)
        os._exit(0)
    return status_of(pid)


def fork_and_end(held: list[Any]) -> int:
    """Fork a child that ends as a script does: Python clears all modules."""
    pid = os.fork()
    if pid == 0:
        vars(sys.modules[__name__])["inherited"] = held
        sys.exit(0)
    return status_of(pid)


def start_process(held: list[Any]) -> int | None:
    process = multiprocessing.get_context("fork").Process(target=drop, args=(held,))
    process.start()
    process.join()
    return process.exitcode


def start_torchs_workers(_: list[Any]) -> int:
    return len(wrong_ones(list(DataLoader(Filled(40), BATCH, num_workers=2, worker_init_fn=collect)), 0))


def start_own_workers(_: list[Any]) -> int:
    pid = os.fork()
    if pid == 0:
        torch.set_num_threads(1)  # GNU's OpenMP hangs in a forked child with more
        wrong = wrong_ones(list(numapin.DataLoader(Filled(40), BATCH, num_workers=2, worker_init_fn=collect)), 0)
        gc.collect()
        os._exit(len(wrong))
    return status_of(pid)


CHILDREN = (fork_and_collect, fork_and_end, start_process, start_torchs_workers, start_own_workers)


def fork(argument: str) -> None:
    """Use a loader in one way ("device kept"), then start children of all kinds; print their statuses, 0 is good."""
    place, _, way = argument.partition(" ")
    gc.disable()
    alone = fork_and_end([torch.empty(1, device="cuda")])
    held = use(way, **({"device": "cuda"} if place == "device" else {"pin_memory": True}))
    told = {"torch alone": alone, **{start.__name__: start(held) for start in CHILDREN}}
    if way == "in the middle":
        _, iterator, *batches = held
        told["wrong"] = len(wrong_ones([*batches, *iterator], 0))
    say(json.dumps(told))


def unguarded(_: str) -> None:
    """Fork a child that drops a batch whose memory forked children may free; print its status."""
    vars(opening)["keep_in_children"] = lambda _: None
    held = use("kept", device="cuda")
    assert not forking._on_devices
    say(str(fork_and_collect(held)))


def garbage(place: str) -> None:
    options: dict[str, Any] = {"device": "cuda"} if place == "device" else {"pin_memory": True}
    torch.empty(1, device="cuda")
    ways = ("whole", "broken off", "kept", "persistent", "in the middle")
    say(json.dumps({way: left_by(lambda way=way: use(way, **options)) for way in ways}))  # type: ignore[misc]


SCENES = (train, capture, vanish, fork, unguarded, garbage)

if __name__ == "__main__":
    with moving() if "FAKE_CUDA_CHILD_ABORTS" in os.environ else nullcontext():
        {scene.__name__: scene for scene in SCENES}[sys.argv[1]](sys.argv[2])
