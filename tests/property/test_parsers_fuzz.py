"""The four machine parsers on damaged input: they return or raise a NumapinError, and do so quickly."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any, Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from numapin import Topology
from numapin.errors import MachineFileError, NumapinError
from tests.pictures import golden_machine
from tests.property.seam import (
    Mig,
    Pcie,
    build,
    nccl_nodes,
    read_hwloc,
    read_nccl,
    read_sysfs,
    xmlfile,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.property.seam import Readings

HWLOC: Final = """<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE topology SYSTEM "hwloc2.dtd">
<topology version="2.0">
<object type="Machine" os_index="0" cpuset="0x3" allowed_cpuset="0x3" nodeset="0x3" allowed_nodeset="0x1">
<info name="HostName" value="h"/>
<object type="Package" os_index="0" cpuset="0x3" nodeset="0x3">
<object type="NUMANode" os_index="0" cpuset="0x3" nodeset="0x1" local_memory="4096"/>
<object type="NUMANode" os_index="1" cpuset="0x3" nodeset="0x2" subtype="GPUMemory"/>
<object type="L3Cache" cpuset="0x3"><object type="Core" os_index="0" cpuset="0x3">
<object type="PU" os_index="0" cpuset="0x1"/><object type="PU" os_index="1" cpuset="0x2"/></object></object>
<object type="Bridge" bridge_type="0-1" bridge_pci="0000:[17-18]">
<object type="Bridge" bridge_type="1-1" bridge_pci="0000:[18-18]" pci_busid="0000:17:00.0">
<object type="PCIDev" pci_busid="0000:18:00.0" pci_type="0302 [10de:1eb8] [10de:12a2] a1">
<object type="OSDev" name="nvml0" osdev_type="1"><info name="NVIDIAUUID" value="GPU-1"/></object></object>
<object type="PCIDev" pci_busid="0000:18:00.1" pci_type="0200 [1d0f:efa0] [1d0f:efa0] 00">
<object type="OSDev" name="eth0" osdev_type="2"/></object></object>
<object type="PCIDev" pci_busid="0000:c1:00.0" pci_type="0380 [1002:7408] [1002:0b0c] 00">
<object type="OSDev" name="rsmi0" osdev_type="1" gp_index="70"><info name="AMDUUID" value="e850"/></object></object>
<object type="PCIDev" pci_busid="0000:c6:00.0" pci_type="0380 [1002:7408] [1002:0b0c] 00">
<object type="OSDev" name="rsmi1" osdev_type="1" gp_index="71"/></object></object></object>
<object type="OSDev" name="eth1" osdev_type="2"><info name="Address" value="80:00"/></object></object>
<distances2 type="OSDev" nbobjs="2" kind="9" name="XGMIBandwidth" indexing="gp">
<indexes length="6">70 71 </indexes><u64values length="20">9 100 100 9 </u64values></distances2>
<distances2hetero nbobjs="2" kind="25" name="NVLinkBandwidth">
<indexes length="20">OSDev:70 PCIDev:9 </indexes><u64values length="20">0 25 25 0 </u64values></distances2hetero>
<distances2 type="NUMANode" nbobjs="2" kind="5" name="NUMALatency" indexing="os">
<indexes length="4">0 1 </indexes><u64values length="12">10 21 21 10 </u64values></distances2>
</topology>"""

NCCL: Final = """<system version="1">
<cpu numaid="0" affinity="00000000,0000000f" arch="x86_64">
<pci busid="ffff:ff:01.0" class="0x060400" link_speed="16.0 GT/s PCIe" link_width="16">
<pci busid="0000:0f:00.0" class="0x030200" link_speed="16.0 GT/s PCIe" link_width="16"><gpu dev="0" sm="80"/></pci>
<pci busid="0000:10:00.0" class="0x020700" link_width="16"><nic><net name="mlx5_0" dev="0"/></nic></pci>
</pci></cpu>
<cpu numaid="1" affinity="000000f0"><pci busid="0000:b7:00.0" class="0x030200"/>
<pci busid="0000:c1:00.0" class="0x038000" vendor="0x1002"><gpu dev="1" sm="90" gcn="gfx90a">
<xgmi target="0000:c6:00.0" count="2" tclass="0x038000"/>
<nvlink target="ff:ff" count="1" tclass="0x068000"/></gpu></pci>
<pci busid="0000:c6:00.0" class="0x038000"><gpu dev="2" sm="90" gcn="gfx90a"/></pci></cpu>
</system>"""

_MACHINE: Final = golden_machine("2node-nics-of-all-kinds-2gpu")
_SPLIT: Final = replace(_MACHINE.gpus[0], pcie=Pcie(gen=4, width=16), mig=(Mig(uuid="MIG-1"),))
TOPOLOGY: Final = replace(_MACHINE, gpus=(_SPLIT, *_MACHINE.gpus[1:]), notes=("n",))
JSON: Final = json.dumps(TOPOLOGY.to_json())

CPU: Final = "sys/devices/system/cpu"
NODE: Final = "sys/devices/system/node"
DEVICE: Final = "sys/bus/pci/devices/0000:18:00.0"
TREE: Final = {
    f"{CPU}/online": "0-1",
    f"{CPU}/cpu0/topology/thread_siblings_list": "0-1",
    f"{CPU}/cpu0/topology/core_siblings": "3",
    f"{CPU}/cpu0/topology/physical_package_id": "0",
    f"{CPU}/cpu0/cache/index3/level": "3",
    f"{CPU}/cpu0/cache/index3/shared_cpu_map": "00000000,00000003",
    f"{CPU}/cpu1/online": "1",
    f"{NODE}/online": "0",
    f"{NODE}/node0/cpulist": "0-1",
    f"{NODE}/node0/distance": "10",
    f"{NODE}/node0/meminfo": "Node 0 MemTotal: 64 kB\nNode 0 MemFree: 32 kB",
    f"{DEVICE}/class": "0x030200",
    f"{DEVICE}/vendor": "0x10de",
    f"{DEVICE}/config": "\x10\x01",
    f"{DEVICE}/numa_node": "0",
    f"{DEVICE}/local_cpulist": "0-1",
    f"{DEVICE}/current_link_speed": "16.0 GT/s PCIe",
    f"{DEVICE}/current_link_width": "16",
    "proc/driver/nvidia/gpus/0000:18:00.0/information": "Model: x\nGPU UUID: GPU-1",
    "proc/driver/nvidia/gpus/0000:18:00.0/numa_status": "Node: 0",
    "sys/bus/pci/devices/0000:c1:00.0/class": "0x120000",
    "sys/bus/pci/devices/0000:c1:00.0/vendor": "0x1002",
    "sys/bus/pci/devices/0000:3a:00.0/class": "0x038000",
    "sys/bus/pci/devices/0000:3a:00.0/vendor": "0x8086",
    "sys/class/kfd/kfd/topology/nodes/0/gpu_id": "0",
    "sys/class/kfd/kfd/topology/nodes/0/properties": "simd_count 0",
    "sys/class/kfd/kfd/topology/nodes/1/gpu_id": "7",
    "sys/class/kfd/kfd/topology/nodes/1/properties": "domain 0\nlocation_id 49408\nunique_id 9\nsimd_count 4",
    "sys/class/kfd/kfd/topology/nodes/2/gpu_id": "8",
    "sys/class/kfd/kfd/topology/nodes/2/properties": "domain 0\nlocation_id 268484864\nunique_id 9",
    "sys/class/kfd/kfd/topology/nodes/1/io_links/0/properties": "type 11\nnode_to 2\nweight 15\nmin_bandwidth 9",
    "proc/meminfo": "MemTotal: 9 kB",
    "proc/self/cgroup": "0::/job",
    "proc/mounts": "cgroup2 /cg cgroup2 rw 0 0\nnone /dev/cpuset cpuset rw 0 0",
    "proc/self/cpuset": "/",
    "cg/job/cpuset.cpus.effective": "0",
    "dev/cpuset/mems": "0",
}

# Text that breaks parsers: signs, separators, ranges, large and non-ASCII numbers, markup, NUL and lone surrogates.
SCRAPS: Final = st.one_of(
    st.sampled_from(["", "-1", "-", ",", "0-", "9-0", "0-x", "0x", "99999999999999999999", "1e9", "\u0663", "1048576"]),
    st.sampled_from(["\0", "\ud800", "null", "[]", "{}", "true", "NaN", '"', "'", "0xf...f", "ffff:ff:01.0"]),
    st.sampled_from(["<", ">", "</a>", "&x;", "]]>", "<!--", "<!DOCTYPE a [", '<!ENTITY a "b">']),
    st.text(max_size=4),
)
IN_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - 50 small files for each example
FUZZ: Final = settings(
    max_examples=int(os.environ.get("NUMAPIN_FUZZ_EXAMPLES", "200")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


@st.composite
def damaged(draw: st.DrawFn, text: str) -> str:
    """Replace up to three parts of a good text with scraps, and sometimes cut it off."""
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(text)))
        text = text[:start] + draw(SCRAPS) + text[start + draw(st.integers(0, 12)) :]
    return text[: draw(st.integers(0, len(text)))] if draw(st.booleans()) else text


@contextmanager
def only_machine_file_errors() -> Iterator[None]:
    """Let no exception through, except the one that names the file."""
    try:
        yield
    except MachineFileError as error:
        assert error.message.startswith("fuzz")  # noqa: PT017 - not raising is fine too
        assert error.hint  # noqa: PT017


def parse_hwloc(text: str, *, source: str = "fuzz") -> Readings:
    """Parse hwloc's XML."""
    return read_hwloc(xmlfile.parse(text, source=source))


