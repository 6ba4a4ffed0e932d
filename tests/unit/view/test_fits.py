"""Tables and trees fit the terminal: nothing is cut and no column is dropped, however narrow it is.

What they show at 80 columns is recorded: tests/recorded/machines.
"""

from __future__ import annotations

from collections import Counter
from io import StringIO
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from numapin import Bind, Nic, Request, make_plan
from tests.machines.roots import NAMES
from tests.pictures import golden_machine
from tests.unit.view.seam import (
    NicKind,
    adapters,
    explained_plan,
    natural,
    topo_matrix,
    topo_tree,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

WIDE = 1000


def _lines(renderable: RenderableType, width: int) -> list[str]:
    out = StringIO()
    Console(file=out, width=width, highlight=False, emoji=False, markup=False).print(renderable)
    return [line.rstrip() for line in out.getvalue().splitlines()]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_narrow_terminal_loses_nothing(name: str, width: int) -> None:
    """Tree and plan have each character of the wide ones, the matrix each cell, and no line is too wide."""
    machine = golden_machine(name)
    plan = make_plan(machine, Request(bind=Bind.EXCLUSIVE))
    for shown in (topo_tree(machine, plan), explained_plan(plan)):
        narrow = _lines(shown, width)
        assert max(map(len, narrow)) <= width
        visible, wide = (Counter(filter(str.isalnum, "".join(lines))) for lines in (narrow, _lines(shown, WIDE)))
        assert visible == wide
    narrow, wide_lines = (
        _lines(topo_matrix(machine, width=width), width),
        _lines(topo_matrix(machine, width=WIDE), WIDE),
    )
    assert max(map(len, narrow)) <= width
    words, wide_words = (Counter(" ".join(lines).replace(",", " ").split()) for lines in (narrow, wide_lines))
    assert not wide_words - words


def test_natural_order() -> None:
    """Numbers in names count as numbers, even thousands of digits."""
    names = ["mlx5_17", "mlx5_9", "eth0", "mlx5_010", "a" + "1" * 9999]
    assert sorted(names, key=natural) == [names[4], "eth0", "mlx5_9", "mlx5_010", "mlx5_17"]


def test_names_of_one_device() -> None:
    """Names with one PCI address are one device, the verbs name first; without an address each is its own."""
    nics = [
        Nic(name="ib0", pci="0000:01:00.0", kind=NicKind.INFINIBAND),
        Nic(name="mlx5_0", pci="0000:01:00.0", kind=NicKind.INFINIBAND),
        Nic(name="eth1", pci="0000:02:00.0"),
        Nic(name="mlx5_1", pci="0000:02:00.0", kind=NicKind.INFINIBAND),
        Nic(name="eth2"),
        Nic(name="eth3"),
    ]
    assert [adapter.name for adapter in adapters(nics)] == ["eth2", "eth3", "mlx5_0/ib0", "mlx5_1/eth1"]
