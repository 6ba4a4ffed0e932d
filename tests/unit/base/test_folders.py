"""Folders opened by descriptor."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from numapin.base.folders import opened, place_of


@pytest.mark.parametrize("raises", [False, True])
def test_no_descriptor_is_left(tmp_path: Path, *, raises: bool) -> None:
    """All descriptors are closed: after the block, after an error in it, and after a failed walk."""
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    before = sorted(Path("/proc/self/fd").iterdir())
    for path in (tmp_path, tmp_path / "missing" / "file", loop / "file", "/", "."):
        for open_ in (place_of, opened):
            with suppress(OSError), open_(str(path)):
                if raises:
                    raise OSError
    assert sorted(Path("/proc/self/fd").iterdir()) == before
