"""What a build adds to the tree: hatch_build.py, the compiled stores, the index page, and the recipe."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Final

import pytest
import yaml

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
        """Without a URL no link leads nowhere: texts stay, and the picture's description."""
        readme = (ROOT / "README.md").read_text()
        page = build.index_page(readme, "", "v1.2.3")
        assert [link for link in links(page) if not link.startswith(("https://", "#"))] == []
        assert "*Two packages, each with one NUMA node" in page
        assert "Quick start" in page
        assert "[two]" not in page
        assert len(page.splitlines()) > len(readme.splitlines()) - 10

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


class TestParts:
    """The CycloneDX list in a wheel."""

    def metadata(self) -> Any:
        """Return what hatchling gives."""
        core = SimpleNamespace(
            name="numapin", description="d", license_expression="Apache-2.0", dependencies=PROJECT["dependencies"]
        )
        return SimpleNamespace(core=core, version="1.2.3")

    def test_names_what_is_in_the_wheel_and_what_it_needs(self, build: ModuleType, tmp_path: Path) -> None:
        """The compiled library is there with its hash, and each dependency with its range, but not torch."""
        library = tmp_path / "libstores.so"
        library.write_bytes(b"\x7fELF")
        parts = build.bill_of_materials(self.metadata(), library, tag="t")
        names = [part["name"] for part in parts["components"]]
        assert names == ["numapin/system/libstores.so", "nvidia-ml-py", "py-libnuma", "click", "rich"]
        digest = parts["components"][0]["hashes"][0]["content"]
        assert digest == subprocess.run(["sha256sum", library], capture_output=True, text=True, check=True).stdout[:64]
        references = {part["bom-ref"] for part in parts["components"]}
        assert set(parts["dependencies"][0]["dependsOn"]) == references

    def test_is_the_same_each_time(self, build: ModuleType) -> None:
        """It contains no time and no random number; wheels of two kinds have two serial numbers."""
        lists = [json.dumps(build.bill_of_materials(self.metadata(), None, tag=tag)) for tag in ("a", "a", "b")]
        assert lists[0] == lists[1] != lists[2]


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


def test_the_recipe_needs_what_the_package_needs() -> None:
    """conda-forge's recipe has the dependencies of pyproject.toml, and the entry point; it skips older Pythons."""
    recipe = yaml.safe_load((ROOT / "packaging/conda-forge/recipe.yaml").read_text().replace("@SHA256@", "'0'"))
    needed = {line.replace(" ", "") for line in recipe["requirements"]["run"]} - {"python"}
    assert needed == {line.replace(" ", "") for line in PROJECT["dependencies"]}
    assert f'match(python, "<{PROJECT["requires-python"].removeprefix(">=")}")' in recipe["build"]["skip"]
    assert recipe["build"]["python"]["entry_points"] == [f"numapin = {PROJECT['scripts']['numapin']}"]


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
