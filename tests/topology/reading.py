"""Small machines that differ from an ordinary one in a detail, and the effect of the detail on the topology.

This is the only module of these tests that knows how a machine is read.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from numapin import Request, Topology, discover, make_plan
from numapin.errors import NumapinError
from tests.machines.roots import load, write_root
from tests.topology.documents import cpu, system, two_packages
from tests.topology.seam import (
    PCI_ORDER,
    CpuSet,
    Mig,
    NvmlReading,
    NvmlReadings,
    Pcie,
    Readings,
    build,
    fast_cores,
    nccl_nodes,
    read_sysfs,
    settle_gpus,
    with_gpu_nodes,
    xmlfile,
)

Files = Mapping[str, "str | bytes | None"]
Facts = dict[str, dict[str, object]]

_PLACES = {
    "cpu": "sys/devices/system/cpu/",
    "node": "sys/devices/system/node/",
    "pci": "sys/bus/pci/devices/",
    "kfd": "sys/class/kfd/kfd/topology/nodes/",
    "nvidia": "proc/driver/nvidia/gpus/",
    "up": "sys/devices/",
}
_DOCUMENTS = {"hwloc": two_packages(), "nccl": system(cpu())}
_IDS: Mapping[str, Callable[[dict[str, Any]], str]] = {
    "packages": lambda item: str(item["id"]),
    "nodes": lambda item: str(item["id"]),
    "cores": lambda item: str(item["id"]),
    "gpus": lambda item: str(item["index"]),
    "nics": lambda item: str(item["name"]),
    "links": lambda item: f"{item['a']}-{item['b']}",
    "speeds": lambda item: str(item["cpus"]),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A detail of a machine.

    Attributes:
        on: The machine that it is based on: "two", or a file of tests/machines.
        files: Contents of files by "PLACE:PATH" or path below the root; None removes a file or folder.
        devices: PCI devices by their path below sys/devices, with their files; each gets its link.
        nvml: NVML's GPUs. None: NVML was not asked.
        nvml_more: Other values of NVML's readings.
        nccl: Nodes of PCI addresses in NCCL's file.
        nccl_file: That file as text.
        document: A machine file in place of all of these.
        environ: The environment.
        gpu_nodes: The pairs of --gpu-nodes.
        gpus: The value of --gpus; the variables for the ranks are recorded then.
        plans: Whether the default plan's nodes and exactness are recorded.
    """

    on: str = "two"
    files: Files = field(default_factory=dict)
    devices: Mapping[str, Files] = field(default_factory=dict)
    nvml: Sequence[Mapping[str, Any]] | None = None
    nvml_more: Mapping[str, Any] = field(default_factory=dict)
    nccl: Mapping[str, int] = field(default_factory=dict)
    nccl_file: str = ""
    document: str | None = None
    environ: Mapping[str, str] = field(default_factory=lambda: PCI_ORDER)
    gpu_nodes: Sequence[tuple[str, int]] = ()
    gpus: str = ""
    plans: bool = False


def facts(case: Case, root: Path) -> dict[str, str]:
    """Return what the case's details change, or the error that they cause."""
    base = _base_facts(case.on)
    try:
        topology = read(case, root)
        found = _facts_of(topology) | _facts_of_ranks(case, topology)
    except NumapinError as error:
        return {"error": _plain(error.message, root), "hint": _plain(error.hint, root), "status": str(error.exit_code)}
    changed = {name: _change(base.get(name, {}), values) for name, values in found.items() if base.get(name) != values}
    return {name: _plain(text, root) for name, text in changed.items()} | {n: "gone" for n in base if n not in found}


def _change(before: Mapping[str, object], after: Mapping[str, object]) -> str:
    """Return the fields of an element that changed; of a new one, all that are known."""
    changed = {key: after.get(key, "unknown") for key in {**after, **before} if after.get(key) != before.get(key)}
    return "; ".join(f"{key} {_short(value)}" if key else _short(value) for key, value in changed.items())


@cache
def _base_facts(name: str) -> Facts:
    with TemporaryDirectory() as folder:
        return _facts_of(read(Case(on=name), Path(folder)))


@cache
def _base_readings(name: str) -> Readings:
    with TemporaryDirectory() as folder:
        return read_sysfs(written(Case(on=name), Path(folder)), source="ROOT")


