"""Install the files of dist/packages into clean environments, and run tests there: `make release`.

Comes in: what `make package` built, the Pythons on PATH (also pyenv's), and names of trials; none: all of them. --all
runs all contract and unit tests, --few only those that depend most on torch; --check writes nothing into the tree.
Goes out: docs/tested.md and docs/results/release-tests.txt, which have every trial that was run on these very files.
Status 1 if one failed; built files that cannot be installed or imported are a failure, as is a torch that cannot be
imported. A trial whose Python or torch is missing is noted; it is a failure only if it was named without --optional.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from scripts.package import PACKAGES, ROOT, members, unpack
from scripts.release_table import Counts, Result, write_table

if TYPE_CHECKING:
    from collections.abc import Sequence

WORK: Final = ROOT / ".cache" / "release"
RESULTS: Final = WORK / "results"
LIMIT_S: Final = 1200
PASSED_ALONE: Final = "failed beside the others, passed alone: "  # begins the lines of tests/twice.py
ALL_TESTS: Final = ("tests/contract", "tests/unit", "tests/integration/test_torchrun_parity.py")
FEW_TESTS: Final = (  # half a minute
    *(f"tests/contract/test_{name}.py" for name in ("surface", "errors", "rng", "cast")),
    *(f"tests/unit/{name}" for name in ("data", "test_public_api.py")),
    *(f"tests/unit/launcher/test_{name}.py" for name in ("direct", "hosts", "installed_torch", "options", "store")),
    "tests/integration/test_torchrun_parity.py",
)
# What depends on the versions of Python and torch, and takes two minutes on two CPUs.
TESTS: Final = (
    *FEW_TESTS,
    "tests/contract/test_values.py",
    *(f"tests/unit/{name}" for name in ("system", "plan", "rank", "tasks")),
)
WITHOUT_TORCH: Final = ("tests/integration/test_without_torch.py",)
KINDS: Final = {"x86_64": "*x86_64.whl", "aarch64": "*aarch64.whl", "pure": "*-none-any.whl", "sdist": "*.tar.gz"}
WHEEL_HERE: Final = platform.machine() if platform.machine() in KINDS else "pure"


class NotHereError(Exception):
    """A trial needs a Python or a torch that this machine does not have."""


class BrokenError(Exception):
    """The built files cannot be installed or imported, or torch is there and cannot be imported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One clean environment.

    Attributes:
        python: The version that the program's name ends with, such as "3.14t".
        torch: The beginning of torch's version; "newest"; or None for an environment without torch.
        kind: Which file is installed, of KINDS.
    """

    python: str
    torch: str | None
    kind: str = WHEEL_HERE
    name: str = field(init=False)

    def __post_init__(self) -> None:
        """Make the name."""
        torch = "notorch" if self.torch is None else f"torch{self.torch}"
        object.__setattr__(self, "name", f"{self.python}-{torch}")

    @property
    def requirement(self) -> str | None:
        """What pip is asked for."""
        return {None: None, "newest": "torch"}.get(self.torch, f"torch=={self.torch}.*")


TRIALS: Final = (
    Trial(python="3.11", torch=None),
    Trial(python="3.12", torch=None, kind="pure"),
    Trial(python="3.13", torch=None, kind="sdist"),
    Trial(python="3.14", torch=None),
    Trial(python="3.14t", torch=None),
    Trial(python="3.11", torch="2.13", kind="sdist"),
    Trial(python="3.11", torch="2.9"),
    Trial(python="3.11", torch="newest"),
    Trial(python="3.12", torch="2.11"),
    Trial(python="3.12", torch="2.13", kind="pure"),
    Trial(python="3.13", torch="newest"),
    Trial(python="3.14", torch="newest"),
    Trial(python="3.14t", torch="newest"),
)


def main(arguments: list[str]) -> int:
    """Run the trials, and write the table of all that were run on these files."""
    options = parse(arguments)
    unknown = set(options.names) - {trial.name for trial in TRIALS}
    if unknown:
        print(f"no such trial: {', '.join(sorted(unknown))}; there are: {' '.join(trial.name for trial in TRIALS)}")
        return 2
    files = hash_of_files()
    chosen = [trial for trial in TRIALS if not options.names or trial.name in options.names]
    results = [tried(trial, files, options) for trial in chosen]
    if not options.check:
        write_table([known(trial, files) for trial in TRIALS], ROOT)
    has_failed = any(result.counts.failed for result in results)
    is_missing = bool(options.names) and not options.optional and any(result.why for result in results)
    return int(has_failed or is_missing)


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line. Exits with 2 if it makes no sense."""
    parser = argparse.ArgumentParser(prog="scripts.release", description="Test what `make package` built.")
    parser.add_argument("names", nargs="*", metavar="TRIAL", help="such as 3.13-torchnewest; none: all")
    parser.add_argument("--check", action="store_true", help="write nothing into the tree")
    parser.add_argument("--optional", action="store_true", help="do not fail if a trial's Python or torch is missing")
    extent = parser.add_mutually_exclusive_group()
    for option, tests, words in (
        ("--all", ALL_TESTS, "run all contract and unit tests"),
        ("--few", FEW_TESTS, "run only the tests that depend most on torch"),
    ):
        extent.add_argument(option, dest="tests", action="store_const", const=tests, default=TESTS, help=words)
    return parser.parse_args(arguments)


