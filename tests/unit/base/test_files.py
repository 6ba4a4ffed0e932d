"""Files that the user named, read and written; folders that are opened by descriptor."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest

from numapin import discover
from numapin.errors import NumapinError
from tests.needs import needs_root
from tests.unit.base.seam import (
    OpenFolder,
    OpenPlace,
    Tree,
    is_writable,
    make_folders,
    make_own,
    opened,
    read_file,
    write_text_to,
)

STRANGER = 54321


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """Give a folder that everybody may write to, as /tmp, in a folder that everybody may enter."""
    tmp_path.chmod(0o755)
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def test_links_and_pipes_stay_what_they_are(tmp_path: Path) -> None:
    """A link's target is replaced; a pipe is written to, also through links and descriptors."""
    link, target, pipe = (tmp_path / name for name in ("link", "target", "pipe"))
    link.symlink_to(target)
    write_text_to(str(link), "1", remedy="")
    assert (link.is_symlink(), target.read_text()) == (True, "1")
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    (tmp_path / "to-pipe").symlink_to("pipe")
    (tmp_path / "to-descriptor").symlink_to(f"/dev/fd/{reader}")
    for path in (str(pipe), str(tmp_path / "to-pipe"), f"/dev/fd/{reader}", str(tmp_path / "to-descriptor")):
        assert is_writable(path)
        write_text_to(path, path, remedy="")
        assert os.read(reader, 100) == path.encode()
    os.close(reader)
    assert pipe.is_fifo()


def test_pipes_that_are_not_read(tmp_path: Path) -> None:
    """A pipe without a reader is an error that says so; one whose reader does not read is one after a while."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(NumapinError, match="pipe cannot be written: no program reads this pipe") as caught:
        write_text_to(str(pipe), "x", remedy="use --report")
    assert caught.value.hint == "use --report"
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(NumapinError, match="pipe cannot be written: its reader has not read"):
        write_text_to(str(pipe), "x" * (1 << 20), remedy="", patience_s=0.2)
    writer = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)  # the pipe does not end before the text comes
    os.set_blocking(reader, True)
    with ThreadPoolExecutor() as pool:
        read = pool.submit(lambda: b"".join(iter(lambda: os.read(reader, 1 << 16), b"")))
        write_text_to(str(pipe), "y" * (1 << 20), remedy="", patience_s=60)
        os.close(writer)
    assert read.result().count(b"y") == 1 << 20
    os.close(reader)


def test_ways_to_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative paths, .. and links to folders, absolute or not, are resolved as the kernel resolves them."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "up").symlink_to("../a/b/..")
    (tmp_path / "absolute").symlink_to(tmp_path / "a" / "up")
    (tmp_path / "a" / "b" / "named").symlink_to("../../other")
    monkeypatch.chdir(tmp_path / "a")
    for number, path in enumerate(("x", "./b/../x", "up//b/x", f"{tmp_path}/absolute/b/x", "b/named", "up/b/named")):
        write_text_to(path, str(number), remedy="")
        with open(path) as file:  # noqa: PTH123 - pathlib would tidy the path up
            assert file.read() == str(number)
    assert (tmp_path / "other").read_text() == "5"


@pytest.mark.parametrize("path", ["loop", "loop/x", "file/x", "gone/x", ".", "a\0b"])
def test_where_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """An invalid path is an error that names it, and is detected before anything is written."""
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    assert "\0" in path or not is_writable(path)
    with pytest.raises((NumapinError, ValueError)):
        write_text_to(path, "", remedy="")
    assert {entry.name for entry in tmp_path.iterdir()} == {"loop", "file"}


def test_the_mode_of_a_file_stays(tmp_path: Path) -> None:
    """An existing file keeps its mode, a new one gets the umask's. A failed write leaves the old file.

    Nothing else is left in the folder.
    """
    old, new = tmp_path / "old", tmp_path / "new"
    old.touch()
    before = os.umask(0o027)
    try:
        for mode in (0o600, 0o664, 0o444):
            old.chmod(mode)
            write_text_to(str(old), "", remedy="")
            assert old.stat().st_mode & 0o7777 == mode
        write_text_to(str(new), "", remedy="")
    finally:
        os.umask(before)
    assert new.stat().st_mode & 0o7777 == 0o640
    new.write_text("before")
    with pytest.raises(NumapinError, match=r"new cannot be written: .*surrogates"):
        write_text_to(str(new), "\ud800", remedy="")
    assert new.read_text() == "before"
    assert {entry.name for entry in tmp_path.iterdir()} == {"old", "new"}


# --- files of another user, on a kernel with fs.protected_* on or off ------------------------------------------------


@needs_root
def test_root_does_not_take_a_users_file_away(tmp_path: Path) -> None:
    """A file that root replaces keeps its owner, group and mode."""
    path = tmp_path / "file"
    path.touch()
    path.chmod(0o640)
    os.chown(path, STRANGER, STRANGER + 1)
    write_text_to(str(path), "text", remedy="")
    found = path.stat()
    assert (found.st_uid, found.st_gid, found.st_mode & 0o777) == (STRANGER, STRANGER + 1, 0o640)
    assert path.read_text() == "text"


PLANTED: dict[str, tuple[str, Callable[[Path, Path], object]]] = {
    "link": ("link", lambda trap, target: trap.symlink_to(target)),
    "file": ("file", lambda trap, target: shutil.copyfile(target, trap)),
    "pipe": ("file", lambda trap, _: os.mkfifo(trap)),
    "folder's link": ("link", lambda trap, target: trap.symlink_to(target.parent)),
}


@needs_root
@pytest.mark.parametrize("what", PLANTED)
def test_what_another_user_planted_is_refused(shared: Path, tmp_path: Path, what: str) -> None:
    """In a shared folder, another user's link, file or pipe is refused, also on the way to the file."""
    target, trap = tmp_path / "target", shared / "trap"
    target.write_text("before")
    kind, plant = PLANTED[what]
    plant(trap, target)
    os.chown(trap, STRANGER, STRANGER, follow_symlinks=False)
    path = trap / "target" if what == "folder's link" else trap
    with pytest.raises(NumapinError, match=rf"cannot be written: trap is a {kind} of another user \(uid {STRANGER}\)"):
        write_text_to(str(path), "text", remedy="")
    assert not is_writable(str(path))
    assert target.read_text() == "before"
    assert list(shared.iterdir()) == [trap]


