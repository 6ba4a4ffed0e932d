"""One task's part of a plan: of an existing plan, and of a plan made inside the CPUs that the task was given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from numapin import Bind, Plan, Request, Topology, make_plan
from numapin.errors import UsageError
from tests.machines.grids import grid
from tests.recorded.screens import compare, compare_answers
from tests.unit.tasks.seam import (
    CpuSet,
    GpuRef,
    Slice,
    Task,
    has_own_cpus,
    inside,
    plan_task,
    read_line,
    settle_gpus,
    slice_of,
)

if TYPE_CHECKING:
    from numapin import RankPlan

HERE: Final = Path(__file__).parent


def _machine(visible: tuple[int, ...] = (0, 1, 2, 3), allowed: range = range(16)) -> Topology:
    """Return two nodes of eight cores each; GPUs 0 and 1 are on node 1, 2 and 3 on node 0; CUDA shows `visible`."""
    machine = grid(cores=8, smt=1, gpus=[1, 1, 0, 0], allowed_cpus=CpuSet(allowed))
    order = [visible.index(n) if n in visible else None for n in range(4)]
    gpus = zip(machine.gpus, order, strict=True)
    return replace(machine, gpus=tuple(replace(gpu, cuda_index=cuda, visible=cuda is not None) for gpu, cuda in gpus))


def _task(rank: int, size: int | None = 4) -> Task:
    return Task(rank=rank, size=size, settings=("LOCAL_RANK", "LOCAL_WORLD_SIZE")[: 1 + (size is not None)])


EXCLUSIVE: Final = Request(bind=Bind.EXCLUSIVE)
PLAN: Final = make_plan(_machine(), EXCLUSIVE)
TWICE: Final = make_plan(_machine(), replace(EXCLUSIVE, num_ranks=8))
WITHOUT_GPUS: Final = replace(_machine(), gpus=())
NAMED_GPUS: Final = settle_gpus(_machine(), Request(gpus=("2", "GPU-01")), {})[0]


def _named(*uuids: str | None) -> Plan:
    """Return the plan of GPUs with these UUIDs, and with PCI addresses by their numbers."""
    gpus = (GpuRef(index=n, uuid=uuid, pci=f"0000:{n:02x}:00.0") for n, uuid in enumerate(uuids))
    return replace(PLAN, ranks=tuple(replace(rank, gpu=gpu) for rank, gpu in zip(PLAN.ranks, gpus, strict=True)))


def _of(plan: Plan, rank: int, visible: str | None = None, *, size: int = 4, nvml: GpuRef | str | None = "") -> Slice:
    """Return a task's rank of a plan; `nvml` describes the GPU that it sees, "" fails if that is asked for."""
    return slice_of(
        plan,
        _task(rank, size),
        source="p",
        visible=visible,
        ask=lambda: pytest.fail("NVML is asked") if isinstance(nvml, str) else nvml,
    )


def _made(
    rank: int,
    size: int | None = 4,
    *,
    machine: Topology | None = None,
    request: Request = EXCLUSIVE,
    own_cpus: bool = False,
    variable: str | None = None,
) -> Slice:
    task = _task(rank, size)._replace(variable=variable)
    return plan_task(machine or _machine(), request, task, own_cpus=own_cpus)


