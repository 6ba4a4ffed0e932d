"""The record of which loaders took numapin's path, and the job's line."""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest

from tests.data.loopback import in_forked_child
from tests.unit.data import seam
from tests.unit.data.seam import read_loaders, read_record, usage_log


def usage(rank: int = 0, **fields: Any) -> seam.LoaderUsage:
    counts: dict[str, Any] = {"num_loaders": 0, "num_batches": 0, "outside": (), "others": ()}
    return seam.LoaderUsage(rank=rank, **{"restart": 0, "is_complete": True, **counts, **fields})


def off(number: int, where: str) -> seam.Shortfall:
    return seam.Shortfall(number=number, reason=f"num_workers=0 ({where})")


def line(*usages: seam.LoaderUsage, ranks: frozenset[int] | None = None, unread: tuple[str, ...] = ()) -> str:
    there = frozenset(usage.rank for usage in usages) if ranks is None else ranks
    return seam.JobUsage(usages=usages, ranks=there, unread=unread).line()


KILLED: Final[dict[str, Any]] = {"num_loaders": 1, "is_complete": False}
EACH: Final[dict[str, Any]] = {"num_loaders": 1, "num_batches": 10, "others": (off(1, "a.py:1"), off(2, "b.py:2"))}
LINES: Final[dict[str, tuple[str, str]]] = {
    "loaders, batches and the place of the loader that is off the path": (
        line(usage(num_loaders=2, num_batches=1203, others=(off(1, "train.py:12"),))),
        "2 loaders, 1,203 batches by numapin; 1 loader not: num_workers=0 (train.py:12)",
    ),
    "ranks, restarts and processes add up, the most frequent reason first": (
        line(usage(0, **EACH), usage(1, **EACH), usage(1, **EACH)),
        "3 loaders, 30 batches by numapin in 2 ranks; "
        "9 loaders not: 6 num_workers=0 (b.py:2), 3 num_workers=0 (a.py:1)",
    ),
    "of more than three reasons three are named": (
        line(usage(others=tuple(off(9 - n, f"{n}.py:1") for n in range(5)))),
        "no loader by numapin; 35 loaders not: 9 num_workers=0 (0.py:1), 8 num_workers=0 (1.py:1), "
        "7 num_workers=0 (2.py:1), 11 for other reasons",
    ),
    "batches outside the slots, ranks without a loader, killed ranks, unreadable records": (
        line(
            usage(num_batches=1, outside=(seam.Shortfall(number=1, reason="slots are turned off"),), **KILLED),
            usage(3, num_batches=1, **KILLED),
            ranks=frozenset({0, 1, 2, 3}),
            unread=("loaders-2-0-7.json cannot be read: no",),
        ),
        "2 loaders, at least 2 batches by numapin in 2 ranks; 1 batch outside the slots: slots are turned off; "
        "ranks 1-2 left no record of a loader; the last counts of ranks 0,3 are missing: they ended "
        "without Python's exit handlers (killed, or os._exit); "
        "loaders-2-0-7.json cannot be read: no",
    ),
    "unreadable records only": (
        line(unread=("loaders-0-0-7.json cannot be read: no",)),
        "no record of a DataLoader can be read; loaders-0-0-7.json cannot be read: no",
    ),
}
STRICT: Final[dict[str, tuple[tuple[seam.LoaderUsage, ...], bool]]] = {
    "a loader on the path": ((usage(num_loaders=1),), True),
    "no loader": ((usage(),), False),
    "another loader": ((usage(num_loaders=1, others=(off(1, "train.py:12"),)),), False),
    "a batch outside": ((usage(num_loaders=1, outside=(seam.Shortfall(number=1, reason="x"),)),), False),
    "killed": ((usage(**KILLED),), False),
    "killed by the last restart": ((usage(**KILLED), usage(restart=1, num_loaders=1)), True),
    "killed after it": ((usage(restart=1, **KILLED), usage(restart=1, num_loaders=1)), False),
}


def test_the_line_at_the_end_of_a_job() -> None:
    """Each fact that a user can act on is in the line."""
    for what, (found, expected) in LINES.items():
        assert found == expected, what


def test_what_strict_asks_for() -> None:
    """There were loaders, and all of them took the path with all of their batches, since the last restart."""
    for what, (usages, expected) in STRICT.items():
        assert seam.JobUsage(usages=usages, ranks=frozenset({0})).all_took_it is expected, what
    one_of_two = seam.JobUsage(usages=(usage(num_loaders=1),), ranks=frozenset({0, 1}))
    assert one_of_two.all_took_it  # a rank may have no loader


