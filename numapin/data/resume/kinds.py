"""Describe torch's samplers, so that a state of other samplers is noticed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from numapin.data.resume.samplers import Samplers

_DECIDE: Final = ("replacement", "num_replicas", "shuffle", "seed")  # attributes of torch's samplers


def length_of(sized: Any) -> int | None:
    """Return the length of a sampler or a dataset; None if it has none."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None


def kind_of(samplers: Samplers) -> dict[str, Any] | None:
    """Return the name of torch's innermost sampler, and what decides its order and the size of its batches.

    None: a sampler is the user's own, whose indices are checked, or the number of samples is unknown.
    """
    if samplers.has_custom:
        return None
    outermost, innermost = samplers.all[0], samplers.all[-1]
    drawn = length_of(innermost)
    if drawn is None:
        return None
    source = getattr(innermost, "dataset", getattr(innermost, "data_source", None))
    kind = {"sampler": type(innermost).__name__, "samples": length_of(source) or drawn, "drawn": drawn}
    kind["batch_size"] = getattr(outermost, "batch_size", None)
    return kind | {name: getattr(innermost, name) for name in _DECIDE if hasattr(innermost, name)}


def words_for(kind: Any) -> str:
    """Return a kind in words."""
    if not isinstance(kind, dict):
        return "a sampler of your own"
    values = ", ".join(f"{name}={value}" for name, value in kind.items() if name != "sampler")
    return f"{kind.get('sampler')}({values})"
