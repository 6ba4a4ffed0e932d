"""`numapin bench train`: its models and loaders as data. Pure.

Comes in: options. Goes out: a `Benchmark` for measure/train.py. Does not import torch.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from math import lcm, prod
from typing import TYPE_CHECKING, Any, Final

from numapin.base.plural import counted
from numapin.bench.model import Benchmark, Case, Comparison, Peer, Question

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

BASELINE: Final = "torch"
CEILING: Final = "ceiling"
OURS: Final = "numapin"
PREFETCH: Final = 2  # batches ahead per worker, torch's default, for every loader
MOST_WORKERS: Final = 12  # per rank, by default
NUM_IMAGES: Final = 64  # JPEG files
QUICK_STEPS: Final = 6
_QUICK_WIDTH, _QUICK_WORDS = 64, 512
NO_JPEG: Final = "needs Pillow or torchvision for JPEG images: pip install pillow"
NO_GPU: Final = "without a GPU only small sizes are measured: numapin bench train --quick"


class Material(StrEnum):
    """The data that a model trains on."""

    FLOATS = "float32"
    """Random float32 samples in memory: loading means collating and copying."""
    JPEG = "JPEG"
    """Files that workers decode, crop and send as uint8."""
    TOKENS = "tokens"
    """Sequences of int64 in memory, padded to the longest one of the batch; a batch is a dict of three tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainCase:
    """A model and its samples of shape `shape`; `batch_size` is per rank.

    Each rank has `num_samples` distinct samples. `width` and `depth` are those of a transformer; `num_classes` is the
    size of its vocabulary, if it reads tokens. `bf16` trains under bfloat16 autocast, `channels_last` with that memory
    format. If `is_offloaded`, the model is sharded by FSDP2, and parameters and AdamW are on the CPU.
    """

    name: str
    model: str
    material: Material
    shape: tuple[int, ...]
    batch_size: int
    num_classes: int
    num_samples: int
    width: int = 0
    depth: int = 0
    bf16: bool = True
    channels_last: bool = False
    is_offloaded: bool = False

    @property
    def num_distinct(self) -> int:
        """The number of batches after which the samples start again at the first one."""
        return lcm(self.num_samples, self.batch_size) // self.batch_size

    @property
    def batch_bytes(self) -> int:
        """The most bytes that a batch of this rank has."""
        item_bytes = {Material.FLOATS: 4, Material.JPEG: 1, Material.TOKENS: 3 * 8}[self.material]
        return self.batch_size * prod(self.shape) * item_bytes

    @property
    def about(self) -> str:
        """The case in one line."""
        size = "x".join(map(str, self.shape))
        data = {
            Material.FLOATS: f"{size} float32",
            Material.JPEG: f"JPEG, cropped to {size}",
            Material.TOKENS: f"up to {size} tokens, padded",
        }[self.material]
        precision = "bf16 autocast" if self.bf16 else "float32"
        extra = ", FSDP2 with AdamW on the CPU" if self.is_offloaded else ""
        return f"{self.batch_size} x {data} per rank; {precision}{extra}"


_RESNET18: Final = TrainCase(
    name="resnet18",
    model="resnet18",
    material=Material.FLOATS,
    shape=(3, 224, 224),
    batch_size=256,
    num_classes=1000,
    num_samples=512,
    channels_last=True,
)
_LM: Final = TrainCase(
    name="lm",
    model="lm",
    material=Material.TOKENS,
    shape=(1024,),
    batch_size=16,
    num_classes=16_000,
    num_samples=256,
    width=512,
    depth=8,
)

CASES: Final = {
    case.name: case
    for case in (
        _RESNET18,
        replace(
            _RESNET18,
            name="cnn3d",
            model="cnn3d",
            shape=(1, 96, 96, 96),
            batch_size=32,
            num_classes=10,
            num_samples=128,
            bf16=False,
            channels_last=False,
        ),
        replace(_RESNET18, name="resnet50", model="resnet50"),
        replace(
            _RESNET18,
            name="vit-jpeg",
            model="vit",
            material=Material.JPEG,
            num_samples=256,
            width=384,
            depth=12,
            channels_last=False,
        ),
        _LM,
        replace(_LM, name="fsdp-offload", batch_size=8, num_samples=64, width=1024, depth=8, is_offloaded=True),
    )
}
"""The models by name, in the order in which they are measured: as in papers, without anybody's weights."""

