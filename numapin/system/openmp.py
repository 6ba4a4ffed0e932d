"""Environment variables that make OpenMP bind threads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

_NO_BINDING: Final = {
    "OMP_PROC_BIND": ("false",),
    "OMP_PLACES": (),
    "KMP_AFFINITY": ("disabled", "none"),
    "GOMP_CPU_AFFINITY": (),
}
"""Variables that bind threads, and the values that turn this off."""


def binding_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that bind threads, with their values."""
    binding = {name: environ[name] for name in _NO_BINDING if _binds(name, environ.get(name, ""))}
    if environ.get("OMP_PROC_BIND", "").strip().lower() == "false":
        for name in ("OMP_PLACES", "GOMP_CPU_AFFINITY"):  # places without binding
            binding.pop(name, None)
    return binding


def _binds(name: str, value: str) -> bool:
    words = value.lower().replace(" ", "").split(",")
    return bool(value) and set(words).isdisjoint(_NO_BINDING[name])
