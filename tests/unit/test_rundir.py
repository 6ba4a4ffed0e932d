"""The run directory: where it is, that it is private, what is swept, and files that are whole or not there."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from numapin import rundir
from numapin.errors import NumapinError, UsageError

HOST = os.uname().nodename


def test_the_named_folder_comes_first(tmp_path: Path) -> None:
    """NUMAPIN_RUN_DIR beats XDG_RUNTIME_DIR, which beats the temporary directory."""
    named, runtime, temporary = (tmp_path / name for name in ("named", "runtime", "tmp"))
    for path in (runtime, temporary):
        path.mkdir()
    environ = {"NUMAPIN_RUN_DIR": str(named), "XDG_RUNTIME_DIR": str(runtime), "TMPDIR": str(temporary)}
    for variable, base in (
        ("NUMAPIN_RUN_DIR", named),
        ("XDG_RUNTIME_DIR", runtime / "numapin"),
        ("TMPDIR", temporary / f"numapin-{os.getuid()}"),
    ):
        path = Path(rundir.create(environ))
        assert path.parent == base
        assert path.stat().st_mode & 0o777 == 0o700
        rundir.remove(str(path))
        assert not path.exists()
        del environ[variable]


def test_a_runtime_directory_that_is_gone_is_passed_over(tmp_path: Path) -> None:
    """XDG_RUNTIME_DIR that does not exist, as after su or in cron, falls back to the temporary directory."""
    path = rundir.create({"XDG_RUNTIME_DIR": str(tmp_path / "gone"), "TMPDIR": str(tmp_path)})
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
    with pytest.raises(UsageError, match="is not a private folder of this user") as caught:
        rundir.create({"TMPDIR": str(tmp_path)})
    assert "NUMAPIN_RUN_DIR" in caught.value.hint


def test_folders_of_dead_launchers_are_swept(tmp_path: Path) -> None:
    """A run whose launcher is gone is removed; one that lives, one of another host and other files stay."""
    dead, alive = f"run-{HOST}-20260101-000000-4194999", f"run-{HOST}-20260101-000000-{os.getpid()}"
    others = ["run-another-host-20260101-000000-4194999", "notes", f"run-{HOST}-x"]
    for name in (dead, alive, *others):
        (tmp_path / name).mkdir()
    created = Path(rundir.create({"NUMAPIN_RUN_DIR": str(tmp_path)}))
    assert {path.name for path in tmp_path.iterdir()} == {alive, *others, created.name}


def test_files_are_whole_or_not_there(tmp_path: Path) -> None:
    """What cannot be written as JSON leaves the file that was there as it was."""
    rundir.write_json(str(tmp_path), "a.json", {"n": 1})
    with pytest.raises(TypeError):
        rundir.write_json(str(tmp_path), "a.json", {"n": {1, 2}})
    assert json.loads((tmp_path / "a.json").read_text()) == {"n": 1}


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """A path through a file is an error with a remedy, not a traceback."""
    (tmp_path / "file").write_text("")
    with pytest.raises(NumapinError, match=r"file/run/a\.json cannot be written: Not a directory"):
        rundir.write_json(str(tmp_path / "file" / "run"), "a.json", {})
    with pytest.raises(NumapinError, match="cannot be made") as caught:
        rundir.create({"NUMAPIN_RUN_DIR": str(tmp_path / "file")})
    assert caught.value.hint == "name another with NUMAPIN_RUN_DIR=DIR"


@pytest.mark.parametrize("size", [10, 200_000])
def test_plans_reach_ranks(tmp_path: Path, size: int) -> None:
    """A plan goes through the environment, and one too large for that through plan.json."""
    plan: dict[str, object] = {"reason": "x" * size}
    environ = {"NUMAPIN_RUN_DIR": str(tmp_path)}
    rundir.write_json(str(tmp_path), rundir.PLAN, plan)
    rundir.hand_over_plan(plan, environ)
    text, _ = rundir.take_plan(environ)
    assert json.loads(text) == plan
    assert environ == {"NUMAPIN_RUN_DIR": str(tmp_path)}


def test_a_plan_of_before_does_not_leak_into_a_nested_run(tmp_path: Path) -> None:
    """A rank that starts numapin itself hands its own ranks its own plan, also where that one goes by file."""
    environ = {"NUMAPIN_RUN_DIR": str(tmp_path)}
    rundir.hand_over_plan({"run": "outer"}, environ)
    rundir.write_json(str(tmp_path), rundir.PLAN, {"run": "inner", "pad": "x" * 200_000})
    rundir.hand_over_plan({"run": "inner", "pad": "x" * 200_000}, environ)
    assert json.loads(rundir.take_plan(environ)[0])["run"] == "inner"
