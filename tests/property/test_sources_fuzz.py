"""Machines of all shapes, well-formed and senseless: drivers' files, NICs, cgroups, and links between GPUs.

`test_parsers_fuzz.py` damages good texts; here files are drawn part by part, so that more of them is read. What is read
is planned, saved and read back. NUMAPIN_FUZZ_EXAMPLES sets the number of examples of each test.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Final, TypeVar

from hypothesis import given
from hypothesis import strategies as st

from numapin import Bind, Request, Topology, make_plan
from numapin.errors import NumapinError
from tests.property.seam import build, read_sysfs
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
    from tests.property.seam import Readings

T = TypeVar("T")
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


@st.composite
def mostly(draw: st.DrawFn, usual: st.SearchStrategy[T], odd: st.SearchStrategy[T]) -> T:
    """Draw something usual; once in a while something odd, so that most of a file is read."""
    return draw(odd if draw(st.integers(0, 15)) == 15 else usual)


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

PLACES: Final = st.sampled_from(["49408", "268484864"])  # c1:00.0, and its second partition
PROPERTIES: Final = st.fixed_dictionaries(
    {"location_id": mostly(PLACES, WORDS), "domain": mostly(st.just("0"), WORDS)},
    optional={"unique_id": WORDS, "simd_count": WORDS, "x y": WORDS, "": WORDS},
)
LINKS: Final = st.fixed_dictionaries(
    {"type": mostly(st.just(11), NUMBERS), "node_to": st.integers(0, 3), "weight": mostly(st.just(15), NUMBERS)},
    optional={"node_from": NUMBERS, "min_bandwidth": st.integers(0, 3) | NUMBERS, "max_bandwidth": NUMBERS},
)
VARIABLES: Final = st.dictionaries(
    st.sampled_from(["ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"]),
    st.lists(WORDS | st.just("GPU-0000000000000009"), max_size=4).map(",".join),
    max_size=3,
)


def lines(values: dict[str, object]) -> str:
    """Return properties as the KFD writes them."""
    return "".join(f"{name} {value}\n" for name, value in values.items())


NODE: Final = st.tuples(mostly(st.sampled_from(["7", "8", "9", "0"]), WORDS), PROPERTIES, LINKS)


@FUZZ
@given(
    st.fixed_dictionaries({"1": NODE, "2": NODE}, optional=dict.fromkeys(("0", "3", "x", "-1", "999999999"), NODE)),
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

DRIVERS: Final = st.sampled_from(["rsmi", "nvml", "ze"])
MODELS: Final = st.sampled_from(["NVIDIA H100", "AMD Instinct MI300X", "B200", "x"])
INFOS: Final = st.sampled_from(["AMDUUID", "NVIDIAUUID", "NodeGUID", "Address", "LevelZeroModel"])
FABRICS: Final = st.sampled_from(["NVLinkBandwidth", "XGMIBandwidth", "XeLinkBandwidth"])


@st.composite
def hwloc_devices(draw: st.DrawFn) -> str:
    """Draw PCI devices with devices of drivers below them, which matrices can name; inside each other or not."""
    parts = []
    for number in range(draw(st.integers(0, 4))):
        name = draw(mostly(st.just(f"{draw(DRIVERS)}{number}"), ESCAPED))
        kind = draw(mostly(st.sampled_from(["1", "2", "3", "16", "48"]), ESCAPED))
        infos = f'<info name="GPUModel" value="{draw(MODELS)}"/><info name="{draw(INFOS)}" value="{draw(ESCAPED)}"/>'
        below = f'<object type="OSDev" name="{name}" osdev_type="{kind}" gp_index="{70 + number}">{infos}</object>'
        address = draw(mostly(st.just(f"0000:{number + 1:02x}:00.0"), ADDRESSES))
        about = f"{draw(CLASSES)} [{draw(VENDORS)}:1eb8] [0000:0000] 00"
        parts.append(f'<object type="PCIDev" pci_busid="{address}" pci_type="{about}">{below}</object>')
    if len(parts) > 1 and draw(st.booleans()):
        return parts[0].removesuffix("</object>") + "".join(parts[1:]) + "</object>"
    return "".join(parts)


@st.composite
def matrices(draw: st.DrawFn) -> str:
    """Draw a matrix of links or latencies, which may not be square."""
    size = draw(st.integers(0, 4))
    name = draw(mostly(FABRICS, st.sampled_from(["NUMALatency", "x"])))
    kind = draw(st.sampled_from(["NUMANode", "OSDev", "PCIDev"]))
    indexing, tag = draw(st.sampled_from(["os", "gp"])), draw(st.sampled_from(["distances2", "distances2hetero"]))
    prefixes = st.sampled_from(["", "", "OSDev:", "PCIDev:", "Core:"])
    names = mostly(st.integers(70, 73).map(str), st.sampled_from(["0", "1", "9", "x"]))
    indexes = [f"{draw(prefixes)}{draw(names)}" for _ in range(size)]
    speeds = mostly(st.sampled_from(["0", "25000", "50000", "100000"]), NUMBERS.map(str))
    values = [draw(speeds) for _ in range(size * size + draw(st.integers(0, 15)) // 15)]
    inner = f"<indexes>{' '.join(indexes)} </indexes><u64values>{' '.join(values)} </u64values>"
    return f'<{tag} type="{kind}" nbobjs="{size}" kind="5" name="{name}" indexing="{indexing}">{inner}</{tag}>'


@FUZZ
@given(
    hwloc_devices(),
    st.lists(matrices(), max_size=2),
    mostly(st.sampled_from(["2.0", "3.0"]), st.sampled_from(["1.11", "", "x"])),
)
def test_hwloc_devices_and_matrices(devices: str, distances: list[str], version: str) -> None:
    """Any devices on PCI, and any matrices about them."""
    sets = 'cpuset="0x3" nodeset="0x3" allowed_cpuset="0x3" allowed_nodeset="0x1"'
    nodes = "".join(f'<object type="NUMANode" os_index="{n}" cpuset="0x{n + 1}" nodeset="0x{n + 1}"/>' for n in (0, 1))
    pus = "".join(f'<object type="Core"><object type="PU" os_index="{n}"/></object>' for n in (0, 1))
    machine = f'<object type="Machine" {sets}>{nodes}{pus}{devices}</object>'
    with only_machine_file_errors():
        use(parse_hwloc(f'<topology version="{version}">{machine}{"".join(distances)}</topology>'))


# --- NCCL's links ----------------------------------------------------------------------------------------------------

TARGETS: Final = st.sampled_from([f"0000:{number:02x}:00.0" for number in range(1, 9)])
ABOUT: Final = st.sampled_from(['sm="90"', 'sm="90" gcn="gfx942"', "", 'sm="x" gcn=""'])


@st.composite
def nccl_devices(draw: st.DrawFn, first: int) -> str:
    """Draw GPUs and NICs with links to each other, to switches, and to what is not there."""
    parts = []
    for number in range(draw(st.integers(0, 4))):
        links = "".join(
            f'<{draw(st.sampled_from(["nvlink", "xgmi"]))} target="{draw(mostly(TARGETS, ADDRESSES))}" '
            f'count="{draw(mostly(st.integers(0, 9).map(str), ESCAPED))}" '
            f'tclass="{draw(st.sampled_from(["0x068000", "0x030200", "x"]))}"/>'
            for _ in range(draw(st.integers(0, 3)))
        )
        index = draw(mostly(st.just(str(first + number)), ESCAPED))
        gpu = f'<gpu dev="{index}" {draw(ABOUT)}>{links}</gpu>' if draw(st.integers(0, 3)) else ""
        vendor = draw(st.sampled_from(["", 'vendor="0x1002"', 'vendor="0x10de"', 'vendor="x"', 'vendor="0xfffffffff"']))
        address = draw(mostly(st.just(f"0000:{first + number:02x}:00.0"), ADDRESSES))
        parts.append(f'<pci busid="{address}" class="0x{draw(CLASSES)}00" {vendor}>{gpu}</pci>')
    return "".join(parts)


@FUZZ
@given(nccl_devices(1), nccl_devices(5), mostly(st.just("1"), st.sampled_from(["0", "-1", "x", "1048576"])))
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