def parse_nccl(text: str, *, source: str = "fuzz") -> Readings:
    """Parse NCCL's XML."""
    return read_nccl(xmlfile.parse(text, source=source))


def test_the_good_documents_are_good() -> None:
    """The undamaged documents are accepted; otherwise fuzzing would test nothing but the first check."""
    assert [link.word for link in parse_hwloc(HWLOC).fabric] == ["XGMI"]
    assert len(parse_hwloc(HWLOC).pci) == 4
    assert [link.word for link in parse_nccl(NCCL).fabric] == ["XGMI2"]
    assert len(parse_nccl(NCCL).pci) == 5
    with tree({}) as root:
        assert [gpu.partition for gpu in build(read_sysfs(root, source="fuzz")).gpus if gpu.partition] == [1]
    assert Topology.from_json(JSON) == TOPOLOGY


@FUZZ
@given(damaged(HWLOC))
def test_damaged_hwloc_xml(text: str) -> None:
    """The hwloc reader accepts a damaged file or names it in an error."""
    with only_machine_file_errors(), suppress(ValueError):
        build(parse_hwloc(text))


@FUZZ
@given(damaged(NCCL))
def test_damaged_nccl_xml(text: str) -> None:
    """Both NCCL readers accept a damaged file or name it in an error."""
    with only_machine_file_errors(), suppress(ValueError):
        build(parse_nccl(text))
    with only_machine_file_errors():
        nccl_nodes(xmlfile.parse(text, source="fuzz"))


