"""Environment variables that bring `numapin run --dataloader numapin`, `trace` and `compare` into the ranks.

Processes that a rank starts inherit the variables on purpose: they run on the rank's CPUs and memory anyway, and the
hook thus reaches children of torch.multiprocessing, spawned workers, and the Python behind a wrapper such as
`nsys profile python train.py`. NUMAPIN_DATALOADER=torch, NUMAPIN_TRACE= and NUMAPIN_STEPS= in a child's environment
switch it off.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from numapin.rank.hook_env import HOOK, with_hook

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

VARIABLE: Final = "NUMAPIN_DATALOADER"
CHOICES: Final = ("torch", "numapin", "numapin-balanced")
TRACE_VARIABLE: Final = "NUMAPIN_TRACE"
STEPS_VARIABLE: Final = "NUMAPIN_STEPS"
REMEDY: Final = "put into the script: from numapin.data.install import install; install()"
TRACE_REMEDY: Final = "use torch.profiler in the script, and read its trace with: numapin trace --read FILE"
_OFF: Final = {VARIABLE: "torch", TRACE_VARIABLE: ""}
# A word of options: flags, then optionally one that takes the rest of the word, or the next word, as its value.
_OPTIONS: Final = re.compile(r"-(?P<flags>[^-cmWX]*)(?P<last>[cmWX]?)(?P<value>.*)", re.DOTALL)
_REFUSING: Final = {"I": "ignores PYTHONPATH", "E": "ignores PYTHONPATH", "S": "does not import sitecustomize"}


def environment(choice: str, environ: Mapping[str, str], *, trace: str = "") -> dict[str, str]:
    """Return the variables that give the ranks the loader `choice`, one of CHOICES, and the tracing hook.

    "torch" without a trace only switches off what an outer run switched on. Entries of PYTHONPATH stay as they are,
    behind ours.
    """
    wanted = {VARIABLE: choice, TRACE_VARIABLE: trace}
    changes = {name: value for name, value in wanted.items() if value != _OFF[name] or name in environ}
    if wanted != _OFF:
        changes["PYTHONPATH"] = with_hook(environ.get("PYTHONPATH", ""))
    return changes


def steps_environment(settings: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that let any launcher's ranks count their steps, as `settings` say."""
    return {STEPS_VARIABLE: settings, "PYTHONPATH": with_hook(environ.get("PYTHONPATH", ""))}


def refusal(command: Sequence[str]) -> str | None:
    """Return why the hook cannot run in this command, None if it can or if that is unknown."""
    if os.pathsep in HOOK:
        return f"PYTHONPATH cannot name {HOOK}, because it contains {os.pathsep!r}"
    if not is_python(command):
        return None
    refusing = next((flag for flag in _flags(command[1:]) if flag in _REFUSING), None)
    return f"{command[0]} -{refusing} {_REFUSING[refusing]}" if refusing else None


def is_python(command: Sequence[str]) -> bool:
    """Return whether the program is named like a Python interpreter. Other programs, e.g. profilers, may start one."""
    return "python" in Path(command[0]).name


def _flags(arguments: Sequence[str]) -> str:
    """Return the letters of an interpreter's own options: "uI" for `-u -W error -I train.py -E`."""
    flags, words = "", iter(arguments)
    for word in words:
        options = _OPTIONS.fullmatch(word)
        if options is None or word == "-":
            break  # the script
        flags += options["flags"]
        if options["last"] in ("c", "m"):
            break  # the program's own arguments follow
        if options["last"] and not options["value"]:
            next(words, None)
    return flags
