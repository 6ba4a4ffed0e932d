"""Findings about the host: the time in which nothing was loaded, copied or computed. Pure.

Comes in: an `Analysis` without the extra time of slow steps, and these steps. Goes out: findings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from numapin.base.plural import counted
from numapin.trace.finding import TraceFinding, ms_per_step
from numapin.trace.intervals import union
from numapin.trace.places import place_within

if TYPE_CHECKING:
    from numapin.trace.analysis import Analysis
    from numapin.trace.places import CodePlace
    from numapin.trace.uneven import Uneven

_IDLE: Final = 0.2  # launching small kernels leaves gaps in any program
_UPDATING: Final = 0.05
_ASLEEP: Final = 0.5  # of the samples


def updating(analysis: Analysis) -> TraceFinding | None:
    """Find an optimizer that steps on the CPU while the GPU is idle."""
    costs = _share(analysis, analysis.updating_us)
    if costs < _UPDATING:
        return None
    noted = analysis.trace.noted
    origin = noted.origin
    threads = f" with {counted(origin.num_threads, 'thread')}" if origin.num_threads else ""
    cpus = f" on {noted.place}" if noted.place else ""
    few_threads = bool(origin.num_threads and origin.num_cpus and origin.num_threads < origin.num_cpus / 2)
    more = f"set OMP_NUM_THREADS={origin.num_cpus // 2 if origin.num_cpus else 'N'}; " if few_threads else ""
    return TraceFinding(
        what="optimizer on the CPU",
        costs=costs,
        evidence=f"{noted.optimizer or 'the optimizer'} steps{threads}{cpus} for "
        f"{ms_per_step(analysis, analysis.updating_us)} per step, and the GPU is idle meanwhile",
        remedy=f"{more}keep parameters and optimizer state on the GPU if they fit (no CPU offload); else use "
        "fused=True, and give each rank more cores of its own: numapin run --bind exclusive",
    )


def idle(analysis: Analysis, uneven: Uneven | None) -> TraceFinding | None:
    """Find time in which the host did something else, and name it. The extra time of slow steps is left out."""
    explained = uneven if uneven is not None and uneven.part == "other" else None
    left_us = analysis.parts_us["other"] - analysis.updating_us
    usual = union(_usual_steps(analysis, explained))
    costs, place = _share(analysis, left_us), place_within(analysis, usual)
    if costs < _IDLE or (not analysis.trace.on_gpu and place is None):
        return None
    seen = "" if place is None else f"; the loop's thread was mostly in {place}"
    happened = "no kernel and no copy ran" if analysis.trace.on_gpu else "no operator of torch ran"
    return TraceFinding(
        what=_name(analysis, place),
        costs=costs,
        evidence=f"for {ms_per_step(analysis, left_us)} per step {happened}, and the loop was not waiting for "
        f"data{seen}",
        remedy=_remedy(analysis, place),
    )


def _usual_steps(analysis: Analysis, explained: Uneven | None) -> list[tuple[float, float]]:
    """Return the beginnings and ends of the steps, without those that are slow for a reason that is known."""
    slow = () if explained is None else explained.slow
    return [step.pair for i, step in enumerate(analysis.trace.steps) if i not in slow]


def _name(analysis: Analysis, place: CodePlace | None) -> str:
    if place is not None and place.slept >= _ASLEEP:
        return "the script sleeps or waits"
    return "GPU idle" if analysis.trace.on_gpu else "Python between operators"


def _remedy(analysis: Analysis, place: CodePlace | None) -> str:
    if place is None:
        return (
            "find what the host does in these gaps in the Chrome trace: .item(), logging, or launching small kernels "
            "(larger batches, torch.compile or CUDA graphs help)"
        )
    if place.slept >= _ASLEEP:
        return f"take what blocks out of the loop, or into another thread: {place.own}"
    kernels = "; if it launches many small kernels, larger batches, torch.compile or CUDA graphs help"
    return f"make {place.own} cheaper, or call it less often{kernels if analysis.trace.on_gpu else ''}"


def _share(analysis: Analysis, time_us: float) -> float:
    return max(time_us, 0.0) / analysis.window_us if analysis.window_us else 0.0
