"""The program of each rank of `bench offload`: steps of a CPU optimizer, and of FSDP2 with CPU offload. Edge (torch).

Comes in: the path of a JSON file with the cases, their sizes, and where the answer goes. Goes out, from rank 0: the
figures of each case, over all ranks. It is copied and run as a user's script, so it imports nothing of this package.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import threading
import time
import zlib
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.utils.data import DataLoader, IterableDataset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_NUM_WARM_UP = 2
_MIN_STEPS, _MAX_STEPS = 3, 1000
_WORK = bytes(range(256)) * (1 << 10)  # takes some 5 ms to compress


def main() -> None:
    """Measure every case, and write the answer."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    device = _device(on_gpu=job["on_gpu"])
    dist.init_process_group("cuda:nccl,cpu:gloo" if job["on_gpu"] else "gloo")
    cases = {case: _measure(case, job, device) for case in job["cases"]}
    if dist.get_rank() == 0:
        answer = Path(job["answer"])
        part = answer.with_suffix(".part")
        part.write_text(json.dumps({"cases": cases}), encoding="utf-8")
        part.rename(answer)
    dist.barrier()
    dist.destroy_process_group()


def _device(*, on_gpu: bool) -> torch.device:
    """Return this rank's device, which becomes the current one."""
    if not on_gpu:
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def _measure(case: str, job: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Return the figures of a case."""
    kind, _, beside = case.partition("-")
    step = _adamw(job["size"]) if kind == "adamw" else _fsdp(job["size"], device)
    with _busy_loader(job["num_workers"]) if beside else nullcontext(None) as count:
        for _ in range(_NUM_WARM_UP):
            took_s = _timed(step)
        number = _agreed(min(_MAX_STEPS, max(_MIN_STEPS, int(job["seconds"] / took_s) + 1)))
        dist.barrier()
        began_s, before = time.monotonic(), count() if count else 0
        steps_s = [_timed(step) for _ in range(number)]
        batches_per_s = (count() - before) / (time.monotonic() - began_s) if count else None
    step_s = _reduced(statistics.mean(steps_s), dist.ReduceOp.MAX)  # a loader in the way delays some steps much
    figures = {"step_ms": step_s * 1e3, "steps_per_s": 1 / step_s, "threads": float(torch.get_num_threads())}
    if batches_per_s is not None:
        figures["loader_per_s"] = _reduced(batches_per_s, dist.ReduceOp.SUM)
    details = {
        "num_steps": number,
        "median_ms": statistics.median(steps_s) * 1e3,
        "cpus": sorted(os.sched_getaffinity(0)),
    }
    return {"figures": figures, "details": details}


def _timed(step: Callable[[], None]) -> float:
    began_s = time.monotonic()
    step()
    return time.monotonic() - began_s


def _agreed(number: int) -> int:
    """Return rank 0's number."""
    agreed = torch.tensor([number])
    dist.broadcast(agreed, 0)
    return int(agreed)


def _reduced(value: float, operation: dist.ReduceOp.RedOpType) -> float:
    """Combine the ranks' values."""
    reduced = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(reduced, operation)
    return float(reduced)


# --- the steps -------------------------------------------------------------------------------------------------------


def _adamw(size: dict[str, int]) -> Callable[[], None]:
    """Return a fused AdamW step over CPU parameters, split into tensors as in a model of that size."""
    parameters = [nn.Parameter(torch.zeros(size["num_parameters"] // 16)) for _ in range(16)]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer = torch.optim.AdamW(parameters, fused=True)

    def step() -> None:
        optimizer.step()

    return step


def _fsdp(size: dict[str, int], device: torch.device) -> Callable[[], None]:
    """Return a training step of a model whose parameters are on the CPU, and on the device while they are used."""
    width = size["width"]
    with torch.device("meta"):
        model = nn.Sequential(*(_block(width) for _ in range(size["num_blocks"])))
    on_gpu = device.type == "cuda"
    policies: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16 if on_gpu else None, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy() if on_gpu else OffloadPolicy(),
        "mesh": init_device_mesh(device.type, (dist.get_world_size(),)),
    }
    for block in model:
        fully_shard(block, **policies)
    fully_shard(model, **policies)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1 / width)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = torch.ones(size["batch_size"], width, device=device)

    def step() -> None:
        model(batch).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if on_gpu:
            torch.cuda.synchronize()

    return step


def _block(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, width, bias=False))


# --- the loader ------------------------------------------------------------------------------------------------------


class _Work(IterableDataset[int]):
    """Batches that cost CPU time, without end."""

    def __iter__(self) -> Iterator[int]:
        while True:
            yield len(zlib.compress(_WORK, 6))


@contextmanager
def _busy_loader(num_workers: int) -> Iterator[Callable[[], int]]:
    """Keep workers busy: a thread takes every batch at once. Yield a function that counts the batches."""
    loader = DataLoader(_Work(), batch_size=None, num_workers=num_workers)
    taken = 0
    end = threading.Event()

    def take() -> None:
        nonlocal taken
        for _ in loader:
            taken += 1
            if end.is_set():
                break

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    try:
        while taken < 2 * num_workers:  # they have all started
            time.sleep(0.01)
        yield lambda: taken
    finally:
        end.set()
        thread.join()  # with it, the iterator goes, and ends the workers


if __name__ == "__main__":
    main()
