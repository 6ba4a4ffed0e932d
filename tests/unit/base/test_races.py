"""Races: another user swaps a name in a folder at every moment of a write by root."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from typing import Final

import pytest

from numapin.errors import NumapinError
from tests.moments import acting
from tests.needs import needs_root
from tests.unit.base.seam import write_text_to

pytestmark = needs_root

STRANGER: Final = 54321
MOST_CALLS: Final = 60


def careful(path: Path) -> None:
    write_text_to(os.fspath(path), "text", remedy="")


def careless(path: Path) -> None:
    """Look at the name first, and then use it, whatever it means by then: the tests must find that this does harm."""
    if path.is_symlink() and path.lstat().st_uid == 0:
        (path.parent / path.readlink()).write_text("text")
    elif path.is_fifo():
        path.write_text("text")


WRITERS: Final = pytest.mark.parametrize("write", [careful, careless])


@pytest.fixture
def private(tmp_path: Path) -> Path:
    folder = tmp_path / "private"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture
def name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "theirs"
    folder.mkdir()
    os.chown(folder, STRANGER, STRANGER)
    monkeypatch.chdir(folder)
    return folder / "name"


def planted(name: Path, make: Callable[[Path], object], owner: int = STRANGER) -> None:
    new = name.with_name("new")
    new.unlink(missing_ok=True)
    make(new)
    os.chown(new, owner, owner, follow_symlinks=False)
    new.replace(name)


def played(write: Callable[[Path], None], name: Path, *states: Callable[[], object]) -> Iterator[None]:
    """Write to the name, in the current directory, while it goes from its first state to the others.

    Yield after each write, of which there is one for each choice of moments.
    """
    largest, over = 0, None
    for moments in combinations(range(MOST_CALLS), len(states) - 1):
        if moments[:-1] == over:  # the last change would again come too late
            continue
        states[0]()
        with suppress(OSError, NumapinError), acting(dict(zip(moments, states[1:], strict=True))) as calls:
            write(Path(name.name))
        largest = max(largest, calls.num)
        over = moments[:-1] if calls.num <= moments[-1] else None
        yield
    assert 0 < largest <= MOST_CALLS


@WRITERS
def test_a_link_in_the_place_of_a_link(name: Path, private: Path, write: Callable[[Path], None]) -> None:
    """The link that root follows is the one whose owner was checked."""
    states = (
        lambda: planted(name, lambda new: new.symlink_to("harmless"), owner=0),
        lambda: planted(name, lambda new: new.symlink_to(private / "file")),
    )
    num_written = sum((name.parent / "harmless").exists() for _ in played(write, name, *states))
    assert num_written > 0
    assert (private / "file").exists() is (write is careless)


@WRITERS
@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("course", ["pipe, link", "link, gone, link", "link, pipe, link", "pipe, gone, pipe"])
def test_a_link_in_the_place_of_a_pipe(
    name: Path, private: Path, course: str, write: Callable[[Path], None], *, is_shared: bool
) -> None:
    """Nothing gets through another user's link into root's pipe, nor, in a shared folder, into that user's own."""
    if is_shared:
        os.chown(name.parent, 0, 0)
        name.parent.chmod(0o1777)
    theirs, roots = name.with_name("pipe"), private / "pipe"
    readers = []
    for pipe in (theirs, roots):
        os.mkfifo(pipe)
        readers.append(os.open(pipe, os.O_RDWR | os.O_NONBLOCK))
    states = {
        "gone": lambda: name.unlink(missing_ok=True),
        "pipe": lambda: planted(name, lambda new: new.hardlink_to(theirs)),
        "link": lambda: planted(name, lambda new: new.symlink_to(roots)),
    }
    num_harmed = 0
    for _ in played(write, name, *map(states.__getitem__, course.split(", "))):
        for reader, is_harm in zip(readers, (is_shared, True), strict=True):
            with suppress(BlockingIOError):
                num_harmed += bool(os.read(reader, 100)) and is_harm
    for reader in readers:
        os.close(reader)
    if write is careful:
        assert num_harmed == 0
    elif is_shared or "link" in course:
        assert num_harmed > 0
