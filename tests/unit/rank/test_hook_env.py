"""The variables of `numapin run --dataloader`, and the commands that it cannot reach."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
from pathlib import Path

import pytest

import numapin
from tests.unit.rank.seam import hook_env

PACKAGE = Path(numapin.__file__).parent
FOLDER = str(PACKAGE / "rank" / "hook")


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ({}, FOLDER),
        ({"PYTHONPATH": ""}, FOLDER),
        ({"PYTHONPATH": "lib:/opt/x"}, f"{FOLDER}:lib:/opt/x"),
        ({"PYTHONPATH": "a::b:"}, f"{FOLDER}:a::b:"),
        ({"PYTHONPATH": f"{FOLDER}:a", "NUMAPIN_DATALOADER": "numapin"}, f"{FOLDER}:a"),
    ],
    ids=["unset", "empty", "relative", "empty entries", "nested"],
)
def test_numapin_puts_its_folder_before_the_path(given: dict[str, str], path: str) -> None:
    """PYTHONPATH keeps every entry, even empty ones, which mean the current folder; ours comes first, once."""
    assert hook_env.environment("numapin", given) == {"NUMAPIN_DATALOADER": "numapin", "PYTHONPATH": path}


def test_torch_leaves_the_environment_alone() -> None:
    """The default sets nothing, but switches off what an outer numapin switched on."""
    assert hook_env.environment("torch", {"PYTHONPATH": "a"}) == {}
    assert hook_env.environment("torch", {"NUMAPIN_DATALOADER": "numapin"}) == {"NUMAPIN_DATALOADER": "torch"}


def test_recording_stays_on_below_numapin_run() -> None:
    """`numapin trace` and `numapin compare` are parents of `numapin run`, which leaves their variables as they are."""
    outer = hook_env.steps_environment("{}", {}, variable=hook_env.TRACE_VARIABLE)
    assert outer == {"NUMAPIN_TRACE": "{}", "PYTHONPATH": FOLDER}
    assert hook_env.environment("torch", outer) == {}
    assert hook_env.environment("numapin", outer) == {"NUMAPIN_DATALOADER": "numapin", "PYTHONPATH": FOLDER}


def test_the_folder_holds_nothing_else() -> None:
    """Only one module of the folder on every rank's path has a name that is not ours."""
    names = sorted(path.name for path in Path(FOLDER).glob("*.py"))
    assert names == ["numapin_hook_errors.py", "numapin_hook_parts.py", "sitecustomize.py"]


def test_an_old_python_can_read_what_starts_the_hook() -> None:
    """Its file has nothing that Python 2.7 cannot parse."""
    text = Path(FOLDER, "sitecustomize.py").read_text(encoding="ascii")
    for node in ast.walk(ast.parse(text)):
        assert not isinstance(node, ast.AnnAssign | ast.JoinedStr | ast.NamedExpr | ast.Nonlocal)
        assert getattr(node, "returns", None) is None
        assert not isinstance(node, ast.arg)
        assert not (isinstance(node, ast.ImportFrom) and node.module == "__future__")


@pytest.mark.parametrize("version", ["2.7", "3.6", "3.7"])
def test_an_old_python_starts_as_without_the_hook(version: str, tmp_path: Path) -> None:
    """It prints nothing, and its path and its sitecustomize, if there is one behind ours, are what they would be."""
    python = _old_python(version)
    (tmp_path / "sitecustomize.py").write_text("seen = 1\n")
    code = (
        "import sys; print([p for p in sys.path if 'hook' in p], getattr(sys.modules.get('sitecustomize'), 'seen', 0))"
    )
    rank = {
        "NUMAPIN_CHILDREN": "{}",
        "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error"),
        "NUMAPIN_RANK_PID": str(os.getsid(0)),
    }
    for path, seen, asked in ((FOLDER, 0, {}), (f"{FOLDER}:{tmp_path}", 1, {}), (FOLDER, 0, rank)):
        done = subprocess.run(
            [python, "-c", f"from __future__ import print_function; {code}"],
            env={"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", **asked},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, f"[] {seen}\n", "")


def _old_python(version: str) -> str:
    """Return a Python of this version on PATH or of pyenv; skip the test without one."""
    found = [*map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python")), shutil.which(f"python{version}")]
    python = next(filter(None, found), None)
    return python or pytest.skip(f"no Python {version}; type: pyenv install {version}")


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        ("-I train.py", "-I"),
        ("-u -E train.py", "-E"),
        ("-uS train.py", "-S"),
        ("-W error -X dev -Ic pass", "-I"),
        ("-Werror -I train.py", "-I"),
        ("-u train.py -I", None),
        ("-m package -E", None),
        ("-cprint('ISE') -I", None),
        ("-W I -X E train.py", None),
        ("--check-hash-based-pycs=always -s train.py", None),
        ("- -I", None),
        ("", None),
    ],
)
def test_refusal_reads_the_interpreters_own_options(arguments: str, flag: str | None) -> None:
    """-I, -E and -S keep the hook out as Python's options; after the script, -c or -m they belong to the program."""
    reason = hook_env.refusal(["/usr/bin/python3.11", *arguments.split()])
    assert (reason is None) == (flag is None)
    assert flag is None or f"/usr/bin/python3.11 {flag} " in str(reason)
