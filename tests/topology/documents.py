"""Machine files as hwloc and NCCL write them, from parts."""

from __future__ import annotations

from collections.abc import Iterable

T4 = "0302 [10de:1eb8] [10de:12a2] a1"


def mask(numbers: Iterable[int]) -> str:
    """Write a set as hwloc does: words of 32 bits with 0x before each."""
    value = sum(1 << number for number in numbers)
    words = [f"0x{value >> shift & 0xFFFFFFFF:08x}" for shift in range(0, max(value.bit_length(), 1), 32)]
    return ",".join(reversed(words))


def obj(kind: str, *inner: str, **attributes: object) -> str:
    written = "".join(f' {name}="{value}"' for name, value in attributes.items())
    return f'<object type="{kind}"{written}>\n{"".join(inner)}</object>\n'


def info(name: str, value: str) -> str:
    return f'<info name="{name}" value="{value}"/>\n'


def node(number: int, cpus: Iterable[int], **attributes: object) -> str:
    return obj("NUMANode", os_index=number, cpuset=mask(cpus), nodeset=mask([number]), **attributes)


def core(*cpus: int) -> str:
    return obj("Core", *(obj("PU", os_index=cpu, cpuset=mask([cpu])) for cpu in cpus), cpuset=mask(cpus))


def package(number: int, *inner: str, cpus: tuple[int, int, int, int], nodes: Iterable[int]) -> str:
    """Write a package with an L3 of its own around two cores of two CPUs."""
    a, b, c, d = cpus
    l3 = obj("L3Cache", core(a, c), core(b, d), cpuset=mask(cpus), depth=3)
    return obj("Package", *inner, l3, os_index=number, cpuset=mask(cpus), nodeset=mask(nodes))


def machine(*inner: str, version: str = "2.0", after: str = "", **sets: str) -> str:
    root = obj("Machine", *inner, os_index=0, cpuset=mask(range(8)), nodeset=mask(range(4)), **sets)
    head = '<?xml version="1.0" encoding="UTF-8"?>\n<!DOCTYPE topology SYSTEM "hwloc2.dtd">\n'
    return f'{head}<topology version="{version}">\n{root}{after}</topology>\n'


def two_packages(*devices: str, version: str = "2.0", after: str = "", **sets: str) -> str:
    """Write a machine of two packages with a node each: CPUs 0,1,4,5 and 2,3,6,7. Devices are below the second."""
    first = package(0, node(0, (0, 1, 4, 5), local_memory=4096), cpus=(0, 1, 4, 5), nodes=(0,))
    second = package(1, node(1, (2, 3, 6, 7), local_memory=8192), *devices, cpus=(2, 3, 6, 7), nodes=(1,))
    return machine(first, second, version=version, after=after, **sets)


def card(*inner: str, busid: str = "0000:18:00.0", pci_type: str = T4) -> str:
    return obj("PCIDev", *inner, pci_busid=busid, pci_type=pci_type, pci_link_speed="15.753846")


def interface(name: str, kind: object, *inner: str, **attributes: object) -> str:
    return obj("OSDev", *inner, name=name, osdev_type=kind, **attributes)


def distances(indexes: str, *values: str, **attributes: object) -> str:
    said = {"type": "NUMANode", "nbobjs": 2, "kind": 5, "name": "NUMALatency", "indexing": "os"} | attributes
    written = "".join(f' {key}="{value}"' for key, value in said.items())
    inner = "".join(f'<u64values length="9">{row}</u64values>' for row in values)
    return f'<distances2{written}><indexes length="4">{indexes}</indexes>{inner}</distances2>'


def pci(busid: str, pci_class: str, *inner: str, link: str = 'link_speed="16.0 GT/s PCIe" link_width="16"') -> str:
    return f'<pci busid="{busid}" class="{pci_class}" {link}>\n{"".join(inner)}</pci>\n'


def cpu(*inner: str, numaid: str | None = "0", affinity: str | None = "0000000f") -> str:
    said = {"numaid": numaid, "affinity": affinity, "arch": "x86_64"}
    written = "".join(f' {name}="{value}"' for name, value in said.items() if value is not None)
    return f"<cpu{written}>\n{''.join(inner)}</cpu>\n"


def system(*inner: str) -> str:
    return f'<system version="1">\n{"".join(inner)}</system>\n'
