"""The record that each process below `numapin exec --children` leaves in the run's folder, and what it says."""

from __future__ import annotations

import json
import os
import stat
import sys
import zlib
from contextlib import suppress

from numapin.base.cpu_set import CpuSet
from numapin.base.stderr import say
from numapin.base.text import counted
from numapin.children import frameworks
from numapin.errors import NumapinError
from numapin.rank import handover
from numapin.system import proc

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Container, Iterator, Mapping
    from typing import Any, Final

    from numapin.children.own import TakenGpus
    from numapin.children.table import ChildTable

UNBOUND: Final = "unbound-"
REFUSED_STATUS: Final = 5
_SAID: Final = "said-"
_NEW_FILE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_MIB: Final = 1 << 20

_unwritable: Final[set[str]] = set()
"""Folders that this process could not write and has said so; nothing can be noted there for other processes."""


# --- this process's own ----------------------------------------------------------------------------------------------


def record(plan: ChildTable, taken: TakenGpus, how: str) -> None:
    """Write this process's record, under the rank of the GPU that it is bound to."""
    number, own = taken.number, taken.slice
    if own is None:
        return
    name = f"{handover.OBSERVED}{number}-{taken.pid}.json"
    with suppress(OSError), handover.opened_to_write(plan.run) as descriptor:
        for other in (*handover.record_names(descriptor), *handover.record_names(descriptor, UNBOUND)):
            if other != name and other.endswith(f"-{taken.pid}.json"):  # of a guess that was wrong, or an unknown GPU
                os.unlink(other, dir_fd=descriptor)
    content = {
        "schema": "numapin.observed/1",
        "local_rank": number,
        "rank": number,
        "restart": 0,
        "pid": taken.pid,
        "start": proc.start_time(),
        "host": os.uname().nodename,
        "requested": json.loads(own.json),
        "applied": None if taken.applied is None else taken.applied.to_json(),
        "how": how,
        "gpus": taken.names,
        "allocated_before": taken.allocated,
        "surprises": taken.surprises,
    }
    _write(plan.run, name, content)


def report(plan: ChildTable, taken: TakenGpus, how: str) -> None:
    """Say what was bound: always if it came late, else with --verbose. With --strict, end a process that fell short."""
    applied = taken.applied
    if applied is not None and (plan.verbose or not taken.is_guess):
        memory = f"{applied.memory or 'policy unknown'} {CpuSet(applied.nodes)}".rstrip()
        gpus = ", ".join(taken.names)
        bound = f"process {taken.pid} is bound to {gpus} ({how}): CPUs {CpuSet(applied.cpus)}, memory {memory}"
        before = "memory allocated before: unknown (no numa_maps)"
        if taken.allocated is not None:
            total = sum(taken.allocated.values())
            nodes = () if taken.slice is None else taken.slice.nodes
            away = bytes_away(taken.allocated, nodes) if nodes else 0
            where = f", {away / total:.0%} of it on other nodes" if total else ""
            before = f"{total / _MIB:.1f} MiB were allocated before{where}"
        threads = ""
        if taken.torch_threads is not None:
            now, former = taken.torch_threads
            threads = f"; torch uses {counted(now, 'thread')} instead of {former}"
        say(f"{bound}; {before}{threads}")
    report_frameworks(plan)
    report_surprises(plan, taken)


def report_frameworks(plan: ChildTable) -> None:
    """Say which frameworks of this process bind it themselves, or do not because numapin does.

    With --strict, end the process if it runs one that does.
    """
    for text in frameworks.switched_off(sys.modules, os.environ):
        _say_once(plan.run, text)
    problems = frameworks.bind_themselves(sys.modules, os.environ)
    if plan.strict and problems:
        _end_strictly(f"cannot be bound: {'; '.join(problems)}")
    for text in problems:
        _say_once(plan.run, f"warning: {text}; unset the variable, or leave out the option that sets it")


