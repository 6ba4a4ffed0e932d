"""`make package` and `make release`: what counts as a failure, what the page says about it, and the tools in use."""

from __future__ import annotations

import platform
import re
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts import package, release
from scripts.release_table import FILES, PAGE, RAW, Counts, Result, write_table


@pytest.mark.parametrize(
    ("output", "counts"),
    [
        ("..\n26 passed in 1.00s", Counts(passed=26)),
        ("FAILED a\n1 failed, 25 passed, 3 skipped, 2 deselected in 39.17s", Counts(passed=25, failed=1, skipped=3)),
        ("ERROR a\n2 passed, 2 errors in 1s", Counts(passed=2, failed=2)),
        ("1 error in 0.5s", Counts(failed=1)),
        ("no tests ran in 0.01s", Counts(failed=1)),
        ("Segmentation fault", Counts(failed=1)),
        ("", Counts(failed=1)),
        (
            "failed beside the others, passed alone: a\nFAILED a\n1 failed, 25 passed in 1s",
            Counts(passed=26, retried=1),
        ),
    ],
)
def test_counts(output: str, counts: Counts) -> None:
    """What pytest counted is read from its last line; a run that ended without one has failed."""
    assert release.count(output) == counts


def result(**fields: object) -> Result:
    """Return a result with some fields set."""
    known = {"name": "n", "python": "3.13.0", "torch": "2.15.0", "kind": "pure", "files": "hash"}
    return Result(**{**known, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (result(counts=Counts(passed=7)), "passed"),
        (result(counts=Counts(passed=7, retried=2)), "passed, 2 on a second try"),
        (result(counts=Counts(passed=7, failed=1)), "1 failed"),
        (result(why="no python3.14t on PATH"), "not tried: no python3.14t on PATH"),
    ],
)
def test_the_page_says_what_happened(made: Result, words: str, tmp_path: Path) -> None:
    """A failure and a trial that was not run are in the table, and counts only if there are any."""
    (tmp_path / "docs" / "results").mkdir(parents=True)
    write_table([made], tmp_path)
    (row,) = [line for line in (tmp_path / PAGE).read_text().splitlines() if line.startswith("| 3.13.0")]
    assert row.split(" | ")[3] == words
    assert ("| 7 |" in row) == (not made.why)
    assert f"== n: {words}" in (tmp_path / RAW).read_text()


def test_a_misspelt_trial(capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown trial is refused, with the list of trials, before anything is installed."""
    assert release.main(["3.13-torch9"]) == 2
    assert "3.13-torchnewest" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("fields", "options", "status"),
    [
        ({"counts": Counts(passed=1)}, [], 0),
        ({"why": "no python3.11 on PATH"}, [], 1),
        ({"why": "no python3.11 on PATH"}, ["--optional"], 0),
        ({"counts": Counts(failed=1)}, ["--optional"], 1),
    ],
)
def test_the_status(
    fields: dict[str, object], options: list[str], status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A named trial whose torch is missing is a failure, unless --optional is given; a failed test always is one."""
    made = result(name="3.11-torchnewest", **fields)
    monkeypatch.setattr(release, "attempt", lambda *_: made)
    monkeypatch.setattr(release, "hash_of_files", lambda: "hash")
    monkeypatch.setattr(release, "RESULTS", tmp_path)
    assert release.main(["--check", *options, "3.11-torchnewest"]) == status
    assert not list(tmp_path.iterdir())


def test_the_tests_of_a_trial() -> None:
    """Each choice names tests that are there."""
    for tests in (release.ALL_TESTS, release.TESTS, release.FEW_TESTS, release.WITHOUT_TORCH):
        assert all((package.ROOT / name).exists() for name in tests)
    assert release.parse(["--few"]).tests == release.FEW_TESTS
    with pytest.raises(SystemExit, match="2"):
        release.parse(["--few", "--all"])


def test_a_python_with_the_gil_is_not_free_threaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A free-threaded Python is installed as python3.14, too: the name alone says nothing."""
    for name in ("python3.98", "python3.98t"):
        (tmp_path / name).symlink_to(sys.executable)
    monkeypatch.setenv("PATH", str(tmp_path))
    has_gil = not sysconfig.get_config_var("Py_GIL_DISABLED")
    right, wrong = ("3.98", "3.98t") if has_gil else ("3.98t", "3.98")
    assert release.find_python(right)[0] == f"python{right}"
    with pytest.raises(release.NotHereError, match=f"no python{wrong} on PATH"):
        release.find_python(wrong)


def test_a_python_that_is_not_there() -> None:
    """A Python that is on no PATH is named; the trial is then not tried."""
    with pytest.raises(release.NotHereError, match=r"no python3\.99 on PATH"):
        release.find_python("3.99")


@pytest.mark.parametrize(
    ("torch", "outcome", "num_failed"),
    [(None, "1 failed", 1), ("2.13", "not tried: torch==2.13.* cannot be installed: no message", 0)],
)
def test_what_pip_cannot_install(
    torch: str | None, outcome: str, num_failed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A built file that pip refuses has failed; only a torch that pip does not find was not tried."""
    (tmp_path / "numapin-0.1.0-py3-none-any.whl").write_bytes(b"not a wheel")
    monkeypatch.setattr(release, "WORK", tmp_path / "work")
    monkeypatch.setattr(release, "PACKAGES", tmp_path)
    monkeypatch.setattr(release, "find_python", lambda _: ("true", {}))  # makes any environment
    monkeypatch.setattr(sys, "executable", "false")  # the pip that refuses everything
    made = release.attempt(release.Trial(python="3.13", torch=torch, kind="pure"), "hash", ())
    assert (made.outcome, made.counts) == (outcome, Counts(failed=num_failed))
    assert made.output == ("numapin cannot be installed: no message" if num_failed else "")


@pytest.mark.parametrize(
    ("numapin", "whose"),
    [("raise RuntimeError('ours')", "ours"), ("", "theirs")],
)
def test_what_cannot_be_imported(numapin: str, whose: str, tmp_path: Path) -> None:
    """An installed numapin, or an installed torch, that cannot be imported has failed."""
    (tmp_path / "numapin.py").write_text(numapin)
    (tmp_path / "torch.py").write_text("raise RuntimeError('theirs')")
    with pytest.raises(release.BrokenError, match=f"^RuntimeError: {whose}$"):
        release.read_versions(Path(sys.executable), tmp_path)


def test_the_wheel_of_this_machine() -> None:
    """A trial installs the wheel that this kind of machine would get."""
    assert release.Trial(python="3.13", torch=None).kind == (
        platform.machine() if platform.machine() in package.MACHINES else "pure"
    )
    assert set(package.MACHINES) < set(release.KINDS) == set(FILES)


def test_a_check_that_was_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check whose programs are not installed neither holds nor fails; it says what to install."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        package.NotRunError, match=r"apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user"
    ):
        package.run_library(tmp_path / "numapin.whl", "aarch64")


