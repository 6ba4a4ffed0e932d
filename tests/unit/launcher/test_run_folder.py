"""The run directory: its place, its privacy, what is swept, and files that are complete or absent."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest

from numapin import Bind, Memory, Plan
from numapin.errors import NumapinError
from tests.needs import needs_root
from tests.recorded.screens import compare_answers
from tests.unit.launcher.seam import handover, run_folder
from tests.unit.planned import PLANNED

pytestmark = pytest.mark.usefixtures("only_places_of_the_test")


def _open_to_all(path: Path) -> None:
    path.mkdir()
    path.chmod(0o777)


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 34)


MADE: dict[str, Callable[[Path], None]] = {
    "nothing": lambda _: None,
    "a file": Path.touch,
    "a folder": lambda path: path.mkdir(mode=0o700),
    "a folder open to all": _open_to_all,
    "a link": lambda path: path.symlink_to("elsewhere"),
    "a pipe": os.mkfifo,
    "a huge file": _huge,
}
"""What may be at a path."""


def test_the_named_folder_comes_first(tmp_path: Path) -> None:
    """NUMAPIN_RUN_DIR beats TMPDIR, and XDG_RUNTIME_DIR is ignored; only a folder that the user named stays."""
    named, runtime, temporary = (tmp_path / name for name in ("named", "runtime", "tmp"))
    for path in (runtime, temporary):
        path.mkdir()
    environ = {"NUMAPIN_RUN_DIR": str(named), "XDG_RUNTIME_DIR": str(runtime), "TMPDIR": str(temporary)}
    for variable, base in (("NUMAPIN_RUN_DIR", named), ("TMPDIR", temporary)):
        with run_folder.run_directory(environ) as made:
            path = Path(made)
            assert (path.parent, path.stat().st_mode & 0o777) == (base, 0o700)
        assert path.exists() == (variable == "NUMAPIN_RUN_DIR")
        del environ[variable]
    assert not list(runtime.iterdir())


@pytest.mark.parametrize("what", ["nothing", "a file", "a folder open to all", "a folder"])
def test_a_temporary_directory_that_does_not_serve_is_passed_over(tmp_path: Path, what: str) -> None:
    """A TMPDIR that does not exist, or in which others could replace our folder, stops no job; all places are read."""
    first, place = tmp_path / "first", tmp_path / "place"
    place.mkdir()
    MADE[what](first)
    environ = {"TMPDIR": str(first), "TEMP": str(place)}
    with run_folder.run_directory({"TEMP": str(place)} if what == "a folder" else environ) as path:
        assert Path(path).parent == place
        assert run_folder.live_runs(environ) == [path]


@pytest.mark.parametrize("mode", [0o755, 0o1777, 0o775, 0o757])
def test_who_may_write_to_the_named_folder(tmp_path: Path, mode: int) -> None:
    """Others who may could replace the run's folder. The error has the command that fixes the mode."""
    tmp_path.chmod(mode)
    is_refused = mode in (0o775, 0o757)
    with (
        pytest.raises(NumapinError) if is_refused else nullcontext() as caught,
        run_folder.run_directory({"NUMAPIN_RUN_DIR": str(tmp_path)}) as path,
    ):
        assert Path(path).stat().st_mode & 0o777 == 0o700
    if caught is not None:
        assert caught.value.message.endswith(f"{tmp_path}: others may write to it (mode {mode:04o})")
        assert caught.value.hint == f"chmod go-w {tmp_path}, or name another with NUMAPIN_RUN_DIR=DIR"


def test_a_link_of_ones_own_is_followed(tmp_path: Path) -> None:
    """NUMAPIN_RUN_DIR and TMPDIR may be links of the user, e.g. to a scratch disk; a run counts once."""
    (tmp_path / "scratch").mkdir()
    (tmp_path / "link").symlink_to("scratch")
    for variable in ("NUMAPIN_RUN_DIR", "TMPDIR"):
        with run_folder.run_directory({variable: str(tmp_path / "link")}) as path:
            assert (tmp_path / "scratch") in Path(path).resolve().parents
            handover.write_json(path, handover.PLAN, {})
            assert run_folder.live_runs({variable: str(tmp_path / "link")}) == [path]
    both = {"TMPDIR": str(tmp_path / "scratch"), "TEMP": str(tmp_path / "link")}
    with run_folder.run_directory(both) as path:
        assert run_folder.live_runs(both) == [path] == run_folder.all_runs(both)[-1:]
        assert run_folder.find_folder(Path(path).name, both) == path


HOST = os.uname().nodename
OWN = f"numapin-{os.getuid()}"
OVER = f"{OWN}-20261122-101112-{HOST}-0a1b2c3d"


def _left(base: Path, name: str, *, lock: str = "a file") -> Path:
    """Leave a folder as a killed launcher does."""
    folder = base / name
    folder.mkdir(parents=True, mode=0o700)
    MADE[lock](folder / "lock")
    return folder


