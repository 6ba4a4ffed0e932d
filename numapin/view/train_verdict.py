"""The verdict of `numapin bench train`: one line, and before it what limits a model that stays below its ceiling. Pure.

Comes in: a `BenchReport`. Goes out: lines of text. A model is faster or slower with numapin only if the interval of
`numapin compare` says so: 99 %, from the ratios of the repeats.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final

from numapin.base.plural import counted
from numapin.bench.cases.train import BASELINE, OURS
from numapin.compare.ratio import Verdict, step_ratio

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numapin.bench.model import BenchReport, CaseResult, PeerResult

_SUBJECT: Final = "numapin instead of torch's loader"
_MARGIN: Final = 0.05
_AT_CEILING: Final = 0.95  # of the speed without loading
_ARE_BUSY: Final = 0.75  # of the CPU time that workers could have had; sending a batch is part of the rest
_FEWEST: Final = 3
_ORDER: Final = (Verdict.FASTER, Verdict.SLOWER, Verdict.NO_DIFFERENCE, Verdict.UNKNOWN)


def train_lines(report: BenchReport) -> Iterator[str]:
    """Yield the limit of each model that is below its ceiling, and the verdict."""
    if report.machine.get("gpus"):
        yield from filter(None, map(_limit, report.cases))
    else:
        yield "without a GPU, models and workers share the CPUs: this shows that everything runs, not what is gained"
    yield train_verdict(report.cases)


def train_verdict(cases: Sequence[CaseResult]) -> str:
    """Return whether numapin's loader trains faster than torch's, by model."""
    found = [(case, ours) for case in cases if (ours := _peer(case, OURS)) and "ratio" in ours.figures]
    if not found:
        return f"{_SUBJECT}: cannot tell: {OURS} and {BASELINE} were not both measured"
    groups: dict[Verdict, list[str]] = defaultdict(list)
    for case, ours in found:
        groups[_verdict(ours)].append(_in_words(case, ours))
    num_repeats = min(len(ours.figures["ratio"].values) for _, ours in found)
    parts = [_part(verdict, groups[verdict], num_repeats) for verdict in _ORDER if groups[verdict]]
    return f"{_SUBJECT}: {'; '.join(parts)}"


def _part(verdict: Verdict, models: Sequence[str], num_repeats: int) -> str:
    names = ", ".join(models)
    if verdict is Verdict.UNKNOWN:
        few = f"{counted(num_repeats, 'repeat')} {'is' if num_repeats == 1 else 'are'} too few"
        return f"cannot tell for {names}: {few if num_repeats < _FEWEST else 'the repeats differ too much'}"
    return f"{verdict} for {names}"


def _in_words(case: CaseResult, ours: PeerResult) -> str:
    """Return "resnet18 (2.98x, 99 % of the ceiling)"."""
    share = _figure(ours, "of_ceiling")
    of_ceiling = "" if share is None else f", {100 * share:.0f} % of the ceiling"
    return f"{case.name} ({ours.figures['ratio'].median:.2f}x{of_ceiling})"


def _verdict(ours: PeerResult) -> Verdict:
    """Return whether numapin is faster than torch, from the ratios of the repeats."""
    values = ours.figures["ratio"].values
    own_s = {repeat: 1 / value for repeat, value in enumerate(values)}
    found = step_ratio(dict.fromkeys(own_s, 1.0), own_s, against=BASELINE, margin=_MARGIN)
    return Verdict.UNKNOWN if found is None else found.verdict


def _limit(case: CaseResult) -> str:
    """Return what keeps numapin below the ceiling, and what would help; empty if it is not below, or unknown."""
    ours = _peer(case, OURS)
    share, busy = _figure(ours, "of_ceiling"), _figure(ours, "workers_busy")
    if share is None or busy is None or share >= _AT_CEILING:
        return ""
    of_ceiling = f"{case.name}: numapin reaches {100 * share:.0f} % of the ceiling"
    if busy < _ARE_BUSY:
        return f"{of_ceiling}; its workers are {100 * busy:.0f} % busy, so memory or the loop's own thread is the limit"
    helps = "more CPU cores per rank, more workers if cores are idle, or a decoder on the GPU such as DALI"
    work = "decoding is the limit" if "JPEG" in case.about else "the workers' own work is the limit"
    return f"{of_ceiling}: {work} (workers {100 * busy:.0f} % busy), whatever the loader; what helps: {helps}"


def _figure(peer: PeerResult | None, name: str) -> float | None:
    found = None if peer is None else peer.figures.get(name)
    return None if found is None else found.median


def _peer(case: CaseResult, name: str) -> PeerResult | None:
    return next((peer for peer in case.peers if peer.name == name), None)
