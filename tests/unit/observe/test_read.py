"""Reading process trees: from /proc trees written here, ugly ones too."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from numapin.errors import MachineError
from tests.doctor.given import put
from tests.recorded.screens import compare
from tests.unit.observe.seam import MemoryKind, children_of, environment_of, observe, parent_of, proc

MAPS = r"""5604952f6000 prefer:1 file=/usr/bin/python3 mapped=512 N0=512 kernelpagesize_kB=4
5604ce34c000 prefer:1 heap anon=256 dirty=256 active=0 N1=256 kernelpagesize_kB=4
7f0000000000 prefer:1 anon=512 dirty=512 N0=256 N1=256 kernelpagesize_kB=4
7f0000800000 bind:0 anon=256 dirty=256 N0=256 kernelpagesize_kB=4
7f0001000000 prefer:1 file=/memfd:numapin-slot\040(deleted) dirty=256 N1=256 kernelpagesize_kB=4
7f0001200000 prefer:1 file=/memfd:numapin-slot\040(deleted) dirty=256 N1=256 kernelpagesize_kB=4
7f0001400000 prefer:1 file=/memfd:other\040(deleted) dirty=256 N1=256 kernelpagesize_kB=4
7f0002000000 prefer:1 file=/dev/shm/torch_17_1_0\040(deleted) dirty=256 N0=256 kernelpagesize_kB=4
7f0003000000 prefer:1 file=/dev/shm/nccl-aYxb3 dirty=256 N0=256 kernelpagesize_kB=4
7f0004000000 prefer:1 file=/anon_hugepage\040(deleted) huge anon=2 dirty=2 N1=2 kernelpagesize_kB=2048
7f0005000000 prefer:1 file=/dev/zero\040(deleted) dirty=256 N0=256 kernelpagesize_kB=4
7f0006000000 prefer:1
7ffc00000000 prefer:1 stack anon=8 dirty=8 N1=8 kernelpagesize_kB=4
"""


def _task(folder: Path, name: str, parent: int, *, cpus: str = "0-3", state: str = "S") -> None:
    folder.mkdir(parents=True)
    numbers = ["0"] * 34 + ["2"] + ["0"] * 13  # the last CPU is field 39
    (folder / "stat").write_text(f"{folder.name} ({name}) {state} {parent} {' '.join(numbers)}\n")
    (folder / "status").write_text(f"Name:\t{name}\nCpus_allowed:\tf\nCpus_allowed_list:\t{cpus}\n")


def _add(
    root: Path,
    pid: int,
    parent: int = 1,
    *,
    name: str = "python",
    maps: str | None = MAPS,
    environ: str = "A=1\0",
    **task: str,
) -> Path:
    folder = root / "proc" / str(pid)
    _task(folder, name, parent, **task)
    _task(folder / "task" / str(pid), name, parent, **task)
    (folder / "environ").write_text(environ)
    if maps is not None:
        (folder / "numa_maps").write_text(maps)
    return folder


def _root(root: Path) -> Path:
    """Make a root with nothing but /proc, two nodes and eight CPUs."""
    (root / "proc" / "self").mkdir(parents=True)
    for kind, online in (("node", "0-1"), ("cpu", "0-7")):
        folder = root / "sys/devices/system" / kind
        folder.mkdir(parents=True)
        (folder / "online").write_text(f"{online}\n")
    return root


def _with(root: Path, files: Mapping[str, str | bytes]) -> None:
    _add(root, 10)
    put(root, files)


def _devices(root: Path, names: str = "") -> None:
    lines = "".join(f"7ffd0000000{n} default file=/dev/{name}\n" for n, name in enumerate(names.split()))
    _add(root, 10, maps=MAPS + lines)


def _nccl(root: Path, of_rank: str, *, is_installed: bool = False) -> None:
    path, line = "/venv/site-packages/nvidia/nccl/lib/libnccl.so.2", "7f1000000000-7f1000001000 r--p 00000000 08:01 17 "
    folder = _add(root, 10, environ="NCCL_IGNORE_CPU_AFFINITY=1\0")
    (folder / "maps").write_text(f"{line}{of_rank or path}\n")
    (_add(root, 11, 10) / "maps").write_text(f"{line}{path}\n")
    if is_installed:
        (folder / "root/venv/site-packages/nvidia_nccl_cu12-2.29.7.dist-info").mkdir(parents=True)


def _tree(root: Path) -> None:
    """Make a rank with workers that are known by torch's name or by a slot, one that has ended, and a grandchild."""
    _add(root, 10)
    _add(root, 11, 10, name="pt_data_worker", maps="")  # it has let go of its memory
    _add(root, 12, 10, name="pt_data_worker:", maps=STACK_ONLY)
    _add(root, 13, 10)
    _add(root, 14, 13, name="bash", maps=STACK_ONLY)
    _add(root, 20)


def _vanishing(root: Path) -> None:
    rank = _add(root, 10)
    _task(rank / "task" / "15", "gone", 1)
    (rank / "task" / "15" / "status").unlink()
    (root / "proc" / "16").mkdir()
    shutil.rmtree(_add(root, 17, 10) / "task")


def _without_numa(root: Path) -> None:
    _add(root, 10, maps=None)
    (root / "sys/devices/system/node/online").unlink()


