"""The HTML page around the picture: well-formed, self-contained, with the facts in words; and readable colors."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from numapin import Bind, Nic, Plan, Request, Topology, make_plan
from tests.machines.grids import gpu, grid
from tests.pictures import HOSTILE, golden_machine, parsed
from tests.policies import policy_of
from tests.unit.view.seam import COLORS, RANK_COLORS, element, lay_out, page

DGX = golden_machine("2pkg-8node-smt2-8gpu-pairs")
LOADING = {"src", "href", "{http://www.w3.org/1999/xlink}href", "srcset", "style"}  # "style" is refused by the policy


def _hostile() -> tuple[Topology, Plan]:
    """Return a machine and a plan with markup and control characters in each name, note and reason."""
    topology = replace(
        grid(nodes=2),
        host=HOSTILE[0],
        gpus=tuple(replace(gpu(i, i % 2), name=name, uuid=name) for i, name in enumerate(HOSTILE)),
        nics=tuple(Nic(name=name, node=0) for name in HOSTILE),
        notes=HOSTILE,
    )
    plan = make_plan(topology, Request())
    return topology, replace(plan, ranks=tuple(replace(rank, reason=HOSTILE[rank.local_rank]) for rank in plan.ranks))


@pytest.mark.parametrize("bind", [None, Bind.NODE, "hostile"])
def test_it_is_well_formed_and_nothing_else_is_loaded_or_runs(bind: Bind | str | None) -> None:
    """It has the picture, names no other file, and has one style, which the policy allows by hash, and no script."""
    topology, plan = _hostile() if bind == "hostile" else (DGX, bind and make_plan(DGX, Request(bind=Bind(bind))))
    text = page(topology, plan or None)
    assert element(lay_out(topology, plan or None)) in text
    parts = list(parsed(text).iter())
    attributes = {name for part in parts for name in part.attrib}
    assert not attributes & LOADING
    assert not [name for name in attributes if name.startswith("on")]
    tags = {part.tag for part in parts}
    assert not {"link", "img", "iframe", "object", "embed", "script"} & tags
    assert "@import" not in text
    assert set(re.findall(r"https?://[^\"' )]+", text)) == {"http://www.w3.org/2000/svg"}
    policy = policy_of(text)
    assert {name for name, sources in policy.items() if sources != ["'none'"]} == {"style-src"}
    assert [source[:8] for source in policy["style-src"]] == ["'sha256-"]


def test_tables_have_the_facts_of_the_picture() -> None:
    """One row per node with CPUs, devices and ranks, one row per rank with its reason, and the warnings."""
    plan = make_plan(DGX, Request())
    parts = list(parsed(page(DGX, plan)).iter())
    rows = [[cell.text or "" for cell in part] for part in parts if part.tag == "tr"]
    size = ["128.0 GiB", "64.0 GiB"]
    assert ["3", "CPUs", "0", "48-63,176-191", *size, "gpu0, gpu1, mlx5_0", "0-1", "0-1"] in rows
    rank = plan.ranks[1]
    nic = f"mlx5_0: {rank.nics_reason}"
    assert ["1", "gpu1", nic, "3", "48-63,176-191", "preferred 3", "8", "yes", rank.reason] in rows
    assert list(plan.warnings) == [part.text for part in parts if part.tag == "li"]
    assert "The binding of each rank" not in page(DGX)


def test_empty_nodes_and_lost_devices_have_a_row() -> None:
    """The 28 empty nodes of a GB200 tray are one row; devices of unknown node are listed, not left out."""
    text = page(golden_machine("2pkg-34node-gpumem-4gpu"))
    assert '<tr><th scope="row">3-9,11-17,19-25,27-33</th><td>empty</td>' in text
    lost = replace(grid(gpus=[None]), nics=(Nic(name="eth0"),))
    assert '<tr><th scope="row">unknown</th>' + "<td></td>" * 5 + "<td>gpu0, eth0</td>" in page(lost)


def test_hostile_names_are_text() -> None:
    """Markup in names, notes and reasons is shown as text; control characters are replaced; long texts are cut."""
    text = page(*_hostile())
    assert "<script>alert(1)</script>" in "".join(parsed(text).itertext())
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\u202e\u2028\ufffe]", text)
    assert "W" * 600 not in text


def _luminance(color: str) -> float:
    values = (int(color[at : at + 2], 16) / 255 for at in (1, 3, 5))
    linear = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values)
    return sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("dark", [False, True])
def test_text_is_readable(*, dark: bool) -> None:
    """Text has a contrast of at least 4.5 (WCAG AA) on every background, light and dark."""
    color = {name: pair[dark] for name, pair in COLORS.items()}
    grounds = ("page", "socket", "node", "l3", "gpu", "nic", "switch", "bus")
    pairs = [(color[ink], color[ground]) for ink in ("ink", "dim") for ground in grounds]
    pairs += [(color["ink"], color["cpu"]), *((color["on"], rank) for rank in RANK_COLORS)]
    for pair in pairs:
        low, high = sorted(map(_luminance, pair))
        assert (high + 0.05) / (low + 0.05) >= 4.5, pair
