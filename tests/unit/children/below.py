"""Python programs as they run below `numapin exec --children`, without the command.

There are two GPUs, each with one CPU, and torch is a stand-in.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from numapin import Memory
from tests.unit.children.seam import HOOK, ChildTable, CpuSet, DeviceEntry, hiding_variables, slice_text
from tests.unit.planned import PLANNED

CPUS: Final = sorted(os.sched_getaffinity(0))
_STAND_IN: Final = Path(__file__).resolve().parents[2] / "children" / "stand_in"
_LISTS: Final = hiding_variables()
_SAW: Final = (*_LISTS, "LOCAL_RANK", "RANK_OF_ANOTHER_LAUNCHER")
_BEGIN: Final = """
import os, subprocess, sys, torch
def cpus(pid=0):
    return sorted(os.sched_getaffinity(pid))
HELPER = [sys.executable, "-c", "import os; print(sorted(os.sched_getaffinity(0)))"]
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    status: int
    lines: list[str]
    err: str
    records: list[dict[str, Any]]


def table(
    run: Path,
    *,
    memory: Memory = Memory.NONE,
    strict: bool = False,
    verbose: bool = False,
    nodes: tuple[int, int] = (0, 0),
) -> ChildTable:
    """Return the plan: GPU n has the n-th CPU and node. The command had none of the variables."""
    devices = []
    for number, node in enumerate(nodes):
        cpus, own = CpuSet({CPUS[number % len(CPUS)]}), CpuSet() if memory is Memory.NONE else CpuSet({node})
        rank = replace(PLANNED, local_rank=number, cpus=cpus, node=node, nodes=own, memory=memory)
        devices.append(
            DeviceEntry(number=number, bare=number, index=number, uuid=None, pci=None, mig=(), slice=slice_text(rank))
        )
    saw, allowed = dict.fromkeys(_SAW), str(CpuSet(CPUS))
    return ChildTable(
        devices=devices, allowed_cpus=allowed, run=str(run), strict=strict, verbose=verbose, lists=_LISTS, saw=saw
    )


def run(
    folder: Path,
    text: str,
    *,
    memory: Memory = Memory.NONE,
    strict: bool = False,
    nodes: tuple[int, int] = (0, 0),
    **environ: str,
) -> Ran:
    """Run a program, which may call `cpus`, and start HELPER."""
    records = folder / "run"
    records.mkdir(mode=0o700)
    given = {
        **os.environ,
        "NUMAPIN_CHILDREN": table(records, memory=memory, strict=strict, nodes=nodes).render(),
        "PYTHONPATH": f"{HOOK}:{_STAND_IN}",
        "PYTHONUNBUFFERED": "1",
        **environ,
    }
    command = [sys.executable, "-c", _BEGIN + text]
    done = subprocess.run(command, env=given, capture_output=True, text=True, check=False, timeout=300)
    found = [json.loads(path.read_text()) for path in sorted(records.glob("*.json"))]
    return Ran(status=done.returncode, lines=done.stdout.splitlines(), err=done.stderr, records=found)
