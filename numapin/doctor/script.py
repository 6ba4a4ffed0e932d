"""The remedies of a report as one shell script. Pure.

Comes in: a `DoctorReport`. Goes out: a POSIX shell script to review and run. Only a remedy that is safe to run as it
is becomes a command: it changes one setting, deletes nothing, stops nothing, and can be undone. All others are
comments, because they depend on the job, the container or the firmware. Text from the machine is in comments only.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Final

from numapin.base import quoting
from numapin.base.plural import counted
from numapin.base.printable import printable
from numapin.doctor.check import DoctorSeverity

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numapin.doctor.advice import Advice
    from numapin.doctor.model import DoctorFinding, DoctorReport

_WIDTH: Final = 100
_PRINTED: Final = "the command prints it, with the value that it replaces"
_UNTIL_REBOOT: Final = "until the next boot"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fix:
    """Lines of shell, how long they last, and how to undo them. All of them need root."""

    lines: tuple[str, ...]
    undo: str = _PRINTED
    lasts: str = _UNTIL_REBOOT


def _set(path: str, value: str) -> _Fix:
    return _Fix(lines=(f"set_kernel {quoting.quote(path)} {quoting.quote(value)}",))


_FIXES: Final = {
    "numa-balancing": _set("/proc/sys/kernel/numa_balancing", "0"),
    "huge-pages": _set("/sys/kernel/mm/transparent_hugepage/enabled", "madvise"),
    "shmem-huge-pages": _set("/sys/kernel/mm/transparent_hugepage/shmem_enabled", "advise"),
    "swap": _set("/proc/sys/vm/swappiness", "1"),
    "governor": _Fix(
        lines=(
            "for file in /sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_governor; do",
            '    set_kernel "$file" performance',
            "done",
        )
    ),
    "persistence": _Fix(
        lines=(
            "modes=$(nvidia-smi --query-gpu=index,persistence_mode --format=csv,noheader) || failed=1",
            "for gpu in $(printf '%s\\n' \"$modes\" | sed -n 's/^\\([0-9]*\\), Disabled$/\\1/p'); do",
            '    try nvidia-smi -i "$gpu" -pm 1 && echo "to undo: ${root:+$root }nvidia-smi -i $gpu -pm 0"',
            "done",
        ),
        undo="the command prints it, for the GPUs that it changes",
    ),
    "libnuma": _Fix(
        lines=(
            "if dpkg -s libnuma1 >/dev/null 2>&1 || rpm -q numactl-libs >/dev/null 2>&1; then",
            "    echo 'not changed: the package of libnuma is installed; the failure has another cause'",
            "elif command -v apt-get >/dev/null; then",
            '    try apt-get install --yes libnuma1 && echo "to undo: ${root:+$root }apt-get remove libnuma1"',
            "else",
            '    try dnf install --assumeyes numactl-libs && echo "to undo: ${root:+$root }dnf remove numactl-libs"',
            "fi",
        ),
        undo="the command prints it, if the package was not installed before",
        lasts="for good",
    ),
}
"""The fix of each check whose remedy is a command that is safe to run on any machine."""

_HEAD: Final = """\
set -u
failed=0
root=
if [ "$(id -u)" -ne 0 ]; then
    root=sudo
fi
"""
_FUNCTIONS: Final = {
    "try": """\
# Run a command as root, and return whether it succeeded.
try() {
    ${root:+"$root"} "$@" || { echo "failed: $*" >&2; failed=1; return 1; }
}
""",
    "set_kernel": """\
# Write a value to a setting of the kernel, and print the command that restores the old value.
set_kernel() {
    # Some files show all values, with the current one in brackets.
    old=$(sed -e 's/.*\\[\\(.*\\)\\].*/\\1/' "$1") || { failed=1; return; }
    if printf '%s\\n' "$2" | ${root:+"$root"} tee "$1" >/dev/null; then
        echo "to undo: echo '$old' | ${root:+$root }tee '$1'"
    else
        echo "failed: $1" >&2
        failed=1
    fi
}
""",
}


def remedy_script(report: DoctorReport) -> str:
    """Return the script: each remedy with the reason, worst first; it exits with 1 if a command failed."""
    found = _with_remedy(report)
    remedies = [*(_block(finding) for finding in found), *_of_loader(report.advice)]
    blocks = ["\n".join([*_comment(f"{number}. {first}"), *rest]) for number, (first, *rest) in enumerate(remedies, 1)]
    head = "\n".join(_title(report, found, num_remedies=len(blocks)))
    needed = [text for name, text in _FUNCTIONS.items() if _calls(name, blocks)]
    if not needed:
        return "\n\n".join([head, *blocks, "echo 'There is no command to run: all remedies are comments.'\n"])
    return "\n\n".join([head, "\n".join([_HEAD, *needed]).rstrip(), *blocks, 'exit "$failed"\n'])


def _with_remedy(report: DoctorReport) -> list[DoctorFinding]:
    """Return the findings with something to do, worst first."""
    found = [finding for finding in report.findings if finding.remedy]
    return sorted(found, key=lambda finding: _RANKS[finding.severity])


_RANKS: Final = {severity: rank for rank, severity in enumerate([*DoctorSeverity, None])}


def _calls(function: str, blocks: Iterable[str]) -> bool:
    lines = chain.from_iterable(block.splitlines() for block in blocks)
    return any(line.split()[:1] == [function] for line in lines)


def _title(report: DoctorReport, found: Sequence[DoctorFinding], *, num_remedies: int) -> Iterator[str]:
    num_commands = sum(finding.check in _FIXES for finding in found)
    yield "#!/bin/sh"
    yield from _comment(f"{counted(num_remedies, 'remedy')} that `numapin doctor` has for {_machine(report)}.")
    yield from _comment(
        f"Commands to run: {num_commands}. Review them first. Those marked root run with sudo unless you are root. "
        "Nothing is deleted, stopped or restarted. The other remedies are comments: they belong in the job, the "
        "container or the firmware."
    )


def _machine(report: DoctorReport) -> str:
    return f"{report.host or 'a host without a name'} ({report.source})"


def _block(finding: DoctorFinding) -> Iterator[str]:
    """Yield one remedy: what was found as text, then the lines why it matters, how to undo it, and the command."""
    yield f"{finding.severity}: {finding.check}: {finding.what}"
    yield from _comment(f"Why: {finding.why}")
    fix = _FIXES.get(finding.check)
    if fix is None:
        yield from _not_run(finding.remedy)
        return
    yield f"# Remedy (root, lasts {fix.lasts}):"
    yield _whole(finding.remedy)
    yield from _comment(f"Undo: {fix.undo}")
    yield from fix.lines


def _of_loader(advice: Advice) -> Iterator[Iterator[str]]:
    """Yield the remedy for the loader that the user described, if there is one."""
    if advice.verdict is not None and advice.remedy is not None:
        yield chain([f"pinned memory: {advice.verdict}: {advice.reason}"], _not_run(advice.remedy))


def _not_run(remedy: str | None) -> Iterator[str]:
    yield "# Not run here:"
    yield _whole(remedy)


def _whole(remedy: str | None) -> str:
    """Return a remedy as one comment line, so that a command in it can be copied."""
    return f"#   {printable(remedy or '')}"


def _comment(text: str) -> Iterable[str]:
    """Return comment lines. The text cannot contain a line break, so it is never run as a command."""
    return textwrap.wrap(printable(text), _WIDTH, initial_indent="# ", subsequent_indent="#   ", break_on_hyphens=False)
