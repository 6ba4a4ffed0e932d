"""Built-in machines, for trying `plan` and `topo` without the hardware."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from numapin.errors import UsageError

PREFIX: Final = "example:"
_FOLDER: Final = Path(__file__).with_name("machines")


def example_names() -> tuple[str, ...]:
    """Return the names of all built-in machines, sorted, with their prefix."""
    return tuple(sorted(f"{PREFIX}{path.stem}" for path in _FOLDER.glob("*.json")))


def read_example(name: str) -> str:
    """Return the machine file of a built-in machine. Raises UsageError for an unknown name."""
    names = example_names()
    if name not in names:
        raise UsageError(f"--machine {name}: there is no built-in machine of that name", f"use {', '.join(names)}")
    return (_FOLDER / f"{name.removeprefix(PREFIX)}.json").read_text(encoding="utf-8")
