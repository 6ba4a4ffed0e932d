"""The remedies of a report as a shell script: safe to run, safe to read, and undone by what it prints."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from numapin.doctor.advice import Advice, PinVerdict
from numapin.doctor.check import DoctorSeverity
from numapin.doctor.model import DoctorFinding, DoctorReport
from numapin.doctor.script import _FIXES, remedy_script
from tests.terminals import HOSTILE

if TYPE_CHECKING:
    from pathlib import Path

NOTHING = Advice(verdict=None, footprint_bytes=None, room_bytes=None, reason="")


def finding(check: str, what: str = "off", *, severity: str = "note", remedy: str | None = "do it") -> DoctorFinding:
    """Return a finding of one check."""
    return DoctorFinding(
        check=check, severity=DoctorSeverity(severity), what=what, where="/proc", why="It costs.", remedy=remedy
    )


def script(*findings: DoctorFinding, host: str = "node7") -> str:
    """Return the script of a report with these findings."""
    return remedy_script(DoctorReport(host=host, source="live", findings=findings, advice=NOTHING))


def commands(text: str) -> list[str]:
    """Return the lines that a shell runs, without the functions at the top."""
    after = text.partition("\n# 1. ")[2]
    return [line for line in after.splitlines()[1:] if line and not line.startswith("#")]


def run(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a script whose kernel files are those below a folder; commands for root are found there, too."""
    path = folder / "remedies.sh"
    path.write_text(text.replace(" /sys/", f" {folder}/sys/").replace(" /proc/sys/", f" {folder}/proc/sys/"))
    lines = [line for line in commands(path.read_text()) if "set_kernel" in line]
    assert all(str(folder) in line or '"$file"' in line for line in lines)  # never this machine's settings
    environ = {"PATH": f"{folder}:/usr/bin:/bin"}
    (folder / "sudo").write_text('#!/bin/sh\nexec "$@"\n')
    (folder / "sudo").chmod(0o755)
    return subprocess.run(["sh", str(path)], capture_output=True, text=True, check=False, env=environ)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck; type: apt-get install shellcheck")