@pytest.mark.parametrize(
    ("error", "outcome", "words"),
    [
        (None, package.Outcome.HOLDS, "1 of 1 checks hold"),
        (package.NotRunError("no qemu"), package.Outcome.NOT_RUN, "0 of 1 checks hold, 1 not run"),
        (package.CheckError("bytes"), package.Outcome.FAILED, "0 of 1 checks hold"),
    ],
)
def test_how_checks_are_counted(
    error: Exception | None, outcome: package.Outcome, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A check that was not run is not counted among those that hold."""

    def check() -> str:
        if error:
            raise error
        return "fine"

    assert package.attempt("a check", check) is outcome
    assert package.summary([outcome]) == words
    assert capsys.readouterr().out == f"{outcome:7}  a check: {error or 'fine'}\n"


class TestTools:
    """The programs that make, check and attest the files of a release are those that were reviewed."""

    def test_each_is_pinned_with_its_hashes(self) -> None:
        """Each installed package has one version and the hashes of its files; none that is asked for is missing."""
        text = (package.ROOT / "packaging/release-tools.txt").read_text().replace("\\\n", "")
        lines = [line for line in text.splitlines() if line and not line.lstrip().startswith("#")]
        versions = {}
        for line in lines:
            found = re.fullmatch(r"([\w.-]+)==([\w.]+)(?: ; [^;]*?)?\s+(?:--hash=sha256:[0-9a-f]{64}\s*)+", line)
            assert found is not None, line
            versions[canonicalize_name(found[1])] = found[2]
        asked = tomllib.loads((package.ROOT / "pyproject.toml").read_text())["dependency-groups"]["release"]
        for wanted in map(Requirement, asked):
            assert wanted.specifier.contains(versions[canonicalize_name(wanted.name)]), wanted

    def test_they_are_installed_by_their_hashes(self) -> None:
        """Any other file is refused, and none is built, because a build would fetch packages without hashes."""
        makefile = (package.ROOT / "Makefile").read_text()
        recipe = makefile.partition("\n$(TOOLS)/.ready:")[2].partition("\n\n")[0]
        (install,) = [line for line in recipe.splitlines() if "install" in line]
        assert install.endswith("--require-hashes --only-binary :all: -r packaging/release-tools.txt")
        assert re.search(r"\npackage: \$\(TOOLS\)/\.ready .*\n\t\$\(TOOLS\)/bin/python -m scripts\.package\n", makefile)

    def test_the_attested_job_installs_no_others(self) -> None:
        """Its actions are named by commit; besides Debian's packages, which are signed, it runs `make package` only."""
        workflow = yaml.safe_load((package.ROOT / ".github/workflows/release.yml").read_text())
        for job in workflow["jobs"].values():
            actions = [step["uses"] for step in job["steps"] if "uses" in step]
            assert all(re.search(r"@[0-9a-f]{40}$", action) for action in actions), actions
        commands = "".join(step.get("run", "").strip() + "\n" for step in workflow["jobs"]["build"]["steps"])
        programs = {line.split()[0] for line in commands.splitlines() if line}
        assert programs == {"sudo", "grep", "make"}
        assert {line for line in commands.splitlines() if line.startswith("make")} == {"make package"}
        assert all(line.startswith("sudo apt-get ") for line in commands.splitlines() if line.startswith("sudo"))