@FUZZ
@given(damaged(JSON))
def test_damaged_topology_json(text: str) -> None:
    """The reader of numapin's JSON accepts a damaged file or names it in an error."""
    with only_machine_file_errors():
        Topology.from_json(text, source="fuzz")


@FUZZ
@given(st.data())
def test_topology_json_with_another_value(data: st.DataObject) -> None:
    """A well-formed document with one wrong value is accepted, or is an error that names the file."""
    document = json.loads(JSON)
    place, key = data.draw(st.sampled_from(list(slots(document))))
    place[key] = data.draw(st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), SCRAPS, st.just([{}])))
    with only_machine_file_errors():
        Topology.from_json(json.dumps(document), source="fuzz")


@pytest.mark.parametrize("parse", [parse_hwloc, parse_nccl, Topology.from_json])
@FUZZ
@given(text=st.text(max_size=40))
def test_any_text(parse: object, text: str) -> None:
    """Arbitrary text is refused by every parser."""
    assert callable(parse)
    with pytest.raises(MachineFileError, match=r"^fuzz: "):
        parse(text, source="fuzz")


@FUZZ
@given(st.sampled_from(sorted(TREE)), st.data())
def test_a_damaged_sysfs_file(name: str, data: st.DataObject) -> None:
    """One damaged file below a root makes a value unknown, or is an error that names the file."""
    content = data.draw(st.one_of(damaged(TREE[name]), st.binary(max_size=8)))
    with tree({name: content}) as root, suppress(NumapinError):
        readings = read_sysfs(root, source="fuzz")
        assert {cpu.cpu for cpu in readings.cpus} <= {0, 1}
        assert all(cpu.siblings is None or cpu.cpu in cpu.siblings for cpu in readings.cpus)
        assert all(node.cpus <= {0, 1} for node in readings.nodes)
        with suppress(ValueError):  # what contradicts itself is refused
            build(readings)


@FUZZ
@given(st.sampled_from(sorted(name for name in TREE if name.endswith(("list", "online", "effective", "mems")))))
def test_a_garbled_sysfs_list(name: str) -> None:
    """An invalid list of CPUs or nodes is an error that names the file; a CPU's own switch is not a list."""
    with tree({name: "0-1,x"}) as root:
        if name.endswith("cpu1/online"):
            assert len(read_sysfs(root, source="fuzz").cpus) == 2
        else:
            with pytest.raises(MachineFileError, match=name.replace("/", "/+")):
                read_sysfs(root, source="fuzz")


@contextmanager
def tree(changes: dict[str, str | bytes]) -> Iterator[Path]:
    """Write the good tree with some files changed, for one example."""
    root = Path(mkdtemp(prefix="numapin-fuzz-", dir=IN_MEMORY if IN_MEMORY.is_dir() else None))
    made = set()
    try:
        for name, content in (TREE | changes).items():
            path = root / name
            if path.parent not in made:
                path.parent.mkdir(parents=True, exist_ok=True)
                made.add(path.parent)
            path.write_bytes(content if isinstance(content, bytes) else content.encode(errors="surrogatepass"))
        yield root
    finally:
        shutil.rmtree(root)


def slots(value: object) -> Iterator[tuple[Any, Any]]:
    """Yield every position in a document where another value could be."""
    if isinstance(value, dict):
        for key in value:
            yield value, key
            yield from slots(value[key])
    elif isinstance(value, list):
        for position, inner in enumerate(value):
            yield value, position
            yield from slots(inner)
