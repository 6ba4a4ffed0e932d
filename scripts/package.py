"""Build the files of a release into dist/, and check them: `make package`.

Comes in: the tree. Goes out: dist/packages (an sdist and three wheels), dist/sboms (a list of parts beside each wheel),
dist/conda-forge/recipe.yaml, dist/SHA256SUMS, and a table of the checks. Status 1 if a check fails. A check that needs
a program that is not installed is counted apart, with what to install.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from contextlib import ExitStack
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT: Final = Path(__file__).resolve().parents[1]
DIST: Final = ROOT / "dist"
PACKAGES: Final = DIST / "packages"
MACHINES: Final = {"x86_64": 62, "aarch64": 183}
"""The kinds of wheels with a compiled part, and their numbers in an ELF file."""
IN_SDIST: Final = ("numapin/__init__.py", "tests/conftest.py", "docs/index.md", "examples/README.md", "LICENSE")
LIBRARY: Final = "numapin/system/libstores.so"
EXAMPLE_URL: Final = "https://example.org/owner/numapin"  # of the index page that is checked, in no file of a release
CROSS_PACKAGES: Final = "gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user"
CHECK: Final = "tests/unit/system/stores_check.c"


class CheckError(Exception):
    """A built file is not as it must be."""


class NotRunError(Exception):
    """A check needs a program that is not installed."""


class Outcome(StrEnum):
    """What came of a check, as its line begins."""

    HOLDS = "ok"
    FAILED = "FAILED"
    NOT_RUN = "NOT RUN"


def main() -> int:
    """Build and check everything."""
    shutil.rmtree(DIST, ignore_errors=True)
    with ExitStack() as stack:
        tree = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="numapin-sdist-")))
        again = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="numapin-again-")))
        sdist = build_sdist(ROOT, PACKAGES)
        source = unpack(sdist, tree)
        wheels = [build_wheel(source, kind, PACKAGES) for kind in (*MACHINES, "pure")]
        checks: dict[str, Callable[[], str]] = {
            "twine check --strict": partial(twine, [sdist, *wheels]),
            "index page": partial(index_page, again),
            "the sdist is complete": partial(sdist_is_complete, sdist),
            "the tree makes the same files": partial(tree_makes_the_same, again),
            "no path of this machine": partial(no_path, [sdist, *wheels], [tree, again]),
            **{f"{wheel.name}: parts": partial(compiled_part, wheel) for wheel in wheels},
            **{f"{wheel.name}: auditwheel": partial(audit, wheel) for wheel in wheels[:-1]},
            **{
                f"libstores.so of {name}": partial(run_library, wheel, name)
                for name, wheel in zip(MACHINES, wheels, strict=False)
            },
            "lists of parts (CycloneDX)": partial(keep_sboms, wheels),
            "conda-forge recipe": partial(write_recipe, sdist),
            ".github/workflows (zizmor)": lint_workflows,
        }
        outcomes = [attempt(name, check) for name, check in checks.items()]
    write_sums([sdist, *wheels])
    print(f"\n{summary(outcomes)}; the files are in {PACKAGES.relative_to(ROOT)}")
    return int(Outcome.FAILED in outcomes)


def attempt(name: str, check: Callable[[], str]) -> Outcome:
    """Run a check and print its result."""
    try:
        result, outcome = check(), Outcome.HOLDS
    except NotRunError as error:
        result, outcome = str(error), Outcome.NOT_RUN
    except (CheckError, OSError, subprocess.CalledProcessError) as error:
        result, outcome = str(error), Outcome.FAILED
    print(f"{outcome:7}  {name}: {result}", flush=True)
    return outcome


def summary(outcomes: list[Outcome]) -> str:
    """Return how many checks hold; those that were not run are named apart."""
    num_not_run = outcomes.count(Outcome.NOT_RUN)
    apart = f", {num_not_run} not run" if num_not_run else ""
    return f"{outcomes.count(Outcome.HOLDS)} of {len(outcomes)} checks hold{apart}"


def run(*command: str | Path, folder: Path = ROOT, **environ: str) -> str:
    """Run a program, and return its stdout. Raises CheckError with what it printed."""
    result = subprocess.run(
        list(map(str, command)), cwd=folder, env={**os.environ, **environ}, capture_output=True, text=True, check=False
    )
    if result.returncode:
        last = "\n".join((result.stdout + result.stderr).strip().splitlines()[-15:])
        raise CheckError(f"{' '.join(map(str, command))}: status {result.returncode}\n{last}")
    return result.stdout


def build_sdist(folder: Path, out: Path, *, repository: str = "") -> Path:
    """Build an sdist, and return its path."""
    command = (sys.executable, "-m", "build", "--no-isolation", "--sdist", "--outdir", out, folder)
    run(*command, NUMAPIN_REPOSITORY=repository or os.environ.get("NUMAPIN_REPOSITORY", ""))
    (made,) = out.glob("*.tar.gz")
    return made


def build_wheel(folder: Path, kind: str, out: Path) -> Path:
    """Build a wheel of a kind (hatch_build.py), and return its path."""
    before = set(out.glob("*.whl"))
    command = (sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", out, folder)
    run(*command, folder=folder, NUMAPIN_WHEEL=kind)
    (made,) = set(out.glob("*.whl")) - before
    return made


def unpack(sdist: Path, folder: Path) -> Path:
    """Unpack an sdist, and return the folder in it."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    return source


