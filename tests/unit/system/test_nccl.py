"""NCCL's version and its effect on the affinity, from names and metadata; no NCCL is loaded or installed."""

from __future__ import annotations

from pathlib import Path

from tests.recorded.screens import compare_answers
from tests.unit.system.seam import ignores_affinity, installed_library, library_version, mapped_library, narrows

MAPS = """7f1000000000-7f1000001000 r--p 00000000 08:01 17 /usr/lib/x86_64-linux-gnu/libc.so.6
7f1000002000-7f1000003000 r--p 00000000 08:01 18 /opt/plugins/libnccl-net.so
7f1000004000-7f1000005000 r--p 00000000 08:01 19                        {path}
7f1000006000-7f1000007000 rw-p 00000000 00:00 0 [heap]
7f1000008000-7f1000009000 rw-p 00000000 00:00 0
"""


def _answer(line: str) -> str:
    question, _, text = line.partition(" ")
    if question == "narrows":
        return str(narrows(text or None))
    if question == "ignores":
        return str(ignores_affinity({} if text == "unset" else {"NCCL_IGNORE_CPU_AFFINITY": text}))
    return str(mapped_library(MAPS.format(path=text)) if question == "mapped" else library_version(text))


def test_what_is_known_about_nccl() -> None:
    """The versions that narrow the affinity, the variable, the library of a process, and its version by its name."""
    compare_answers(Path(__file__).with_name("nccl.txt"), _answer)


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
