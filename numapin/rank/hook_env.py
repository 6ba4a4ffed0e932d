"""The folder of the hook on PYTHONPATH.

Each rank imports this before its program starts: the standard library only.
"""

import os

HOOK = os.path.join(os.path.dirname(os.path.abspath(__file__)), "hook")


def with_hook(path: str) -> str:
    """Return a PYTHONPATH that begins with the hook's folder, which it has once."""
    if not path:
        return HOOK  # "FOLDER:" would add the current folder
    return os.pathsep.join((HOOK, *(entry for entry in path.split(os.pathsep) if entry != HOOK)))
