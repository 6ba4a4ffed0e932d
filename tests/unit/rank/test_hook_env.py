"""The variables of `numapin run --dataloader`, and the commands that it cannot reach."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
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
    assert hook_env.environment("torch", outer) == {"NUMAPIN_TRACED": "{}"}
    loader = {"NUMAPIN_DATALOADER": "numapin", "PYTHONPATH": FOLDER}
    assert hook_env.environment("numapin", outer) == {**loader, "NUMAPIN_TRACED": "{}"}


def test_a_run_inside_a_traced_rank_is_not_traced() -> None:
    """Its ranks would have the numbers of the outer ones; a trace that is started there is another one."""
    rank = {"NUMAPIN_TRACE": "{}", "NUMAPIN_TRACED": "{}"}
    assert hook_env.environment("torch", rank) == {"NUMAPIN_TRACE": ""}
    assert hook_env.environment("torch", {**rank, "NUMAPIN_TRACE": ""}) == {}
    inner = rank | hook_env.steps_environment("[]", rank, variable=hook_env.TRACE_VARIABLE)
    assert hook_env.environment("torch", inner) == {"NUMAPIN_TRACED": "[]"}


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


def test_an_interpreter_that_cannot_import_numapin_iterates_as_without_the_hook(tmp_path: Path) -> None:
    """Its loops are not published; nothing of the failed import stays, so `import numapin` fails there as before."""
    folder = shutil.copytree(FOLDER, tmp_path / "numapin" / "rank" / "hook")  # the package around it is not there
    code = "import sys, torch.utils.data as d; print(*d.DataLoader([7]), 'numapin' in sys.modules)"
    rank = {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "error"), "NUMAPIN_RANK_PID": str(os.getsid(0))}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env={**os.environ, "PYTHONPATH": str(folder), **rank},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "tensor([7]) False\n", "")


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


def test_other_programs_are_not_refused() -> None:
    """A profiler or a shell may start Python, so its options are not read."""
    assert hook_env.refusal(["nsys", "-I", "python", "train.py"]) is None
    assert not hook_env.is_python(["nsys"])
    assert hook_env.is_python(["/opt/conda/bin/python3.12"])


# --- which imports of torch's modules the hook finds; torch is a stand-in of empty modules ---

LOADER = "torch.utils.data.dataloader"
LOOK = f"import importlib.util; assert importlib.util.find_spec({LOADER!r}).name == {LOADER!r}"
FAIL = f"""
open(sys.argv[1], "w").close()
try:
    import {LOADER}
except ImportError:
    os.unlink(sys.argv[1])
"""
IMPORT = f"import {LOADER} as loader; print(loader.has_run)"
FOUND = "this torch has no DataLoader._get_iterator"


def _run(folder: Path, *steps: str) -> tuple[str, str]:
    """Run a program beside a stand-in for torch, with the hook; return what it wrote to stdout and stderr."""
    package = folder
    for name in LOADER.split(".")[:-1]:
        package /= name
        package.mkdir()
        (package / "__init__.py").touch()
    fails = folder / "fails"
    text = f"import os\nif os.path.exists({str(fails)!r}): raise ImportError\nhas_run = 'it has run'\n"
    (package / "dataloader.py").write_text(text)
    own = {name: value for name, value in os.environ.items() if not name.startswith("NUMAPIN_")}
    environ = hook_env.environment("numapin", {**own, "PYTHONPATH": str(folder)})
    program = "\n".join(("import os, sys", *steps, "print([each.__name__ for each in sys.meta_path[:1]])"))
    command = [sys.executable, "-c", program, str(fails)]
    done = subprocess.run(command, env={**own, **environ}, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout, done.stderr


@pytest.mark.parametrize(
    "before",
    [(), (LOOK,), (LOOK, LOOK), (FAIL,), (LOOK, FAIL)],
    ids=["nothing", "look", "looks", "failed", "both"],
)
def test_the_import_that_succeeds_is_found(before: tuple[str, ...], tmp_path: Path) -> None:
    """Programs that only look whether there is a module, and imports that fail, leave the hook in place."""
    out, err = _run(tmp_path, *before, IMPORT)
    assert err.count(FOUND) == 1, err
    assert out.startswith("it has run\n")
    assert "TorchWatch" in out  # StatefulDataLoader has not been imported


def test_a_look_alone_changes_nothing(tmp_path: Path) -> None:
    """The hook calls nothing until the module has been run."""
    assert FOUND not in _run(tmp_path, LOOK)[1]
