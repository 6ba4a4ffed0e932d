"""`numapin bench overlap`: its cases as data, and the share of the copies that compute hid.

Does not import torch.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import asdict, dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Final

from numapin.bench.model import Benchmark, Case, Comparison, Peer, Question

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
_QUESTION: Final = Question(
    subject="pin ({own})", things="steps are", figure="steps_per_s", own=("pinned", "side-stream"), against=BASELINE
)


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
            _work("load", self.load_ms),
            f"{tensors}{self.num_bytes >> 20} MiB",
            _work("CPU", self.between_ms),
            _work("compute", self.compute_ms),
        )
        return f"{self.why}: {', '.join(filter(None, parts))}"


def _work(name: str, duration_ms: float) -> str:
    """Return the duration of a part of a step; "" if it takes no time."""
    return f"{name} {duration_ms:g} ms" if duration_ms else ""


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
        cases=tuple(_case(STEPS[name], peers, seconds, no_gpu) for name in steps),
        comparisons=(Comparison(name="ratio", figure="steps_per_s", against=BASELINE),),
        questions=(_QUESTION,),
    )


def _case(step: Step, peers: Sequence[str], seconds: float, no_gpu: str | None) -> Case:
    if no_gpu is not None:
        return Case(name=step.name, about=step.about, skipped=no_gpu)
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
    return sum(_time_within(part, wholes) for part in parts) / total


def _time_within(part: Interval, wholes: Sequence[Interval]) -> float:
    """Return how much of an interval lies within `wholes`."""
    begin, end = part
    first = bisect_right(wholes, begin, key=itemgetter(1))  # earlier ones ended before it began
    after = bisect_left(wholes, end, lo=first, key=itemgetter(0))
    return sum(min(end, whole_end) - max(begin, whole_begin) for whole_begin, whole_end in wholes[first:after])
