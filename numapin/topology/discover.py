"""Read a machine. The only place that combines the readers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from numapin.base.cpu_set import CpuSet
from numapin.base.files import read_file
from numapin.errors import MachineError, MachineFileError, UsageError
from numapin.system.refusals import SYS_NICE
from numapin.system.threads import whole_cpuset
from numapin.topology.build import build, with_gpu_nodes
from numapin.topology.model import Topology
from numapin.topology.vendors import PCI_ORDER

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numapin.topology.readings import Readings

_EXAMPLE: Final = "example:"  # prefix of the names of built-in machines
_EXAMPLES: Final = Path(__file__).with_name("machines")
_SAVE: Final = "write a machine file with: numapin topo --save FILE"
_MAX_FILE_BYTES: Final = 64 << 20  # lstopo writes about 30 MB for 4096 CPUs


def discover(
    machine: Path | str | None = None,
    *,
    root: Path | None = None,
    environ: Mapping[str, str] | None = None,
    gpu_nodes: Iterable[tuple[str, int]] = (),
) -> Topology:
    """Read a machine: this host, a captured sysfs root, or a machine file.

    Args:
        machine: A machine file (numapin's JSON, hwloc 2 or 3 XML, or NCCL topology XML), or `example:NAME` for a
            built-in machine, such as "example:dgx-a100". None: this host.
        root: A directory that holds a captured `sys/` and, as far as captured, `proc/`.
        environ: Where CUDA_VISIBLE_DEVICES (AMD: ROCR_VISIBLE_DEVICES and HIP_VISIBLE_DEVICES; Intel:
            ZE_AFFINITY_MASK), CUDA_DEVICE_ORDER and NCCL_TOPO_FILE are looked up, usually `os.environ`. They apply to
            this host only.
        gpu_nodes: Pairs of a GPU (index as in `numapin topo`, UUID or PCI address) and its node. They override what
            was read.

    Returns:
        The machine as data. Nothing rereads it later.

    Raises:
        MachineError: The machine cannot be read.
        MachineFileError: The machine file is malformed.
        UsageError: Both `root` and `machine` are given, or `gpu_nodes` names a GPU or node that does not exist.

    Example:
        ```python
        import os
        import numapin

        topology = numapin.discover(environ=os.environ)
        print([(gpu.name, gpu.node) for gpu in topology.visible_gpus])
        ```
    """
    if root is not None and machine is not None:
        raise UsageError("--root and --machine both name a machine", "give one of them")
    if machine is not None:
        topology = _load(Path(machine))
    elif root is not None:
        from numapin.topology.sources.sysfs import read_sysfs

        topology = _built(read_sysfs(root, source=f"root {root}"), root)
    else:
        topology = _read_host(environ or {})
    return with_gpu_nodes(topology, gpu_nodes)


def _read_host(environ: Mapping[str, str]) -> Topology:
    from numapin.topology.sources.libnuma import read_libnuma
    from numapin.topology.sources.nvml import read_nvml
    from numapin.topology.sources.sysfs import read_sysfs

    from_sysfs = read_sysfs(Path("/"), source="live")
    notes = list(from_sysfs.notes)
    nccl_nodes: dict[str, int] = {}
    nccl_file = environ.get("NCCL_TOPO_FILE")
    if nccl_file:
        from numapin.topology.sources import nccl, xmlfile

        try:
            nccl_nodes = nccl.nccl_nodes(xmlfile.parse(_read_text(Path(nccl_file)), source=nccl_file))
        except MachineError as error:  # NCCL itself goes on without a file that it cannot read
            notes.append(f"NCCL_TOPO_FILE was not used: {error.message}")
    inherited = CpuSet(os.sched_getaffinity(0))
    if len(from_sysfs.nodes) > 1 and not inherited >= from_sysfs.online:  # srun and mpirun do this for one task
        with whole_cpuset() as possible:
            pass
        if not possible <= inherited:
            notes.append(
                f"numapin was started on CPUs {inherited} only, and plans inside them; CPUs "
                f"{possible} could be used: srun --cpu-bind=none, mpirun --bind-to none, no taskset"
            )
    readings = from_sysfs._replace(
        host=os.uname().nodename,
        allowed_cpus=inherited,
        allowed_known=True,
        nvml=read_nvml(),
        nccl_nodes=nccl_nodes,
    )
    # libnuma knows the allowed nodes; those of sysfs remain if the kernel forbids asking.
    from_libnuma = read_libnuma()
    if from_libnuma is not None:
        readings = readings._replace(nodes=from_libnuma[0], allowed_nodes=from_libnuma[1])
    elif len(readings.nodes) > 1:
        notes.append(f"the kernel forbids get_mempolicy (seccomp), so the nodes come from sysfs; {SYS_NICE}")
    try:
        return build(readings._replace(notes=tuple(notes)), environ=environ)
    except ValueError as error:
        raise MachineError(f"this machine contradicts itself: {error}", "check it with: numactl -H") from None


def _load(path: Path) -> Topology:
    """Load a built-in machine by name, or a file in a format known by its content: our JSON, hwloc XML, NCCL XML."""
    if str(path).startswith(_EXAMPLE):
        return Topology.from_json(read_example(str(path)), source=str(path))
    text = _read_text(path)
    start = text.lstrip()[:1]
    if start == "{":
        return Topology.from_json(text, source=str(path))
    if start != "<":
        raise MachineFileError(f"{path}: line 1: neither JSON nor XML: {text[:20]!r}", _SAVE)

    from numapin.topology.sources import xmlfile
    from numapin.topology.sources.hwloc import read_hwloc
    from numapin.topology.sources.nccl import read_nccl

    root = xmlfile.parse(text, source=str(path))
    readers = {"topology": read_hwloc, "system": read_nccl}
    if root.tag not in readers:
        raise root.error("this is neither hwloc's XML, which begins with <topology>, nor NCCL's, which has <system>")
    return _built(readers[root.tag](root), path)


def example_names() -> tuple[str, ...]:
    """Return the names of all built-in machines, sorted, with their prefix."""
    return tuple(sorted(f"{_EXAMPLE}{path.stem}" for path in _EXAMPLES.glob("*.json")))


def read_example(name: str) -> str:
    """Return the machine file of a built-in machine. Raises UsageError for an unknown name."""
    names = example_names()
    if name not in names:
        raise UsageError(f"--machine {name}: there is no built-in machine of that name", f"use {', '.join(names)}")
    return (_EXAMPLES / f"{name.removeprefix(_EXAMPLE)}.json").read_text(encoding="utf-8")


def _read_text(path: Path) -> str:
    try:
        data = read_file(str(path), max_bytes=_MAX_FILE_BYTES, what="machine file")
    except OSError as error:
        example = f"{_EXAMPLE}{path}"
        meant = f"; did you mean {example}?" if example in example_names() else ""
        raise MachineError(f"{path}: {error.strerror}{meant}", _SAVE) from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise MachineFileError(
            f"{path}: byte {error.start} is not UTF-8", "is it compressed? unpack it first"
        ) from None


def _built(readings: Readings, path: Path) -> Topology:
    """Build the topology of a described machine. A contradiction in it is an error in the file."""
    try:
        # CUDA's order on that machine is unknown, but a plan for it can always use the PCI order.
        return build(readings, environ=PCI_ORDER)
    except ValueError as error:
        raise MachineFileError(f"{path}: {error}", "capture the machine again") from None
