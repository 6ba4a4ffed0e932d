"""`numapin bench overlap`: its cases as data, and the share of the copies that compute hid. Pure.

Comes in: options; later, the times of copies and compute. Goes out: a `Benchmark` for measure/overlap.py; a share. Does
not import torch.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

from numapin.bench.model import Benchmark, Case, Comparison, Peer

if TYPE_CHECKING:
    from collections.abc import Sequence

    Interval = tuple[float, float]

BASELINE: Final = "pageable"
PEERS: Final = {
    BASELINE: ".to(device) of ordinary memory",
    "pin-inline": ".pin_memory().to(device, non_blocking=True), both in the loop",
    "pinned": ".to(device, non_blocking=True) of memory that is already pinned",
    "side-stream": "the same, one batch ahead on a separate stream",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of the loop: load on the CPU, copy the batch, work on the CPU again, compute on the GPU."""

    name: str
    why: str
    num_bytes: int
    compute_ms: float
    num_tensors: int = 1
    load_ms: float = 0.0
    between_ms: float = 0.0

    @property
    def about(self) -> str:
        """The step in words."""
        tensors = f"{self.num_tensors} tensors, " if self.num_tensors > 1 else ""
        parts = (
            f"load {self.load_ms:g} ms" if self.load_ms else "",
            f"{tensors}{self.num_bytes >> 20} MiB",
            f"CPU {self.between_ms:g} ms" if self.between_ms else "",
            f"compute {self.compute_ms:g} ms",
        )
        return f"{self.why}: {', '.join(part for part in parts if part)}"


_MIB: Final = 1 << 20
STEPS: Final = {
    step.name: step
    for step in (
        Step(name="transfer-bound", why="mostly the copy", num_bytes=256 * _MIB, load_ms=1, compute_ms=2),
        Step(name="balanced", why="equal shares", num_bytes=128 * _MIB, load_ms=2, compute_ms=3),
        Step(name="compute-bound", why="a small copy", num_bytes=16 * _MIB, load_ms=1, compute_ms=30),
        Step(name="load-bound", why="mostly the CPU", num_bytes=16 * _MIB, load_ms=15, compute_ms=3),
        Step(name="immediate", why="the batch is used at once", num_bytes=64 * _MIB, compute_ms=2),
        Step(name="several", why="the same bytes, split", num_bytes=64 * _MIB, num_tensors=16, compute_ms=2),
        Step(name="between", why="CPU work after the copy", num_bytes=64 * _MIB, between_ms=2, compute_ms=2),
    )
}


def overlap_benchmark(steps: Sequence[str], peers: Sequence[str], *, seconds: float, no_gpu: str | None) -> Benchmark:
    """Return the benchmark. `no_gpu` is the reason if there is no GPU; every case is then skipped."""
    return Benchmark(
        name="overlap",
        module="numapin.bench.measure.overlap",
        cases=tuple(
            _case(STEPS[name], peers, seconds)
            if no_gpu is None
            else Case(name=name, about=STEPS[name].about, skipped=no_gpu)
            for name in steps
        ),
        comparisons=(Comparison(name="ratio", figure="steps_per_s", against=BASELINE),),
    )


def _case(step: Step, peers: Sequence[str], seconds: float) -> Case:
    specs = {name: {"peer": name, "step": asdict(step), "seconds": seconds} for name in peers}
    return Case(
        name=step.name,
        about=step.about,
        session="overlap",
        peers=tuple(Peer(name=name, specs=(spec,)) for name, spec in specs.items()),
    )


def share_within(parts: Sequence[Interval], wholes: Sequence[Interval]) -> float | None:
    """Return the share, 0 to 1, of the time of `parts` that lies within `wholes`; None if the parts take no time.

    Both are sorted (begin, end) intervals of one stream, which do not overlap.
    """
    total = sum(end - begin for begin, end in parts)
    if total <= 0:
        return None
    inside, index = 0.0, 0
    for begin, end in parts:
        while index < len(wholes) and wholes[index][1] <= begin:
            index += 1
        for whole_begin, whole_end in wholes[index:]:
            if whole_begin >= end:
                break
            inside += min(end, whole_end) - max(begin, whole_begin)
    return inside / total
