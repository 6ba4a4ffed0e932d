"""`numapin bench loader`: its cases and peers as data.

Does not import torch.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from math import prod
from typing import TYPE_CHECKING, Final

from numapin.base.text import counted
from numapin.bench.model import Benchmark, Case, Comparison, Peer, Question

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

NUM_SAMPLES: Final = 512
BASELINE: Final = "torch"
PEAK: Final = "pinned-peak"
SAMPLES: Final = "samples"
PREFETCH: Final = 2  # batches ahead per worker, torch's default, for every peer
_GIL_NS: Final = 100_000  # per sample
_WORKERS_EACH: Final = 12  # per GPU, with several GPUs at once
_ITEM_BYTES: Final = {"float32": 4, "int64": 8, "uint8": 1}


class Work(StrEnum):
    """The cost of a sample besides copying its bytes."""

    NONE = "none"
    GIL = "gil"
    """0.1 ms of pure Python."""
    DECODE = "decode"
    """zlib, a 2x2 mean and a transposition: a few milliseconds, as for a JPEG."""
    PAD = "pad"
    """Sequences of 64 elements up to the case's length; the batch is padded in collate_fn."""


_WORK_IN_WORDS: Final = {
    Work.NONE: "",
    Work.GIL: "0.1 ms under the GIL per sample",
    Work.DECODE: "decoding",
    Work.PAD: "padded in collate_fn",
}


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
        """The bytes of a batch, without its labels; of a padded batch, at most."""
        return self.batch_size * prod(self.shape) * _ITEM_BYTES[self.dtype] * (self.num_tensors or 1)

    @property
    def num_ahead(self) -> int:
        """The number of batches made ahead."""
        return self.prefetch * self.num_workers

    @property
    def about(self) -> str:
        """The case in words."""
        shape = "x".join(map(str, (self.batch_size, *self.shape)))
        tensors = f"{counted(self.num_tensors, 'tensor')} of " if self.num_tensors else ""
        parts = (
            f"{tensors}{shape} {self.dtype}",
            f"{self.batch_bytes / 1e6:.1f} MB",
            counted(self.num_workers, "worker"),
            "" if self.prefetch == PREFETCH else f"{self.prefetch} ahead each",
            _WORK_IN_WORDS[self.work],
            "to the GPU" if self.on_device else "to this process only",
        )
        return ", ".join(filter(None, parts))


_LARGE: Final = LoaderCase(name="154MB", batch_size=256, shape=(3, 224, 224), dtype="float32", num_workers=12)
_MIDDLE: Final = LoaderCase(name="38MB", batch_size=256, shape=(3, 224, 224), dtype="uint8", num_workers=8)
_SMALL: Final = LoaderCase(name="1MB", batch_size=32, shape=(4096,), dtype="int64", num_workers=8)

CASES: Final = {
    case.name: case
    for case in (
        _LARGE,
        _MIDDLE,
        _SMALL,
        # 8 samples of 512 bytes in each of the 200 tensors: 4 KiB per tensor
        LoaderCase(name="dict200", batch_size=8, shape=(128,), dtype="float32", num_workers=8, num_tensors=200),
        LoaderCase(
            name="ragged", batch_size=64, shape=(1023,), dtype="int64", num_workers=8, num_tensors=3, work=Work.PAD
        ),
        *(replace(c, name=f"gil-{c.name}", num_workers=8, work=Work.GIL) for c in (_LARGE, _MIDDLE, _SMALL)),
        replace(_MIDDLE, name="decode", batch_size=64, work=Work.DECODE),
        replace(_SMALL, name="gil-transport", work=Work.GIL, on_device=False),
        replace(_MIDDLE, name="transport", num_workers=2, on_device=False),
    )
}