@needs_root
def test_whose_links_root_follows(shared: Path, tmp_path: Path) -> None:
    """Root follows its own links anywhere, and no link of another user, not even in that user's own folder."""
    target = tmp_path / "target"
    target.write_text("before")
    os.chown(shared, STRANGER, STRANGER)
    places = ((shared, 0, True), (shared, STRANGER, False), (tmp_path, STRANGER, False))
    for number, (folder, owner, is_followed) in enumerate(places):
        link = folder / f"link-{number}"
        link.symlink_to(target)
        os.chown(link, owner, owner, follow_symlinks=False)
        before = target.read_text()
        with nullcontext() if is_followed else pytest.raises(NumapinError, match="which root does not follow"):
            write_text_to(str(link), str(number), remedy="")
        assert (target.read_text(), link.is_symlink()) == (str(number) if is_followed else before, True)


@needs_root
def test_a_folder_of_ones_own(shared: Path) -> None:
    """A new folder is private; another user's folder is refused, also behind a link of one's own."""
    made, others, link = (shared / name for name in ("made", "others", "link"))
    for _ in range(2):
        make_own(str(made / "inner"))
    assert (made / "inner").stat().st_mode & 0o777 == 0o700
    others.mkdir()
    os.chown(others, STRANGER, STRANGER)
    link.symlink_to(others)
    for path in (others, link):
        with pytest.raises(PermissionError, match=f"belongs to another user \\(uid {STRANGER}\\)"):
            make_own(str(path))


