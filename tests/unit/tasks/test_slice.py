"""One task's part of a plan: of an existing plan, and of a plan made inside the CPUs that the task was given."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from numapin import Allowed, Bind, Core, Gpu, Node, Plan, Request, Topology, make_plan
from numapin.errors import UsageError
from tests.unit.tasks.seam import (
    CpuSet,
    GpuRef,
    NodeKind,
    NodeSource,
    Task,
    has_own_cpus,
    inside,
    plan_task,
    read_line,
    settle_gpus,
    slice_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

NODES = (range(8), range(8, 16))


def _machine(visible: tuple[int, ...] = (0, 1, 2, 3), allowed: range = range(16)) -> Topology:
    """Return two nodes of eight cores each; GPUs 0 and 1 are on node 1, 2 and 3 on node 0; CUDA shows `visible`."""
    gpus = tuple(
        Gpu(
            index=index,
            cuda_index=visible.index(index) if index in visible else None,
            visible=index in visible,
            uuid=f"GPU-{index}{index}",
            node=int(index < 2),
            node_source=NodeSource.SYSFS,
        )
        for index in range(4)
    )
    return Topology(
        host="two",
        source="test",
        packages=(),
        nodes=tuple(
            Node(id=n, kind=NodeKind.CPU, cpus=CpuSet(cpus), memory_bytes=1, distances={n: 10, 1 - n: 20})
            for n, cpus in enumerate(NODES)
        ),
        cores=tuple(
            Core(id=cpu, cpus=CpuSet({cpu}), node=n, l3=cpus[0]) for n, cpus in enumerate(NODES) for cpu in cpus
        ),
        allowed=Allowed(cpus=CpuSet(allowed), nodes=CpuSet({0, 1})),
        gpus=gpus,
    )


def _task(rank: int, size: int | None = 4) -> Task:
    return Task(rank=rank, size=size, settings=("LOCAL_RANK", "LOCAL_WORLD_SIZE")[: 1 + (size is not None)])


EXCLUSIVE = Request(bind=Bind.EXCLUSIVE)
PLAN = make_plan(_machine(), EXCLUSIVE)


def _named(plan: Plan, uuids: tuple[str | None, ...]) -> Plan:
    """Return the plan of GPUs with these UUIDs, and with PCI addresses by their numbers."""
    gpus = (GpuRef(index=n, uuid=uuid, pci=f"0000:{n:02x}:00.0") for n, uuid in enumerate(uuids))
    return replace(plan, ranks=tuple(replace(rank, gpu=gpu) for rank, gpu in zip(plan.ranks, gpus, strict=True)))


class TestOfAPlan:
    """An existing plan."""

    def test_by_rank(self) -> None:
        """The task gets the rank of its number."""
        assert [slice_of(PLAN, _task(rank), source="p").rank for rank in range(4)] == list(PLAN.ranks)

    @pytest.mark.parametrize(
        "visible", ["GPU-a0b1-c2", "GPU-A0B1-C2", "GPU-a0b1c2", "GPU-a0B1", f"GPU-a0b1-c2{'0' * 40}"]
    )
    def test_by_the_one_gpu_that_it_sees(self, visible: str) -> None:
        """It gets the rank on that GPU, under its own number. UUIDs are read as by CUDA."""
        plan = _named(PLAN, ("GPU-a0b0-c2", "GPU-a0b2-c2", f"GPU-a0b1-c2{'0' * 26}", "GPU-a0b3-c2"))
        found = slice_of(plan, _task(0), source="p", visible=visible).rank
        assert found == replace(plan.ranks[2], local_rank=0)

    def test_several_ranks_of_one_gpu(self) -> None:
        """Its own number counts if it is one of theirs; else they are taken in turn."""
        plan = make_plan(_machine(), replace(EXCLUSIVE, num_ranks=8))
        assert slice_of(plan, _task(6, 8), source="p", visible="GPU-2").rank == plan.ranks[6]
        assert slice_of(plan, _task(1, 8), source="p", visible="GPU-2").rank.cpus == plan.ranks[6].cpus

    @pytest.mark.parametrize("uuids", [("GPU-e0", "GPU-e1", "GPU-e2", "GPU-e3"), (None,) * 4])
    @pytest.mark.parametrize("visible", ["GPU-22", "0"])
    def test_on_another_host_of_the_kind(self, uuids: tuple[str | None, ...], visible: str) -> None:
        """If UUIDs are another host's or unknown, the PCI address gives the rank; the GPU is this host's."""
        plan = _named(PLAN, uuids)
        here = GpuRef(index=2, uuid="GPU-22", pci="0000:02:00.0")
        found = slice_of(plan, _task(0), source="p", visible=visible, ask=lambda: here)
        assert found.rank == replace(plan.ranks[2], local_rank=0, gpu=here)
        assert found.warnings == ()

    @pytest.mark.parametrize("gpu", [None, *(GpuRef(index=0, uuid=uuid, pci=None) for uuid in ("GPU-9", None))])
    @pytest.mark.parametrize("visible", ["GPU-9", "GPU-", "0", "gpu-22", "GPU-x"])
    def test_a_gpu_that_the_plan_has_not(self, visible: str, gpu: GpuRef | None) -> None:
        """The rank is chosen by its number; it is not exact, with the reason and the remedy."""
        rank = slice_of(_named(PLAN, ("GPU-22",) * 4), _task(3), source="p", visible=visible, ask=lambda: gpu).rank
        assert (rank.local_rank, rank.cpus, rank.exact) == (3, PLAN.ranks[3].cpus, False)
        name = (gpu and gpu.uuid) or visible
        assert f"p has no rank on GPU {name}, the only one that this task sees" in rank.reason
        assert "numapin plan" in rank.reason

    def test_a_beginning_that_several_have(self) -> None:
        """It identifies none of them until NVML gives the whole UUID."""
        plan = _named(PLAN, ("GPU-e0", "GPU-e1", "GPU-e2", "GPU-e3"))
        assert not slice_of(plan, _task(0), source="p", visible="GPU-e").rank.exact
        gpu = GpuRef(index=0, uuid="GPU-e1", pci=None)
        found = slice_of(plan, _task(0), source="p", visible="GPU-e", ask=lambda: gpu).rank
        assert (found.exact, found.cpus) == (True, plan.ranks[1].cpus)

    @pytest.mark.parametrize("visible", [None, "GPU-9"])
    def test_another_job(self, visible: str | None) -> None:
        """A plan without this rank is refused, with the command that makes a new one."""
        with pytest.raises(UsageError, match="is for ranks 0-3") as caught:
            slice_of(PLAN, _task(4, 8), source="p", visible=visible)
        assert "numapin plan" in caught.value.hint

    @pytest.mark.parametrize("visible", [None, "GPU-22"])
    def test_nvml_is_not_asked(self, visible: str | None) -> None:
        """NVML is not needed if the plan has the UUID that the task sees, or if the task sees several GPUs."""
        slice_of(PLAN, _task(0), source="p", visible=visible, ask=lambda: pytest.fail("asked"))

    def test_fewer_tasks_than_ranks(self) -> None:
        """A warning says so."""
        assert slice_of(PLAN, _task(0, 2), source="p").warnings == ("p is for 4 ranks, but 2 run here",)
        assert slice_of(PLAN, _task(0, 4), source="p").warnings == ()


@pytest.mark.parametrize(
    ("allowed", "cpus", "num_threads", "why"),
    [
        (range(16), {8, 9, 10, 11}, 4, ""),
        ({8, 9, 0}, {8, 9}, 2, "planned CPUs 10-11 are not among those that this task was given (0,8-9)"),
        ({0, 1}, {0, 1}, 2, "planned CPUs 8-11 are not among those that this task was given (0-1)"),
    ],
)
def test_inside(allowed: Iterable[int], cpus: set[int], num_threads: int, why: str) -> None:
    """A task stays inside the CPUs that a resource manager gave it; if none of them was planned, it keeps them all."""
    rank = inside(PLAN.ranks[0], CpuSet(allowed))
    assert (rank.cpus, rank.num_threads, rank.exact) == (CpuSet(cpus), num_threads, not why)
    assert why in rank.reason


@pytest.mark.parametrize(
    ("own", "launcher", "limit", "size", "is_own"),
    [
        (4, 16, None, 4, True),  # mpirun --bind-to l3
        (8, 16, None, 4, False),  # two tasks share a socket
        (16, 16, None, 1, False),  # nothing was taken away
        (4, None, None, 4, False),
        (4, 16, None, None, True),
        (4, 16, 4, 4, False),  # srun --cpu-bind=none in a job of four CPUs; slurmstepd has all of the machine
        (4, 16, 16, 4, True),
    ],
)
def test_own_cpus(own: int, launcher: int | None, limit: int | None, size: int | None, *, is_own: bool) -> None:
    """CPUs are a task's own if its launcher has more, and enough to give every task as many."""
    whole = None if launcher is None else CpuSet(range(launcher))
    assert has_own_cpus(CpuSet(range(own)), launcher=whole, limit=limit, size=size) is is_own


