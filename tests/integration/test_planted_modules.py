"""No command imports modules from its working directory, where another user may have put them (such as /tmp)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import pytest

from tests.integration.launching import WITHOUT_COMPILER, Done, call, script
from tests.integration.stepping import training_script

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("planted")]  # so that the commands are started once

_INSTALLED: Final = shutil.which("numapin", path=str(Path(sys.executable).parent))
_PACKAGES: Final = ("click", "dill", "libnuma", "markdown_it", "numa", "numapin", "numpy", "pygments", "pynvml", "rich",
                    "ruamel", "sitecustomize", "spdl", "torch", "torchdata", "triton", "usercustomize",
                    "yaml")  # fmt: skip

# Every module that could be imported here leaves a file with its name. os is imported before the first of them.
_PLANTED: Final = "import os\nopen(os.path.join(os.environ['LEFT'], __name__), 'w').close()\n"

_TRAINS: Final = f"""{WITHOUT_COMPILER}
import torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters())
for _ in range(4):
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
"""
_SPAWNS: Final = """
import sys
import neighbor
import numapin
if __name__ == "__main__":
    print(numapin.spawn(neighbor.path))
"""

# {prints}, {trains}, {steps}, {out}: scripts and a folder elsewhere; {pid}: a process to inspect. Every benchmark
# starts its measuring processes in the same way.
_COMMANDS: Final = {
    name: words.split()
    for line in Path(__file__).with_name("planted-commands.txt").read_text().splitlines()
    for name, _, words in [line.partition(": ")]
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Give a working directory full of planted modules, and folders for their marks and for scripts."""
    found = {name: tmp_path_factory.mktemp(name) for name in ("planted", "left", "out")}
    package = found["planted"] / "numapin"  # Python prefers a package to numapin.py
    package.mkdir()
    planted = [found["planted"] / name for name in (*sys.stdlib_module_names, *_PACKAGES)]
    for path in (*planted, *(package / name for name in ("__init__", "__main__", "rank", "spawned"))):
        Path(f"{path}.py").write_text(_PLANTED)
    training_script(found["out"])
    for name, text in (("prints", "import sys; print(sys.path[0])"), ("trains", _TRAINS), ("spawns", _SPAWNS)):
        script(found["out"], text, f"{name}.py")
    script(found["out"], "import sys\ndef path(): return sys.path[0]\n", "neighbor.py")
    (found["out"] / "plan.json").write_text(
        _run(("plan", "--json", "--nproc-per-node", "1"), found["out"], found["left"]).out
    )
    return found


@pytest.fixture(scope="module")
def results(folders: dict[str, Path]) -> dict[str, Done]:
    """Run all commands in the planted directory, two at a time."""
    if _INSTALLED is None:
        pytest.skip("the program numapin is not beside this Python; type: pip install -e .")
    places = {name: str(folders["out"] / f"{name}.py") for name in ("prints", "trains", "spawns")}
    places["steps"] = str(folders["out"] / "stepping" / "train.py")
    with (
        subprocess.Popen(["sleep", "600"], env={**os.environ, "LOCAL_RANK": "0"}) as sleeper,
        ThreadPoolExecutor(2) as pool,
    ):
        words = {**places, "out": str(folders["out"]), "pid": str(sleeper.pid), "python": sys.executable}

        def run(name: str) -> Done:
            command = [word.format(**words) for word in _COMMANDS[name]]
            return _run(command, folders["planted"], folders["left"] / name)

        try:
            return dict(zip(_COMMANDS, pool.map(run, _COMMANDS), strict=True))
        finally:
            sleeper.kill()


def _run(command: Sequence[str], folder: Path, left: Path) -> Done:
    """Run the installed program, or a script; imported plants leave their names in the folder `left`."""
    left.mkdir(exist_ok=True)
    program = (sys.executable,) if command[0].endswith(".py") else (str(_INSTALLED),)
    cleared = {"PYTHONPATH": os.environ.get("PYTHONPATH", "").strip(":") or str(Path(__file__).parents[2])}
    return call(*program, *command, cwd=folder, CUDA_VISIBLE_DEVICES="", PYTHONSAFEPATH="", LEFT=str(left), **cleared)


@pytest.mark.parametrize("name", list(_COMMANDS))
def test_nothing_is_imported_from_the_working_directory(
    name: str, results: dict[str, Done], folders: dict[str, Path]
) -> None:
    """Each command works, and neither it nor a process that it starts imports a planted module."""
    assert results[name].status == 0, results[name].err
    assert [path.name for path in (folders["left"] / name).iterdir()] == []


def test_the_users_own_path_is_as_ever(results: dict[str, Done], folders: dict[str, Path]) -> None:
    """A script's folder is first on its path, as under torchrun; ranks of spawn have their caller's path."""
    out = str(folders["out"])
    assert [results[name].out.strip() for name in ("run", "exec", "spawn")] == [out, out, repr((out,))]


def test_the_plants_grow(folders: dict[str, Path], tmp_path: Path) -> None:
    """An import from the working directory is noticed: Python itself makes one, with -c."""
    done = call(sys.executable, "-c", "import click, numapin.rank", cwd=folders["planted"], LEFT=str(tmp_path))
    assert done.status == 0, done.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["click", "numapin", "numapin.rank"]
