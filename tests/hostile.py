"""Small files that are expensive to read, generated on demand: machine files, plans, records and traces.

As a program, it runs every command that reads such a file, each in a child process, and prints one line of JSON per
case: the outcome, the CPU time, the peak memory of the child, and the size of the file. HOSTILE_BYTES is the size to
aim at; many cases are smaller because they reach another limit first. HOSTILE_SIZES="LEAST MOST" leaves out all cases
whose files are not larger than LEAST, or larger than MOST. HOSTILE_PART="1 2" runs the second of every two cases.
HOSTILE_ADDRESS_SPACE limits the memory of all processes.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import json
import os
import resource
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

FILE_BYTES: Final = int(os.environ.get("HOSTILE_BYTES", "5000000"))
LEAST_BYTES, MOST_BYTES = map(int, os.environ.get("HOSTILE_SIZES", f"-1 {1 << 40}").split())
PART, NUM_PARTS = map(int, os.environ.get("HOSTILE_PART", "0 1").split())
ALL: Final = "0-8191"


def fitting(items: Iterable[str], *, most: int, between: int = 0) -> list[str]:
    """Return as many items as fit into this number of characters, with so many between them."""
    chosen, size = [], 0
    for item in items:
        size += len(item) + between
        if size > most:
            break
        chosen.append(item)
    return chosen


def pad(items: Iterator[str], around: str, *, most: int = FILE_BYTES) -> str:
    """Put as many items as fit into `around`, in place of its %s."""
    return around.replace("%s", ",".join(fitting(items, most=most - len(around), between=1)))


def count(template: str, *, most: int | None = None) -> Iterator[str]:
    numbers = itertools.count() if most is None else range(most)
    return (template.replace("#", str(number)) for number in numbers)


def machine(**parts: str) -> str:
    """Return a machine file; each part is the content of a list."""
    lists = {name: parts.get(name, "") for name in ("packages", "nodes", "cores", "gpus", "nics", "links", "notes")}
    rest = "".join(f',"{name}":[{text}]' for name, text in lists.items())
    allowed = parts.get("allowed", ALL)
    return (
        f'{{"schema":"numapin.topology/1","host":"h","source":"s",'
        f'"allowed":{{"cpus":"{allowed}","nodes":"0-1023"}}{rest}}}'
    )


def fill(name: str, template: str, **others: str) -> str:
    """Return a machine file of 5 MB in which one list is as long as possible."""
    return pad(count(template), machine(**{name: "%s"}, **others))


def node(number: object, cpus: str, distances: str = "") -> str:
    kind = "cpu" if cpus else "memory"
    return (
        f'{{"id":{number},"kind":"{kind}","cpus":"{cpus}","package":0,"memory_bytes":9,"free_bytes":1,'
        f'"distances":{{{distances}}}}}'
    )


def gpu(number: object, where: str = '"node":0,"node_source":"sysfs"', cpus: str = ALL) -> str:
    return (
        f'{{"index":{number},"cuda_index":{number},"visible":true,"uuid":"GPU-{number}","pci":null,"name":"x",{where},'
        f'"cpus":"{cpus}","pcie":{{}},"mig":[]}}'
    )


CORE: Final = '{"id":#,"cpus":"#","node":0,"package":0,"l3":0}'
NIC: Final = '{"name":"eth#","pci":null,"node":0,"kind":"ethernet"}'
RANK: Final = (
    '{"local_rank":#,"gpu":null,"node":0,"cpus":"0-8191","nodes":"0","memory":"bind","num_threads":1,"exact":true,'
    '"reason":"r"}'
)


def largest_machine() -> str:
    """Return the largest machine that is accepted: its text is below 5 MB, apart from the distances."""
    cores = ",".join(
        f'{{"id":{n},"cpus":"{n}","node":{n // 8},"package":{n // 256},"l3":{n // 8 * 8}}}' for n in range(8192)
    )
    distances = ",".join(f'"{n}":21' for n in range(350))
    nodes = ",".join(
        node(n, f"{8 * n}-{8 * n + 7}", distances).replace('"package":0', f'"package":{n // 32}') for n in range(1024)
    )
    packages = ",".join(f'{{"id":{n},"nodes":"{32 * n}-{32 * n + 31}"}}' for n in range(32))
    gpus = ",".join(gpu(n, f'"node":{n},"node_source":"sysfs"', f"{8 * n}-{8 * n + 7}") for n in range(256))
    links = ",".join(f'{{"a":"gpu{n}","b":"gpu{m}","kind":"SYS"}}' for n in range(256) for m in range(n))
    return machine(
        cores=cores, nodes=nodes, packages=packages, gpus=gpus, links=links, nics=",".join(count(NIC, most=300))
    )


def overlapping_machine() -> str:
    """Return the largest machine in which every node lists every CPU, as with broken firmware."""
    cores = ",".join(f'{{"id":{n},"cpus":"{n}","node":0,"package":0,"l3":0}}' for n in range(8192))
    nodes = ",".join(node(n, ALL) for n in range(1024))
    gpus = ",".join(gpu(n) for n in range(256))
    return machine(cores=cores, nodes=nodes, gpus=gpus, packages='{"id":0,"nodes":"0-1023"}')


def hwloc(inside: str, cpus: str = '<object type="PU" os_index="0"/>') -> str:
    return f'<topology version="2.0"><object type="Machine" os_index="0">{inside}{cpus}</object></topology>'


def nccl(inside: str) -> str:
    return f'<system version="1">{inside}</system>'


def repeated(item: Callable[[int], str], *, most: int = FILE_BYTES, number: int = 1 << 60) -> str:
    return "".join(fitting(map(item, range(number)), most=most))


FULL_MASK: Final = ",".join(["0xffffffff"] * 256)


def mask_of(number: int) -> str:
    words = ["0xffffffff"] * 256
    words[number % 256] = f"0x{number + 1:08x}"
    return ",".join(words)


def pci_bus(number: int) -> str:
    return f"{number >> 16:04x}:{number >> 8 & 0xFF:02x}:{number & 0xFF:02x}.0"


def pus(number: int) -> str:
    return repeated(lambda n: f'<object type="PU" os_index="{n}"/>', number=number)


def numa_nodes(cpuset: Callable[[int], str], *, number: int = 1 << 60) -> str:
    return repeated(lambda n: f'<object type="NUMANode" os_index="{n}" cpuset="{cpuset(n)}"/>', number=number)


def xml_cases() -> Iterator[tuple[str, str]]:
    yield "hwloc-pus", hwloc("", repeated(lambda n: f'<object type="PU" os_index="{n % 8192}"/>'))
    yield "hwloc-one-core", hwloc("", f'<object type="L3Cache"><object type="Core">{pus(8192)}</object></object>')
    yield "hwloc-many-elements", hwloc("<a/>" * (FILE_BYTES // 4))
    yield "hwloc-attributes", hwloc("<a " + repeated(lambda n: f'a{n}="" ') + "/>")
    yield "hwloc-infos", hwloc(repeated(lambda n: f'<info name="{n}"/>'))
    yield "hwloc-nodes", hwloc(numa_nodes(lambda _: "0xf", number=8192), pus(8192))
    yield "hwloc-nodes-that-overlap", hwloc(numa_nodes(lambda _: FULL_MASK, number=1024), pus(8192))
    yield "hwloc-masks", hwloc(numa_nodes(mask_of), pus(8192))
    values = f"<indexes>0 1</indexes><u64values>{' '.join(['1'] * 2_000_000)}</u64values>"
    distances = f'<distances2 type="NUMANode" kind="5" indexing="os">{values}</distances2>'
    yield "hwloc-distances", hwloc("").replace("</topology>", f"{distances}</topology>")
    device = '<object type="PCIDev" pci_busid="{}" pci_type="0302 [10de:1eb8]"/>'
    yield "hwloc-gpus", hwloc(repeated(lambda n: device.format(pci_bus(n))))
    nic = '<object type="PCIDev" pci_busid="{}"><object type="OSDev" name="e{}" osdev_type="2"/></object>'
    yield "hwloc-nics", hwloc(repeated(lambda n: nic.format(pci_bus(n), n), number=4096), pus(8192))
    yield "hwloc-nested", hwloc('<object type="PCIDev">' * 90 + "<a/>" * 100_000 + "</object>" * 90)
    yield "nccl-nodes", nccl(repeated(lambda n: f'<cpu numaid="{n}" affinity="{n + 1:x}"/>'))
    yield "nccl-overlap", nccl(repeated(lambda n: f'<cpu numaid="{n}" affinity="{FULL_MASK}"/>', number=1024))
    yield "nccl-masks", nccl(repeated(lambda n: f'<cpu numaid="{n}" affinity="{mask_of(n)}"/>'))
    yield from gpu_cases()
    devices = repeated(lambda n: f'<pci busid="{pci_bus(n)}" class="0x030200"/>')
    yield "nccl-gpus", nccl(f'<cpu numaid="0" affinity="f">{devices}</cpu>')
    nics = repeated(lambda n: f'<pci busid="{pci_bus(n)}" class="0x020000"/>', number=4096)
    yield "nccl-nics", nccl(f'<cpu numaid="0" affinity="f">{nics}</cpu>')
    declared = f'<!DOCTYPE a [<!ATTLIST a z CDATA "{"x" * (FILE_BYTES // 2)}">]>'
    yield "xml-defaults", f"{declared}<topology version='2.0'>{'<a/>' * (FILE_BYTES // 10)}</topology>"
    yield "nccl-defaults", f"{declared}<system version='1'>{'<a/>' * (FILE_BYTES // 10)}</system>"
    yield "xml-deep", "<a>" * (FILE_BYTES // 3)
    yield "xml-text", nccl("x " * (FILE_BYTES // 2))
    yield "xml-comments", nccl("<!---->" * (FILE_BYTES // 7))


def gpu_cases() -> Iterator[tuple[str, str]]:
    amd = 'pci_type="1200 [1002:74a1] [0000:0000] 00"'
    yield "hwloc-amd-gpus", hwloc(repeated(lambda n: f'<object type="PCIDev" pci_busid="{pci_bus(n)}" {amd}/>'))
    parts = repeated(lambda n: f'<object type="OSDev" name="rsmi{n % 10000}" osdev_type="1" gp_index="{n}"/>')
    yield "hwloc-partitions", hwloc(f'<object type="PCIDev" pci_busid="0000:01:00.0" {amd}>{parts}</object>')
    deep = repeated(lambda n: f'<object type="OSDev" name="e{n}" osdev_type="2"/>')
    yield "hwloc-deep-interfaces", hwloc("<object>" * 95 + deep + "</object>" * 95)
    infos = repeated(lambda n: f'<info name="{n}" value="{n}"/>')
    yield "hwloc-infos-of-a-gpu", hwloc(f'<object type="PCIDev" pci_busid="0000:01:00.0" {amd}>{infos}</object>')
    target = '<nvlink target="0000:00:00.0" count="1" tclass="0x030200"/>'
    yield "nccl-links-of-a-gpu", nccl_gpus(1, repeated(lambda _: target, most=FILE_BYTES - 1000))
    each = repeated(lambda n: target.replace("00:00.0", f"{n % 256:02x}:00.0"), most=FILE_BYTES // 300)
    yield "nccl-links", nccl_gpus(256, each)
    xgmi = repeated(lambda n: f'<xgmi target="{pci_bus(n)}" count="1" tclass="0x068000"/>', most=FILE_BYTES // 300)
    yield "nccl-xgmi-to-switches", nccl_gpus(256, xgmi)
    yield "nccl-many-linked-gpus", nccl_gpus(FILE_BYTES // 500, target * 4)
    nets = repeated(lambda n: f'<net name="m{n}"/>')
    yield "nccl-nets", nccl(f'<cpu numaid="0" affinity="f"><pci busid="0000:01:00.0"><nic>{nets}</nic></pci></cpu>')
    gpus = repeated(lambda n: f'<pci busid="{pci_bus(n)}"><gpu dev="0"/></pci>')
    yield "nccl-deep-gpus", nccl('<cpu numaid="0" affinity="f">' + "<pci>" * 90 + gpus + "</pci>" * 90 + "</cpu>")


def nccl_gpus(number: int, links: str) -> str:
    gpus = repeated(lambda n: f'<pci busid="{pci_bus(n)}"><gpu dev="{n}" sm="90">{links}</gpu></pci>', number=number)
    return nccl(f'<cpu numaid="0" affinity="f">{gpus}</cpu>')


def json_cases() -> Iterator[tuple[str, str]]:
    yield "cores-of-all-cpus", fill("cores", '{"id":#,"cpus":"0-8191"}')
    yield "few-cores-of-all-cpus", machine(cores=",".join(count('{"id":#,"cpus":"0-8191"}', most=8192)))
    lists = (f'{{"id":{n},"cpus":"{n}-8191"}}' for n in range(8192))
    yield "cores-of-many-lists", pad(lists, machine(cores="%s"))
    yield "nodes", fill("nodes", node("#", ALL))
    yield "packages", fill("packages", '{"id":#,"nodes":"0-1023"}')
    yield "gpus", fill("gpus", gpu("#"), nodes=node(0, ALL))
    yield "nics", fill("nics", NIC, nodes=node(0, ALL))
    yield "links", fill("links", '{"a":"gpu#","b":"gpu0","kind":"SYS"}')
    yield "mig", machine(gpus=gpu(0).replace("[]", pad(count('{"uuid":"#"}'), "[%s]")))
    yield "distances", machine(nodes=node(0, ALL, pad(count('"#":1'), "%s")))
    yield "notes", fill("notes", '"#"')
    yield "one-note", machine(notes='"' + "x" * FILE_BYTES + '"')
    yield "long-list", machine(allowed="0," * (FILE_BYTES // 2))
    yield "long-host", machine().replace('"h"', '"' + "h " * (FILE_BYTES // 2) + '"', 1)
    yield "largest", largest_machine()
    yield "overlapping", overlapping_machine()
    nics, cores = ",".join(count(NIC, most=4096)), ",".join(count(CORE, most=8192))
    yield "many-nics", machine(nics=nics, nodes=node(0, ALL), cores=cores)


def values() -> Iterator[tuple[str, str]]:
    """Yield JSON that is not in any of our schemas."""
    yield "empty-objects", pad(iter(lambda: "{}", ""), '{"schema":[%s]}')
    yield "empty-lists", pad(iter(lambda: "[]", ""), '{"schema":[%s]}')
    yield "numbers", pad(count("#"), '{"schema":[%s]}')
    yield "keys", pad(count('"#":0'), "{%s}")
    yield "deep", '{"a":' * (FILE_BYTES // 5)
    yield "deep-lists", '{"schema":' + "[" * 900 + "]" * 900 + "}"
    yield "digits", '{"schema":' + "9" * FILE_BYTES + "}"
    yield "few-digits", '{"schema":' + "9" * 4000 + "}"
    yield "infinite", '{"schema":1e999}'
    yield "nan", '{"schema":NaN}'
    yield "string", '{"schema":"' + "x" * FILE_BYTES + '"}'
    yield "escapes", '{"schema":"' + "\\u0000" * (FILE_BYTES // 6) + '"}'
    yield "blank", "{" + " " * FILE_BYTES


def plan_cases() -> Iterator[tuple[str, str]]:
    top = '{"schema":"numapin.plan/1","bind":"node","memory":"none","warnings":[],"ranks":[%s]}'
    yield "ranks", pad(count(RANK), top)
    yield "most-ranks", pad(count(RANK, most=4096), top)
    ranks = [RANK.replace("#", str(n)) for n in range(4096)]
    yield "ranks-of-many-lists", pad((rank.replace("0-8191", f"{n}-8191") for n, rank in enumerate(ranks)), top)
    yield "long-reason", top.replace("%s", ranks[0].replace('"r"', '"' + "r " * (FILE_BYTES // 2) + '"'))
    yield "long-reasons", pad((rank.replace('"r"', '"' + "r " * 500 + '"') for rank in ranks), top)
    yield "warnings", pad(count('"#"'), top.replace("%s", "").replace('"warnings":[]', '"warnings":[%s]'))


EVENT: Final = '{"ph":"X","ts":#,"dur":1,"name":"k"}'


def trace_cases() -> Iterator[tuple[str, str]]:
    top = '{"traceEvents":[%s]}'
    # Numbers take the place of "#", so a "#" that is to stay is written as JSON's escape.
    kinds = {
        "events": EVENT,
        "kernels": '{"ph":"X","cat":"kernel","ts":#,"dur":9,"name":"k#"}',
        "copies": '{"ph":"X","cat":"gpu_memcpy","ts":#,"dur":9,"name":"Memcpy HtoD (Pageable -> Device)"}',
        "steps": '{"ph":"X","cat":"user_annotation","ts":#,"dur":9,"name":"ProfilerStep\\u0023#"}',
        "waits": '{"ph":"X","cat":"cpu_op","ts":#,"dur":9,"name":"enumerate(DataLoader)\\u0023#"}',
        "optimizer": '{"ph":"X","cat":"cpu_op","ts":#,"dur":99999,"name":"Optimizer.step\\u0023SGD"}',
        "operators": '{"ph":"X","cat":"cpu_op","ts":#,"dur":99999999,"name":"o#"}',
    }
    for name, template in kinds.items():
        yield name, pad(count(template), top)
    call = (
        '{"ph":"X","cat":"cuda_runtime","ts":#,"dur":9,"name":"cudaStreamSynchronize","tid":0,"args":{"correlation":#}}'
    )
    operator = '{"ph":"X","cat":"cpu_op","ts":0,"dur":99999999,"name":"o","args":{"External id":1}}'
    copy = (
        '{"ph":"X","cat":"gpu_memcpy","ts":#,"dur":9,"name":"Memcpy HtoD (Pageable -> Device)",'
        '"args":{"correlation":#,"External id":1}}'
    )
    both = (text for one in zip(count(call), count(copy), strict=False) for text in one)
    yield "waits-of-copies", pad(iter((operator, *itertools.islice(both, 20_000))), top)
    event = EVENT.replace("#", "0")
    loads = '{"traceEvents":[' + event + '],"numapin":{"loads":[%s]}}'
    yield "loads", pad(count("[#,#,#]"), loads)
    yield "loads-of-one", pad(count("[0,#,1#]"), loads)
    for name, (long, short) in OVERLAPPING.items():
        yield name, pad(overlapping(long, short), top)
    yield "copy-name", top.replace("%s", COPY.replace("Pageable", " -> " * (FILE_BYTES // 4)).replace("#", "1"))
    yield "copy-names", pad(count(COPY.replace("Pageable", " -> " * 50)), top)


STEP: Final = '{"ph":"X","cat":"user_annotation","ts":#,"dur":9,"name":"ProfilerStep\\u0023"}'
KERNEL: Final = '{"ph":"X","cat":"kernel","ts":#,"dur":9,"name":"k"}'
COPY: Final = '{"ph":"X","cat":"gpu_memcpy","ts":#,"dur":9,"name":"Memcpy HtoD (Pageable -> Device)"}'
WAIT: Final = '{"ph":"X","cat":"cpu_op","ts":#,"dur":9,"name":"enumerate(DataLoader)\\u0023"}'
OVERLAPPING: Final = {
    "steps-over-kernels": (STEP, KERNEL),
    "copies-over-kernels": (COPY, KERNEL),
    "copies-over-steps": (COPY, STEP),
    "waits-over-steps": (WAIT, STEP),
}


def overlapping(long: str, short: str) -> Iterator[str]:
    for number in itertools.count():
        yield long.replace("#", str(number)).replace('"dur":9', '"dur":99999999')
        yield short.replace("#", str(number * 10))


def record_cases() -> Iterator[tuple[str, str]]:
    top = '{"schema":"numapin.observed/1","local_rank":0,"restart":0,"pid":1,"start":1,"host":"h","applied":{%s}}'
    yield "record", pad(count('"#":[{}]'), top)


def root_cases() -> Iterator[tuple[str, str]]:
    """Make captures in the folder "root", whose files are small and many; the text is unused."""
    makers: dict[str, Callable[[Path], None]] = {
        "few-winding-links": lambda root: winding_capture(root, 256),
        "winding-links": lambda root: winding_capture(root, 8192),
        "kfd-nodes": lambda root: kfd_capture(root, num_links=0),
        "kfd-links": lambda root: kfd_capture(root, num_links=1000),
        "long-kfd-links": lambda root: kfd_capture(root, num_links=1000, padding=60_000),
        "interfaces": interface_capture,
        "pci-devices": pci_capture,
        "mounts": lambda root: process_capture(
            root, mounts=repeated(lambda n: f"a /m{n} cpuset rw\n", most=1 << 20), cpuset="/job"
        ),
        "one-mount": lambda root: process_capture(root, mounts=f"a /m cgroup2 {'rw,' * 300_000}\n", cpuset="/job"),
        "long-cpuset": lambda root: process_capture(root, mounts="a /m cgroup2 rw\n" * 100, cpuset="/a" * 500_000),
        "long-cgroup": lambda root: process_capture(
            root, mounts="a /m cgroup2 rw\n" * 60_000, cpuset="/", cgroup=f"0::{'/a' * 120}\n" * 64
        ),
        "cgroups": lambda root: process_capture(
            root, mounts="a /m cgroup rw,cpuset\n" * 1000, cpuset="", cgroup="1:cpuset:/a\n" * 60_000
        ),
        "status": lambda root: process_capture(root, status="Cpus_allowed_list:\t\n" * 50_000),
        "status-of-blanks": lambda root: process_capture(root, status="Cpus_allowed_list:" + "\t" * 1_000_000),
        "status-list": lambda root: process_capture(root, status="Cpus_allowed_list:" + "0," * 500_000),
        "list": lambda root: process_capture(root, online=",".join(str(cpu) for cpu in range(0, 20_000, 2))),
        "driver": driver_capture,
    }
    for number, (name, make) in enumerate(makers.items()):
        if number % NUM_PARTS != PART:  # another process makes it
            yield name, ""
            continue
        make(Path("root"))
        yield name, ""
        shutil.rmtree("root")


def put(root: Path, texts: Mapping[str, str]) -> None:
    """Write files, and the folders in which they are."""
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="ascii")


def link(folder: Path, names: Iterable[object], target: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / str(name)).symlink_to(target)


def small_capture(root: Path, online: str = "0-3") -> None:
    for cpu in range(4):
        (root / f"sys/devices/system/cpu/cpu{cpu}").mkdir(parents=True)
    put(root, {"sys/devices/system/cpu/online": f"{online}\n"})


def process_capture(
    root: Path, *, mounts: str = "", cpuset: str = "", cgroup: str = "", status: str = "", online: str = "0-3"
) -> None:
    small_capture(root, online)
    (root / "proc/self").mkdir(parents=True)
    texts = {"mounts": mounts, "self/cpuset": cpuset, "self/cgroup": cgroup, "self/status": status}
    put(root / "proc", {name: text for name, text in texts.items() if text})


def pci_device(root: Path, address: str, device_class: str, vendor: str) -> None:
    put(root / "sys/bus/pci/devices" / address, {"class": f"{device_class}\n", "vendor": f"{vendor}\n"})


def kfd_capture(root: Path, *, num_links: int, padding: int = 0) -> None:
    """Write a KFD of 1280 nodes that are one folder, with links to one file."""
    small_capture(root)
    pci_device(root, "0000:01:00.0", "0x120000", "0x1002")
    lines = "a 1\n" * (padding // 4)
    put(root / "one", {"gpu_id": "1\n", "properties": f"location_id 256\n{lines}"})
    put(root / "link", {"properties": f"type 11\nnode_to 1\n{lines}"})
    link(root / "one/io_links", range(num_links), "/link")
    link(root / "sys/class/kfd/kfd/topology/nodes", range(1280), "/one")


def interface_capture(root: Path) -> None:
    """Write many interfaces that are not on PCI, each of which is a link to one folder."""
    small_capture(root)
    put(root, {"one/type": "1\n"})
    link(root / "sys/class/net", (f"e{number}" for number in range(20_000)), "/one")


def pci_capture(root: Path) -> None:
    """Write many GPUs, each of which is a link to one folder with many names."""
    small_capture(root)
    pci_device(root, "one", "0x038000", "0x8086")
    devices = root / "sys/bus/pci/devices"
    link(devices, (pci_bus(number + 256) for number in range(5_000)), "one")
    for number in range(5_000):
        (devices / f"one/tile{number}").touch()


def driver_capture(root: Path) -> None:
    """Write many GPUs of NVIDIA's driver whose information is one long file."""
    small_capture(root)
    pci_device(root, "one", "0x030200", "0x10de")
    put(root, {"one/information": "Model: x\n" * 100_000})
    addresses = [pci_bus(number) for number in range(1_000)]
    link(root / "sys/bus/pci/devices", addresses, "one")
    link(root / "proc/driver/nvidia/gpus", addresses, "/one")


