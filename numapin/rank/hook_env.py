"""The environment variables that bring the hook, and its parts, into unmodified scripts.

Processes that a rank starts inherit the variables on purpose: they run on the rank's CPUs and memory anyway, and the
hook thus reaches children of torch.multiprocessing, spawned workers, and the Python behind a wrapper such as
`nsys profile python train.py`. NUMAPIN_DATALOADER=torch, NUMAPIN_TRACE= and NUMAPIN_STEPS= in a child's environment
switch it off.

Each rank imports this before its program starts: the standard library only, without re and typing.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Final

HOOK: Final = os.path.join(os.path.dirname(os.path.abspath(__file__)), "hook")
VARIABLE: Final = "NUMAPIN_DATALOADER"
CHOICES: Final = ("torch", "numapin", "numapin-balanced")
TRACE_VARIABLE: Final = "NUMAPIN_TRACE"
STEPS_VARIABLE: Final = "NUMAPIN_STEPS"
_TRACED_VARIABLE: Final = "NUMAPIN_TRACED"  # in a traced rank: the value of TRACE_VARIABLE that is for the rank's job
REMEDY: Final = "put into the script: from numapin.data.install import install; install()"
TRACE_REMEDY: Final = "use torch.profiler in the script, and read its trace with: numapin trace --read FILE"
_REFUSING: Final = {"I": "ignores PYTHONPATH", "E": "ignores PYTHONPATH", "S": "does not import sitecustomize"}


def with_hook(path: str) -> str:
    """Return a PYTHONPATH that begins with the hook's folder, which it has once; other entries stay as they are."""
    if not path:
        return HOOK  # "FOLDER:" would add the current folder
    return os.pathsep.join((HOOK, *(entry for entry in path.split(os.pathsep) if entry != HOOK)))


def environment(choice: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that give the ranks the loader `choice`, one of CHOICES.

    "torch" only switches off what an outer run switched on. The ranks of a run inside a traced rank are not traced:
    they have the same numbers.
    """
    trace, traced = environ.get(TRACE_VARIABLE), {}
    if trace:
        traced = {TRACE_VARIABLE: ""} if environ.get(_TRACED_VARIABLE) == trace else {_TRACED_VARIABLE: trace}
    if choice != "torch":
        return {VARIABLE: choice, "PYTHONPATH": with_hook(environ.get("PYTHONPATH", "")), **traced}
    return {VARIABLE: choice, **traced} if VARIABLE in environ else traced


def steps_environment(settings: str, environ: Mapping[str, str], *, variable: str = STEPS_VARIABLE) -> dict[str, str]:
    """Return the variables that let any launcher's ranks record their steps, as `settings` say.

    With TRACE_VARIABLE, the ranks trace them.
    """
    return {variable: settings, "PYTHONPATH": with_hook(environ.get("PYTHONPATH", ""))}


def is_python(command: Sequence[str]) -> bool:
    """Return whether the program is named like a Python interpreter. Other programs, e.g. profilers, may start one."""
    return "python" in os.path.basename(command[0])


def refusal(command: Sequence[str]) -> str | None:
    """Return why the hook cannot run in this command, None if it can or if that is unknown."""
    if os.pathsep in HOOK:
        return f"PYTHONPATH cannot name {HOOK}, because it contains {os.pathsep!r}"
    if not is_python(command):
        return None
    # The interpreter's own options, as it reads them: `-uI -W error -E train.py -S` has u, I, W and E.
    words = iter(command[1:])
    for word in words:
        if not word.startswith("-") or word == "-":
            return None  # the script
        for position, flag in enumerate(word[1:], 2):
            if flag in _REFUSING:
                return f"{command[0]} -{flag} {_REFUSING[flag]}"
            if flag in "cm":
                return None  # the program's own arguments follow
            if flag in "-WX":  # the rest of the word is its value, or the next word
                if flag != "-" and position == len(word):
                    next(words, None)
                break
    return None
