"""Roles: the cores of DataLoader workers, CPU optimizers and main threads, on captured machines and on made-up ones.

A grid has two nodes of four cores of two threads unless told; CPUs 0-3 and 8-11 are node 0's.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from numapin.base.cpu_set import CpuSet
from numapin.errors import PlanError, UsageError
from numapin.plan.make import make_plan
from numapin.plan.model import Plan, RankPlan, RoleCpus
from numapin.plan.request import Bind, CoresFor, Request, parse_cores_for
from numapin.plan.roles import with_users_openmp
from numapin.tasks.slice import inside
from numapin.topology.examples import read_example
from numapin.topology.model import Topology
from tests.machines.grids import grid
from tests.pictures import golden_machine

if TYPE_CHECKING:
    from collections.abc import Iterator

GOLDEN = Path(__file__).with_name("roles.txt")
REQUESTS: dict[str, dict[str, Any]] = {
    "--cores-for loader=1,optimizer=2": {"cores_for": "loader=1,optimizer=2"},
    "--bind exclusive --cores-for loader=2": {"bind": Bind.EXCLUSIVE, "cores_for": "loader=2"},
    "--bind socket --no-smt --cores-for optimizer=3": {
        "bind": Bind.SOCKET,
        "smt": False,
        "cores_for": CoresFor(optimizer=3),
    },
    "--bind core-complex --cores-for optimizer=1": {"bind": Bind.CORE_COMPLEX, "cores_for": "optimizer=1"},
}


def _ranks(**request: Any) -> tuple[RankPlan, ...]:
    return make_plan(grid(gpus=(0, 1)), Request(**request)).ranks


def _roles(rank: RankPlan) -> dict[str, str]:
    assert rank.roles is not None
    return {name: str(cpus) for name, cpus in rank.roles.by_name.items()}


def _captured() -> Iterator[str]:
    """Yield each captured machine's ranks by request, a line for each."""
    for path in sorted(GOLDEN.parent.glob("*.json")):
        if path.stem.count(".") == 0:
            yield path.stem
            for words, request in REQUESTS.items():
                yield f"  {words}"
                try:
                    ranks = make_plan(golden_machine(path.stem), Request(**request)).ranks
                except PlanError as error:
                    yield f"    {error.message}"
                else:
                    yield from (f"    {rank.local_rank}: {rank.roles}; {rank.num_threads} threads" for rank in ranks)


