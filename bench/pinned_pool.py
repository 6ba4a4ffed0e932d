"""Bytes that torch's cache of pinned memory takes, and those of `numapin.pinned`, for what FSDP2 and checkpoints pin.

    python -m bench.pinned_pool                          all parts once; needs a GPU
    python -m bench.pinned_pool --parts weights,fsdp2 --repeats 5 --json FOLDER

Ways: `torch`, and `numapin`, which calls `numapin.pinned.serve_torch()` first. Each repeat of a part and way is a
process of its own, forked from one that has imported torch and not used CUDA. Parts, each of which prints its figures
and writes FOLDER/PART.json when it ends:

- weights: `Tensor.pin_memory()` for the bfloat16 weights of a layer of three models;
- ragged: 50 batches of 24 to 64 MB, four at a time;
- fsdp2: three steps with `CPUOffloadPolicy()`; parameters and gradients are pinned on the host;
- checkpoint: `async_save` of a layer's attention twice, with a `BlockingAsyncStager` that keeps its copy, and `load`;
  all values are compared.

The ways must compute the same losses. Bytes are those of `torch.cuda.host_memory_stats` and `numapin.pinned.budget`.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from numapin import pinned
from numapin.bench.machine import read_machine

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.queues import SimpleQueue

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


def weights(_folder: Path) -> dict[str, float]:
    """Pin a layer's weights of each model."""
    found: dict[str, float] = {}
    for name, widths in MODELS.items():
        tensors = [torch.empty(shape, dtype=torch.bfloat16) for shape in shapes(*widths)]
        began_s = time.perf_counter()
        kept = [tensor.pin_memory() for tensor in tensors]
        took_s = time.perf_counter() - began_s
        assert all(tensor.is_pinned() for tensor in kept)
        figures = {"asked_mb": sum(tensor.nbytes for tensor in tensors) / _MB, **pinned_mb(), "s": took_s}
        found |= {f"{name} {figure}": value for figure, value in figures.items()}
        del tensors, kept
        give_back()
    return found


def ragged(_folder: Path) -> dict[str, float]:
    """Pin batches of random sizes, four of which are alive at a time."""
    sizes, source = random.Random(0), torch.zeros(64_000_000, dtype=torch.uint8)  # noqa: S311
    kept: list[torch.Tensor] = []
    began_s = time.perf_counter()
    for _ in range(50):
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


def fsdp2(folder: Path) -> dict[str, Any]:
    """Train two blocks whose parameters are on the host."""
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{folder}/store", rank=0, world_size=1)
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
    for _ in range(3):
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
    dist.destroy_process_group()
    return found | {"asked_mb": asked_mb, **pinned_mb(), "step_s": median(steps_s), "losses": losses}


def checkpoint(folder: Path) -> dict[str, float]:
    """Save the weights of a layer's attention twice, and compare what was saved last."""
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{folder}/store", rank=0, world_size=1)
    attention = enumerate(shapes(*MODELS["Qwen2.5-7B"])[:4])
    state = {f"{n}": torch.randn(shape, dtype=torch.bfloat16, device="cuda") for n, shape in attention}
    stager, stage_s = BlockingAsyncStager(cache_staged_state_dict=True), []
    for number in range(2):
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
    dist.destroy_process_group()
    asked_mb = sum(tensor.nbytes for tensor in state.values()) / _MB
    return {"asked_mb": asked_mb, **figures, "first_s": stage_s[0], "second_s": stage_s[1]}


PARTS: Final[dict[str, Callable[[Path], dict[str, Any]]]] = {
    "weights": weights,
    "ragged": ragged,
    "fsdp2": fsdp2,
    "checkpoint": checkpoint,
}


def measure(part: str, way: str, results: SimpleQueue[dict[str, Any]]) -> None:
    """Do a part once in this process."""
    torch.cuda.init()
    torch.ones(1, device="cuda")
    if way == "numapin":
        pinned.serve_torch()
    with tempfile.TemporaryDirectory() as folder:
        results.put(PARTS[part](Path(folder)))


def run(part: str, num_repeats: int) -> dict[str, list[dict[str, Any]]]:
    """Return the figures of a part's repeats by way."""
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    context = get_context("fork")
    for _ in range(num_repeats):
        for way in WAYS:
            results: SimpleQueue[dict[str, Any]] = context.SimpleQueue()
            process = context.Process(target=measure, args=(part, way, results))
            process.start()
            process.join()
            if process.exitcode:
                raise SystemExit(f"{part}, {way}: the process ended with {process.exitcode}")
            runs[way].append(results.get())
    return runs


def parts(text: str) -> tuple[str, ...]:
    """Return the parts of a list. Raises ArgumentTypeError."""
    names = tuple(text.split(","))
    if unknown := set(names) - set(PARTS):
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    return names


def main() -> None:
    """Measure both ways of each part in turn, and print medians."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--parts", type=parts, default=tuple(PARTS), help="default: all")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FOLDER", help="the folder for PART.json")
    options = parser.parse_args()
    machine = read_machine()
    print(f"{machine.num_cpus} CPUs, {machine.gpus}, driver {machine.driver}, {machine.versions}")
    print(f"{'part':10} {'figure':22} {'torch, median [lowest, highest]':34} numapin", flush=True)
    for part in options.parts:
        runs = run(part, options.repeats)
        if options.json is not None:
            options.json.mkdir(parents=True, exist_ok=True)
            (options.json / f"{part}.json").write_text(json.dumps(runs) + "\n")
        losses = [figures.pop("losses") for way in WAYS for figures in runs[way] if "losses" in figures]
        assert all(each == losses[0] for each in losses), losses
        for name in runs["torch"][0]:
            values = [[figures[name] for figures in runs[way]] for way in WAYS]
            shown = [f"{median(each):9.3f} [{min(each):.3f}, {max(each):.3f}]" for each in values]
            print(f"{part:10} {name:22} {shown[0]:34} {shown[1]}", flush=True)


if __name__ == "__main__":
    main()