class TestPlanned:
    """A plan made for the task."""

    def test_as_run_does(self) -> None:
        """If all tasks see the same, each gets the same as its rank from `numapin run`."""
        ranks = [plan_task(_machine(), EXCLUSIVE, _task(rank), own_cpus=False).rank for rank in range(4)]
        assert ranks == list(PLAN.ranks)

    def test_one_gpu_each_in_order(self) -> None:
        """Tasks that see one GPU each, in order, split CPUs as if they saw all."""
        for rank in range(4):
            made = plan_task(_machine(visible=(rank,)), EXCLUSIVE, _task(rank), own_cpus=False).rank
            assert (made.gpu, made.cpus, made.local_rank) == (PLAN.ranks[rank].gpu, PLAN.ranks[rank].cpus, rank)

    def test_one_gpu_each_in_another_order(self) -> None:
        """The GPU is the one that it sees; no two tasks of a GPU's node get the same CPUs."""
        made = [
            plan_task(_machine(visible=(3 - rank,)), EXCLUSIVE, _task(rank), own_cpus=False).rank for rank in range(4)
        ]
        assert [rank.gpu.index for rank in made if rank.gpu] == [3, 2, 1, 0]
        assert len(frozenset().union(*(rank.cpus for rank in made))) == sum(len(rank.cpus) for rank in made)

    def test_cpus_of_its_own(self) -> None:
        """The plan is for this task alone, inside them: nothing is split again."""
        made = plan_task(_machine(visible=(0,), allowed=range(8, 10)), EXCLUSIVE, _task(3), own_cpus=True)
        assert (made.rank.cpus, made.rank.num_threads, made.rank.exact) == (frozenset({8, 9}), 2, True)
        assert made.rank.local_rank == 3
        assert "this task alone" in made.source

    def test_own_cpus_and_all_gpus(self) -> None:
        """If all GPUs are visible, the rank's number chooses one, also among those of --gpus."""
        made = plan_task(_machine(allowed=range(4)), EXCLUSIVE, _task(3), own_cpus=True).rank
        assert made.gpu is not None
        assert made.gpu.index == 3
        named, _ = settle_gpus(_machine(), Request(gpus=("2", "GPU-1")), {})
        made = plan_task(_machine(), named, _task(3), own_cpus=True).rank
        assert made.gpu is not None
        assert made.gpu.index == 1

    def test_cpus_far_from_the_gpu(self) -> None:
        """CPUs that are not on the GPU's node are used, and the reason names the GPU's node."""
        made = plan_task(_machine(visible=(0,), allowed=range(4)), Request(), _task(1), own_cpus=True)
        assert (made.rank.cpus, made.rank.exact, made.rank.nodes) == (frozenset(range(4)), False, frozenset({1}))
        assert "no usable CPU on node 1; node 0 is the nearest" in made.rank.reason
        assert made.warnings == ()

    def test_an_unknown_size(self) -> None:
        """One task per GPU is assumed, with a note; if that cannot be, the error asks for the size."""
        made = plan_task(_machine(), EXCLUSIVE, _task(3, None), own_cpus=False)
        assert made.rank == PLAN.ranks[3]
        assert made.notes[0].startswith("assumed: 4 tasks")
        with pytest.raises(UsageError, match=r"is unknown: LOCAL_RANK, and this host has 4 GPUs") as caught:
            plan_task(_machine(), EXCLUSIVE, _task(4, None), own_cpus=False)
        assert "--local-size" in caught.value.hint

    @pytest.mark.parametrize(("variable", "given"), [(None, " --local-rank 3"), ("LOCAL_RANK", "")])
    def test_the_hint_repeats_the_given_rank(self, variable: str | None, given: str) -> None:
        """The command in the hint works as printed: it has the --local-rank that the user gave."""
        task = _task(3, None)._replace(variable=variable)
        with pytest.raises(UsageError, match="and there is no GPU to count by") as caught:
            plan_task(replace(_machine(), gpus=()), EXCLUSIVE, task, own_cpus=False)
        assert caught.value.hint == f"give it: numapin exec{given} --local-size N -- command"

    def test_where_the_size_does_not_matter(self) -> None:
        """With --bind none, and with CPUs of its own, the number of tasks may be unknown."""
        without = replace(_machine(), gpus=())
        assert plan_task(without, Request(bind=Bind.NONE), _task(4, None), own_cpus=False).rank.local_rank == 4
        assert plan_task(without, Request(), _task(4, None), own_cpus=True).rank.local_rank == 4

    def test_more_tasks_than_gpus(self) -> None:
        """Rank n uses GPU n mod G, as with `numapin run`."""
        made = plan_task(_machine(), EXCLUSIVE, _task(5, 8), own_cpus=False).rank
        assert made.gpu is not None
        assert made.gpu.index == 1


