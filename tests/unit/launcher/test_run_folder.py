"""The run directory: where it is, that it is private, what is swept, and files that are whole or not there."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from threading import Barrier

import pytest

from numapin.errors import NumapinError
from numapin.rank import run_folder


def test_the_named_folder_comes_first(tmp_path: Path) -> None:
    """NUMAPIN_RUN_DIR beats XDG_RUNTIME_DIR, which beats the temporary directory; only what the user named stays."""
    named, runtime, temporary = (tmp_path / name for name in ("named", "runtime", "tmp"))
    for path in (runtime, temporary):
        path.mkdir()
    environ = {"NUMAPIN_RUN_DIR": str(named), "XDG_RUNTIME_DIR": str(runtime), "TMPDIR": str(temporary)}
    for variable, base in (
        ("NUMAPIN_RUN_DIR", named),
        ("XDG_RUNTIME_DIR", runtime / "numapin"),
        ("TMPDIR", temporary / f"numapin-{os.getuid()}"),
    ):
        with run_folder.run_directory(environ) as made:
            path = Path(made)
            assert path.parent == base
            assert path.stat().st_mode & 0o777 == 0o700
        assert path.exists() == (variable == "NUMAPIN_RUN_DIR")
        del environ[variable]


def test_a_runtime_directory_that_is_gone_is_passed_over(tmp_path: Path) -> None:
    """XDG_RUNTIME_DIR that does not exist, as after su or in cron, falls back to the temporary directory."""
    with run_folder.run_directory({"XDG_RUNTIME_DIR": str(tmp_path / "gone"), "TMPDIR": str(tmp_path)}) as path:
        assert path.startswith(str(tmp_path / f"numapin-{os.getuid()}"))


@pytest.mark.parametrize("how", ["open to others", "a link"])
def test_a_folder_that_others_control_is_refused(tmp_path: Path, how: str) -> None:
    """A folder in a shared directory that somebody else could have put there is an error that names it."""
    path = tmp_path / f"numapin-{os.getuid()}"
    if how == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.mkdir()
        path.chmod(0o770)
    with (
        pytest.raises(NumapinError, match="is not a private folder of this user") as caught,
        run_folder.run_directory({"TMPDIR": str(tmp_path)}),
    ):
        pass
    assert "NUMAPIN_RUN_DIR" in caught.value.hint


def test_launchers_that_start_at_once(tmp_path: Path) -> None:
    """Nobody's folder of runs is there yet, and each of them makes it: all have one."""
    for attempt in range(50):
        environ, barrier = {"TMPDIR": str(tmp_path / str(attempt))}, Barrier(4)
        (tmp_path / str(attempt)).mkdir()

        def begin(_: int, environ: dict[str, str] = environ, barrier: Barrier = barrier) -> bool:
            barrier.wait()
            with run_folder.run_directory(environ) as folder:
                return Path(folder).is_dir()

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(begin, range(4)))


@pytest.mark.parametrize("variable", ["XDG_RUNTIME_DIR", "NUMAPIN_RUN_DIR"])
def test_only_runs_that_are_over_are_swept(tmp_path: Path, variable: str) -> None:
    """Runs whose lock nobody holds go from the default place; live ones, others, and all that the user named stay."""
    environ = {variable: str(tmp_path)}
    base = tmp_path / "numapin" if variable == "XDG_RUNTIME_DIR" else tmp_path
    for name in ("run-killed", "run-old", "notes"):
        (base / name).mkdir(parents=True)
    (base / "run-killed" / "lock").write_text("")
    with run_folder.run_directory(environ) as live:
        # flock is per open file: this process's second run sees the first one's lock as another process would.
        with run_folder.run_directory({**environ, "TMPDIR": str(tmp_path)}):
            assert Path(live).is_dir()
        left = {path.name for path in base.iterdir()}
    named = {"run-killed", "run-old"} if variable == "NUMAPIN_RUN_DIR" else set()
    assert left >= {"notes", Path(live).name} | named
    assert ("run-killed" in left, "run-old" in left) == ((True, True) if named else (False, False))


def test_a_run_that_failed_leaves_its_folder_until_the_next(tmp_path: Path) -> None:
    """What torch's error report names is there to be read; the next run takes it away."""
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    with pytest.raises(KeyError), run_folder.run_directory(environ) as failed:
        raise KeyError
    assert Path(failed).is_dir()
    with run_folder.run_directory(environ):
        assert not Path(failed).exists()


