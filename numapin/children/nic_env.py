"""The variables of --nic-env in a process whose GPU becomes known, or turns out to be another one. Edge.

Comes in: the variables for its GPU, and its environment, which may have those of the GPU that it, or its parent, had
before. Goes out: the environment with the new ones. A value that the program has set itself stays, and its library gets
none of ours, as in `plan/nics.py`. Standard library only.
"""

from __future__ import annotations

import json

from numapin.rank.become import BINDING

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping
    from typing import Final

NAMES: Final = "NUMAPIN_NIC_ENV"
"""The names of the variables of --nic-env, joined by colons, as in `plan/nics.py`, which costs more to import."""


def replace_nics(wanted: Mapping[str, str], environ: MutableMapping[str, str]) -> None:
    """Set the variables for this process's GPU instead of those for the GPU before.

    Call it while `environ` still has the binding to the GPU before.
    """
    for name in _ours(environ):
        del environ[name]
    environ.pop(NAMES, None)
    settings = {name: value for name, value in wanted.items() if name != NAMES}
    theirs = {_library(name) for name, value in settings.items() if environ.get(name, value) != value}
    kept = {name: value for name, value in settings.items() if _library(name) not in theirs}
    environ.update(kept)
    if kept:
        environ[NAMES] = ":".join(kept)


def _ours(environ: Mapping[str, str]) -> list[str]:
    """Return the names of the variables that still have the values for the GPU before."""
    names = [name for name in environ.get(NAMES, "").split(":") if name in environ]
    values = _values(environ)
    return [name for name in names if values is None or environ[name] in values]


def _values(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the values that variables for the GPU before may have. None: unknown, because an outer run set them."""
    try:
        nic, *_ = json.loads(environ[BINDING])["nics"]
    except (KeyError, ValueError, TypeError):
        return None
    return f"{nic}:1", "1"


def _library(name: str) -> str:
    return name.partition("_")[0]
