"""Properties of the nearest NICs over generated machines."""

from __future__ import annotations

import json
import random as randoms
from collections import Counter
from dataclasses import replace
from itertools import product
from math import inf, prod

from hypothesis import given, settings
from hypothesis import strategies as st

from numapin import Link, Nic, Topology
from tests.machines.grids import grid
from tests.property.seam import LinkKind, NicKind, rdma_adapters

_WORDS = [word.value for word in LinkKind]
several = settings(max_examples=200)


@st.composite
def machines(draw: st.DrawFn) -> Topology:
    """Draw a machine of GPUs and NICs anywhere, with any links; some NICs have two names, some no verbs."""
    gpus = draw(st.lists(st.none() | st.sampled_from([0, 1]), min_size=1, max_size=9))
    nics, links = [], []
    for number in range(draw(st.integers(0, 6))):
        place = Nic(name="", pci=f"0000:{0x80 + number:02x}:00.0", node=draw(st.sampled_from([None, 0, 1])))
        own = [replace(place, name=f"mlx5_{number}", kind=NicKind.INFINIBAND), replace(place, name=f"eth{number}")]
        named = own[draw(st.integers(0, 1)) : draw(st.integers(1, 2))] or own[:1]
        nics += named
        for gpu in range(len(gpus)):
            word = draw(st.sampled_from(["", *_WORDS[1:]]))
            links += [Link(a=f"gpu{gpu}", b=nic.name, kind=word) for nic in named if word]
    return replace(grid(packages=2, nodes=1, gpus=gpus), nics=tuple(nics), links=tuple(links))


def _place(machine: Topology, gpu: int, name: str) -> tuple[float, float]:
    """Return how near a NIC is to a GPU, from the definition: the place of its link, then the distance of its node."""
    nic = rdma_adapters(machine)[name]
    words = [link.kind for link in machine.links if link.a == f"gpu{gpu}" and link.b in nic.names]
    home = machine.gpus[gpu].node
    distance = inf if None in (home, nic.node) else 10 if home == nic.node else 32
    return (_WORDS.index(words[0]) if words else inf, distance)


@several
@given(machines())
def test_the_nearest_nics_are_all_of_them_and_shared_fairly(machine: Topology) -> None:
    """A GPU has all NICs at the smallest known distance, and no other choice of first ones spreads GPUs more evenly."""
    names = rdma_adapters(machine)
    found = machine.nearest_nics
    for gpu in machine.gpus:
        places = {name: _place(machine, gpu.index, name) for name in names}
        best = min(places.values(), default=(inf, inf))
        expected = {name for name, place in places.items() if place == best and best != (inf, inf)}
        assert set(found[gpu.index].names if gpu.index in found else ()) == expected
    users = Counter(nics.names[0] for nics in found.values())
    for nics in found.values():
        first = nics.names[0]
        assert not (users[first] > 1 and any(users[name] == 0 for name in nics.names))
        assert all(users[first] - users[name] <= 1 for name in nics.names)
    choices = [nics.names for nics in found.values()]
    if prod(map(len, choices)) <= 2000:
        unevenness = (sum(n * n for n in Counter(each).values()) for each in product(*choices))
        assert sum(n * n for n in users.values()) == min(unevenness)


@several
@given(machines(), st.randoms(use_true_random=False))
def test_the_order_of_the_input_does_not_matter(machine: Topology, random: randoms.Random) -> None:
    """The same parts in any order give the same NICs, on every rank of the host."""
    parts = {name: list(getattr(machine, name)) for name in ("gpus", "nics", "links")}
    for part in parts.values():
        random.shuffle(part)
    swapped = [Link(a=link.b, b=link.a, kind=link.kind) for link in parts["links"]]
    shuffled = replace(machine, gpus=tuple(parts["gpus"]), nics=tuple(parts["nics"]), links=tuple(swapped))
    assert shuffled.nearest_nics == machine.nearest_nics
    assert Topology.from_json(json.dumps(machine.to_json())).nearest_nics == machine.nearest_nics
