"""What a use of numapin leaves for the garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Callable


def left_by(use: Callable[[], object]) -> list[str]:
    """Run something, and return the types of its garbage in cycles that are numapin's or of torch.cuda.

    Classes are left out: each is a cycle, and ctypes makes one for each size of an array.
    """
    use()  # what exists once per process
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        kept = use()
        gc.collect()
        found = [_origin(thing) for thing in gc.garbage if not isinstance(thing, type)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    del kept
    return sorted(origin for origin in found if origin.startswith(("numapin", "torch.cuda")))


def _origin(thing: object) -> str:
    """Return the type of an object; of a function or method, where it is defined."""
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{getattr(named, '__module__', '')}.{getattr(named, '__qualname__', '')}"