class TestLine:
    """Command lines of `numapin exec` that are read without click."""

    @pytest.mark.parametrize(
        ("line", "read"),
        [
            ("true", ({}, ["true"])),
            ("-- true --plan x", ({}, ["true", "--plan", "x"])),
            ("--plan f --verbose -- a", ({"--plan": "f", "--verbose": ""}, ["a"])),
            ("--plan=a=b --local-rank=3 --local-size 8 --strict a -b", (
                {"--plan": "a=b", "--local-rank": "3", "--local-size": "8", "--strict": ""}, ["a", "-b"])),
        ],
    )  # fmt: skip
    def test_plain_ones(self, line: str, read: object) -> None:
        """Options without binding options, then the command with its own arguments."""
        assert read_line(line.split()) == read

    @pytest.mark.parametrize(
        "line",
        ["", "--", "--help", "--bind node true", "--local-rank x true", "--local-rank -1 true", "--plan",
         "--plan= true", "--plan --strict true", "--verbose=1 true", "--local-size 0 true", "- true",
         "--local-size 00 true",
         "--local-rank 9999999 true"],
    )  # fmt: skip
    def test_others_are_clicks(self, line: str) -> None:
        """Any other line, valid or not, is left to click, which has the messages."""
        assert read_line(line.split()) is None
