"""Every case of cases.py has the recorded plan, with its reasons and warnings, or the recorded error: plans.json.

NUMAPIN_UPDATE_GOLDEN=1 records them again, so that a change is a diff to review.
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from numapin import Memory, Request, make_plan
from numapin.errors import NumapinError
from tests.unit.plan.cases import CASES, Case
from tests.unit.plan.seam import exported, settle_gpus, with_users_nics

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numapin import RankPlan

RECORDED: Final = Path(__file__).with_name("plans.json")


@pytest.mark.parametrize("sentence", CASES)
def test_a_case_has_its_recorded_plan(sentence: str) -> None:
    """The plan, its reasons and its warnings are the recorded ones; a request that cannot be met, its error."""
    try:
        found = [*_described(CASES[sentence])]
    except NumapinError as error:
        found = [f"{type(error).__name__}: {error.message}", f"hint: {error.hint}"]
        error.use_hint_for_fixed_ranks()
        found += [] if found[-1] == f"hint: {error.hint}" else [f"hint where the ranks are fixed: {error.hint}"]
    recorded = _recorded()
    if os.environ.get("NUMAPIN_UPDATE_GOLDEN"):
        recorded[sentence] = found
        ordered = {name: recorded.get(name) for name in CASES}
        RECORDED.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n")
    assert found == recorded.get(sentence)


@cache
def _recorded() -> dict[str, list[str]]:
    recorded: dict[str, list[str]] = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    return recorded


def test_every_record_has_its_case() -> None:
    """No recorded plan is left behind by a case that was renamed."""
    assert list(json.loads(RECORDED.read_text())) == list(CASES)


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
    yield from (f"refused: {reason}" for reason in _refusal(plan.ranks))


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


def _refusal(ranks: tuple[RankPlan, ...]) -> Iterator[str]:
    """Yield what --strict says of the first rank that is not exact."""
    for rank in ranks:
        try:
            rank.require_exact()
        except NumapinError as error:
            yield error.message
            return