def read(case: Case, root: Path) -> Topology:
    """Read a machine as `discover` reads the live one, with these answers of NVML and of NCCL's file."""
    if case.on in _DOCUMENTS:
        root.mkdir(exist_ok=True)
        (root / "machine").write_bytes((_DOCUMENTS[case.on] if case.document is None else case.document).encode())
        return discover(machine=root / "machine")
    has_files = case.files or case.devices
    readings = read_sysfs(written(case, root), source="ROOT") if has_files else _base_readings(case.on)
    nccl = nccl_nodes(xmlfile.parse(case.nccl_file, source="nccl.xml")) if case.nccl_file else case.nccl
    readings = readings._replace(nccl_nodes=dict(nccl))
    if case.nvml is not None or case.nvml_more:
        gpus = None if case.nvml is None else tuple(_nvml_gpu(index, gpu) for index, gpu in enumerate(case.nvml))
        readings = readings._replace(nvml=NvmlReadings(gpus=gpus, **case.nvml_more))
    return with_gpu_nodes(build(readings, environ=case.environ), case.gpu_nodes)


def _nvml_gpu(index: int, values: Mapping[str, Any]) -> NvmlReading:
    sets = {name: CpuSet.parse(values[name]) for name in ("memory_nodes", "cpus") if name in values}
    pcie = {"pcie": Pcie(**values["pcie"])} if "pcie" in values else {}
    mig = {"mig": tuple(Mig(uuid=name) for name in values["mig"])} if "mig" in values else {}
    return NvmlReading(**{"index": index, "uuid": f"GPU-{index}", **values, **sets, **pcie, **mig})


def written(case: Case, root: Path) -> Path:
    if case.on == "two":
        _write_files(root, _two_packages())
    else:
        write_root(load(case.on), root)
    for path, files in case.devices.items():
        _write_files(root, {f"up:{path}/{name}": content for name, content in files.items()})
        link = root / "sys/bus/pci/devices" / path.rpartition("/")[2]
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(f"../../../devices/{path}")
    _write_files(root, case.files)
    return root


def _write_files(root: Path, files: Files) -> None:
    for name, content in files.items():
        place, colon, rest = name.partition(":")
        path = root / (f"{_PLACES[place]}{rest}" if colon and place in _PLACES else name)
        if content is None:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else f"{content}\n".encode())


def _two_packages() -> Files:
    """Two packages of one node, two cores of two threads and one L3 each: CPUs 0-3,8-11 (siblings n and n+8)."""
    files: dict[str, str] = {"cpu:online": "0-3,8-11", "node:online": "0-1"}
    for number in (0, 1, 2, 3, 8, 9, 10, 11):
        both = "2-3,10-11" if number % 8 // 2 else "0-1,8-9"
        files |= {
            f"cpu:cpu{number}/topology/thread_siblings_list": f"{number % 8},{number % 8 + 8}",
            f"cpu:cpu{number}/topology/physical_package_id": str(number % 8 // 2),
            f"cpu:cpu{number}/cache/index3/level": "3",
            f"cpu:cpu{number}/cache/index3/shared_cpu_list": both,
        }
    for node, cpus, distance in ((0, "0-1,8-9", "10 21"), (1, "2-3,10-11", "21 10")):
        meminfo = f"Node {node} MemTotal: 2048 kB\nNode {node} MemFree: 1024 kB\nNode {node} MemUsed: 1024 kB"
        files |= {f"node:node{node}/cpulist": cpus, f"node:node{node}/distance": distance}
        files[f"node:node{node}/meminfo"] = meminfo
    return files


def _facts_of(topology: Topology) -> Facts:
    """Return the known fields of each element, and each scalar as a field without a name."""
    found: Facts = {}
    for name, value in topology.to_json().items():
        if name == "source":
            continue
        if name not in _IDS:
            found[name] = {"": value}
        elif isinstance(value, list):
            found |= {f"{name} {_IDS[name](item)}": _known(item) for item in value}
    notes = set(topology.notes)
    found["warnings beside notes"] = {"": [text for text in topology.warnings if text not in notes]}
    return found | {f"fast {fast.node}": {"": f"{fast.cpus} ({fast.rating})"} for fast in fast_cores(topology)}


def _known(item: Mapping[str, Any]) -> dict[str, object]:
    nothing: tuple[object, ...] = (None, [], {}, dict.fromkeys(("gen", "width", "max_gen", "max_width")))
    return {key: part for key, part in item.items() if part not in nothing}


def _facts_of_ranks(case: Case, topology: Topology) -> Facts:
    """Return what the ranks get to see, and the default plan, where the case asks for them."""
    found: Facts = {}
    if case.gpus:
        request, variables = settle_gpus(topology, Request(gpus=case.gpus), dict(case.environ))
        found["exported"] = {"": variables, "rank_gpus": request.rank_gpus}
    if case.plans:
        ranks = make_plan(topology, Request(gpus=case.gpus or None)).ranks
        found["ranks"] = {"": " ".join(f"{rank.node}{'' if rank.exact else '*'}" for rank in ranks)}
    return found


def _short(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _plain(text: str, root: Path) -> str:
    return text.replace(str(root), "ROOT")
