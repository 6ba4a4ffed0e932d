"""NCCL's version and its effect on the affinity, from names and metadata; no NCCL is loaded or installed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.unit.system.seam import ignores_affinity, installed_library, library_version, mapped_library, narrows

if TYPE_CHECKING:
    from pathlib import Path

MAPS = """7f1000000000-7f1000001000 r--p 00000000 08:01 17 /usr/lib/x86_64-linux-gnu/libc.so.6
7f1000002000-7f1000003000 r--p 00000000 08:01 18 /opt/plugins/libnccl-net.so
7f1000004000-7f1000005000 r--p 00000000 08:01 19                        {path}
7f1000006000-7f1000007000 rw-p 00000000 00:00 0 [heap]
7f1000008000-7f1000009000 rw-p 00000000 00:00 0
"""


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("2.28.9", False),
        ("2.29.1", False),
        ("2.29.2", True),
        ("2.29.7", True),
        ("2.29.7-1+cuda12.9", True),
        ("2.30.2", True),  # never released; the change is in 2.30.3
        ("2.30.3", False),
        ("3.0.0", False),
        ("2.29", None),
        ("unknown", None),
        (None, None),
    ],
)
def test_versions_that_narrow_the_affinity(version: str | None, expected: bool | None) -> None:  # noqa: FBT001 - a parameter
    """NCCL 2.29.2 to 2.29.7 do not restore the affinity; a text without a version is unknown."""
    assert narrows(version) is expected


@pytest.mark.parametrize(
    ("value", "expected"), [(None, False), ("", False), ("0", False), (" 0 ", False), ("1", True), ("2", True)]
)
def test_the_variable(value: str | None, expected: bool) -> None:  # noqa: FBT001 - a parameter
    """NCCL_IGNORE_CPU_AFFINITY counts unless it is empty or 0."""
    environ = {} if value is None else {"NCCL_IGNORE_CPU_AFFINITY": value}
    assert ignores_affinity(environ) is expected


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/venv/lib/python3.12/site-packages/nvidia/nccl/lib/libnccl.so.2", None),
        ("/a folder/nvidia/nccl/lib/libnccl.so.2", None),
        ("/usr/lib64/libnccl.so.2.29.7", None),
        ("/usr/lib64/libnccl.so.2.29.7 (deleted)", "/usr/lib64/libnccl.so.2.29.7"),
        ("/usr/lib64/libnccl_static.so", ""),
        ("/usr/lib64/libnccl.so.2.bak", ""),
        ("[anon:/libnccl.so.2]", ""),
    ],
)
def test_the_mapped_library(path: str, expected: str | None) -> None:
    """The library is found by its name; plugins and other files are not NCCL. None: the path as it is; "": none."""
    found = mapped_library(MAPS.format(path=path))
    assert found == (path if expected is None else expected or None)


@pytest.mark.parametrize(
    ("path", "version"),
    [
        ("/usr/lib/x86_64-linux-gnu/libnccl.so.2.29.7", "2.29.7"),
        ("/usr/lib/x86_64-linux-gnu/libnccl.so.2", None),
        ("/gone/nvidia/nccl/lib/libnccl.so.2", None),
        ("/usr/lib/libnccl.so.2.29.7.old", None),
    ],
)
def test_the_version_by_the_file_name(path: str, version: str | None) -> None:
    """A library outside a Python package has it in its name, or it is unknown."""
    assert library_version(path) == version


def test_the_version_of_a_python_package(tmp_path: Path) -> None:
    """The metadata of the package has it; it is unknown if two packages of different versions could have brought it."""
    folder = tmp_path / "nvidia/nccl/lib"
    folder.mkdir(parents=True)
    (folder / "libnccl.so.2").touch()
    (tmp_path / "torch-2.9.0.dist-info").mkdir()
    for package, version in (("cu12-2.27.3", "2.27.3"), ("cu13-2.27.3", "2.27.3"), ("cu11-2.21.5", None)):
        (tmp_path / f"nvidia_nccl_{package}.dist-info").mkdir()
        assert library_version(str(folder / "libnccl.so.2")) == version


def test_an_installed_library(tmp_path: Path) -> None:
    """The first folder with a library counts, and links are followed to the name with the version."""
    empty, full = tmp_path / "empty", tmp_path / "full"
    empty.mkdir()
    full.mkdir()
    (full / "libnccl.so.2.29.7").touch()
    (full / "libnccl.so.2").symlink_to("libnccl.so.2.29.7")
    assert installed_library(["", str(empty), str(full)]) == str(full / "libnccl.so.2.29.7")
    assert installed_library([str(empty)]) is None
