"""Every case of cases.py has the recorded plan, with its reasons and warnings, or the recorded error: plans.json.

NUMAPIN_UPDATE_GOLDEN=1 records them again, so that a change is a diff to review.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from numapin import Memory, Request, make_plan
from numapin.errors import NumapinError
from tests.recorded.screens import compare
from tests.unit.plan.cases import CASES, Case
from tests.unit.plan.seam import exported, settle_gpus, with_users_nics

if TYPE_CHECKING:
    from numapin import RankPlan

RECORDED: Final = Path(__file__).with_name("plans.json")


def test_each_case_has_its_recorded_plan() -> None:
    """The plan, its reasons and its warnings are the recorded ones; a request that cannot be met, its error."""
    found = {sentence: _outcome(case) for sentence, case in CASES.items()}
    compare(json.dumps(found, indent=1, ensure_ascii=False) + "\n", str(RECORDED))


def _outcome(case: Case) -> list[str]:
    try:
        return [*_described(case)]
    except NumapinError as error:
        return [f"{type(error).__name__}: {error.message}", f"hint: {error.hint}"]


def _described(case: Case) -> Iterator[str]:
    request = Request(**case.options)
    if case.machine is None:
        yield from (f"{name}: {getattr(request, name)!r}" for name in (*Request.__slots__, "policy"))
        return
    settled, variables = settle_gpus(case.machine, request, case.environ)
    plan = with_users_nics(make_plan(case.machine, settled), case.environ)
    assert make_plan(case.machine, request).ranks == make_plan(case.machine, settled).ranks
    yield f"{len(plan.ranks)} ranks, bind {plan.bind}, memory {plan.memory}"
    yield from (f"the ranks get {name}={value}" for name, value in variables.items())
    for rank in plan.ranks:
        yield from _described_rank(rank)
    yield from (f"warning: {text}" for text in plan.warnings)
    for rank in plan.ranks:
        try:
            rank.require_exact()
        except NumapinError as error:
            yield f"refused: {error.message}"
            return


def _described_rank(rank: RankPlan) -> Iterator[str]:
    yield f"{rank}: {rank.reason}"
    if rank.memory in (Memory.NONE, Memory.LOCAL):
        yield f"  nodes {rank.nodes}"
    if rank.within is not None:
        policy, nodes = rank.kernel_policy
        yield f"  within {rank.within}: the kernel is told {policy} {nodes}"
    if rank.nics is not None:
        yield f"  NICs {' '.join(rank.nics)}: {rank.nics_reason}"
    yield from (f"  {name}={value}" for name, value in exported(rank).items())