def twine(files: list[Path]) -> str:
    """Check the metadata, and that the index can show README."""
    run(sys.executable, "-m", "twine", "check", "--strict", *files)
    return f"{len(files)} files"


def index_page(folder: Path) -> str:
    """Build with a repository's URL; check that the index shows README's picture, and that all links lead there."""
    from readme_renderer.markdown import render

    sdist = build_sdist(ROOT, folder / "page", repository=EXAMPLE_URL)
    (metadata,) = (content.decode() for name, content in members(sdist) if re.fullmatch(r"[^/]+/PKG-INFO", name))
    shown = render(metadata.partition("\n\n")[2])
    pictures = re.findall(r'<img[^>]* src="([^"]*)"', shown or "")
    links = re.findall(r'href="([^"]*)"', shown or "")
    wrong = [link for link in (*links, *pictures) if not link.startswith(("https://", "#"))]
    if not pictures or wrong:
        raise CheckError(f"pictures: {pictures}; links that lead nowhere: {wrong}")
    return f"{len(pictures)} picture, {len(links)} links"


def sdist_is_complete(sdist: Path) -> str:
    """Check that the sdist has tests, docs and examples, and nothing that a build left in the tree."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    missing = [name for name in IN_SDIST if name not in names]
    left = [name for name in names if re.search(r"\.(so|pyc)$|(^|/)(\.cache|\.venv|dist|site)/", name)]
    if missing or left:
        raise CheckError(f"missing {missing}, left over {left}")
    return f"{len(names)} files, with tests, docs and examples"


def tree_makes_the_same(folder: Path) -> str:
    """Build all again, from the tree itself, and compare bytes."""
    made = [build_sdist(ROOT, folder), *(build_wheel(ROOT, kind, folder) for kind in (*MACHINES, "pure"))]
    others = [path.name for path in made if path.read_bytes() != (PACKAGES / path.name).read_bytes()]
    if others:
        raise CheckError(f"other bytes in {', '.join(others)}")
    return f"{len(made)} files, byte for byte"


def no_path(files: list[Path], folders: list[Path]) -> str:
    """Check that no file names a folder in which it was built, or this user's home."""
    home = Path.home()
    paths = [str(path) for path in (ROOT, *folders, sys.prefix, *([home] if len(home.parts) > 2 else []))]
    for file in files:
        for name, content in members(file):
            found = [path for path in paths if path.encode() in content]
            if found:
                raise CheckError(f"{file.name}: {name} has {', '.join(found)}")
    return f"{len(files)} files"


def members(file: Path) -> Iterator[tuple[str, bytes]]:
    """Yield each file in an archive, with its content."""
    if file.suffix == ".whl":
        with zipfile.ZipFile(file) as wheel:
            yield from ((name, wheel.read(name)) for name in wheel.namelist())
        return
    with tarfile.open(file) as archive:
        for member in archive:
            content = archive.extractfile(member)
            if content is not None:
                yield member.name, content.read()


