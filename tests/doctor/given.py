"""Machines for the doctor: a root directory with a few changed files, and the answers of a running machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numapin import Topology, discover
from tests.doctor.seam import DoctorFinding, Host, Live, NvmlReadings, Tree, examine
from tests.machines.roots import load, write_root

CALLS = ("get_mempolicy", "set_mempolicy", "mbind", "move_pages")


def live(**changes: Any) -> Live:
    sound: dict[str, Any] = {
        "refused": dict.fromkeys(CALLS),
        "nvml": NvmlReadings(gpus=(), driver="580.159.04"),
        "libnuma": None,
        "torch": "2.13.0",
        "torch_off": "",
        "strays": (),
        "python": (3, 12, 1),
        "nccl": {"nvidia-nccl-cu12": "2.30.3"},
        "shm_bytes": 64 << 30,
        "shm_free_bytes": 32 << 30,
    }
    return Live(**sound | changes)


def put(root: Path, files: Mapping[str, str | bytes | None]) -> None:
    """Write files below a root; None makes a directory in place of the file, which cannot be read.

    A text that begins with "../" is the target of a link.
    """
    for path, content in files.items():
        at = root / path
        at.unlink(missing_ok=True)
        (at if content is None else at.parent).mkdir(parents=True, exist_ok=True)
        if isinstance(content, str) and content.startswith("../"):
            at.symlink_to(content)
        elif content is not None:
            at.write_bytes(content if isinstance(content, bytes) else content.encode())


def examined(
    root: Path, *, topology: Topology | None = None, answers: Live | None = None, must_be_idle: bool = False
) -> dict[str, DoctorFinding]:
    found_topology = topology or discover(root=root)
    host = Host(tree=Tree(str(root)), topology=found_topology, live=answers, must_be_idle=must_be_idle)
    found: dict[str, DoctorFinding] = {}
    for finding in examine(host):
        found.setdefault(finding.check, finding)
    return found


def machine(folder: Path, name: str = "2node-interleaved-smt2-2gpu") -> Path:
    return write_root(load(name), folder / "root")
