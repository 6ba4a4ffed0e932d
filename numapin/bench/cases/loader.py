"""`numapin bench loader`: its cases and peers as data. Pure but for the clock of the work that holds the GIL.

Comes in: options. Goes out: a `Benchmark`, whose processes are `loader_case`. Imports no torch.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from math import prod
from typing import TYPE_CHECKING, Final

from numapin.bench.model import Benchmark, Case, Comparison, Peer

if TYPE_CHECKING:
    from collections.abc import Sequence

NUM_SAMPLES: Final = 512
BASELINE: Final = "torch"
PEAK: Final = "pinned-peak"
PREFETCH: Final = 2  # batches ahead a worker, torch's default, for every peer
_GIL_NS: Final = 100_000  # a sample
_WORKERS_EACH: Final = 12  # with several GPUs at once
_ITEM_BYTES: Final = {"float32": 4, "int64": 8, "uint8": 1}


class Work(StrEnum):
    """What a sample costs besides the copying of its bytes."""

    NONE = "none"
    GIL = "gil"
    """0.1 ms of pure Python."""
    DECODE = "decode"
    """zlib, a 2x2 mean and a transposition: some milliseconds, as a JPEG takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderCase:
    """One kind of batch. A sample is a tensor of `shape` with a label, or a dict of `num_tensors` such tensors."""

    name: str
    batch_size: int
    shape: tuple[int, ...]
    dtype: str
    num_workers: int
    prefetch: int = PREFETCH
    num_tensors: int | None = None
    work: Work = Work.NONE
    on_device: bool = True

    @property
    def batch_bytes(self) -> int:
        """Return the bytes of a batch, without its labels."""
        return self.batch_size * prod(self.shape) * _ITEM_BYTES[self.dtype] * (self.num_tensors or 1)

    @property
    def num_ahead(self) -> int:
        """Return how many batches are made ahead."""
        return self.prefetch * self.num_workers

    @property
    def about(self) -> str:
        """Return the case in words."""
        shape = "x".join(map(str, (self.batch_size, *self.shape)))
        parts = (
            f"{self.num_tensors} tensors of {shape} {self.dtype}" if self.num_tensors else f"{shape} {self.dtype}",
            f"{self.batch_bytes / 1e6:.1f} MB",
            f"{self.num_workers} workers" + ("" if self.prefetch == PREFETCH else f", {self.prefetch} ahead each"),
            {Work.NONE: "", Work.GIL: "0.1 ms under the GIL a sample", Work.DECODE: "decoding"}[self.work],
            "to the GPU" if self.on_device else "to this process only",
        )
        return ", ".join(part for part in parts if part)


_LARGE: Final = LoaderCase(name="154MB", batch_size=256, shape=(3, 224, 224), dtype="float32", num_workers=12)
_MIDDLE: Final = LoaderCase(name="38MB", batch_size=256, shape=(3, 224, 224), dtype="uint8", num_workers=8)
_SMALL: Final = LoaderCase(name="1MB", batch_size=32, shape=(4096,), dtype="int64", num_workers=8)

CASES: Final = {
    case.name: case
    for case in (
        _LARGE,
        _MIDDLE,
        _SMALL,
        # 8 samples of 512 bytes in each of the 200 tensors: 4 KiB a tensor
        LoaderCase(name="dict200", batch_size=8, shape=(128,), dtype="float32", num_workers=8, num_tensors=200),
        *(replace(c, name=f"gil-{c.name}", num_workers=8, work=Work.GIL) for c in (_LARGE, _MIDDLE, _SMALL)),
        replace(_MIDDLE, name="decode", batch_size=64, work=Work.DECODE),
        replace(_MIDDLE, name="transport", num_workers=2, on_device=False),
    )
}