@pytest.mark.parametrize("path", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
def test_a_stream_that_goes_to_a_file_is_continued(tmp_path: Path, path: str) -> None:
    """If stdout is a log file, what others wrote to it stays, and they can go on."""
    log = tmp_path / "job.log"
    code = f"from numapin.base.files import write_text_to; write_text_to({path!r}, 'ours\\n', remedy='')"
    with log.open("a") as stdout:
        stdout.write("before\n")
        stdout.flush()
        subprocess.run([sys.executable, "-c", code], stdout=stdout, check=True)
        stdout.write("after\n")
    assert log.read_text() == "before\nours\nafter\n"


# --- folders opened by descriptor ------------------------------------------------------------------------------------


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


# --- untrusted files: what is read, and what is refused without waiting ----------------------------------------------


def test_odd_files_are_refused_with_the_reason(tmp_path: Path) -> None:
    """Pipes do not block, devices are not read; the error has the path and a reason."""
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "file").touch()
    (tmp_path / "to-pipe").symlink_to("pipe")
    for name, reason in {
        "pipe": "not a regular file",
        "to-pipe": "not a regular file",
        "socket": "No such device or address",
        "": "not a regular file",
        "circle": "Too many levels of symbolic links",
        "file/below": "Not a directory",
        "missing": "No such file or directory",
        "x" * 5000: "File name too long",
        "/dev/zero": "not a regular file",
        "/dev/null": "not a regular file",
        "a\0b": "not a file name: embedded null byte",
    }.items():
        path = str(tmp_path / name)
        with pytest.raises(OSError, match=reason) as caught:
            read_file(path, max_bytes=100)
        assert caught.value.filename == path


def test_nccl_topo_file_is_refused_with_a_note(tmp_path: Path) -> None:
    """Like NCCL, planning goes on without an NCCL file that cannot be read."""
    os.mkfifo(tmp_path / "pipe")
    notes = discover(environ={"NCCL_TOPO_FILE": str(tmp_path / "pipe")}).notes
    assert any("NCCL_TOPO_FILE was not used" in note and "not a regular file" in note for note in notes)


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
    with pytest.raises(OSError, match="not a regular file"):
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


# --- a captured machine, whose links stay inside as if its root were "/" ---------------------------------------------


@pytest.fixture
def capture(tmp_path: Path) -> Tree:
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
def test_links_inside_are_followed(capture: Tree, target: str) -> None:
    """Absolute links start at the capture's root, and ".." does not lead above it."""
    Path(capture.root, "sys", "link").symlink_to(target)
    assert capture.number("sys/link") == 7


@pytest.mark.parametrize("target", ["{outside}", "../../secret", "../../../..{outside}", "/..{outside}", "."])
def test_links_outside_lead_nowhere(capture: Tree, target: str, tmp_path: Path) -> None:
    """No file, directory or link outside the root is read, through the last name of a path or through others."""
    folder = Path(capture.root, "sys", "out")
    folder.symlink_to(target.format(outside=tmp_path / "secret"))
    assert capture.link("sys/out/link") is None
    assert "file" not in capture.names("sys/out")
    for path in ("sys/out/file", "../secret/file", "sys/../../secret/file"):
        assert capture.text(path) is None


def test_what_is_no_file_is_unknown(capture: Tree) -> None:
    """A pipe, a socket, a directory and links in a circle are not read, and neither block nor leave a descriptor.

    Of a huge file, here a sparse one, 64 KiB are read.
    """
    sys = Path(capture.root, "sys")
    (sys / "one").symlink_to("two")
    (sys / "two").symlink_to("/sys/one")
    os.mkfifo(sys / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(sys / "socket"))
    before = len(list(Path("/proc/self/fd").iterdir()))
    for name in ("pipe", "socket", "a", "missing", "one", "a/file/x", "\0"):
        assert capture.data(f"sys/{name}") is None
        capture.names(f"sys/{name}")
        capture.link(f"sys/{name}")
    os.truncate(sys / "a" / "file", 1 << 40)
    assert len(capture.data("sys/a/file") or b"") == 65537
    assert len(list(Path("/proc/self/fd").iterdir())) == before
