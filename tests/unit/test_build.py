"""What a build adds to the tree: hatch_build.py, the compiled stores, the index page, and the tools of a release."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if TYPE_CHECKING:
    from types import ModuleType

ROOT: Final = Path(__file__).resolve().parents[2]
PROJECT: Final = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
URL: Final = "https://github.com/owner/numapin"
MACHINES: Final = {"x86_64": ("cc", ()), "aarch64": ("aarch64-linux-gnu-gcc", ("qemu-aarch64", "-L"))}


@pytest.fixture(scope="module")
def build() -> ModuleType:
    """Return hatch_build.py."""
    pytest.importorskip("hatchling", reason="no hatchling; type: pip install .[dev]")
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def links(page: str) -> list[str]:
    """Return the targets of Markdown's links, images and definitions."""
    text = re.sub(r"(?ms)^```.*?^```", "", page)
    return [one or other for one, other in re.findall(r"\]\(([^)]+)\)|^\[[^\]]+\]: (\S+)", text, re.MULTILINE)]


class TestIndexPage:
    """README, where no other file of the project is."""

    def test_every_link_is_absolute(self, build: ModuleType) -> None:
        """With the repository's URL, links and the image point to the release's tag."""
        page = build.index_page((ROOT / "README.md").read_text(), URL, "v1.2.3")
        assert all(link.startswith(("https://", "#")) for link in links(page))
        assert f"]({URL}/raw/v1.2.3/docs/topo.svg)" in page
        assert f"({URL}/blob/v1.2.3/docs/quick-start.md)" in page

    def test_without_a_repository(self, build: ModuleType) -> None:
        """Without a URL, README stays as it is."""
        readme = (ROOT / "README.md").read_text()
        assert build.index_page(readme, "", "v1.2.3") == readme

    @pytest.mark.parametrize(
        ("repository", "names"), [("", set()), (URL, {"Repository", "Documentation", "Changelog", "Issues"})]
    )
    def test_urls(self, build: ModuleType, repository: str, names: set[str]) -> None:
        """No URL is invented: without a known repository there is none."""
        urls = build.project_urls(repository)
        assert set(urls) == names
        assert all(url.startswith(URL) for url in urls.values())

    @pytest.mark.parametrize(
        "wrong", ["github.com/owner/numapin", "http://x/y", "https://x", "https://x/y z", "javascript:1"]
    )
    def test_what_is_no_url(self, build: ModuleType, monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
        """A malformed URL ends the build, with the variable's name."""
        monkeypatch.setenv("NUMAPIN_REPOSITORY", wrong)
        hook = build.IndexPageHook(str(ROOT), {})
        with pytest.raises(ValueError, match="NUMAPIN_REPOSITORY"):
            hook.update({"version": "1"})


class TestWheels:
    """NUMAPIN_WHEEL, and the compiler."""

    def test_an_unknown_kind(self, build: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        """A misspelt kind ends the build, and names the kinds."""
        monkeypatch.setenv("NUMAPIN_WHEEL", "x86")
        with pytest.raises(ValueError, match="none of pure, x86_64, aarch64"):
            build._wanted_wheel()

    @pytest.mark.parametrize("machine", MACHINES)
    def test_the_compiled_copies(self, build: ModuleType, machine: str, tmp_path: Path) -> None:
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


def test_torch_is_an_extra() -> None:
    """The package itself installs without torch; its extra, and what the tests need, bring it."""
    assert not any(needed.startswith("torch") for needed in PROJECT["dependencies"])
    assert PROJECT["optional-dependencies"]["torch"] == ["torch>=2.9", "numpy>=1.26"]
    assert "numapin[torch]" in PROJECT["optional-dependencies"]["test"]


class TestTools:
    """The programs that make and check the files of a release are those that were reviewed."""

    def test_each_is_pinned_with_its_hashes(self) -> None:
        """Each installed package has one version and the hashes of its files; none that is asked for is missing."""
        text = (ROOT / "packaging/release-tools.txt").read_text().replace("\\\n", "")
        lines = [line for line in text.splitlines() if line and not line.lstrip().startswith("#")]
        versions = {}
        for line in lines:
            found = re.fullmatch(r"([\w.-]+)==([\w.]+)(?: ; [^;]*?)?\s+(?:--hash=sha256:[0-9a-f]{64}\s*)+", line)
            assert found is not None, line
            versions[canonicalize_name(found[1])] = found[2]
        asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]["release"]
        for wanted in map(Requirement, asked):
            assert wanted.specifier.contains(versions[canonicalize_name(wanted.name)]), wanted

    def test_they_are_installed_by_their_hashes(self) -> None:
        """Any other file is refused, and none is built, because a build would fetch packages without hashes."""
        recipe = (ROOT / "Makefile").read_text().partition("\n$(TOOLS)/.ready:")[2].partition("\n\n")[0]
        (install,) = [line for line in recipe.splitlines() if "install" in line]
        assert install.endswith("--require-hashes --only-binary :all: -r packaging/release-tools.txt")

    def test_what_is_published_was_made_by_no_others(self) -> None:
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


class TestOurTests:
    """py-libnuma installs a package `tests`, too."""

    def test_it_still_does(self) -> None:
        """If this fails, the guard in tests/conftest.py and the doctor's check may go."""
        from importlib.metadata import files

        assert "tests/__init__.py" in [str(path) for path in files("py-libnuma") or ()]

    def test_another_package_named_tests(self, tmp_path: Path) -> None:
        """If `tests` is another package, pytest ends with one error that says what to type."""
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
