"""The variables of `numapin run --dataloader`, and the commands that it cannot reach."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import numapin
from tests.recorded.screens import compare_answers
from tests.unit.rank.seam import hook_env

PACKAGE = Path(numapin.__file__).parent
FOLDER = str(PACKAGE / "rank" / "hook")


def _answer(line: str) -> str:
    first, *words = line.split()
    if first == "refusal":
        return str(hook_env.refusal(words))
    if first == "is_python":
        return str(hook_env.is_python(words))
    given = dict(word.replace("FOLDER", FOLDER).split("=") for word in words)
    return str(hook_env.environment(first, given)).replace(FOLDER, "FOLDER")


def test_environments_and_refusals() -> None:
    """The variables for each choice, and commands that they cannot reach, are recorded.

    NUMAPIN_UPDATE_GOLDEN=1 records them anew.
    """
    compare_answers(Path(__file__).with_name("hook_env.txt"), _answer)
    added = hook_env.steps_environment("{}", {}, variable=hook_env.TRACE_VARIABLE)
    assert added == {"NUMAPIN_TRACE": "{}", "PYTHONPATH": FOLDER}


@pytest.mark.parametrize("version", ["2.7", "3.6", "3.7"])
def test_an_old_python_starts_as_without_the_hook(version: str, tmp_path: Path) -> None:
    """It prints nothing, and its path and its sitecustomize, if there is one behind ours, are what they would be."""
    found = [*map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python")), shutil.which(f"python{version}")]
    python = next(filter(None, found), None) or pytest.skip(f"no Python {version}; type: pyenv install {version}")
    (tmp_path / "sitecustomize.py").write_text("seen = 1\n")
    code = (
        "import sys; print([p for p in sys.path if 'hook' in p], getattr(sys.modules.get('sitecustomize'), 'seen', 0))"
    )
    rank = {"NUMAPIN_CHILDREN": "{}", "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error")}
    rank["NUMAPIN_RANK_PID"] = str(os.getsid(0))
    for path, seen, asked in ((FOLDER, 0, {}), (f"{FOLDER}:{tmp_path}", 1, {}), (FOLDER, 0, rank)):
        done = subprocess.run(
            [python, "-c", f"from __future__ import print_function; {code}"],
            env={"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", **asked},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, f"[] {seen}\n", "")


# --- which imports of torch's modules the hook finds; torch is a stand-in of modules that are nearly empty ---

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
MODULE = """
import os, sys
if os.path.exists({fails!r}): raise ImportError
has_run = "it has run"
class _BaseDataLoaderIter:
    def __init__(self, data): self.data = [*data, sys._getframe(1).f_code.co_name]
class _OfTwo(_BaseDataLoaderIter, dict): pass  # only dict.__new__ can make it
class DataLoader:
    def __iter__(self): return iter(_OfTwo([7]).data)
"""


def _run(folder: Path, *steps: str, hook: str | None = None, **variables: str) -> tuple[str, str]:
    """Run a program beside a stand-in for torch, with the hook; return what it wrote to stdout and stderr."""
    package, fails = folder, folder / "fails"
    for name in LOADER.split(".")[:-1]:
        package /= name
        package.mkdir()
        (package / "__init__.py").touch()
    (package / "dataloader.py").write_text(MODULE.format(fails=str(fails)))
    own = {name: value for name, value in os.environ.items() if not name.startswith("NUMAPIN_")}
    environ = hook_env.environment("numapin", {**own, "PYTHONPATH": str(folder)})
    if hook is not None:
        environ["PYTHONPATH"] = environ["PYTHONPATH"].replace(FOLDER, hook)
    program = "\n".join(("import os, sys", *steps, "print(sys.meta_path[0])"))
    command = [sys.executable, "-P", "-c", program, str(fails)]
    environ = {**own, **environ, **variables}
    done = subprocess.run(command, env=environ, cwd=folder, capture_output=True, text=True, check=True, timeout=300)
    return done.stdout, done.stderr


@pytest.mark.parametrize(
    "before", [(), (LOOK,), (LOOK, LOOK), (FAIL,), (LOOK, FAIL)], ids=["nothing", "look", "looks", "failed", "both"]
)
def test_the_import_that_succeeds_is_found(before: tuple[str, ...], tmp_path: Path) -> None:
    """Programs that only look whether there is a module, and imports that fail, call nothing; the hook stays."""
    out, err = _run(tmp_path, *before, "print('before', file=sys.stderr)", IMPORT)
    assert err.partition("before")[2].count(FOUND) == err.count(FOUND) == 1, err
    assert out.startswith("it has run\n")
    assert "TorchWatch" in out  # StatefulDataLoader has not been imported


def test_an_interpreter_that_cannot_import_numapin_iterates_as_without_the_hook(tmp_path: Path) -> None:
    """Its loops are not published; nothing of the failed import stays, so `import numapin` fails there as before."""
    folder = shutil.copytree(FOLDER, tmp_path / "numapin" / "rank" / "hook")  # the package around it is not there
    asks = {"NUMAPIN_DATALOADER": "", "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error")}
    iterates = "print(*loader.DataLoader(), 'numapin' in sys.modules)"
    out, err = _run(tmp_path, IMPORT, iterates, hook=str(folder), NUMAPIN_RANK_PID=str(os.getsid(0)), **asks)
    assert err == ""
    assert out.splitlines()[1] == "7 __iter__ False"  # no frame of ours is between, which warnings would name