UUIDS: Final = ("GPU-e0", "GPU-e1", "GPU-e2", "GPU-e3")
ALIKE: Final = _named("GPU-a0b0-c2", "GPU-a0b2-c2", f"GPU-a0b1-c2{'0' * 26}", "GPU-a0b3-c2")
HERE_2: Final = GpuRef(index=2, uuid="GPU-22", pci="0000:02:00.0")
CASES: Final[dict[str, Callable[[], Slice | RankPlan]]] = {
    # of a plan
    "a task gets the rank of its number, without NVML": partial(_of, PLAN, 3),
    **{
        f"a task that sees one GPU gets its rank, under its own number: {visible}": partial(_of, ALIKE, 0, visible)
        for visible in ("GPU-a0b1-c2", "GPU-A0B1-C2", "GPU-a0b1c2", "GPU-a0B1", f"GPU-a0b1-c2{'0' * 40}")
    },
    "of several ranks of one GPU, its own number counts": partial(_of, TWICE, 6, "GPU-02", size=8),
    "if it is not one of theirs, they are taken in turn": partial(_of, TWICE, 1, "GPU-02", size=8),
    **{
        f"on another host of the kind the PCI address gives the rank, and the GPU is this host's: {visible}, {uuids}": (
            partial(_of, _named(*uuids), 0, visible, nvml=HERE_2)
        )
        for uuids in (UUIDS, (None,) * 4)
        for visible in ("GPU-22", "0")
    },
    **{
        f"a GPU that the plan has not leaves the choice to the number, which is not exact: {visible}, {gpu}": partial(
            _of, _named(*("GPU-22",) * 4), 3, visible, nvml=gpu
        )
        for gpu in (None, GpuRef(index=0, uuid="GPU-9", pci=None))
        for visible in ("GPU-9", "GPU-", "gpu-22")
    },
    "a beginning that several UUIDs have identifies none": partial(_of, _named(*UUIDS), 0, "GPU-e", nvml=None),
    "until NVML gives the whole UUID": partial(
        _of, _named(*UUIDS), 0, "GPU-e", nvml=GpuRef(index=0, uuid="GPU-e1", pci=None)
    ),
    "a plan without this rank is refused, with the command for a new one": partial(_of, PLAN, 4, size=8),
    "also if the task sees a GPU that it has not": partial(_of, PLAN, 4, "GPU-9", size=8, nvml=None),
    "fewer tasks than ranks are a warning": partial(_of, PLAN, 0, size=2),
    # inside the CPUs that a resource manager gave
    "a task stays inside its CPUs": partial(inside, PLAN.ranks[0], CpuSet({8, 9, 0})),
    "if none of them was planned, it keeps them all": partial(inside, PLAN.ranks[0], CpuSet({0, 1})),
    "if all were planned, nothing changes": partial(inside, PLAN.ranks[0], CpuSet(range(16))),
    # a plan made for the task
    "a task gets the same as its rank from `run`": partial(_made, 3),
    "one that sees its GPU only splits CPUs as if it saw all": partial(_made, 3, machine=_machine(visible=(3,))),
    "in another order it uses the GPU that it sees": partial(_made, 3, machine=_machine(visible=(0,))),
    "with CPUs of its own nothing is split again": partial(
        _made, 3, machine=_machine(visible=(0,), allowed=range(8, 10)), own_cpus=True
    ),
    "then the number chooses among all visible GPUs": partial(
        _made, 3, machine=_machine(allowed=range(4)), own_cpus=True
    ),
    "and among those of --gpus": partial(_made, 3, request=NAMED_GPUS, own_cpus=True),
    "CPUs far from the GPU are used, and the reason names its node": partial(
        _made, 1, machine=_machine(visible=(0,), allowed=range(4)), request=Request(), own_cpus=True
    ),
    "without a size one task per GPU is assumed, with a note": partial(_made, 3, None),
    "if that cannot be, the error asks for the size": partial(_made, 4, None, variable="LOCAL_RANK"),
    "the hint has the --local-rank that the user gave": partial(_made, 3, None, machine=WITHOUT_GPUS),
    "the size does not matter with --bind none": partial(
        _made, 4, None, machine=WITHOUT_GPUS, request=Request(bind=Bind.NONE)
    ),
    "nor with CPUs of its own": partial(
        _made, 4, None, machine=WITHOUT_GPUS, request=Request(), own_cpus=True
    ),
    "rank n uses GPU n mod G, as with `run`": partial(_made, 5, 8),
}  # fmt: skip


def _described(case: Callable[[], Slice | RankPlan]) -> list[str]:
    try:
        found = case()
    except UsageError as error:
        return [f"error: {error.message}", f"  hint: {error.hint}"]
    rank = found.rank if isinstance(found, Slice) else found
    more = [f"  {name}: {text}" for name in ("warnings", "notes") for text in getattr(found, name, ())]
    return [f"{rank}: {rank.reason}", f"  GPU {rank.gpu}", f"  from {getattr(found, 'source', 'a plan')}", *more]


def test_each_part_is_the_recorded_one() -> None:
    """Each case has the rank that it shows, or the error; NUMAPIN_UPDATE_GOLDEN=1 records them anew."""
    texts = ("\n".join((f"=== {sentence}", *_described(case), "")) for sentence, case in CASES.items())
    compare("".join(texts), str(HERE / "slices.txt"))


def test_tasks_split_what_one_plan_splits() -> None:
    """Tasks that see all GPUs, or their own one, get together what `numapin run` gives to its ranks."""
    ranks = range(4)
    assert [_made(rank).rank for rank in ranks] == [_of(PLAN, rank).rank for rank in ranks] == list(PLAN.ranks)
    alone = [_made(rank, machine=_machine(visible=(rank,))).rank for rank in ranks]
    assert [(rank.gpu, rank.cpus) for rank in alone] == [(rank.gpu, rank.cpus) for rank in PLAN.ranks]
    unordered = [_made(rank, machine=_machine(visible=(3 - rank,))).rank.cpus for rank in ranks]
    assert len(CpuSet().union(*unordered)) == sum(map(len, unordered))


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


def test_lines_that_are_read_without_click() -> None:
    """Plain lines of `exec` give options and the command; any other line, valid or not, is left to click."""
    compare_answers(HERE / "lines.txt", lambda line: repr(read_line(line.split())))