class Odd:
    """A loader whose equality says nothing, and which has no hash."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.setattr(usage_log, "_logs", {})
    finalizers: list[object] = []
    monkeypatch.setattr("multiprocessing.util.Finalize", lambda *arguments, **_: finalizers.append(arguments))
    monkeypatch.setenv("NUMAPIN_DATALOADER", "numapin")
    monkeypatch.setenv("NUMAPIN_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    yield monkeypatch
    assert len(finalizers) <= 1


def written(folder: Path) -> seam.LoaderUsage:
    (path,) = folder.iterdir()
    assert path.name == f"loaders-5-2-{os.getpid()}.json"
    return read_record(seam.LoaderUsage, path.read_text(), source=str(path), hint="", schema=seam.SCHEMA)


def at_exit() -> None:
    log = usage_log._logs[os.getpid()]
    assert log is not None
    log.write(is_complete=True)


@pytest.mark.usefixtures("environ")
class TestLog:
    def test_counts_of_loaders_that_are_gone_stay(self, tmp_path: Path) -> None:
        """A loader counts once whatever its epochs, and its batches when the record is written, even if it is gone."""
        paths: list[Any] = [type("Path", (), {"counts": seam.Counts()})() for _ in range(2)]
        for path in (*paths, *paths):
            usage_log.note_path(path)
        for path, batches in zip(paths, (3, 4), strict=True):
            path.counts.batches = batches
            path.counts.misses.update({seam.Miss.UNSUPPORTED: 1, seam.Miss.SHARED: 1})
        paths.pop()
        del path
        gc.collect()
        at_exit()
        assert written(tmp_path) == usage(
            5,
            restart=2,
            num_loaders=2,
            num_batches=7,
            outside=(seam.Shortfall(number=2, reason=str(seam.Miss.UNSUPPORTED)),),
        )

    def test_other_loaders_count_by_reason_and_place(self, tmp_path: Path) -> None:
        """Each loader counts once, by identity; the record is there at once, in case that the process is killed."""
        loaders = [Odd(), Odd()]
        for loader in (*loaders, *loaders):
            usage_log.note_other(loader, "num_workers=0")
        (other,) = written(tmp_path).others
        assert other.number == 1  # the second: with the next
        assert other.reason.startswith("num_workers=0 (test_usage.py:")
        slotted: Any = type("Slotted", (), {"__slots__": ()})  # without weak references
        usage_log.note_other(slotted(), "another reason")
        found = written(tmp_path)
        assert [entry.number for entry in found.others] == [2, 1]
        assert not found.is_complete

    def test_writes_rarely(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A script that makes an iterator for each step does not write for each step."""
        writes: list[str] = []
        monkeypatch.setattr(seam.handover, "write_text", lambda *arguments: writes.append(arguments[1]))
        for _ in range(100):
            usage_log.note_path(SimpleNamespace(counts=seam.Counts()))  # type: ignore[arg-type]
            usage_log.note_other(Odd(), "num_workers=0")
        assert len(writes) == 3  # an empty one first

    def test_a_folder_that_is_gone_is_reported_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The job goes on, and nothing is written elsewhere."""
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("NUMAPIN_RUN_DIR", "/nowhere/run")
        for reason in "ab":
            usage_log.note_other(Odd(), reason)
        at_exit()
        (said,) = capsys.readouterr().err.splitlines()
        assert said.startswith("numapin: rank 5: no record of its DataLoaders: /nowhere/run/loaders-5-2-")
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["NUMAPIN_DATALOADER", "NUMAPIN_RUN_DIR", "RANK"])
def test_nothing_is_written_without_a_launcher_that_asks(
    environ: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    """Outside of `numapin run --dataloader=numapin` no file appears."""
    environ.delenv(name)
    usage_log.note_other(Odd(), "a")
    usage_log.note_path(SimpleNamespace(counts=seam.Counts()))  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("environ")
def test_a_full_disk_leaves_an_empty_record(tmp_path: Path) -> None:
    """A process that cannot write its record leaves an empty one, which --strict does not accept."""

    def note() -> bool:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        usage_log.note_other(Odd(), "a")
        return True

    assert in_forked_child(note)
    assert [path.read_text() for path in tmp_path.iterdir()] == [""]
    assert "cannot be read" in read_loaders(str(tmp_path)).line()


@pytest.mark.usefixtures("environ")
def test_a_forked_child_writes_its_own(tmp_path: Path) -> None:
    """A process has one log, from its first iterator on; a child does not add to, or overwrite, its parent's."""
    usage_log.note_other(Odd(), "in the parent")
    usage_log.note_other(Odd(), "also there")
    assert len(written(tmp_path).others) == 2

    def note() -> bool:
        usage_log.note_other(Odd(), "in the child")
        return True

    assert in_forked_child(note)
    texts = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert "in the parent" in texts.pop(f"loaders-5-2-{os.getpid()}.json")
    (of_child,) = texts.values()
    assert "in the child" in of_child
    assert "in the parent" not in of_child
