"""The report of `numapin attach` as text."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from tests.recorded.screens import compare
from tests.unit.planned import PLANNED
from tests.unit.view.seam import Attached, AttachedRank, BoundProcess, CpuSet, ProcessPages, attach_table

MIB = 1 << 20
PAGES = ProcessPages(
    policy="default",
    before={0: 3 * MIB, 1: MIB},
    after={0: MIB, 1: 3 * MIB},
    far_bytes=3 * MIB,
    moved_bytes=2 * MIB,
    stays={"shared": MIB},
)
PROCESS = BoundProcess(
    pid=4711,
    name="python",
    threads=9,
    changed=7,
    narrower=2,
    ended=0,
    cpus_before=CpuSet({0}),
    cpus=CpuSet(range(4, 8)),
    pages=PAGES,
    shortfalls=("1.0 MiB stay",),
)
RANK = AttachedRank(pid=4711, gpu_source="--gpu", requested=PLANNED, processes=(PROCESS,))
UNDO = "taskset -acp 0 4711"
DONE = Attached(dry_run=False, migrate=True, interrupted=False, undo=(UNDO,), warnings=(), ranks=(RANK,))


GONE = replace(RANK, processes=(), problem="it ended before")
REPORTS = {
    "a row has the threads that changed, the CPUs before and now, the memory elsewhere, and what was moved": DONE,
    "a dry run changes nothing, so there is nothing to undo": replace(DONE, dry_run=True, undo=()),
    "after Ctrl-C the table shows what was done": replace(DONE, interrupted=True),
    "a process that ended was not bound": replace(DONE, ranks=(GONE,), undo=()),
    "the source of a GPU is reported for ranks with a GPU only": replace(
        DONE, ranks=(replace(RANK, requested=replace(PLANNED, gpu=None)),)
    ),
}


def test_each_report_is_the_recorded_one() -> None:
    """NUMAPIN_UPDATE_GOLDEN=1 records them anew."""
    text = ""
    for sentence, report in REPORTS.items():
        out = io.StringIO()
        Console(file=out, width=200).print(attach_table(report))
        text += "\n".join((f"=== {sentence}", *(line.rstrip() for line in out.getvalue().splitlines()), ""))
    compare(text, str(Path(__file__).with_name("attached.txt")))
