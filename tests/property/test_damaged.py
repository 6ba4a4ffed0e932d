"""Machine files and captures with senseless content: they are read, or refused with the name of the file, and quickly.

The good ones are those of tests/machines, of all vendors. What is read is planned, saved and read back.
NUMAPIN_FUZZ_EXAMPLES sets the number of examples of each test.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from numapin import Bind, Request, Topology, make_plan
from numapin.errors import MachineError, MachineFileError, NumapinError
from tests.machines.roots import NAMES, describe, load
from tests.pictures import golden_machine
from tests.property.seam import Mig, Pcie, build, nccl_nodes, read_hwloc, read_nccl, read_sysfs, xmlfile
from tests.property.trees import all_files, changed, root_of

if TYPE_CHECKING:
    from tests.property.seam import Readings

FILES: Final = [(name, kind) for name in NAMES for kind in load(name).described]
VALUES: Final = re.compile(r'(?<==")[^"]*(?=")|(?<=[ >])[\w:]+(?=[ <])')  # of attributes, and of a matrix
WORDS: Final = re.compile(r"[^\s:,/]+")
_MACHINE: Final = golden_machine("2node-nics-of-all-kinds-2gpu")
_SPLIT: Final = replace(_MACHINE.gpus[0], pcie=Pcie(gen=4, width=16), mig=(Mig(uuid="MIG-1"),))
TOPOLOGY: Final = replace(_MACHINE, gpus=(_SPLIT, *_MACHINE.gpus[1:]), notes=("n",))
JSON: Final = json.dumps(TOPOLOGY.to_json())
# Text that breaks parsers: signs, separators, ranges, large and non-ASCII numbers, markup, NUL and lone surrogates.
SCRAPS: Final = st.one_of(
    st.sampled_from(["", "-1", "-", ",", "0-", "9-0", "0-x", "0x", "99999999999999999999", "1e9", "\u0663", "1048576"]),
    st.sampled_from(
        ["\0", "\ud800", "null", "[]", "{}", "true", "NaN", '"', "'", "0xf...f", "ffff:ff:01.0", "18:00.0"]
    ),
    st.sampled_from(["<", ">", "</a>", "&x;", "]]>", "<!--", "<!DOCTYPE a [", '<!ENTITY a "b">', "..", "x" * 300]),
    st.integers(0, 15).map(str),
    st.text(max_size=4),
)
VARIABLES: Final = st.dictionaries(
    st.sampled_from(["ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"]),
    st.lists(SCRAPS | st.just("GPU-0000000000000009"), max_size=4).map(",".join),
    max_size=3,
)
FUZZ: Final = settings(max_examples=int(os.environ.get("NUMAPIN_FUZZ_EXAMPLES", "120")))


@st.composite
def damaged(draw: st.DrawFn, good: str, values: re.Pattern[str]) -> str:
    """Replace some values by scraps or by other values; sometimes cut the text off, or put a scrap anywhere."""
    spans = [match.span() for match in values.finditer(good)] or [(0, len(good))]
    text = good
    for start, end in sorted(draw(st.lists(st.sampled_from(spans), min_size=1, max_size=4, unique=True)), reverse=True):
        other = good[slice(*draw(st.sampled_from(spans)))]
        text = text[:start] + draw(st.just(other) | SCRAPS) + text[end:]
    at = draw(st.integers(0, len(text)))
    cut, inserted = text[:at], text[:at] + draw(SCRAPS) + text[at:]
    return draw(st.sampled_from([text] * 6 + [cut, inserted]))


@contextmanager
def only_machine_file_errors() -> Iterator[None]:
    """Let no exception through, except the one that names the file."""
    try:
        yield
    except MachineFileError as error:
        assert error.message.startswith("fuzz")  # noqa: PT017 - not raising is fine too
        assert error.hint  # noqa: PT017


def use(readings: Readings, environ: dict[str, str]) -> None:
    """Do with readings what a command does: build, plan, save and read back. What contradicts itself is refused."""
    try:
        topology = build(readings, environ=environ)
    except ValueError:
        return
    assert Topology.from_json(json.dumps(topology.to_json())) == topology
    assert topology.warnings is not None
    for bind in (Bind.NODE, Bind.EXCLUSIVE):
        with suppress(NumapinError):
            plan = make_plan(topology, Request(bind=bind))
            assert all(rank.cpus <= topology.allowed.cpus for rank in plan.ranks)


def parse_hwloc(text: str, *, source: str = "fuzz") -> Readings:
    return read_hwloc(xmlfile.parse(text, source=source))


def parse_nccl(text: str, *, source: str = "fuzz") -> Readings:
    """Parse NCCL's XML with both of its readers."""
    root = xmlfile.parse(text, source=source)
    nccl_nodes(root)
    return read_nccl(root)


@cache
def kinds_of_files(name: str) -> dict[str, list[str]]:
    """Return the files of a machine's tree by their path without numbers: there are hundreds for CPUs."""
    kinds: dict[str, list[str]] = {}
    for path in all_files(name):
        kinds.setdefault(re.sub(r"[0-9a-f]*[0-9][0-9a-f]*", "N", path), []).append(path)
    return kinds


@FUZZ
@given(st.sampled_from(FILES), VARIABLES, st.data())
def test_damaged_files_of_other_programs(file: tuple[str, str], environ: dict[str, str], data: st.DataObject) -> None:
    """The readers of hwloc's and NCCL's XML accept a damaged file or name it in an error."""
    text = data.draw(damaged(describe(load(file[0]), file[1]), VALUES))
    with only_machine_file_errors():
        use(parse_hwloc(text) if file[1] == "hwloc" else parse_nccl(text), environ)


@FUZZ
@given(st.sampled_from(NAMES), VARIABLES, st.data())
def test_damaged_captures(name: str, environ: dict[str, str], data: st.DataObject) -> None:
    """Some files of a tree are missing or senseless: a value is unknown, or an error says what to do."""
    kinds = kinds_of_files(name)
    paths = [
        data.draw(st.sampled_from(kinds[kind]))
        for kind in data.draw(st.lists(st.sampled_from(sorted(kinds)), min_size=1, max_size=6, unique=True))
    ]
    files: dict[str, bytes | None] = {}
    for path in paths:
        own, other = ((root_of(name) / p).read_text() for p in (path, data.draw(st.sampled_from(paths))))
        text = damaged(own, WORDS) | SCRAPS | st.just(other)
        files[path] = data.draw(
            text.map(lambda t: t.encode(errors="surrogatepass")) | st.binary(max_size=8) | st.none()
        )
    with changed(name, files) as root:
        try:
            readings = read_sysfs(root, source="fuzz")
        except MachineError as error:
            assert error.hint  # noqa: PT017 - not raising is fine too
            return
        assert all(cpu.siblings is None or cpu.cpu in cpu.siblings for cpu in readings.cpus)
        use(readings, environ)


@FUZZ
@given(damaged(JSON, re.compile(r'(?<=")[^"]*(?=")|[0-9]+')))
def test_damaged_topology_json(text: str) -> None:
    """The reader of numapin's JSON accepts a damaged file or names it in an error."""
    with only_machine_file_errors():
        Topology.from_json(text, source="fuzz")


@pytest.mark.parametrize("parse", [parse_hwloc, parse_nccl, Topology.from_json])
@FUZZ
@given(text=st.text(max_size=40))
def test_any_text(parse: Callable[..., object], text: str) -> None:
    """Arbitrary text is refused by every parser."""
    with pytest.raises(MachineFileError, match=r"^fuzz: "):
        parse(text, source="fuzz")