@pytest.mark.parametrize("checks", [list(_FIXES), ["smt"], ["persistence"], ["swap", "smt"], []])
def test_shellcheck_has_no_complaint(checks: list[str], tmp_path: Path) -> None:
    """With every command, with some, and with none."""
    path = tmp_path / "remedies.sh"
    path.write_text(script(*map(finding, checks)))
    done = subprocess.run(["shellcheck", str(path)], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("", 0)


def test_each_remedy_says_what_why_and_how_to_undo_it() -> None:
    """The worst comes first; commands for root are marked; what is well is left out."""
    well = finding("kernel", severity="ok", remedy=None)
    text = script(finding("smt"), well, finding("numa-balancing", "on (1)", severity="warning"))
    assert text.index("# 1. warning: numa-balancing: on (1)") < text.index("# 2. note: smt: off")
    assert text.count("# Why: It costs.") == 2
    assert "# Remedy (root, lasts until the next boot):\n#   do it\n" in text
    assert text.count("# Undo: ") == 1
    assert "kernel:" not in text
    assert commands(text) == ["set_kernel /proc/sys/kernel/numa_balancing 0", 'exit "$failed"']


def test_remedies_that_are_not_commands_are_comments() -> None:
    """Without a command, the script says so and has no function."""
    text = script(finding("iommu", remedy="add iommu=pt to the kernel command line and reboot"))
    assert "# Not run here:\n#   add iommu=pt to the kernel command line and reboot\n" in text
    assert commands(text) == ["echo 'There is no command to run: all remedies are comments.'"]


def test_commands_in_comments_are_whole() -> None:
    """Prose is wrapped; a remedy stays on one line, so that it can be copied."""
    long = f"docker run {' '.join(f'--ulimit memlock={number}' for number in range(20))} image"
    text = script(finding("smt", long, remedy=long), finding("swap", remedy=long))
    assert text.splitlines().count(f"#   {long}") == 2
    assert all(len(line) <= 100 for line in text.splitlines() if long not in line)


def test_the_advice_on_a_loader_comes_last() -> None:
    """It is a comment, and counts as a remedy; without a loader there is none."""
    advice = Advice(
        verdict=PinVerdict.LOWER,
        footprint_bytes=2,
        room_bytes=1,
        reason="it needs 2",
        remedy="DataLoader(…, prefetch_factor=1)",
    )
    report = DoctorReport(host="a", source="live", findings=(finding("swap"),), advice=advice)
    text = remedy_script(report)
    assert "# 2 remedies that" in text
    assert text.endswith(
        "\n\n# 2. pinned memory: lower: it needs 2\n# Not run here:\n#   DataLoader(…, prefetch_factor=1)\n\n"
        'exit "$failed"\n'
    )
    assert "pinned" not in remedy_script(replace(report, advice=replace(advice, verdict=None)))


def _program(folder: Path, name: str, body: str) -> None:
    """Make a command that notes how it was called."""
    (folder / name).write_text(f'#!/bin/sh\necho "{name} $*" >> {folder}/called\n{body}\n')
    (folder / name).chmod(0o755)


def test_persistence_is_changed_only_where_it_was_off(tmp_path: Path) -> None:
    """What it prints undoes only that; a nvidia-smi that fails is reported."""
    _program(
        tmp_path, "nvidia-smi", 'case "$1" in --query*) printf "0, Enabled\\n1, Disabled\\n12, Disabled\\n" ;; esac'
    )
    done = run(script(finding("persistence")), tmp_path)
    assert (done.stderr, done.returncode) == ("", 0)
    called = (tmp_path / "called").read_text().splitlines()
    assert called[1:] == ["nvidia-smi -i 1 -pm 1", "nvidia-smi -i 12 -pm 1"]
    prefix = "" if os.getuid() == 0 else "sudo "
    undo = [line.removeprefix(f"to undo: {prefix}") for line in done.stdout.splitlines()]
    assert undo == ["nvidia-smi -i 1 -pm 0", "nvidia-smi -i 12 -pm 0"]
    _program(tmp_path, "nvidia-smi", "exit 9")
    assert run(script(finding("persistence")), tmp_path).returncode == 1


@pytest.mark.parametrize("is_installed", [True, False])
def test_libnuma_is_installed_only_if_it_is_missing(tmp_path: Path, *, is_installed: bool) -> None:
    """A package that was there before is neither installed nor offered for removal."""
    for query in ("dpkg", "rpm"):
        _program(tmp_path, query, f"exit {int(not is_installed)}")
    _program(tmp_path, "apt-get", "exit 0")
    done = run(script(finding("libnuma")), tmp_path)
    assert (done.stderr, done.returncode) == ("", 0)
    calls = (tmp_path / "called").read_text()
    assert ("apt-get install" in calls, "remove" in done.stdout) == (not is_installed, not is_installed)
    assert ("not changed" in done.stdout) == is_installed


def test_an_installation_that_fails_has_nothing_to_undo(tmp_path: Path) -> None:
    """The status is 1."""
    for name in ("dpkg", "rpm", "apt-get"):
        _program(tmp_path, name, "exit 1")
    done = run(script(finding("libnuma")), tmp_path)
    assert (done.stdout, done.returncode) == ("", 1)
    assert done.stderr == "failed: apt-get install --yes libnuma1\n"


def test_text_of_the_machine_is_never_run(tmp_path: Path) -> None:
    """Neither line breaks nor quotes in names, messages and remedies leave the comments."""
    planted = tmp_path / "planted"
    touch = f"touch {planted}"
    attack = f"x\n {touch}\r\n {touch}\u2028{touch}\x85$({touch})`{touch}`;'\"{HOSTILE}"
    text = script(finding("smt", attack, remedy=attack), finding("swap", attack, remedy=attack), host=attack)
    assert all(line.isprintable() for line in text.splitlines())
    assert commands(text) == ["set_kernel /proc/sys/vm/swappiness 1", 'exit "$failed"']
    run(text, tmp_path)
    assert not planted.exists()


def test_a_run_changes_the_settings_and_prints_how_to_undo_it(tmp_path: Path) -> None:
    """What it prints restores the old values, also that of a file with all values."""
    files = {
        "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]",
        "proc/sys/kernel/numa_balancing": "1",
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave",
        "sys/devices/system/cpu/cpu11/cpufreq/scaling_governor": "schedutil",
    }
    for name, value in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{value}\n")
    done = run(script(*map(finding, ("huge-pages", "numa-balancing", "governor"))), tmp_path)
    assert (done.stderr, done.returncode) == ("", 0)
    assert [(tmp_path / name).read_text() for name in files] == ["madvise\n", "0\n", "performance\n", "performance\n"]
    undo = [line.removeprefix("to undo: ") for line in done.stdout.splitlines()]
    assert len(undo) == 4
    subprocess.run(
        ["sh", "-c", "\n".join(undo)], check=True, capture_output=True, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}
    )
    assert [(tmp_path / name).read_text() for name in files] == ["never\n", "1\n", "powersave\n", "schedutil\n"]


def test_a_command_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    """The status is 1, and stderr names it."""
    (tmp_path / "proc/sys/vm").mkdir(parents=True)
    (tmp_path / "proc/sys/vm/swappiness").write_text("60\n")
    done = run(script(finding("numa-balancing"), finding("swap")), tmp_path)
    assert done.returncode == 1
    assert "numa_balancing" in done.stderr
    assert (tmp_path / "proc/sys/vm/swappiness").read_text() == "1\n"
