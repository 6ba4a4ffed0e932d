"""Bytes that torch's cache of pinned memory takes, and those of `numapin.pinned`, for what FSDP2 and checkpoints pin.

    python -m bench.pinned_pool                 five repeats of each way in turn, each in a new process; needs a GPU
    python -m bench.pinned_pool --repeats 1

Ways: `torch`, and `numapin`, which calls `numapin.pinned.serve_torch()` first. Every process does all of this:

- weights: `Tensor.pin_memory()` for the bfloat16 weights of a layer of three models;
- ragged: 100 batches of 24 to 64 MB, four at a time;
- fsdp2: five steps with `CPUOffloadPolicy()`; parameters and gradients are pinned on the host;
- checkpoint: `async_save` twice, with a `BlockingAsyncStager` that keeps its copy, and `load`; all values are compared;
- staging: the same with a `DefaultStager` for each save, which registers memory of its own.

The ways must compute the same losses. Bytes are those of `torch.cuda.host_memory_stats` and `numapin.pinned.budget`.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from numapin import pinned
from numapin.bench.machine import read_machine

if TYPE_CHECKING:
    from collections.abc import Callable

WAYS: Final = ("torch", "numapin")
MODELS: Final = {"Llama-2-7B": (4096, 4096, 11008), "Llama-3-8B": (4096, 1024, 14336), "Qwen2.5-7B": (3584, 512, 18944)}
"""The width, the width of keys and values, and that of the inner layer."""
_MB: Final = 1e6


def shapes(width: int, num_keys: int, inner: int) -> list[tuple[int, int]]:
    """Return the shapes of a layer's weights: attention, then a gated MLP."""
    return [(width, width), (num_keys, width), (num_keys, width), (width, width), *[(inner, width)] * 2, (width, inner)]


def pinned_mb() -> dict[str, float]:
    """Return the MB that are pinned now, by each of the two."""
    found = pinned.budget()
    return {"torch_mb": (found.torch_pinned_bytes or 0) / _MB, "numapin_mb": found.pinned_bytes / _MB}


def give_back() -> None:
    """Release what either of them keeps."""
    gc.collect()
    torch.cuda.synchronize()
    private: Any = torch._C  # noqa: SLF001 - as in numapin/bench/alloc.py
    empty = getattr(private, "_host_emptyCache", None) or private._accelerator_emptyHostCache  # noqa: SLF001
    empty()
    pinned.trim()


def weights(name: str) -> dict[str, float]:
    """Pin a layer's weights."""
    tensors = [torch.empty(shape, dtype=torch.bfloat16) for shape in shapes(*MODELS[name])]
    began_s = time.perf_counter()
    kept = [tensor.pin_memory() for tensor in tensors]
    took_s = time.perf_counter() - began_s
    assert all(tensor.is_pinned() for tensor in kept)
    return {"asked_mb": sum(tensor.nbytes for tensor in tensors) / _MB, **pinned_mb(), "s": took_s}


def ragged() -> dict[str, float]:
    """Pin batches of random sizes, four of which are alive at a time."""
    sizes, source = random.Random(0), torch.zeros(64_000_000, dtype=torch.uint8)  # noqa: S311
    kept: list[torch.Tensor] = []
    began_s = time.perf_counter()
    for _ in range(100):
        kept = [*kept[-3:], source[: sizes.randrange(24_000_000, 64_000_000)].pin_memory()]
        kept[-1].to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    return {**pinned_mb(), "s": time.perf_counter() - began_s}


class Block(nn.Module):
    """A gated MLP of one of the models."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down, self.norm = nn.Linear(inner, width, bias=False), nn.LayerNorm(width)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Add what the MLP computes."""
        normed = self.norm(values)
        result: torch.Tensor = values + self.down(nn.functional.silu(self.gate(normed)) * self.up(normed))
        return result