def winding_capture(root: Path, num_cpus: int) -> None:
    """Write a capture in which each CPU's files lie behind 38 links, each of which winds through 800 folders."""
    (root / "a").mkdir(parents=True)
    put(root, {"sys/devices/system/cpu/online": f"0-{num_cpus - 1}\n", "t/l0": "0\n"})
    for n in range(38):
        link(root / "t", [f"l{n + 1}"], f"/{'a/../' * 800}t/l{n}")
    link(root / "one/topology", ("thread_siblings_list", "physical_package_id"), "/t/l38")
    link(root / "sys/devices/system/cpu", (f"cpu{n}" for n in range(num_cpus)), "/one")


VIEWS: Final = (
    ("topo",),
    ("topo", "--json"),
    ("topo", "--format", "matrix"),
    ("topo", "--format", "html", "--plan"),  # which has the SVG
    ("plan", "--nproc-per-node", "4096"),
)
_VALID: Final = "valid.json"
_DISCOVER: Final = ("numapin.topology.discover", "discover")
READERS: Final = {**dict.fromkeys(("json", "xml", "root"), _DISCOVER), "trace": ("numapin.cli.trace", "read_report")}
"""What reads the file of each command of a kind: module and function."""


def main() -> None:
    """Run the cases of the kinds in argv[2:] in the folder argv[1]; "KIND CASE" runs only this case."""
    if most := int(os.environ.get("HOSTILE_ADDRESS_SPACE", "0")):
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    os.chdir(sys.argv[1])
    Path(_VALID).write_text(machine(nodes=node(0, ALL), cores=",".join(count(CORE, most=8192))), encoding="ascii")
    warm_up()
    for word in sys.argv[2:]:
        kind, _, only = word.partition(" ")
        make, commands = KINDS[kind]
        for number, (name, text) in enumerate(make()):
            if (only and name != only) or number % NUM_PARTS != PART:
                continue
            num_bytes = Path("case").write_text(text, encoding="utf-8")
            del text  # a child's peak begins with what its parent has
            if not LEAST_BYTES < num_bytes <= MOST_BYTES:
                continue
            lines = {
                f"{kind} {name}: {' '.join(words)}": [word.replace("FILE", "case") for word in words]
                for words in commands
            }
            if kind in READERS:
                answer_all(lines, num_bytes, *READERS[kind])
            else:
                for title, words in lines.items():
                    answer(title, words, num_bytes)


