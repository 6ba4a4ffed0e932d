"""Read and set random number generators."""

from __future__ import annotations

import importlib
import random
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch

from numapin.data.resume.place import StateError

if TYPE_CHECKING:
    from collections.abc import Iterator

_ANOTHER: Final = "load another state, or start the epoch again"

ALL: Final = ("torch", "random", "numpy")
TORCH_ONLY: Final = ("torch",)


def is_generator(value: object) -> bool:
    """Return whether a value is a random number generator whose state can be read."""
    numpys = _numpy_random()
    kinds = (numpys.Generator, numpys.RandomState) if numpys is not None else ()
    return isinstance(value, (torch.Generator, random.Random, *kinds))


def state_of(generator: Any) -> Any:
    """Return a generator's state."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        version, numbers, gauss = generator.getstate()
        return [version, list(numbers), gauss]
    if hasattr(generator, "bit_generator"):
        return _plain(generator.bit_generator.state)
    return _plain(generator.get_state(legacy=False))


def set_state(generator: Any, state: Any) -> None:
    """Set a generator to a state from `state_of`. Raises StateError if the state is damaged."""
    try:
        if isinstance(generator, torch.Generator):
            generator.set_state(state)
        elif isinstance(generator, random.Random):
            version, numbers, gauss = state
            generator.setstate((version, tuple(numbers), gauss))
        elif hasattr(generator, "bit_generator"):
            generator.bit_generator.state = state
        else:
            generator.set_state(state)
    except Exception as error:  # what a damaged state makes numpy, torch and random raise differs
        kind = type(generator).__name__
        raise StateError(f"load_state_dict(): the state of a {kind} is damaged: {error}", _ANOTHER) from error


def process_states(libraries: tuple[str, ...] = ALL) -> dict[str, Any]:
    """Return the states of the process's own generators; numpy's only if it has been imported."""
    states: dict[str, Any] = {}
    for name in libraries:
        generator = _process_generator(name)
        if generator is not None:
            states[name] = state_of(generator)
    return states


def set_process(states: dict[str, Any]) -> None:
    """Set the process's own generators to states from `process_states`."""
    for name, state in states.items():
        generator = _process_generator(name)
        if generator is not None:
            set_state(generator, state)


@contextmanager
def preserved() -> Iterator[None]:
    """Leave the process's own generators as they were before."""
    before = process_states()
    try:
        yield
    finally:
        set_process(before)


def are_same(one: Any, other: Any) -> bool:
    """Return whether two states are equal."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and _are_same_dicts(one, other)
    if _is_nested(one):
        return len(one) == len(other) and all(map(are_same, one, other))
    return bool(one == other)


def _is_nested(state: Any) -> bool:
    """Return whether a state is a list of states."""
    return isinstance(state, list) and bool(state) and isinstance(state[0], torch.Tensor | dict | list)


def _are_same_dicts(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    return one.keys() == other.keys() and all(are_same(value, other[key]) for key, value in one.items())


def seeded_by(process: torch.Tensor) -> torch.Tensor:
    """Return the state of the generator that torch's RandomSampler makes when torch's own is in this state."""
    source = torch.Generator()
    source.set_state(process)
    seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=source).item())
    return torch.Generator().manual_seed(seed).get_state()


def _process_generator(name: str) -> Any:
    if name == "torch":
        return torch.default_generator
    if name == "random":
        return random._inst
    numpys = _numpy_random()
    return None if numpys is None else numpys.mtrand._rand


def _numpy_random() -> Any:
    """Return numpy.random if numpy is imported, which loads it, and so seeds it, at its first use only."""
    return importlib.import_module("numpy.random") if "numpy" in sys.modules else None


# Now, and not in the first epoch: a worker that another thread forks meanwhile inherits the lock of this import, and
# waits for it forever when torch seeds numpy.
_numpy_random()


def _plain(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return state.tolist() if hasattr(state, "tolist") else state
