"""How `numapin run --dataloader numapin` and `numapin trace` get into the ranks: by their environment. Edge.

Comes in: the launcher's environment and the command that each rank becomes. Goes out: the variables that make Python
run `sitehook/sitecustomize.py` before the program, or the reason why that cannot work.

The environment is inherited, and that is meant: what a rank starts runs on the rank's CPUs and memory already, and
children of torch.multiprocessing, wrappers such as `nsys profile python train.py`, and spawned workers are reached as
the rank itself is. NUMAPIN_DATALOADER=torch and NUMAPIN_TRACE= in a child's environment switch it off there.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

VARIABLE: Final = "NUMAPIN_DATALOADER"
TRACE_VARIABLE: Final = "NUMAPIN_TRACE"
REMEDY: Final = "put into the script: from numapin.data.install import install; install()"
TRACE_REMEDY: Final = "use torch.profiler in the script, and read its trace with: numapin trace --read FILE"
_FOLDER: Final = str(Path(__file__).resolve().parent / "sitehook")
# A word of options: flags, then perhaps one that takes the rest of the word, or the next word, as its value.
_OPTIONS: Final = re.compile(r"-(?P<flags>[^-cmWX]*)(?P<last>[cmWX]?)(?P<value>.*)", re.DOTALL)
_REFUSING: Final = {"I": "reads no PYTHONPATH", "E": "reads no PYTHONPATH", "S": "runs no sitecustomize"}


def environment(choice: str, environ: Mapping[str, str], *, trace: str = "") -> dict[str, str]:
    """Return the variables that give the ranks the loader `choice`, "torch" or "numapin", and the tracing hook.

    Entries of PYTHONPATH stay as they are, behind ours. "torch" and no trace switch off what an outer run switched on.
    """
    wanted = {VARIABLE: choice if choice != "torch" else "", TRACE_VARIABLE: trace}
    off = {VARIABLE: "torch", TRACE_VARIABLE: ""}
    changes = {name: value or off[name] for name, value in wanted.items() if value or name in environ}
    if not any(wanted.values()):
        return changes
    path = environ.get("PYTHONPATH")  # an empty one means none, and "FOLDER:" would mean the current folder, too
    entries = [entry for entry in path.split(os.pathsep) if entry != _FOLDER] if path else []
    return {**changes, "PYTHONPATH": os.pathsep.join((_FOLDER, *entries))}


def refusal(command: Sequence[str]) -> str | None:
    """Return why the hook cannot run in this command, None where it can or where that cannot be known."""
    if os.pathsep in _FOLDER:
        return f"PYTHONPATH cannot name {_FOLDER}, which has {os.pathsep!r} in it"
    flags = _flags(command[1:]) if is_python(command) else ""
    refusing = next((flag for flag in flags if flag in _REFUSING), None)
    return f"{command[0]} -{refusing} {_REFUSING[refusing]}" if refusing else None


def is_python(command: Sequence[str]) -> bool:
    """Return whether the program is an interpreter, by its name; another program may start one, as profilers do."""
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
            break  # what follows is the program's
        if options["last"] and not options["value"]:
            next(words, None)
    return flags