def tried(trial: Trial, files: str, options: argparse.Namespace) -> Result:
    """Run a trial; print its result, and keep it unless it is only a check."""
    result = attempt(trial, files, options.tests)
    print(f"{trial.name}: {result.outcome}, {result.seconds:.0f} s", flush=True)
    if options.check:
        print(result.output)
    else:
        RESULTS.mkdir(parents=True, exist_ok=True)
        kept_of(trial).write_text(json.dumps(asdict(result)))
    return result


def known(trial: Trial, files: str) -> Result:
    """Return the result of the last run on the same files, or one that says that there was none."""
    if kept_of(trial).exists():
        fields = json.loads(kept_of(trial).read_text())
        result = Result(**{**fields, "counts": Counts(**fields["counts"])})
        if result.files == files:
            return result
    return Result.not_run(trial.name, trial.python, trial.torch, trial.kind)


def kept_of(trial: Trial) -> Path:
    """Return the file with a trial's last result."""
    return RESULTS / f"{trial.name}.json"


def attempt(trial: Trial, files: str, tests: Sequence[str]) -> Result:
    """Run a trial in a folder of its own, and remove the folder."""
    folder = WORK / "trials" / trial.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    start = time.monotonic()
    result = Result.not_run(trial.name, trial.python, trial.torch, trial.kind)
    try:
        python = make_environment(trial, folder)
        version, torch = read_versions(python, folder)
        counts, output = run_tests(python, folder, tests if trial.torch else WITHOUT_TORCH)
        result = replace(result, python=version, torch=torch, why="", output=output, counts=counts)
    except NotHereError as error:
        result = replace(result, why=str(error))
    except BrokenError as error:
        result = replace(result, why="", output=str(error), counts=Counts(failed=1))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return replace(result, files=files, seconds=time.monotonic() - start)


def hash_of_files() -> str:
    """Return the hash of what is tested, and of its tests: the pure wheel, and the folder tests of the sdist."""
    found = hashlib.sha256(built("pure").read_bytes())
    for name, content in members(built("sdist")):
        if name.split("/")[1] == "tests":
            found.update(name.encode() + content)
    return found.hexdigest()


def built(kind: str) -> Path:
    """Return the file of a kind that `make package` built."""
    found = sorted(PACKAGES.glob(KINDS[kind]))
    if len(found) != 1:
        raise SystemExit(f"{PACKAGES} has {len(found)} files {KINDS[kind]}; type: make package")
    return found[0]


def make_environment(trial: Trial, folder: Path) -> Path:
    """Install the built file, and torch, into a new environment; return its Python.

    Raises NotHereError if there is no such Python or torch, and BrokenError if the built file cannot be installed.
    """
    program, environ = find_python(trial.python)
    environment = folder / "env"
    make = [program, "-m", "venv", "--without-pip", str(environment)]  # Debian's lack ensurepip
    execute(make, environ, what="venv", error=NotHereError)
    python = environment / "bin" / "python"
    if trial.requirement is not None:
        wanted = ("--no-compile", "--only-binary", "torch", trial.requirement)
        pip_install(python, *wanted, what=trial.requirement, error=NotHereError)
    constraints = folder / "constraints.txt"
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    constraints.write_text("\n".join(line for line in lines if not line.startswith("torch==")))
    if trial.requirement is not None:
        file, others = f"{built(trial.kind)}[test]", []
    else:  # without what needs torch
        file, others = str(built(trial.kind)), ["hypothesis", "pytest<9.2", "pytest-timeout"]
    pip_install(python, "--constraint", str(constraints), file, *others, what="numapin", error=BrokenError)
    return python