@pytest.mark.parametrize("variable", ["TMPDIR", "NUMAPIN_RUN_DIR"])
def test_only_runs_that_are_over_are_swept(tmp_path: Path, variable: str) -> None:
    """Runs of this host with a free lock are removed from the default place; active and named ones stay.

    A cleaner of temporary files may remove the lock of an active one; the launcher holds the folder, too.
    """
    environ = {variable: str(tmp_path)}
    over = _left(tmp_path, OVER)
    (over / "link").symlink_to(tmp_path)
    with run_folder.run_directory(environ) as live:
        # flock is per open file: this process's second run sees the first one's lock as another process would.
        for _ in range(2):
            with run_folder.run_directory(environ):
                assert Path(live).is_dir()
            assert over.exists() == (variable == "NUMAPIN_RUN_DIR")
            assert tmp_path.is_dir()
            Path(live, "lock").unlink(missing_ok=True)
            os.utime(live, (0, 0))


def test_what_is_swept(tmp_path: Path) -> None:
    """Only a run of this host is swept, as recorded; NUMAPIN_UPDATE_GOLDEN=1 records it anew."""

    def answer(line: str) -> str:
        name, lock, age_s = re.split(" [|] |, ", line.removesuffix(" s"))
        name = name.replace("OWN", OWN).replace("HOST", HOST).replace("UID", str(os.getuid()))
        left = _left(tmp_path, name, lock=lock)
        for other in (left / "elsewhere", left / "plan.json", left / ".lock"):
            other.touch()
        os.utime(left, (time.time() - float(age_s),) * 2)
        with run_folder.run_directory({"TMPDIR": str(tmp_path)}):
            stays = left.exists()
        shutil.rmtree(left, ignore_errors=True)
        return "stays" if stays else "removed"

    compare_answers(Path(__file__).with_name("swept.txt"), answer)