PEERS: Final = {
    PEAK: "copies of one pinned buffer to the GPU: the yardstick",
    BASELINE: "torch.utils.data.DataLoader, pin_memory=True and .to(non_blocking=True)",
    "torch-side-stream": "the same, with a prefetcher on a side stream",
    "threads": "threads that stack into torch's pinned memory, reused after an event",
    "spdl": "SPDL: a pipeline of threads, pinned and copied in a stage of its own",
    "spdl-process": "SPDL: get_pytorch_dataloader, worker processes",
    "spdl-subprocess": "SPDL: the pipeline in a subprocess, over a shared-memory arena",
    "torchdata": "torchdata.nodes with worker processes",
    "torchdata-threads": "torchdata.nodes with threads",
    "torchdata-stateful": "torchdata's StatefulDataLoader",
    "numapin-device": "numapin.DataLoader(device=…): yields batches on the GPU",
    "numapin-host": "numapin.DataLoader(pin_memory=True) and .to(non_blocking=True)",
    "numapin-transport": "numapin.DataLoader without a GPU",
}
_FOR_DEVICES_ONLY: Final = frozenset({PEAK, "torch-side-stream", "numapin-device", "numapin-host"})
_FOR_HOSTS_ONLY: Final = frozenset({"numapin-transport"})


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderBenchOptions:
    """What the user chose. `num_workers` None leaves each case its own, or 12 where several GPUs run at once.

    `prefetch` is batches ahead a worker. A window is at least `seconds` and at least `num_batches` long.
    """

    cases: Sequence[str] = tuple(CASES)
    peers: Sequence[str] = tuple(PEERS)
    num_workers: int | None = None
    prefetch: int = PREFETCH
    seconds: float
    warm_up_s: float
    num_batches: int
    all_gpus: bool = False


def loader_benchmark(options: LoaderBenchOptions, *, num_gpus: int, no_gpu: str | None) -> Benchmark:
    """Return the benchmark for a machine with so many GPUs; without one the cases that need it say `no_gpu`."""
    num_gpus = num_gpus if options.all_gpus else min(num_gpus, 1)
    several = _WORKERS_EACH if num_gpus > 1 else None
    cases = []
    for name in options.cases:
        default = CASES[name]
        num_workers = options.num_workers or several or default.num_workers
        case = replace(default, num_workers=num_workers, prefetch=options.prefetch)
        cases.append(_case(case, options, num_gpus=num_gpus, no_gpu=no_gpu))
    return Benchmark(
        name="loader",
        module="numapin.bench.measure.loader",
        cases=tuple(cases),
        comparisons=(
            Comparison(name="ratio", figure="batches_per_s", against=BASELINE),
            Comparison(name="share_of_peak", figure="gbps", against=PEAK),
        ),
        summed=frozenset({"batches_per_s", "gbps", "num_batches", "hits", "misses", "pinned_mb"}),
    )


def _case(case: LoaderCase, options: LoaderBenchOptions, *, num_gpus: int, no_gpu: str | None) -> Case:
    if case.on_device and not num_gpus:
        return Case(name=case.name, about=case.about, skipped=no_gpu or "torch sees no GPU")
    gpus = range(num_gpus) if case.on_device else (None,)
    unfit = _FOR_HOSTS_ONLY if case.on_device else _FOR_DEVICES_ONLY
    common = {
        "case": asdict(case),
        "gil_ns": _GIL_NS if case.work is Work.GIL else 0,
        "num_ranks": max(1, num_gpus),
        "seconds": options.seconds,
        "warm_up_s": options.warm_up_s,
        "num_batches": options.num_batches,
    }
    peers = tuple(
        Peer(name=name, specs=tuple({**common, "peer": name, "gpu": gpu} for gpu in gpus))
        for name in options.peers
        if name not in unfit
    )
    return Case(name=case.name, about=case.about + (f", {num_gpus} GPUs at once" if num_gpus > 1 else ""), peers=peers)


def spin(cpu_ns: int) -> None:
    """Work in Python, which holds the GIL, for so much CPU time of this thread.

    CPU time, and neither turns nor time on the wall: turns take twice as long where two workers share a core, and the
    wall's time passes, too, while another thread has the GIL.
    """
    until_ns = time.thread_time_ns() + cpu_ns
    while time.thread_time_ns() < until_ns:
        pass
