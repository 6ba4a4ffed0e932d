"""The report of `numapin attach` as text."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console, RenderableType

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


def _text(shown: RenderableType) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(shown)
    return out.getvalue()


def test_row() -> None:
    """A row has the threads that changed, the CPUs before and now, the memory elsewhere, and what was moved."""
    heading, row, *lines = _text(attach_table(DONE)).splitlines()
    assert heading.split()[-2:] == ["elsewhere", "moved"]
    assert row.split() == [
        *("0", "4711", "python", "1", "81:00.0", "1", "7/9", "0", "4-7"),
        *("3.0", "MiB", "/", "4.0", "MiB", "2.0", "MiB"),
    ]
    assert "rank 0: process 4711: 1.0 MiB stay" in lines
    assert "rank 0: 2 threads left on fewer CPUs than planned; --widen binds them to all" in lines
    assert lines[-2].startswith("undo with (pages stay where they are")
    assert lines[-1] == f"  {UNDO}"


def test_ends() -> None:
    """A dry run, Ctrl-C, and a process that ended are reported; without a change there is nothing to undo."""
    assert _text(attach_table(replace(DONE, dry_run=True, undo=()))).endswith("dry run: nothing was changed\n")
    assert "interrupted: the table shows" in _text(attach_table(replace(DONE, interrupted=True)))
    gone = replace(RANK, processes=(), problem="it ended before")
    text = _text(attach_table(replace(DONE, ranks=(gone,), undo=())))
    assert "rank 0: process 4711 was not bound: it ended before" in text
    assert "undo" not in text


def test_the_source_of_a_gpu() -> None:
    """It is reported for ranks with a GPU only."""
    assert "rank 0: GPU known by: --gpu" in _text(attach_table(DONE))
    without = replace(RANK, requested=replace(PLANNED, gpu=None))
    assert "GPU known by" not in _text(attach_table(replace(DONE, ranks=(without,))))
