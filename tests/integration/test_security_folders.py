"""A second user of the host sets traps in the temporary directory, in $XDG_RUNTIME_DIR, and where commands write.

Two users besides root act in forks of this process, which has loaded all modules: the checkout may be in a folder that
only root can enter. If fs.protected_symlinks is on, the kernel stops some attacks before numapin does.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import pickle
import shutil
import stat
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, Final

import pytest

from tests.integration.launching import NUMAPIN, environment, numapin, script
from tests.integration.seam import handover, run_folder, write_text_to
from tests.moments import acting
from tests.needs import needs_root

pytestmark = needs_root

ATTACKER: Final = 65534
VICTIM: Final = 54321
OVER: Final = f"20261122-101112-{os.uname().nodename}-0a1b2c3d"
"""The end of the name of a run of this host."""
OWN: Final = f"numapin-{VICTIM}-{OVER}"
_PR_SET_DUMPABLE: Final = 4  # sys/prctl.h
_CLONE_NEWUSER: Final = 0x10000000  # sched.h
_TAKEN_OVER: Final = f"""
import os, shutil, sys
folder, error_file = os.environ["NUMAPIN_RUN_DIR"], os.environ["TORCHELASTIC_ERROR_FILE"]
print(folder, error_file, sorted(os.listdir(folder)), flush=True)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    shutil.rmtree(folder)
    os.mkdir(folder)
    os.chown(folder, {ATTACKER}, {ATTACKER})
    os.chmod(folder, 0o777)
    sys.exit(1)
"""
_LINKED_ELSEWHERE: Final = f"""
import os, sys
logs, target = sys.argv[1:]
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    (name,) = os.listdir(logs)
    os.rename(f"{{logs}}/{{name}}", f"{{logs}}/moved")
    os.symlink(target, f"{{logs}}/{{name}}")
    os.lchown(f"{{logs}}/{{name}}", {ATTACKER}, {ATTACKER})
    sys.exit(1)
"""
_LINKED_LOG: Final = f"""
import glob, os, sys
(log,) = glob.glob(f"{{sys.argv[1]}}/*/*/filtered_stdout.log")
os.unlink(log)
os.symlink(sys.argv[2], log)
os.lchown(log, {ATTACKER}, {ATTACKER})
print("a line")
"""
SHOW: Final = """
import os
folder = os.environ["NUMAPIN_RUN_DIR"]
print(os.stat(folder).st_uid, oct(os.stat(folder).st_mode & 0o777))
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """Give a folder like /tmp: all users may write to it, and only owners may remove files."""
    folder = Path(tempfile.mkdtemp(prefix="numapin-test-"))
    try:
        folder.chmod(0o1777)
        yield folder
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def home(place: Path) -> Path:
    folder = place / "home"
    as_user(VICTIM, _private, folder)
    return folder


def _private(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / "secret").write_text("before")


def as_user(uid: int, call: Callable[..., Any], *args: object) -> Any:
    """Call a function as another user, in its own process, and return its result."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            result = (call(*args), "")
        except BaseException:  # noqa: BLE001 - said in the parent
            result = (None, traceback.format_exc())
        with os.fdopen(writer, "wb") as file:
            pickle.dump(result, file)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        got, error = pickle.load(file)  # noqa: S301 - our own
    os.waitpid(child, 0)
    assert not error, error
    return got


def _tree(folder: Path) -> dict[str, tuple[int, int, int, int]]:
    """Return the contents of a folder, with the properties that any change would alter."""
    found = {str(path): path.lstat() for path in (folder, *folder.rglob("*"))}
    return {path: (it.st_ino, it.st_uid, it.st_mode, it.st_mtime_ns) for path, it in found.items()}


def _plant_run(folder: Path, mode: int = 0o777) -> None:
    """Make the folder of an ended run; everyone may write to it by default."""
    folder.mkdir(parents=True)
    (folder / "lock").touch(mode=0o666)
    folder.chmod(mode)
    os.utime(folder, (0, 0))


def _make_open(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)


def _run(environ: dict[str, str]) -> tuple[str, list[str], bool]:
    """Make a run's folder and write a record; return its path, the live runs, and whether this user owns all of it."""
    with run_folder.run_directory(environ) as folder:
        handover.write_json(folder, handover.PLAN, {})
        found = Path(folder).lstat()
        is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o77
        return folder, run_folder.live_runs(environ), is_ours