def find_python(version: str) -> tuple[str, dict[str, str]]:
    """Return the program of a Python on PATH, and its environment; pyenv's are chosen by a variable."""
    program = f"python{version}"
    is_right = "import sysconfig; raise SystemExit(bool(sysconfig.get_config_var('Py_GIL_DISABLED')) is not "
    is_right += f"{version.endswith('t')})"  # a free-threaded Python is installed under both names
    bare = dict(os.environ)
    choices = [bare]
    if shutil.which("pyenv"):
        listed = subprocess.run(["pyenv", "versions", "--bare"], capture_output=True, text=True, check=False).stdout
        choices += [{**bare, "PYENV_VERSION": name} for name in listed.split() if name.startswith(version.rstrip("t"))]
    for environ in choices:
        if (
            shutil.which(program)
            and not subprocess.run([program, "-c", is_right], env=environ, capture_output=True, check=False).returncode
        ):
            return program, environ
    raise NotHereError(f"no {program} on PATH")


def pip_install(python: Path, *arguments: str, what: str, error: type[Exception]) -> None:
    """Install with the pip of this environment, so that the new one needs no pip. Raises `error`."""
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", *arguments]
    execute(command, dict(os.environ), what=what, error=error)


def execute(command: list[str], environ: dict[str, str], *, what: str, error: type[Exception]) -> None:
    """Run a program. Raises `error` with the last error that it printed."""
    result = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if result.returncode:
        errors = [line for line in result.stderr.splitlines() if re.match(r"ERROR|\w*Error", line)]
        raise error(f"{what} cannot be installed: {(errors or ['no message'])[-1]}")


def read_versions(python: Path, folder: Path) -> tuple[str, str]:
    """Return the versions of Python and torch.

    Raises BrokenError if the built numapin, or the torch that was installed, cannot be imported.
    """
    code = "import sys, numapin; print(sys.version.split()[0]); print(numapin.__file__)"
    version, file = imported(python, code, folder)
    if not Path(file).is_relative_to(folder):
        raise SystemExit(f"{file} was imported, which is not what was installed into {folder}")
    code = "from importlib.util import find_spec as f; print(f('torch') and __import__('torch').__version__ or 'none')"
    (torch,) = imported(python, code, folder)
    is_free = not sys_gil(python)
    return f"{version}{' free-threaded' if is_free else ''}", torch


def imported(python: Path, code: str, folder: Path) -> list[str]:
    """Return the lines that a program prints; raise BrokenError with its last line on stderr if it fails."""
    result = subprocess.run([python, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    if result.returncode:
        raise BrokenError((result.stderr.strip().splitlines() or ["no message"])[-1])
    return result.stdout.splitlines()


def sys_gil(python: Path) -> bool:
    """Return whether a Python has the GIL."""
    code = "import sys; sys.exit(not getattr(sys, '_is_gil_enabled', lambda: True)())"
    return not subprocess.run([python, "-c", code], check=False).returncode


def run_tests(python: Path, folder: Path, chosen: Sequence[str]) -> tuple[Counts, str]:
    """Run the sdist's tests against what is installed: the tree beside them has no numapin."""
    source = unpack(built("sdist"), folder / "sdist")
    shutil.rmtree(source / "numapin")
    parallel = () if chosen is WITHOUT_TORCH else ("-n", "2", "--dist=loadgroup")
    output = pytest(python, source, *parallel, *chosen)
    return count(output), output


def pytest(python: Path, folder: Path, *arguments: str) -> str:
    """Run pytest, and a few tests that failed once more (tests/twice.py); return the ends of its output."""
    environ = {**os.environ, "PATH": f"{python.parent}:{os.environ['PATH']}", "NUMAPIN_TEST_INSTALLED": "1"}
    command = [str(python), "-m", "tests.twice", "-q", "-rfE", "--tb=short", "-m", "not alone", *arguments]
    try:
        result = subprocess.run(
            command,
            cwd=folder,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired as error:
        return f"1 failed: no end within {error.timeout:.0f} s"
    WORK.joinpath("last-output.txt").write_text(result.stdout)
    first, _, again = result.stdout.partition("\nonce more, alone:")
    lines = first.splitlines()
    ends = [line for line in again.splitlines() if line.startswith(PASSED_ALONE)]
    ends += [line for line in lines if line.startswith(("FAILED", "ERROR"))] + lines[-1:]
    return "\n".join(line.replace(str(folder), "…") for line in ends)


def count(output: str) -> Counts:
    """Return the numbers in pytest's last line; a run without one failed. Tests that passed alone have passed."""
    line = output.splitlines()[-1] if output else ""
    retried = sum(line.startswith(PASSED_ALONE) for line in output.splitlines())
    found = {name: int(number) for number, name in re.findall(r"(\d+) (passed|failed|skipped|error)", line)}
    failed = found.get("failed", 0) + found.get("error", 0) if found else 1
    passed = found.get("passed", 0) + retried
    return Counts(passed=passed, skipped=found.get("skipped", 0), failed=failed - retried, retried=retried)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