PEERS: Final = {
    PEAK: "copies of one pinned buffer to the GPU: the upper bound",
    SAMPLES: "processes that only make samples: the upper bound where samples take work",
    BASELINE: "torch.utils.data.DataLoader, pin_memory=True and .to(non_blocking=True)",
    "numapin-device": "numapin.DataLoader(device=…): yields batches on the GPU",
    "numapin-host": "numapin.DataLoader(pin_memory=True) and .to(non_blocking=True)",
    "numapin-bf16": "numapin-device with cast=torch.bfloat16; its GB/s count the bytes of the narrower batches",
    "numapin-buffer": "numapin-device, and a dataset that writes whole batches into numapin.batch_buffer",
    "numapin-buffer-nt": "the same, with stores that bypass the caches",
    "numapin-transport": "numapin.DataLoader without a GPU",
    "numapin-balanced": "numapin.DataLoader(balance=True), with device=… if there is a GPU",
}
_BUFFER_PEERS: Final = frozenset({"numapin-buffer", "numapin-buffer-nt"})
_CASTING_PEERS: Final = frozenset({"numapin-bf16"})
_FOR_DEVICES_ONLY: Final = frozenset({PEAK, "numapin-device", "numapin-host"}).union(_BUFFER_PEERS, _CASTING_PEERS)
_FOR_HOSTS_ONLY: Final = frozenset({"numapin-transport"})
_QUESTION: Final = Question(
    subject="{own} instead of torch's loader",
    things="batches are",
    figure="batches_per_s",
    own=(
        "numapin-device",
        "numapin-transport",
        "numapin-host",
        "numapin-balanced",
        "numapin-buffer",
        "numapin-buffer-nt",
    ),
    against=BASELINE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderBenchOptions:
    """The user's choices. If `num_workers` is None, each case has its own number, or 12 if several GPUs run at once.

    `prefetch` is in batches per worker. A window lasts at least `seconds` and `num_batches` batches.
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
    """Return the benchmark for a machine with `num_gpus` GPUs; without one, cases that need it are skipped."""
    num_gpus = num_gpus if options.all_gpus else min(num_gpus, 1)
    chosen = [_with_workers(CASES[name], options, num_gpus) for name in options.cases]
    cases = [_case(case, options, num_gpus=num_gpus, no_gpu=no_gpu) for case in chosen]
    return Benchmark(
        name="loader",
        module="numapin.bench.measure.loader",
        cases=tuple(cases),
        comparisons=(
            Comparison(name="ratio", figure="batches_per_s", against=BASELINE),
            Comparison(name="share_of_peak", figure="gbps", against=PEAK),
            Comparison(name="share_of_samples", figure="batches_per_s", against=SAMPLES),
        ),
        summed=frozenset({"batches_per_s", "gbps", "num_batches", "hits", "misses", "pinned_mb"}),
        questions=(_QUESTION,),
    )


def _with_workers(case: LoaderCase, options: LoaderBenchOptions, num_gpus: int) -> LoaderCase:
    """Return a case with the user's number of workers, if given."""
    default = _WORKERS_EACH if num_gpus > 1 else case.num_workers
    return replace(case, num_workers=options.num_workers or default, prefetch=options.prefetch)


def _case(case: LoaderCase, options: LoaderBenchOptions, *, num_gpus: int, no_gpu: str | None) -> Case:
    lacks_gpu = case.on_device and not num_gpus
    if lacks_gpu:
        return Case(name=case.name, about=case.about, skipped=no_gpu or "torch sees no GPU")
    gpus = tuple(range(num_gpus)) if case.on_device else (None,)
    common = _common_spec(case, options, num_gpus)
    at_once = f", {num_gpus} GPUs at once" if num_gpus > 1 else ""
    peers = tuple(_peer(name, common, gpus) for name in _fit_peers(options.peers, case))
    return Case(name=case.name, about=case.about + at_once, peers=peers)


def _fit_peers(names: Sequence[str], case: LoaderCase) -> list[str]:
    """Return the peers that can run a case."""
    unfit = _unfit_peers(case)
    return [name for name in names if name not in unfit]


def _peer(name: str, common: Mapping[str, object], gpus: Sequence[int | None]) -> Peer:
    return Peer(name=name, specs=tuple({**common, "peer": name, "gpu": gpu} for gpu in gpus))


def _unfit_peers(case: LoaderCase) -> frozenset[str]:
    """Return the peers that cannot run a case."""
    is_plain = case.num_tensors is None and case.work is not Work.DECODE
    needs = (
        (_FOR_HOSTS_ONLY, not case.on_device),
        (_FOR_DEVICES_ONLY, case.on_device),
        (_BUFFER_PEERS, is_plain),  # they make batches of one tensor and labels
        (_CASTING_PEERS, case.dtype == "float32"),
        (frozenset({SAMPLES}), case.work in {Work.GIL, Work.DECODE}),
    )
    return frozenset().union(*(peers for peers, is_met in needs if not is_met))


def _common_spec(case: LoaderCase, options: LoaderBenchOptions, num_gpus: int) -> dict[str, object]:
    return {
        "case": asdict(case),
        "gil_ns": _GIL_NS if case.work is Work.GIL else 0,
        "num_ranks": max(1, num_gpus),
        "seconds": options.seconds,
        "warm_up_s": options.warm_up_s,
        "num_batches": options.num_batches,
    }


def spin(cpu_ns: int) -> None:
    """Hold the GIL by working in Python for `cpu_ns` of this thread's CPU time.

    Iterations would take twice as long if two workers share a core, and wall time also passes while another thread has
    the GIL.
    """
    until_ns = time.thread_time_ns() + cpu_ns
    while time.thread_time_ns() < until_ns:
        pass