def test_files_are_whole_or_not_there(tmp_path: Path) -> None:
    """What cannot be written as JSON leaves the file that was there as it was."""
    run_folder.write_json(str(tmp_path), "a.json", {"n": 1})
    with pytest.raises(TypeError):
        run_folder.write_json(str(tmp_path), "a.json", {"n": {1, 2}})
    assert json.loads((tmp_path / "a.json").read_text()) == {"n": 1}


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """A path through a file is an error with a remedy, not a traceback."""
    (tmp_path / "file").write_text("")
    with pytest.raises(NumapinError, match=r"file/run/a\.json cannot be written: Not a directory"):
        run_folder.write_json(str(tmp_path / "file" / "run"), "a.json", {})
    with (
        pytest.raises(NumapinError, match="no run directory can be made") as caught,
        run_folder.run_directory({"NUMAPIN_RUN_DIR": str(tmp_path / "file")}),
    ):
        pass
    assert caught.value.hint == "name another with NUMAPIN_RUN_DIR=DIR"


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    """What cannot be renamed into place is taken away again."""
    (tmp_path / "a.json" / "b").mkdir(parents=True)
    with pytest.raises(NumapinError, match=r"a\.json cannot be written"):
        run_folder.write_json(str(tmp_path), "a.json", {})
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize(
    ("what", "told"),
    [("pipe", "not a regular file"), ("large", "larger than 16 MiB"), ("folder", "not a regular file")],
)
def test_what_no_run_wrote_is_not_read(tmp_path: Path, what: str, told: str) -> None:
    """A pipe, which would hold the reader, a folder, and a file without an end are errors, and no locks."""
    path = tmp_path / "lock"
    if what == "pipe":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    else:
        with path.open("wb") as file:
            file.truncate(1 << 34)
    with pytest.raises(OSError, match=told):
        run_folder.read_text(str(path))
    assert not run_folder.is_live(str(tmp_path))


def test_another_users_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of neither this user nor root says nothing about this user's runs."""
    path = tmp_path / "plan.json"
    path.write_text("{}")
    if os.getuid() == 0:
        os.chown(path, 65533, 65533)
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    if path.stat().st_uid != 0:
        with pytest.raises(PermissionError, match="another user's file"):
            run_folder.read_text(str(path))


@pytest.mark.parametrize("size", [10, 200_000])
def test_plans_reach_ranks(tmp_path: Path, size: int) -> None:
    """A plan goes through the environment, and one too large for that through plan.json."""
    plan: dict[str, object] = {"reason": "x" * size}
    environ = {"NUMAPIN_RUN_DIR": str(tmp_path)}
    run_folder.hand_over(plan, str(tmp_path), environ)
    text, _ = run_folder.take_plan(environ)
    assert json.loads(text) == plan
    assert environ == {"NUMAPIN_RUN_DIR": str(tmp_path)}


@pytest.mark.parametrize("size", [10, 200_000])
def test_a_plan_without_a_record(tmp_path: Path, size: int, capsys: pytest.CaptureFixture[str]) -> None:
    """A run directory that cannot be written is a warning, and an error where it alone would bring ranks the plan."""
    (tmp_path / "file").touch()
    plan: dict[str, object] = {"reason": "x" * size}
    with nullcontext() if size == 10 else pytest.raises(NumapinError, match="cannot be written"):
        run_folder.hand_over(plan, str(tmp_path / "file" / "run"), {})
    assert ("numapin: warning: no record of this run: " in capsys.readouterr().err) == (size == 10)


def test_a_plan_of_before_does_not_leak_into_a_nested_run(tmp_path: Path) -> None:
    """A rank that starts numapin itself hands its own ranks its own plan, also where that one goes by file."""
    environ = {"NUMAPIN_RUN_DIR": str(tmp_path)}
    run_folder.hand_over({"run": "outer"}, str(tmp_path), environ)
    run_folder.hand_over({"run": "inner", "pad": "x" * 200_000}, str(tmp_path), environ)
    assert json.loads(run_folder.take_plan(environ)[0])["run"] == "inner"


def test_no_plan_to_take(tmp_path: Path) -> None:
    """A rank whose plan is gone says where it looked."""
    for environ in ({}, {"NUMAPIN_RUN_DIR": str(tmp_path)}):
        assert run_folder.planned(environ) is None
        with pytest.raises(NumapinError, match="NUMAPIN_PLAN is unset"):
            run_folder.take_plan(environ)
