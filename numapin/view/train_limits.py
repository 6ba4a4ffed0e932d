"""Limits of the models of `numapin bench train` that stay below their ceiling, and what would help. Pure.

Comes in: a `BenchReport`. Goes out: a line for each such model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from numapin.bench.cases.train import CASES, OURS, Material

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numapin.bench.model import BenchReport, CaseResult, PeerResult

_AT_CEILING: Final = 0.95  # of the speed without loading
_ARE_BUSY: Final = 0.75  # of the CPU time that workers could have had; waiting for tasks and for room is the rest
_HELP: Final = "more CPU cores per rank, more workers if cores are idle, or a decoder on the GPU such as DALI"
_ON_CPU: Final = "without a GPU, models and workers share the CPUs: this shows only that everything runs, not any gain"


def train_limits(report: BenchReport) -> Iterator[str]:
    """Return the limit of each model that numapin's loader keeps below its ceiling."""
    measured = list(_measured(report))
    if measured and not report.machine.get("gpus"):
        return iter([_ON_CPU])
    return filter(None, (_limit(case, ours) for case, ours in measured))


def _measured(report: BenchReport) -> Iterator[tuple[CaseResult, PeerResult]]:
    """Yield each case with numapin's loader, as far as it ran."""
    for case in report.cases:
        yield from ((case, peer) for peer in case.peers if peer.name == OURS and peer.num_runs)


def _limit(case: CaseResult, ours: PeerResult) -> str:
    """Return how close a model comes to its ceiling, and why not closer; "" if it reaches it or was not measured."""
    share, busy = _median(ours, "of_ceiling"), _median(ours, "workers_busy")
    if share is None or busy is None or share >= _AT_CEILING:
        return ""
    return f"{case.name}: numapin reaches {100 * share:.0f} % of the ceiling{_cause(case, busy)}"


def _cause(case: CaseResult, busy: float) -> str:
    percent = f"{100 * busy:.0f} % busy"
    if busy < _ARE_BUSY:
        return f"; its workers are {percent}, so memory or the loop's own thread is the limit"
    if CASES[case.name].material is not Material.JPEG:
        return f": the workers' own work is the limit ({percent}); more CPU cores per rank help"
    return f": decoding is the limit for any loader (workers {percent}); what helps: {_HELP}"


def _median(peer: PeerResult, name: str) -> float | None:
    found = peer.figures.get(name)
    return None if found is None else found.median
