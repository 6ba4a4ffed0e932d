"""`numapin completion`: real shells complete numapin's command lines."""

from __future__ import annotations

import shutil
import sys
import time
from contextlib import suppress
from math import inf
from pathlib import Path

import pytest

from tests.integration.launching import NUMAPIN, call, forked
from tests.integration.seam import run_directory
from tests.shells import Shell

SHELLS = [
    pytest.param(name, marks=pytest.mark.skipif(shutil.which(name) is None, reason=f"no {name} is installed"))
    for name in ("bash", "zsh", "fish")
]
LINES = {
    "numapin ver": "numapin verify",
    "numapin run --cpus": "numapin run --cpus-per-rank",
    "numapin run --bind excl": "numapin run --bind exclusive",
    "numapin run --bind=excl": "numapin run --bind=exclusive",
    "numapin run --nproc-": "numapin run --nproc-per-node",
    "numapin run --start-method forks": "numapin run --start-method forkserver",
    "numapin run my": r"numapin run my\ train.py",
    "numapin run --report=pla": "numapin run --report=placement.json",
    "numapin run train.py --config pla": "numapin run train.py --config placement.json",
    "numapin plan --machine example:dgx-a": "numapin plan --machine example:dgx-a100",
    "numapin exec --bind node -- sha256s": "numapin exec --bind node -- sha256sum",
    "numapin exec -- sha256sum pla": "numapin exec -- sha256sum placement.json",
    "true && A=b numapin bench transfer --peers pinned,pag": (
        "true && A=b numapin bench transfer --peers pinned,pageable"
    ),
}
"""Command lines before and after the Tab key."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("my train.py", "placement.json"):
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_completes(shell: str, folder: Path) -> None:
    """Each shell completes commands, options, values, torchrun's options, files, other programs, and active runs."""
    runs = folder / "runs"
    runs.mkdir()
    with (
        run_directory({"NUMAPIN_RUN_DIR": str(runs)}) as run,
        Shell(shell, folder, NUMAPIN_RUN_DIR=str(runs)) as typing,
    ):
        found = {line: typing.completed(line) for line in [*LINES, "numapin top run-"]}
    assert found == {**LINES, "numapin top run-": f"numapin top {Path(run).name}"}


@pytest.mark.parametrize("variable", ["TMPDIR", "NUMAPIN_RUN_DIR"])
def test_plans_of_runs_are_offered(variable: str, tmp_path: Path) -> None:
    """`topo --plan` offers the plan of a run that left its folder, `verify` only the names of active runs."""
    environ = {variable: str(tmp_path)}
    with suppress(LookupError), run_directory(environ) as run:
        (Path(run) / "plan.json").touch()
        active = forked("_complete", "zsh", "verify", "", cwd=None, **environ).out
        raise LookupError
    ended = forked("_complete", "zsh", "verify", "", cwd=None, **environ).out
    assert [f"word\t{Path(run).name}\t" in out for out in (active, ended)] == [True, False]
    found = forked("_complete", "zsh", "topo", "--plan", "", cwd=None, **environ).out
    assert "word\t@last\tthe newest run\n" in found
    assert f"word\t{Path(run).name}\t" in found


def test_the_script_explains_itself() -> None:
    """Each script begins with where to put it, as the help does."""
    page = forked("completion", "--help").out
    for shell in ("bash", "zsh", "fish"):
        done = forked("completion", shell)
        assert done.status == 0, done.err
        assert f"numapin completion {shell}" in done.out.partition("\n\n")[0]
        assert f"numapin completion {shell}" in page


def test_a_key_press_does_not_import_torch() -> None:
    """Completion stays fast: it never imports torch, and for the names of commands no command."""
    code = (
        "import sys; from numapin.cli.main import numapin\n"
        "for words in ([''], ['run', '--max'], ['trace', '--numa-binding', ''], ['top', '']):\n"
        "    numapin(['_complete', 'zsh', *words], standalone_mode=False)\n"
        "    print('END', *{'torch', 'numapin.cli.run'} & sys.modules.keys())\n"
    )
    done = call(sys.executable, "-c", code)
    assert done.status == 0, done.err
    candidates = done.out.split("END")
    assert [text.partition("\n")[0].split() for text in candidates[1:]] == [[]] + [["numapin.cli.run"]] * 3
    assert "--max-restarts" in candidates[1]


@pytest.mark.alone
def test_a_key_press_takes_at_most_200_ms() -> None:
    """The candidates are there within 0.2 s, as the best of many tries."""
    times_s = [inf]
    deadline = time.monotonic() + 60
    while min(times_s) > 0.2 and time.monotonic() < deadline:
        start = time.perf_counter()
        assert call(*NUMAPIN, "_complete", "zsh", "run", "--max").out.startswith("word\t--max-restarts\t")
        times_s.append(time.perf_counter() - start)
    assert min(times_s) <= 0.2
