"""Machines of all shapes, well-formed and senseless: drivers' files, NICs, cgroups, and links between GPUs.

`test_parsers_fuzz.py` damages good texts; here files are drawn part by part, so that more of them is read. What is read
is planned, saved and read back. NUMAPIN_FUZZ_EXAMPLES sets the number of examples of each test.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from hypothesis import given
from hypothesis import strategies as st

from numapin.errors import NumapinError
from numapin.plan.make import make_plan
from numapin.plan.request import Bind, Request
from numapin.topology.build import build
from numapin.topology.model import Topology
from numapin.topology.sources.sysfs import read_sysfs
from tests.property.test_parsers_fuzz import (
    DEVICE,
    FUZZ,
    SCRAPS,
    only_machine_file_errors,
    parse_hwloc,
    parse_nccl,
    tree,
)

if TYPE_CHECKING:
    from numapin.topology.readings import Readings

NUMBERS: Final = st.one_of(
    st.integers(0, 9), st.sampled_from([-1, 10, 11, 15, 49408, 268484864, 2**31, 2**32 - 1, 2**63, 2**64 - 1, 10**20])
)
WORDS: Final = st.one_of(NUMBERS.map(str), SCRAPS)
ADDRESSES: Final = st.sampled_from(
    [
        "0000:18:00.0",
        "0000:18:00.1",
        "0000:c1:00.0",
        "0000:c6:00.0",
        "10000:01:00.0",
        "ffff:ff:01.0",
        "18:00.0",
        "x",
        "",
    ]
)
CLASSES: Final = st.sampled_from(["0300", "0302", "0380", "1200", "0200", "0207", "0c06", "0604", "x"])
VENDORS: Final = st.sampled_from(["10de", "1002", "8086", "15b3"])
ESCAPED: Final = WORDS.map(lambda word: word.translate({ord(c): None for c in "<>&\"'\0\ud800"}))


def use(readings: Readings, *, environ: dict[str, str] | None = None) -> None:
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


# --- the KFD, and the variables of its runtimes ----------------------------------------------------------------------

PROPERTIES: Final = st.dictionaries(
    st.sampled_from(["location_id", "domain", "unique_id", "simd_count", "drm_render_minor", "x y", ""]),
    WORDS,
    max_size=6,
)
LINKS: Final = st.dictionaries(
    st.sampled_from(["type", "node_from", "node_to", "weight", "min_bandwidth", "max_bandwidth"]), NUMBERS, max_size=6
)
VARIABLES: Final = st.dictionaries(
    st.sampled_from(["ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"]),
    st.lists(WORDS | st.just("GPU-0000000000000009"), max_size=4).map(",".join),
    max_size=3,
)


def lines(values: dict[str, object]) -> str:
    """Return properties as the KFD writes them."""
    return "".join(f"{name} {value}\n" for name, value in values.items())


@FUZZ
@given(
    st.dictionaries(st.sampled_from(["0", "1", "2", "3", "x", "-1", "999999999"]), st.tuples(WORDS, PROPERTIES, LINKS)),
    VARIABLES,
)
def test_kfd_nodes(nodes: dict[str, tuple[str, dict[str, object], dict[str, object]]], environ: dict[str, str]) -> None:
    """Any properties and links of the KFD's nodes, with any lists of visible devices."""
    at = "sys/class/kfd/kfd/topology/nodes"
    files: dict[str, str | bytes] = {}
    for name, (gpu_id, properties, link) in nodes.items():
        files |= {
            f"{at}/{name}/gpu_id": gpu_id,
            f"{at}/{name}/properties": lines(properties),
            f"{at}/{name}/io_links/0/properties": lines(link),
        }
    with tree(files) as root, suppress(NumapinError):
        use(read_sysfs(root, source="fuzz"), environ=environ)


# --- NICs and PCI devices --------------------------------------------------------------------------------------------


