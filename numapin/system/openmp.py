"""Environment variables that make OpenMP bind threads. Pure.

Comes in: an environment. Goes out: the variables in it that bind.
"""

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
"""Variables that bind threads, and the values with which they do not."""


def binding_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that bind threads, with their values."""
    binding = {
        name: value
        for name, harmless in _NO_BINDING.items()
        if (value := environ.get(name)) and not set(value.lower().replace(" ", "").split(",")) & set(harmless)
    }
    if environ.get("OMP_PROC_BIND", "").strip().lower() == "false":
        binding.pop("OMP_PLACES", None)  # places that nothing is bound to
    return binding
