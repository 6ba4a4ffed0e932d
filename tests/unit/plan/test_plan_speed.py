"""The time limit for a plan, on the largest machine that the design names."""

from __future__ import annotations

from functools import cache
from math import inf
from time import perf_counter, process_time
from typing import TYPE_CHECKING

import pytest

from numapin import Bind, Memory, Request, make_plan
from tests.machines.grids import grid

if TYPE_CHECKING:
    from numapin import Topology

LIMIT_S = 0.020


@cache
def _largest() -> Topology:
    """Build 64 nodes, 4096 CPUs, 64 GPUs: 8 packages of 8 nodes of 4 L3 groups of 8 cores of 2 threads."""
    return grid(packages=8, nodes=8, l3=4, cores=8, smt=2, gpus=[63 - n for n in range(64)])


@pytest.mark.alone
@pytest.mark.parametrize(
    "request_",
    [
        *(Request(bind=bind) for bind in Bind),
        Request(bind=Bind.EXCLUSIVE, num_ranks=256, smt=False),
        Request(bind=Bind.NODE, cpus_per_rank=5, num_ranks=128),
        Request(bind=Bind.SOCKET, memory=Memory.INTERLEAVE),
    ],
    ids=str,
)
def test_a_plan_takes_at_most_20_ms(request_: Request) -> None:
    """The best try within a minute takes less CPU time than the limit: the launcher plans once, ranks do not plan.

    A machine whose processors are shared has slow moments, which last seconds.
    """
    topology = _largest()
    assert (len(topology.nodes), len(topology.cpus), len(topology.gpus)) == (64, 4096, 64)
    tries = [inf]
    deadline = perf_counter() + 60
    while min(tries) > LIMIT_S and perf_counter() < deadline:
        start = process_time()
        make_plan(topology, request_)
        tries.append(process_time() - start)
    assert min(tries) <= LIMIT_S