def _in_a_user_namespace(environ: dict[str, str]) -> str | None:
    """Make a run's folder as root of a new user namespace without other users; return None if that is not possible."""
    uid, libc = os.geteuid(), ctypes.CDLL(None)
    if libc.prctl(_PR_SET_DUMPABLE, 1) or libc.unshare(_CLONE_NEWUSER):  # otherwise its files in /proc belong to root
        return None
    Path("/proc/self/uid_map").write_bytes(b"0 %d 1" % uid)
    return _run(environ)[0]


class TestFolder:
    """The folder of a run in the temporary directory."""

    def test_made_in_advance(self, place: Path, home: Path) -> None:
        """What another user gave the name of an ended run is not removed or listed; no run or write goes into it."""
        planted = [place / f"{OWN[:-1]}{number}" for number in range(4)]

        def plant() -> None:
            _plant_run(planted[0])
            _plant_run(planted[1], 0o700)
            planted[2].symlink_to(home)
            planted[3].touch()

        as_user(ATTACKER, plant)
        before = [_tree(path) for path in (*planted, home)]
        for _ in range(2):
            folder, live, is_ours = as_user(VICTIM, _run, {"TMPDIR": str(place)})
            assert (live, is_ours) == ([folder], True)
        with pytest.raises(AssertionError, match="is a link of another user"):
            as_user(VICTIM, lambda: write_text_to(str(planted[2] / "secret"), "text", remedy=""))
        assert [_tree(path) for path in (*planted, home)] == before

    def test_a_folder_that_is_gone_and_made_again_by_another(self, place: Path) -> None:
        """A rank whose run's folder was cleaned up writes nothing into a folder that another user made at that path."""
        folder = place / OWN
        as_user(ATTACKER, _make_open, folder)
        with pytest.raises(AssertionError, match=rf"belongs to another user \(uid {ATTACKER}\)"):
            as_user(VICTIM, handover.write_json, str(folder), handover.PLAN, {})
        assert not list(place.rglob("*.json"))

    def test_a_temporary_directory_of_another_user(self, place: Path) -> None:
        """Another user's $TMPDIR, as after su, is not used, because that user could rename its contents."""
        theirs = place / "theirs"
        as_user(ATTACKER, _make_open, theirs)
        theirs.chmod(0o1777)
        before = _tree(theirs)
        environ = {"TMPDIR": str(theirs), "TEMP": str(place)}
        for uid in (VICTIM, 0):
            assert Path(as_user(uid, _run, environ)[0]).parent == place
        assert _tree(theirs) == before

    def test_in_a_user_namespace(self, place: Path) -> None:
        """In a container without a mapping for root, /tmp belongs to nobody; it is used all the same."""
        folder = as_user(VICTIM, _in_a_user_namespace, {"TMPDIR": str(place)})
        if folder is None:
            pytest.skip("this kernel lets no other user make a user namespace")
        assert Path(folder).parent == place


