"""Machines and plans as text, and the words that a request accepts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from numapin import Bind, Memory, Nic, Request, make_plan
from numapin.errors import UsageError
from tests.machines.grids import grid
from tests.pictures import golden_machine

if TYPE_CHECKING:
    from collections.abc import Callable


def test_a_machine_as_text() -> None:
    """`print(topology)` has the size and a line per node with CPUs or devices; other nodes share one."""
    machine = replace(golden_machine("2pkg-34node-gpumem-4gpu"), host="tray", nics=(Nic(name="eth0"),))
    lines = str(machine).splitlines()
    assert lines[0] == "tray: 2 sockets, 34 NUMA nodes, 4 GPUs, 144 cores, 144 CPUs"
    assert lines[1].startswith("  node 0: CPUs 0-71, ")
    assert lines[1].endswith(", gpu0, gpu1")
    assert lines[3:] == ["  without CPUs: nodes 2-33", "  node unknown: eth0"]


def test_a_plan_as_text() -> None:
    """`print(plan)` has a line per rank, which says if it is not exact."""
    plan = make_plan(grid(nodes=2, gpus=[0, 1]), Request(cpus_per_rank=16))
    assert str(plan).splitlines() == [
        "2 ranks, bind node, memory preferred",
        "  rank 0: GPU 0, node 0, CPUs 0-3,8-11, memory preferred 0, 4 threads (not exact)",
        "  rank 1: GPU 1, node 1, CPUs 4-7,12-15, memory preferred 1, 4 threads (not exact)",
    ]
    assert "no GPU, node unknown" in str(make_plan(grid(), Request(bind="none")))


def test_text_is_printable() -> None:
    """Names that contain control characters do not reach the terminal."""
    assert "\x1b" not in str(replace(grid(), host="\x1b[31m"))


def test_words_are_accepted() -> None:
    """Strings stand for the choices, and sets of numbers for CPUs; `replace` keeps working."""
    request = Request(bind="exclusive", memory="bind", memory_nodes={1}, reserve_cpus={0, 2}, gpus=["0"])
    assert request == Request(
        bind=Bind.EXCLUSIVE, memory=Memory.BIND, memory_nodes=frozenset({1}), reserve_cpus=[0, 2], gpus=("0",)
    )
    assert request.bind is Bind.EXCLUSIVE
    assert str(request.reserve_cpus) == "0,2"
    changed = replace(request, bind="socket", num_ranks=3)  # type: ignore[arg-type]  # mypy knows the attribute's type
    assert changed.bind is Bind.SOCKET
    assert hash(request) == hash(replace(request))


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Request(bind="bogus"), "--bind is 'bogus'; it must be one of none, node, socket, exclusive, core"),
        (lambda: Request(memory="near"), "--memory is 'near'; it must be one of none, local, preferred, bind, interl"),
        (lambda: Request(bind=3), "--bind is 3; it must be one of none"),  # type: ignore[arg-type]
        (lambda: replace(Request(), bind="bogus"), "--bind is 'bogus'"),  # type: ignore[arg-type]
    ],
)
def test_other_words_name_the_choices(make: Callable[[], Request], told: str) -> None:
    """A word that is none of the choices is an error that lists them."""
    with pytest.raises(UsageError, match=r"must be one of") as caught:
        make()
    assert caught.value.message.startswith(told)
