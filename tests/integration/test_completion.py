"""`numapin completion`: real shells complete numapin's command lines."""

from __future__ import annotations

import os
import re
import select
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

import pytest

from tests.integration.launching import call, forked
from tests.integration.seam import run_directory
from tests.terminals import opened

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


_SHELLS: Final = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], 'eval "$(numapin completion bash)"'),
    "zsh": (["zsh", "-f", "-i"], 'autoload -U compinit; compinit -u -D; eval "$(numapin completion zsh)"'),
    "fish": (["fish", "--no-config", "-i"], "numapin completion fish | source"),
}
_WITH_TERMINAL: Final = (
    "import fcntl, os, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "os.execvp(sys.argv[1], sys.argv[1:])"
)
"""A program that becomes the shell, with its stdin as its controlling terminal."""
_LIMIT_S: Final = 60
_QUERIES: Final = {b"\x1b[c": b"\x1b[?62;c", b"\x1b[0c": b"\x1b[?62;c", b"\x1b[6n": b"\x1b[1;1R"}
"""Questions to the terminal, and the answers of one."""


class Shell:
    """A shell that has loaded numapin's completion; a context manager."""

    def __init__(self, name: str, folder: Path, **environment: str) -> None:
        program, load = _SHELLS[name]
        path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
        environ = {"PATH": path, "TERM": "xterm", "HOME": str(folder), "LC_ALL": "C.UTF-8", "PS1": "$ ", **environment}
        self._terminal, own = opened(300)
        command = [sys.executable, "-Sc", _WITH_TERMINAL, *program]
        self._process = subprocess.Popen(command, stdin=own, stdout=own, stderr=own, cwd=folder, env=environ)
        os.close(own)
        self._type(f"{load}; echo LOAD''ED\r", until="LOADED")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._terminal)
        self._process.kill()
        self._process.wait()

    def completed(self, line: str) -> str:
        """Return the line after the Tab key: it is moved into an argument of `echo`, and printed."""
        shown = self._type(f"{line}\t\x01echo 'NOW''{{\x05}}'\r", until=r"[\r\n]NOW\{.*\}")
        *_, last = re.finditer(r"[\r\n]NOW\{(.*)\}", shown)
        return last[1].rstrip()

    def _type(self, keys: str, *, until: str) -> str:
        os.write(self._terminal, keys.encode())
        shown = b""
        end_s = time.monotonic() + _LIMIT_S
        while not re.search(until, shown.decode(errors="replace")):
            if not select.select([self._terminal], [], [], max(0, end_s - time.monotonic()))[0]:
                raise TimeoutError(shown)
            part = os.read(self._terminal, 65536)
            for question, answer in _QUERIES.items():
                if question in part:
                    os.write(self._terminal, answer)
            shown += part
        return shown.decode(errors="replace")


@pytest.mark.parametrize("shell", _SHELLS)
def test_a_shell_completes(shell: str, tmp_path: Path) -> None:
    """Each shell completes commands, options, values, torchrun's options, files, other programs, and active runs."""
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} is installed")
    for name in ("my train.py", "placement.json"):
        (tmp_path / name).touch()
    runs = tmp_path / "runs"
    runs.mkdir()
    with (
        run_directory({"NUMAPIN_RUN_DIR": str(runs)}) as run,
        Shell(shell, tmp_path, NUMAPIN_RUN_DIR=str(runs)) as typing,
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
