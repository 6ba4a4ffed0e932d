"""Reading process trees: from /proc trees written here, ugly ones too, and from a real process with threads."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from numapin.errors import MachineError
from tests.unit.observe.seam import (
    CpuSet,
    MemoryKind,
    NcclLibrary,
    ObservedRank,
    Process,
    Role,
    children_of,
    cpu_set,
    environment_of,
    observe,
    parent_of,
    proc,
)

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20
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
    """Write a process with one thread."""
    folder = root / "proc" / str(pid)
    _task(folder, name, parent, **task)
    _task(folder / "task" / str(pid), name, parent, **task)
    (folder / "environ").write_text(environ)
    if maps is not None:
        (folder / "numa_maps").write_text(maps)
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Give a root with nothing but /proc, two nodes and eight CPUs."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    for kind, online in (("node", "0-1"), ("cpu", "0-7")):
        folder = tmp_path / "sys/devices/system" / kind
        folder.mkdir(parents=True)
        (folder / "online").write_text(f"{online}\n")
    return tmp_path


def _one(root: Path, pid: int = 10) -> ObservedRank:
    (rank,) = observe({0: pid}, root=root).ranks
    return rank


def _bytes(process: Process, kind: MemoryKind) -> dict[str, dict[int, int]]:
    """Return policy -> node -> bytes."""
    return {str(pages.policy): dict(pages.bytes_by_node) for pages in process.pages or () if pages.kind is kind}


def test_memory_by_kind_and_policy(root: Path) -> None:
    """Every kind of mapping is counted in bytes for each policy; only Python takes some characters for line ends."""
    named = "7f0006000000 prefer:1 file=/tmp/a\rb\u2028c\x85d mapped=1 N0=1 kernelpagesize_kB=4\n"
    odd = MAPS.encode() + named.encode() + b"7f0007000000 prefer:1 file=/tmp/\xff mapped=1\n"
    (_add(root, 10) / "numa_maps").write_bytes(odd)
    (process,) = _one(root).processes
    assert str(process.policy) == "prefer:1"
    assert {kind.value: _bytes(process, kind) for kind in MemoryKind} == {
        "heap": {"prefer:1": {1: MIB}},
        "anonymous": {"prefer:1": {0: MIB, 1: MIB + 2 * 2 * MIB}, "bind:0": {0: MIB}},  # two huge pages
        "stack": {"prefer:1": {1: 8 * 4096}},
        "file": {"prefer:1": {0: 2 * MIB + 4096}},
        "shared": {"prefer:1": {0: 2 * MIB, 1: MIB}},
        "torch-shared": {"prefer:1": {0: MIB}},
        "slot": {"prefer:1": {1: 2 * MIB}},
        "pinned": {},
    }


@pytest.mark.parametrize(
    ("devices", "hides_pinned", "is_pinned"),
    [
        ((), False, False),
        (("kfd",), True, False),
        (("dri/renderD128",), True, False),
        (("dri/renderD128", "nvidia0"), False, True),
    ],
)
def test_pinned_memory(root: Path, devices: tuple[str, ...], *, hides_pinned: bool, is_pinned: bool) -> None:
    """With NVIDIA's device open, a shared anonymous mapping comes from cudaHostAlloc; for others it is not known."""
    lines = "".join(f"7ffd0000000{number} default file=/dev/{device}\n" for number, device in enumerate(devices))
    _add(root, 10, maps=MAPS + lines)
    rank = _one(root)
    assert rank.hides_pinned is hides_pinned
    assert _bytes(rank.processes[0], MemoryKind.PINNED) == ({"prefer:1": {0: MIB}} if is_pinned else {})