STACK: Final = "7ffc00000000 {} stack anon=8 N1=8 kernelpagesize_kB=4\n"
POLICIES: Final = ("default", "local", "prefer (many):0-1", "bind=static:0,2", "weighted interleave:0-1")
GARBLED: Final = (
    ("stat", "10 (python) S 1 0"),
    ("stat", ""),
    ("task/10/stat", "10 (python) S x" + " 0" * 50),
    ("task/10/status", "Name:\tpython\n"),
    ("task/10/status", "Cpus_allowed_list:\t3-1\n"),
    ("numa_maps", "not an address\n"),
    ("numa_maps", "7f0000000000\n"),
)
# Paths that only Python takes for several lines, and one that is not UTF-8.
ODD: Final = (
    "7f0006000000 prefer:1 file=/tmp/a\rb\u2028c\x85d mapped=1 N0=1 kernelpagesize_kB=4\n".encode()
    + b"7f0007000000 prefer:1 file=/tmp/\xff mapped=1\n"
)
CPUSET: Final = {
    "proc/mounts": "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n",
    "proc/10/cgroup": "0::/job\n",
    "sys/fs/cgroup/job/cpuset.cpus.effective": "0-1\n",
}
STACK_ONLY: Final = "7ffc00000000 default stack\n"
ENVIRON: Final = "SECRET=x\0OMP_PROC_BIND=close\0broken\0OMP_PLACES=\x1b]0;x\x07{0}\n\x9b\0"
CASES: Final[dict[str, Callable[[Path], object]]] = {
    "memory of every kind is counted in bytes for each policy, whatever the paths": partial(
        _with, files={"proc/10/numa_maps": MAPS.encode() + ODD}
    ),
    "a shared anonymous mapping is shared memory if no device is open": _devices,
    "with AMD's device it may be page-locked": partial(_devices, names="kfd"),
    "so it may with a render node": partial(_devices, names="dri/renderD128"),
    "with NVIDIA's device it comes from cudaHostAlloc": partial(_devices, names="dri/renderD128 nvidia0"),
    "the CPUs that the cgroup of a rank allows are read": partial(_with, files=CPUSET),
    **{
        f"the main thread's policy is the stack's: {words}": partial(_add, pid=10, maps=STACK.format(words))
        for words in POLICIES
    },
    "a rank without NCCL": partial(_nccl, of_rank="/usr/lib/libc.so.6"),
    "the NCCL of a rank, not of its worker, has its package's version": partial(_nccl, of_rank="", is_installed=True),
    "the rank comes first; workers are known by their name or a slot; grandchildren belong to it": _tree,
    "CPUs that are not online do not count; texts lose control characters": partial(
        _add, pid=10, cpus="0-127", name="a) R 1 (\x1b[31m", environ=ENVIRON
    ),
    "OpenMP binds threads by these variables": partial(
        _add, pid=10, maps=STACK_ONLY, environ="KMP_AFFINITY=granularity=fine,compact\0GOMP_CPU_AFFINITY=0-3\0"
    ),
    "not by these": partial(_add, pid=10, maps=STACK_ONLY, environ="KMP_AFFINITY=disabled\0GOMP_CPU_AFFINITY=\0"),
    "nor by any without binding": partial(
        _add, pid=10, maps=STACK_ONLY, environ="OMP_PROC_BIND=FALSE\0OMP_PLACES=cores\0GOMP_CPU_AFFINITY=0-3\0"
    ),
    "a missing process is a rank that is gone": lambda _: None,
    "so is a zombie": partial(_add, pid=10, state="Z"),
    "what vanishes while it is read is left out": _vanishing,
    "without NUMA memory is unknown, with the reason, and there is one node": _without_numa,
    **{
        f"garbled {file} is named: {text[:20]!r}": partial(_with, files={f"proc/10/{file}": text})
        for file, text in GARBLED
    },
}


def _observed(root: Path) -> list[str]:
    """Return what is read, a line for the rank, and for each process, its threads and its memory."""
    try:
        observed = observe({0: 10}, root=root)
    except MachineError as error:
        return [f"error: {error.message.replace(str(root), '')}"]
    (rank,) = observed.ranks
    found = {kind.value: dict(rank.bytes_by_node([kind])) for kind in MemoryKind if rank.bytes_by_node([kind])}
    more = {"gone": rank.is_gone, "hides pinned": rank.hides_pinned}
    lines = [
        f"nodes {observed.nodes}; cpuset {rank.cpuset}; {more}",
        f"bytes of all processes: {found}",  # the largest count of what they share, the sum of private memory
    ]
    for process in rank.processes:
        told: dict[str, Any] = process.to_json()
        threads, memory = told.pop("threads"), told.pop("memory")
        lines.append(json.dumps(told))
        lines += [f"  thread {json.dumps(thread)}" for thread in threads]
        lines += ["  memory unknown"] if memory is None else [f"  memory {json.dumps(pages)}" for pages in memory]
    return lines


def test_each_tree_is_read_as_recorded(tmp_path: Path) -> None:
    """Roles, threads, policies and memory of each tree are the recorded ones; NUMAPIN_UPDATE_GOLDEN=1 records them."""
    lines = []
    for number, (sentence, arrange) in enumerate(CASES.items()):
        root = _root(tmp_path / str(number))
        arrange(root)
        lines += [f"=== {sentence}", *_observed(root)]
    compare("\n".join([*lines, ""]), str(Path(__file__).parent / "recorded/read.txt"))


def test_parents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process has the parent that the kernel reports, whatever its name; what hidepid=1 hides is skipped."""
    root = _root(tmp_path)
    _add(root, 10, name="sh) 7 (", parent=5)
    _add(root, 11)
    read = proc.read

    def refuse(path: str) -> str:
        if "/11/" in path:
            raise PermissionError(1, "Operation not permitted", path)
        return read(path)

    monkeypatch.setattr(proc, "read", refuse)
    assert children_of(dict(proc.processes(root))) == {5: [10]}
    assert environment_of(99, root=root) is None
    assert (parent_of(os.getpid()), parent_of(1 << 22)) == (os.getppid(), 0)  # one more than the largest process id