def compiled_part(wheel: Path) -> str:
    """Check that a wheel has libstores.so of its tag's machine, and that the pure one has no compiled part."""
    compiled = {name: content for name, content in members(wheel) if content.startswith(b"\x7fELF")}
    if wheel.name.endswith("-none-any.whl"):
        if compiled:
            raise CheckError(f"{', '.join(compiled)} in a pure wheel")
        return "nothing compiled"
    (machine,) = (machine for machine in MACHINES if wheel.name.endswith(f"_{machine}.whl"))
    numbers = {name: int.from_bytes(content[18:20], "little") for name, content in compiled.items()}
    if numbers != {LIBRARY: MACHINES[machine]}:
        raise CheckError(f"{numbers}, not {LIBRARY} for {machine} ({MACHINES[machine]})")
    return f"{LIBRARY} for {machine}"


def audit(wheel: Path) -> str:
    """Check with auditwheel that the wheel runs where its tag says."""
    shown = " ".join(run(sys.executable, "-m", "auditwheel", "show", wheel).split())
    found = re.search(r'consistent with the following platform tag: "(\w+)"', shown)
    if found is None or found[1] not in wheel.name:
        raise CheckError(f"auditwheel says {found[1] if found else shown}")
    versions = sorted(set(re.findall(r"GLIBC_[\d.]+", shown)))
    return f"{found[1]} ({', '.join(versions)})"


def run_library(wheel: Path, machine: str) -> str:
    """Copy with the library in the wheel; that of another machine under QEMU. Raises NotRunError without it."""
    is_here = machine == platform.machine()
    compiler = "cc" if is_here else f"{machine}-linux-gnu-gcc"
    emulator = [] if is_here else [f"qemu-{machine}", "-L", f"/usr/{machine}-linux-gnu"]
    missing = [program for program in (compiler, *emulator[:1]) if shutil.which(program) is None]
    if missing:
        raise NotRunError(f"no {' and no '.join(missing)}; as root: apt-get install {CROSS_PACKAGES}")
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        library, program = Path(archive.extract(LIBRARY, folder)), Path(folder, "check")
        run(compiler, "-O1", "-o", program, ROOT / CHECK, "-ldl")
        shown = run(*emulator, program, library).strip()
    return f"{shown}{f', in {emulator[0]}' if emulator else ''}"


def keep_sboms(wheels: list[Path]) -> str:
    """Check each wheel's list of parts against CycloneDX's schema, and put a copy beside the wheels."""
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    folder = DIST / "sboms"
    folder.mkdir(parents=True)
    for wheel in wheels:
        (text,) = (content.decode() for name, content in members(wheel) if "/sboms/" in name)
        problem = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
        if problem is not None:
            raise CheckError(f"{wheel.name}: {problem}")
        (folder / f"{wheel.name}.cdx.json").write_text(text)
    return f"{len(wheels)} files in {folder.relative_to(ROOT)}"


def write_recipe(sdist: Path) -> str:
    """Write conda-forge's recipe for this sdist: its version and its hash."""
    version = sdist.name.removeprefix("numapin-").removesuffix(".tar.gz")
    recipe = (ROOT / "packaging/conda-forge/recipe.yaml").read_text()
    for name, value in (("VERSION", version), ("SHA256", sha256(sdist))):
        if recipe.count(f"@{name}@") != 1:
            raise CheckError(f"@{name}@ is not once in packaging/conda-forge/recipe.yaml")
        recipe = recipe.replace(f"@{name}@", value)
    target = DIST / "conda-forge" / "recipe.yaml"
    target.parent.mkdir(parents=True)
    target.write_text(recipe)
    return f"{target.relative_to(ROOT)}; it has never been built"


def lint_workflows() -> str:
    """Lint the GitHub Actions workflow for security problems."""
    run(Path(sys.executable).with_name("zizmor"), "--offline", "--quiet", "--min-severity", "low", ".github/workflows")
    return "no finding; it has never run"


def sha256(path: Path) -> str:
    """Return the hash of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_sums(files: list[Path]) -> None:
    """Write the hashes, as `sha256sum --check` reads them."""
    (DIST / "SHA256SUMS").write_text("".join(f"{sha256(path)}  packages/{path.name}\n" for path in files))


if __name__ == "__main__":
    sys.exit(main())