PEERS: Final = {
    BASELINE: "torch.utils.data.DataLoader, pin_memory=True, persistent_workers=True and .to(non_blocking=True)",
    OURS: "numapin.DataLoader(device=…), persistent_workers=True",
    "spdl": "SPDL: a pipeline of as many threads, with a separate stage that pins and copies",
    "dali": "NVIDIA DALI, for vit-jpeg: JPEGs are decoded on the GPU",
    CEILING: "batches that are already on the GPU: the upper bound",
}
PEER_MODULES: Final = {"spdl": "spdl.pipeline", "dali": "nvidia.dali"}
"""Peers of optional libraries, with the module that they import."""
_QUESTION: Final = Question(
    subject="numapin instead of torch's loader",
    things="training steps are",
    figure="samples_per_s",
    own=(OURS,),
    against=BASELINE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBenchOptions:
    """The user's choices.

    `seconds` is the length of the first loader's window. All later windows of a model have the same number of steps;
    `num_steps` sets it. `folder` is empty, and removed at the end.
    """

    cases: Sequence[str] = tuple(CASES)
    peers: Sequence[str] = tuple(PEERS)
    num_ranks: int = 1
    num_workers: int
    prefetch: int = PREFETCH
    seconds: float
    warm_up_s: float
    num_steps: int | None = None
    batch_size: int | None = None
    launcher: str = "torchrun"
    is_quick: bool = False
    folder: str = ""


def train_benchmark(options: TrainBenchOptions, *, on_gpu: bool, has_jpeg: bool) -> Benchmark:
    """Return the benchmark. Without a GPU only quick sizes are measured; without a decoder, no model of JPEGs."""
    chosen = [sized(CASES[name], options) for name in options.cases]
    return Benchmark(
        name="train",
        module="numapin.bench.measure.train",
        cases=tuple(_case(case, options, on_gpu=on_gpu, has_jpeg=has_jpeg) for case in chosen),
        comparisons=(
            Comparison(name="ratio", figure="samples_per_s", against=BASELINE),
            Comparison(name="of_ceiling", figure="samples_per_s", against=CEILING),
        ),
        questions=(_QUESTION,),
    )


def sized(case: TrainCase, options: TrainBenchOptions) -> TrainCase:
    """Return the case in the size that the options ask for."""
    case = _quick(case) if options.is_quick else case
    batch_size = options.batch_size or case.batch_size
    return replace(case, batch_size=batch_size, num_samples=max(case.num_samples, batch_size))


def _quick(case: TrainCase) -> TrainCase:
    """Return a version for smoke tests: few small samples, narrow transformers, float32 (CPUs emulate bfloat16)."""
    sides = {1: (32,), 3: (case.shape[0], 32, 32), 4: (case.shape[0], 16, 16, 16)}
    small = replace(case, shape=sides[len(case.shape)], batch_size=4, num_samples=16, bf16=False)
    if case.material is Material.TOKENS:
        small = replace(small, num_classes=_QUICK_WORDS)
    return replace(small, width=_QUICK_WIDTH, depth=2) if case.width else small


def _case(case: TrainCase, options: TrainBenchOptions, *, on_gpu: bool, has_jpeg: bool) -> Case:
    why_not = _why_not(case, options, on_gpu=on_gpu, has_jpeg=has_jpeg)
    if why_not is not None:
        return Case(name=case.name, about=case.about, skipped=why_not)
    common = {"case": asdict(case), "options": asdict(options)}
    names = (name for name in options.peers if name != "dali" or case.material is Material.JPEG)
    return Case(
        name=case.name,
        about=f"{case.about}; {counted(options.num_ranks, 'rank')}",
        peers=tuple(Peer(name=name, specs=({**common, "peer": name},)) for name in names),
        session="train",
    )


def _why_not(case: TrainCase, options: TrainBenchOptions, *, on_gpu: bool, has_jpeg: bool) -> str | None:
    if not on_gpu and not options.is_quick:
        return NO_GPU
    return NO_JPEG if case.material is Material.JPEG and not has_jpeg else None


def case_of(content: Mapping[str, Any]) -> TrainCase:
    """Return the case that a spec holds as JSON."""
    return TrainCase(**{**content, "shape": tuple(content["shape"]), "material": Material(content["material"])})


def needed_shm_bytes(case: TrainCase, options: TrainBenchOptions) -> int:
    """Return the bytes that the batches on the way take in /dev/shm with torch's loader, for all ranks."""
    return case.batch_bytes * options.num_workers * options.prefetch * options.num_ranks