def test_roles_on_captured_machines() -> None:
    """Each captured machine gives the recorded roles; NUMAPIN_UPDATE_GOLDEN=1 records them again."""
    text = "\n".join(_captured()) + "\n"
    if os.environ.get("NUMAPIN_UPDATE_GOLDEN"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


@pytest.mark.parametrize("request_", REQUESTS.values(), ids=REQUESTS)
def test_roles_are_apart_whole_and_together_the_rank(request_: dict[str, Any]) -> None:
    """On every captured machine, no core has two roles, or one of two ranks but main; roles make up a rank's CPUs."""
    for path in sorted(GOLDEN.parent.glob("*.json")):
        topology = golden_machine(path.stem)
        try:
            plan = make_plan(topology, Request(**request_))
        except PlanError:
            continue
        for core in topology.cores:
            parts = [
                (rank.local_rank if name != "main" else "any", name)
                for rank in plan.ranks
                for name, cpus in (rank.roles.by_name if rank.roles else {}).items()
                if cpus & core.cpus
            ]
            assert len(set(parts)) <= 1, (path.stem, core, parts)
        for rank in plan.ranks:
            if rank.roles is not None:
                assert CpuSet().union(*rank.roles.by_name.values()) == rank.cpus


def test_one_rank_keeps_whole_cores_and_the_first_for_its_main_thread() -> None:
    """Of four cores the loader has the last, the optimizer the two before, with all siblings; the reason says so."""
    rank = _ranks(cores_for="loader=1,optimizer=2")[0]
    assert _roles(rank) == {"main": "0,8", "optimizer": "1-2,9-10", "loader": "3,11"}
    assert rank.cpus == CpuSet.parse("0-3,8-11")
    assert "cores by role: 1 for the loader, 2 for the optimizer, 1 for the main thread" in rank.reason
    assert rank.exact


@pytest.mark.parametrize(
    ("cores_for", "smt", "threads"),
    [("optimizer=2", True, 3), ("optimizer=2", False, 3), ("loader=1", True, 3), ("loader=3", True, 1)],
)
def test_threads_follow_the_optimizer(cores_for: str, threads: int, *, smt: bool) -> None:
    """OpenMP has a thread for each of the optimizer's cores, and the main one; without optimizer, the main cores."""
    assert [rank.num_threads for rank in _ranks(cores_for=cores_for, smt=smt)] == [threads] * 2


def test_ranks_that_share_a_node_share_only_main_cores() -> None:
    """Two ranks of one node have loaders and optimizers of their own, and main threads on the same cores."""
    ranks = make_plan(grid(cores=6, smt=1, gpus=(0, 0)), Request(cores_for="loader=1,optimizer=1")).ranks
    assert [_roles(rank) for rank in ranks] == [
        {"main": "0,3", "optimizer": "1", "loader": "2"},
        {"main": "0,3", "optimizer": "4", "loader": "5"},
    ]
    assert ranks[0].cpus == CpuSet.parse("0-3")


def test_renumbered_gpus_move_no_roles() -> None:
    """Ranks of a node are seated by the PCI addresses of their GPUs, whatever the GPUs' numbers are."""
    topology = grid(cores=6, smt=1, gpus=(0, 0))
    first, second = topology.gpus
    turned = replace(topology, gpus=(replace(first, pci=second.pci), replace(second, pci=first.pci)))
    roles = [
        {rank.gpu.pci: _roles(rank) for rank in make_plan(machine, Request(cores_for="loader=1")).ranks if rank.gpu}
        for machine in (topology, turned)
    ]
    assert roles[0] == roles[1]
    assert len(roles[0]) == 2


def test_roles_take_from_all_nodes_of_a_socket() -> None:
    """With CPUs of two nodes, each role has as many cores of one as of the other; the rank's own node comes first."""
    topology = grid(packages=2, nodes=2, cores=4, smt=1, gpus=(1,))
    rank = make_plan(topology, Request(bind="socket", cores_for="loader=2,optimizer=3")).ranks[0]
    assert _roles(rank) == {"main": "0,4-5", "optimizer": "1-2,6", "loader": "3,7"}


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_role_with_few_cores_has_one_of_the_gpus_node(number: int) -> None:
    """Where a role has fewer cores than there are nodes, one of them is on the node of its rank's GPU."""
    topology = Topology.from_json(read_example("example:dgx-a100"))
    node_of = {cpu: core.node for core in topology.cores for cpu in core.cpus}
    request = Request(bind="socket", cores_for=f"loader={number},optimizer={number}")
    for rank in make_plan(topology, request).ranks:
        assert rank.roles is not None
        for cpus in (rank.roles.loader, rank.roles.optimizer):
            assert cpus is not None
            nodes = {node_of[cpu] for cpu in cpus}
            assert (len(nodes), rank.node in nodes) == (number, True)


def test_a_core_of_which_a_rank_has_a_part_stays_one() -> None:
    """With --cpus-per-rank 5 a core gives one of two threads; the other goes to no role."""
    rank = _ranks(cpus_per_rank=5, cores_for="loader=1")[0]
    assert _roles(rank) == {"main": "0-1,8-9", "loader": "2"}


def test_an_unbound_rank_has_no_roles_and_is_not_exact() -> None:
    """The rank of a GPU on an unknown node has no roles, and the reason says why."""
    (rank,) = make_plan(grid(gpus=(None,)), Request(cores_for="loader=1")).ranks
    assert (rank.roles, rank.exact) == (None, False)
    assert "--cores-for: roles have no effect, because the rank is not bound" in rank.reason


@pytest.mark.parametrize(
    ("num_ranks", "cores_for", "message"),
    [
        (2, "loader=2,optimizer=2", "rank 0 has 4 cores (CPUs 0-3,8-11); 5 are needed"),
        (4, "loader=2", "ranks 0,2 share 4 cores (CPUs 0-3,8-11); 3 are needed for each"),
    ],
)
def test_no_core_left_for_the_main_thread(num_ranks: int, cores_for: str, message: str) -> None:
    """Roles that take every core are refused, with the numbers."""
    with pytest.raises(PlanError, match="leaves no core for the main thread") as refused:
        _ranks(num_ranks=num_ranks, cores_for=cores_for)
    assert message in refused.value.message
    assert "--nproc-per-node" in (refused.value.hint or "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is not one of loader, optimizer"),
        ("loader", "loader: '' is not a number of cores"),
        ("loader=two", "loader: 'two' is not a number of cores"),
        ("loader=-1", "loader: '-1' is not a number of cores"),
        ("loader=1.5", "loader: '1.5' is not a number of cores"),
        ("loader=" + "9" * 5000, "is not a number of cores"),
        ("loader=\u0663", "is not a number of cores"),
        ("loader=0", "loader=0: a role gets 1 to 8192 cores"),
        ("loader=8193", "loader=8193: a role gets 1 to 8192 cores"),
        ("loader=1,loader=2", "loader is given twice"),
        ("loader=1,", "'' is not one of loader, optimizer"),
        ("main=1", "'main' is not one of loader, optimizer"),
    ],
)
def test_malformed_roles_are_refused(text: str, message: str) -> None:
    """Each mistake is named, in a short line."""
    with pytest.raises(UsageError) as refused:
        Request(cores_for=text)
    assert message in refused.value.message
    assert len(refused.value.message) < 150


