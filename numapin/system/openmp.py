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
    binding = {}
    for name, unbound in _NO_BINDING.items():
        value = environ.get(name, "")
        if value and set(value.lower().replace(" ", "").split(",")).isdisjoint(unbound):
            binding[name] = value
    if environ.get("OMP_PROC_BIND", "").strip().lower() == "false":
        for name in ("OMP_PLACES", "GOMP_CPU_AFFINITY"):  # places without binding
            binding.pop(name, None)
    return binding