@FUZZ
@given(
    st.dictionaries(ADDRESSES.filter(bool), st.tuples(CLASSES, VENDORS, WORDS, WORDS, st.booleans()), max_size=4),
    st.dictionaries(st.sampled_from(["eth0", "ib0", "mlx5_0", "lo"]), st.tuples(WORDS, WORDS), max_size=3),
)
def test_pci_devices_and_nics(
    devices: dict[str, tuple[str, str, str, str, bool]], interfaces: dict[str, tuple[str, str]]
) -> None:
    """Any classes, vendors and nodes of PCI devices, and any types of interfaces, on PCI or not."""
    files: dict[str, str | bytes] = {}
    for address, (device_class, vendor, node, kind, has_verbs) in devices.items():
        at = f"sys/bus/pci/devices/{address}"
        folder = "infiniband" if has_verbs else "net"
        files |= {
            f"{at}/class": f"0x{device_class}00",
            f"{at}/vendor": f"0x{vendor}",
            f"{at}/numa_node": node,
            f"{at}/{folder}/n{len(files)}/type": kind,
        }
    for name, (kind, node) in interfaces.items():
        files |= {f"sys/class/net/{name}/type": kind, f"sys/class/net/{name}/device/numa_node": node}
    with tree(files) as root, suppress(NumapinError):
        use(read_sysfs(root, source="fuzz"))


# --- cgroups ---------------------------------------------------------------------------------------------------------

PATHS: Final = st.lists(st.sampled_from(["job", "..", ".", "", "a b", "x" * 300, "\0"]), max_size=5).map("/".join)
MOUNTS: Final = st.lists(
    st.tuples(
        st.sampled_from(["cgroup2", "cgroup", "cpuset", "none", ""]),
        st.sampled_from(["/cg", "/dev/cpuset", "/sys/fs/cgroup", "/../..", "", "/proc/self"]),
        st.sampled_from(["cgroup2", "cgroup", "cpuset", "tmpfs"]),
        st.sampled_from(["rw", "rw,cpuset", "rw,cpuset,noprefix", ""]),
    ).map(" ".join),
    max_size=4,
).map("\n".join)


@FUZZ
@given(MOUNTS, PATHS, PATHS, st.sampled_from(["cpus", "cpuset.cpus", "cpuset.cpus.effective"]), st.none() | WORDS)
def test_cpusets_of_captures(mounts: str, own: str, cgroup: str, file: str, status: str | None) -> None:
    """Any mounts and any paths of cgroups, with or without the status of the process."""
    files: dict[str, str | bytes] = {
        "proc/mounts": mounts,
        "proc/self/cpuset": own,
        "proc/self/cgroup": f"4:cpuset:{cgroup}\n0::{own}",
        f"cg/job/{file}": "0",
        f"dev/cpuset/job/{file}": "1",
    }
    if status is not None:
        files["proc/self/status"] = f"Cpus_allowed_list:\t{status}\nMems_allowed_list:\t0"
    with tree(files) as root, suppress(NumapinError):
        use(read_sysfs(root, source="fuzz"))


# --- hwloc's devices and matrices ------------------------------------------------------------------------------------


@st.composite
def hwloc_devices(draw: st.DrawFn) -> str:
    """Draw PCI devices with devices of drivers below them, inside each other or not."""
    names = st.tuples(st.sampled_from(["rsmi", "nvml", "ze", "cuda", "eth", ""]), WORDS).map("".join)
    parts = []
    for _ in range(draw(st.integers(0, 4))):
        name, number = draw(names | ESCAPED), draw(st.sampled_from(["1", "2", "3", "16", "48", "70", "71", "-1"]))
        infos = "".join(
            f'<info name="{key}" value="{draw(ESCAPED)}"/>'
            for key in draw(
                st.lists(st.sampled_from(["GPUModel", "AMDUUID", "NVIDIAUUID", "NodeGUID", "Address"]), max_size=2)
            )
        )
        name = name.translate({ord(c): None for c in "<>&\"'\0\ud800"})
        below = f'<object type="OSDev" name="{name}" osdev_type="{number}" gp_index="{number}">{infos}</object>'
        kind = f"{draw(CLASSES)} [{draw(VENDORS)}:1eb8] [0000:0000] 00"
        parts.append(f'<object type="PCIDev" pci_busid="{draw(ADDRESSES)}" pci_type="{kind}">{below}</object>')
    nested = draw(st.booleans())
    if nested and len(parts) > 1:
        return parts[0].replace("</object>", f"{''.join(parts[1:])}</object>", 1)
    return "".join(parts)


