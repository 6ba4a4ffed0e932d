"""Hand the CPUs of roles to the program of a rank. Edge.

Comes in: the roles of this rank as text, and the environment of its program. Goes out: the environment, with which
every Python in the program's process tree runs `rolehook/sitecustomize.py`; without roles, one that loads no hook of an
outer rank.

Each rank imports this before its program starts: the standard library only.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import MutableMapping
    from typing import Final

ROLES: Final = "NUMAPIN_ROLES"
HOOK: Final = os.path.join(os.path.dirname(os.path.abspath(__file__)), "rolehook")


def hand_roles(roles: str, environ: MutableMapping[str, str]) -> None:
    """Put the roles and the hook into the environment; without roles, take those of an outer rank out of it."""
    if not roles and ROLES not in environ:
        return
    others = _other_entries(environ.get("PYTHONPATH", ""))
    if roles:
        environ.update({ROLES: roles, "PYTHONPATH": os.pathsep.join([HOOK, *others])})
        return
    del environ[ROLES]
    environ.pop("PYTHONPATH", None)
    if others:
        environ["PYTHONPATH"] = os.pathsep.join(others)


def _other_entries(path: str) -> list[str]:
    """Return the entries of a PYTHONPATH without the hook."""
    return [entry for entry in path.split(os.pathsep) if entry != HOOK] if path else []
