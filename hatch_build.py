"""What a build adds to the tree: the compiled stores.c in a wheel, and absolute links in README.

NUMAPIN_WHEEL chooses the wheel: `x86_64` or `aarch64` (compiled for any glibc from 2.17 on; fails without a compiler),
`pure` (compiles nothing), or unset: for this machine, if it has a C compiler. NUMAPIN_REPOSITORY is the URL of the
published repository, such as https://github.com/OWNER/numapin.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

LIBRARY = "numapin/system/libstores.so"
SOURCE = "numapin/system/stores.c"
MACHINES = ("x86_64", "aarch64")
# stores.c needs memcpy only: of glibc 2.14 on x86-64, and 2.17 on aarch64. auditwheel checks it (scripts/package.sh).
MANYLINUX = "manylinux_2_17_{0}.manylinux2014_{0}"
# No path, build id or symbol of the machine that compiles: the same compiler makes the same file everywhere.
OPTIONS = ("-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-s", "-Wl,--build-id=none")


class StoresHook(BuildHookInterface[Any]):
    """Hatchling's hook; `initialize` runs before files are collected, `finalize` when the wheel is there."""

    _folder: tempfile.TemporaryDirectory[str] | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and mark the wheel as made for one kind of machine. Failures matter only if NUMAPIN_WHEEL is set."""
        if self.target_name != "wheel":
            return
        self._folder = tempfile.TemporaryDirectory()
        library = Path(self._folder.name).resolve() / Path(LIBRARY).name
        wanted = _wanted_wheel()
        machine = wanted or platform.machine()
        if machine in MACHINES and self._compile(library, machine, must=wanted is not None):
            if version == "editable":
                self._put_into_tree(library)
                return
            build_data["force_include"][str(library)] = LIBRARY
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{MANYLINUX.format(machine) if wanted else f'linux_{machine}'}"

    def finalize(self, _version: str, _build_data: dict[str, Any], _artifact_path: str) -> None:
        """Remove what was compiled."""
        if self._folder is not None:
            self._folder.cleanup()

    def _compile(self, library: Path, machine: str, *, must: bool) -> bool:
        """Compile stores.c. Returns False if that fails, unless it `must` succeed."""
        try:
            # In the tree and by a relative path, so that the path does not get into the file.
            command = [*_compiler(machine), *OPTIONS, "-o", str(library), SOURCE]
            subprocess.run(command, check=True, cwd=self.root)
        except (OSError, ValueError, subprocess.CalledProcessError) as error:
            if must:
                raise
            self.app.display_warning(f"numapin is built without {library.name}: {error}")
            return False
        return True

    def _put_into_tree(self, library: Path) -> None:
        """Replace the library in the tree at once: processes that have it mapped keep the old one."""
        target = Path(self.root, LIBRARY)
        new = target.with_name(f".{target.name}.{os.getpid()}")
        shutil.copyfile(library, new)
        new.replace(target)


class IndexPageHook(MetadataHookInterface):
    """Hatchling's hook for README and URLs in the metadata."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Make README's links absolute. An sdist's own metadata already has them; then this is not called."""
        repository = os.environ.get("NUMAPIN_REPOSITORY", "").rstrip("/")
        if repository and not re.fullmatch(r"https://[\w.-]+(/[\w.-]+)+", repository):
            raise ValueError(f"NUMAPIN_REPOSITORY={repository!r}: not a URL such as https://github.com/OWNER/numapin")
        readme = Path(self.root, "README.md").read_text(encoding="utf-8")
        text = index_page(readme, repository, f"v{metadata['version']}")
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = project_urls(repository)


def index_page(readme: str, repository: str, version: str) -> str:
    """Return README for an index, with links into the repository at a tag; without a URL, README as it is.

    The index shows images from absolute URLs only. GitHub's `raw` sends SVG files as images.
    """
    if not repository:
        return readme
    text = re.sub(r"(!\[[^\]]*\]\()(?!https?://)", rf"\1{repository}/raw/{version}/", readme)
    text = re.sub(r"((?<!!)\[[^\]]*\]\()(?!https?://|#)", rf"\1{repository}/blob/{version}/", text)
    return re.sub(r"^(\[[^\]]+\]: )(?!https?://|#)", rf"\1{repository}/blob/{version}/", text, flags=re.MULTILINE)


def project_urls(repository: str) -> dict[str, str]:
    """Return the links beside an index page; none if nobody has said where the project is published."""
    if not repository:
        return {}
    return {
        "Repository": repository,
        "Documentation": f"{repository}/tree/HEAD/docs",
        "Changelog": f"{repository}/blob/HEAD/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }


def _wanted_wheel() -> str | None:
    """Return what NUMAPIN_WHEEL says; None if it is not set."""
    wanted = os.environ.get("NUMAPIN_WHEEL") or None
    if wanted not in (None, "pure", *MACHINES):
        raise ValueError(f"NUMAPIN_WHEEL={wanted!r} is none of pure, {', '.join(MACHINES)}")
    return wanted


def _compiler(machine: str) -> list[str]:
    """Return the C compiler for a kind of machine: $CC for this one, Debian's cross compiler for another."""
    if machine != platform.machine():
        return [f"{machine}-linux-gnu-gcc"]
    return shlex.split(os.environ.get("CC", "")) or ["cc" if shutil.which("cc") else "gcc"]