@st.composite
def matrices(draw: st.DrawFn) -> str:
    """Draw a matrix of links or latencies, which may not be square."""
    size = draw(st.integers(0, 4))
    name = draw(st.sampled_from(["NVLinkBandwidth", "XGMIBandwidth", "XeLinkBandwidth", "NUMALatency", "x"]))
    kind = draw(st.sampled_from(["NUMANode", "OSDev", "PCIDev"]))
    indexing, tag = draw(st.sampled_from(["os", "gp"])), draw(st.sampled_from(["distances2", "distances2hetero"]))
    prefixes = st.sampled_from(["", "", "OSDev:", "PCIDev:", "Core:"])
    indexes = [f"{draw(prefixes)}{draw(st.sampled_from(['0', '1', '70', '71', '9', 'x']))}" for _ in range(size)]
    values = draw(st.lists(NUMBERS.map(str), min_size=size * size, max_size=size * size + draw(st.integers(0, 1))))
    inner = f"<indexes>{' '.join(indexes)} </indexes><u64values>{' '.join(values)} </u64values>"
    return f'<{tag} type="{kind}" nbobjs="{size}" kind="5" name="{name}" indexing="{indexing}">{inner}</{tag}>'


@FUZZ
@given(
    st.lists(hwloc_devices(), max_size=2), st.lists(matrices(), max_size=2), st.sampled_from(["2.0", "3.0", "1.11", ""])
)
def test_hwloc_devices_and_matrices(devices: list[str], distances: list[str], version: str) -> None:
    """Any devices on PCI, and any matrices about them."""
    sets = 'cpuset="0x3" nodeset="0x3" allowed_cpuset="0x3" allowed_nodeset="0x1"'
    nodes = "".join(f'<object type="NUMANode" os_index="{n}" cpuset="0x{n + 1}" nodeset="0x{n + 1}"/>' for n in (0, 1))
    pus = "".join(f'<object type="Core"><object type="PU" os_index="{n}"/></object>' for n in (0, 1))
    machine = f'<object type="Machine" {sets}>{nodes}{pus}{"".join(devices)}</object>'
    with only_machine_file_errors():
        use(parse_hwloc(f'<topology version="{version}">{machine}{"".join(distances)}</topology>'))


# --- NCCL's links ----------------------------------------------------------------------------------------------------


@st.composite
def nccl_devices(draw: st.DrawFn) -> str:
    """Draw GPUs and NICs with links to each other, to switches, and to what is not there."""
    parts = []
    for _ in range(draw(st.integers(0, 4))):
        links = "".join(
            f'<{draw(st.sampled_from(["nvlink", "xgmi"]))} target="{draw(ADDRESSES)}" count="{draw(ESCAPED)}" '
            f'tclass="{draw(st.sampled_from(["0x068000", "0x030200", "x"]))}"/>'
            for _ in range(draw(st.integers(0, 3)))
        )
        about = draw(st.sampled_from(['sm="90"', 'gcn="gfx942"', "", 'sm="x" gcn=""']))
        gpu = f'<gpu dev="{draw(ESCAPED)}" {about}>{links}</gpu>' if draw(st.booleans()) else ""
        vendor = draw(st.sampled_from(["", 'vendor="0x1002"', 'vendor="0x10de"', 'vendor="x"', 'vendor="0xfffffffff"']))
        parts.append(f'<pci busid="{draw(ADDRESSES)}" class="0x{draw(CLASSES)}00" {vendor}>{gpu}</pci>')
    return "".join(parts)


@FUZZ
@given(nccl_devices(), nccl_devices(), st.sampled_from(["0", "1", "-1", "x", "1048576"]))
def test_nccl_links(first: str, second: str, node: str) -> None:
    """Any links between any devices of one or two nodes."""
    cpus = f'<cpu numaid="0" affinity="f">{first}</cpu><cpu numaid="{node}" affinity="f0">{second}</cpu>'
    with only_machine_file_errors():
        use(parse_nccl(f'<system version="1">{cpus}</system>'))


# --- several parts of a tree -----------------------------------------------------------------------------------------


@FUZZ
@given(
    st.dictionaries(
        st.sampled_from(["class", "vendor", "config", "numa_node", "local_cpulist", "max_link_speed"]), WORDS
    )
)
def test_a_device_with_several_odd_files(files: dict[str, str]) -> None:
    """Several files of a device are senseless at once."""
    with tree({f"{DEVICE}/{name}": content for name, content in files.items()}) as root, suppress(NumapinError):
        use(read_sysfs(root, source="fuzz"))