def test_runs_of_other_users_are_not_looked_at(place: Path) -> None:
    """A live run of another user is not listed; root finds it if NUMAPIN_RUN_DIR names it."""
    base = place / "open"
    run = base / f"run-{OVER}"

    def plant() -> None:
        _plant_run(run)
        for uid in (VICTIM, 0):
            (place / f"numapin-{uid}-{OVER}").symlink_to(run)

    as_user(ATTACKER, plant)
    with (run / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        named = {"NUMAPIN_RUN_DIR": str(base)}
        for uid in (VICTIM, 0):
            live = as_user(uid, run_folder.live_runs, {"TMPDIR": str(place)})
            assert not [path for path in live if place in Path(path).parents]  # root's own may be in /tmp
        assert as_user(VICTIM, run_folder.live_runs, named) == []
        assert as_user(VICTIM, run_folder.is_live, str(run)) is False
        assert as_user(0, run_folder.live_runs, named) == [str(run)]


@pytest.mark.parametrize("what", ["link", "victim's own"])
def test_files_in_runs_of_other_users_lead_nowhere_else(place: Path, home: Path, what: str) -> None:
    """Root, who may inspect another user's run, reads no file of a third user through it."""
    folder = place / "run"
    as_user(ATTACKER, folder.mkdir)
    if what == "link":
        as_user(ATTACKER, (folder / handover.PLAN).symlink_to, home / "secret")
    else:
        os.link(home / "secret", folder / handover.PLAN)
    with pytest.raises(AssertionError, match=r"a link, not a regular file|another user's file"):
        as_user(0, handover.read_text, str(folder / handover.PLAN))


def test_swapped_at_every_moment(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that another user makes or removes at any moment leads nowhere: no sweep follows it.

    In its place there is a folder like that of an ended run. Swaps while a file is written: tests/unit/base.
    """
    monkeypatch.setattr(run_folder, "temporary_directories", lambda _: [str(place)])  # others have many files
    private, name = place / "private", place / f"numapin-0-{OVER}"
    _plant_run(private, 0o700)
    before = _tree(private)

    def clear() -> None:
        if name.is_symlink():
            name.unlink()
        elif name.exists():
            shutil.rmtree(name)

    def link() -> None:
        clear()
        name.symlink_to(private)
        os.chown(name, ATTACKER, ATTACKER, follow_symlinks=False)

    def no_link() -> None:
        clear()
        _plant_run(name)
        os.chown(name, ATTACKER, ATTACKER)

    for states in ((link, no_link), (no_link, link)):
        for moment in count():
            states[0]()
            with acting({moment: states[1]}) as calls:
                folder, live, is_ours = _run({"TMPDIR": str(place)})
            assert (live, is_ours) == ([folder], True)
            assert _tree(private) == before
            if calls.num <= moment:
                break
        assert moment > 5


def test_logs_of_ranks(place: Path, tmp_path: Path) -> None:
    """Root's --log-dir may be its own link or another user's folder; links of others are refused there and below."""
    private, theirs, link = tmp_path / "private", place / "theirs", place / "link"
    private.mkdir(mode=0o700)
    as_user(ATTACKER, theirs.mkdir)
    (place / "own").symlink_to(theirs)
    as_user(ATTACKER, link.symlink_to, private)
    path, before = script(tmp_path, _LINKED_ELSEWHERE), _tree(private)
    options = ("run", "--nproc-per-node", "1", "--max-restarts", "1", "--tee", "3", "--log-dir")
    for logs in (link, link / "below", place / "own"):
        done = numapin(*options, str(logs), path, str(logs), str(private))
        assert done.status == 2, done.err
        assert f"no folder for logs can be made in {logs}: " in done.err
        assert f"is a link of another user (uid {ATTACKER})" in done.err
        assert _tree(private) == before
    assert sorted(file.name for file in (theirs / "moved").rglob("*.log")) == ["stderr.log", "stdout.log"]
    assert (theirs / "moved").stat().st_mode & 0o777 == 0o700


def test_a_log_that_was_replaced(place: Path, tmp_path: Path) -> None:
    """Another user's link in the place of a log is not followed; the job goes on."""
    logs, target = place / "logs", tmp_path / "target"
    path = script(tmp_path, _LINKED_LOG)
    options = ("--nproc-per-node", "1", "--tee", "1", "--duplicate-stdout-filters", "line", "--log-dir", str(logs))
    done = numapin("run", *options, path, str(logs), str(target))
    assert (done.status, done.out) == (0, "[default0]:a line\n")
    assert not target.exists()


def test_a_restart_without_the_runs_folder(place: Path, tmp_path: Path) -> None:
    """If another user replaced the run's folder, restarted ranks get a new one, and the old path is not used."""
    path = script(tmp_path, _TAKEN_OVER)
    options = ("--nproc-per-node", "1", "--max-restarts", "1")
    done = numapin("run", *options, path, TMPDIR=str(place))
    assert done.status == 0, done.err
    old, new = (line.split(maxsplit=2) for line in done.out.splitlines())
    assert f"warning: the folder of this run, {old[0]}, was removed or replaced" in done.err
    assert "set NUMAPIN_RUN_DIR to a folder outside of /tmp" in done.err
    assert new[0] != old[0]
    assert new[1].startswith(f"{new[0]}/error-")
    for name in ("plan.json", "lock", "observed-0-1.json"):
        assert name in new[2]
    assert [str(left) for left in place.glob("numapin-*")] == [old[0]]


def _victims(*command: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run Python as the victim."""
    as_victim: dict[str, Any] = {"user": VICTIM, "group": VICTIM, "extra_groups": []}
    python = [sys.executable, *command]
    return subprocess.run(python, capture_output=True, text=True, timeout=120, check=False, **as_victim, **options)


def test_a_users_run(place: Path, home: Path) -> None:
    """A user who is not root is protected too, with a link in place of the folder."""
    try:
        probe = _victims("-c", "import numapin.cli.run, torch", cwd=Path(__file__).parents[2])
        why = probe.stderr.strip().rpartition("\n")[2] if probe.returncode else ""
    except OSError as error:
        why = str(error)
    if why:
        pytest.skip(f"another user cannot run this checkout: {why}")
    as_user(ATTACKER, (place / OWN).symlink_to, home)
    before = _tree(home)
    path, environ = script(place, SHOW), environment(TMPDIR=str(place), HOME=str(home))
    done = _victims(*NUMAPIN[1:], "run", "--nproc-per-node", "1", path, cwd=place, env=environ)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(VICTIM), "0o700"]
    assert _tree(home) == before