def answer_all(lines: Mapping[str, list[str]], size: int, module: str, reader: str) -> None:
    """Run commands that read the same file one after another, until one has no result.

    The first reads it, in a child; each of the others runs in a child of that one, and finds what was read. Each answer
    of theirs has the time and the memory of that reading, too.
    """
    (first, words), *others = lines.items()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            readings = read_once(module, reader)
            came = _outcome(words)
            tell(first, came, size, [resource.getrusage(resource.RUSAGE_SELF)])
            if came == "result":  # else the others end in the same way, or have nothing to show
                gc.collect()
                all(answer(title, own, size, reading=readings[0]) == "result" for title, own in others)
            status = 0
        finally:
            os._exit(status)
    _, status, usage = os.wait4(child, 0)
    if status:
        tell(first, f"ended with wait status {status}", size, [usage])


def read_once(module: str, reader: str) -> list[resource.struct_rusage]:
    """Make a function read only at its first call; return the list that then gets what this took."""
    at = importlib.import_module(module)
    read: Callable[..., object] = getattr(at, reader)
    results: list[object] = []
    readings: list[resource.struct_rusage] = []

    def first(*args: object, **options: object) -> object:
        if not results:
            results.append(read(*args, **options))
            readings.append(resource.getrusage(resource.RUSAGE_SELF))
        return results[0]

    setattr(at, reader, first)
    return readings


