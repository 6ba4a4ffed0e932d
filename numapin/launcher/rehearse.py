"""Check that a plan can be applied: try each binding before ranks start, look for its GPUs before a restart."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from numapin.errors import NumapinError
from numapin.rank.bind import apply, as_bound

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numapin.plan.model import Plan
    from numapin.topology.readings import NvmlReadings

    _Within = Callable[[Callable[[], list[list[str]]]], list[list[str]]]


def rehearse(plan: Plan, *, strict: bool, within: _Within | None = None) -> Plan:
    """Try every rank's binding, and return the plan with the kernel's refusals as warnings and reasons.

    A rank whose memory policy is refused keeps its CPUs and relies on first touch. `within` is `in_child`, or
    `in_thread` if other threads of the process forbid a fork. Raises BindingRefused if `strict`.
    """
    shortfalls = (within or in_child)(lambda: [list(apply(rank).shortfalls) for rank in plan.ranks])
    ranks = tuple(as_bound(rank, found) for rank, found in zip(plan.ranks, shortfalls, strict=True))
    refusals = dict.fromkeys(chain.from_iterable(shortfalls))  # each once, in order
    rehearsed = replace(plan, ranks=ranks, warnings=(*plan.warnings, *refusals))
    if strict:
        rehearsed.require_exact()
    return rehearsed


def in_thread(work: Callable[[], list[list[str]]]) -> list[list[str]]:
    """Run `work` in a thread of its own, whose bindings end with it: Linux binds threads. Raises its errors."""
    from concurrent.futures import ThreadPoolExecutor  # here, because `numapin run` needs no threads

    with ThreadPoolExecutor(1, "numapin-rehearsal") as thread:
        return thread.submit(work).result()


def in_child(work: Callable[[], list[list[str]]]) -> list[list[str]]:
    """Run `work` in a forked child and return its result. Raises NumapinError with the child's own error.

    The child ends by os._exit, so that no cleanup runs twice.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reader)
            answer: dict[str, Any]
            try:
                answer = {"found": work()}
            except (NumapinError, OSError) as error:
                answer = {"error": str(error)}
            with os.fdopen(writer, "w") as pipe:
                json.dump(answer, pipe)
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    _, status = os.waitpid(pid, 0)
    answer = json.loads(text) if text else {"error": f"wait status {status}"}
    if "error" in answer:
        raise NumapinError(f"the bindings could not be tried: {answer['error']}", "see the plan with: numapin plan")
    found: list[list[str]] = answer["found"]
    return found


def require_gpus(plan: Plan, looks: Iterable[NvmlReadings]) -> None:
    """Raise NumapinError for planned GPUs that none of the readings shows.

    A GPU that fell off the bus stays away until the host is reset; restarting its rank would only use up restarts. A
    reading without any answer from NVML counts as showing all GPUs; no reading is taken if no GPU is planned.
    """
    planned = list[tuple[str, str]]()  # the name by which each GPU is found again, and a text about it
    for rank in plan.ranks:
        names = [name for name in (rank.gpu.uuid, rank.gpu.pci) if name] if rank.gpu else []
        if rank.gpu and names:
            planned.append((names[0], f"GPU {rank.gpu.index} ({', '.join(names)}) of local rank {rank.local_rank}"))
    lost, notes = list[str](), tuple[str, ...]()
    for readings in looks if planned else ():
        if readings.gpus is None:
            return
        shown = {name for gpu in readings.gpus for name in (gpu.uuid, gpu.pci)}
        lost, notes = [text for name, text in planned if name not in shown], readings.notes
        if not lost:
            return
    if lost:
        problem = (
            f"the driver no longer shows {', '.join(lost)}: this host leaves the job, which continues on the other "
            "hosts if --nnodes MIN:MAX allows it"
        )
        hint = "see what happened with: dmesg | grep -i xid; a reset or reboot brings the GPU back"
        raise NumapinError("; ".join((problem, *notes)), hint)
