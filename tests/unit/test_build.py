"""The compiled stores that a build adds to the tree, the tools of a release, and the package `tests`."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import files
from pathlib import Path
from types import ModuleType
from typing import Final

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT: Final = Path(__file__).resolve().parents[2]
CONTENT: Final = tomllib.loads((ROOT / "pyproject.toml").read_text())
MACHINES: Final = {"x86_64": ("cc", ()), "aarch64": ("aarch64-linux-gnu-gcc", ("qemu-aarch64", "-L"))}


@pytest.fixture(scope="module")
def build() -> ModuleType:
    pytest.importorskip("hatchling", reason="no hatchling; type: pip install .[dev]")
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("machine", MACHINES)
def test_the_compiled_copies(build: ModuleType, machine: str, tmp_path: Path) -> None:
    """Every byte arrives and no other changes, for each kind of CPU that stores.c is written for."""
    compiler, emulator = MACHINES[machine]
    if machine == os.uname().machine:
        emulator = ()
    missing = [program for program in (compiler, *emulator[:1]) if shutil.which(program) is None]
    if missing:
        pytest.skip(f"no {' and no '.join(missing)}; type: apt-get install gcc-aarch64-linux-gnu qemu-user")
    library, program = tmp_path / "libstores.so", tmp_path / "check"
    subprocess.run([compiler, *build.OPTIONS, "-o", library, ROOT / build.SOURCE], check=True)
    check = ROOT / "tests/unit/system/stores_check.c"
    subprocess.run([compiler, "-Wall", "-Wextra", "-Werror", "-o", program, check, "-ldl"], check=True)
    root = [f"/usr/{machine}-linux-gnu"] if emulator else []
    result = subprocess.run([*emulator, *root, program, library], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert "copies are right" in result.stdout


def test_the_tools_of_a_release_are_those_that_were_reviewed() -> None:
    """Each installed package has one version and the hashes of its files, none is missing, and none is built."""
    text = (ROOT / "packaging/release-tools.txt").read_text().replace("\\\n", "")
    versions = {}
    for line in (line for line in text.splitlines() if line and not line.lstrip().startswith("#")):
        found = re.fullmatch(r"([\w.-]+)==([\w.]+)(?: ; [^;]*?)?\s+(?:--hash=sha256:[0-9a-f]{64}\s*)+", line)
        assert found is not None, line
        versions[canonicalize_name(found[1])] = found[2]
    for wanted in map(Requirement, CONTENT["dependency-groups"]["release"]):
        assert wanted.specifier.contains(versions[canonicalize_name(wanted.name)]), wanted
    recipe = (ROOT / "Makefile").read_text().partition("\n$(TOOLS)/.ready:")[2].partition("\n\n")[0]
    (install,) = [line for line in recipe.splitlines() if "install" in line]
    assert install.endswith("--require-hashes --only-binary :all: -r packaging/release-tools.txt")


def test_what_is_published_was_made_by_no_other_tools() -> None:
    """Actions are named by commit; before the upload, `make package` and Debian's signed packages run only."""
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    for job in workflow["jobs"].values():
        actions = [step["uses"] for step in job["steps"] if "uses" in step]
        assert all(re.search(r"@[0-9a-f]{40}$", action) for action in actions), actions
    steps = workflow["jobs"]["build"]["steps"]
    (upload,) = [number for number, step in enumerate(steps) if "upload-artifact" in step.get("uses", "")]
    commands = [line for step in steps[:upload] for line in step.get("run", "").splitlines()]
    assert {line.split()[0] for line in commands} == {"sudo", "grep", "make"}
    assert {line for line in commands if line.startswith("make")} == {"make package"}
    assert all(line.startswith("sudo apt-get ") for line in commands if line.startswith("sudo"))


def test_another_package_named_tests(tmp_path: Path) -> None:
    """If `tests` is another package, as py-libnuma installs one, pytest ends with one error that says what to type.

    If py-libnuma no longer does, the guard in tests/conftest.py and the doctor's check may go.
    """
    assert "tests/__init__.py" in [str(path) for path in files("py-libnuma") or ()]
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "__init__.py").touch()
    code = "import sys; sys.path.insert(0, sys.argv[1]); import tests, pytest; sys.exit(pytest.main(sys.argv[2:]))"
    given = ["-q", "-p", "no:cacheprovider", str(ROOT / "tests/unit/test_public_api.py")]
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), *given], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 4, result.stdout
    assert f"the package `tests` is ['{tmp_path}/tests'], not {ROOT}/tests" in result.stderr
    assert "python -m pytest" in result.stderr