def fsdp2() -> dict[str, Any]:
    """Train two blocks whose parameters are on the host."""
    torch.manual_seed(0)
    width, _, inner = MODELS["Qwen2.5-7B"]
    with torch.device("cuda"):
        model = nn.Sequential(Block(width, inner), Block(width, inner)).to(torch.bfloat16)
        batch = torch.randn(8, 128, width, dtype=torch.bfloat16)
    began_s = time.perf_counter()
    for module in (*model, model):
        fully_shard(module, offload_policy=CPUOffloadPolicy())
    found: dict[str, Any] = {"shard_s": time.perf_counter() - began_s}
    found |= {f"sharded_{name}": value for name, value in pinned_mb().items()}
    optimizer, losses, steps_s = torch.optim.SGD(model.parameters(), lr=1e-3), [], []
    for _ in range(5):
        began_s = time.perf_counter()
        loss = model(batch).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
        steps_s.append(time.perf_counter() - began_s)
    local = [parameter.to_local() for parameter in model.parameters()]  # type: ignore[attr-defined] # a DTensor
    assert all(tensor.is_pinned() for tensor in local)
    asked_mb = sum(tensor.nbytes for tensor in local) / _MB
    return found | {"asked_mb": asked_mb, **pinned_mb(), "step_s": median(steps_s), "losses": losses}


def save(make_stager: Callable[[], Any], folder: Path) -> dict[str, float]:
    """Save a layer's weights twice, and compare what was saved last.

    torch 2.11 closes a DefaultStager after each save, so `make_stager` is called again; a kept one is kept by it.
    """
    layer = enumerate(shapes(*MODELS["Qwen2.5-7B"]))
    state = {f"{n}": torch.randn(shape, dtype=torch.bfloat16, device="cuda") for n, shape in layer}
    stage_s = []
    for number in range(2):
        stager = make_stager()
        for tensor in state.values():
            tensor.add_(number)
        began_s = time.perf_counter()
        saved: Any = async_save(state, checkpoint_id=folder / f"{number}", async_stager=stager)
        stager.synchronize_staging()
        stage_s.append(time.perf_counter() - began_s)
        getattr(saved, "upload_completion", saved).result()
    figures = pinned_mb()
    read = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    load(read, checkpoint_id=folder / "1")
    assert all(torch.equal(read[name], state[name]) for name in state)
    stager.close()
    blocking_stager.cache_clear()
    asked_mb = sum(tensor.nbytes for tensor in state.values()) / _MB
    return {"asked_mb": asked_mb, **figures, "first_s": stage_s[0], "second_s": stage_s[1]}


@cache
def blocking_stager() -> BlockingAsyncStager:
    """Return the stager that keeps its copies, which are made with `Tensor.pin_memory`."""
    return BlockingAsyncStager(cache_staged_state_dict=True)


def default_stager() -> DefaultStager:
    """Return the stager that registers shared memory of its own."""
    return DefaultStager(StagingOptions())


def measure(way: str) -> dict[str, Any]:
    """Do everything once in this process."""
    torch.cuda.init()
    torch.ones(1, device="cuda")
    if way == "numapin":
        pinned.serve_torch()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{folder}/store", rank=0, world_size=1)
        for name in MODELS:
            found[f"weights {name}"] = weights(name)
            give_back()
        found["ragged"] = ragged()
        give_back()
        found["checkpoint"] = save(blocking_stager, Path(folder, "blocking"))
        give_back()
        found["staging"] = save(default_stager, Path(folder, "default"))
        give_back()
        found["fsdp2"] = fsdp2()
        dist.destroy_process_group()
    return found


def main() -> None:
    """Measure both ways in turn, and print medians."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--measure", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        sys.stdout.write(json.dumps(measure(options.measure)) + "\n")
        return
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for _ in range(options.repeats):
        for way in WAYS:
            command = [sys.executable, "-m", "bench.pinned_pool", "--measure", way]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            runs[way].append(json.loads(done.stdout.splitlines()[-1]))
            sys.stderr.write(f"{way}: {json.dumps(runs[way][-1])}\n")
    assert len({json.dumps(run["fsdp2"].pop("losses")) for way in WAYS for run in runs[way]}) == 1
    machine = read_machine()
    lines = [f"{machine.num_cpus} CPUs, {machine.gpus}, driver {machine.driver}, {machine.versions}"]
    lines.append(f"{'case':20} {'figure':18} {'torch, median [lowest, highest]':34} numapin")
    for case, figures in runs["torch"][0].items():
        for name in figures:
            medians = [[run[case][name] for run in runs[way]] for way in WAYS]
            shown = [f"{median(each):9.3f} [{min(each):.3f}, {max(each):.3f}]" for each in medians]
            lines.append(f"{case:20} {name:18} {shown[0]:34} {shown[1]}")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