def test_cpuset_of_a_rank(root: Path) -> None:
    """The CPUs that the cgroup of a rank allows are read; without a mount they are unknown."""
    folder = _add(root, 10)
    assert _one(root).cpuset is None
    (root / "proc/mounts").write_text("cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n")
    (folder / "cgroup").write_text("0::/job\n")
    (root / "sys/fs/cgroup/job").mkdir(parents=True)
    (root / "sys/fs/cgroup/job/cpuset.cpus.effective").write_text("0-1\n")
    assert _one(root).cpuset == CpuSet({0, 1})


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("default", "default"),
        ("local", "local"),
        ("prefer (many):0-1", "prefer (many):0-1"),
        ("bind=static:0,2", "bind:0,2"),
        ("weighted interleave:0-1", "weighted interleave:0-1"),
    ],
)
def test_policies(root: Path, words: str, shown: str) -> None:
    """Policies of two words and with flags are read; the stack's line is the main thread's policy."""
    _add(root, 10, maps=f"7ffc00000000 {words} stack anon=8 N1=8 kernelpagesize_kB=4\n")
    assert str(_one(root).processes[0].policy) == shown


def test_the_nccl_library_of_a_rank(root: Path) -> None:
    """A rank's library is found in its maps, with its package's version; workers and ranks without it have none."""
    path = "/venv/site-packages/nvidia/nccl/lib/libnccl.so.2"
    line = "7f1000000000-7f1000001000 r--p 00000000 08:01 17 "
    folder = _add(root, 10, environ="NCCL_IGNORE_CPU_AFFINITY=1\0")
    worker = _add(root, 11, 10)
    assert _one(root).processes[0].nccl is None
    for each, library in ((folder, "/usr/lib/libc.so.6"), (worker, path)):
        (each / "maps").write_text(f"{line}{library}\n")
    assert [process.nccl for process in _one(root).processes] == [None, None]
    (folder / "maps").write_text(f"{line}{path}\n")
    (folder / "root/venv/site-packages/nvidia_nccl_cu12-2.29.7.dist-info").mkdir(parents=True)
    rank = _one(root).processes[0]
    assert rank.nccl == NcclLibrary(library=path, version="2.29.7", ignores_affinity=True)
    assert rank.to_json()["nccl"] == {"library": path, "version": "2.29.7", "ignores_affinity": True, "narrows": True}


def test_tree_with_roles(root: Path) -> None:
    """The rank comes first; workers are known by torch's name or by a slot; grandchildren belong to the rank.

    Of memory that several processes share the largest count is taken; private memory is added up.
    """
    _add(root, 10)
    _add(root, 11, 10, name="pt_data_worker", maps="")  # it has let go of its memory
    _add(root, 12, 10, name="pt_data_worker:", maps="7ffc00000000 default stack\n")
    _add(root, 13, 10)
    _add(root, 14, 13, name="bash", maps="7ffc00000000 default stack\n")
    _add(root, 20)
    rank = _one(root)
    roles = [(process.pid, process.role) for process in rank.processes]
    assert roles == [(10, Role.RANK), (12, Role.WORKER), (13, Role.WORKER), (14, Role.OTHER)]
    assert not rank.is_gone
    assert rank.bytes_by_node([MemoryKind.SLOT]) == rank.bytes_by_node([MemoryKind.HEAP]) == {1: 2 * MIB}


def test_odd_texts_of_a_process(root: Path) -> None:
    """CPUs that are possible and not online do not count; names and OpenMP's variables lose control characters."""
    environ = "SECRET=x\0OMP_PROC_BIND=close\0broken\0OMP_PLACES=\x1b]0;x\x07{0}\n\x9b\0"
    _add(root, 10, cpus="0-127", name="a) R 1 (\x1b[31m", environ=environ)
    (process,) = _one(root).processes
    assert cpu_set.render(process.threads[0].cpus) == "0-7"
    assert process.threads[0].last_cpu == 2
    shown = [text.replace("\N{REPLACEMENT CHARACTER}", "?") for text in (process.name, *process.openmp)]
    assert shown == ["a) R 1 (?[31m", "OMP_PROC_BIND=close", "OMP_PLACES=?]0;x?{0}??"]
    assert environment_of(99, root=root) is None


@pytest.mark.parametrize("pid", [99, 10], ids=["no such process", "zombie"])
def test_gone(root: Path, pid: int) -> None:
    """A missing process or a zombie is a rank that is gone, not an error."""
    _add(root, 10, state="Z")
    rank = _one(root, pid)
    assert (rank.is_gone, rank.processes) == (True, ())


