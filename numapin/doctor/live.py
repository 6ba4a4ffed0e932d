"""The doctor's facts about the running machine.

Memory policies are tried in a forked child, so this process does not change. NVML is shut down again. torch is not
imported, and nothing needs root.
"""

from __future__ import annotations

import errno
import mmap
import os
import pwd
import re
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final

from numapin.base.text import printable
from numapin.data import torch_names
from numapin.doctor.check import GpuUser, KernelLog, Live, Xid
from numapin.errors import LibnumaError, NumapinError
from numapin.launcher.rehearse import in_child
from numapin.observe.find import is_drivers_pid
from numapin.system import memory, nccl_files, numa, proc
from numapin.topology.address import pci_address
from numapin.topology.sources.libnuma import load
from numapin.topology.sources.nvml import read_nvml

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numapin.topology.model import Topology
    from numapin.topology.readings import NvmlReadings

_NCCL_PACKAGES: Final = ("nvidia-nccl-cu11", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
_SHM: Final = "/dev/shm"  # noqa: S108 - only its size is read
_MOST_RECORDS: Final = 1 << 17  # of the kernel's buffer, which may be filled while it is read
_UNTIL_IDLE_S: Final = 5.0
_LOOK_EVERY_S: Final = 0.5
_RECORD: Final = re.compile(r"([0-9]+),([0-9]+),([0-9]+),[^;]*;(.*)")
_XID: Final = re.compile(
    r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-7])?)[^)\[]*\): ([0-9]{1,6}), ?(.*)"
)
"""An error of the driver. The kernel's line on a crash begins with the program's name, which any user chooses: its 15
characters have no room for a whole address."""


def read_live(topology: Topology, environ: Mapping[str, str], *, must_be_idle: bool = False) -> Live:
    """Read the facts of the running machine; memory policies are tried on a node that this process may use.

    With `must_be_idle`, look at the GPUs again for some seconds while processes compute on them: the processes of a job
    that has ended take time to end.
    """
    libnuma, refused = None, None
    try:
        load()
    except LibnumaError as error:
        libnuma = error.message
    else:
        allowed = [node.id for node in topology.cpu_nodes if node.id in topology.allowed.nodes]
        refused = try_policies(min(allowed, default=0))
    try:
        shm = os.statvfs(_SHM)
    except OSError:
        shm = None
    torch, torch_off = _version("torch"), ""
    if torch is not None:  # its data path may be off with this torch, which torch's files show
        site_packages = Path(str(metadata.distribution("torch").locate_file("")))
        torch_off = torch_names.explained_in(site_packages, torch_names.TORCH, torch)
    nvml, end_s = read_nvml(with_health=True), time.monotonic() + _UNTIL_IDLE_S
    while must_be_idle and gpu_users(nvml) and time.monotonic() < end_s:
        time.sleep(_LOOK_EVERY_S)
        nvml = read_nvml(with_health=True)
    return Live(
        refused=refused,
        nvml=nvml,
        gpu_users=gpu_users(nvml),
        kernel_log=read_kernel_log(),
        libnuma=libnuma,
        torch=torch,
        torch_off=torch_off,
        strays=_strays(),
        python=sys.version_info[:3],
        nccl=nccl_versions(environ),
        shm_bytes=None if shm is None else shm.f_blocks * shm.f_frsize,
        shm_free_bytes=None if shm is None else shm.f_bavail * shm.f_frsize,
    )


# --- memory policies -------------------------------------------------------------------------------------------------


def try_policies(node: int) -> Mapping[str, str | None]:
    """Make each call once in a child process; if a strict seccomp filter kills it, that is every call's error."""

    def refusals() -> list[list[str]]:
        found = []
        for name, call in CALLS.items():
            try:
                problem = call(node) or ""
            except OSError as error:
                problem = errno.errorcode.get(error.errno or 0, str(error))
            found.append([name, problem])
        return found

    try:
        found = in_child(refusals)
    except NumapinError as error:
        return dict.fromkeys(CALLS, error.message)
    return {name: problem or None for name, problem in found}


def _try_get(_node: int) -> str | None:
    numa.get_memory_policy()
    return None


def _try_set(node: int) -> str | None:
    """Prefer a node, and check that the policy is in force: gVisor accepts a policy and forgets it."""
    numa.set_memory_policy(numa.MPOL_PREFERRED, (node,))
    try:
        kept = numa.get_memory_policy() == (numa.MPOL_PREFERRED, frozenset({node}))
    except OSError:  # get_mempolicy is refused, which has an entry of its own
        return None
    return None if kept else "accepted, but not kept"