def report_surprises(plan: ChildTable, taken: TakenGpus) -> None:
    """Say what falls short of the plan, once for each text. With --strict, end the process."""
    for text in taken.surprises:
        _say_once(plan.run, f"warning: {text}")
    if plan.strict and taken.surprises:
        _end_strictly(f"cannot be bound exactly: {'; '.join(taken.surprises)}")


def bytes_away(allocated: Mapping[int, int], nodes: Container[int]) -> int:
    """Return the part of the memory, given by node, that is on other nodes than these."""
    return sum(size for node, size in allocated.items() if node not in nodes)


def report_unknown(plan: ChildTable, problem: str) -> None:
    """Report that this process's GPU is unknown."""
    pid = os.getpid()
    _write(plan.run, f"{UNBOUND}{pid}.json", {"pid": pid, "start": proc.start_time(), "why": problem})
    if plan.strict:
        _end_strictly(f"is not bound: {problem}")
    with open("/proc/self/cmdline", "rb") as file:
        command = file.read().replace(b"\0", b" ").decode(errors="replace")
    text = f"warning: process {pid} ({(command.split() or ['?'])[0][:100]}) is not bound: {problem}"
    _say_once(plan.run, text, once_for=problem)


def _end_strictly(problem: str) -> None:
    """End this process as --strict requires: not by an exception, which the program might catch."""
    say(f"error: --strict: process {os.getpid()} {problem}")
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(REFUSED_STATUS)


def _write(folder: str, name: str, content: Mapping[str, object]) -> None:
    """Write a record; a folder that cannot be written is reported, once for all processes that share it.

    If the folder is gone, the command has ended, and the process that outlives it needs no record.
    """
    try:
        is_gone = not stat.S_ISDIR(os.stat(folder).st_mode)
    except OSError as error:
        is_gone = not isinstance(error, PermissionError)  # another user's, which may not be looked at, is there
    if is_gone:
        return
    try:
        handover.write_json(folder, name, content)
    except NumapinError as error:
        if folder not in _unwritable:
            _unwritable.add(folder)
            _say_once(folder, f"warning: no record of the binding: {error.message}")


def _say_once(folder: str, text: str, *, once_for: str | None = None) -> None:
    """Write a line to stderr, unless a process of this run has written the same, or a text `once_for` the same."""
    name = f"{_SAID}{zlib.crc32((once_for or text).encode(errors='replace')):08x}"
    try:
        with handover.opened_to_write(folder) as descriptor:
            os.close(os.open(name, _NEW_FILE, 0o600, dir_fd=descriptor))
    except FileExistsError:
        return
    except OSError:  # say it twice rather than never
        pass
    say(text)


# --- those of all processes ------------------------------------------------------------------------------------------


def running(folder: str, *kinds: str) -> dict[int, tuple[str, dict[str, Any]]]:
    """Return the records of processes that still run, with their paths, by process id. A reused id does not count."""
    found: dict[int, tuple[str, dict[str, Any]]] = {}
    for pid, path, fields in _records(folder, *kinds):
        if "start" in fields and proc.is_running(pid, fields["start"]):
            found[pid] = path, fields
    return found


def read_all(folder: str, kind: str, *, with_keys: Collection[str]) -> list[dict[str, Any]]:
    """Return the records of one kind, ordered by process. Those that cannot be read, or lack a key, are left out.

    A process that outlives the command may remove or replace its record meanwhile.
    """
    found = sorted(_records(folder, kind), key=lambda record: record[0])
    return [fields for _, _, fields in found if fields.keys() >= {*with_keys}]


def _records(folder: str, *kinds: str) -> Iterator[tuple[int, str, dict[str, Any]]]:
    for kind in kinds:
        paths: list[str] = []
        with suppress(OSError):
            paths = handover.records(folder, kind)
        for path in paths:
            number = os.path.basename(path).removesuffix(".json").rpartition("-")[2]
            fields: Any = None
            with suppress(OSError, ValueError):
                fields = json.loads(handover.read_text(path))
            if isinstance(fields, dict) and number.isdecimal():
                yield int(number), path, fields
