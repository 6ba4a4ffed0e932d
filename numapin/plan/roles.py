"""Stage 2: the cores that each role of a rank's threads gets. Pure.

Comes in: the ranks with their CPUs, and the cores that --cores-for asks for. Goes out: `RoleCpus` for each rank, and
the reason. Only whole cores change hands; the threads of a core stay together.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import chain, zip_longest
from typing import TYPE_CHECKING

from numapin.base.not_none import not_none
from numapin.base.plural import counted, listed
from numapin.errors import PlanError
from numapin.plan.model import RoleCpus
from numapin.system.openmp import placing_variables

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numapin.base.cpu_set import CpuSet
    from numapin.plan.make import Draft
    from numapin.plan.model import Plan, RankPlan
    from numapin.plan.request import CoresFor
    from numapin.plan.usable import UsableMachine
    from numapin.topology.model import Core


def give_roles(machine: UsableMachine, wanted: CoresFor, drafts: Sequence[Draft]) -> None:
    """Give each rank's roles their cores.

    1. Ranks that share CPUs split the cores evenly, as exclusive ranks do; each takes its roles' cores from its own
       share, in the order in which the ranks come. So no core has the workers or the optimizer threads of two ranks.
    2. In a share, fast cores come first, and the cores of several nodes alternate. The main thread takes from the
       beginning, the loader from the end: each role gets the same number of cores from each node, give or take one.
       A role with fewer cores than there are nodes gets one of the node of the rank's GPU first.
    3. The main threads of ranks that share CPUs share what is left.

    Raises PlanError if no core is left for a rank's main thread.
    """
    groups: dict[tuple[bool, CpuSet], list[Draft]] = defaultdict(list)
    for draft in drafts:
        groups[draft.bound, draft.cpus].append(draft)
    for group in groups.values():
        _give_group(machine, wanted, group)


def _give_group(machine: UsableMachine, wanted: CoresFor, group: Sequence[Draft]) -> None:
    """Give roles to the ranks that have the same CPUs."""
    first = group[0]
    if not first.bound:
        for draft in group:
            draft.because("--cores-for: roles have no effect, because the rank is not bound", exact=False)
        return
    cores = _alternating(machine.cores(first.cpus), first.home)
    if len(cores) < len(group) * (wanted.total + 1):
        raise _too_few(wanted, group, len(cores))
    shares = machine.even_shares(cores, len(group))
    taken = [_taken(machine, wanted, share, draft.home) for draft, share in zip(group, shares, strict=True)]
    main = first.cpus - frozenset(chain.from_iterable(chain.from_iterable(taken)))
    num_main = len(machine.cores(main))
    # The main thread takes part in the work of torch's threads, hence one thread more than the optimizer has cores.
    num_threads = wanted.optimizer + 1 if wanted.optimizer else max(1, num_main // len(group))
    for draft, own in zip(group, taken, strict=True):
        loader, optimizer = (cpus & draft.cpus for cpus in own)
        draft.roles = RoleCpus(main=main, loader=loader or None, optimizer=optimizer or None)
        draft.cpus, draft.num_threads = main | loader | optimizer, num_threads
        draft.because(f"cores by role: {wanted.in_words}, {_left(num_main, len(group))}")


def _alternating(cores: Iterable[Core], home: int | None) -> list[Core]:
    """Sort cores so that nodes take turns, the rank's own first; on one node, the order stays."""
    by_node: dict[int | None, list[Core]] = defaultdict(list)
    for core in cores:
        by_node[core.node].append(core)
    nodes = sorted(by_node, key=lambda node: (node != home, -1 if node is None else node))
    turns = zip_longest(*map(by_node.__getitem__, nodes))
    return not_none(chain.from_iterable(turns))


def _taken(machine: UsableMachine, wanted: CoresFor, share: Sequence[Core], home: int | None) -> tuple[CpuSet, CpuSet]:
    """Return the CPUs of the loader and of the optimizer in the share of a rank whose GPU is on the node `home`."""
    loader = _from_end(machine, share, wanted.loader, home)
    rest = [core for core in share if core not in loader]
    return machine.usable_cpus(loader), machine.usable_cpus(_from_end(machine, rest, wanted.optimizer, home))


def _from_end(machine: UsableMachine, cores: Sequence[Core], number: int, home: int | None) -> Sequence[Core]:
    """Return the last cores. Fewer than there are nodes: the last ones of nodes, slow ones and that of `home` first."""
    last: dict[int | None, Core] = {}
    for core in reversed(cores):
        last.setdefault(core.node, core)
    if number >= len(last):
        return cores[len(cores) - number :]
    return sorted(last.values(), key=lambda core: (machine.is_fast(core), core.node != home))[:number]


def _left(num_cores: int, num_ranks: int) -> str:
    if num_ranks == 1:
        return f"{num_cores} for the main thread"
    return f"{num_cores} for the main threads of {num_ranks} ranks"


def _too_few(wanted: CoresFor, group: Sequence[Draft], num_cores: int) -> PlanError:
    ranks = listed("rank", {draft.local_rank for draft in group})
    have = "has" if len(group) == 1 else "share"
    least = f"{wanted.total + 1} are needed" + (" for each" if len(group) > 1 else "")
    return PlanError(
        f"--cores-for {wanted} leaves no core for the main thread: {ranks} {have} {counted(num_cores, 'core')} "
        f"(CPUs {group[0].cpus}); {least}",
        "ask for fewer cores, or give each rank more: fewer ranks (--nproc-per-node), or --bind socket",
    )


# --- what the user has decided ---------------------------------------------------------------------------------------


def with_users_openmp(plan: Plan, environ: Mapping[str, str]) -> Plan:
    """Return the plan without cores for the optimizer if the user's variables place OpenMP's threads, and a warning."""
    ranks = tuple(without_users_openmp(rank, environ) for rank in plan.ranks)
    changed = [rank.local_rank for rank, former in zip(ranks, plan.ranks, strict=True) if rank is not former]
    if not changed:
        return plan
    return replace(plan, ranks=ranks, warnings=(*plan.warnings, f"{listed('rank', changed)}: {_why_not(environ)}"))


def without_users_openmp(rank: RankPlan, environ: Mapping[str, str]) -> RankPlan:
    """Return a rank whose main thread keeps the optimizer's cores if the user's variables place OpenMP's threads."""
    roles = rank.roles
    if roles is None or roles.optimizer is None or not placing_variables(environ):
        return rank
    left = replace(roles, main=roles.main | roles.optimizer, optimizer=None)
    return replace(rank, roles=left, exact=False, reason=f"{rank.reason}; {_why_not(environ)}")


def _why_not(environ: Mapping[str, str]) -> str:
    set_by_user = " ".join(f"{name}={value[:60]}" for name, value in placing_variables(environ).items())
    return f"--cores-for: {set_by_user} places OpenMP's threads, so the optimizer gets no dedicated cores; unset it"