def _try_mbind(node: int) -> str | None:
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        numa.bind_pages(memory.address_of(page), mmap.PAGESIZE, numa.MPOL_PREFERRED, (node,))
    return None


def _try_move_pages(_node: int) -> str | None:
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        page[0] = 1
        (node,) = numa.nodes_of_pages([memory.address_of(page)])
    return None if node >= 0 else errno.errorcode.get(-node, str(node))


CALLS: Final[dict[str, Callable[[int], str | None]]] = {
    "get_mempolicy": _try_get,
    "set_mempolicy": _try_set,
    "mbind": _try_mbind,
    "move_pages": _try_move_pages,
}


# --- GPUs ------------------------------------------------------------------------------------------------------------


def gpu_users(nvml: NvmlReadings) -> tuple[GpuUser, ...]:
    """Return the processes that compute on GPUs, with their names and users as far as this process may see them."""
    return tuple(
        GpuUser(gpu.index, process.pid, process.used_bytes, *_name_and_user(process.pid))
        for gpu in nvml.gpus or ()
        for process in (gpu.health.processes if gpu.health else None) or ()
    )


def _name_and_user(pid: int) -> tuple[str, str] | tuple[None, None]:
    """Return the name and the user of the process with an id that the driver reports; None if it cannot be seen."""
    if not is_drivers_pid(pid):
        return None, None
    try:
        name = printable(proc.read(f"{proc.folder_of(pid)}/comm").strip())
        uid = Path(proc.folder_of(pid)).stat().st_uid
    except (OSError, proc.Gone):
        return None, None
    try:
        return name, pwd.getpwuid(uid).pw_name
    except KeyError:
        return name, f"uid {uid}"


def read_kernel_log(path: str = "/dev/kmsg") -> KernelLog:
    """Return the driver's errors in the kernel's buffer of messages."""
    # "6,339,5140900,-;text": priority and facility, number, microseconds since boot, flags. Facility 0 is the
    # kernel's own: programs may write here, too.
    try:
        found = map(_RECORD.match, _kernel_messages(path))
        records = [match.groups() for match in found if match and int(match[1]) >> 3 == 0]
    except OSError as error:
        return KernelLog(None, problem=f"{path} cannot be read: {error.strerror}")
    if not records:  # a container may have /dev/null or a terminal in its place
        return KernelLog(None, problem=f"{path} shows no message of the kernel")
    booted_s = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    xids = []
    for _, _, at, text in records:
        match = _XID.match(text)
        if match:
            pci = pci_address(match[1] if "." in match[1] else f"{match[1]}.0") or match[1]
            xids.append(Xid(int(match[2]), pci, booted_s + int(at) / 1e6, match[3]))
    _, first, began, _ = records[0]
    return KernelLog(tuple(xids), None if int(first) == 0 else booted_s + int(began) / 1e6)


def _kernel_messages(path: str) -> list[str]:
    """Return the records of the kernel's buffer. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    chunks: list[bytes] = []
    try:
        for _ in range(_MOST_RECORDS):
            try:
                chunk = os.read(descriptor, 8192)  # the kernel gives one record a call
            except BrokenPipeError:  # the next record was overwritten while this one was read
                continue
            except BlockingIOError:
                break
            if not chunk:  # a file in its place
                break
            chunks.append(chunk)
    finally:
        os.close(descriptor)
    return b"".join(chunks).decode(errors="replace").split("\n")


# --- packages and libraries ------------------------------------------------------------------------------------------


def _version(package: str) -> str | None:
    """Return an installed package's version, from its own metadata; None if it is not installed."""
    try:
        return metadata.version(package) or "unknown"  # None if the metadata is broken
    except metadata.PackageNotFoundError:
        return None


def _strays() -> tuple[str, ...]:
    try:
        files = metadata.distribution("py-libnuma").files or ()
    except metadata.PackageNotFoundError:
        return ()
    owned = [Path(str(file.locate())) for file in files if file.name == "__init__.py" and len(file.parts) == 2]
    return tuple(str(file.parent) for file in owned if file.parent.name != "numa" and file.is_file())


def nccl_versions(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return the NCCL packages installed beside torch, else the library that a program finds, with their versions."""
    versions = {package: _version(package) for package in _NCCL_PACKAGES}
    found = {package: version for package, version in versions.items() if version is not None}
    if found:
        return found
    library = nccl_files.installed_library((*environ.get("LD_LIBRARY_PATH", "").split(":"), *nccl_files.FOLDERS))
    return {library: nccl_files.library_version(library) or "unknown"} if library else {}
