"""Stage 2, part of the first half: fast cores are shared evenly. Pure.

Comes in: the cores or L3 groups that ranks of a node share, and which cores are fast. Goes out: a share for each rank,
its fast cores first, and the reason. Without fast cores, the shares are those that the order of the cores gives.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from numapin.base.plural import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numapin.base.cpu_set import CpuSet
    from numapin.plan.usable import UsableMachine
    from numapin.topology.model import Core


def even_shares(machine: UsableMachine, cores: Sequence[Core], num_ranks: int) -> list[list[Core]]:
    """Split cores into shares of the same size and with the same number of fast cores, each within one.

    Fast cores come first in a share. The first ranks get the cores that are left over. Shares are cut from the fast
    cores and from the others in the order given, so that cores that share a cache stay together where possible.
    """
    fast = fast_among(machine, cores)
    others = [core for core in cores if not machine.is_fast(core)]
    totals, num_fast = _even(len(cores), num_ranks), _even(len(fast), num_ranks)
    num_others = [total - number for total, number in zip(totals, num_fast, strict=True)]
    return [[*first, *rest] for first, rest in zip(_cut(fast, num_fast), _cut(others, num_others), strict=True)]


def _even(total: int, num_shares: int) -> list[int]:
    """Return numbers that differ by at most one, the larger first; `total` is their sum."""
    base, extra = divmod(total, num_shares)
    return [base + (share < extra) for share in range(num_shares)]


def _cut(cores: list[Core], sizes: list[int]) -> Iterator[list[Core]]:
    bounds = pairwise(accumulate(sizes, initial=0))
    return (cores[start:end] for start, end in bounds)


def fast_groups_first(machine: UsableMachine, groups: Sequence[CpuSet], num_ranks: int) -> list[CpuSet]:
    """Sort L3 groups by their number of fast cores, if the ranks then get the same number each, within one.

    Otherwise some ranks would have all fast cores and others none: the order stays.
    """
    num_fast = {group: len(fast_among(machine, machine.cores(group))) for group in groups}
    ordered = sorted(groups, key=lambda group: -num_fast[group])
    dealt = [num_fast[group] for group in ordered[:num_ranks]]
    return ordered if max(dealt) - min(dealt) <= 1 else list(groups)


def fast_among(machine: UsableMachine, cores: Iterable[Core]) -> list[Core]:
    """Return the fast ones of some cores."""
    return list(filter(machine.is_fast, cores))


def rating_of(machine: UsableMachine, pool: CpuSet) -> str:
    """Return by what some cores of a pool are faster than others; "" if all are alike."""
    ratings = dict.fromkeys(machine.ratings_on(pool))
    cores = machine.cores(pool) if ratings else []
    return "; ".join(ratings) if 0 < len(fast_among(machine, cores)) < len(cores) else ""


def why_fast(machine: UsableMachine, cores: Sequence[Core], rating: str) -> str:
    """Return how many cores of a rank are fast, and by which rating."""
    number = len(fast_among(machine, cores))
    are = "is a fast one" if number == 1 else "are fast ones"
    return f"{number} of its {counted(len(cores), 'core')} {are} ({rating})"
