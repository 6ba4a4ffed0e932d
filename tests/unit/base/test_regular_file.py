"""Untrusted files: what is read, and what is refused without waiting."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from numapin import discover
from numapin.errors import MachineError
from tests.unit.base.seam import Tree, read_file, read_plan_file

if TYPE_CHECKING:
    from collections.abc import Callable

JSON = '{"schema": 1}'


def odd_files(folder: Path) -> dict[str, str]:
    """Make irregular files and impossible names; return the reason for refusal of each."""
    os.mkfifo(folder / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / "socket"))
    (folder / "circle").symlink_to("circle")
    (folder / "file").write_text(JSON)
    (folder / "to-pipe").symlink_to("pipe")
    return {
        str(folder / "pipe"): "a named pipe, not a regular file",
        str(folder / "to-pipe"): "a named pipe, not a regular file",
        str(folder / "socket"): "a socket or device that cannot be opened, not a regular file",
        str(folder): "a directory, not a regular file",
        str(folder / "circle"): "Too many levels of symbolic links",
        str(folder / "file" / "below"): "Not a directory",
        str(folder / "missing"): "No such file or directory",
        str(folder / ("x" * 5000)): "File name too long",
        "/dev/zero": "a device, not a regular file",
        "/dev/null": "a device, not a regular file",
        "a\0b": "not a file name: embedded null byte",
    }


def test_odd_files_are_refused_with_the_reason(tmp_path: Path) -> None:
    """Pipes do not block, devices are not read; the error has the path and says what it is."""
    for path, reason in odd_files(tmp_path).items():
        with pytest.raises(OSError, match=reason) as caught:
            read_file(path, max_bytes=100)
        assert caught.value.filename == path


@pytest.mark.parametrize("read", [lambda path: discover(machine=Path(path)), read_plan_file])
def test_every_reader_of_a_named_file_refuses_them(read: Callable[[str], object], tmp_path: Path) -> None:
    """--machine and --plan include the reason in their own error."""
    for path, reason in odd_files(tmp_path).items():
        with pytest.raises(MachineError, match=reason) as caught:
            read(path)
        assert caught.value.hint


def test_nccl_topo_file_is_refused_with_a_note(tmp_path: Path) -> None:
    """Like NCCL, planning goes on without an NCCL file that cannot be read."""
    os.mkfifo(tmp_path / "pipe")
    notes = discover(environ={"NCCL_TOPO_FILE": str(tmp_path / "pipe")}).notes
    assert any("NCCL_TOPO_FILE was not used" in note and "a named pipe" in note for note in notes)


def test_a_pipe_of_this_process_is_read_to_its_end() -> None:
    """<(command) and /dev/stdin are pipes that the user named on purpose; the writer may be slower than the reader."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        for _ in range(3):
            os.write(writing, b"x" * 100_000)
        os._exit(0)
    os.close(writing)
    try:
        assert len(read_file(f"/dev/fd/{reading}", max_bytes=1 << 20)) == 300_000
    finally:
        os.close(reading)
        os.waitpid(child, 0)


@pytest.mark.parametrize("folder", ["/dev/fd", "/proc/self/fd"])
def test_a_pipe_on_the_way_from_the_descriptors_is_not_one_of_them(tmp_path: Path, folder: str) -> None:
    """A named pipe whose path only begins like a descriptor's is refused at once. A writer keeps it from ending."""
    pipe = tmp_path / "7"
    os.mkfifo(pipe)
    writer = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    os.write(writer, b"{}")
    path = f"{folder}/../../../..{pipe}"
    with pytest.raises(OSError, match="a named pipe, not a regular file"):
        read_file(path, max_bytes=1)  # which would return two bytes of the pipe
    os.close(writer)


def test_a_file_has_a_largest_size(tmp_path: Path) -> None:
    """A file of one byte too many is refused; the message names the bound."""
    path = tmp_path / "file"
    path.write_bytes(b"x" * (1 << 20))
    assert len(read_file(str(path), max_bytes=1 << 20)) == 1 << 20
    path.write_bytes(b"x" * ((1 << 20) + 1))
    with pytest.raises(OSError, match="larger than 1 MiB, which no plan is"):
        read_file(str(path), max_bytes=1 << 20, what="plan")


class TestCaptures:
    """A captured machine, whose links stay inside as if its root were "/"."""

    @pytest.fixture
    def capture(self, tmp_path: Path) -> Tree:
        """Make a capture with a file, and a secret outside of it."""
        (tmp_path / "secret").mkdir()
        (tmp_path / "secret" / "file").write_text("1")
        (tmp_path / "secret" / "link").symlink_to("x")
        (tmp_path / "root" / "sys" / "a").mkdir(parents=True)
        (tmp_path / "root" / "sys" / "a" / "file").write_text("7")
        return Tree(str(tmp_path / "root"))

    @pytest.mark.parametrize(
        "target",
        ["/sys/a/file", "a/file", "../sys/a/file", "../../../../sys/a/file", "/../sys/./a//file", "/sys/a/../a/file"],
    )
    def test_links_inside_are_followed(self, capture: Tree, target: str) -> None:
        """Absolute links start at the capture's root, and ".." does not lead above it."""
        Path(capture.root, "sys", "link").symlink_to(target)
        assert capture.number("sys/link") == 7

    @pytest.mark.parametrize("target", ["{outside}", "../../secret", "../../../..{outside}", "/..{outside}", "."])
    def test_links_outside_lead_nowhere(self, capture: Tree, target: str, tmp_path: Path) -> None:
        """No file, directory or link outside the root is read, through the last name of a path or through others."""
        folder = Path(capture.root, "sys", "out")
        folder.symlink_to(target.format(outside=tmp_path / "secret"))
        assert capture.text("sys/out/file") is None
        assert capture.link("sys/out/link") is None
        assert "file" not in capture.names("sys/out")
        assert capture.text("../secret/file") is None
        assert capture.text("sys/../../secret/file") is None

    def test_links_in_a_circle_lead_nowhere(self, capture: Tree) -> None:
        """Circular links are unknown, and take no time."""
        Path(capture.root, "sys", "one").symlink_to("two")
        Path(capture.root, "sys", "two").symlink_to("/sys/one")
        assert capture.text("sys/one") is None

    def test_what_is_no_file_is_unknown(self, capture: Tree) -> None:
        """A pipe, a socket, a directory and a link to a device are not read, and do not block."""
        sys = Path(capture.root, "sys")
        os.mkfifo(sys / "pipe")
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(os.path.relpath(sys / "socket"))
        assert [capture.data(f"sys/{name}") for name in ("pipe", "socket", "a", "missing")] == [None] * 4

    def test_no_descriptor_is_left_open(self, capture: Tree) -> None:
        """Descriptors are closed however the walk ends."""
        Path(capture.root, "sys", "link").symlink_to("/sys/a/file")
        Path(capture.root, "sys", "circle").symlink_to("circle")
        before = len(list(Path("/proc/self/fd").iterdir()))
        for path in ("sys/link", "sys/circle", "sys/a", "sys/missing", "sys/a/file/x", "sys/\0"):
            capture.data(path)
            capture.names(path)
            capture.link(path)
        assert len(list(Path("/proc/self/fd").iterdir())) == before

    def test_a_large_file_is_read_in_part(self, capture: Tree) -> None:
        """Of a huge file, here a sparse one, 64 KiB are read."""
        os.truncate(Path(capture.root, "sys", "a", "file"), 1 << 40)
        assert len(capture.data("sys/a/file") or b"") == 65537