def test_what_vanishes_while_it_is_read_is_left_out(root: Path) -> None:
    """Threads whose files are gone, and a child without files, are skipped; the rest is read."""
    rank = _add(root, 10)
    _task(rank / "task" / "15", "gone", 1)
    (rank / "task" / "15" / "status").unlink()
    (root / "proc" / "16").mkdir()
    child = _add(root, 17, 10)
    (child / "task" / "17" / "stat").unlink()
    (child / "task" / "17" / "status").unlink()
    (child / "task" / "17").rmdir()
    (child / "task").rmdir()
    assert [[thread.tid for thread in process.threads] for process in _one(root).processes] == [[10]]


def test_kernel_without_numa(root: Path) -> None:
    """Without numa_maps and node directories memory is unknown, with the reason; there is one node."""
    _add(root, 10, maps=None)
    (root / "sys/devices/system/node/online").unlink()
    observed = observe({0: 10}, root=root)
    (process,) = observed.ranks[0].processes
    assert (process.pages, process.policy, process.unreadable) == (None, None, "the kernel has no numa_maps")
    assert observed.nodes == CpuSet({0})


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("stat", "10 (python) S 1 0"),
        ("stat", ""),
        ("task/10/stat", "10 (python) S x" + " 0" * 50),
        ("task/10/status", "Name:\tpython\n"),
        ("task/10/status", "Cpus_allowed_list:\t3-1\n"),
        ("numa_maps", "not an address\n"),
        ("numa_maps", "7f0000000000\n"),
    ],
)
def test_garbled_files_are_named(root: Path, file: str, text: str) -> None:
    """Text that no kernel writes is an error that names the file, not a traceback and not a guess."""
    (_add(root, 10) / file).write_text(text)
    with pytest.raises(MachineError) as caught:
        observe({0: 10}, root=root)
    assert str(root / "proc" / "10" / file) in caught.value.message


def test_parents(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process has the parent that the kernel reports, whatever its name; what hidepid=1 hides is skipped."""
    _add(root, 10, name="sh) 7 (", parent=5)
    _add(root, 11)
    read = proc.read

    def refuse(path: str) -> str:
        if "/11/" in path:
            raise PermissionError(1, "Operation not permitted", path)
        return read(path)

    monkeypatch.setattr(proc, "read", refuse)
    assert children_of(dict(proc.processes(root))) == {5: [10]}
    assert (parent_of(os.getpid()), parent_of(1 << 22)) == (os.getppid(), 0)  # one more than the largest process id


def test_real_process_with_threads() -> None:
    """A real child's threads, CPUs, policy and memory are read as the kernel and the child report them."""
    code = (
        "import mmap, os, sys, threading\n"
        f"memory = mmap.mmap(-1, {32 * MIB}, flags=mmap.MAP_PRIVATE)\n"
        f"memory.write(bytes({32 * MIB}))\n"
        "thread = threading.Thread(target=sys.stdin.read)\n"
        "thread.start()\n"
        "os.sched_setaffinity(thread.native_id, {min(os.sched_getaffinity(0))})\n"
        "print(thread.native_id, flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        tid = int(child.stdout.readline())
        (rank,) = observe({0: child.pid}).ranks
        assert child.pid in children_of()[os.getpid()]
        child.communicate("")
    (process,) = rank.processes
    cpus = {thread.tid: thread.cpus for thread in process.threads}
    own = CpuSet(os.sched_getaffinity(0))
    assert cpus == {child.pid: own, tid: CpuSet({min(own)})}
    if process.pages is not None:
        assert rank.bytes_by_node([MemoryKind.ANONYMOUS]).total() >= 32 * MIB
        assert process.policy is not None


def test_processes_that_come_and_go_are_no_errors() -> None:
    """Reading this process's tree over and over, while children start and end, never fails and always finds it."""
    end = threading.Event()

    def churn() -> None:
        while not end.is_set():
            subprocess.run(["true"], check=True)

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(20):
            assert not observe({0: os.getpid()}).ranks[0].is_gone
    finally:
        end.set()
        thread.join()
