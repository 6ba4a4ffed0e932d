"""Files that the user named, and folders that are opened by descriptor."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest

from numapin.errors import NumapinError
from tests.needs import needs_root
from tests.unit.base.seam import OpenFolder, OpenPlace, is_writable, make_folders, make_own, opened, write_text_to

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
    """A link's target is replaced; a pipe is written to, and a pipe without a reader is an error."""
    link, target, pipe = (tmp_path / name for name in ("link", "target", "pipe"))
    link.symlink_to(target)
    write_text_to(str(link), "1", remedy="")
    assert (link.is_symlink(), target.read_text()) == (True, "1")
    os.mkfifo(pipe)
    with pytest.raises(NumapinError, match="pipe cannot be written") as caught:
        write_text_to(str(pipe), "", remedy="use --report")
    assert caught.value.hint == "use --report"
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_text_to(str(pipe), "2", remedy="")
    assert os.read(reader, 100) == b"2"
    (tmp_path / "to-pipe").symlink_to("pipe")
    (tmp_path / "to-descriptor").symlink_to(f"/dev/fd/{reader}")
    for number, path in enumerate((str(tmp_path / "to-pipe"), f"/dev/fd/{reader}", str(tmp_path / "to-descriptor"))):
        assert is_writable(path)
        write_text_to(path, str(number), remedy="")
        assert os.read(reader, 100) == str(number).encode()
    os.close(reader)
    assert pipe.is_fifo()


def test_pipes_that_are_not_read(tmp_path: Path) -> None:
    """A pipe without a reader is an error that says so; one whose reader does not read is one after a while."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(NumapinError, match="pipe cannot be written: no program reads this pipe"):
        write_text_to(str(pipe), "x", remedy="")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(NumapinError, match="pipe cannot be written: its reader has not read"):
        write_text_to(str(pipe), "x" * (1 << 20), remedy="", patience_s=0.2)
    writer = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)  # the pipe does not end before the text comes
    os.set_blocking(reader, True)
    with ThreadPoolExecutor() as pool:
        read = pool.submit(lambda: b"".join(iter(lambda: os.read(reader, 1 << 16), b"")))
        write_text_to(str(pipe), "y" * (1 << 20), remedy="", patience_s=10)
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
    """An existing file keeps its mode, a new one gets the umask's; nothing else is left in the folder."""
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
    assert {entry.name for entry in tmp_path.iterdir()} == {"old", "new"}


def test_text_that_cannot_be_encoded(tmp_path: Path) -> None:
    """A failed write leaves the old file, and nothing else."""
    path = tmp_path / "file"
    path.write_text("before")
    with pytest.raises(NumapinError, match=r"file cannot be written: .*surrogates"):
        write_text_to(str(path), "\ud800", remedy="")
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


@needs_root
class TestOthersFiles:
    """Files of another user, on a kernel with fs.protected_* on or off."""

    def test_root_does_not_take_a_users_file_away(self, tmp_path: Path) -> None:
        """A file that root replaces keeps its owner, group and mode."""
        path = tmp_path / "file"
        path.touch()
        path.chmod(0o640)
        os.chown(path, STRANGER, STRANGER + 1)
        write_text_to(str(path), "text", remedy="")
        found = path.stat()
        assert (found.st_uid, found.st_gid, found.st_mode & 0o777) == (STRANGER, STRANGER + 1, 0o640)
        assert path.read_text() == "text"

    @pytest.mark.parametrize("what", ["link", "file", "pipe", "folder's link"])
    def test_what_another_user_planted_is_refused(self, shared: Path, tmp_path: Path, what: str) -> None:
        """In a shared folder, another user's link, file or pipe is refused, also on the way to the file."""
        target, trap = tmp_path / "target", shared / "trap"
        target.write_text("before")
        path = trap
        if what == "link":
            trap.symlink_to(target)
        elif what == "file":
            trap.write_text("before")
        elif what == "pipe":
            os.mkfifo(trap)
        else:
            trap.symlink_to(tmp_path)
            path = trap / "target"
        os.chown(trap, STRANGER, STRANGER, follow_symlinks=False)
        kind = "link" if "link" in what else "file"
        told = rf"cannot be written: trap is a {kind} of another user \(uid {STRANGER}\)"
        with pytest.raises(NumapinError, match=told):
            write_text_to(str(path), "text", remedy="")
        assert not is_writable(str(path))
        assert target.read_text() == "before"
        assert list(shared.iterdir()) == [trap]

    def test_whose_links_root_follows(self, shared: Path, tmp_path: Path) -> None:
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

    def test_a_folder_of_ones_own(self, shared: Path) -> None:
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
