"""Folders opened by descriptor."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest

from tests.needs import needs_root
from tests.unit.base.seam import OpenFolder, OpenPlace, make_folders, opened

STRANGER = 54321


def _made(path: str) -> OpenFolder:
    make_folders(path)
    return opened(path)


@pytest.mark.parametrize("raises", [False, True])
def test_no_descriptor_is_left(tmp_path: Path, *, raises: bool) -> None:
    """All descriptors are closed: after the block, after an error in it, and after a failed walk."""
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    before = sorted(Path("/proc/self/fd").iterdir())
    for path in (tmp_path, tmp_path / "missing" / "file", loop / "file", "/", "."):
        for open_ in (OpenPlace, opened, _made):
            with suppress(OSError), open_(str(path)):
                if raises:
                    raise OSError
    assert sorted(Path("/proc/self/fd").iterdir()) == before


def test_missing_folders_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with mkdir -p, existing folders stay, own links are followed, and a file in the way is an error."""
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to("target")
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    for path in (str(tmp_path / "link" / "a" / "b"), "link/a/b", "link/a/../c/./", ".", "", "/"):
        make_folders(path)
    assert [(tmp_path / "target" / name).stat().st_mode & 0o777 for name in ("a/b", "c")] == [0o700, 0o700]
    with pytest.raises(FileExistsError):
        make_folders("file")
    with pytest.raises(NotADirectoryError):
        make_folders("file/a")


@needs_root
def test_no_folder_is_made_behind_another_users_link(tmp_path: Path) -> None:
    """A link that another user planted leads nowhere: neither on the way nor at the end of a path."""
    shared, target = tmp_path / "shared", tmp_path / "target"
    for folder in (shared, target):
        folder.mkdir()
    shared.chmod(0o1777)
    for planted, aim in (("link", target), ("dangling", target / "missing")):
        (shared / planted).symlink_to(aim)
        os.chown(shared / planted, STRANGER, STRANGER, follow_symlinks=False)
        for path in (shared / planted / "a" / "b", shared / planted):
            with pytest.raises(PermissionError, match=f"{planted} is a link of another user"):
                make_folders(str(path))
    assert not list(target.iterdir())