def answer(name: str, words: list[str], size: int, *, reading: resource.struct_rusage | None = None) -> str:
    """Run one command in a child of this process, print its outcome, time and peak memory, and return the outcome."""
    told, end = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(end, _outcome(words).encode(errors="replace"))
        os._exit(0)
    os.close(end)
    with open(told, encoding="utf-8") as pipe:  # noqa: PTH123 - a descriptor
        came = pipe.read()
    _, status, usage = os.wait4(child, 0)
    if status:
        came = f"ended with wait status {status}"
    tell(name, came, size, [usage, *([reading] if reading else [])])
    return came


def tell(name: str, came: str, size: int, used: Sequence[resource.struct_rusage]) -> None:
    seconds, peak_mb = sum(one.ru_utime + one.ru_stime for one in used), max(one.ru_maxrss for one in used) / 1024
    print(json.dumps([name, came, round(seconds, 2), round(peak_mb), size]), flush=True)  # noqa: T201


def _outcome(words: list[str]) -> str:
    with (
        Path(os.devnull).open("w", encoding="utf-8") as nothing,
        contextlib.redirect_stdout(nothing),
        contextlib.redirect_stderr(nothing),
    ):
        try:
            run(words)
        except SystemExit as left:
            return f"status {left.code}"
        except BaseException as error:  # noqa: BLE001 - the test decides
            return f"{type(error).__name__}: {str(error)[:300]}"
    return "result"


