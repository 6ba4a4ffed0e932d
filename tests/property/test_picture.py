"""Properties of pictures of generated machines and plans."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

from hypothesis import given, settings
from hypothesis import strategies as st

from numapin import Link, Nic
from tests.pictures import assert_drawn_once, problems
from tests.property.seam import lay_out, svg
from tests.property.test_plan import cases

if TYPE_CHECKING:
    from tests.property.test_plan import Case

some = settings(max_examples=60, deadline=None)
names = st.text(max_size=40)
switches = st.sampled_from(["PIX", "PXB", "PHB", "NODE", "SYS"])
own_links = st.sampled_from(["NV12", "NV12", "NV4", "XGMI", "PIX", "SYS"])


@some
@given(cases(), st.data())
def test_everything_is_drawn_once_and_nothing_overlaps(case: Case, data: st.DataObject) -> None:
    """For any machine, names and plan, each CPU, core, GPU and NIC is exactly one box, and no boxes overlap."""
    nodes = [None, *(node.id for node in case.topology.nodes)]
    nics = tuple(
        Nic(name=name, node=data.draw(st.sampled_from(nodes))) for name in data.draw(st.lists(names, max_size=3))
    )
    topology = replace(
        case.topology,
        host=data.draw(names),
        gpus=tuple(replace(gpu, name=data.draw(names)) for gpu in case.topology.gpus),
        nics=nics,
        links=(
            *(Link(a="gpu0", b=nic.name, kind=data.draw(names | switches)) for nic in nics),
            *(
                Link(a=a.label, b=b.label, kind=data.draw(own_links))
                for a, b in combinations(case.topology.gpus[:6], 2)
            ),
        ),
    )
    picture = lay_out(topology, case.plan)
    assert problems(picture) == []
    assert_drawn_once(picture, topology)
    ET.fromstring(svg(topology, case.plan))  # noqa: S314 - ours