def test_roles_need_a_binding() -> None:
    """--bind none gives a rank all CPUs, so roles would be no rank's own."""
    with pytest.raises(UsageError, match="--cores-for with --bind none binds nothing"):
        Request(bind="none", cores_for="loader=1")


def test_text_of_roles_is_read_back() -> None:
    """Spaces are allowed; the text of a request, and of a plan, is read back; a changed request keeps its roles."""
    assert parse_cores_for(" optimizer = 4 , loader=2") == CoresFor(loader=2, optimizer=4)
    assert str(CoresFor(loader=2, optimizer=4)) == "loader=2,optimizer=4"
    request = replace(Request(cores_for="loader=1"), num_ranks=1)
    assert request.cores_for == CoresFor(loader=1)
    plan = make_plan(grid(gpus=(0, 1)), request)
    assert Plan.from_json(json.dumps(plan.to_json())) == plan
    assert "(main=0-2,8-10 loader=3,11)" in str(plan.ranks[0])


def test_a_plan_without_roles_is_read() -> None:
    """A plan that was made before there were roles has none."""
    content = make_plan(grid(), Request()).to_json()
    ranks: Any = content["ranks"]
    assert [rank.pop("roles") for rank in ranks] == [None]
    assert Plan.from_json(json.dumps(content)).ranks[0].roles is None


@pytest.mark.parametrize("variable", ["OMP_PROC_BIND=false", "OMP_PLACES=cores", "GOMP_CPU_AFFINITY=0-3"])
def test_users_placement_of_openmp_stays(variable: str) -> None:
    """If the user places OpenMP's threads, the main thread keeps the optimizer's cores: not exact, with a warning."""
    plan = make_plan(grid(gpus=(0, 1)), Request(cores_for="loader=1,optimizer=1"))
    name, _, value = variable.partition("=")
    changed = with_users_openmp(plan, {name: value, "HOME": "/"})
    assert _roles(changed.ranks[0]) == {"main": "0-2,8-10", "loader": "3,11"}
    assert not changed.exact
    assert [text for text in changed.warnings if text.startswith("ranks 0-1: --cores-for") and variable in text]
    assert with_users_openmp(plan, {name: "", "HOME": "/"}) is plan


def test_users_placement_does_not_matter_without_an_optimizer() -> None:
    """Only the optimizer's role needs OpenMP."""
    plan = make_plan(grid(gpus=(0, 1)), Request(cores_for="loader=1"))
    assert with_users_openmp(plan, {"OMP_PLACES": "cores"}) is plan


def test_a_task_with_fewer_cpus_has_no_roles() -> None:
    """A task that may not use all planned CPUs gives up its roles, and is not exact."""
    rank = inside(_ranks(cores_for="loader=1")[0], CpuSet.parse("0-1"))
    assert (rank.roles, rank.cpus, rank.exact) == (None, CpuSet({0, 1}), False)
    assert "no role has cores of its own" in rank.reason


def test_cpus_of_threads_without_roles() -> None:
    """Without a loader's role, workers have the main thread's CPUs; without any, all CPUs."""
    (rank, _) = _ranks()
    assert rank.main_cpus == rank.worker_cpus == rank.cpus
    roles = RoleCpus(main=CpuSet({0}), loader=None, optimizer=CpuSet({1}))
    assert replace(rank, roles=roles).worker_cpus == CpuSet({0})