def warm_up() -> None:
    """Import what the commands need, so that the time of an answer is that of its file."""
    for words in VIEWS:
        _outcome([*words, "--machine", "example:p4d"])
    _outcome(["trace", "--read", "nothing"])
    gc.freeze()  # the modules' objects would be copied into each child that looks for garbage


def run(words: list[str]) -> None:
    """Run a command of numapin in this process, or read a file as a rank does."""
    from tests.seam import numapin

    if words[0] == "slice":
        from tests.seam import find_slice, find_task

        find_slice(find_task({"LOCAL_RANK": "0"}), {}, file="case")
    elif words[0] == "record":
        from tests.seam import _Record

        _Record.read("case", Path("case").read_text(encoding="utf-8"))
    elif words[0] == "binding":
        from tests.seam import _own_binding, find_task

        environ = {"LOCAL_RANK": "0", "NUMAPIN_BINDING": Path("case").read_text(encoding="utf-8")}
        _own_binding(find_task(environ), environ)
    else:
        numapin.main(list(words), prog_name="numapin", standalone_mode=False)


_OF_MACHINE: Final = tuple((*words, "--machine", "FILE") for words in VIEWS)
KINDS: Final[dict[str, tuple[Callable[[], Iterator[tuple[str, str]]], tuple[tuple[str, ...], ...]]]] = {
    "json": (json_cases, _OF_MACHINE),
    "xml": (xml_cases, _OF_MACHINE),
    "plan": (
        plan_cases,
        (
            *(("topo", "--machine", _VALID, *words, "--plan", "FILE") for words in ((), ("--format", "html"))),
            ("slice",),
            ("binding",),
        ),
    ),
    "record": (record_cases, (("record",),)),
    "root": (root_cases, (("topo", "--root", "root"), ("plan", "--root", "root", "--nproc-per-node", "8"))),
    "values": (
        values,
        (
            ("plan", "--machine", "FILE"),
            ("slice",),
            ("binding",),
            ("record",),
            ("trace", "--read", "FILE", "--json"),
        ),
    ),
    "trace": (trace_cases, (("trace", "--read", "FILE", "--output", "out"), ("trace", "--read", "FILE", "--json"))),
}

if __name__ == "__main__":
    main()
