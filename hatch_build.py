"""What a build adds to the files of the tree: a compiled stores.c, a list of the wheel's parts, and the index page.

Comes in: the source tree, and two variables. NUMAPIN_WHEEL chooses the wheel: `x86_64` or `aarch64` (compiled for any
glibc from 2.17 on; fails without a compiler), `pure` (compiles nothing), or unset: for this machine, if it has a C
compiler. NUMAPIN_REPOSITORY is the URL of the published repository, such as https://github.com/OWNER/numapin.
Goes out: libstores.so and a CycloneDX list in the wheel; for an editable install, libstores.so in the tree; README and
URLs in the metadata.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
import uuid
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

LIBRARY = "numapin/system/libstores.so"
SOURCE = "numapin/system/stores.c"
MACHINES = ("x86_64", "aarch64")
# stores.c needs memcpy only: of glibc 2.14 on x86-64, and 2.17 on aarch64. auditwheel checks it (scripts/package.py).
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
        folder = Path(self._folder.name).resolve()
        library = folder / Path(LIBRARY).name
        wanted = _wanted_wheel()
        machine = wanted or platform.machine()
        if machine in MACHINES and self._compile(library, machine, must=wanted is not None):
            if version == "editable":
                self._put_into_tree(library)
                return
            build_data["force_include"][str(library)] = LIBRARY
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{MANYLINUX.format(machine) if wanted else f'linux_{machine}'}"
        if version != "editable":
            self._list_parts(build_data, folder / "numapin.cdx.json")

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

    def _list_parts(self, build_data: dict[str, Any], listed: Path) -> None:
        """Put a list of what is in the wheel, and of what it needs, into its .dist-info/sboms (PEP 770)."""
        library = next((Path(path) for path, inside in build_data["force_include"].items() if inside == LIBRARY), None)
        parts = bill_of_materials(self.metadata, library, tag=build_data.get("tag") or "py3-none-any")
        listed.write_text(json.dumps(parts, indent=2) + "\n")
        build_data["sbom_files"].append(str(listed))


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
    """Return README for an index: links point into the repository at a tag; without a URL, only their text is left.

    The index shows images from absolute URLs only. GitHub's `raw` sends SVG files as images.
    """
    definitions = dict(re.findall(r"^\[([^\]]+)\]: (?!https?://|#)(\S+)$", readme, re.MULTILINE))
    if not repository:
        text = re.sub(r"^!\[([^\]]*)\]\((?!https?://)[^)]*\)$", r"*\1.*", readme, flags=re.MULTILINE)
        text = re.sub(r"(?<!!)\[([^\]]*)\]\((?!https?://|#)[^)]*\)", r"\1", text)
        text = re.sub(r"^\[[^\]]+\]: (?!https?://|#)\S+\n", "", text, flags=re.MULTILINE)
        return re.sub(r"\[([^\[\]]*)\]\[([^\]]*)\]", lambda link: link[1] if link[2] in definitions else link[0], text)
    text = re.sub(r"(!\[[^\]]*\]\()(?!https?://)", rf"\1{repository}/raw/{version}/", readme)
    text = re.sub(r"((?<!!)\[[^\]]*\]\()(?!https?://|#)", rf"\1{repository}/blob/{version}/", text)
    return re.sub(r"^(\[[^\]]+\]: )(?!https?://|#)", rf"\1{repository}/blob/{version}/", text, flags=re.MULTILINE)


def project_urls(repository: str) -> dict[str, str]:
    """Return the links beside an index page; none if nobody has said where the project is published."""
    if not repository:
        return {}
    return {
        "Repository": repository,
        "Documentation": f"{repository}/blob/HEAD/docs/index.md",
        "Changelog": f"{repository}/blob/HEAD/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }


def bill_of_materials(metadata: Any, library: Path | None, *, tag: str) -> dict[str, Any]:  # noqa: ANN401 - hatchling's
    """Return a CycloneDX 1.6 list: numapin, the compiled library in the wheel, and the packages that pip adds.

    The versions of the packages are those that pip chooses later, so the list has their ranges. There is no time and no
    random number in it: the same sources make the same file.
    """
    name, version, core = metadata.core.name, metadata.version, metadata.core
    purl = f"pkg:pypi/{name}@{version}"
    needs = [_needed(str(requirement)) for requirement in core.dependencies]
    compiled = [] if library is None else [_compiled(library, version)]
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, f'{purl}?tag={tag}')}",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "bom-ref": purl,
                "name": name,
                "version": version,
                "description": core.description,
                "licenses": [{"license": {"id": core.license_expression}}],
                "purl": purl,
            }
        },
        "components": [*compiled, *needs],
        "dependencies": [
            {"ref": purl, "dependsOn": [part["bom-ref"] for part in (*compiled, *needs)]},
            *({"ref": part["bom-ref"]} for part in (*compiled, *needs)),
        ],
    }


def _needed(requirement: str) -> dict[str, Any]:
    name = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
    purl = f"pkg:pypi/{name.lower()}"
    range_of = {"name": "numapin:requires", "value": requirement}
    return {
        "type": "library",
        "bom-ref": purl,
        "name": name,
        "scope": "required",
        "purl": purl,
        "properties": [range_of],
    }


def _compiled(library: Path, version: str) -> dict[str, Any]:
    digest = hashlib.sha256(library.read_bytes()).hexdigest()
    return {
        "type": "file",
        "bom-ref": LIBRARY,
        "name": LIBRARY,
        "version": version,
        "description": f"compiled from {SOURCE}",
        "hashes": [{"alg": "SHA-256", "content": digest}],
        "licenses": [{"license": {"id": "Apache-2.0"}}],
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
