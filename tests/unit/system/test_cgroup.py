"""The cgroups of a process, read from a capture."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.unit.system.seam import Tree, own_cgroups

if TYPE_CHECKING:
    from pathlib import Path


def cgroups(root: Path, text: str) -> list[str]:
    """Return version 2's cgroups of a capture with this /proc/self/cgroup."""
    path = root / "proc/self/cgroup"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    return own_cgroups(Tree(str(root)), "")


def test_paths_keep_their_colons(tmp_path: Path) -> None:
    """The path is all that stands behind the second colon."""
    assert cgroups(tmp_path, "12:memory:/a\n0::/user.slice/a:b\n") == ["/user.slice/a:b"]


def test_a_path_too_deep_is_left_out(tmp_path: Path) -> None:
    """Each level is a folder to read: a path with thousands of levels would take gigabytes."""
    assert cgroups(tmp_path, f"0::{'/a' * 20_000}\n0::/b\n") == ["/b"]


def test_too_many_are_left_out(tmp_path: Path) -> None:
    """A process is in one cgroup of each hierarchy, and there are few of these."""
    assert len(cgroups(tmp_path, "0::/a\n" * 10_000)) == 64
