"""The record that a process leaves, the lines that it says, and its end under --strict."""

from __future__ import annotations

import json
import os
import sys

from numapin.base.cpu_set import CpuSet
from numapin.base.stderr import say
from numapin.children import records
from numapin.rank import handover
from numapin.system import proc

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container, Mapping
    from typing import Final

    from numapin.children.own import TakenGpus
    from numapin.children.table import ChildTable

REFUSED_STATUS: Final = 5
_MIB: Final = 1 << 20


def record(plan: ChildTable, taken: TakenGpus, how: str) -> None:
    """Write this process's record, under the rank of the first GPU that it has taken."""
    number = next(iter(taken.slices))
    name = f"{handover.OBSERVED}{number}-{taken.pid}.json"
    former = os.path.basename(records.bound_pids(plan.run).get(taken.pid, name))
    if former != name:  # of a guess that was wrong
        records.remove(plan.run, former)
    records.remove(plan.run, _unbound(taken.pid))  # it has found its GPU, or its name, since
    content = {
        "schema": "numapin.observed/1",
        "local_rank": number,
        "rank": number,
        "restart": 0,
        "pid": taken.pid,
        "start": proc.start_time(),
        "host": os.uname().nodename,
        "requested": json.loads(taken.slices[number].json),
        "applied": None if taken.applied is None else taken.applied.to_json(),
        "how": how,
        "gpus": list(taken.names.values()),
        "allocated_before": taken.allocated,
        "surprises": taken.surprises,
    }
    records.write(plan.run, name, content)


def report(plan: ChildTable, taken: TakenGpus, how: str) -> None:
    """Say what was bound: always if it came late, else with --verbose. With --strict, end a process that fell short."""
    if plan.verbose or not taken.is_guess:
        _say_bound(taken, how)
    _report_surprises(plan, taken)


def _say_bound(taken: TakenGpus, how: str) -> None:
    applied = taken.applied
    if applied is None:
        return
    memory = f"{applied.memory or 'policy unknown'} {CpuSet(applied.nodes)}".rstrip()
    gpus = ", ".join(taken.names.values())
    bound = f"process {taken.pid} is bound to {gpus} ({how}): CPUs {CpuSet(applied.cpus)}, memory {memory}"
    nodes = next(iter(taken.slices.values())).nodes
    say(f"{bound}; {allocated_text(taken.allocated, nodes)}")


def _report_surprises(plan: ChildTable, taken: TakenGpus) -> None:
    for text in taken.surprises:
        records.say_once(plan.run, f"warning: {text}")
    if plan.strict and taken.surprises:
        end_strictly(f"cannot be bound exactly: {'; '.join(taken.surprises)}")


def allocated_text(allocated: Mapping[int, int] | None, nodes: frozenset[int]) -> str:
    """Return how much memory was allocated before the binding, and which part of it is on other nodes."""
    if allocated is None:
        return "memory allocated before: unknown (no numa_maps)"
    total = sum(allocated.values())
    away = bytes_away(allocated, nodes) if nodes else 0
    where = f", {away / total:.0%} of it on other nodes" if total else ""
    return f"{total / _MIB:.1f} MiB were allocated before{where}"


def bytes_away(allocated: Mapping[int, int], nodes: Container[int]) -> int:
    """Return the part of the memory, given by node, that is on other nodes than these."""
    return sum(size for node, size in allocated.items() if node not in nodes)


def report_unknown(plan: ChildTable, problem: str) -> None:
    """Report that this process's GPU is unknown."""
    pid = os.getpid()
    records.write(plan.run, _unbound(pid), {"pid": pid, "start": proc.start_time(), "why": problem})
    if plan.strict:
        end_strictly(f"is not bound: {problem}")
    with open("/proc/self/cmdline", "rb") as file:
        command = file.read().replace(b"\0", b" ").decode(errors="replace")
    text = f"warning: process {pid} ({(command.split() or ['?'])[0][:100]}) is not bound: {problem}"
    records.say_once(plan.run, text, once_for=problem)


def _unbound(pid: int) -> str:
    return f"{records.UNBOUND}{pid}.json"


def end_strictly(problem: str) -> None:
    """End this process as --strict requires: not by an exception, which the program might catch."""
    say(f"error: --strict: process {os.getpid()} {problem}")
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            pass
    os._exit(REFUSED_STATUS)