def test_another_folder_in_place_of_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where others may rename, they can put a folder of this user there at once: it is not used, and stays whole."""
    tmp_path.chmod(0o777)
    data = tmp_path / "data"
    mkdir = os.mkdir

    def swapped(path: str, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        mkdir(path, mode, dir_fd=dir_fd)
        mkdir(data, 0o700)
        (data / "thesis").write_text("years")
        os.rename(path, "away", src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        os.rename(data, path, dst_dir_fd=dir_fd)
        monkeypatch.undo()

    monkeypatch.setattr(os, "mkdir", swapped)
    with run_folder.run_directory({"TMPDIR": str(tmp_path)}) as path:
        (found,) = tmp_path.glob("*/thesis")
        assert found.parent != Path(path)
        assert found.read_text() == "years"
    assert [file.name for file in found.parent.iterdir()] == ["thesis"]


@needs_root
def test_the_named_folder_is_not_made_behind_another_users_link(tmp_path: Path) -> None:
    """The link is refused before anything is made."""
    (tmp_path / "link").symlink_to(tmp_path / "target")
    (tmp_path / "target").mkdir()
    os.chown(tmp_path / "link", 54321, 54321, follow_symlinks=False)
    named = {"NUMAPIN_RUN_DIR": str(tmp_path / "link" / "a" / "b")}
    with pytest.raises(NumapinError, match="link is a link of another user"), run_folder.run_directory(named):
        pass
    assert not list((tmp_path / "target").iterdir())


def test_no_place_has_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run starts with a warning, is active for as long as its launcher runs, and is swept by no other."""

    def without(*_: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", without)
    environ = {"TMPDIR": str(tmp_path)}
    child = os.fork()
    if child == 0:
        with run_folder.run_directory(environ):
            os._exit(0)
    os.waitpid(child, 0)
    (ended,) = tmp_path.iterdir()
    with run_folder.run_directory(environ) as path:
        assert run_folder.live_runs(environ) == [path]
    assert capsys.readouterr().err == (
        f"numapin: warning: the run's folder is in {tmp_path} because there is no better place "
        f"(skipped: {tmp_path}: Function not implemented); name another with NUMAPIN_RUN_DIR=DIR\n"
    )
    assert ended.exists()
    assert not Path(path).exists()


def test_the_only_place_is_open_to_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A volume that Kubernetes mounts at /tmp has this mode; torchrun starts there, too. Nothing is removed there.

    Another user can give any folder of ours a run's name, or our run's own name in the middle of it.
    """
    environ, data = {"TMPDIR": str(tmp_path)}, tmp_path / "data"
    tmp_path.chmod(0o777)
    data.mkdir(mode=0o700)
    (data / "thesis").write_text("years")
    with run_folder.run_directory(environ) as path:
        assert Path(path).stat().st_mode & 0o777 == 0o700
        assert run_folder.live_runs(environ) == [path]
        handover.write_json(path, handover.PLAN, {})
        Path(path).rename(tmp_path / "away")
        data.rename(path)
    assert "others may write to it (mode 0777)" in capsys.readouterr().err
    assert (Path(path) / "thesis").read_text() == "years"
    os.utime(path, (0, 0))
    with run_folder.run_directory(environ):
        assert (Path(path) / "thesis").read_text() == "years"


@pytest.mark.parametrize(
    ("around", "what", "why"),
    [
        ("a folder open to all", "nothing", "No such file"),
        ("a folder", "a link", ""),
        ("a folder", "a folder open to all", r"others may write to it \(mode 0777\)"),
    ],
)
def test_where_a_rank_writes_nothing(tmp_path: Path, around: str, what: str, why: str) -> None:
    """A run's folder that is gone is not made again, because another user may have made the folder around it.

    Nor is one used that others can change, or what took its place.
    """
    base, run = tmp_path / "base", tmp_path / "base" / "run-1"
    MADE[around](base)
    MADE[what](run)
    if what == "a link":
        (base / "elsewhere").mkdir()
    with pytest.raises(NumapinError, match=rf"run-1/b\.json cannot be written: .*{why}") as caught:
        handover.write_json(str(run), "b.json", {"n": 1})
    assert caught.value.hint == "name another with NUMAPIN_RUN_DIR=DIR"
    assert handover.folder_id(str(run)) is None
    assert not list(tmp_path.rglob("b.json"))
    assert os.path.lexists(run) == (what != "nothing")


def test_systemd_tmpfiles_leaves_an_active_run(tmp_path: Path) -> None:
    """The cleaner of /tmp skips the folder while the run lives, however old its files are, and removes it later."""
    tool = shutil.which("systemd-tmpfiles")
    if tool is None:
        pytest.skip("systemd-tmpfiles is missing")
    settings = tmp_path / "settings.conf"
    settings.write_text(f"e {tmp_path / 'place'} - - - mM:1h -\n")
    environ = {"TMPDIR": str(tmp_path / "place")}
    (tmp_path / "place").mkdir()

    def clean(folder: Path) -> None:
        for path in (*folder.iterdir(), folder, folder.parent):
            os.utime(path, (0, 0))
        subprocess.run([tool, "--clean", str(settings)], check=True)

    with run_folder.run_directory(environ) as path:
        handover.write_json(path, handover.PLAN, {})
        clean(Path(path))
        assert sorted(entry.name for entry in Path(path).iterdir()) == ["lock", "plan.json"]
    ended = _left(Path(path).parent, OVER)
    clean(ended)
    assert not ended.exists()


@pytest.mark.parametrize("kept", [handover.REPORT, handover.LOGS])
def test_the_last_ten_reports_and_logs_stay(tmp_path: Path, kept: str) -> None:
    """A failed run leaves its folder until the next; one with a report or logs stays until there are ten newer ones.

    Logs also stay if the run succeeds.
    """
    environ = {"TMPDIR": str(tmp_path)}
    folders = []
    for number in range(13):
        with suppress(KeyError), run_folder.run_directory(environ) as folder:
            if number < 12:
                Path(folder, kept).touch()
            if number == 12 or kept == handover.REPORT:
                raise KeyError
        # Runs that start in the same second have names in no order.
        folders.append(Path(folder).rename(re.sub("-[0-9]{6}-", f"-{number:06}-", folder)))
    with run_folder.run_directory(environ):
        assert [folder.exists() for folder in folders] == [False] * 2 + [True] * 10 + [False]


@pytest.mark.parametrize("what", ["a pipe", "a link", "a huge file", "a folder"])
def test_what_no_run_wrote_is_not_read(tmp_path: Path, what: str) -> None:
    """A pipe, which would block the reader, a link, a folder and a huge file are errors, and not locks."""
    MADE[what](tmp_path / "lock")
    (tmp_path / "elsewhere").touch()
    with pytest.raises(OSError, match="larger than 16 MiB" if what == "a huge file" else "not a regular file"):
        handover.read_text(str(tmp_path / "lock"))
    assert not run_folder.is_live(str(tmp_path))


def test_a_plan_without_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An unwritable run directory is a warning: the ranks have the plan in their environment."""
    (tmp_path / "file").touch()
    plan, environ = Plan(bind=Bind.NODE, memory=Memory.BIND, ranks=(PLANNED,)), {"NUMAPIN_RUN_DIR": str(tmp_path)}
    assert handover.planned(environ) is None
    handover.hand_over(plan, str(tmp_path), environ)
    handover.hand_over(plan, str(tmp_path / "file" / "run"), {})
    assert "numapin: warning: no record of this run: " in capsys.readouterr().err
    found = handover.planned(environ)
    assert found is not None
    assert Plan.from_json(found[0]) == plan
